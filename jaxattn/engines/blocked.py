"""blocked: exact attention in memory that grows linearly with the sequence, forward and backward.

A block is some query rows against all keys that they can reach, all heads at once, so heads may be mixed
before and after the softmax. Rows are grouped by reach: each group has one static number of keys, so
that keys which causality or a window hides are never touched. Backward recomputes each block.
"""

import functools
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.engines import formula
from jaxattn.engines.call import Call, Engine
from jaxattn.masks import Fill
from jaxattn.sides import map_rows

GROUPS = 8  # static programs a call may compile; causal work is (1 + 1/GROUPS) / 2 of the square
TILE = 512  # keys of which a data-dependent mask may skip all at once
BLOCK_BYTES = 2**25  # scores of one block of rows
CAPTURES = ("heads",)


class Group(NamedTuple):
    """Consecutive blocks of query rows that see equally many keys.

    Attributes:
        start, size, blocks: rows start .. start + size * blocks.
        k_starts: the first key of each block.
        k_size: how many keys each block sees; 0 where it sees none.
    """

    start: int
    size: int
    blocks: int
    k_starts: np.ndarray
    k_size: int


def run(call: Call) -> tuple[Array, dict[str, Array]]:
    """Heads of all rows, group by group."""
    parts = [_group(call, group) for group in plan(call)]
    if not parts:
        return _no_heads(call, call.frame.q_len), {}
    return jnp.concatenate(parts, axis=-3), {}


def plan(call: Call) -> list[Group]:
    """Which rows go together and which keys they see: static, from the mask's description."""
    q_len, k_len = call.frame.q_len, call.frame.k_len
    size = block_rows(call)
    whole, rest = divmod(q_len, size)
    groups = []
    for first, last in _even_split(whole):
        groups.append(_reach(call, first * size, size, last - first))
    if rest:
        groups.append(_reach(call, whole * size, rest, 1))
    assert all(0 <= g.k_size <= k_len for g in groups)
    return groups


