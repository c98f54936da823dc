"""Laws of caches and of stored sources: right programs hold them, each planted fault breaks its own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.core import Tracer

import jaxattn as ja
import variants
from jaxattn.check.adapters.decoder import DECODERS, MEMORIES, of_attention
from jaxattn.check.draws.decoder import cut, empty, rows_of
from jaxattn.check.faults import decoder as states
from jaxattn.check.faults import memory as sources
from jaxattn.check.faults.decoder import in_two_calls, right_decoder
from jaxattn.check.faults.memory import right_memory
from jaxattn.check.law import SIZES, Sizes
from jaxattn.check.laws import decoder, memory
from jaxattn.check.report import run
from jaxattn.check.subjects.decoder import DECODES, Room, Rows

pytestmark = pytest.mark.heavy

FAULTS = states.FAULTS | sources.FAULTS
LAWS = decoder.LAWS | memory.LAWS
SCRIPTS = {
    fault.traced.args[0]: name
    for name, fault in states.FAULTS.items()
    if isinstance(fault.traced, functools.partial)
}


def rulings(subject, *laws):
    return {ruled.law: ruled for ruled in run(subject, laws=laws or None, quick=True).rulings}


def broken(subject, *laws):
    return {law for law, ruled in rulings(subject, *laws).items() if not ruled.good}


@pytest.fixture
def one_size(monkeypatch):
    """Two heads, five rows: the smallest size at which all there is to see can be seen."""
    monkeypatch.setattr("jaxattn.check.report.SIZES", SIZES[1:2])


def test_right_programs_hold_every_law(one_size):
    found = rulings(right_decoder()) | rulings(right_memory())
    assert found.keys() == LAWS.keys()
    asked = {law for law, ruled in found.items() if ruled.ruling == "holds"}
    assert asked == LAWS.keys() - {"impossible-raises"}, found  # it declares that it can all


@pytest.mark.parametrize("script", SCRIPTS, ids=SCRIPTS.values())
def test_the_right_state_shows_no_divergence(script):
    if getattr(script, "keywords", {}).get("capacity", states.T) < states.T:
        script = functools.partial(in_two_calls, capacity=states.T)  # what fits, fits
    found = states.traced(script)
    assert found, str(found)


def test_the_right_memory_shows_no_divergence():
    found = sources.traced()
    assert found, str(found)


# Laws without a fault of their own in the table.


def _counts(start):
    """Each step is another program: the count of rows is no array."""

    def step(state, rows):
        state, out = right_decoder().step(state[0], rows), state[1]
        return (state[0], (*out, jnp.zeros(()))), state[1]

    return lambda room: (start(room), ()), step


def _longer(state, rows):
    """Weights that know how much room there is."""
    state, out = right_decoder().step(state, rows)
    return state, out * (1 + 0.01 * state.key.shape[1])


def _of_the_batch(state, rows):
    state, out = right_decoder().step(state, rows)
    return state, out + out.sum(0, keepdims=True) - out


def _in_place(start):
    """A cache that changes under the hands of whoever holds it."""
    return lambda room: [start(room)], lambda state, rows: (state, _into(state, rows))


def _into(state: list, rows: Any) -> Any:
    state[0], out = right_decoder().step(state[0], rows)
    return out


def _traced_otherwise(state, rows):
    state, out = right_decoder().step(state, rows)
    return state, out + isinstance(out, Tracer)


def _planted() -> dict[str, Any]:
    right, reader = right_decoder(), right_memory()
    start, step = _counts(right.start)
    listed, changes = _in_place(right.start)
    unpadded = lambda state, rows: right.step(state, rows._replace(valid=None))

    def forgets(state):
        none = jnp.full_like(state.position, -1)
        return state._replace(taken=0 * state.taken, position=none, refused=state.refused & False)

    def dirty(state: Any, rows: Rows) -> Any:
        after, out = right.step(state, rows)
        return after, out + 0 * jax.tree.leaves(after)[0].sum()

    return {
        "room-is-no-content": right._replace(step=_longer),
        "examples-apart": right._replace(step=_of_the_batch),
        "padded-prompt": right._replace(step=unpadded),
        "reset-forgets-nan": right._replace(step=dirty, reset=forgets),
        "old-state-stands": right._replace(
            start=listed, step=changes, supports=frozenset({"gqa", "d_v"}), reset=None
        ),
        "step-under-jit": right._replace(start=start, step=step),
        "impossible-raises": right._replace(supports=right.supports - {"gqa"}),
        "memory-is-the-source": reader._replace(
            read=lambda stored, query, source: (stored, 2 * reader.read(stored, query, source)[1])
        ),
        "beams-share-a-source": reader._replace(
            share=lambda stored, beams: stored._replace(beams=beams * 0)
        ),
    }  # fmt: skip


def test_laws_without_a_fault_in_the_table_can_break():
    planted = _planted()
    assert planted.keys() == LAWS.keys() - {fault.law for fault in FAULTS.values()}
    for law, subject in planted.items():
        assert rulings(subject, law)[law].ruling == "broken", law
    few = right_decoder()._replace(supports=frozenset())
    note = rulings(few, "impossible-raises")["impossible-raises"].note
    assert note == "taken silently: chunks, padding, d_v"
    both = right_decoder()._replace(step=_traced_otherwise)
    assert broken(both, "step-under-jit") == {"step-under-jit"}


def test_controls_are_no_way_round():
    """A cache whose placed rows are not read hides unused slots in vain."""
    right = right_decoder()
    deaf = right._replace(placed=lambda state, key, value: state)
    ruled = rulings(deaf, "unused-slots-hidden")["unused-slots-hidden"]
    assert ruled.ruling == "broken" and "control" in ruled.note


# What is known by name.

QUIET = ("steps-are-the-pass", "overflow-refused", "refused-changes-nothing", "impossible-raises")


def test_our_cache_holds_every_law(one_size):
    found = rulings(DECODERS["jaxattn"]())
    assert not {law for law, ruled in found.items() if not ruled.good}, found
    unasked = {law for law, ruled in found.items() if ruled.ruling == "not asked"}
    assert unasked == {"impossible-raises"}  # it declares all four


@pytest.mark.parametrize("name", ["jaxattn.nnx", "flax.nnx", "flax.linen"])
def test_modules_are_asked_the_same(name, one_size):
    """Flax's write beyond the room is clamped (PUB-13), and documented nowhere."""
    found = rulings(DECODERS[name](), *QUIET)
    ours = name.startswith("jaxattn")
    assert found["steps-are-the-pass"].ruling == "holds"
    assert found["impossible-raises"].ruling == ("not asked" if ours else "holds")
    for law in ("overflow-refused", "refused-changes-nothing"):
        assert found[law].ruling == ("holds" if ours else "broken"), str(found[law])


