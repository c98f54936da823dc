"""What laws of state are made of: drawn rows, a state, rows fed to it, the pass that they must be."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.law import SINGLE, Sizes, distance, loops
from jaxattn.check.subjects.attention import Call
from jaxattn.check.subjects.decoder import Decoder, Memory, Room, Rows


def rows_of(subject: Decoder | Memory, sizes: Sizes, *, b: int | None = None, seed: int = 0) -> Rows:
    """k rows of normal numbers, with fewer key heads and wider values where the subject takes them."""
    g = sizes.g if "gqa" in subject.supports else sizes.h
    v = sizes.v + 1 if "d_v" in subject.supports else sizes.d
    rng, b = np.random.default_rng(seed), sizes.b if b is None else b
    shapes = (b, sizes.k, sizes.h, sizes.d), (b, sizes.k, g, sizes.d), (b, sizes.k, g, v)
    query, key, value = (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in shapes)
    return Rows(query, key, value)


def cut(rows: Rows, start: int | None, stop: int | None = None) -> Rows:
    """The rows from start to stop."""
    return jax.tree.map(lambda x: x[:, start:stop], rows)


def empty(subject: Decoder, rows: Rows, capacity: int | None = None, window: int | None = None) -> Any:
    """A state for such rows, by default one that they fill."""
    (b, n, h, d), (g, v) = rows.query.shape, rows.value.shape[2:]
    room = Room(b, h, g, d, v, n if capacity is None else capacity, window, rows.query.dtype.name)
    return subject.start(room)


@functools.lru_cache(maxsize=16)
def program(step: Callable[[Any, Rows], tuple[Any, Array]]) -> tuple[Callable[..., Any], list[int]]:
    """A step under jit, for all laws, and a list that grows with every trace of it."""
    traced: list[int] = []

    def watched(state: Any, rows: Rows) -> tuple[Any, Array]:
        traced.append(0)
        return step(state, rows)

    return jax.jit(watched), traced


def fed(
    subject: Decoder, state: Any, rows: Rows, split: Iterable[int] | None = None
) -> tuple[Any, np.ndarray]:
    """The state after all rows and what came of them, one by one or in chunks; under jit where it can be."""
    step = program(subject.step)[0] if "tracing" in subject.supports else subject.step
    outs, at = [], 0
    for n in split or [1] * rows.query.shape[1]:
        state, out = step(state, cut(rows, at, at + n))
        outs.append(np.asarray(out))
        at += n
    return state, np.concatenate(outs, 1)


def whole(subject: Decoder, rows: Rows, window: int | None = None) -> np.ndarray:
    """One causal pass: by loops, or the subject's own where it is no plain attention."""
    if subject.whole is not None:
        return np.asarray(subject.whole(rows, window))
    i = np.arange(rows.query.shape[1])
    mask = np.ones((len(i), len(i)), bool) if window is None else i[:, None] - i < window
    mask = mask[None, None]
    if rows.valid is not None:
        mask = mask & np.asarray(rows.valid)[:, None, None]
    return loops(Call(*rows[:3], mask=jnp.asarray(mask), causal=True))


def joined(rows: Rows, more: Rows) -> Rows:
    """Rows and the rows after them."""
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), rows, more)


def near(got: Any, other: Any) -> bool:
    """Whether two outputs are the same in single precision."""
    return distance(got, other) <= SINGLE
