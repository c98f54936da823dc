"""What is checked: anyone's attention behind one signature, with what it declares it can do.

A `Call` asks for attention of given heads. An adapter turns it into the call of a library, and the answer
back into [b, q, h, v]; it adds no mathematics.
"""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja

Feature = Literal[
    "mask", "head_mask", "causal", "bias", "gqa", "d_v", "cross", "dropout", "float64", "tracing"
]
FEATURES: tuple[Feature, ...] = (
    "mask", "head_mask", "causal", "bias", "gqa", "d_v", "cross", "dropout", "float64", "tracing",
)  # fmt: skip
KEYWORDS = {"mask": "mask", "causal": "is_causal", "bias": "bias"}


class Call(NamedTuple):
    """One call of an attention.

    Attributes:
        query: [b, q, h, d]; key: [b, k, g, d]; value: [b, k, g, v], with g key heads, g = h but for GQA.
        mask: bool [b or 1, h or 1, q or 1, k], True = visible; None shows all.
        causal: row i sees keys up to i; the mask holds as well.
        bias: [b, h, q, k], added to the scaled scores.
        dropout: rate, and what draws it; None is evaluation.
    """

    query: Array
    key: Array
    value: Array
    mask: Array | None = None
    causal: bool = False
    bias: Array | None = None
    dropout: tuple[float, Array] | None = None


class Subject(NamedTuple):
    """An attention to check.

    Attributes:
        name: as a verdict calls it.
        attend: from a call to [b, q, h, v].
        supports: what it declares; a call that needs more must raise.
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
        ['cross', 'd_v', 'float64', 'gqa', 'tracing']
    """
    if sorted(layout.replace("b", "")) != sorted("qhd") or len(set(layout)) != len(layout):
        raise ValueError(
            f"layout: got {layout!r}, expected an order of b, q, h and d, b optional. Fix: 'bqhd' or 'bhqd'."
        )
    called = dict(KEYWORDS, **(keywords or {}))
    takes = _keywords(function)
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


def _keywords(function: Callable) -> set[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set(KEYWORDS.values())
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name for p in parameters} | (set(KEYWORDS.values()) if anything else set())


def jax_nn() -> Subject:
    """`jax.nn.dot_product_attention`; it documents values as wide as keys."""
    supports = tuple(f for f in FEATURES if f not in ("d_v", "dropout"))
    subject = of_function(jax.nn.dot_product_attention, supports=supports)
    return subject._replace(name="jax.nn", version=f"jax {jax.__version__}")


def _identity(m: int, heads: int, dtype: Any) -> Array:
    """A kernel [m, h, d] that only splits states into heads."""
    return jnp.eye(m, dtype=dtype).reshape(m, heads, -1)


def _states(x: Array) -> Array:
    return einops.rearrange(x, "b t h d -> b t (h d)")


def flax_nnx() -> Subject:
    """`flax.nnx.MultiHeadAttention` whose four projections only split and merge heads."""
    return _of_nnx("flax.nnx", lambda: importlib.import_module("flax.nnx").MultiHeadAttention)


def ours() -> Subject:
    """`jaxattn.MultiHeadAttention`, asked as Flax's is."""
    subject = _of_nnx("jaxattn", lambda: ja.MultiHeadAttention)
    return subject._replace(version=f"jaxattn {importlib.metadata.version('jaxattn')}")


