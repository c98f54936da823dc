"""The steps of a block as `blocked` takes them: the formula's values, by ways that XLA runs fast.

A mix does little arithmetic on much data; fused into its neighbours, it is done many times over. Here a
low-rank map is two passes over the scores, with the sum over heads written out so that keys stay the inner
loop. The transpose of a mix is a mix again (down and up change places), and the gradients of row factors are
summed in lanes. `_alone` keeps the passes apart.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, cast

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.axes import contract, same_rank
from jaxattn.engines import formula
from jaxattn.engines.formula import join_groups, split_groups
from jaxattn.linear import linear_map, with_pull
from jaxattn.sides import Factors, Mix

ALONE = 2**14  # elements from which a pass of its own pays
LANES = 16  # partial sums of a sum over rows or keys
WIDE = 8  # from this rank on, the gradient of a low-rank factor is a matrix product

PyTree = Any
Both = tuple[Factors | None, Factors | None]


def mix(x: Array, static: Mix, rows: Both) -> Array:
    """`formula.mix` on [..., i, q, k], to [..., o, q, k], with a derivative of its own."""
    static, rows = jax.tree.map(lambda leaf: leaf.astype(x.dtype), (static, rows))
    return _ruled_mix((x, static, rows), ())


def scores(query: Array, key: Array, key_of: tuple[int, ...] | None, dtype: jnp.dtype) -> Array:
    """`formula.scores`; the reverse pass computes the keys' gradient with the keys inmost, as they lie."""

    def plain(operands: tuple[Array, Array], others):
        query, key = operands
        return formula.scores(query, key, key_of, dtype), ()

    @jax.named_scope("scores gradient")
    def pull(operands, others, kept, cotangent):
        query, key = operands
        to_query = formula.gather(cotangent, key, key_of, dtype)
        if key_of is None:
            grouped = lambda x: einops.rearrange(x, "... (hK g) q x -> ... hK (g q) x", hK=key.shape[-3])
            rows = "... hK q d, ... hK q k -> ... hK d k"
            to_key = contract(grouped(query), grouped(cotangent), rows, dtype=dtype)
        else:
            (to_key,) = jax.vjp(lambda key: plain((query, key), ())[0], key)[1](cotangent)
        return to_query.astype(query.dtype), to_key.astype(key.dtype)

    return with_pull(plain, pull)((query, key), ())


@jax.custom_jvp
@jax.named_scope("softmax")
def softmax(x: Array, visible: Array, known: Array | None = None) -> tuple[Array, Array]:
    """`formula.softmax`, whose derivative is its own transpose: t -> W t - W sum_k(W t).

    Args:
        x: [..., q, k] logits; visible: their mask.
        known: what an earlier call found for these rows; one pass instead of five.

    Returns:
        weights, and [..., q, 2]: each row's largest logit and 1 / sum. The latter is data: its derivative is
        zero, and that to x is whole without it.
    """
    x, visible = same_rank(x, visible)
    reach, largest = formula.reach(x.dtype), jnp.finfo(x.dtype).max

    def share_of(x, top, share=1):
        counts = visible & ~(x < top - reach)  # true of NaN
        x = jnp.where(counts, x, top)
        below = jnp.minimum(x, top) - top  # the minimum lies between a product and the difference
        return jnp.where(counts, jnp.exp(below) * share, 0)

    if known is not None:
        return _alone(share_of, x, known[..., :1], known[..., 1:]), known
    x = jnp.where(visible, jnp.minimum(x, largest), -largest)
    top = x.max(axis=-1, keepdims=True, initial=-largest)
    raised = share_of(x, top)
    total = raised.sum(axis=-1, keepdims=True)
    share = 1 / jnp.where(total == 0, 1, total)
    return _alone(operator.mul, raised, share), jnp.concatenate([top, share], axis=-1)


@softmax.defjvp
def _softmax_jvp(primals, tangents):
    weights, rows = softmax(*primals)

    @jax.named_scope("softmax gradient")
    def move(weights, tangent):
        moved = weights * tangent
        return moved - weights * moved.sum(axis=-1, keepdims=True)

    return (weights, rows), (linear_map(move, move, weights, tangents[0]), jnp.zeros_like(rows))


