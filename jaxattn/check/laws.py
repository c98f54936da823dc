"""The laws that an attention is asked to hold, each with inputs so small that they can be read.

A law draws a call for given sizes, asks the subject, and measures how far the answer is from what must
hold. What must hold is computed by loops over numpy, or said by the law itself (a row that sees one key is
that key's value), never by another engine.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.subject import Call, Feature, Subject
from jaxattn.check.verdict import enable_x64

Level = Literal["shape", "axes", "numbers", "behaviour"]
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


class Law(NamedTuple):
    """One law.

    Attributes:
        name, level: what it is called, and what kind of contract it is.
        says: what must hold, as a sentence.
        judge: measures a subject at given sizes.
        needs: features without which it cannot be asked.
        plain: whether it speaks of softmax(q k / sqrt(d)) v alone.
    """

    name: str
    level: Level
    says: str
    judge: Callable[[Subject, Sizes], Outcome]
    needs: frozenset[Feature]
    plain: bool


LAWS: dict[str, Law] = {}


def law(level: Level, says: str, *needs: Feature, plain: bool = False) -> Callable[[Callable], Callable]:
    """Enter a judge into the table under its own name."""

    def enter(judge: Callable[[Subject, Sizes], Outcome]) -> Callable:
        name = judge.__name__.replace("_", "-")
        LAWS[name] = Law(name, level, says, judge, frozenset(needs), plain)
        return judge

    return enter


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
    bias = np.zeros(shape) if call.bias is None else np.asarray(call.bias, np.float64)
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


def _agrees(subject: Subject, call: Call, want: Any = None, limit: float = SINGLE, note: str = "") -> Outcome:
    return Outcome(distance(subject.attend(call), loops(call) if want is None else want), limit, note)


def _moved(x: Array, *index: Any) -> Array:
    """x with some entries moved far."""
    return x.at[index].add(3.0)


def _only(shape: tuple[int, ...], shown: Iterator[tuple[int, ...]]) -> Array:
    mask = np.zeros(shape, bool)
    for index in shown:
        mask[index] = True
    return jnp.asarray(mask)


# Shape


@law("shape", "the output is [b, q, h, v], for sizes of which no two are equal", "cross")
def output_shape(subject, sizes):
    call = draw(sizes)
    got = subject.attend(call).shape
    want = (*call.query.shape[:3], call.value.shape[3])
    return Outcome(float(got != want), 0.0, f"got {got}, expected {want}")


@law("shape", "values may be wider than queries and keys", "cross", "d_v", plain=True)
def value_width(subject, sizes):
    return _agrees(subject, draw(sizes, wide=True))


# Axes


@law(
    "axes",
    "with equal scores each head of each example returns the mean of its own values",
    "cross",
    plain=True,
)
def heads_in_order(subject, sizes):
    call = draw(sizes)
    code = np.fromfunction(lambda b, k, h, v: 1000 * b + 100 * h + 10 * k + v, call.value.shape)
    call = call._replace(query=jnp.zeros_like(call.query), value=jnp.asarray(code, jnp.float32))
    return _agrees(subject, call, note="value[b,k,h,v] = 1000 b + 100 h + 10 k + v")


@law("axes", "weights of a row add up to one over the keys", "cross", plain=True)
def softmax_over_keys(subject, sizes):
    call = draw(sizes)
    call = call._replace(value=jnp.ones_like(call.value))
    return _agrees(
        subject, call, np.ones((*call.query.shape[:3], call.value.shape[3])), note="all values are 1"
    )


@law("axes", "True shows a key: a row that sees one key returns its value", "mask", "cross", plain=True)
def mask_polarity(subject, sizes):
    call = draw(sizes)
    b, q, k = sizes.b, sizes.q, sizes.k
    mask = _only((b, 1, q, k), ((n, 0, i, (i + n) % k) for n in range(b) for i in range(q)))
    call = call._replace(mask=mask)
    got = np.asarray(subject.attend(call))
    flipped = distance(got, loops(call._replace(mask=~mask))) <= SINGLE
    return Outcome(distance(got, loops(call)), SINGLE, "True hides" if flipped else "")


@law("axes", "axes of size 1 in a mask are spread by axis, though all sizes are equal", "mask", plain=True)
def mask_broadcast(subject, sizes):
    n = max(2, sizes.h)
    rng, worst, note = np.random.default_rng(3), 0.0, ""
    call = draw(Sizes(n, n, n, n, sizes.d, sizes.v, n))
    shapes = ((n, 1, 1, n), (1, 1, n, n), (n, 1, n, n)) + (
        ((1, n, n, n),) if "head_mask" in subject.supports else ()
    )
    for shape in shapes:
        mask = rng.random(shape) < 0.5
        mask[..., 0] = True
        off = _agrees(subject, call._replace(mask=jnp.asarray(mask))).measured
        if not off <= worst:
            worst, note = off, f"mask {shape} of b = h = q = k = {n}"
    return Outcome(worst, SINGLE, note)


@law(
    "axes", "each key head serves a block of query heads that follow one another", "gqa", "cross", plain=True
)
def gqa_order(subject, sizes):
    call = draw(sizes, groups=True)
    got = np.asarray(subject.attend(call))
    order = np.arange(sizes.h) % sizes.g
    tiled = call._replace(key=call.key[:, :, order], value=call.value[:, :, order])
    note = "key heads are tiled" if distance(got, loops(tiled)) <= SINGLE else ""
    return Outcome(distance(got, loops(call)), SINGLE, note)


@law("axes", "causal: row i sees keys up to i", "causal", plain=True)
def causal_square(subject, sizes):
    return _agrees(subject, draw(sizes, square=True)._replace(causal=True))


@law("axes", "as many queries as keys or not, heads and rows keep their places", "cross", plain=True)
def cross_lengths(subject, sizes):
    return _agrees(subject, draw(sizes._replace(q=sizes.k + 2)))


# Numbers


@law("numbers", "softmax(q k / sqrt(d)) v, as loops in float64 compute it", "cross", plain=True)
def values(subject, sizes):
    call = draw(sizes)
    got, d = np.asarray(subject.attend(call)), sizes.d
    for scale, name in (
        (np.sqrt(d), "no scale"),
        (1 / np.sqrt(d), "scale 1/d"),
        (np.sqrt(1 / sizes.h), "model width"),
    ):
        if d > 1 and distance(got, loops(call._replace(query=call.query * scale))) <= SINGLE:
            return Outcome(distance(got, loops(call)), SINGLE, name)
    return Outcome(distance(got, loops(call)), SINGLE)


@law("numbers", "float64 inputs are computed in float64, softmax included", "float64", plain=True)
def float64_throughout(subject, sizes):
    with enable_x64(True):
        query, key, value = _doubles(sizes, 0)
        call = Call(query, key, value)
        out = subject.attend(call)
        return Outcome(distance(out, loops(call)), DOUBLE, f"output is {out.dtype}")


@law("numbers", "bfloat16 inputs: sums of the softmax are float32", plain=True)
def half_precision_sums(subject, sizes):
    k = 1024
    call = draw(sizes._replace(q=k), square=True)
    half = lambda x: x.astype(jnp.bfloat16)
    call = Call(half(jnp.zeros_like(call.query)), half(call.key), half(jnp.ones_like(call.value)))
    want = np.ones((*call.query.shape[:3], call.value.shape[3]))
    return _agrees(subject, call, want, 2**-7, note=f"{k} keys of equal score and value 1")


@law("numbers", "scores of 1e6 overflow nothing: the largest takes all", "cross", plain=True)
def large_scores(subject, sizes):
    call = draw(sizes)
    call = call._replace(query=call.query * 1e6)
    return _agrees(subject, call)


@law("numbers", "a bias is added to the scaled scores", "bias", "cross", plain=True)
def bias_added(subject, sizes):
    call = draw(sizes)
    bias = np.random.default_rng(4).normal(size=(sizes.b, sizes.h, sizes.q, sizes.k)).astype(np.float32)
    return _agrees(subject, call._replace(bias=jnp.asarray(bias)))


def _with_empty_row(sizes: Sizes) -> Call:
    """A call whose first row sees no key, and the others all."""
    call = draw(sizes)
    mask = np.ones((sizes.b, 1, sizes.q, sizes.k), bool)
    mask[:, :, 0] = False
    return call._replace(mask=jnp.asarray(mask))


@law("numbers", "a row that sees no key returns zeros", "mask", "cross", plain=True)
def empty_row_value(subject, sizes):
    call = _with_empty_row(sizes)
    got = np.asarray(subject.attend(call))
    mean = distance(got[:, 0], loops(call._replace(query=0 * call.query, mask=None))[:, 0]) <= SINGLE
    return Outcome(distance(got, loops(call)), SINGLE, "it returns the mean of all values" if mean else "")


@law("numbers", "a row that sees no key has zero, finite gradients", "mask", "cross", "tracing")
def empty_row_gradient(subject, sizes):
    call = _with_empty_row(sizes)
    first = lambda *sides: jnp.sum(subject.attend(Call(*sides, mask=call.mask))[:, 0] ** 2)
    owed = jax.jit(jax.grad(first, (0, 1, 2)))(*call[:3])
    return Outcome(
        max(distance(x, 0 * np.asarray(x, np.float64)) if np.isfinite(x).all() else np.inf for x in owed), 0.0
    )


def _hidden(sizes: Sizes) -> tuple[Call, int]:
    """A call whose last key is hidden from all rows."""
    call = draw(sizes)
    mask = np.ones((sizes.b, 1, sizes.q, sizes.k), bool)
    mask[..., -1] = False
    return call._replace(mask=jnp.asarray(mask)), sizes.k - 1


@law("numbers", "a hidden pair has exactly zero gradient", "mask", "cross", "tracing")
def hidden_gradient(subject, sizes):
    call, last = _hidden(sizes)
    loss = lambda key, value: jnp.sum(subject.attend(call._replace(key=key, value=value)) ** 2)
    owed = jax.jit(jax.grad(loss, (0, 1)))(call.key, call.value)
    return Outcome(max(float(np.abs(np.asarray(x)[:, last]).max()) for x in owed), 0.0)


@law("numbers", "NaN in a hidden value reaches no output", "mask", "cross")
def hidden_nan_value(subject, sizes):
    call, last = _hidden(sizes)
    broken = call._replace(value=call.value.at[:, last].set(jnp.nan))
    return Outcome(distance(subject.attend(broken), subject.attend(call)), SINGLE)


@law("numbers", "inf in a hidden key reaches no gradient", "mask", "cross", "tracing")
def hidden_inf_key(subject, sizes):
    call, last = _hidden(sizes)
    key = call.key.at[:, last].set(jnp.inf)
    loss = lambda query: jnp.sum(subject.attend(call._replace(query=query, key=key)) ** 2)
    want = lambda query: jnp.sum(subject.attend(call._replace(query=query)) ** 2)
    return Outcome(distance(*(jax.jit(jax.grad(f))(call.query) for f in (loss, want))), SINGLE)


# Behaviour


@law("behaviour", "what comes after row i changes nothing up to i, and something after it", "causal")
def causality(subject, sizes):
    call = draw(sizes._replace(q=max(3, sizes.q)), square=True)._replace(causal=True)
    at = call.query.shape[1] // 2
    late = (slice(None), slice(at, None))
    changed = call._replace(**{n: _moved(getattr(call, n), *late) for n in ("query", "key", "value")})
    before, after = np.asarray(subject.attend(call)), np.asarray(subject.attend(changed))
    open_ = np.asarray(subject.attend(changed._replace(causal=False)))
    free = np.asarray(subject.attend(call._replace(causal=False)))
    if distance(after[:, at:], before[:, at:]) == 0:
        return Outcome(np.inf, 0.0, "control: the change does nothing even after it")
    if distance(open_[:, :at], free[:, :at]) == 0:
        return Outcome(np.inf, 0.0, "control: without causality a leak would not be seen")
    return Outcome(float(np.abs(after[:, :at] - before[:, :at]).max()), 0.0, f"rows from {at} on were moved")


@law("behaviour", "rows of padding behind a mask change nothing", "mask", "cross")
def padding(subject, sizes):
    call = draw(sizes)
    more = draw(sizes._replace(k=2), seed=1)
    wide = call._replace(
        key=jnp.concatenate([call.key, more.key], 1), value=jnp.concatenate([call.value, more.value], 1)
    )
    shown = np.arange(wide.key.shape[1]) < sizes.k
    mask = jnp.asarray(np.broadcast_to(shown, (sizes.b, 1, 1, shown.size)))
    return Outcome(distance(subject.attend(wide._replace(mask=mask)), subject.attend(call)), SINGLE)


@law("behaviour", "the same call twice gives the same bits")
def deterministic(subject, sizes):
    call = draw(sizes, square=True)
    return Outcome(float(np.any(np.asarray(subject.attend(call)) != np.asarray(subject.attend(call)))), 0.0)


@law("behaviour", "jit changes nothing", "tracing")
def under_jit(subject, sizes):
    call = draw(sizes, square=True)
    traced = jax.jit(lambda *sides: subject.attend(Call(*sides)))(*call[:3])
    return Outcome(distance(traced, subject.attend(call)), SINGLE)


@law("behaviour", "an example alone gives what it gives in a batch")
def batch_independence(subject, sizes):
    call = draw(sizes._replace(b=3), square=True)
    second = lambda x: x[1:2]
    alone = subject.attend(Call(second(call.query), second(call.key), second(call.value)))
    return Outcome(distance(np.asarray(subject.attend(call))[1:2], alone), SINGLE)


@law("behaviour", "vmap over examples is the batch", "tracing")
def under_vmap(subject, sizes):
    call = draw(sizes._replace(b=3), square=True)
    one = lambda *sides: subject.attend(Call(*(x[None] for x in sides)))[0]
    return Outcome(distance(jax.vmap(one)(*call[:3]), subject.attend(call)), SINGLE)


@law("behaviour", "heads of query, key and value permuted, those of the output are", "cross", plain=True)
def heads_permuted(subject, sizes):
    call = draw(sizes)
    order = np.roll(np.arange(sizes.h), 1)
    turn = lambda x: x[:, :, order]
    turned = Call(turn(call.query), turn(call.key), turn(call.value))
    return Outcome(distance(subject.attend(turned), np.asarray(subject.attend(call))[:, :, order]), SINGLE)


@law("behaviour", "the last row alone, against all keys, is the last row of a causal pass", "causal", "cross")
def decode_parity(subject, sizes):
    call = draw(sizes, square=True)
    whole = np.asarray(subject.attend(call._replace(causal=True)))[:, -1:]
    return Outcome(distance(subject.attend(call._replace(query=call.query[:, -1:])), whole), SINGLE)


@law("behaviour", "<J v, u> = <v, J' u> in float64", "float64", "tracing")
def adjoint(subject, sizes):
    with enable_x64(True):
        sides, move = _doubles(sizes, 0), _doubles(sizes, 5)
        run = jax.jit(lambda *sides: subject.attend(Call(*sides)))
        out, pushed = jax.jvp(run, sides, move)
        u = jnp.asarray(np.random.default_rng(6).normal(size=out.shape), out.dtype)
        pulled = jax.vjp(run, *sides)[1](u)
        left, right = float(jnp.vdot(pushed, u)), _inner(pulled, move)
        size = float(jnp.linalg.norm(pushed) * jnp.linalg.norm(u))
        return Outcome(abs(left - right) / max(size, 1e-300), 1e-13)


@law(
    "behaviour",
    "the gradient is what the function does, by central differences in float64",
    "float64",
    "tracing",
)
def finite_differences(subject, sizes):
    with enable_x64(True):
        sides, move = _doubles(sizes, 0), _doubles(sizes, 5)
        loss = jax.jit(lambda *sides: jnp.sum(jnp.sin(subject.attend(Call(*sides)))))
        at = lambda step: float(loss(*(x + step * y for x, y in zip(sides, move, strict=True))))
        h = 1e-4  # the error of the five-point rule is of order h^4, of rounding eps / h
        want = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        got = _inner(jax.grad(loss, (0, 1, 2))(*sides), move)
        return Outcome(abs(got - want) / max(1.0, abs(want)), 1e-9)


@law("behaviour", "second derivatives exist, and are symmetric", "float64", "tracing")
def second_order(subject, sizes):
    with enable_x64(True):
        query, key, value = _doubles(sizes._replace(b=1, q=max(3, sizes.q)), 0)
        loss = lambda x: jnp.sum(jnp.sin(subject.attend(Call(x.reshape(query.shape), key, value))))
        square = np.asarray(jax.jit(jax.jacfwd(jax.grad(loss)))(query.ravel()))
        off = distance(square, square.T)
        return Outcome(off if np.abs(square).max() > 0 else np.inf, 1e-10)


def _doubles(sizes: Sizes, seed: int) -> tuple[Array, ...]:
    """Query, key and value of as many rows in float64."""
    return tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in draw(sizes, square=True, seed=seed)[:3])


def _inner(a: Any, b: Any) -> float:
    return float(sum(jnp.vdot(x, y) for x, y in zip(a, b, strict=True)))


def _dropped(subject: Subject, call: Call, seed: int) -> np.ndarray:
    return np.asarray(subject.attend(call._replace(dropout=(0.5, jax.random.key(seed)))))


@law("behaviour", "dropout: one key draws one mask, another key another", "dropout")
def dropout_by_key(subject, sizes):
    call = draw(Sizes(2, 2, 16, 16, 4, 4, 2))
    same = distance(_dropped(subject, call, 0), _dropped(subject, call, 0))
    other = distance(_dropped(subject, call, 0), _dropped(subject, call, 1))
    return Outcome(
        same if other > SINGLE else np.inf, 0.0, "" if other > SINGLE else "two keys draw the same"
    )


@law("behaviour", "dropout: every row draws its own, and the mean stays", "dropout", plain=True)
def dropout_by_row(subject, sizes):
    call = draw(Sizes(2, 2, 64, 64, 4, 4, 2))
    call = call._replace(query=jnp.zeros_like(call.query), value=jnp.ones_like(call.value))
    rows = _dropped(subject, call, 0)[0, :, 0, 0]  # each the mean of 64 draws that are 0 or 2
    if len(np.unique(rows.round(6))) < 3:
        return Outcome(np.inf, 0.0, "all rows draw the same")
    return Outcome(abs(float(rows.mean()) - 1), 0.1, "mean of 64 rows of 64 draws; its deviation is 1/64")
