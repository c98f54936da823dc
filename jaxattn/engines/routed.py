"""routed: only the (row, head) pairs that a router keeps active are computed.

The pairs of each example lie in blocks of one head (`jaxattn.route`), rows ascending, so a block reads the
keys of its head that its rows can reach: a few static sizes, chosen by a branch at run time. Keys and values
are dense: any row may choose any head. The backward pass recomputes each block, as that of `blocked` does.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.axes import at_least_float32
from jaxattn.engines.blocked import add_at, block_heads, key_span, of_examples
from jaxattn.engines.call import Call, Engine
from jaxattn.engines.layout import (
    Block,
    Keys,
    Origin,
    Rows,
    flat_batch,
    has_data,
    map_examples,
    without_tangent,
)
from jaxattn.linear import with_pull
from jaxattn.route import Route, route, to_pairs, to_slots

SLOTS = 128  # of a block at most: its rows lie apart, so more of them see more keys than they need
REACHES = 8  # numbers of keys among which a block may choose
CHUNKS = (64, 64)  # rows whose reach is one entry of a table; entries of it at most
CAPTURES = ("heads",)


class Pairs(NamedTuple):
    """Floating arrays: query [b, n, s, d], key [b, hK, d, k], value [b, hV, v, k]; or of one block."""

    query: Array
    key: Array
    value: Array


class Reach(NamedTuple):
    """What is static about the keys that rows see.

    Attributes:
        chunk: how many rows an entry stands for.
        first, end: [chunks], the first key and the one after the last; 0, 0 where there is none.
        sizes: the numbers of keys among which a block chooses, ascending; the first is 0.
    """

    chunk: int
    first: np.ndarray
    end: np.ndarray
    sizes: tuple[int, ...]


def refuses(call: Call) -> str | None:
    """Why only some heads of this call cannot be computed, or None."""
    if call.mixes:
        return "heads are mixed, and it leaves heads out"
    if call.biases or call.bias is not None:
        return "it has no additive biases"
    return None


def run(call: Call) -> tuple[Array, dict[str, Array]]:
    """Heads of the active pairs, [..., q, a, v]."""
    batch, examples = call.frame.batch, math.prod(call.frame.batch)
    query, head, (key, value) = call.query.query, call.query.head, call.key[:2]
    assert head is not None
    if 0 in (query.size, key.size):
        return jnp.zeros_like(value, shape=(*batch, *query.shape[-3:-1], value.shape[-1])), {}
    flat = lambda x, core: flat_batch(x, core, batch)
    whole = lambda x, core: jnp.broadcast_to(flat(x, core), (examples, *x.shape[x.ndim - core :]))
    where = jax.vmap(lambda head: route(head, call.logit_heads, SLOTS))(whole(head, 2))
    pairs = Pairs(
        jax.vmap(to_slots)(whole(query, 3), where),
        einops.rearrange(whole(key, 3), "b k hK d -> b hK d k"),
        einops.rearrange(whole(value, 3), "b k hV v -> b hV v k"),
    )
    reach = reach_of(call)
    arrays, again = without_tangent(map_examples(flat, call))

    def rejoin(others: Any) -> tuple[Route, Call]:
        where, arrays = others
        return where, again(arrays)

    heads = with_pull(
        lambda pairs, others: (_forward(pairs, *rejoin(others), reach), ()),
        lambda pairs, others, _, cotangent: _backward(pairs, *rejoin(others), reach, cotangent),
    )
    out = jax.vmap(to_pairs)(heads(pairs, (where, arrays)), where)
    return out.reshape(*batch, *out.shape[1:]).astype(value.dtype), {}


def reach_of(call: Call) -> Reach:
    """The table of reaches, from the shapes and from what the mask tells without its data."""
    q_len, k_len = call.frame.q_len, call.frame.k_len
    chunk = max(CHUNKS[0], -(-q_len // CHUNKS[1]))
    spans = [key_span(call, q, min(chunk, q_len - q)) for q in range(0, q_len, chunk)]
    first, end = np.array(spans).T
    least = min((b - a for a, b in spans if b > a), default=k_len)
    sizes = {-(-k_len * i // REACHES) for i in range(1, REACHES + 1)}
    return Reach(chunk, first, end, (0, *sorted(n for n in sizes if n >= least)))


def _forward(pairs: Pairs, where: Route, call: Call, reach: Reach) -> Array:
    """Heads [b, n, s, v]: example by example, block by block."""

    def example(xs):
        pairs, where, number = xs
        here = of_examples(call, number, 1)

        def block(xs):
            query, slots = xs

            def heads(size: int, first: Array) -> Array:
                if size == 0:
                    return jnp.zeros_like(pairs.value, shape=(query.shape[0], pairs.value.shape[-2]))
                own, start = _cut(pairs._replace(query=query), slots, here, size, first)
                return _heads(own, slots, here, start._replace(example=number))

            return _by_reach(slots, reach, heads)

        return jax.lax.map(block, (pairs.query, _slots(where)))

    return jax.lax.map(example, (pairs, where, _numbers(where)))


def _backward(pairs: Pairs, where: Route, call: Call, reach: Reach, cotangent: Array) -> Pairs:
    """Cotangents of all floating arrays; those of keys and values are added in place, head by head."""

    def example(xs):
        pairs, where, number, cotangent = xs
        here = of_examples(call, number, 1)
        zeros = lambda x: jnp.zeros_like(x, at_least_float32(x.dtype))

        def block(totals, xs):
            query, slots, cotangent = xs
            sources = _sources(slots, here)
            of_head = [
                jax.lax.dynamic_index_in_dim(*z, keepdims=False) for z in zip(totals, sources, strict=True)
            ]

            def pulled(size: int, first: Array) -> tuple[Array, list[Array]]:
                if size == 0:
                    return jnp.zeros_like(query), of_head
                own, start = _cut(pairs._replace(query=query), slots, here, size, first)
                again = lambda own: _heads(own, slots, here, start._replace(example=number))
                (moved,) = jax.vjp(again, own)[1](cotangent)
                add = lambda total, part: add_at(total, part, {-1: start.key})
                return moved.query, [add(*z) for z in zip(of_head, (moved.key, moved.value), strict=True)]

            to_query, more = _by_reach(slots, reach, pulled)
            put = lambda total, part, head: jax.lax.dynamic_update_index_in_dim(total, part, head, 0)
            return [put(*z) for z in zip(totals, more, sources, strict=True)], to_query

        totals = [zeros(pairs.key), zeros(pairs.value)]
        totals, to_query = jax.lax.scan(block, totals, (pairs.query, _slots(where), cotangent))
        cast = lambda x, total: total.astype(x.dtype)
        return Pairs(to_query, *map(cast, (pairs.key, pairs.value), totals))

    return jax.lax.map(example, (pairs, where, _numbers(where), cotangent))


class Slots(NamedTuple):
    """One block of a route: its head, the row of each slot, and whether the slot is filled."""

    head: Array
    row: Array
    filled: Array


def _slots(where: Route) -> Slots:
    return Slots(where.head, where.row, where.filled)


def _numbers(where: Route) -> Array:
    return jnp.arange(where.head.shape[0], dtype=jnp.int32)


def _sources(slots: Slots, call: Call) -> tuple[Array, Array]:
    """The key head and the value head of a block."""
    heads = call.logit_heads
    either = lambda of, n: jnp.asarray(of or [i * n // heads for i in range(heads)])[slots.head]
    key = either(call.coupling.key_of, call.key.key.shape[-2])
    return key, either(call.coupling.value_of, call.key.value.shape[-2])


def _span(slots: Slots, reach: Reach) -> tuple[Array, Array]:
    """The first key that a block reaches and how many from there; 0 where it reaches none."""
    chunk = slots.row // reach.chunk
    first, end = jnp.asarray(reach.first)[chunk], jnp.asarray(reach.end)[chunk]
    seen = slots.filled & (end > first)
    start = jnp.where(seen, first, reach.sizes[-1]).min()
    return start, jnp.maximum(jnp.where(seen, end, 0).max() - start, 0)


def _by_reach(slots: Slots, reach: Reach, compute: Callable[[int, Array], Any]) -> Any:
    """`compute(size, first)` for the least static number of keys that the block's rows can do with."""
    first, needed = _span(slots, reach)
    index = jnp.searchsorted(jnp.asarray(reach.sizes), needed)
    return jax.lax.switch(index, [functools.partial(compute, size) for size in reach.sizes], first)


