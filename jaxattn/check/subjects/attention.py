"""What is checked: anyone's attention behind one signature, with what it declares it can do.

A `Call` asks for attention of given heads. An adapter turns it into the call of a library, and the answer
back into [b, q, h, v]; it adds no mathematics.
"""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja

Feature = Literal[
    "mask",
    "head_mask",
    "causal",
    "bias",
    "gqa",
    "d_v",
    "cross",
    "dropout",
    "float64",
    "tracing",
    "eager",
]
FEATURES: tuple[Feature, ...] = (
    "mask", "head_mask", "causal", "bias", "gqa", "d_v", "cross", "dropout", "float64", "tracing", "eager",
)  # fmt: skip
Dropout = tuple[float, Array | None]  # rate, and the PRNG key that draws it
KEYWORDS = {"mask": "mask", "causal": "is_causal", "bias": "bias"}


class Call(NamedTuple):
    """One call of an attention.

    Attributes:
        query: [b, q, h, d]; key: [b, k, g, d]; value: [b, k, g, v], with g key heads, g = h but for GQA.
        mask: bool [b or 1, h or 1, q or 1, k], True = visible; None shows all.
        causal: row i sees keys up to i; the mask holds as well.
        bias: [b, h, q, k], added to the scaled scores.
        dropout: rate, and the PRNG key that draws it; without a rate or without a key it is evaluation.
    """

    query: Array
    key: Array
    value: Array
    mask: Array | None = None
    causal: bool = False
    bias: Array | None = None
    dropout: Dropout | None = None


class Checked(Protocol):
    """What every kind of subject says of itself; the fields are those of `Subject`."""

    @property
    def name(self) -> str: ...
    @property
    def supports(self) -> frozenset[str]: ...
    @property
    def plain(self) -> bool: ...
    @property
    def version(self) -> str: ...
    @property
    def least_heads(self) -> int: ...
    @property
    def least_width(self) -> int: ...


class Subject(NamedTuple):
    """An attention to check.

    Attributes:
        name: as a verdict calls it.
        attend: from a call to [b, q, h, v].
        supports: what it declares; a call that needs more must raise. "tracing": JAX can transform it;
            "eager": it runs outside of jit too.
        plain: whether it is softmax(q k / sqrt(d)) v head by head; a variant that mixes heads is not, and
            laws about values and single heads do not apply to it.
        version: of the library.
        least_heads, least_width: sizes with fewer or narrower heads are left out.
    """

    name: str
    attend: Callable[[Call], Array]
    supports: frozenset[str] = frozenset(FEATURES)
    plain: bool = True
    version: str = ""
    least_heads: int = 1
    least_width: int = 1


def of_function(
    function: Callable[..., Array],
    *,
    layout: str = "bqhd",
    supports: tuple[str, ...] | None = None,
    keywords: dict[str, str] | None = None,
    name: str | None = None,
) -> Subject:
    """A function of heads, `function(query, key, value, mask=..., is_causal=..., bias=...)`.

    Args:
        function: called with three arrays and, where a call needs them, keywords.
        layout: order of its axes: b, q (time), h, d; for example "bhqd", or "qhd" without a batch.
        supports: of `FEATURES`; None reads mask, causal and bias off its keywords and assumes the rest, but
            for dropout and bias where there is no keyword.
        keywords: what it calls "mask", "causal" and "bias".

    Raises:
        ValueError: for a layout or a feature that is not known.

    Example:
        >>> from jaxattn.check import of_function
        >>> subject = of_function(lambda query, key, value: value, layout="bqhd", name="nothing")
        >>> sorted(subject.supports)
        ['cross', 'd_v', 'eager', 'float64', 'gqa', 'tracing']
    """
    if sorted(layout.replace("b", "")) != sorted("qhd") or len(set(layout)) != len(layout):
        raise ValueError(
            f"layout: got {layout!r}, expected an order of b, q, h and d, b optional. Fix: 'bqhd' or 'bhqd'."
        )
    called = dict(KEYWORDS, **(keywords or {}))
    takes = keywords_of(function)
    if supports is None:
        none = {f for f in ("mask", "causal", "bias") if called[f] not in takes} | {"dropout"}
        none |= {"head_mask"} if "mask" in none else set()
        supports = tuple(f for f in FEATURES if f not in none)
    for feature in supports:
        if feature not in FEATURES:
            raise ValueError(f"supports: got {feature!r}, expected some of {', '.join(FEATURES)}.")
    order, batched = " ".join(layout), "b" in layout
    own = f"b q h d -> {order}" if batched else f"q h d -> {order}"

    def one(query: Array, key: Array, value: Array, more: dict[str, Any]) -> Array:
        sides = (einops.rearrange(x, own) for x in (query, key, value))
        return einops.rearrange(function(*sides, **more), " -> ".join(reversed(own.split(" -> "))))

    def attend(call: Call) -> Array:
        if call.dropout is not None:
            raise NotImplementedError("dropout: this adapter of a plain function has no way to ask for it.")
        more: dict[str, Any] = {} if call.mask is None else {called["mask"]: call.mask}
        more |= {called["causal"]: True} if call.causal else {}
        more |= {} if call.bias is None else {called["bias"]: call.bias}
        sides = call.query, call.key, call.value
        if batched:
            return one(*sides, more)
        arrays = {k: v for k, v in more.items() if v is not True}
        flags = {k: v for k, v in more.items() if v is True}
        size = len(call.query)
        rows = [
            {k: jnp.broadcast_to(v, (size, *v.shape[1:]))[b] for k, v in arrays.items()} for b in range(size)
        ]
        query, key, value = sides
        return jnp.stack([one(query[b], key[b], value[b], rows[b] | flags) for b in range(size)])

    title = name or getattr(function, "__qualname__", repr(function))
    return Subject(title, attend, frozenset(supports))


