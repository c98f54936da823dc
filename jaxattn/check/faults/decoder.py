"""Wrong caches. `right_decoder` is what they are made of; a fault replaces one of its steps."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja
from jaxattn.check.faults.fault import Fault
from jaxattn.check.faults.right import kept, right
from jaxattn.check.subjects.attention import states
from jaxattn.check.subjects.decoder import DECODES, Decoder, Room, Rows
from jaxattn.check.tracing.stages import Stages
from jaxattn.check.tracing.trace import trace_of
from jaxattn.check.tracing.traced import Trace
from jaxattn.check.verdict import enable_x64

NO_WINDOW = 2**30


class State(NamedTuple):
    """Rows in slots: key [b, s, g, d], value [b, s, g, v], valid [b, s]; position [s], -1 for none.

    taken: rows that came; refused: whether one did not fit; window: `NO_WINDOW` for none.
    """

    key: Array
    value: Array
    valid: Array
    position: Array
    taken: Array
    refused: Array
    window: Array


def start(room: Room) -> State:
    shape = room.batch, room.capacity
    zeros = lambda width: jnp.zeros((*shape, room.key_heads, width), room.dtype)
    return State(
        zeros(room.d), zeros(room.v), jnp.zeros(shape, bool), jnp.full(room.capacity, -1, jnp.int32),
        jnp.zeros((), jnp.int32), jnp.zeros((), bool), jnp.asarray(room.window or NO_WINDOW, jnp.int32),
    )  # fmt: skip


def positions(state: State, n: int) -> Array:
    return state.taken + jnp.arange(n, dtype=jnp.int32)


def fits(state: State, n: int) -> Array:
    return (state.window < NO_WINDOW) | (state.taken + n <= state.key.shape[1])


def slots(state: State, at: Array) -> Array:
    return at % state.key.shape[1]


def value_slots(state: State, at: Array) -> Array:
    return slots(state, at)


def stored_as(x: Array) -> Array:
    return x


def keep(refused: Array, old: Array, new: Array) -> Array:
    """Of a refused step everything is dropped."""
    return jnp.where(refused, old, new)


def visible(state: State, at: Array) -> Array:
    """[b, 1, n, s]: slots that hold a real row, not later than the row at `at`, inside its window."""
    behind = at[:, None] - state.position
    seen = (state.position >= 0) & (behind >= 0) & (behind < state.window)
    return state.valid[:, None, None] & seen


def reset(state: State) -> State:
    none = jax.tree.map(jnp.zeros_like, state)
    return none._replace(position=jnp.full_like(state.position, -1), window=state.window)


def reorder(state: State, index: Array) -> State:
    return state._replace(key=state.key[index], value=state.value[index], valid=state.valid[index])


def attend(query: Array, key: Array, value: Array, mask: Array) -> Array:
    return right(query, key, value, mask=mask)


def rollback(state: State, n: int) -> State:
    left = state.taken - n
    return state._replace(taken=left, position=jnp.where(state.position < left, state.position, -1))


STEPS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (positions, fits, slots, value_slots, stored_as, keep, visible, attend, reset, reorder, rollback)
}


def right_decoder(name: str = "right", /, **steps: Callable[..., Any]) -> Decoder:
    """A cache of slots that may be a ring; `steps` replaces `STEPS`."""
    s = {**STEPS, **steps}

    def step(state: State, rows: Rows) -> tuple[State, Array]:
        n = rows.key.shape[1]
        at = s["positions"](state, n)
        here, there = s["slots"](state, at), s["value_slots"](state, at)
        valid = jnp.ones(rows.key.shape[:2], bool) if rows.valid is None else rows.valid
        refused = state.refused | ~s["fits"](state, n)
        new = State(
            state.key.at[:, here].set(s["stored_as"](rows.key)),
            state.value.at[:, there].set(s["stored_as"](rows.value)),
            state.valid.at[:, here].set(valid), state.position.at[here].set(at), state.taken + n, refused,
            state.window,
        )  # fmt: skip
        after = State(*(s["keep"](refused, *pair) for pair in zip(state, new, strict=True)))
        after = after._replace(refused=refused)
        out = s["attend"](rows.query, after.key, after.value, s["visible"](after, at))
        return after, jnp.where(refused, jnp.nan, out).astype(out.dtype)

    return Decoder(
        name, start, step, frozenset(DECODES), s["reset"], s["reorder"], s["rollback"],
        stored=lambda state: (state.key, state.value),
        placed=lambda state, key, value: state._replace(key=key, value=value),
    )  # fmt: skip


# A trace of the last rows of a script: what the state holds and shows, against what it should.

B, T, H, G, D, V, LAST = 2, 5, 6, 3, 7, 11, 2


def _feed(decoder: Decoder, state: State, rows: Rows, *calls: slice) -> State:
    for at in calls:
        state, _ = decoder.step(state, jax.tree.map(lambda x, at=at: x[:, at], rows))
    return state


def example(seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, D), (B, T, G, D), (B, T, G, V)
    return Rows(*(jnp.asarray(rng.normal(size=shape)) for shape in shapes))


def _room(capacity: int = T + 2, window: int | None = None) -> Room:
    return Room(B, H, G, D, V, capacity, window, "float64")


HEAD, TAIL, WHOLE, ONE = slice(0, T - LAST), slice(T - LAST, T), slice(0, T), slice(0, 1)


def in_two_calls(decoder: Decoder, capacity: int = T + 2, window: int | None = None) -> tuple[State, Rows]:
    """A prompt, then a chunk."""
    rows = example()
    return _feed(decoder, decoder.start(_room(capacity, window)), rows, HEAD, TAIL), rows


def after_a_refusal(decoder: Decoder) -> tuple[State, Rows]:
    """A full state, and one row too many."""
    rows = example()
    state = _feed(decoder, decoder.start(_room(T)), rows, WHOLE)
    return _feed(decoder, state, example(1), ONE), rows


def after_a_reset(decoder: Decoder) -> tuple[State, Rows]:
    """A row of another sequence first."""
    state = _feed(decoder, decoder.start(_room()), example(1), ONE)
    assert decoder.reset is not None
    return _feed(decoder, decoder.reset(state), example(), WHOLE), example()


def after_beams_moved(decoder: Decoder) -> tuple[State, Rows]:
    """Both examples go on from the second."""
    rows, index = example(), jnp.asarray([1, 1])
    state = _feed(decoder, decoder.start(_room()), rows, HEAD)
    assert decoder.reorder is not None
    taken = jax.tree.map(lambda x: jnp.concatenate([x[index, HEAD], x[:, TAIL]], 1), rows)
    return _feed(decoder, decoder.reorder(state, index), rows, TAIL), taken


def after_a_rollback(decoder: Decoder) -> tuple[State, Rows]:
    """A row of another draft is given up."""
    rows = example()
    state = _feed(decoder, decoder.start(_room()), rows, HEAD)
    state = _feed(decoder, state, example(1), ONE)
    assert decoder.rollback is not None
    return _feed(decoder, decoder.rollback(state, 1), rows, TAIL), rows


Script = Callable[[Decoder], tuple[State, Rows]]


def traced(script: Script, **steps: Callable[..., Any]) -> Trace:
    """The stored rows after a script, and what the last rows see of them, held to the rows that came."""
    with enable_x64(True):
        state, rows = script(right_decoder(**steps))
        at, room = jnp.arange(T - LAST, T), state.key.shape[1]
        want = [np.pad(np.asarray(x), ((0, 0), (0, max(0, room - T)), (0, 0), (0, 0))) for x in rows[1:3]]
        behind = np.asarray(at)[:, None] - np.arange(max(room, T))
        shown = (behind >= 0) & (behind < np.asarray(state.window))
        seen = {**STEPS, **steps}["visible"](state, at)
        return held(rows.query[:, TAIL], (state.key, state.value), want, seen, np.stack([shown] * B)[:, None])


def held(query: Array, got: Any, want: Any, seen: Any, shown: np.ndarray) -> Trace:
    """The trace of a query on rows as they are stored and seen, where others are wanted and shown."""
    return trace_of(
        Stages(
            project_k=lambda _: np.asarray(got[0]),
            project_v=lambda _: np.asarray(got[1]),
            mask=lambda x, _: np.where(np.asarray(seen), x, -np.inf),
        ),
        np.asarray(states(query)), tuple(np.asarray(states(jnp.asarray(x))) for x in want),
        ja.masks.from_flax(jnp.asarray(shown)), heads=query.shape[2], kv_heads=got[0].shape[2],
        d=query.shape[3], residual=False, expected=Stages(project_k=lambda x: x, project_v=lambda x: x),
    )  # fmt: skip


def _state(
    says: str, source: str, law: str, stage: str, script: Script = in_two_calls, **steps: Callable[..., Any]
) -> Fault:
    subject = right_decoder("planted", **steps)
    return Fault(says, source, law, subject, stage, functools.partial(traced, script, **steps))


def _not_cleaned(query: Array, key: Array, value: Array, mask: Array) -> Array:
    return right(query, key, value, mask=mask, clean=kept)


def _from_the_last(state: State, at: Array) -> Array:
    """Where a dynamic update lands that does not fit: moved back until it does."""
    return at - jnp.maximum(0, at[-1] + 1 - state.key.shape[1])


FAULTS: dict[str, Fault] = {
    "padding that is stored as it comes": Fault(
        "0 times NaN in a padding row of a cache",
        "PUB-05",
        "padding-holds-anything",
        right_decoder("planted", attend=_not_cleaned),
        why="a trace of finite rows shows none",
    ),
    "cached call aligned at the start": _state(
        "row i of a cached call sees keys up to i, so that a step sees key 0 alone",
        "PUB-11; PUB-12",
        "chunk-alignment",
        "masked scores",
        visible=lambda state, at: visible(state, at - at[0]),
    ),
    "chunk that sees itself whole": _state(
        "the mask of used slots takes the place of the causal one",
        "PUB-12",
        "chunks-are-the-pass",
        "masked scores",
        visible=lambda state, at: visible(state, jnp.broadcast_to(at[-1], at.shape)),
    ),
    "unused slots are seen": _state(
        "zeros of slots without a row take a share of the weights",
        "PUB-12",
        "unused-slots-hidden",
        "masked scores",
        visible=lambda state, at: visible(state, at) | (state.position < 0),
    ),
    "index that stands": _state(
        "every call writes from slot 0 on",
        "PUB-12",
        "steps-are-the-pass",
        "K",
        positions=lambda state, n: jnp.arange(n, dtype=jnp.int32),
    ),
    "V written over": _state(
        "K is appended, V of every call starts at slot 0: the pair is of different rows",
        "M3.2 0x0AB",
        "steps-are-the-pass",
        "V",
        value_slots=lambda state, at: at - at[0],
    ),
    "write is clamped": _state(
        "a row that does not fit replaces the last",
        "PUB-13",
        "overflow-refused",
        "K",
        functools.partial(in_two_calls, capacity=T - 1),
        fits=lambda state, n: jnp.ones((), bool),
        slots=_from_the_last,
        value_slots=_from_the_last,
    ),
    "refused row is written": _state(
        "the refusal is told, and the row is written all the same",
        "PUB-13",
        "refused-changes-nothing",
        "K",
        after_a_refusal,
        keep=lambda refused, old, new: new,
    ),
    "reset keeps the index": _state(
        "a new sequence goes on behind the rows of the last",
        "PUB-13",
        "fresh-state",
        "K",
        after_a_reset,
        reset=lambda state: state,
    ),
    "beams not reordered": _state(
        "hypotheses change places, their stored rows do not",
        "M3.2 0x0AB",
        "beams-reordered",
        "K",
        after_beams_moved,
        reorder=lambda state, index: state,
    ),
    "rollback keeps the rows": _state(
        "rows of a rejected draft stay, and new ones come behind them",
        "M3.2 0x0AB",
        "rolled-back",
        "K",
        after_a_rollback,
        rollback=lambda state, n: state,
    ),
    "ring without its window": _state(
        "a ring shows all that it still holds, not the window alone",
        "PUB-13",
        "window-is-the-pass",
        "masked scores",
        functools.partial(in_two_calls, window=3),
        visible=lambda state, at: visible(state._replace(window=jnp.asarray(NO_WINDOW)), at),
    ),
    "cache narrower than its rows": _state(
        "rows of float64 are rounded to float32 where they are kept",
        "PUB-07",
        "kept-in-its-type",
        "K",
        stored_as=lambda x: x.astype(jnp.float32).astype(x.dtype),
    ),
}
