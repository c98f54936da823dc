"""What a parameter tree of an attention must be: names, shapes, axes; and how a tree differs from it."""

import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any

# The projections' leaves, each with the names of its axes.
CORE_AXES = {
    "query/kernel": "m hl d",
    "query/bias": "hl d",
    "key/kernel": "m hK d",
    "key/bias": "hK d",
    "value/kernel": "m hV v",
    "value/bias": "hV v",
    "out/kernel": "hv v m",
    "out/bias": "m",
    "query_ln/scale": "d",
    "key_ln/scale": "d",
}
# Names by which other libraries know the parts of an attention.
OF_OTHERS = frozenset(
    "q_proj k_proj v_proj o_proj out_proj q_lin k_lin v_lin out_lin qkv qkv_proj c_attn c_proj Wqkv dense "
    "query_key_value in_proj_weight in_proj_bias weight self_attn query_proj key_proj value_proj output_proj "
    "attention attn self output".split()
)


class Expected(NamedTuple):
    """The tree that an attention takes.

    Attributes:
        structure: of the tree.
        paths: of its leaves, in the order of the structure.
        shapes: of each leaf by path.
    """

    structure: Any
    paths: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]


@functools.lru_cache(maxsize=256)
def expected(attn: Any) -> Expected:
    """What `attn.init` makes, by shapes alone."""
    tree = jax.eval_shape(attn.init, jax.random.key(0))
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    shapes = {"/".join(part.key for part in path): tuple(leaf.shape) for path, leaf in found}
    return Expected(structure, tuple(shapes), shapes)


def check_params(attn: Any, params: PyTree, allow: tuple[str, ...] = ()) -> None:
    """Raise unless `params` is a tree of this attention: every leaf there, of its shape, and no other.

    Shapes are known without values, so the check costs nothing in a compiled program.

    Args:
        attn: what `attention` made; this is also its method.
        params: the tree, nested dicts of arrays by name; leaves that are None count as absent.
        allow: groups or leaves of your own beside it, by path ("lora", "query/lora_a"), with all below them;
            `attention(..., allow=...)` states them once for every call.

    Raises:
        TypeError: for what is no mapping.
        ValueError: listing every difference by path, with what came and what was expected.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> made = attention(HeadSpec(model=8, heads=4)).init(jax.random.key(0))
        >>> check_params(attention(HeadSpec(model=8, heads=4)), made)
        >>> check_params(attention(HeadSpec(model=8, heads=4, kv_heads=2)), made)
        Traceback (most recent call last):
        ValueError: params: 2 differences from the tree of attention(HeadSpec(model=8, heads=4, kv_heads=2)):
          key/kernel: axis hK is 4, expected 2 (axes "m hK d", shape (8, 4, 2))
          value/kernel: axis hV is 4, expected 2 (axes "m hV v", shape (8, 4, 2))
        Likely: the tree has 4 key heads, as HeadSpec(kv_heads=4) makes.
        Fix: the spec and transforms that the parameters were made for, or params = attn.init(...).
    """
    want = expected(attn)
    allow = (*attn.allow, *allow)
    if not allow and _same(want, params):
        return
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params: got a {type(params).__name__}, expected nested dicts of arrays with the groups "
            f"{', '.join(_groups(want.shapes))}. Fix: the tree that init makes."
        )
    allowed = lambda path: any(path == a or path.startswith(f"{a}/") for a in allow)
    got = {path: leaf for path, leaf in _leaves(params) if not allowed(path)}
    wrong = _differences(attn, want.shapes, got)
    if not isinstance(params.get("heads"), Mapping):
        wrong.append(
            f"heads: got the groups {', '.join(map(str, params))}, expected `heads` among them, the leaves "
            f"of the "
            "transforms ({} where there are none)"
        )
    if wrong:
        count = "1 difference" if len(wrong) == 1 else f"{len(wrong)} differences"
        raise ValueError(
            f"params: {count} from the tree of {attn!r}:\n  " + "\n  ".join(wrong) + "\n"
            f"{_likely(want.shapes, got)}Fix: the spec and transforms that the parameters were made for, or "
            "params = attn.init(...)."
        )


