"""Every planted fault: its law catches it, a trace marks its stage first; and right programs show nothing."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn as ja
from jaxattn.check.beside import laws_page
from jaxattn.check.faults import ELSEWHERE, FAULTS, OPEN, attention
from jaxattn.check.faults.right import Example, call_of, right, stages_of, traced
from jaxattn.check.faults.table import page
from jaxattn.check.law import SIZES, distance, loops
from jaxattn.check.laws import LAWS
from jaxattn.check.report import run
from jaxattn.check.subjects.attention import of_function
from jaxattn.check.tracing.stages import STAGES
from jaxattn.check.tracing.trace import trace_of

pytestmark = pytest.mark.heavy

DOCS = Path(__file__).parent.parent / "docs"
PLACE = r"(M3\.2 \w+(; 0x\w+)*|second article|PUB-\d\d)"  # sections of M3.2 may follow one another
SOURCE = re.compile(f"{PLACE}(; {PLACE})*")
EXAMPLES = {
    fault.traced.args[0]: name
    for name, fault in attention.FAULTS.items()
    if isinstance(fault.traced, functools.partial)
}


@pytest.mark.parametrize("name", FAULTS)
def test_its_law_catches_it_and_a_trace_marks_its_stage(name):
    fault = FAULTS[name]
    (ruled,) = run(fault.subject, laws=[fault.law]).rulings
    assert ruled.ruling == "broken" and ruled.sizes in (LAWS[fault.law].sizes or SIZES), str(ruled)
    if fault.traced is None:
        assert fault.stage == "" and fault.why
        return
    assert fault.stage in STAGES and not fault.why
    found = fault.traced()
    assert found.first == fault.stage, str(found)
    before = STAGES[: STAGES.index(fault.stage)]
    assert all(found.stage(stage).status == "ok" for stage in before)


def test_names_and_words_are_their_own_and_every_source_is_named():
    said = [fault.says for fault in FAULTS.values()]
    assert len(set(said)) == len(said), sorted(s for s in said if said.count(s) > 1)
    assert not FAULTS.keys() & ELSEWHERE.keys() and not OPEN.keys() & ELSEWHERE.keys()
    for name, fault in FAULTS.items():
        assert fault.law in LAWS, name
        assert SOURCE.fullmatch(fault.source), (name, fault.source)
        assert not fault.says.endswith(".") and "|" not in name + fault.says


def test_pages_are_those_of_the_code():
    """Written by `python -m jaxattn.check.faults` and `python -m jaxattn.check --laws`."""
    assert (DOCS / "faults.md").read_text() == page()
    assert (DOCS / "laws.md").read_text() == laws_page()


@pytest.mark.parametrize("example", EXAMPLES, ids=EXAMPLES.values())
def test_the_right_steps_show_no_divergence_where_a_fault_does(example):
    found = traced(example)
    assert found, str(found)
    call = call_of(example)
    want = loops(call)
    assert found.stage("merged").shape == (*want.shape[:2], want.shape[2] * want.shape[3])
    assert distance(found.stage("merged").array, want.reshape(*want.shape[:2], -1)) <= 1e-12
    more = dict(mask=call.mask, is_causal=call.causal, bias=call.bias)
    assert distance(right(*call[:3], **more), want) <= 1e-12


def test_a_row_that_nobody_sees_may_hold_anything_up_to_the_mask():
    """NaN in a padded key row is no finding at K or at the scores; seen by one row, it is."""
    example = Example(mask="b k")
    call = call_of(example)
    hidden = jnp.zeros(example.k, bool).at[-1].set(True)
    mask = call.mask & ~hidden
    x_q, x_k, x_v = (np.asarray(x).reshape(*x.shape[:2], -1) for x in call[:3])
    x_k = np.where(np.asarray(hidden)[:, None], np.nan, x_k)

    def found(mask):
        return trace_of(
            stages_of(call._replace(mask=mask)), jnp.asarray(x_q), (jnp.asarray(x_k), jnp.asarray(x_v)),
            ja.masks.from_flax(mask), heads=example.h, d=example.d, residual=False,
        )  # fmt: skip

    assert found(mask), str(found(mask))
    assert found(mask | hidden).first == "K"


def test_a_step_that_does_not_exist_is_refused():
    call = call_of(Example())
    with pytest.raises(TypeError, match="steps: got soft_max. Fix: some of .*softmax"):
        right(*call[:3], soft_max=jax.nn.softmax)


def test_the_fault_of_a_step_is_the_step_alone():
    """What `stages_of` shows and what `right` computes are one program: their outputs are equal."""
    steps = dict(scale=lambda q: q)
    example = Example(mask="b q k", bias=True)
    call = call_of(example)
    whole = right(*call[:3], mask=call.mask, bias=call.bias, **steps)
    shown = traced(example, **steps).stage("merged").array
    assert distance(shown, np.asarray(whole).reshape(*whole.shape[:2], -1)) <= 1e-12
    report = run(of_function(functools.partial(right, **steps)), laws=["values"])
    assert report.broken
