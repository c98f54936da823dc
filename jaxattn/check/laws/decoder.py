"""Laws of attention that keeps state: steps are the pass, room is no content, nothing stale is read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.draws.decoder import cut, empty, fed, joined, near, program, rows_of, whole
from jaxattn.check.law import (
    DOUBLE,
    SINGLE,
    SIZES,
    Outcome,
    Sizes,
    Unasked,
    distance,
    law,
    moved,
    noted,
    table,
)
from jaxattn.check.laws.hidden import extremes
from jaxattn.check.subjects.decoder import Decoder, Rows
from jaxattn.check.verdict import enable_x64

ONCE = SIZES[1:2]  # for what compiles a program of its own, or runs outside of jit
FAR = 1e4  # what stands where nothing may be read


@law("numbers", "row by row, outputs are those of one causal pass", about=Decoder)
def steps_are_the_pass(subject, sizes):
    rows = rows_of(subject, sizes)
    _, got = fed(subject, empty(subject, rows), rows)
    want = whole(subject, rows)
    first = np.broadcast_to(want[:, :1], want.shape)
    return noted(distance(got, want), SINGLE, "every step sees key 0 alone" if near(got, first) else "")


@law("numbers", "a prompt, chunks, steps: any split is one causal pass", "chunks", about=Decoder)
def chunks_are_the_pass(subject, sizes):
    rows, n = rows_of(subject, sizes), sizes.k
    want, worst, note = whole(subject, rows), 0.0, ""
    for split in {(n,), (n // 2, n - n // 2), (*((n - 2,) if n > 2 else ()), 1, 1)}:
        _, got = fed(subject, empty(subject, rows), rows, split)
        off = distance(got, want)
        if not off <= worst:
            worst, note = off, f"rows in calls of {', '.join(map(str, split))}"
    return noted(worst, SINGLE, note)


@law("axes", "row i of a chunk after p rows sees keys up to p + i", "chunks", about=Decoder)
def chunk_alignment(subject, sizes):
    rows, p, n = rows_of(subject, sizes), sizes.k // 2, sizes.k - sizes.k // 2
    if subject.plain:  # every output then is the mean of the values that are seen
        rows = rows._replace(query=jnp.zeros_like(rows.query))
    _, got = fed(subject, empty(subject, rows), rows, [1] * p + [n])
    want = whole(subject, rows)
    return noted(distance(got, want), SINGLE, "aligned at the start" if near(got[:, p:], want[:, :n]) else "")


# Room


@law("numbers", "what stands in unused slots reaches no output", "buffers", about=Decoder)
def unused_slots_hidden(subject, sizes):
    rows, used = rows_of(subject, sizes), max(1, sizes.k // 2)
    state, _ = fed(subject, empty(subject, rows, sizes.k + 2), cut(rows, 0, used))
    want = whole(subject, rows)[:, used:]

    def run(spoiled: np.ndarray) -> np.ndarray:
        here = jnp.asarray(spoiled)[:, None, None]
        key, value = (jnp.where(here, FAR, x).astype(x.dtype) for x in subject.stored(state))
        return fed(subject, subject.placed(state, key, value), cut(rows, used))[1]

    slots = np.arange(sizes.k + 2)
    if near(run(slots == 0), want):
        return noted(np.inf, 0.0, "control: what stands in a used slot is not read either")
    return noted(distance(run(slots >= used), want), SINGLE, f"{FAR:.0f} in the slots from {used} on")


@law("behaviour", "more room than rows changes nothing", about=Decoder)
def room_is_no_content(subject, sizes):
    rows = rows_of(subject, sizes)
    _, got = fed(subject, empty(subject, rows, sizes.k + 2), rows)
    return noted(distance(got, whole(subject, rows)), SINGLE, f"room for 2 more than {sizes.k}")


def _overfull(subject: Decoder, sizes: Sizes) -> tuple[Any, Rows, Rows]:
    """A full state, the rows that it holds, and one more."""
    rows = rows_of(subject, sizes)
    return fed(subject, empty(subject, rows), rows)[0], rows, cut(rows_of(subject, sizes, seed=1), 0, 1)


@law("behaviour", "a row that does not fit raises, gives NaN, or is kept too", about=Decoder, sizes=ONCE)
def overflow_refused(subject, sizes):
    full, rows, more = _overfull(subject, sizes)
    want = whole(subject, joined(rows, more))[:, -1:]
    ways = {"under jit": program(subject.step)[0]} if "tracing" in subject.supports else {}
    ways["outside of jit"] = subject.step
    for way, step in ways.items():
        try:
            got = np.asarray(step(full, more)[1])
        except Exception:  # any error is a refusal
            continue
        off = 0.0 if np.isnan(got).all() else distance(got, want)
        if not off <= SINGLE:
            return noted(off, SINGLE, f"row {sizes.k + 1} of {sizes.k}, {way}, is answered")
    return Outcome(0.0, SINGLE)


@law("behaviour", "a refused row changes no stored row", "buffers", about=Decoder)
def refused_changes_nothing(subject, sizes):
    full, _, more = _overfull(subject, sizes)
    before = [np.array(x) for x in subject.stored(full)]
    try:
        after, _ = fed(subject, full, more)
    except Exception:  # refused; what was there must still be
        after = full
    found = [np.asarray(x)[:, : sizes.k] for x in subject.stored(after)]
    changed = [float(np.abs(x - y).max()) for x, y in zip(found, before, strict=True)]
    return noted(max(changed), 0.0, f"row {sizes.k + 1} of {sizes.k}")


# Other sequences


@law("behaviour", "after another sequence a new one starts from nothing", about=Decoder)
def fresh_state(subject, sizes):
    rows, other = rows_of(subject, sizes), rows_of(subject, sizes, seed=1)
    state, _ = fed(subject, empty(subject, rows), cut(other, 0, 1))
    state = empty(subject, rows) if subject.reset is None else subject.reset(state)
    rows = cut(rows, 0, -1)  # one less than there is room for: a stale row would fit
    return Outcome(distance(fed(subject, state, rows)[1], whole(subject, rows)), SINGLE)


@law("behaviour", "NaN of another sequence is gone after a reset", "reset", about=Decoder)
def reset_forgets_nan(subject, sizes):
    rows, bad = rows_of(subject, sizes), rows_of(subject, sizes, seed=1)
    bad = Rows(*(x.at[:, -1].set(jnp.nan) for x in bad[:3]))
    state, _ = fed(subject, empty(subject, rows), bad)
    _, got = fed(subject, subject.reset(state), rows)
    return noted(distance(got, whole(subject, rows)), SINGLE, "its last row was NaN")


@law("behaviour", "a state that was stepped from can be stepped from again", about=Decoder)
def old_state_stands(subject, sizes):
    rows, other = rows_of(subject, sizes), rows_of(subject, sizes, seed=1)
    state, _ = fed(subject, empty(subject, rows), cut(rows, 0, -1))
    fed(subject, state, cut(other, -1))
    _, got = fed(subject, state, cut(rows, -1))
    return noted(distance(got, whole(subject, rows)[:, -1:]), SINGLE, "after another row was tried")


@law("behaviour", "examples of a batch keep to themselves", about=Decoder)
def examples_apart(subject, sizes):
    rows = rows_of(subject, sizes, b=3)
    far = rows._replace(**{n: moved(getattr(rows, n), 1) for n in ("query", "key", "value")})
    one, other = (fed(subject, empty(subject, rows), x)[1] for x in (rows, far))
    if distance(one[1], other[1]) == 0:
        return noted(np.inf, 0.0, "control: the change does nothing in its own example")
    return noted(float(np.abs(one[[0, 2]] - other[[0, 2]]).max()), 0.0, "example 1 of 3 was moved")


@law("behaviour", "a beam goes on from the rows of the one it was taken from", "reorder", about=Decoder)
def beams_reordered(subject, sizes):
    rows, p, order = rows_of(subject, sizes, b=3), sizes.k // 2, np.array([2, 0, 0])
    state, _ = fed(subject, empty(subject, rows), cut(rows, 0, p))
    _, got = fed(subject, subject.reorder(state, jnp.asarray(order)), cut(rows, p))
    taken = joined(jax.tree.map(lambda x: x[order], cut(rows, 0, p)), cut(rows, p))
    note = "they stay where they were" if near(got, whole(subject, rows)[:, p:]) else ""
    return noted(distance(got, whole(subject, taken)[:, p:]), SINGLE, note)


@law("behaviour", "rows that were rolled back are as if they never came", "rollback", about=Decoder)
def rolled_back(subject, sizes):
    rows, other = rows_of(subject, sizes), rows_of(subject, sizes, seed=1)
    state, _ = fed(subject, empty(subject, rows), cut(rows, 0, -1))
    last = cut(other, -1)
    _, got = fed(subject, subject.rollback(state, 1), last)
    want = whole(subject, joined(cut(rows, 0, -2), last))[:, -1:]
    return noted(distance(got, want), SINGLE, "one row was given up")


# Visibility


@law("behaviour", "padding rows, left or right of a prompt, are never seen", "padding", about=Decoder)
def padded_prompt(subject, sizes):
    rows, at = rows_of(subject, sizes, b=3), np.arange(sizes.k)
    prompt = sizes.k - 1
    for side, real in (("left", at >= 1), ("right", (at < prompt - 1) | (at == prompt))):
        valid = np.stack([real, at >= 0, at >= 0])
        hidden = jnp.asarray(~valid)[..., None, None]
        filled = [jnp.where(hidden, 9.0, x) for x in (rows.query, rows.key, rows.value)]
        padded = Rows(*filled, valid=jnp.asarray(valid))
        _, got = fed(subject, empty(subject, rows), padded)
        want = whole(subject, padded)
        off = distance(got[valid], want[valid])
        if not off <= SINGLE:
            return noted(off, SINGLE, f"padding on the {side} of one of three prompts")
    return Outcome(0.0, SINGLE)


@law("numbers", "NaN, inf and numbers up to the type's largest in a padding row reach no real row", "padding",
     about=Decoder, sizes=ONCE)  # fmt: skip
def padding_holds_anything(subject, sizes):
    rows, at = rows_of(subject, sizes), np.arange(sizes.k)
    valid = np.broadcast_to(at != sizes.k // 2, (len(rows.query), sizes.k))
    hidden = jnp.asarray(~valid)[..., None, None]

    def outputs(value: float) -> np.ndarray:
        filled = [jnp.where(hidden, value, x).astype(x.dtype) for x in rows[:3]]
        padded = Rows(*filled, valid=jnp.asarray(valid))
        return fed(subject, empty(subject, rows), padded)[1][valid]

    want = outputs(0.0)
    for name, value in extremes(rows.key.dtype).items():
        off = distance(outputs(value), want)
        if not off <= SINGLE:
            return noted(off, SINGLE, name)
    return Outcome(0.0, SINGLE)


@law("behaviour", "a window keeps and shows the newest rows, for ever", "window", about=Decoder)
def window_is_the_pass(subject, sizes):
    rows, w = rows_of(subject, sizes), max(1, sizes.k // 2)
    want = whole(subject, rows, w)
    _, got = fed(subject, empty(subject, rows, w + 1, w), rows)
    note = "older rows are seen" if distance(got, want) > SINGLE else ""
    return noted(distance(got, want), SINGLE, note and f"{note}: window {w} in room for {w + 1}")


# Programs


@law("behaviour", "a step under jit is the step, compiled once for all", "tracing", about=Decoder, sizes=ONCE)
def step_under_jit(subject, sizes):
    rows, traced = rows_of(subject, sizes), program(subject.step)[1]
    before = len(traced)
    _, got = fed(subject, empty(subject, rows), rows)
    if (count := len(traced) - before) > 1:
        return noted(np.inf, SINGLE, f"{sizes.k} steps of one row are traced {count} times")
    _, first = subject.step(empty(subject, rows), cut(rows, 0, 1))
    return Outcome(distance(got[:, :1], first), SINGLE)


@law("numbers", "rows of float64 are kept and read in float64", "float64", about=Decoder, sizes=ONCE)
def kept_in_its_type(subject, sizes):
    with enable_x64(True):
        rows = Rows(*(jnp.asarray(np.asarray(x, np.float64) / 3) for x in rows_of(subject, sizes)[:3]))
        _, got = fed(subject, empty(subject, rows), rows)
        return noted(distance(got, whole(subject, rows)), DOUBLE, f"output is {got.dtype}")


@law("behaviour", "what is declared impossible raises", about=Decoder)
def impossible_raises(subject, sizes):
    asked = rows_of(subject, sizes)
    wide = jnp.concatenate([asked.value, asked.value], -1)
    calls = {
        "chunks": (asked, sizes.k),
        "padding": (asked._replace(valid=jnp.ones(asked.query.shape[:2], bool)), 1),
        "gqa": (asked._replace(key=asked.key[:, :, :1], value=asked.value[:, :, :1]), 1),
        "d_v": (asked._replace(value=wide), 1),
    }
    calls = {name: call for name, call in calls.items() if name not in subject.supports}
    if not calls:
        raise Unasked("it declares all of chunks, padding, gqa and d_v")
    taken = []
    for name, (rows, n) in calls.items():
        if name == "gqa" and sizes.h == 1:
            continue
        try:
            subject.step(empty(subject, rows), cut(rows, 0, n))
        except Exception:  # any error is a refusal
            continue
        taken.append(name)
    return noted(float(len(taken)), 0.0, f"taken silently: {', '.join(taken)}" if taken else "")


LAWS = table(
    steps_are_the_pass,
    chunks_are_the_pass,
    chunk_alignment,
    unused_slots_hidden,
    room_is_no_content,
    overflow_refused,
    refused_changes_nothing,
    fresh_state,
    reset_forgets_nan,
    old_state_stands,
    examples_apart,
    beams_reordered,
    rolled_back,
    padded_prompt,
    padding_holds_anything,
    window_is_the_pass,
    step_under_jit,
    kept_in_its_type,
    impossible_raises,
)
