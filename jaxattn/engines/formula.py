"""The formula of the form on one block of query rows and keys, all heads at once.

Engines differ in which blocks they ask for, how they mix and what they keep; this is what a block is.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.axes import contract, same_rank
from jaxattn.engines import dropout
from jaxattn.engines.layout import Block, count_from
from jaxattn.sides import Coupling, Factors, Mix

Dtype = jnp.dtype


class Steps(NamedTuple):
    """The steps of which an engine may have its own: scores and one mix stage; signatures as here."""

    scores: Callable[[Array, Array, tuple[int, ...] | None, Dtype], Array]
    mix: Callable[[Array, Mix, tuple[Factors | None, Factors | None]], Array]


@jax.named_scope("scores")
def scores(query: Array, key: Array, key_of: tuple[int, ...] | None, dtype: Dtype) -> Array:
    """<query[h,q], key[key_of(h),k]>: [..., hl, q, d] and [..., hK, d, k] to [..., hl, q, k].

    Query heads of one key head are rows of one product; no repeated key is made for block or tile order.
    """
    heads, q = query.shape[-3:-1]
    order, key = _order("hK", key, key_of, heads)
    sizes = dict(hK=key.shape[-3], g=heads // key.shape[-3], q=q)
    query = einops.rearrange(query, f"... {order} q d -> ... hK (g q) d", **sizes)
    out = contract(query, key, "... hK q d, ... hK d k -> ... hK q k", dtype=dtype)
    return einops.rearrange(out, f"... hK (g q) k -> ... {order} q k", **sizes)


@jax.named_scope("values")
def gather(weights: Array, value: Array, value_of: tuple[int, ...] | None, dtype: Dtype) -> Array:
    """sum_k weights[h,q,k] value[value_of(h),k]: [..., hv, q, k], [..., hV, v, k] to [..., hv, q, v].

    Products are of the value's type, sums of `dtype`.
    """
    heads, q = weights.shape[-3:-1]
    order, value = _order("hV", value, value_of, heads)
    weights = weights.astype(value.dtype)
    sizes = dict(hV=value.shape[-3], g=heads // value.shape[-3], q=q)
    weights = einops.rearrange(weights, f"... {order} q k -> ... hV (g q) k", **sizes)
    out = contract(weights, value, "... hV q k, ... hV v k -> ... hV q v", dtype=dtype)
    return einops.rearrange(out, f"... hV (g q) v -> ... {order} q v", **sizes)


def _order(n_heads: str, source: Array, of: tuple[int, ...] | None, heads: int) -> tuple[str, Array]:
    """How heads group over source heads; an irregular order picks the source heads one by one."""
    n = source.shape[-3]
    block = tuple(i * n // heads for i in range(heads))
    if of is None or of == block:
        return f"({n_heads} g)", source
    if of == tuple(i % n for i in range(heads)):
        return f"(g {n_heads})", source
    return f"({n_heads} g)", source[..., of, :, :]


def mix(x: Array, static: Mix, rows: tuple[Factors | None, Factors | None]) -> Array:
    """One mix stage on [..., i, q, k]: the static map plus what query and key rows add; [..., o, q, k]."""
    out = static_mix(x, static)
    for n, factors in zip("qk", rows, strict=True):
        if factors is not None:
            out = out + _dynamic(x, factors, n)
    return out


def static_mix(x: Array, static: Mix) -> Array:
    """x @ matrix (+ x) + bias, over the head axis of [..., i, q, k]."""
    if static.matrix is None:
        out = x
    elif static.matrix.ndim == 3:
        grouped = split_groups(x, static.groups)
        out = contract(grouped, static.matrix.astype(x.dtype), "... g i q k, g i o -> ... g o q k")
        out = join_groups(out)
    else:
        out = contract(x, static.matrix.astype(x.dtype), "... i q k, i o -> ... o q k")
    if static.matrix is not None and static.skip:
        out = out + x
    if static.bias is not None:
        bias = einops.rearrange(static.bias.astype(x.dtype), "o -> o 1 1")
        out = operator.add(*same_rank(out, bias))
    return out


def split_groups(x: Array, groups: int) -> Array:
    """[..., (g i), q, k] to [..., g, i, q, k]."""
    return einops.rearrange(x, "... (g i) q k -> ... g i q k", g=groups)


def join_groups(x: Array) -> Array:
    """The inverse of `split_groups`."""
    return einops.rearrange(x, "... g i q k -> ... (g i) q k")


def _dynamic(x: Array, factors: Factors, n: str) -> Array:
    """What the factors of one side's rows (n is q or k) add, as contractions."""
    drop = (lambda f: f[..., 0]) if n == "q" else (lambda f: f[..., 0, :])
    flat = Factors(*(None if f is None else drop(f.astype(x.dtype)) for f in factors))
    terms = []
    if flat.down is not None and flat.up is not None:
        grouped = split_groups(x, flat.down.shape[-4])
        low = contract(grouped, flat.down, f"... g i q k, ... g i r {n} -> ... g r q k")
        high = contract(low, flat.up, f"... g r q k, ... g r o {n} -> ... g o q k")
        terms.append(join_groups(high))
    if factors.diag is not None:
        terms.append(x * factors.diag.astype(x.dtype))
    if flat.dense is not None:
        terms.append(contract(x, flat.dense, f"... i q k, ... i o {n} -> ... o q k"))
    return sum(terms[1:], terms[0])