@jax.named_scope("mix")
def _mix(operands: tuple[Array, Mix, Both], others: PyTree) -> tuple[Array, list[Array | None]]:
    """The mix, and the low-rank coordinates of both sides, which the reverse pass uses again."""
    del others
    x, static, rows = operands
    groups = _groups(rows)
    # A reshape inside a loop keeps XLA from running along the keys, so all terms are made in groups.
    grouped = functools.partial(split_groups, groups=groups)
    x = grouped(x)
    lows = [None if f is None or f.down is None else _alone(_sum_over_heads, x, f.down) for f in rows]
    matrix = None if static.matrix is None else grouped(_matrix(join_groups(x), static))
    whole = lambda m: grouped(_alone(_sum_over_heads, join_groups(x), m))
    dense = [None if f is None or f.dense is None else whole(f.dense) for f in rows]
    bias = None if static.bias is None else einops.rearrange(static.bias, "(g o) -> g o 1 1", g=groups)
    if bias is not None:
        bias = same_rank(x, bias)[1]

    def together(x, matrix, dense, lows, ups, diags, bias):
        terms = [x] if matrix is None or static.skip else []
        terms += [term for term in (matrix, *dense, bias) if term is not None]
        terms += [_sum_over_heads(low, up) for low, up in zip(lows, ups, strict=True) if low is not None]
        terms += [x * grouped(diag) for diag in diags if diag is not None]
        return functools.reduce(operator.add, terms)

    ups, diags = ([None if f is None else getattr(f, name) for f in rows] for name in ("up", "diag"))
    return join_groups(_alone(together, x, matrix, dense, lows, ups, diags, bias)), lows


def _groups(rows: Both) -> int:
    return next((f.down.shape[-5] for f in rows if f is not None and f.down is not None), 1)


def _mix_pull(operands, others, lows, cotangent: Array) -> tuple[Array, Mix, Both]:
    del others
    x, static, rows = operands
    turned = tuple(None if factors is None else _turn(factors) for factors in rows)
    matrix = None if static.matrix is None else einops.rearrange(static.matrix, "... i o -> ... o i")
    to_x, low_cotangents = _mix((cotangent, Mix(matrix, None, static.skip), cast(Both, turned)), ())
    to_rows = tuple(
        None if factors is None else _factors_cotangent(x, factors, low, cotangent, low_cotangent, axis)
        for factors, low, low_cotangent, axis in zip(rows, lows, low_cotangents, (-1, -2), strict=True)
    )
    return to_x, _static_cotangent(x, static, cotangent), cast(Both, to_rows)


def _turn(factors: Factors) -> Factors:
    """Factors of the transposed map."""
    swap = lambda m: None if m is None else einops.rearrange(m, "... i o q k -> ... o i q k")
    return Factors(swap(factors.up), swap(factors.down), factors.diag, swap(factors.dense))


@jax.named_scope("static gradient")
def _static_cotangent(x: Array, static: Mix, cotangent: Array) -> Mix:
    matrix = bias = None
    if static.matrix is not None:
        rows = (_pairs_last(y, static.groups) for y in (x, cotangent))
        each = contract(*rows, "... g i k, ... g o k -> ... g i o")
        matrix = each.reshape(-1, *each.shape[-3:]).sum(0).reshape(static.matrix.shape)
    if static.bias is not None:
        bias = einops.reduce(cotangent, "... o q k -> o", "sum")
    return Mix(matrix, bias, static.skip)


@jax.named_scope("factors gradient")
def _factors_cotangent(
    x: Array, factors: Factors, low, cotangent: Array, low_cotangent, axis: int
) -> Factors:
    """Cotangents of the factors of one side's rows: sums over the other side's rows, along `axis`."""
    down = up = diag = dense = None
    if factors.down is not None:
        groups = factors.down.shape[-5]
        down = _outer(split_groups(x, groups), low_cotangent, axis)
        up = _outer(low, split_groups(cotangent, groups), axis)
    if factors.diag is not None:
        diag = _sum_products(x, cotangent, axis)
    if factors.dense is not None:
        dense = _outer_product(x, cotangent, axis)
    return Factors(down, up, diag, dense)


