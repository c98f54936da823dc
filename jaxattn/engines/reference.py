"""reference: the form read aloud, one query row and one key at a time.

It shares no formula with the other engines: the mix of a pair is a matrix, written out and applied. It
is for checking, not for use.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.engines import dropout
from jaxattn.engines.call import CAPTURES, Call, Engine
from jaxattn.sides import Factors, Mix


def run(call: Call) -> tuple[Array, dict[str, Array]]:
    """Loops over the batch, the query rows and the keys."""
    batch, q_len, k_len = call.frame.batch, call.frame.q_len, call.frame.k_len

    def whole(array, trailing):  # give an array that broadcasts all its axes
        return None if array is None else jnp.broadcast_to(array, (*batch, *trailing(array)))

    score_axes = lambda x: (x.shape[-3], q_len, k_len)
    visible = whole(call.mask.block(call.frame, 0, q_len, 0, k_len), score_axes)
    bias = whole(call.bias, score_axes)
    query = call.query._replace(position=_positions(call.query.position, batch, q_len), valid=None)
    key = call.key._replace(position=_positions(call.key.position, batch, k_len), valid=None)

    def one_example(query, key, visible, bias, kept):
        def one_row(row):
            query, visible, bias, kept = row
            return _row(call, query, key, visible, bias, kept)

        heads_last = lambda x: None if x is None else jnp.moveaxis(x, -2, 0)
        return jax.lax.map(one_row, (query, *map(heads_last, (visible, bias, kept))))

    loop = one_example
    for _ in batch:
        loop = jax.vmap(loop)  # a batch row is an example of its own
    heads, captured = loop(query, key, visible, bias, _kept(call))
    captured = {n: jnp.moveaxis(captured[n], -3, -2) for n in call.capture if n in captured}
    return heads.astype(call.key.value.dtype), captured


def _row(call: Call, query, key, visible, bias, kept) -> tuple[Array, dict[str, Array]]:
    """One query row against all keys: query [hl, d], visible and bias [h, k] -> heads [hv, v]."""
    c, dtype = call.coupling, call.dtype
    heads = query.query.shape[0]

    def pair_logits(pair):
        key_row, bias = pair
        raw = []
        for h in range(heads):
            of = _source(h, heads, key_row.key.shape[0], c.key_of)
            dot = jnp.sum(query.query[h].astype(dtype) * key_row.key[of].astype(dtype))
            raw.append(c.scale * dot + (0 if key_row.bias is None else key_row.bias[h].astype(dtype)))
        raw = mixed = jnp.stack(raw)
        for static, from_query, from_key in zip(c.pre, query.pre, key_row.pre, strict=True):
            mixed = _mix(mixed, static, from_query, from_key)
        if c.pair_bias is not None:
            position = query.position[None], key_row.position[None]
            mixed = mixed + c.pair_bias.of(c.pair_bias.params, *position)[:, 0, 0].astype(dtype)
        if bias is not None:
            mixed = mixed + bias.astype(dtype)
        if c.softcap is not None:
            mixed = c.softcap * jnp.tanh(mixed / c.softcap)
        return raw, mixed

    key_bias = None if bias is None else bias.T
    raw, logits = jax.lax.map(pair_logits, (key, key_bias))  # [k, hl], [k, hs]
    seen = jnp.broadcast_to(visible.T, logits.shape)
    least = jnp.finfo(dtype).min
    top = jax.lax.stop_gradient(jnp.where(seen, logits, least).max(0, keepdims=True, initial=least))
    half = jnp.where(seen, logits, top) / 2 - top / 2  # a whole difference could be too large for the type
    counts = seen & ~(half < -500)  # exp(-1000) is zero
    raised = jnp.where(counts, jnp.exp(2 * jnp.where(counts, half, 0)), 0)
    total = raised.sum(0, keepdims=True)
    weights = raised / jnp.where(total > 0, total, 1)

    def pair_weights(pair):
        weights, key_row, visible, kept = pair
        used = weights
        if kept is not None and c.dropout_site == "softmax":
            used = jnp.where(kept, used / (1 - c.dropout), 0)
        mixed = weights
        for static, from_query, from_key in zip(c.post, query.post, key_row.post, strict=True):
            mixed = jnp.where(visible, _mix(mixed, static, from_query, from_key), 0)
            used = jnp.where(visible, _mix(used, static, from_query, from_key), 0)
        if kept is not None and c.dropout_site == "values":
            used = jnp.where(kept, used / (1 - c.dropout), 0)
        out = []
        for h in range(used.shape[0]):
            of = _source(h, used.shape[0], key_row.value.shape[0], c.value_of)
            out.append(used[h] * key_row.value[of].astype(dtype))
        return mixed, jnp.stack(out)

    mixed, parts = jax.lax.map(pair_weights, (weights, key, visible.T, None if kept is None else kept.T))
    values = dict(logits=raw, mixed_logits=logits, weights=weights, mixed_weights=mixed)
    return parts.sum(0), {name: x.T for name, x in values.items()}


def _mix(x: Array, static: Mix, from_query: Factors | None, from_key: Factors | None) -> Array:
    """x [i] times the whole matrix of this pair."""
    matrix = None if static.matrix is None else _blocks(static.matrix).astype(x.dtype)
    if matrix is None:
        matrix = jnp.eye(x.shape[0], dtype=x.dtype)
    elif static.skip:
        matrix = matrix + jnp.eye(x.shape[0], dtype=x.dtype)
    for factors in (from_query, from_key):
        if factors is None:
            continue
        if factors.down is not None and factors.up is not None:
            low_rank = jax.vmap(jnp.matmul)(factors.down.astype(x.dtype), factors.up.astype(x.dtype))
            matrix = matrix + _blocks(low_rank)
        if factors.diag is not None:
            matrix = matrix + jnp.diag(factors.diag.astype(x.dtype))
        if factors.dense is not None:
            matrix = matrix + factors.dense.astype(x.dtype)
    return x @ matrix + (0 if static.bias is None else static.bias.astype(x.dtype))


def _blocks(matrix: Array) -> Array:
    """[g, i, o] as one block-diagonal matrix; [i, o] as it is."""
    return matrix if matrix.ndim == 2 else jax.scipy.linalg.block_diag(*matrix)


def _source(head: int, heads: int, sources: int, of: tuple[int, ...] | None) -> int:
    return head // (heads // sources) if of is None else of[head]


def _positions(position: Array | None, batch: tuple[int, ...], size: int) -> Array:
    position = jnp.arange(size) if position is None else position
    return jnp.broadcast_to(position, (*batch, size))


def _kept(call: Call) -> Array | None:
    """The dropout draw of all pairs, [..., h, q, k]: the one thing that engines must share."""
    c = call.coupling
    if call.dropout_key is None or c.dropout == 0:
        return None
    heads = call.output_heads if c.dropout_site == "values" else call.softmax_heads
    shape = (*call.frame.batch, heads, call.frame.q_len, call.frame.k_len)
    return dropout.keep(call.dropout_key, c.dropout, c.dropout_shared, shape)


ENGINE = Engine("reference", run, CAPTURES, symbolic=("b", "q", "k"), about="loops over pairs, for checking")
