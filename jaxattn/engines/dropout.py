"""Dropout whose draw belongs to a query row, a head and a key, whatever computes them.

Every (batch row, head, query row, run of 128 keys) has a PRNG key of its own, folded from the caller's, so
that neither the engine, nor its blocks, nor the number of keys changes what is drawn.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

RUN = 128


def keep(
    rng: Array,
    rate: float,
    shared: tuple[str, ...],
    batch: tuple[int, ...],
    heads: int,
    q_start: int | Array,
    q_size: int,
    k_start: int | Array,
    k_size: int,
) -> Array:
    """Which weights of a block survive.

    Args:
        rng: the caller's PRNG key.
        rate: probability that a weight is dropped.
        shared: axes among b, h, q along which one draw serves all rows.
        batch: sizes of the batch axes.
        heads: number of heads h.
        q_start, q_size, k_start, k_size: the block.

    Returns:
        bool [..., h, q, k].
    """
    examples = 1 if "b" in shared else math.prod(batch)
    rows = jnp.zeros(1, jnp.int32) if "q" in shared else q_start + jnp.arange(q_size)
    first = k_start // RUN
    runs = (k_size + 2 * RUN - 2) // RUN  # enough wherever in its run the block begins
    keys = rng
    for index in (
        jnp.arange(examples),
        jnp.arange(1 if "h" in shared else heads),
        rows,
        first + jnp.arange(runs),
    ):
        keys = _fold(keys, index)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, (RUN,)))(keys.reshape(-1))
    kept = kept.reshape(*keys.shape[:-1], runs * RUN)
    kept = jax.lax.dynamic_slice_in_dim(kept, k_start - first * RUN, k_size, axis=-1)
    kept = jnp.broadcast_to(kept, (math.prod(batch), heads, q_size, k_size))
    return kept.reshape(*batch, heads, q_size, k_size)


def scaled(x: Array, kept: Array, rate: float) -> Array:
    """Inverted dropout: what survives is divided by its probability, so that the mean stays."""
    return jnp.where(kept, x / (1 - rate), jnp.zeros((), x.dtype))


def _fold(keys: Array, index: Array) -> Array:
    """One key for each pair of a key and an index: keys [...] -> [..., n]."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(keys, index)
