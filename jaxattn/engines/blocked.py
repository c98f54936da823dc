"""blocked: exact attention in memory that grows linearly with the sequence, forward and backward.

A block is some query rows against all keys that they can reach, all heads at once, so heads may be mixed
before and after the softmax; where they are not, a loop goes over the heads, so that a block stays in the
processor's cache. Rows are grouped by reach: each group has one static number of keys, so that keys which
causality or a window hides are never touched. Examples go one after another where a block of several would
be large. The backward pass recomputes each block and adds the keys' gradients in place; nothing of the size
of the scores is kept.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.axes import at_least_float32
from jaxattn.engines import formula, steps
from jaxattn.engines.call import Call, Engine
from jaxattn.engines.layout import (
    Block,
    Keys,
    Origin,
    Rows,
    flat_batch,
    has_data,
    join_floats,
    lay_out,
    map_examples,
    split_floats,
    without_tangent,
)
from jaxattn.linear import with_pull
from jaxattn.masks import Fill
from jaxattn.sides import Coupling

PyTree = Any

GROUPS = (8, 4)  # programs of a call without and with row factors; causal work is (1 + 1/GROUPS) / 2
GRAIN = 128  # keys are skipped in multiples of this
TILE = 512  # keys of which a data-dependent mask may skip all at once
BLOCK_BYTES = (2**22, 2**23)  # scores of one block at most: one head's, and all heads' where they go together
JOINED_BYTES = 2**20  # up to this size, heads without a mix are computed together
ROWS = (64, 256)  # of a block: below, products lose speed; above, nothing is gained
CAPTURES = ("heads",)
Q_AXIS, K_AXIS = -2, -1
BIAS_AXES = (-4, -3, Q_AXIS, K_AXIS)  # in the order of an Origin


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

    def split(self, x: Array) -> Array:
        """The group's rows of an array, its blocks leading: [..., q, x] -> [n, ..., q, x]."""
        x = jax.lax.slice_in_dim(x, self.start, self.start + self.size * self.blocks, axis=Q_AXIS)
        return einops.rearrange(x, "... (n q) x -> n ... q x", n=self.blocks)

    def join(self, x: Array) -> Array:
        """The inverse of `split`."""
        return einops.rearrange(x, "n ... q x -> ... (n q) x")


class Parts(NamedTuple):
    """The arrays of a call: those of query rows, of keys, of neither, of both."""

    rows: Rows | None
    keys: Keys | None
    coupling: Coupling
    bias: Array | None


class Plan(NamedTuple):
    """Which rows go together, which keys they see, and what the loop goes over: all static.

    Attributes:
        groups: all rows.
        examples: of one step of the loop.
        parts: steps for the heads of an example; 1 where heads see each other.
    """

    groups: list[Group]
    examples: int
    parts: int


def run(call: Call) -> tuple[Array, dict[str, Array]]:
    """Heads of all rows, with a reverse pass of their own that every mode of JAX can meet."""
    batch, examples = call.frame.batch, math.prod(call.frame.batch)
    plan = plan_of(call)
    if 0 in (call.frame.q_len, call.frame.k_len, examples):
        shape = (*batch, call.frame.q_len, call.output_heads, call.key.value.shape[-1])
        return jnp.zeros_like(call.key.value, shape=shape), {}
    flat = lambda x, core: flat_batch(x, core, batch)
    rows, keys = jax.tree.map(lambda x: x.reshape(examples, *x.shape[len(batch) :]), lay_out(call))
    bias = None if call.bias is None else flat(call.bias, 3)
    call = map_examples(flat, call)
    floats, others = split_floats(Parts(rows, keys, call.coupling, bias))
    arrays, again = without_tangent(call)

    def rejoin(floats: Parts, others: Any) -> tuple[Parts, Call]:
        rest, arrays = others
        return join_floats(floats, rest), again(arrays)

    heads = with_pull(
        lambda floats, others: _forward(*rejoin(floats, others), plan),
        lambda floats, others, known, cotangent: _backward(
            floats, *rejoin(floats, others), plan, known, cotangent
        ),
    )
    out = heads(floats, (others, arrays))
    return einops.rearrange(out.reshape(*batch, *out.shape[1:]), "... hv q v -> ... q hv v"), {}


