"""Pairs of a row and an active head, put into blocks of one head each: what sparse execution runs on.

A block is one matrix product, whatever rows chose its head. The pairs of a head fill as many blocks as they
need, the last one with empty slots, so shapes are static and no pair is ever dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.axes import at_least_float32, contract
from jaxattn.linear import with_pull

LEAST, MOST = 8, 256  # slots of a block: fewer waste loops, more waste slots


class Route(NamedTuple):
    """Where each pair goes; n blocks of s slots, in the order of heads, rows ascending in each.

    Attributes:
        head: [n], the head of each block.
        pair: [n, s], the pair in each slot, a number below q * a; q * a where the slot is empty.
        slot: [q, a], the slot of each pair, a number below n * s.
    """

    head: Array
    pair: Array
    slot: Array

    @property
    def filled(self) -> Array:
        """Which slots hold a pair, [n, s]."""
        return self.pair < self.slot.size

    @property
    def row(self) -> Array:
        """The row of each slot, [n, s]; any row where the slot is empty."""
        return jnp.minimum(self.pair, self.slot.size - 1) // self.slot.shape[-1]


def block_shape(rows: int, active: int, heads: int, most: int | None = None) -> tuple[int, int]:
    """How many blocks of how many slots (at most `most`) hold all pairs, whatever the router says.

    n <= ceil(pairs / s) + heads: in the worst case every head has a last block with one pair.

    Example:
        >>> block_shape(rows=2048, active=8, heads=16)
        (79, 256)

    Raises:
        ValueError: where the number of rows is symbolic, as in `jax.export`.
    """
    if not isinstance(rows, int):
        raise ValueError(
            f"engine 'routed': it plans its blocks by the number of rows, which is symbolic ({rows}). "
            "Fix: engine='auto' or 'dense', which compute every head."
        )
    pairs = rows * active
    slots = LEAST
    while slots < (most or MOST) and 8 * slots * heads <= pairs:
        slots *= 2
    return min(pairs, (pairs + heads * (slots - 1)) // slots), slots


def route(head: Array, heads: int, most: int | None = None) -> Route:
    """The route of [q, a] active heads out of `heads`, in blocks of at most `most` slots.

    The heads of a row are distinct.

    Example:
        >>> found = route(jnp.array([[0, 2], [1, 2], [0, 2]]), heads=3)
        >>> found.head[:3].tolist(), found.pair[:3, :4].tolist()
        ([0, 1, 2], [[0, 4, 6, 6], [2, 6, 6, 6], [1, 3, 5, 6]])
    """
    rows, active = head.shape
    n, slots = block_shape(rows, active, heads, most)
    chosen = jax.nn.one_hot(head, heads, dtype=jnp.int32).sum(-2)
    before = jnp.take_along_axis(jnp.cumsum(chosen, 0) - chosen, head, axis=-1)
    blocks = -(-chosen.sum(0) // slots)
    first = jnp.cumsum(blocks) - blocks
    slot = first[head] * slots + before
    pair = jnp.full(n * slots, head.size, jnp.int32)
    pair = pair.at[slot.reshape(-1)].set(jnp.arange(head.size, dtype=jnp.int32), unique_indices=True)
    begun = first[None, :] <= jnp.arange(n, dtype=first.dtype)[:, None]  # [n, h]
    of_block = begun.sum(-1) - 1
    return Route(of_block, einops.rearrange(pair, "(n s) -> n s", s=slots), slot)


def _to_slots(x: Array, where: Route) -> tuple[Array, tuple[()]]:
    flat = einops.rearrange(x, "q a d -> (q a) d")
    at = jnp.minimum(where.pair, where.slot.size - 1)
    return jnp.where(where.filled[..., None], _rows(flat, at), jnp.zeros((), x.dtype)), ()


def _to_pairs(x: Array, where: Route) -> tuple[Array, tuple[()]]:
    return _rows(einops.rearrange(x, "n s d -> (n s) d"), where.slot), ()


def _spread(operands: tuple[Array, Array], where: Route) -> tuple[Array, tuple[()]]:
    x, kernel = operands

    def block(xs):
        row, head = xs
        return contract(_rows(x, row), kernel[head], "s i, i o -> s o", dtype=_sums(x))

    return _to_pairs(jax.lax.map(block, (where.row, where.head)), where)


def _collect(operands: tuple[Array, Array], where: Route) -> tuple[Array, tuple[()]]:
    pairs, kernel = operands

    def block(total, xs):
        slots, row, head = xs
        part = contract(slots, kernel[head], "s i, i o -> s o", dtype=_sums(pairs))
        return total.at[row].add(part, mode="promise_in_bounds"), None

    zeros = jnp.zeros_like(pairs, _sums(pairs), (where.slot.shape[0], kernel.shape[-1]))
    slots, _ = _to_slots(pairs, where)
    return jax.lax.scan(block, zeros, (slots, where.row, where.head))[0], ()


def _kernel_cotangent(x: Array, pairs: Array, where: Route, heads: int) -> Array:
    """sum over the pairs of each head of pair times x[row]: [q, i] and [q, a, o] to [h, o, i].

    The product with the wide rows inmost runs at nearly twice the speed of the other.
    """

    def block(total, xs):
        slots, row, head = xs
        part = contract(slots, _rows(x, row), "s o, s i -> o i", dtype=_sums(x))
        sum_ = jax.lax.dynamic_index_in_dim(total, head, keepdims=False) + part
        return jax.lax.dynamic_update_index_in_dim(total, sum_, head, 0), None

    zeros = jnp.zeros_like(x, _sums(x), (heads, pairs.shape[-1], x.shape[-1]))
    slots, _ = _to_slots(pairs, where)
    return jax.lax.scan(block, zeros, (slots, where.row, where.head))[0]


def _spread_pull(operands, where: Route, kept, cotangent: Array):
    x, kernel = operands
    to_x = collect(cotangent.astype(x.dtype), _turned(kernel), where)
    to_kernel = _kernel_cotangent(x, cotangent.astype(x.dtype), where, kernel.shape[0])
    return to_x.astype(x.dtype), _turned(to_kernel).astype(kernel.dtype)


def _collect_pull(operands, where: Route, kept, cotangent: Array):
    pairs, kernel = operands
    to_pairs = spread(cotangent.astype(pairs.dtype), _turned(kernel), where)
    to_kernel = _kernel_cotangent(cotangent.astype(pairs.dtype), pairs, where, kernel.shape[0])
    return to_pairs.astype(pairs.dtype), to_kernel.astype(kernel.dtype)


def _turned(kernel: Array) -> Array:
    return einops.rearrange(kernel, "h i o -> h o i")


def _rows(x: Array, index: Array) -> Array:
    return x.at[index].get(mode="promise_in_bounds")


def _sums(x: Array) -> jnp.dtype:
    return at_least_float32(x.dtype)


Ruled = Callable[..., Array]
_ruled_spread: Ruled = with_pull(_spread, _spread_pull)
_ruled_collect: Ruled = with_pull(_collect, _collect_pull)
_ruled_to_slots: Ruled = with_pull(
    _to_slots, lambda x, where, kept, cotangent: _to_pairs(cotangent, where)[0]
)
_ruled_to_pairs: Ruled = with_pull(
    _to_pairs, lambda x, where, kept, cotangent: _to_slots(cotangent, where)[0]
)


def to_slots(x: Array, where: Route) -> Array:
    """Pairs to slots, [q, a, d] to [n, s, d]; empty slots are zero."""
    return _ruled_to_slots(x, where)


def to_pairs(x: Array, where: Route) -> Array:
    """Slots to pairs, [n, s, d] to [q, a, d]: what empty slots hold is left behind."""
    return _ruled_to_pairs(x, where)


def spread(x: Array, kernel: Array, where: Route) -> Array:
    """out[q,a] = x[q] @ kernel[head(q,a)]: [q, i] and [h, i, o] to [q, a, o], block by block."""
    if where.slot.size == 0:
        return jnp.zeros_like(x, shape=(*where.slot.shape, kernel.shape[-1]))
    return _ruled_spread((x, kernel), where)


def collect(pairs: Array, kernel: Array, where: Route) -> Array:
    """out[q] = sum_a pairs[q,a] @ kernel[head(q,a)]: [q, a, i] and [h, i, o] to [q, o], block by block."""
    if where.slot.size == 0:
        return jnp.zeros_like(pairs, shape=(where.slot.shape[0], kernel.shape[-1]))
    return _ruled_collect((pairs, kernel), where)