def _cut(pairs: Pairs, slots: Slots, call: Call, size: int, first: Array) -> tuple[Pairs, Origin]:
    """The query, keys and values of a block, [s, d], [d, k] and [v, k], and where it starts."""
    start = jnp.minimum(first, call.frame.k_len - size)
    own = (
        jax.lax.dynamic_slice(x, (head, 0, start), (1, x.shape[-2], size))[0]
        for x, head in zip((pairs.key, pairs.value), _sources(slots, call), strict=True)
    )
    return Pairs(pairs.query, *own), Origin(0, slots.head, slots.row, start)


def _heads(own: Pairs, slots: Slots, call: Call, start: Origin) -> Array:
    """Heads [s, v] of one block: the formula with one head."""
    (slot_count,), size = slots.row.shape, own.key.shape[-1]
    visible = call.mask.block(call.frame, slots.row, slot_count, start.key, size)
    visible = visible.reshape(visible.shape[-3:])  # of one example, whether or not the mask has a batch axis
    if visible.shape[0] > 1:
        visible = jax.lax.dynamic_slice_in_dim(visible, slots.head, 1, axis=0)
    block = Block(
        rows=Rows(own.query[None], (), (), None),
        keys=Keys(own.key[None], own.value[None], None, (), (), None),
        coupling=dataclasses.replace(call.coupling, pre=(), post=(), key_of=None, value_of=None),
        bias=None,
        visible=visible & einops.rearrange(slots.filled, "s -> 1 s 1"),
        dropout_key=call.dropout_key,
        start=start,
    )
    return block_heads(block, has_data(call))[0][0]


ENGINE = Engine("routed", run, CAPTURES, refuses=refuses, routes=True, about="active heads alone")