def keywords_of(function: Callable) -> set[str]:
    """The names that a function can be called with."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set(KEYWORDS.values())
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name for p in parameters} | (set(KEYWORDS.values()) if anything else set())


def version_of(package: str) -> str:
    """A package and its installed version."""
    return f"{package} {importlib.metadata.version(package)}"


def states(x: Array) -> Array:
    """Heads side by side in one row."""
    return einops.rearrange(x, "b t h d -> b t (h d)")


def drawn(attn: ja.Attention, dtype: Any) -> Any:
    """Parameters of normal numbers, without a program that draws them."""
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: attn.init(jax.random.key(0), dtype)))
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) / max((1, *x.shape[:1])) ** 0.5, x.dtype)
    return tree.unflatten(list(map(draw, leaves)))


def of_attention(
    name: str,
    attn_of: Callable[[ja.HeadSpec], ja.Attention],
    engine: str = "dense",
    least_heads: int = 1,
    least_width: int = 1,
) -> Subject:
    """An attention of this library whose states are the merged heads of a call; its parameters are redrawn.

    It is checked as a whole sublayer: outputs are states, cut into as many heads.
    """

    @functools.cache
    def built(heads: int, width: int, v: int, dtype: Any) -> tuple[Callable[..., Array], Any]:
        spec = ja.HeadSpec(model=heads * width, heads=heads, in_v=heads * v, out=heads * v, use_bias=False)
        with jax.ensure_compile_time_eval():  # kept, so it must not belong to a trace
            attn = attn_of(spec)
            params = drawn(attn, dtype)
        apply = functools.partial(_apply, attn, engine)  # an engine's loop compiles once, not each time
        return jax.jit(apply, static_argnames="causal"), params

    def attend(call: Call) -> Array:
        if call.key.shape[2] != call.query.shape[2]:
            raise NotImplementedError("gqa: states have one number of heads here.")
        if call.bias is not None or call.dropout is not None:
            raise NotImplementedError("bias, dropout: not asked of a variant here.")
        heads, width, v = *call.query.shape[2:], call.value.shape[3]
        apply, params = built(heads, width, v, call.query.dtype)
        return apply(params, call.query, call.key, call.value, call.mask, causal=call.causal)

    supports = frozenset({"mask", "causal", "cross", "d_v", "float64", "tracing"})
    return Subject(name, attend, supports, False, version_of("jaxattn"), least_heads, least_width)


def _apply(attn: ja.Attention, engine: str, params: Any, query, key, value, mask, *, causal: bool) -> Array:
    """Merged heads through an attention of ours, and its states cut into as many heads again."""
    rule = ja.causal() if causal else ja.everything()
    if mask is not None:
        real = jnp.broadcast_to(mask.any((1, 2)), key.shape[:2])
        rule = rule & ja.masks.from_flax(mask) & ja.padding(real)
    y, _ = attn.apply(params, states(query), (states(key), states(value)), rule, engine=engine)
    return einops.rearrange(y, "b q (h v) -> b q h v", h=query.shape[2])
