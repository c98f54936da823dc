"""blocked: exact attention in memory that grows linearly with the sequence, forward and backward.

A block is some query rows against all keys that they can reach, all heads at once, so heads may be mixed
before and after the softmax. Rows are grouped by reach: each group has one static number of keys, so
that keys which causality or a window hides are never touched. The backward pass makes each block again
and adds what it owes to the keys in place; nothing of the size of the scores is kept.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.engines import formula
from jaxattn.engines.call import Call, Engine
from jaxattn.linear import linear_map
from jaxattn.masks import Fill
from jaxattn.sides import Coupling, KeySide, QuerySide, map_rows

PyTree = Any

GROUPS = 8  # static programs a call may compile; causal work is (1 + 1/GROUPS) / 2 of the square
GRAIN = 128  # keys are skipped in multiples of this
TILE = 512  # keys of which a data-dependent mask may skip all at once
BLOCK_BYTES = 2**22  # scores of one block of rows
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

    @property
    def starts(self) -> np.ndarray:
        """The first row of each block."""
        return self.start + self.size * np.arange(self.blocks)

    def split(self, x: Array, axis: int) -> Array:
        """The group's rows of an array, its blocks leading: [..., t, ...] -> [n, ..., q, ...]."""
        x = jax.lax.slice_in_dim(x, self.start, self.start + self.size * self.blocks, axis=axis)
        after = " ".join(f"x{i}" for i in range(-axis - 1))
        return einops.rearrange(x, f"... (n q) {after} -> n ... q {after}", q=self.size)

    def join(self, x: Array, axis: int) -> Array:
        """The inverse of `split`."""
        after = " ".join(f"x{i}" for i in range(-axis - 1))
        return einops.rearrange(x, f"n ... q {after} -> ... (n q) {after}")


class Parts(NamedTuple):
    """The arrays of a call by how they are cut: by query rows, by keys, not at all, by both."""

    query: QuerySide | None
    key: KeySide
    coupling: Coupling
    bias: Array | None


def run(call: Call) -> tuple[Array, dict[str, Array]]:
    """Heads of all rows, with a reverse pass of their own that every mode of JAX can meet."""
    groups = plan(call)
    if not groups:
        return _no_heads(call, call.frame.q_len), {}
    parts = Parts(call.query, call.key, call.coupling, call.bias)
    floats, others = _floats(parts)
    others = others, call.mask, call.dropout_key, call.frame.q_position, call.frame.k_position

    def rejoin(floats: Parts, others: Any) -> Call:
        rest, mask, dropout_key, q_position, k_position = others
        frame = call.frame._replace(q_position=q_position, k_position=k_position)
        same = call._replace(mask=mask, dropout_key=dropout_key, frame=frame)
        return _with(same, _join(floats, rest))

    @jax.custom_jvp
    def heads(floats, others):
        return _forward(rejoin(floats, others), groups)

    def push(residuals, tangents):
        floats, others = residuals
        return jax.jvp(lambda x: _forward(rejoin(x, others), groups), (floats,), (tangents,))[1]

    def pull(residuals, cotangent):
        floats, others = residuals
        return _backward(floats, rejoin(floats, others), groups, cotangent)

    @heads.defjvp
    def heads_jvp(primals, tangents):
        return heads(*primals), linear_map(push, pull, primals, tangents[0])

    return heads(floats, others), {}


def _floats(tree: PyTree) -> tuple[PyTree, PyTree]:
    """The floating arrays of a tree and its other arrays, each with None in place of the rest."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    floats = jax.tree.map(lambda x: x if is_float(x) else None, tree)
    return floats, jax.tree.map(lambda x: None if is_float(x) else x, tree)


def _with(call: Call, parts: Parts) -> Call:
    return call._replace(**parts._asdict())


def _join(floats: PyTree, others: PyTree) -> PyTree:
    """One tree from two that have None where the other has an array."""
    pick = lambda a, b: b if a is None else a
    return jax.tree.map(pick, floats, others, is_leaf=lambda x: x is None)


def plan(call: Call) -> list[Group]:
    """Which rows go together and which keys they see: static, from the mask's description."""
    q_len, size = call.frame.q_len, block_rows(call)
    whole, rest = divmod(q_len, size)
    count = min(GROUPS, whole)
    edges = [round(i * whole / count) for i in range(count + 1)] if count else []
    groups = [_reach(call, a * size, size, b - a) for a, b in itertools.pairwise(edges)]
    if rest:
        groups.append(_reach(call, whole * size, rest, 1))
    return groups


