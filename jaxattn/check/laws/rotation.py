"""Laws of rotary positions: what a turn keeps, what scores of turned rows say, and of which row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import SINGLE, Outcome, Sizes, distance, draw, law, noted, table
from jaxattn.check.subjects.rotation import Rotation
from jaxattn.check.tracing.formulas import turned
from jaxattn.spec import Rotary

FAR = 2**15  # as many rows as long contexts have; bfloat16 holds each 256th of such numbers


def rows_of(sizes: Sizes, seed: int = 0) -> np.ndarray:
    """The keys of a call, [b, t, h, d]."""
    return np.asarray(draw(sizes, seed=seed).key)


def counted(sizes: Sizes) -> np.ndarray:
    """Positions [b, t] that every rotation takes: 0, 1, 2, ..."""
    return np.broadcast_to(np.arange(sizes.k), (sizes.b, sizes.k))


def turn(subject: Rotation, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.asarray(subject.turn(jnp.asarray(x), jnp.asarray(positions)), np.float64)


def expected(rotary: Rotary, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The turn of [b, t, h, d] in float64, by the formula that traces compare with."""
    return turned(x.astype(np.float64), rotary, positions, x.shape[-1])


def scores(subject: Rotation, sizes: Sizes) -> np.ndarray:
    """Of one query and one key, put in every row: [b, h, i, j]."""
    query, key = (np.repeat(rows_of(sizes, seed)[:, :1], sizes.k, 1) for seed in (0, 1))
    return np.einsum("bihd,bjhd->bhij", *(turn(subject, x, counted(sizes)) for x in (query, key)))


@law("numbers", "each pair of channels turns by position * base^(-2 j / width)", plain=True, about=Rotation)
def turned_pairs(subject, sizes):
    x, positions = rows_of(sizes), counted(sizes)
    got = turn(subject, x, positions)
    other = "adjacent" if subject.rotary.pairs == "half" else "half"
    known = {
        f"its pairs are {other}": expected(dataclasses.replace(subject.rotary, pairs=other), x, positions),
        "it turns backwards": expected(subject.rotary, x, -positions),
        "rows are counted from 1": expected(subject.rotary, x, positions + 1),
    }
    names = [name for name, wrong in known.items() if distance(got, wrong) <= SINGLE]
    return noted(distance(got, expected(subject.rotary, x, positions)), SINGLE, names[0] if names else "")


@law("numbers", "a turn keeps the length of every row and head", about=Rotation)
def turn_keeps_length(subject, sizes):
    x = rows_of(sizes)
    lengths = (np.linalg.norm(y, axis=-1) for y in (turn(subject, x, counted(sizes)), x.astype(float)))
    return Outcome(distance(*lengths), SINGLE)


@law("axes", "scores of turned rows depend on how far apart the rows are, and not on where", about=Rotation)
def turn_is_relative(subject, sizes):
    found = scores(subject, sizes)
    return Outcome(distance(found[..., 1:, 1:], found[..., :-1, :-1]), 10 * SINGLE)


@law("behaviour", "a key one row further gives another score, and one row back a third", about=Rotation)
def turn_tells_order(subject, sizes):
    found = scores(subject, sizes)
    here, after, before = found[..., 0, 0], found[..., 0, 1], found[..., 1, 0]
    least = min(np.abs(a - b).max() for a, b in ((here, after), (here, before), (after, before)))
    return Outcome(float(not least > 1e-3), 0.0)


@law("axes", "all heads turn alike", about=Rotation)
def heads_turn_alike(subject, sizes):
    x = np.repeat(rows_of(sizes)[:, :, :1], sizes.h, 2)
    got = turn(subject, x, counted(sizes))
    return Outcome(distance(got, np.repeat(got[:, :, :1], sizes.h, 2)), SINGLE)


@law("axes", "a row turns by its own position, whatever the others are", "positions", about=Rotation)
def rows_turn_alone(subject, sizes):
    """As in decoding and in packed examples: each example has positions of its own."""
    x = rows_of(sizes)
    positions = 3 * np.random.default_rng(1).permutation(sizes.b * sizes.k).reshape(sizes.b, sizes.k)
    got = turn(subject, x, positions)
    alone = np.zeros(x.shape)
    for n, t in np.ndindex(*x.shape[:2]):
        alone[n : n + 1, t : t + 1] = turn(subject, x[n : n + 1, t : t + 1], positions[n : n + 1, t : t + 1])
    ignored = distance(got, turn(subject, x, counted(sizes))) <= SINGLE
    note = "rows are counted, whatever their positions" if ignored else ""
    return noted(distance(got, alone), SINGLE, note)


@law("numbers", "rows far out turn exactly, in half precision too", "positions", "half_precision",
     plain=True, about=Rotation)  # fmt: skip
def turn_far_out(subject, sizes):
    x = np.asarray(jnp.asarray(rows_of(sizes), jnp.bfloat16).astype(jnp.float32))
    positions = counted(sizes) + FAR + 1
    got = subject.turn(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions)).astype(jnp.float32)
    return noted(distance(got, expected(subject.rotary, x, positions)), 2e-2, "x is bfloat16")


@law("behaviour", "jit changes nothing, positions traced as well", "tracing", about=Rotation)
def turn_under_jit(subject, sizes):
    x, positions = rows_of(sizes), counted(sizes)
    return Outcome(distance(jax.jit(subject.turn)(x, positions), turn(subject, x, positions)), SINGLE)


LAWS = table(
    turned_pairs,
    turn_keeps_length,
    turn_is_relative,
    turn_tells_order,
    heads_turn_alike,
    rows_turn_alone,
    turn_far_out,
    turn_under_jit,
)