def _alone(function: Callable[..., Array], *operands: PyTree) -> Array:
    """`function(*operands)` as a pass of its own, neither fused with others nor recomputed inside them.

    On CPU XLA drops a barrier before it fuses, but keeps a branch. Small results are not worth one.
    """

    out = jax.eval_shape(function, *operands)
    if math.prod(out.shape) < ALONE:
        return function(*operands)

    def branch(*operands):
        always = jax.lax.optimization_barrier(jnp.ones((), bool))
        return jax.lax.cond(always, function, lambda *_: jnp.zeros_like(out), *operands)

    def barrier(*operands):
        return jax.lax.optimization_barrier(function(*operands))

    return jax.lax.platform_dependent(*operands, cpu=branch, default=barrier)


@jax.jit
def _sum_over_heads(x: Array, m: Array) -> Array:
    """sum_i x[i] m[i,o]: [..., i, q, k] and [..., i, o, q, k], where m's q or k is 1, to [..., o, q, k]."""
    terms = (x[..., i, None, :, :] * m[..., i, :, :, :] for i in range(m.shape[-4]))
    return functools.reduce(operator.add, terms)


def _matrix(x: Array, static: Mix) -> Array:
    """The static map as one matrix product an example, the head axis leading."""
    assert static.matrix is not None
    flat = _pairs_last(x, static.groups)
    matrix = jnp.broadcast_to(static.matrix, (*flat.shape[:-2], *static.matrix.shape[-2:]))
    out = contract(matrix, flat, "... g i o, ... g i k -> ... g o k")
    return einops.rearrange(out, "... g o (q k) -> ... (g o) q k", q=x.shape[-2])


def _pairs_last(x: Array, groups: int) -> Array:
    """[..., (g i), q, k] to [..., g, i, (q k)]: all pairs of rows as one axis of a matrix product."""
    return einops.rearrange(x, "... (g i) q k -> ... g i (q k)", g=groups)


def _outer(a: Array, b: Array, axis: int) -> Array:
    """[..., i, q, k] and [..., o, q, k] to [..., i, o, q, k], summed over `axis`, which stays as 1."""
    if min(a.shape[-3], b.shape[-3]) < WIDE and a.shape[axis] >= 2 * LANES:
        return _sum_products(a, b, axis, outer=True)
    return _outer_product(a, b, axis)


def _outer_product(a: Array, b: Array, axis: int) -> Array:
    """`_outer` as matrix products, which never hold i beside o beside q and k."""
    kept = "q" if axis == -1 else "k"
    return jnp.expand_dims(contract(a, b, f"... i q k, ... o q k -> ... i o {kept}"), axis)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sum_products(a: Array, b: Array, axis: int, outer: bool = False) -> Array:
    """The sum of a * b over `axis`, which stays as 1: in lanes, as one running sum is not vectorised.

    outer: a's i and b's o are axes of their own, spread inside the pass: outside it they would be copied.
    """
    size = a.shape[axis]
    spread = (lambda a, b: a[..., :, None, :, :] * b[..., None, :, :, :]) if outer else operator.mul
    if size < 2 * LANES:
        return spread(a, b).sum(axis, keepdims=True)
    width = size // LANES
    whole = size - size % width

    def product(a, b, start, end):
        cut = functools.partial(jax.lax.slice_in_dim, start_index=start, limit_index=end, axis=axis)
        return spread(cut(a), cut(b))

    def lanes(a, b):
        return functools.reduce(operator.add, (product(a, b, i, i + width) for i in range(0, whole, width)))

    total = _alone(lanes, a, b).sum(axis, keepdims=True)
    return total if whole == size else total + product(a, b, whole, size).sum(axis, keepdims=True)


_ruled_mix = with_pull(_mix, _mix_pull)
STEPS = formula.Steps(scores, mix)