def block_rows(call: Call) -> int:
    """Rows of one block: a power of two such that a block's scores take about BLOCK_BYTES."""
    row_bytes = max(1, call.score_bytes // max(1, call.frame.q_len))
    rows = 8
    while rows < 256 and 2 * rows * row_bytes <= BLOCK_BYTES:
        rows *= 2
    return min(rows, max(1, call.frame.q_len))


def _reach(call: Call, start: int, size: int, blocks: int) -> Group:
    """The keys that each block of a group can see, as one static size and a start for each."""
    k_len = call.frame.k_len
    grain = max(GRAIN, k_len // 64)  # planning stays cheap however long the rows are
    spans = []
    for block in range(blocks):
        seen = [
            k
            for k in range(0, k_len, grain)
            if call.mask.fill(call.frame, start + block * size, size, k, min(grain, k_len - k))
            is not Fill.EMPTY
        ]
        spans.append((seen[0], min(seen[-1] + grain, k_len)) if seen else (0, 0))
    k_size = max(end - first for first, end in spans)
    k_starts = np.array([min(first, k_len - k_size) for first, _ in spans])
    return Group(start, size, blocks, k_starts, k_size)


def _forward(call: Call, groups: list[Group]) -> Array:
    """Heads, group by group: a loop over the blocks of each."""
    parts = []
    for group in groups:
        if group.k_size == 0:
            parts.append(_no_heads(call, group.size * group.blocks))
            continue

        def block(xs, group=group):
            query, q_start, k_start = xs
            return _rows(_cut(call, group, query, q_start, k_start), q_start, k_start)

        query = map_rows(group.split, call.query)
        heads = jax.lax.map(block, (query, group.starts, group.k_starts))
        parts.append(group.join(heads, -3))
    return jnp.concatenate(parts, axis=-3)


def _backward(floats: Parts, call: Call, groups: list[Group], cotangent: Array) -> Parts:
    """Cotangents of all floating arrays, block by block; what keys are owed is added in place."""
    shared = floats._replace(query=None)
    owed = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shared)
    key_axes = map_rows(lambda x, axis: axis, floats.key)
    query_axes = map_rows(lambda x, axis: axis, floats.query)
    queries = []
    for group in groups:
        query = map_rows(group.split, call.query)
        join = lambda axis, x, group=group: group.join(x, axis)
        if group.k_size == 0:
            nothing = jax.tree.map(jnp.zeros_like, map_rows(group.split, floats.query))
            queries.append(jax.tree.map(join, query_axes, nothing))
            continue

        def step(owed, xs, group=group):
            query, cotangent, q_start, k_start = xs
            cut = _cut(call, group, query, q_start, k_start)
            parts = Parts(cut.query, cut.key, cut.coupling, cut.bias)
            moving, still = _floats(parts)
            block = lambda x: _rows(_with(cut, _join(x, still)), q_start, k_start)
            (moved,) = jax.vjp(block, moving)[1](cotangent)
            key = jax.tree.map(
                lambda axis, a, b: _add_at(a, b, {axis: k_start}), key_axes, owed.key, moved.key
            )
            coupling = jax.tree.map(jnp.add, owed.coupling, moved.coupling)
            bias = owed.bias
            if bias is not None:
                starts = {-2: q_start, -1: k_start}
                bias = _add_at(bias, moved.bias, {n: s for n, s in starts.items() if bias.shape[n] > 1})
            return Parts(None, key, coupling, bias), moved.query

        xs = query, group.split(cotangent, -3), group.starts, group.k_starts
        owed, moved = jax.lax.scan(step, owed, xs)
        queries.append(jax.tree.map(join, query_axes, moved))
    query = jax.tree.map(lambda axis, *x: jnp.concatenate(x, axis), query_axes, *queries)
    owed = jax.tree.map(lambda x, total: total.astype(x.dtype), shared, owed)
    return owed._replace(query=query)


def _cut(call: Call, group: Group, query: QuerySide, q_start, k_start) -> Call:
    """The call of one block: its query rows, the keys that they reach, its part of the bias."""
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=k_start, slice_size=group.k_size)
    key = map_rows(lambda x, axis: cut(x, axis=axis), call.key)
    bias = _cut_bias(call.bias, q_start, group.size, k_start, group.k_size)
    return call._replace(query=query, key=key, bias=bias)