def plan_of(call: Call) -> Plan:
    """The plan, from the shapes and from what the mask tells without its data."""
    q_len = call.frame.q_len
    splits = _head_splits(call)
    together = splits == 1 and call.logit_heads > 1
    block_bytes = BLOCK_BYTES[together]
    row_bytes = max(1, call.score_bytes // max(1, q_len * splits))
    rows = ROWS[0]
    while rows < ROWS[1] and 2 * rows * row_bytes <= block_bytes:
        rows *= 2
    size = min(rows, max(1, q_len))
    at_once = (block_bytes if together else JOINED_BYTES) // (size * row_bytes)
    parts = splits // _divisor(splits, at_once)
    whole, rest = divmod(q_len, size)
    sides = call.query, call.key
    dynamic = any(factors is not None for side in sides for factors in (*side.pre, *side.post))
    count = min(GROUPS[dynamic], whole)
    edges = [round(i * whole / count) for i in range(count + 1)] if count else []
    groups = [_reach(call, a * size, size, b - a) for a, b in itertools.pairwise(edges)]
    if rest:
        groups.append(_reach(call, whole * size, rest, 1))
    return Plan(groups, _divisor(call.examples, at_once // splits), parts)


def _head_splits(call: Call) -> int:
    """Parts that an example could be cut into by heads: one for each key head, or 1 where heads are mixed."""
    c, (key, value) = call.coupling, call.key[:2]
    apart = c.key_of is None and c.value_of is None and key.shape[-2] == value.shape[-2]
    return key.shape[-2] if apart and c.pair_bias is None and not call.mixes else 1


def _divisor(number: int, most: int) -> int:
    """The largest divisor that is at most `most`; 1 at least."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(1, most))


def _reach(call: Call, start: int, size: int, blocks: int) -> Group:
    """The keys that each block of a group can see, as one static size and a start for each."""
    k_len = call.frame.k_len
    spans = [key_span(call, start + block * size, size) for block in range(blocks)]
    k_size = max(end - first for first, end in spans)
    k_starts = np.array([min(first, k_len - k_size) for first, _ in spans])
    return Group(start, size, blocks, k_starts, k_size)


def key_span(call: Call, q_start: int, q_size: int) -> tuple[int, int]:
    """The first key that some of these rows may see and the one after the last; 0, 0 where there is none."""
    k_len = call.frame.k_len
    grain = max(GRAIN, k_len // 64)  # planning stays cheap however long the rows are
    fill = lambda k: call.mask.fill(call.frame, q_start, q_size, k, min(grain, k_len - k))
    seen = [k for k in range(0, k_len, grain) if fill(k) is not Fill.EMPTY]
    return (seen[0], min(seen[-1] + grain, k_len)) if seen else (0, 0)


def _forward(parts: Parts, call: Call, plan: Plan) -> tuple[Array, Array]:
    """Heads [b, hv, q, v], examples by examples, group by group: a loop over the blocks of each.

    Beside them [b, hs, q, 2], what the softmax found of each row: the reverse pass starts from it.
    """

    def some(xs):
        rows, keys, start = xs
        part, here = parts._replace(rows=rows, keys=keys), of_examples(call, start.example, plan.examples)
        done = [_group_forward(part, here, start, group) for group in plan.groups]
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=Q_AXIS), *done)

    done = jax.lax.map(some, _loop(parts, call, plan))
    return jax.tree.map(lambda x: _merge(x, plan), done)


def _group_forward(part: Parts, call: Call, start: Origin, group: Group) -> tuple[Array, Array]:
    assert part.rows is not None and part.keys is not None
    if group.k_size == 0:
        query, value = part.rows.query, part.keys.value
        zeros = lambda dtype, all_heads, *end: jnp.zeros_like(
            value, dtype, (value.shape[0], all_heads * query.shape[-3] // call.logit_heads, *end)
        )
        rows = group.size * group.blocks
        known = zeros(call.dtype, call.softmax_heads, rows, 2)
        return zeros(value.dtype, call.output_heads, rows, value.shape[-2]), known

    def block(xs):
        rows, q_start, k_start = xs
        block = _cut(part, call, group, rows, start._replace(row=q_start, key=k_start))
        return block_heads(block, has_data(call))

    rows = jax.tree.map(group.split, part.rows)
    return jax.tree.map(group.join, jax.lax.map(block, (rows, group.starts, group.k_starts)))


def _backward(floats: Parts, parts: Parts, call: Call, plan: Plan, known: Array, cotangent: Array) -> Parts:
    """Cotangents of all floating arrays, block by block; those of the keys are added in place."""
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros_like(x, at_least_float32(x.dtype)), tree)

    def some(shared, xs):
        (rows, keys, start), of_out = xs
        part, here = parts._replace(rows=rows, keys=keys), of_examples(call, start.example, plan.examples)
        float_keys, _ = split_floats(keys)
        totals = Parts(None, zeros(float_keys), shared.coupling, shared.bias)
        done = []
        for group in plan.groups:
            totals, moved = _group_backward(part, here, start, group, totals, of_out)
            done.append(moved)
        of_rows = jax.tree.map(lambda *x: jnp.concatenate(x, axis=Q_AXIS), *done)
        cast = lambda x, total: total.astype(x.dtype)
        of_keys = jax.tree.map(cast, float_keys, totals.keys)
        return totals._replace(keys=None), (of_rows, of_keys)

    shared = Parts(None, None, zeros(floats.coupling), zeros(floats.bias))
    xs = _loop(parts, call, plan), (_split(known, plan), _split(cotangent, plan))
    shared, sides = jax.lax.scan(some, shared, xs)
    shared = jax.tree.map(lambda x, total: total.astype(x.dtype), (floats.coupling, floats.bias), shared[2:])
    return Parts(*jax.tree.map(lambda x: _merge(x, plan), sides), *shared)


def _group_backward(part: Parts, call: Call, start: Origin, group: Group, totals: Parts, of_out):
    rows = jax.tree.map(group.split, part.rows)
    if group.k_size == 0:
        nothing = jax.tree.map(jnp.zeros_like, split_floats(rows)[0])
        return totals, jax.tree.map(group.join, nothing)

    def step(totals, xs):
        rows, (known, cotangent), q_start, k_start = xs
        block = _cut(part, call, group, rows, start._replace(row=q_start, key=k_start))
        moving, still = split_floats(Parts(block.rows, block.keys, block.coupling, block.bias))
        again = lambda x: block_heads(
            block._replace(**join_floats(x, still)._asdict()), has_data(call), known
        )[0]
        (moved,) = jax.vjp(again, moving)[1](cotangent)
        keys = jax.tree.map(lambda a, b: add_at(a, b, {K_AXIS: k_start}), totals.keys, moved.keys)
        coupling = jax.tree.map(lambda a, b: add_at(a, b, {}), totals.coupling, moved.coupling)
        bias = totals.bias
        if bias is not None:
            starts = zip(BIAS_AXES, block.start, strict=True)
            bias = add_at(bias, moved.bias, {n: s for n, s in starts if bias.shape[n] > 1})
        return Parts(None, keys, coupling, bias), moved.rows

    of_out = jax.tree.map(group.split, of_out)
    totals, moved = jax.lax.scan(step, totals, (rows, of_out, group.starts, group.k_starts))
    return totals, jax.tree.map(group.join, moved)


def _loop(parts: Parts, call: Call, plan: Plan) -> tuple[Rows | None, Keys | None, Origin]:
    """Both sides with the loop over examples and parts of heads first, and where each step starts."""
    rows, keys = jax.tree.map(lambda x: _split(x, plan), (parts.rows, parts.keys))
    step = jnp.arange(jax.tree.leaves(rows)[0].shape[0], dtype=jnp.int32)
    example, part = step // plan.parts, step % plan.parts
    none = jnp.zeros_like(step)
    heads = call.logit_heads // plan.parts
    return rows, keys, Origin(plan.examples * example, heads * part, none, none)


def _split(x: Array, plan: Plan) -> Array:
    """[b, h, ...] to steps [n, b, h, ...]; positions [b, t, 1] are those of every head."""
    sizes = dict(b=plan.examples, m=plan.parts)
    if x.ndim == 3:
        return einops.repeat(x, "(n b) t one -> (n m) b t one", **sizes)
    return einops.rearrange(x, "(n b) (m h) ... -> (n m) b h ...", **sizes)


def _merge(x: Array, plan: Plan) -> Array:
    """The inverse of `_split`."""
    return einops.rearrange(x, "(n m) b h ... -> (n b) (m h) ...", m=plan.parts)


def of_examples(call: Call, start: Array, count: int) -> Call:
    """The call with the mask and positions of some examples."""

    def take(x: Array, core: int) -> Array:
        axis = x.ndim - core - 1
        return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, start, count, axis)

    return map_examples(take, call)


def _cut(parts: Parts, call: Call, group: Group, rows: Rows, start: Origin) -> Block:
    """One block: its query rows, the keys that they reach, its part of the bias."""
    assert parts.keys is not None
    examples, heads = rows.query.shape[0], rows.query.shape[-3]
    visible = call.mask.block(call.frame, start.row, group.size, start.key, group.k_size)
    bias_heads = call.softmax_heads * heads // call.logit_heads
    if visible.shape[-3] > 1 and heads < call.logit_heads:
        visible = jax.lax.dynamic_slice_in_dim(visible, start.head, heads, axis=-3)
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start.key, group.k_size, axis=K_AXIS)
    return Block(
        rows=rows,
        keys=jax.tree.map(cut, parts.keys),
        coupling=parts.coupling,
        bias=_cut_bias(parts.bias, start, (examples, bias_heads, group.size, group.k_size)),
        visible=visible,
        dropout_key=call.dropout_key,
        start=start,
    )


def _cut_bias(bias: Array | None, start: Origin, sizes: tuple[int, int, int, int]) -> Array | None:
    """The block of a bias whose axes may be 1."""
    if bias is None:
        return None
    for axis, first, size in zip(BIAS_AXES, start, sizes, strict=True):
        if 1 < bias.shape[axis] and size < bias.shape[axis]:
            bias = jax.lax.dynamic_slice_in_dim(bias, first, size, axis=axis)
    return bias


def block_heads(block: Block, by_data: bool, known: Array | None = None) -> tuple[Array, Array]:
    """Heads [..., hv, q, v] of one block; spans of keys in which the data hide everything are passed over.

    known: what the softmax found of its rows, where it ran before; returned beside the heads.
    """
    k_size = block.keys.key.shape[K_AXIS]
    spans = _spans(block, k_size) if by_data else [(0, k_size, None)]

    def span(start: int, size: int) -> Block:
        if size == k_size:
            return block
        cut = lambda x: jax.lax.slice_in_dim(x, start, start + size, axis=K_AXIS)
        bias = block.bias
        return block._replace(
            keys=jax.tree.map(cut, block.keys),
            bias=bias if bias is None or bias.shape[K_AXIS] == 1 else cut(bias),
            visible=cut(block.visible),
            start=block.start._replace(key=block.start.key + start),
        )

    def logits(start: int, size: int) -> Array:
        return formula.logits(span(start, size), steps.STEPS)[1]

    parts = [_where_seen(seen, functools.partial(logits, s, n)) for s, n, seen in spans]
    weights, known = steps.softmax(jnp.concatenate(parts, axis=K_AXIS), block.visible, known)

    def values(start: int, size: int) -> Array:
        part = span(start, size)
        own = jax.lax.slice_in_dim(weights, start, start + size, axis=K_AXIS)
        _, used = formula.post(part, own, steps.STEPS)
        return formula.gather(used, part.keys.value, block.coupling.value_of, block.dtype)

    heads = [_where_seen(seen, functools.partial(values, s, n)) for s, n, seen in spans]
    return sum(heads[1:], heads[0]).astype(block.keys.value.dtype), known


def _spans(block: Block, k_size: int) -> list[tuple[int, int, Array | None]]:
    """Spans of keys and, where only the data know, whether anything in them is visible."""
    if block.visible.shape[K_AXIS] != k_size or k_size <= TILE:
        return [(0, k_size, None)]
    count = min(8, -(-k_size // TILE))
    edges = [round(i * k_size / count) for i in range(count + 1)]
    return [(a, b - a, block.visible[..., a:b].any()) for a, b in itertools.pairwise(edges)]


def _where_seen(seen: Array | None, compute: Callable[[], Array]) -> Array:
    """`compute()`, or zeros without computing it where nothing is seen."""
    if seen is None:
        return compute()
    out = jax.eval_shape(compute)
    return jax.lax.cond(seen, compute, lambda: jnp.zeros_like(out))


def add_at(total: Array, part: Array, starts: dict[int, int | Array]) -> Array:
    """`total` with `part` added where it starts along the given axes (counted from the end)."""
    if total.shape == part.shape:
        return total + part.astype(total.dtype)
    index = [starts.get(axis - total.ndim, 0) for axis in range(total.ndim)]
    index = [jnp.asarray(i, jnp.int32) for i in index]
    here = jax.lax.dynamic_slice(total, index, part.shape)
    return jax.lax.dynamic_update_slice(total, here + part.astype(total.dtype), index)


ENGINE = Engine("blocked", run, CAPTURES, symbolic=("b",), about="linear memory, forward and backward")