def _same(want: Expected, params: PyTree) -> bool:
    """The quick answer for a plain dict of arrays."""
    leaves, structure = jax.tree.flatten(params)
    return structure == want.structure and all(
        getattr(leaf, "shape", None) == shape and jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating)
        for leaf, shape in zip(leaves, want.shapes.values(), strict=True)
    )


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; None is no leaf, but for those of transforms, who look for theirs by name."""
    if isinstance(tree, Mapping):
        for name, below in tree.items():
            yield from _leaves(below, f"{path}/{name}" if path else str(name))
    elif tree is not None or path.startswith("heads/"):
        yield path, tree


def _groups(paths: Any) -> list[str]:
    return list(dict.fromkeys([*(path.split("/")[0] for path in paths), "heads"]))


def _differences(attn: Any, want: dict[str, tuple[int, ...]], got: dict[str, Any]) -> list[str]:
    wrong = []
    for path in [*want, *(path for path in got if path not in want)]:
        if path not in got:
            wrong.append(f"{path}: missing, expected shape {want[path]}{_axes_text(attn, path)}")
        elif path not in want:
            near = difflib.get_close_matches(path, [p for p in want if p not in got], n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            shape = getattr(got[path], "shape", None)
            wrong.append(
                f"{path}: unknown, got {_kind(got[path]) if shape is None else f'shape {shape}'}{hint}"
            )
        elif (text := _leaf_difference(attn, path, want[path], got[path])) is not None:
            wrong.append(f"{path}: {text}")
    return wrong


def _leaf_difference(attn: Any, path: str, want: tuple[int, ...], leaf: Any) -> str | None:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return f"got {_kind(leaf)}, expected an array of shape {want}"
    shape, names = tuple(shape), _axes_of(attn, path)
    if len(shape) != len(want):
        return f"has {len(shape)} axes, shape {shape}, expected {len(want)}: {want}{_axes_text(attn, path)}"
    if shape != want:
        named = zip(names or map(str, range(len(want))), shape, want, strict=True)
        axes = "; ".join(f"axis {name} is {a}, expected {b}" for name, a, b in named if a != b)
        return f'{axes} (axes "{" ".join(names)}", shape {shape})' if names else f"{axes} (shape {shape})"
    if not jnp.issubdtype(dtype, jnp.floating):
        return f"dtype is {dtype}, expected a floating type"
    return None


def _kind(leaf: Any) -> str:
    return f"a {type(leaf).__name__}"


def declared_axes(attn: Any) -> dict[str, str]:
    """The axis names of every leaf that projections and transforms declare, by path."""
    axes = dict(CORE_AXES)
    for name, declaration in attn.declare().items():
        axes |= declaration.core | dict(_leaves(declaration.axes, f"heads/{name}"))
    return axes


def _axes_of(attn: Any, path: str) -> list[str]:
    return declared_axes(attn).get(path, "").split()


def _axes_text(attn: Any, path: str) -> str:
    names = _axes_of(attn, path)
    return f' (axes "{" ".join(names)}")' if names else ""


def _likely(want: dict[str, tuple[int, ...]], got: dict[str, Any]) -> str:
    """The likely cause, where the differences tell one."""
    words = {word for path in got for word in path.replace(".", "/").split("/")}
    links = {path.split("/")[1] for path in got if path.startswith("heads/")}
    own = {path.split("/")[1] for path in want if path.startswith("heads/")}
    core = all(path in got for path in want if not path.startswith("heads/"))

    def shape_of(path: str) -> tuple[int, ...]:
        return tuple(getattr(got.get(path), "shape", ()))

    cause = None
    if got and all(path.startswith("params/") for path in got):
        cause = "these are Flax variables; their tree is variables['params']"
    elif words & OF_OTHERS and not core:
        cause = (
            f"these are names of another library ({', '.join(sorted(words & OF_OTHERS))}); here the groups "
            "are query, key, value, with kernel [m, h, d], and out, with kernel [h, v, m]"
        )
    elif links - own:
        cause = f"the tree holds the leaves of another transform ({', '.join(sorted(links - own))})"
    elif own - links and core:
        cause = (
            f"the tree holds no leaves of {', '.join(sorted(own - links))}: parameters of plain multi-head "
            "attention, which this attention cannot take as they are"
        )
    elif any(len(shape_of(p)) == 2 < len(want[p]) for p in want if p in CORE_AXES and p in got):
        cause = (
            "a kernel is flat, [m, (h d)]; einops.rearrange(kernel, 'm (h d) -> m h d', h=...) names its "
            "heads, and out is '(h v) m -> h v m'"
        )
    elif len(shape_of("query/kernel")) == 3 and shape_of("query/kernel") != want["query/kernel"]:
        m, heads, width = shape_of("query/kernel")
        cause = f"the tree has {heads} heads of width {width} for states of width {m}"
    elif len(shape_of("key/kernel")) == 3 and shape_of("key/kernel") != want["key/kernel"]:
        heads = shape_of("key/kernel")[1]
        cause = f"the tree has {heads} key heads, as HeadSpec(kv_heads={heads}) makes"
    elif any(path.endswith("/bias") for path in set(got) ^ set(want) if path in CORE_AXES):
        missing = "out" if any(p.endswith("/bias") for p in set(want) - set(got)) else ""
        cause = f"the tree was made with{missing} biases (HeadSpec.use_bias)"
    elif any("_ln/" in path for path in set(got) ^ set(want)):
        missing = "out" if any("_ln/" in p for p in set(want) - set(got)) else ""
        cause = f"the tree was made with{missing} head norms (HeadSpec.qk_norm)"
    elif set(want) <= set(got):
        extra = sorted({path.split("/")[0] for path in set(got) - set(want)})
        cause = f"leaves of your own; attention(..., allow={tuple(extra)!r}) takes trees that hold them"
    return "" if cause is None else f"Likely: {cause}.\n"