def _rows(call: Call, q_start: int | Array, k_start: int | Array) -> Array:
    """Heads of a call that is one block, which lies at the given starts."""
    q_size, k_size = call.query.query.shape[-3], call.key.key.shape[-3]
    visible = call.mask.block(call.frame, q_start, q_size, k_start, k_size)
    tiles = _tiles(call, visible, k_size)

    def tile(start: int, size: int) -> Call:
        span = functools.partial(jax.lax.slice_in_dim, start_index=start, limit_index=start + size)
        key = map_rows(lambda x, axis: span(x, axis=axis), call.key)
        return call._replace(key=key, bias=_cut_bias(call.bias, 0, q_size, start, size))

    def logits(start: int, size: int) -> Array:
        return formula.logits(tile(start, size), q_start, k_start + start)[1]

    parts = [_where_seen(seen, functools.partial(logits, s, n)) for s, n, seen in tiles]
    weights = formula.softmax(jnp.concatenate(parts, axis=-1), visible)

    def values(start: int, size: int) -> Array:
        span = lambda x: x[..., start : start + size] if x.shape[-1] == k_size else x
        part = tile(start, size)
        _, used = formula.post(part, span(weights), span(visible), q_start, k_start + start)
        return formula.gather(used, part.key.value, call.coupling.value_of, call.dtype)

    heads = [_where_seen(seen, functools.partial(values, s, n)) for s, n, seen in tiles]
    return sum(heads[1:], heads[0]).astype(call.key.value.dtype)


def _tiles(call: Call, visible: Array, k_size: int) -> list[tuple[int, int, Array | None]]:
    """Spans of keys and, where only the data know, whether anything in them is visible."""
    known = not jax.tree.leaves((call.mask, call.frame.q_position, call.frame.k_position))
    if known or visible.shape[-1] != k_size or k_size <= TILE:
        return [(0, k_size, None)]
    count = min(8, -(-k_size // TILE))
    edges = [round(i * k_size / count) for i in range(count + 1)]
    return [(a, b - a, visible[..., a:b].any()) for a, b in itertools.pairwise(edges)]


def _where_seen(seen: Array | None, compute: Callable[[], Array]) -> Array:
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


def _add_at(total: Array, part: Array, starts: dict[int, int | Array]) -> Array:
    """`total` with `part` added where it starts along the given axes (counted from the end)."""
    index = [starts.get(axis - total.ndim, 0) for axis in range(total.ndim)]
    index = [jnp.asarray(i, jnp.int32) for i in index]
    here = jax.lax.dynamic_slice(total, index, part.shape)
    return jax.lax.dynamic_update_slice(total, here + part.astype(total.dtype), index)


def _no_heads(call: Call, rows: int) -> Array:
    value = call.key.value
    shape = (*call.frame.batch, rows, call.output_heads, value.shape[-1])
    return jnp.zeros(shape, value.dtype)


ENGINE = Engine("blocked", run, CAPTURES, about="linear memory, forward and backward")
