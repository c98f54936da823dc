"""What a Flax module holds: parameters as its initialisers draw them, and a cache as arrays by name."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxattn.attention import Attention, Initializer, fold_path
from jaxattn.cache import Cache
from jaxattn.module_args import AXES, check_axis_names
from jaxattn.sharding import leaf_axes

PyTree = Any
Initializers = tuple[Initializer | None, Initializer | None, Initializer | None, Initializer | None]
GROUPS = ("query", "key", "value", "out", "query_ln", "key_ln", "heads")
INDEX, REFUSED = "cache_index", "cache_refused"


class AuxLoss(nnx.Variable):
    """A weighted auxiliary loss, sown by a layer under its name; `nnx.capture(model, AuxLoss)` collects it.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.modules import MultiHeadAttention
        >>> layer = MultiHeadAttention(num_heads=2, in_features=6, rngs=nnx.Rngs(0))
        >>> y, sown = nnx.capture(layer, AuxLoss)(jnp.ones((5, 6)))
        >>> sum(jnp.sum(loss) for loss in jax.tree.leaves(sown))  # this layer has none
        0
    """


def check_functions(attention_fn: Any, **promotions: Any) -> None:
    """Raise for functions of Flax's layer that this form cannot honour.

    Args:
        attention_fn: None or Flax's own.
        promotions: the same of qkv_promote_dtype, ...
    """
    if attention_fn is not None and attention_fn is not nnx.dot_product_attention:
        raise ValueError(
            f"attention_fn: got {attention_fn!r}, expected None or nnx.dot_product_attention: a layer runs "
            "this library's form alone. Fix: rotary=ja.Rotary(...) for rotary positions, variant=... for "
            "another mathematics of heads, engine=... for another way to run it."
        )
    for name, function in promotions.items():
        if function is not None and function is not promote_dtype:
            raise ValueError(
                f"{name}_promote_dtype: got {function!r}, expected None or Flax's promote_dtype. Fix: "
                "dtype=, the type to compute in, or cast the states and parameters."
            )


def draw(
    attn: Attention,
    rng: Array,
    dtype: DTypeLike,
    kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    out_kernel_init: Initializer | None = None,
    out_bias_init: Initializer | None = None,
) -> tuple[PyTree, dict[str, Any]]:
    """Parameters, and the boxes that initialisers put them in, as `nnx.with_partitioning` does.

    Args:
        attn, rng, dtype, kernel_init, bias_init: as in `Attention.init`.
        out_kernel_init, out_bias_init: those of `out`; None is the first two.

    Returns:
        The tree of arrays; and boxes by leaf: "kernel" and "bias" of every projection, "out/kernel" and
        "out/bias" where `out` has initialisers of its own (None where these make no box).
    """
    boxes: dict[str, Any] = {}

    def opened(init: Initializer | None, what: str) -> Initializer | None:
        def unboxed(rng, shape, dtype):
            assert init is not None
            made: Any = init(rng, shape, dtype)
            boxed = hasattr(made, "raw_value")
            boxes[what] = made if boxed else None
            return made.raw_value if boxed else made

        return None if init is None else unboxed

    params = attn.init(rng, dtype, opened(kernel_init, "kernel"), opened(bias_init, "bias"))
    out = params["out"]
    for name, init in (("kernel", out_kernel_init), ("bias", out_bias_init)):
        own = opened(init, f"out/{name}")
        if own is not None and name in out:
            old = out[name]
            flat = (old.size // old.shape[-1], old.shape[-1]) if name == "kernel" else old.shape
            out[name] = own(fold_path(rng, f"out/{name}"), flat, dtype).reshape(old.shape)
    return params, boxes


def of_path(table: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """What a table says of a leaf: of "out/kernel", else of every "kernel" of a projection.

    Example:
        >>> table = {"kernel": 1, "out/kernel": 2}
        >>> of_path(table, ("out", "kernel")), of_path(table, ("key", "kernel"))
        (2, 1)
    """
    if path[0] == "heads":
        return None
    return table.get("/".join(path), table.get(path[-1]))


def new_params(
    attn: Attention,
    rng: Array,
    dtype: DTypeLike,
    inits: Initializers,
    metadata: Mapping[str, Any],
    name_axes: bool,
) -> dict[str, Any]:
    """Parameters as attributes of an NNX module: dicts of `nnx.Param`, None where Flax has None.

    Args:
        attn, rng, dtype: as in `Attention.init`.
        inits: of kernels, biases, and the two of `out`.
        metadata: of each `nnx.Param`, by leaf as `of_path` reads it.
        name_axes: whether each also carries the names of its axes.
    """
    params, boxes = draw(attn, rng, dtype, *inits)
    check_axis_names(_sharding_names(params, boxes, metadata))
    axes = leaf_axes(attn) if name_axes else {}

    def node(path: tuple[str, ...], leaves: PyTree) -> Any:
        if isinstance(leaves, dict):
            nodes = {name: node((*path, name), leaf) for name, leaf in leaves.items()}
            if "kernel" in nodes and "bias" not in nodes and path[0] != "heads":
                nodes["bias"] = nnx.data(None)
            return nnx.Dict(nodes)
        about: dict[str, Any] = dict(of_path(metadata, path) or {})
        if name_axes:
            about["axes"] = functools.reduce(lambda tree, name: tree[name], path, axes)
        box = of_path(boxes, path)
        return nnx.Param(leaves if box is None else dataclasses.replace(box, raw_value=leaves), **about)

    return {name: node((name,), leaves) for name, leaves in params.items()}


def params_of(nodes: Mapping[str, Any]) -> PyTree:
    """The arrays alone, as the tree that `attn` takes: without None, and without what `nnx.capture` adds.

    Through `vars`, as `nnx.tabulate` replaces every method of `nnx.Dict` by one that calls it.
    """
    kinds = nnx.Variable, nnx.Dict
    return {
        name: params_of(vars(node)) if isinstance(node, nnx.Dict) else node[...]
        for name, node in nodes.items()
        if isinstance(node, kinds)
    }


def _sharding_names(
    params: PyTree, boxes: Mapping[str, Any], metadata: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """The names of axes that boxes and metadata give to the leaves of the projections."""
    found = {}
    for path in AXES:
        group, leaf = path.split("/")
        if leaf in params.get(group, {}):
            box = of_path(boxes, (group, leaf))
            about = {**(of_path(metadata, (group, leaf)) or {}), **({} if box is None else box.metadata)}
            names: Any = about.get("out_sharding")
            if isinstance(names, (tuple, list, PartitionSpec)):
                found[path] = tuple(names)
    return found


@functools.lru_cache(maxsize=128)
def cache_shape(attn: Attention, batch: tuple[int, ...], size: int, dtype: DTypeLike) -> Cache:
    """A cache of shapes and types alone, with its static facts."""
    return jax.eval_shape(lambda: attn.empty_cache(batch, size, dtype=dtype))


def cache_arrays(cache: Cache) -> dict[str, Array]:
    """A cache as plain arrays by name; keys, values and index have the names that Flax gives them.

    `cached_key`, `cached_value`, `cache_index`, then `cached_valid`, `cached_position`, `cache_refused`
    and what a variant keeps of each row, such as `cached_pre_0_down`. Plain arrays pass through every way
    in which Flax takes state out and in.
    """
    rows, _ = jax.tree_util.tree_flatten_with_path(cache.side)
    return {_name(path): leaf for path, leaf in rows} | {INDEX: cache.count, REFUSED: cache.refused}


def cache_of(shape: Cache, arrays: Mapping[str, Array | None], owner: tuple[str, str] | None = None) -> Cache:
    """The cache that `cache_arrays` took apart.

    Args:
        shape: what `cache_shape` says of it.
        arrays: by name; others than the cache's are not looked at.
        owner: the attention that it belongs to, where that is known to the store.

    Raises:
        ValueError: when there is none, or some are missing.
    """
    names = cache_arrays(shape)
    missing = [name for name in names if arrays.get(name) is None]
    if missing:
        raise ValueError(
            f"cache: {', '.join(missing)} missing of {', '.join(names)}; a cache of Flax's own layer lacks "
            "them too. Fix: an empty cache of this layer, and the prompt again."
        )
    rows, tree = jax.tree_util.tree_flatten_with_path(shape.side)
    side = jax.tree.unflatten(tree, [arrays[_name(path)] for path, _ in rows])
    return dataclasses.replace(
        shape, side=side, count=arrays[INDEX], refused=arrays[REFUSED], owner=owner or shape.owner
    )


def new_cache(
    attn: Attention, batch: tuple[int, ...], size: int, dtype: DTypeLike
) -> dict[str, nnx.Cache[Any]]:
    """An empty cache as variables of an NNX module; one of them says whose it is."""
    empty = attn.empty_cache(batch, size, dtype=dtype)
    variables = {}
    for name, value in cache_arrays(empty).items():
        about: dict[str, Any] = {"owner": empty.owner} if name == REFUSED else {}
        variables[name] = nnx.Cache(value, **about)
    return variables


def held_cache(attn: Attention, attributes: Mapping[str, Any]) -> Cache:
    """The cache that an NNX module holds among its attributes."""
    key = attributes["cached_key"]
    *batch, size, _, _ = key.shape
    shape = cache_shape(attn, tuple(batch), size, key.dtype)
    variables = {name: attributes.get(name) for name in cache_arrays(shape)}
    arrays = {name: x if x is None else x.get_value() for name, x in variables.items()}
    refused = variables[REFUSED]
    return cache_of(shape, arrays, None if refused is None else refused.get_metadata("owner", None))


def _name(path: tuple[Any, ...]) -> str:
    """The name of an array of a key side, as cached_key or cached_pre_0_down."""
    return "_".join(["cached", *(str(getattr(part, "name", getattr(part, "idx", ""))) for part in path)])