def logits(block: Block, steps: Steps) -> tuple[Array, Array]:
    """Scaled logits before and after the pre mixes, bias and soft cap.

    Returns:
        [..., hl, q, k] and [..., hs, q, k]; nothing is hidden yet.
    """
    rows, keys, c = block.rows, block.keys, block.coupling
    raw = _scaled_scores(rows.query, keys.key, c, block.dtype, steps)
    if keys.bias is not None:
        raw = raw + keys.bias.astype(raw.dtype)
    x = raw
    for static, of_rows, of_keys in zip(c.pre, rows.pre, keys.pre, strict=True):
        with jax.named_scope("pre"):
            x = steps.mix(x, static, (of_rows, of_keys))
    if c.pair_bias is not None:
        q = count_from(block.start.row, x.shape[-2]) if rows.position is None else rows.position[..., 0]
        k = count_from(block.start.key, x.shape[-1]) if keys.position is None else keys.position[..., 0, :]
        x = operator.add(*same_rank(x, c.pair_bias.of(c.pair_bias.params, q, k).astype(x.dtype)))
    if block.bias is not None:
        x = operator.add(*same_rank(x, block.bias.astype(x.dtype)))
    if c.softcap is not None:
        x = c.softcap * jnp.tanh(x / c.softcap)
    return raw, x


def _scaled_scores(query: Array, key: Array, c: Coupling, dtype: Dtype, steps: Steps) -> Array:
    scale = jnp.asarray(c.scale, dtype)
    if query.dtype == dtype:  # one pass over the queries instead of one over the scores
        return steps.scores(query * scale, key, c.key_of, dtype)
    return steps.scores(query, key, c.key_of, dtype) * scale


@jax.named_scope("softmax")
def softmax(x: Array, visible: Array) -> Array:
    """Softmax over the visible keys; a row without one gives zeros, with zero gradients.

    Finite logits up to the type's largest make no infinity on the way: those so far below their row's largest
    that their weight is zero are left out before the difference is taken. All selections are between finite
    numbers, so no derivative of any order meets 0 * inf, and none halves the gradient of a tie as
    `jnp.maximum` does. The cap lies between the product and the difference: contracted into one rounding, a
    large logit would differ from its own maximum.
    """
    x, visible = same_rank(x, visible)
    largest = jnp.finfo(x.dtype).max
    still = jax.lax.stop_gradient(x)
    top = jnp.where(visible, jnp.minimum(still, largest), -largest)
    top = top.max(axis=-1, keepdims=True, initial=-largest)  # also of no keys
    counts = visible & ~(still < top - reach(x.dtype))  # true of NaN
    finite = jnp.where(still > largest, largest, x)
    raised = jnp.where(counts, jnp.exp(jnp.where(counts, finite, top) - top), 0)
    total = raised.sum(axis=-1, keepdims=True)
    return raised / jnp.where(total == 0, 1, total)


def reach(dtype: Dtype) -> float:
    """How far below the largest logit of its row a logit has weight: exp(-reach) is zero in this type."""
    return 1 - math.log(jnp.finfo(dtype).smallest_subnormal)


@jax.named_scope("post")
def post(block: Block, weights: Array, steps: Steps) -> tuple[Array, Array]:
    """Post mixes, re-masking and dropout; weights [..., hs, q, k] to what is seen and what is used.

    Returns:
        the mixed weights before dropout, and those that meet the values, both [..., hv, q, k].
    """
    rows, keys, c = block.rows, block.keys, block.coupling
    used = weights
    if c.dropout_site == "softmax":
        used = _drop(block, used)
    seen = weights
    for static, of_rows, of_keys in zip(c.post, rows.post, keys.post, strict=True):
        stage = functools.partial(_post_stage, block, static, (of_rows, of_keys), steps)
        seen, used = stage(seen), used if used is weights else stage(used)
    if used is weights:
        used = seen
    if c.dropout_site == "values":
        used = _drop(block, used)
    return seen, used


def _post_stage(block: Block, static: Mix, rows: tuple, steps: Steps, weights: Array) -> Array:
    """One mix of weights; hidden ones, which are zero, stay zero."""
    mixed = steps.mix(weights, static, rows)
    linear = static.bias is None and block.visible.shape[-3] == 1  # of hidden zeros alone it makes zeros
    return mixed if linear else jnp.where(block.visible, mixed, 0)


def _drop(block: Block, weights: Array) -> Array:
    rate = block.coupling.dropout
    if block.dropout_key is None or rate == 0:
        return weights
    shared = block.coupling.dropout_shared
    kept = dropout.keep(block.dropout_key, rate, shared, weights.shape, block.start)
    return dropout.scaled(weights, kept, rate)


STEPS = Steps(scores, mix)