def block_rows(call: Call) -> int:
    """Rows of one block: a power of two such that a block's scores take about BLOCK_BYTES."""
    row_bytes = max(1, call.score_bytes // max(1, call.frame.q_len))
    rows = 8
    while rows < 256 and 2 * rows * row_bytes <= BLOCK_BYTES:
        rows *= 2
    return min(rows, max(1, call.frame.q_len))


def _even_split(blocks: int) -> list[tuple[int, int]]:
    count = min(GROUPS, blocks)
    edges = [round(i * blocks / count) for i in range(count + 1)] if count else [0]
    return list(zip(edges, edges[1:], strict=False))


def _reach(call: Call, start: int, size: int, blocks: int) -> Group:
    """The keys that each block of a group can see, as one static size and a start for each."""
    k_len, tile = call.frame.k_len, 128
    spans = []
    for block in range(blocks):
        seen = [
            k
            for k in range(0, k_len, tile)
            if call.mask.fill(call.frame, start + block * size, size, k, min(tile, k_len - k))
            is not Fill.EMPTY
        ]
        spans.append((seen[0], min(seen[-1] + tile, k_len)) if seen else (0, 0))
    k_size = max(end - first for first, end in spans)
    k_starts = np.array([min(first, k_len - k_size) for first, _ in spans])
    return Group(start, size, blocks, k_starts, k_size)


def _group(call: Call, group: Group) -> Array:
    """Heads of one group's rows: a loop over its blocks, each recomputed in the backward pass."""
    rows = group.size * group.blocks
    if group.k_size == 0:
        return _no_heads(call, rows)
    query = map_rows(functools.partial(_split, group), call.query)
    starts = group.start + group.size * np.arange(group.blocks)
    fixed = len(set(group.k_starts.tolist())) == 1

    @jax.checkpoint
    def block(query, q_start, k_start):
        k_start = int(group.k_starts[0]) if fixed else k_start
        return _rows(call._replace(query=query), q_start, k_start, group.k_size)

    if group.blocks == 1:
        only = jax.tree.map(lambda x: x[0], query)
        return block(only, group.start, group.k_starts[0])
    heads = jax.lax.map(lambda xs: block(*xs), (query, starts, group.k_starts))
    return einops.rearrange(heads, "n ... q h v -> ... (n q) h v")


def _split(group: Group, x: Array, axis: int) -> Array:
    """A group's rows of a query-side array, with its blocks leading: [n, ..., q, ...]."""
    x = jax.lax.slice_in_dim(x, group.start, group.start + group.size * group.blocks, axis=axis)
    after = " ".join(f"x{i}" for i in range(-axis - 1))
    return einops.rearrange(x, f"... (n q) {after} -> n ... q {after}", q=group.size)


def _rows(call: Call, q_start: int | Array, k_start: int | Array, k_size: int) -> Array:
    """Heads of one block of rows against `k_size` keys from `k_start`."""
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=k_start, slice_size=k_size)
    keys = map_rows(lambda x, axis: cut(x, axis=axis), call.key)
    q_size = call.query.query.shape[-3]
    visible = call.mask.block(call.frame, q_start, q_size, k_start, k_size)
    call = call._replace(key=keys, bias=_cut_bias(call.bias, q_start, q_size, k_start, k_size))
    tiles = _tiles(call, visible, k_size)

    def tile_call(start, size):
        part = map_rows(
            lambda x, axis: jax.lax.slice_in_dim(x, start, start + size, axis=axis), keys
        )
        return call._replace(key=part, bias=_cut_bias(call.bias, 0, q_size, start, size))

    logits = [
        _where_seen(seen, lambda s=s, n=n: formula.logits(tile_call(s, n), q_start, k_start + s)[1])
        for s, n, seen in tiles
    ]
    weights = formula.softmax(jnp.concatenate(logits, axis=-1), visible)

    def values(start, size):
        span = functools.partial(
            jax.lax.slice_in_dim, start_index=start, limit_index=start + size, axis=-1
        )
        seen = span(visible) if visible.shape[-1] == k_size else visible
        part = tile_call(start, size)
        _, used = formula.post(part, span(weights), seen, q_start, k_start + start)
        return formula.gather(used, part.key.value, call.coupling.value_of, call.dtype)

    heads = [_where_seen(seen, lambda s=s, n=n: values(s, n)) for s, n, seen in tiles]
    return sum(heads[1:], heads[0]).astype(call.key.value.dtype)


def _tiles(call: Call, visible: Array, k_size: int) -> list[tuple[int, int, Array | None]]:
    """Spans of keys and, where only the data know, whether anything in them is visible."""
    known = not jax.tree.leaves((call.mask, call.frame.q_position, call.frame.k_position))
    if known or visible.shape[-1] != k_size or k_size <= TILE:
        return [(0, k_size, None)]
    count = min(8, -(-k_size // TILE))
    edges = [round(i * k_size / count) for i in range(count + 1)]
    return [(a, b - a, visible[..., a:b].any()) for a, b in zip(edges, edges[1:], strict=False)]


def _where_seen(seen: Array | None, compute) -> Array:
    """`compute()`, or zeros without computing it where nothing is seen."""
    if seen is None:
        return compute()
    shape = jax.eval_shape(compute)
    return jax.lax.cond(seen, compute, lambda: jnp.zeros(shape.shape, shape.dtype))


def _cut_bias(bias: Array | None, q_start, q_size: int, k_start, k_size: int) -> Array | None:
    """The block of a bias whose axes q and k may be 1."""
    if bias is None:
        return None
    for axis, start, size in ((-2, q_start, q_size), (-1, k_start, k_size)):
        if bias.shape[axis] != 1:
            bias = jax.lax.dynamic_slice_in_dim(bias, start, size, axis=axis)
    return bias


def _no_heads(call: Call, rows: int) -> Array:
    value = call.key.value
    shape = (*call.frame.batch, rows, call.output_heads, value.shape[-1])
    return jnp.zeros(shape, value.dtype)


ENGINE = Engine("blocked", run, CAPTURES, about="linear memory, forward and backward")