def _of_nnx(name: str, kind: Callable[[], Any]) -> Subject:
    from flax import nnx  # the one other place is modules.py; a check of Flax needs Flax

    def attend(call: Call) -> Array:
        if call.bias is not None:
            raise NotImplementedError("bias: the module takes none.")
        heads, kv_heads = call.query.shape[2], call.key.shape[2]
        m, m_kv, dtype = heads * call.query.shape[3], kv_heads * call.key.shape[3], call.query.dtype
        if call.value.shape[3] != call.key.shape[3]:
            raise NotImplementedError("d_v: the module gives values the width of keys.")
        rate, dropout_key = call.dropout or (0.0, None)
        layer = kind()(
            num_heads=heads, in_features=m, qkv_features=m, out_features=m, num_kv_heads=kv_heads,
            in_kv_features=m_kv, dropout_rate=rate, broadcast_dropout=False, use_bias=False,
            deterministic=dropout_key is None, decode=False, param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(0),
        )  # fmt: skip
        layer.query.kernel = nnx.Param(_identity(m, heads, dtype))
        layer.key.kernel = nnx.Param(_identity(m_kv, kv_heads, dtype))
        layer.value.kernel = nnx.Param(_identity(m_kv, kv_heads, dtype))
        layer.out.kernel = nnx.Param(_identity(m, heads, dtype).transpose(1, 2, 0))
        more = {} if dropout_key is None else {"rngs": nnx.Rngs(dropout=dropout_key)}
        out = layer(
            *(_states(x) for x in (call.query, call.key, call.value)),
            mask=call.mask, is_causal=call.causal, **more,
        )  # fmt: skip
        return einops.rearrange(out, "b q (h v) -> b q h v", h=heads)

    supports = frozenset(FEATURES) - {"bias", "d_v"}
    return Subject(name, attend, supports, version=f"flax {importlib.metadata.version('flax')}")


def flax_linen() -> Subject:
    """`flax.linen.MultiHeadDotProductAttention`, likewise."""
    import flax.linen as nn

    def attend(call: Call) -> Array:
        if call.bias is not None or call.causal:
            raise NotImplementedError("bias, causal: the module takes neither; a mask can be causal.")
        heads, width, dtype = *call.query.shape[2:], call.query.dtype
        if call.key.shape[2] != heads or call.value.shape[3] != width:
            raise NotImplementedError("gqa, d_v: the module has one number of heads and one width.")
        rate, dropout_key = call.dropout or (0.0, None)
        layer = nn.MultiHeadDotProductAttention(
            num_heads=heads, dropout_rate=rate, broadcast_dropout=False, use_bias=False, dtype=dtype,
            deterministic=dropout_key is None,
        )  # fmt: skip
        kernel = _identity(heads * width, heads, dtype)
        params = {name: {"kernel": kernel} for name in ("query", "key", "value")}
        params["out"] = {"kernel": kernel.transpose(1, 2, 0)}
        states = (_states(x) for x in (call.query, call.key, call.value))
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        out: Any = layer.apply({"params": params}, *states, mask=call.mask, rngs=rngs)
        return einops.rearrange(out, "b q (h v) -> b q h v", h=heads)

    supports = frozenset(FEATURES) - {"bias", "d_v", "gqa", "causal"}
    return Subject("flax.linen", attend, supports, version=f"flax {importlib.metadata.version('flax')}")


def equinox() -> Subject:
    """`equinox.nn.MultiheadAttention`, example by example, likewise."""
    import equinox as eqx  # pyright: ignore[reportMissingImports]  (only where installed)

    def attend(call: Call) -> Array:
        if call.bias is not None or call.causal or call.dropout is not None:
            raise NotImplementedError("bias, causal, dropout: not asked of this module here.")
        heads, width, dtype = *call.query.shape[2:], call.query.dtype
        if call.key.shape[2] != heads:
            raise NotImplementedError("gqa: the module has one number of heads.")
        v = call.value.shape[3]
        layer = eqx.nn.MultiheadAttention(
            heads, heads * width, value_size=heads * v, output_size=heads * v, vo_size=v, dtype=dtype,
            key=jax.random.key(0),
        )  # fmt: skip
        eye = lambda n: jnp.eye(n, dtype=dtype)
        where = lambda layer: [
            p.weight for p in (layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj)
        ]
        layer = eqx.tree_at(where, layer, [eye(heads * width)] * 2 + [eye(heads * v)] * 2)
        shape = (len(call.query), heads, call.query.shape[1], call.key.shape[1])
        mask = jnp.ones(shape, bool) if call.mask is None else jnp.broadcast_to(call.mask, shape)
        query, key, value = (_states(x) for x in (call.query, call.key, call.value))
        out = jax.vmap(lambda q, k, v, mask: layer(q, k, v, mask=mask))(query, key, value, mask)
        return einops.rearrange(out, "b q (h v) -> b q h v", h=heads)

    supports = frozenset({"mask", "head_mask", "d_v", "cross", "float64", "tracing"})
    return Subject("equinox", attend, supports, version=f"equinox {importlib.metadata.version('equinox')}")


