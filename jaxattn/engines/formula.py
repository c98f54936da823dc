"""The formula of the form on one block of query rows and keys, all heads at once.

Engines differ in which blocks they ask for and what they keep; this is what a block is.
"""

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.axes import contract
from jaxattn.engines import dropout
from jaxattn.engines.call import Call
from jaxattn.sides import Factors, Mix

Dtype = jnp.dtype


def scores(query: Array, key: Array, key_of: tuple[int, ...] | None, dtype: Dtype) -> Array:
    """<query[q,h], key[k,key_of(h)]>: [..., q, hl, d] and [..., k, hK, d] to [..., hl, q, k].

    Shared keys are contracted where they lie; no repeated key is made for block or tile order.
    """
    heads, keys = query.shape[-2], key.shape[-2]
    if heads == keys and key_of is None:
        return contract(query, key, "... q hl d, ... k hl d -> ... hl q k", dtype=dtype)
    order, key = _order("hK", key, key_of, heads)
    query = einops.rearrange(query, f"... q {order} d -> ... q hK g d", hK=key.shape[-2])
    out = contract(query, key, "... q hK g d, ... k hK d -> ... hK g q k", dtype=dtype)
    return einops.rearrange(out, f"... hK g q k -> ... {order} q k")


def gather(weights: Array, value: Array, value_of: tuple[int, ...] | None, dtype: Dtype) -> Array:
    """sum_k weights[h,q,k] value[k,value_of(h)]: [..., hv, q, k], [..., k, hV, v] to [..., q, hv, v].

    Products are of the value's type, sums of `dtype`.
    """
    heads, values = weights.shape[-3], value.shape[-2]
    weights = weights.astype(value.dtype)
    if heads == values and value_of is None:
        return contract(weights, value, "... hv q k, ... k hv v -> ... q hv v", dtype=dtype)
    order, value = _order("hV", value, value_of, heads)
    weights = einops.rearrange(weights, f"... {order} q k -> ... hV g q k", hV=value.shape[-2])
    out = contract(weights, value, "... hV g q k, ... k hV v -> ... q hV g v", dtype=dtype)
    return einops.rearrange(out, f"... q hV g v -> ... q {order} v")


