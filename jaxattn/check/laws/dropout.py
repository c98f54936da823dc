"""Laws of dropout."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import SINGLE, Outcome, Sizes, distance, draw, law, table
from jaxattn.check.subject import Call, Subject


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


LAWS = table(
    dropout_by_key,
    dropout_by_row,
)
