"""Laws of what an attention does when something changes: causality, padding, batches, transformations."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import SINGLE, Outcome, distance, draw, law, moved, table
from jaxattn.check.subject import Call


@law("behaviour", "what comes after row i changes nothing up to i, and something after it", "causal")
def causality(subject, sizes):
    call = draw(sizes._replace(q=max(3, sizes.q)), square=True)._replace(causal=True)
    at = call.query.shape[1] // 2
    late = (slice(None), slice(at, None))
    changed = call._replace(**{n: moved(getattr(call, n), *late) for n in ("query", "key", "value")})
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


LAWS = table(
    causality,
    padding,
    deterministic,
    under_jit,
    batch_independence,
    under_vmap,
    heads_permuted,
    decode_parity,
)
