"""Assumptions about queries and keys: how states are drawn under each, and what theory then says of scores.

    score[q,k] = <query[q], key[k]> = sum over d coordinates of a product

Entries independent, mean 0, variance 1: each product has mean 0 and variance 1, so the standard deviation of
a score is sqrt(d). Each other case breaks one of these assumptions, or the factor that they ask for.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

REPEATED = 4  # coordinates that differ, in the case that repeats them
MATCH = 0.5  # correlation of a query with its own key, in the case that has one
MODEL_ROWS = 8192  # of the normal model of weights


class Grid(NamedTuple):
    """Sizes of one draw: b score matrices of q queries and k keys."""

    examples: int
    queries: int
    keys: int


class Theory(NamedTuple):
    """Raw scores as theory has them: of one query they are normal, and spread as its norm.

    Attributes:
        spread: standard deviation of all scores.
        row: root mean square of the standard deviation of one query's scores.
        free: n, where a query's squared norm varies as chi-squared of n does; inf where it is fixed.
        matched: correlation of a query with its own key.
    """

    spread: float
    row: float
    free: float
    matched: float = 0.0


class Stats(NamedTuple):
    """Of one draw: std of all scores, mean largest weight of a row, mean entropy of a row in nats."""

    std: float
    largest: float
    entropy: float


Draw = Callable[[Array, Grid, int], tuple[Array, Array]]


class Case(NamedTuple):
    """One set of assumptions.

    Attributes:
        says: the assumptions, or what is broken.
        draw: `(rng, grid, d) -> x_q [b, q, d], x_k [b, k, d]`.
        theory: `(grid, d) -> Theory` of the raw scores.
        factor: of the scores by d; None is the library's default.
        qk_norm: of the HeadSpec.
    """

    says: str
    draw: Draw
    theory: Callable[[Grid, int], Theory]
    factor: Callable[[int], float] | None = None
    qk_norm: Literal["rms"] | None = None


def normal(rng: Array, grid: Grid, width: int) -> tuple[Array, Array]:
    """Both sides independent, mean 0, variance 1."""
    q_key, k_key = jax.random.split(rng)
    draw = lambda rng, rows: jax.random.normal(rng, (grid.examples, rows, width))
    return draw(q_key, grid.queries), draw(k_key, grid.keys)


def changed(change: Callable[[Array], Array]) -> Draw:
    """Normal draws, both sides changed alike."""

    def draw(rng: Array, grid: Grid, width: int) -> tuple[Array, Array]:
        query, key = normal(rng, grid, width)
        return change(query), change(key)

    return draw


def repeated(rng: Array, grid: Grid, width: int) -> tuple[Array, Array]:
    query, key = normal(rng, grid, REPEATED)
    copies = lambda x: jnp.tile(x, (1, 1, width // REPEATED))
    return copies(query), copies(key)


def matched(rng: Array, grid: Grid, width: int) -> tuple[Array, Array]:
    """Query i correlates with key i mod k, as a row does with itself or with what it looks for."""
    query, key = normal(rng, grid, width)
    own = key[:, jnp.arange(grid.queries) % grid.keys]
    return MATCH * own + math.sqrt(1 - MATCH**2) * query, key


def matched_theory(grid: Grid, width: int) -> Theory:
    """Of the k scores of a query, one has mean r d and variance d (1 + r^2), the others 0 and d."""
    share = 1 / grid.keys
    variance = width * (1 + MATCH**2 * share) + share * (1 - share) * (MATCH * width) ** 2
    return Theory(math.sqrt(variance), math.sqrt(width), width, MATCH)


def of_variance(variance: float) -> Callable[[Grid, int], Theory]:
    """Entries independent, normal, mean 0, all of this variance."""
    return lambda grid, d: Theory(variance * math.sqrt(d), variance * math.sqrt(d), d)


def fixed(spread: Callable[[int], float]) -> Callable[[Grid, int], Theory]:
    """All queries have the same norm."""
    return lambda grid, d: Theory(spread(d), spread(d), math.inf)


CASES = {
    "assumed": Case("entries independent, normal, mean 0, variance 1", normal, of_variance(1)),
    "signs": Case("the same, entries -1 or +1: they need not be normal", changed(jnp.sign), fixed(math.sqrt)),
    "variance 4": Case(
        "variance 4 on both sides: 4 times the spread", changed(lambda x: 2 * x), of_variance(4)
    ),
    "mean 1": Case(
        "mean 1, variance 1: spread sqrt(3d), of a row sqrt(2d)",
        changed(lambda x: 1 + x),
        lambda grid, d: Theory(math.sqrt(3 * d), math.sqrt(2 * d), 4 * d / 3),
    ),
    "repeated": Case(
        f"{REPEATED} independent coordinates, repeated over the width: spread d/sqrt({REPEATED})",
        repeated,
        lambda grid, d: Theory(d / math.sqrt(REPEATED), d / math.sqrt(REPEATED), REPEATED),
    ),
    "matched": Case(
        f"a query correlates ({MATCH}) with one key: that score has mean {MATCH} d", matched, matched_theory
    ),
    "unit rows": Case(
        "rows of norm 1 (cosines): spread 1/sqrt(d) before any factor",
        changed(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
        fixed(lambda d: 1 / math.sqrt(d)),
    ),
    "rms norm": Case(
        'variance 4, then HeadSpec(qk_norm="rms"): the mean square is 1 again',
        changed(lambda x: 2 * x),
        fixed(math.sqrt),
        qk_norm="rms",
    ),
    "factor 1/d": Case(
        "as assumed, with HeadSpec(scale=1/d)", normal, of_variance(1), factor=lambda d: 1 / d
    ),
}


def predicted(theory: Theory, factor: float, keys: int) -> Stats:
    """What rows of scores after this theory show, by numpy alone.

    Exact but for its own draws where entries are normal with mean 0; elsewhere normal scores stand for a sum
    of many coordinates, which narrow heads do not have.
    """
    rng = np.random.default_rng(0)
    norm = np.full((MODEL_ROWS, 1), theory.row)
    if math.isfinite(theory.free):
        norm = norm * np.sqrt(rng.chisquare(theory.free, norm.shape) / theory.free)
    scores = norm * rng.standard_normal((MODEL_ROWS, keys))
    if theory.matched:
        rest = math.sqrt(1 - theory.matched**2)
        scores[:, 0] = theory.matched * norm[:, 0] ** 2 + rest * scores[:, 0]
    logits = factor * (scores - scores.max(-1, keepdims=True))
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    weights = np.exp(logs)
    entropy = -(weights * logs).sum(-1)
    return Stats(factor * theory.spread, float(weights.max(-1).mean()), float(entropy.mean()))


def expected_error(grid: Grid, seeds: int, width: int) -> float:
    """Standard error of std / sqrt(d) where all assumptions hold, for the mean over seeds.

    Scores that share a query or a key are uncorrelated, but a norm spreads all scores of its row at once:
    Var(mean square / d) = 2/(d q) + 2/(d k) + 2 (1 + 1/d)/(q k) of one score matrix; the std moves half
    as much.
    """
    q, k = grid.queries, grid.keys
    square = 2 / (width * q) + 2 / (width * k) + 2 * (1 + 1 / width) / (q * k)
    return math.sqrt(square / (grid.examples * seeds)) / 2
