"""Laws of dropout."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import SINGLE, Outcome, Sizes, distance, draw, law, noted, table
from jaxattn.check.subjects.attention import Call, Subject

RATE, K = 0.25, 64
OWN = Sizes(2, 2, K, K, 4, 4, 2)


def _dropped(subject: Subject, call: Call, seed: int | None) -> np.ndarray:
    """The answer with dropout, from a key of that seed or from none."""
    key = None if seed is None else jax.random.key(seed)
    return np.asarray(subject.attend(call._replace(dropout=(RATE, key))))


def _sums(subject: Subject) -> np.ndarray:
    """Sums of the weights of a row [b, q, h]: the mean of K draws, each 0 or 1 / (1 - RATE)."""
    call = draw(OWN, square=True)
    zeros, ones = (jnp.asarray(np.full(call.query.shape, x, np.float32)) for x in (0, 1))
    return _dropped(subject, call._replace(query=zeros, value=ones), 0)[..., 0].astype(np.float64)


@law("behaviour", "dropout: one key draws one mask, another key another", "dropout", sizes=(OWN,))
def dropout_by_key(subject, sizes):
    call = draw(OWN, square=True)
    first = _dropped(subject, call, 0)
    same, other = (distance(_dropped(subject, call, seed), first) for seed in (0, 1))
    if not other > SINGLE:
        return Outcome(np.inf, 0.0, "two keys draw the same")
    return noted(same, 0.0, "one key twice draws another")


@law("behaviour", "dropout: a rate without a key is evaluation, time after time", "dropout", sizes=(OWN,))
def dropout_in_evaluation(subject, sizes):
    call = draw(OWN, square=True)
    want = subject.attend(call)
    off = [distance(_dropped(subject, call, None), want) for _ in range(2)]
    return noted(
        float(np.max(off)), SINGLE, "it drops" + ("" if off[0] == off[1] else ", other pairs each time")
    )


@law("behaviour", "dropout: every row, head and example draws its own", "dropout", plain=True, sizes=(OWN,))
def dropout_by_row(subject, sizes):
    sums = _sums(subject).round(6)
    one = {"rows": sums[0, :, 0], "heads": sums[0, :, :].T, "examples": sums[:, :, 0]}
    alike = [name for name, x in one.items() if len(np.unique(x, axis=0)) < min(3, len(x))]
    return noted(float(len(alike)), 0.0, f"{', '.join(alike)} draw the same")


@law(
    "behaviour", "dropout: what is kept is divided by 1 - rate, so that the mean stays", "dropout", plain=True
)
def dropout_mean(subject, sizes):
    """The mean of 256 rows of K draws; its deviation is 0.0045."""
    mean = float(_sums(subject).mean())
    known = {
        "not divided": 1 - RATE,
        "times the rate": RATE * (1 - RATE),
        "divided by the rate": (1 - RATE) / RATE,
    }
    names = [name for name, other in known.items() if abs(mean - other) < 0.03 * other]
    return noted(abs(mean - 1), 0.03, names[0] if names else f"the mean is {mean:.3g} times what it was")


@law(
    "behaviour",
    "dropout: under jit, and in a pass that is computed again for its derivative, one key draws one mask",
    "dropout",
    "tracing",
    plain=True,
    sizes=(OWN,),
)
def dropout_under_remat(subject, sizes):
    """y is linear in the values, so <gradient of <y, u>, value> = <y, u> if both passes drop the same."""
    call, key = draw(OWN, square=True), jax.random.key(0)
    u = np.asarray(draw(OWN, square=True, seed=1).query)

    @jax.jit
    def run(value, key):
        again = jax.checkpoint(lambda value: subject.attend(call._replace(value=value, dropout=(RATE, key))))
        y, pull = jax.vjp(again, value)
        return y, pull(jnp.asarray(u, y.dtype))[0]

    y, gradient = (np.asarray(x, np.float64) for x in run(call.value, key))
    once = distance(y, _dropped(subject, call, 0))
    left, right = np.vdot(gradient, np.asarray(call.value, np.float64)), np.vdot(y, u)
    again = float(abs(left - right)) / float(np.linalg.norm(y) * np.linalg.norm(u))
    note = "the pass computed again draws another" if not again <= SINGLE else "under jit it draws another"
    return noted(float(np.max([once, again])), SINGLE, note)


LAWS = table(
    dropout_by_key,
    dropout_in_evaluation,
    dropout_by_row,
    dropout_mean,
    dropout_under_remat,
)
