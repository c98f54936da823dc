"""Laws of rotary positions: right turns hold them, each can break, ours hold them in every layout."""

import dataclasses

import einops
import jax.numpy as jnp
import pytest

import jaxattn as ja
from jaxattn.check.adapters.rotation import of_rotary
from jaxattn.check.faults.rotation import FAULTS, RIGHT, angles, right_turn
from jaxattn.check.laws.rotation import LAWS
from jaxattn.check.report import assert_laws, run
from jaxattn.check.subjects.rotation import Rotation

pytestmark = pytest.mark.heavy

ADJACENT = ja.Rotary(pairs="adjacent")


@pytest.mark.parametrize(
    "subject",
    [RIGHT, of_rotary(ja.Rotary()), of_rotary(ADJACENT), of_rotary(dataclasses.replace(ADJACENT, width=2))],
    ids=["right", "half", "adjacent", "narrow"],
)
def test_a_right_turn_holds_every_law(subject):
    found = run(subject)
    assert found.passed and all(one.ruling == "holds" for one in found.rulings), str(found)
    assert [one.law for one in found.rulings] == list(LAWS)


def _by_head(x, positions):
    heads = jnp.broadcast_to(jnp.arange(x.shape[2]), (len(x), x.shape[2]))
    turned = right_turn(einops.rearrange(x, "b t h d -> b h t d"), heads)
    return einops.rearrange(turned, "b h t d -> b t h d")


def _in_its_type(x, positions):
    """Angles in the type of the activations."""
    return right_turn(x, positions, lambda p, d: angles(p.astype(x.dtype), d).astype(x.dtype))


WRONG = {
    "the other pairs": (of_rotary(ADJACENT).turn, "turned-pairs", "its pairs are adjacent"),
    "backwards": (lambda x, p: right_turn(x, -p), "turned-pairs", "it turns backwards"),
    "from one": (lambda x, p: right_turn(x, p + 1), "turned-pairs", "rows are counted from 1"),
    "half the angle": (lambda x, p: right_turn(x, p / 2), "turned-pairs", ""),
    "added": (lambda x, p: x + right_turn(jnp.ones_like(x), p), "turn-keeps-length", ""),
    "a table of squares": (lambda x, p: right_turn(x, p * p), "turn-is-relative", ""),
    "no turn": (lambda x, p: x, "turn-tells-order", ""),
    "by head": (_by_head, "turn-tells-order", ""),
    "by head and row": (
        lambda x, p: right_turn(_by_head(x, p), p), "heads-turn-alike", ""),
    "counted again": (
        lambda x, p: right_turn(x, jnp.broadcast_to(jnp.arange(x.shape[1]), p.shape)),
        "rows-turn-alone", "rows are counted, whatever their positions"),
    "those of the first example": (lambda x, p: right_turn(x, p[:1]), "rows-turn-alone", ""),
    "a table as long as needed": (
        lambda x, p: right_turn(x, jnp.arange(int(p.max()) + 1)[p]), "turn-under-jit", "TypeError"),
    "in half precision": (_in_its_type, "turn-far-out", "x is bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_turn_breaks_its_law(name):
    turn, law, note = WRONG[name]
    (ruled,) = run(Rotation("planted", turn), laws=[law]).rulings
    assert ruled.ruling == ("raises" if "Error" in note else "broken") and note in ruled.note, str(ruled)


def test_every_law_can_break():
    assert {law for _, law, _ in WRONG.values()} | {fault.law for fault in FAULTS.values()} == set(LAWS)


def test_a_turn_that_counts_its_rows_is_asked_no_positions():
    counting = Rotation(
        "counting", lambda x, p: right_turn(x, jnp.arange(x.shape[1])[None]), supports=frozenset({"tracing"})
    )
    assert_laws(counting)
    asked = {one.law: one.ruling for one in run(counting).rulings}
    assert asked["rows-turn-alone"] == asked["turn-far-out"] == "not asked"