def _order(n_heads: str, source: Array, of: tuple[int, ...] | None, heads: int) -> tuple[str, Array]:
    """How heads group over source heads; an irregular order picks the source heads one by one."""
    n = source.shape[-2]
    block = tuple(i * n // heads for i in range(heads))
    if of is None or of == block:
        return f"({n_heads} g)", source
    if of == tuple(i % n for i in range(heads)):
        return f"(g {n_heads})", source
    return f"({n_heads} g)", source[..., of, :]


def mix(x: Array, static: Mix, from_query: Factors | None, from_key: Factors | None) -> Array:
    """One mix stage on [..., i, q, k]: the static map plus what both rows add; [..., o, q, k]."""
    if static.matrix is None:
        out = x
    elif static.matrix.ndim == 3:
        grouped = einops.rearrange(x, "... (g i) q k -> ... g i q k", g=static.matrix.shape[0])
        out = contract(grouped, static.matrix.astype(x.dtype), "... g i q k, g i o -> ... g o q k")
        out = einops.rearrange(out, "... g o q k -> ... (g o) q k")
    else:
        out = contract(x, static.matrix.astype(x.dtype), "... i q k, i o -> ... o q k")
    if static.matrix is not None and static.skip:
        out = out + x
    for n, factors in (("q", from_query), ("k", from_key)):
        if factors is not None:
            out = out + _dynamic(x, factors, n)
    if static.bias is not None:
        out = out + einops.rearrange(static.bias.astype(x.dtype), "o -> o 1 1")
    return out


def _dynamic(x: Array, factors: Factors, n: str) -> Array:
    """What the factors of one side's rows (n is q or k) add."""
    factors = Factors(*(None if f is None else f.astype(x.dtype) for f in factors))
    terms = []
    if factors.down is not None and factors.up is not None:
        grouped = einops.rearrange(x, "... (g i) q k -> ... g i q k", g=factors.down.shape[-3])
        low = contract(grouped, factors.down, f"... g i q k, ... {n} g i r -> ... g r q k")
        high = contract(low, factors.up, f"... g r q k, ... {n} g r o -> ... g o q k")
        terms.append(einops.rearrange(high, "... g o q k -> ... (g o) q k"))
    if factors.diag is not None:
        spread = {"q": "... n h -> ... h n 1", "k": "... n h -> ... h 1 n"}[n]
        terms.append(x * einops.rearrange(factors.diag, spread))
    if factors.dense is not None:
        terms.append(contract(x, factors.dense, f"... i q k, ... {n} i o -> ... o q k"))
    return sum(terms[1:], terms[0])


def logits(call: Call, q_start: int | Array, k_start: int | Array) -> tuple[Array, Array]:
    """Scaled logits before and after the pre mixes, bias and soft cap, of the call's own rows.

    Args:
        call: sides already cut to the block; `q_start`, `k_start` say where it lies.

    Returns:
        [..., hl, q, k] and [..., hs, q, k]; nothing is hidden yet.
    """
    query, key, c = call.query, call.key, call.coupling
    raw = scores(query.query, key.key, c.key_of, call.dtype) * jnp.asarray(c.scale, call.dtype)
    if key.bias is not None:
        raw = raw + einops.rearrange(key.bias.astype(raw.dtype), "... k hl -> ... hl 1 k")
    x = raw
    for stage in zip(c.pre, query.pre, key.pre, strict=True):
        x = mix(x, *stage)
    if c.pair_bias is not None:
        x = x + c.pair_bias.of(
            c.pair_bias.params,
            row_positions(query.position, q_start, query.query.shape[-3]),
            row_positions(key.position, k_start, key.key.shape[-3]),
        )
    if call.bias is not None:
        x = x + call.bias.astype(x.dtype)
    if c.softcap is not None:
        x = c.softcap * jnp.tanh(x / c.softcap)
    return raw, x


def softmax(x: Array, visible: Array) -> Array:
    """Softmax over the visible keys; a row without one gives zeros, with zero gradients.

    Both branches of each selection are finite, so no derivative of any order meets 0 * inf. The cap lies
    between the product and the difference: contracted into one rounding, a large logit would differ
    from its own maximum.
    """
    x = jnp.minimum(x, jnp.finfo(x.dtype).max)
    top = jnp.max(x, axis=-1, keepdims=True, initial=-jnp.inf, where=visible)
    top = jnp.where(jnp.isfinite(top), top, 0)
    raised = jnp.where(visible, jnp.exp(jnp.where(visible, x - jax.lax.stop_gradient(top), 0)), 0)
    total = raised.sum(axis=-1, keepdims=True)
    return raised / jnp.where(total == 0, 1, total)


def post(call: Call, weights: Array, visible: Array, q_start: int | Array, k_start: int | Array):
    """Post mixes, re-masking and dropout; weights [..., hs, q, k] to what is seen and what is used.

    Returns:
        the mixed weights before dropout, and those that meet the values, both [..., hv, q, k].
    """
    query, key, c = call.query, call.key, call.coupling
    used = weights
    if c.dropout_site == "softmax":
        used = _drop(call, used, q_start, k_start)
    seen = weights
    for stage in zip(c.post, query.post, key.post, strict=True):
        seen = jnp.where(visible, mix(seen, *stage), 0)
        if used is not weights:
            used = jnp.where(visible, mix(used, *stage), 0)
    if used is weights:
        used = seen
    if c.dropout_site == "values":
        used = _drop(call, used, q_start, k_start)
    return seen, used


def _drop(call: Call, weights: Array, q_start: int | Array, k_start: int | Array) -> Array:
    rate = call.coupling.dropout
    if call.dropout_key is None or rate == 0:
        return weights
    *batch, heads, q_size, k_size = weights.shape
    kept = dropout.keep(
        call.dropout_key, rate, call.coupling.dropout_shared,
        tuple(batch), heads, q_start, q_size, k_start, k_size,
    )  # fmt: skip
    return dropout.scaled(weights, kept, rate)


def row_positions(position: Array | None, start: int | Array, size: int) -> Array:
    """Positions of a block's rows: [..., n]."""
    return start + jnp.arange(size) if position is None else position
