"""What a law is, and what laws are made of: sizes, drawn calls, loops over numpy, a distance.

What must hold is computed by loops over numpy, or said by the law itself (a row that sees one key is that
key's value), never by another engine.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.subjects.attention import Call, Subject
from jaxattn.check.verdict import Verdict

Level = Literal["shape", "axes", "numbers", "behaviour"]
SIDES = ("query", "key", "value")
SINGLE, DOUBLE = 2e-5, 1e-12  # of the largest value


class Sizes(NamedTuple):
    """Sizes of a call; g key heads, n = q = k where a law needs a square."""

    b: int
    h: int
    q: int
    k: int
    d: int
    v: int
    g: int


# From the smallest on: the first that breaks a law is the one that is reported.
SIZES = (Sizes(1, 1, 1, 2, 1, 1, 1), Sizes(1, 2, 3, 5, 4, 4, 1), Sizes(2, 6, 5, 7, 4, 4, 3))


class Outcome(NamedTuple):
    """What a law measured: it is broken where measured > limit or measured is no number."""

    measured: float
    limit: float
    note: str = ""

    @property
    def broken(self) -> bool:
        return not self.measured <= self.limit


class Unasked(Exception):
    """What a judge raises where its law cannot be asked on this machine; the message says why."""


Judge = Callable[[Any, Sizes], Outcome]


class Law(NamedTuple):
    """One law.

    Attributes:
        name, level: what it is called, and what kind of contract it is.
        says: what must hold, as a sentence.
        judge: measures a subject at given sizes.
        needs: features without which it cannot be asked.
        plain: whether it speaks of softmax(q k / sqrt(d)) v alone.
        about: the type of subject that it judges.
        sizes: sizes of its own, where it needs many draws or many keys; it is then asked with these alone.
    """

    name: str
    level: Level
    says: str
    judge: Judge
    needs: frozenset[str]
    plain: bool
    about: type
    sizes: tuple[Sizes, ...] = ()


def law(
    level: Level,
    says: str,
    *needs: str,
    plain: bool = False,
    about: type = Subject,
    sizes: tuple[Sizes, ...] = (),
) -> Callable[[Judge], Law]:
    """Make a judge a law, under its own name."""

    def made(judge: Judge) -> Law:
        name = judge.__name__.replace("_", "-")
        return Law(name, level, says, judge, frozenset(needs), plain, about, sizes)

    return made


def table(*laws: Law) -> dict[str, Law]:
    """Laws by name.

    Raises:
        ValueError: for two of one name.
    """
    found = {one.name: one for one in laws}
    if len(found) != len(laws):
        raise ValueError(f"laws: {len(laws)} laws have {len(found)} names. Fix: a name for each.")
    return found


def draw(
    sizes: Sizes, *, square: bool = False, groups: bool = False, wide: bool = False, seed: int = 0
) -> Call:
    """A call of normal numbers; float64 where JAX has it, rounded to float32 first."""
    rng = np.random.default_rng(seed)
    b, h, q, k, d, v, g = sizes
    k, g, v = (q if square else k), (g if groups else h), (v + 1 if wide else d)
    shapes = (b, q, h, d), (b, k, g, d), (b, k, g, v)
    query, key, value = (jnp.asarray(rng.normal(size=s).astype(np.float32)) for s in shapes)
    return Call(query, key, value)


def loops(call: Call) -> np.ndarray:
    """Plain attention, pair by pair, in float64: [b, q, h, v]; a row without a key is zero."""
    query, key, value = (np.asarray(x, np.float64) for x in call[:3])
    (b, q, h, d), (k, g) = query.shape, key.shape[1:3]
    shape = (b, h, q, k)
    seen = np.ones(shape, bool) if call.mask is None else np.broadcast_to(np.asarray(call.mask), shape).copy()
    if call.causal:
        seen &= np.tril(np.ones((q, k), bool))
    bias = np.broadcast_to(0.0 if call.bias is None else np.asarray(call.bias, np.float64), shape)
    out = np.zeros((b, q, h, value.shape[-1]))
    for n, head, row in np.ndindex(b, h, q):
        keys = np.flatnonzero(seen[n, head, row])
        if keys.size:
            source = head * g // h
            scores = key[n, keys, source] @ query[n, row, head] / np.sqrt(d) + bias[n, head, row, keys]
            raised = np.exp(scores - scores.max())
            out[n, row, head] = (raised / raised.sum()) @ value[n, keys, source]
    return out


def distance(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest expected value (to 1 where that is smaller)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return float("inf")
    if got.size == 0:
        return 0.0
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))


@functools.lru_cache(maxsize=8)
def of_sides(subject: Subject) -> Callable[[Array, Array, Array], Array]:
    """Attention of query, key and value alone; as one program where it can be traced."""
    run = lambda query, key, value: subject.attend(Call(query, key, value))
    return jax.jit(run) if "tracing" in subject.supports else run


def slopes(subject: Subject, call: Call, rows: np.ndarray | None = None) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, of the sum of squares of some output rows [q]; None takes all."""
    shown = np.ones(call.query.shape[1], bool) if rows is None else rows
    return _slopes(subject)(call[:3], call.mask, shown)


@functools.lru_cache(maxsize=8)
def _slopes(subject: Subject) -> Callable[..., tuple[Array, Array, Array]]:
    def loss(sides, mask, shown):
        query, key, value = sides
        out = subject.attend(Call(query, key, value, mask))
        return jnp.sum(jnp.where(shown[:, None, None], out, 0) ** 2)

    return jax.jit(jax.grad(loss))


def noted(measured: float, limit: float, note: str) -> Outcome:
    """An outcome whose note explains what is broken, and is left out where nothing is."""
    outcome = Outcome(measured, limit, note)
    return outcome if outcome.broken else Outcome(measured, limit)


def agrees(subject: Subject, call: Call, want: Any = None, limit: float = SINGLE, note: str = "") -> Outcome:
    """How far an answer is from what is expected; from the loops where nothing else is."""
    return noted(distance(subject.attend(call), loops(call) if want is None else want), limit, note)


def judged(verdict: Verdict) -> Outcome:
    """What a check of the adjoint toolkit found, as a law's outcome."""
    place = f"{verdict.where}: " if verdict.where else ""
    limit = verdict.limit if np.isfinite(verdict.limit) else 0.0
    return noted(verdict.measured, limit, f"{place}{verdict.reason}")


def changed(call: Call, change: Callable[[np.ndarray], np.ndarray]) -> Call:
    """The call with its query, key and value changed alike. NumPy compiles nothing."""
    sides = {name: jnp.asarray(change(np.asarray(getattr(call, name)))) for name in SIDES}
    return call._replace(**sides)


def moved(x: Array, *index: Any) -> Array:
    """x with some entries moved far."""
    other = np.array(x)
    other[index] += 3
    return jnp.asarray(other)


def only(shape: tuple[int, ...], shown: Iterator[tuple[int, ...]]) -> Array:
    mask = np.zeros(shape, bool)
    for index in shown:
        mask[index] = True
    return jnp.asarray(mask)


def some(*shape: int) -> np.ndarray:
    """A mask of about half of all pairs: the first key always, the last never."""
    shown = np.random.default_rng(3).random(shape) < 0.5
    shown[..., -1], shown[..., 0] = False, True
    return shown


def doubles(sizes: Sizes, seed: int) -> tuple[Array, ...]:
    """Query, key and value of as many rows in float64."""
    return tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in draw(sizes, square=True, seed=seed)[:3])
