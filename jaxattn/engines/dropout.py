"""Dropout whose draw belongs to a query row, a head and a key, whatever computes them.

The bit of a weight is a hash of the caller's key and the numbers of its example, head, query row and key,
so neither the engine, nor its blocks, nor the number of keys changes what is drawn.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry2x32_p

from jaxattn.engines.layout import ORIGIN, Origin


def keep(
    rng: Array,
    rate: float,
    shared: tuple[str, ...],
    shape: tuple[int, ...],
    start: Origin = ORIGIN,
) -> Array:
    """Which weights of a block survive.

    Args:
        rng: the caller's PRNG key, of any implementation.
        rate: probability that a weight is dropped.
        shared: axes among b, h, q along which one draw serves all rows.
        shape: [..., h, q, k] of the block.
        start: its first example, head, query row and key.

    Returns:
        bool [..., h, q, k].
    """
    *batch, heads, q_size, k_size = shape
    seed = jax.random.bits(rng, (2,), jnp.uint32)
    example, head, row = (
        jnp.zeros(1, jnp.uint32) if axis in shared else _from(first, size)
        for axis, first, size in (
            ("b", start.example, math.prod(batch)),
            ("h", start.head, heads),
            ("q", start.row, q_size),
        )
    )
    owner = _hash(seed[0], seed[1], example[:, None], head[None, :])
    line = _hash(owner[0][..., None], owner[1][..., None], row, jnp.uint32(0))
    bits, _ = _hash(line[0][..., None], line[1][..., None], _from(start.key, k_size), jnp.uint32(1))
    kept = bits < jnp.uint32(min(round((1 - rate) * 2**32), 2**32 - 1))
    return jnp.broadcast_to(kept, (math.prod(batch), heads, q_size, k_size)).reshape(shape)


def _from(first: int | Array, size: int) -> Array:
    """first, first + 1, ... of the hash's type; numbers that are given one by one as they are."""
    first = jnp.asarray(first, jnp.uint32)
    return first if first.ndim else first + jnp.arange(size).astype(jnp.uint32)


def scaled(x: Array, kept: Array, rate: float) -> Array:
    """Inverted dropout: what survives is divided by its probability, so that the mean stays."""
    return jnp.where(kept, x / (1 - rate), jnp.zeros((), x.dtype))


def _hash(*words: Array) -> tuple[Array, Array]:
    """Two words from four, each output bit depending on every input bit (Threefry-2x32)."""
    shape = jnp.broadcast_shapes(*(w.shape for w in words))
    a, b = threefry2x32_p.bind(*(jnp.broadcast_to(w, shape) for w in words))
    return a, b