def test_our_memory_holds_every_law(one_size):
    found = rulings(MEMORIES["jaxattn"]())
    assert {ruled.ruling for ruled in found.values()} == {"holds"} and found.keys() == memory.LAWS.keys()


def test_a_variant_is_held_to_its_own_pass(one_size):
    subject = of_attention("talking heads", lambda spec: ja.attention(spec, variants.talking_heads()))
    laws = ("chunk-alignment", "window-is-the-pass")
    assert not broken(subject, *laws)
    stopped = subject._replace(step=lambda cache, rows: subject.step(cache.reset(), rows))
    assert broken(stopped, *laws) == set(laws)


def test_draws_are_what_is_declared():
    sizes = Sizes(2, 6, 5, 7, 4, 4, 3)
    able, plain = right_decoder(), right_decoder()._replace(supports=frozenset())
    assert rows_of(able, sizes).value.shape == (2, 7, 3, 5)
    assert rows_of(plain, sizes).value.shape == (2, 7, 6, 4)
    state = empty(able, rows := rows_of(able, sizes), 9, 2)
    assert state.key.shape == (2, 9, 3, 4) and int(state.window) == 2
    assert cut(rows, -1).query.shape == (2, 1, 6, 4)
    assert Room(1, 2, 2, 3, 3, 4).window is None and len(set(DECODES)) == len(DECODES)