def torch_sdpa() -> Subject:
    """`torch.nn.functional.scaled_dot_product_attention`, by values alone: JAX cannot trace it."""
    import torch  # pyright: ignore[reportMissingImports]  (only where installed)

    def tensor(x: Any) -> Any:
        half = jnp.asarray(x).dtype == jnp.bfloat16
        out = torch.from_numpy(np.array(x, np.float32 if half else None))
        return out.to(torch.bfloat16) if half else out

    def attend(call: Call) -> Array:
        heads, k = call.query.shape[2], call.key.shape[1]
        query, key, value = (tensor(x).transpose(1, 2) for x in call[:3])
        shape = (len(call.query), heads, call.query.shape[1], k)
        mask = None if call.mask is None else tensor(np.broadcast_to(np.asarray(call.mask), shape))
        if call.bias is not None:
            mask = tensor(call.bias)
        rate, dropout_key = call.dropout or (0.0, None)
        if dropout_key is not None:
            torch.manual_seed(int(jax.random.bits(dropout_key)))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=rate, is_causal=call.causal,
            enable_gqa=key.shape[1] != heads,
        )  # fmt: skip
        return jnp.asarray(out.transpose(1, 2).to(torch.float64).numpy())

    supports = frozenset(FEATURES) - {"tracing"}
    return Subject("torch.sdpa", attend, supports, version=f"torch {torch.__version__}")


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
    def built(heads: int, width: int, v: int, dtype: Any) -> tuple[ja.Attention, Any]:
        spec = ja.HeadSpec(model=heads * width, heads=heads, in_v=heads * v, out=heads * v, use_bias=False)
        with jax.ensure_compile_time_eval():  # kept, so it must not belong to a trace
            attn = attn_of(spec)
            leaves, tree = jax.tree.flatten(attn.init(jax.random.key(0), dtype))
            rng = np.random.default_rng(0)
            draw = lambda x: jnp.asarray(rng.normal(size=x.shape) / max(1, x.shape[0]) ** 0.5, dtype)
            return attn, tree.unflatten(list(map(draw, leaves)))

    def attend(call: Call) -> Array:
        if call.key.shape[2] != call.query.shape[2]:
            raise NotImplementedError("gqa: states have one number of heads here.")
        if call.bias is not None or call.dropout is not None:
            raise NotImplementedError("bias, dropout: not asked of a variant here.")
        heads, width, v = *call.query.shape[2:], call.value.shape[3]
        attn, params = built(heads, width, v, call.query.dtype)
        mask = ja.causal() if call.causal else ja.everything()
        if call.mask is not None:
            real = jnp.broadcast_to(call.mask.any((1, 2)), call.key.shape[:2])
            mask = mask & ja.masks.from_flax(call.mask) & ja.padding(real)
        x_q, x_k, x_v = (_states(x) for x in (call.query, call.key, call.value))
        y, _ = attn.apply(params, x_q, (x_k, x_v), mask, engine=engine)
        return einops.rearrange(y, "b q (h v) -> b q h v", h=heads)

    supports = frozenset({"mask", "causal", "cross", "d_v", "float64", "tracing"})
    version = f"jaxattn {importlib.metadata.version('jaxattn')}"
    return Subject(name, attend, supports, False, version, least_heads, least_width)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "jaxattn": ours,
    "jax.nn": jax_nn,
    "flax.nnx": flax_nnx,
    "flax.linen": flax_linen,
    "equinox": equinox,
    "torch.sdpa": torch_sdpa,
}
