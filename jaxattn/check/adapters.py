"""Attentions of given heads that are known by name: other libraries behind one signature."""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja
from jaxattn.check.subject import FEATURES, Call, Subject, of_function, states


def jax_nn() -> Subject:
    """`jax.nn.dot_product_attention`; it documents values as wide as keys."""
    supports = tuple(f for f in FEATURES if f not in ("d_v", "dropout"))
    subject = of_function(jax.nn.dot_product_attention, supports=supports)
    return subject._replace(name="jax.nn", version=f"jax {jax.__version__}")


def _identity(m: int, heads: int, dtype: Any) -> Array:
    """A kernel [m, h, d] that only splits states into heads."""
    return jnp.eye(m, dtype=dtype).reshape(m, heads, -1)


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
            *(states(x) for x in (call.query, call.key, call.value)),
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
        sides = (states(x) for x in (call.query, call.key, call.value))
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        out: Any = layer.apply({"params": params}, *sides, mask=call.mask, rngs=rngs)
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
        query, key, value = (states(x) for x in (call.query, call.key, call.value))
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


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "jaxattn": ours,
    "jax.nn": jax_nn,
    "flax.nnx": flax_nnx,
    "flax.linen": flax_linen,
    "equinox": equinox,
    "torch.sdpa": torch_sdpa,
}
