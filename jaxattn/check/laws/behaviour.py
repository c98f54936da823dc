"""Laws of what may change nothing: a later row, padding, another call or example, a transformation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import (
    SIDES,
    SINGLE,
    Outcome,
    Sizes,
    Unasked,
    changed,
    distance,
    draw,
    law,
    moved,
    noted,
    some,
    table,
)
from jaxattn.check.subjects.attention import Call, Subject

COMPILED = "/jax/core/compile/backend_compile_duration"  # the event of one program


@law("behaviour", "what comes after row i changes nothing up to i, and something after it", "causal")
def causality(subject, sizes):
    call = draw(sizes._replace(q=max(3, sizes.q)), square=True)._replace(causal=True)
    at = call.query.shape[1] // 2
    late = (slice(None), slice(at, None))
    changed = call._replace(**{n: moved(getattr(call, n), *late) for n in SIDES})
    before, after = np.asarray(subject.attend(call)), np.asarray(subject.attend(changed))
    open_ = np.asarray(subject.attend(changed._replace(causal=False)))
    free = np.asarray(subject.attend(call._replace(causal=False)))
    if distance(after[:, at:], before[:, at:]) == 0:
        return Outcome(np.inf, 0.0, "control: the change does nothing even after it")
    if distance(open_[:, :at], free[:, :at]) == 0:
        return Outcome(np.inf, 0.0, "control: without causality a leak would not be seen")
    return noted(float(np.abs(after[:, :at] - before[:, :at]).max()), 0.0, f"rows from {at} on were moved")


@law("behaviour", "rows of padding behind a mask change nothing", "mask", "cross")
def padding(subject, sizes):
    wide = draw(sizes)
    less = max(1, min(sizes.q, sizes.k - 1))
    call = wide._replace(**{n: jnp.asarray(np.asarray(getattr(wide, n))[:, :less]) for n in ("key", "value")})
    mask = np.broadcast_to(np.arange(sizes.k) < less, (sizes.b, 1, 1, sizes.k))
    return Outcome(
        distance(subject.attend(wide._replace(mask=jnp.asarray(mask))), subject.attend(call)), SINGLE
    )


@law("behaviour", "the same call twice gives the same bits")
def deterministic(subject, sizes):
    call = draw(sizes, square=True)
    return Outcome(float(np.any(np.asarray(subject.attend(call)) != np.asarray(subject.attend(call)))), 0.0)


@law("behaviour", "a call leaves its arrays as they were")
def inputs_untouched(subject, sizes):
    """NumPy's arrays, which can be written to; to refuse them is to leave them."""
    call = draw(sizes, square=True)
    call = call._replace(**{name: np.array(getattr(call, name)) for name in SIDES})
    if "mask" in subject.supports:
        call = call._replace(mask=some(sizes.b, 1, sizes.q, sizes.q))
    if "bias" in subject.supports:
        call = call._replace(bias=np.ones((sizes.b, sizes.h, sizes.q, sizes.q), np.float32))
    given = {name: x for name, x in call._asdict().items() if isinstance(x, np.ndarray)}
    before = {name: x.copy() for name, x in given.items()}
    note = ""
    try:
        np.asarray(subject.attend(call))
    except Exception as error:
        note = f"refused: {type(error).__name__}"
        subject.attend(draw(sizes, square=True))  # one that raises whatever it is given refuses nothing
    written = [name for name, x in given.items() if not np.array_equal(x, before[name])]
    return Outcome(float(len(written)), 0.0, f"written to: {', '.join(written)}" if written else note)


@functools.cache
def _compiled() -> list[int]:
    """How many programs JAX compiled since this was first asked.

    It counts on and does nothing else: not every version of JAX lets a listener go.
    """
    count = [0]

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        count[0] += event == COMPILED

    jax.monitoring.register_event_duration_secs_listener(listen)
    return count


@law("behaviour", "a third call of the same shapes compiles nothing")
def no_retrace(subject, sizes):
    call, count = draw(sizes, square=True), _compiled()
    before = count[0]
    jax.jit(lambda: jnp.zeros(()))()  # control: a new function is compiled
    if count[0] == before:
        raise Unasked("JAX does not tell here what it compiles")
    for _ in range(3):
        before = count[0]
        np.asarray(subject.attend(call))
    again = count[0] - before
    return noted(float(again), 0.0, f"{again} programs each time: a new jit, or a loop outside of jit")


def _masked(subject: Subject, sizes: Sizes) -> tuple[Any, ...]:
    """Query, key and value of a square call, and a mask where the subject takes one."""
    mask = jnp.asarray(some(sizes.b, 1, sizes.q, sizes.q)) if "mask" in subject.supports else None
    return *draw(sizes, square=True)[:3], mask


@law("behaviour", "jit changes nothing, with the mask traced too", "tracing", "eager")
def under_jit(subject, sizes):
    arrays, run = _masked(subject, sizes), lambda *arrays: subject.attend(Call(*arrays))
    return Outcome(distance(jax.jit(run)(*arrays), run(*arrays)), SINGLE)


@law("behaviour", "an example alone gives what it gives in a batch")
def batch_independence(subject, sizes):
    call = draw(sizes._replace(b=2), square=True)
    alone = subject.attend(changed(call, lambda x: x[1:]))
    return Outcome(distance(np.asarray(subject.attend(call))[1:], alone), SINGLE)


@law("behaviour", "vmap over examples, and their masks, is the batch", "tracing")
def under_vmap(subject, sizes):
    arrays = _masked(subject, sizes._replace(b=2))
    one = lambda arrays: subject.attend(Call(*jax.tree.map(lambda x: x[None], arrays)))[0]
    return Outcome(distance(jax.jit(jax.vmap(one))(arrays), subject.attend(Call(*arrays))), SINGLE)


@law("behaviour", "heads of query, key and value permuted, those of the output are", "cross", plain=True)
def heads_permuted(subject, sizes):
    call = draw(sizes)
    turn = lambda x: np.roll(np.asarray(x), -1, 2)
    return Outcome(distance(subject.attend(changed(call, turn)), turn(subject.attend(call))), SINGLE)


@law("behaviour", "the last row alone, against all keys, is the last row of a causal pass", "causal", "cross")
def decode_parity(subject, sizes):
    call = draw(sizes, square=True)
    whole = np.asarray(subject.attend(call._replace(causal=True)))[:, -1:]
    last = jnp.asarray(np.asarray(call.query)[:, -1:])
    return Outcome(distance(subject.attend(call._replace(query=last)), whole), SINGLE)


LAWS = table(
    causality,
    padding,
    deterministic,
    inputs_untouched,
    no_retrace,
    under_jit,
    batch_independence,
    under_vmap,
    heads_permuted,
    decode_parity,
)
