"""The laws of `ja.check`: the right program holds them, each planted fault breaks its own."""

import json
import subprocess
import sys
import types

import jax.numpy as jnp
import pytest

import jaxattn as ja
import variants
from jaxattn.check import __main__ as command
from jaxattn.check.adapters import SUBJECTS
from jaxattn.check.faults import FAULTS
from jaxattn.check.faults.attention import right
from jaxattn.check.laws import LAWS
from jaxattn.check.report import assert_laws, law_tests, run
from jaxattn.check.subjects.attention import Subject, of_attention, of_function

pytestmark = pytest.mark.heavy

UNPLANTED = {  # laws without a fault of their own; each is shown to fail below
    "output-shape", "value-width", "deterministic", "under-jit", "under-vmap", "heads-permuted",
    "decode-parity", "cross-lengths", "adjoint", "second-order", "padding", "hidden-gradient",
    "hidden-inf-key", "empty-row-gradient", "one-key", "bias-inf", "bias-inf-row", "inputs-untouched",
    "no-rows", "no-keys", "no-retrace", "forward-against-reverse", "sharding",
}  # fmt: skip


def rulings(function, *laws, **named):
    report = run(of_function(function, name="planted", **named), laws=laws or None, quick=True)
    return {ruled.law: ruled for ruled in report.rulings}


def test_the_right_program_holds_every_law():
    assert_laws(of_function(right, name="right"), quick=True)


def test_every_law_has_a_fault_that_breaks_it():
    """Of heads; the other kinds of subjects have files of their own."""
    caught = {fault.law for fault in FAULTS.values()}
    assert caught | UNPLANTED >= {name for name, law in LAWS.items() if law.about is Subject}
    assert not caught & UNPLANTED


def _second(function):
    """A function whose every second call differs."""
    calls = []

    def call(*sides, **more):
        calls.append(1)
        return function(*sides, **more) + (len(calls) % 2)

    return call


def _branches(query, key, value):
    return right(query, key, value) if query.sum() > 0 else 0 * query


def _sums_examples(query, key, value):
    out = right(query, key, value)
    return out + out.sum(0, keepdims=True) - out if len(out) > 1 else out


def _absolute(query, key, value, **more):
    return jnp.abs(right(query, key, value, **more))


def _position(query, key, value, *, is_causal=False):
    """Rows know how many queries there are, so one row alone is another."""
    return right(query, key, value, is_causal=is_causal) * query.shape[1]


PLANTED = {
    "no-rows": lambda query, key, value: right(query.reshape(*query.shape[:3], -1), key, value),
    "output-shape": lambda query, key, value: right(query, key, value)[:, :1],
    "value-width": lambda query, key, value: right(query, key, value[..., :2]),
    "deterministic": _second(right),
    "under-jit": _branches,
    "batch-independence": _sums_examples,
    "cross-lengths": lambda query, key, value: right(query, key, value) * (query.shape[1] <= key.shape[1]),
    "under-vmap": lambda query, key, value: right(query, key, value) * len(query),
    "heads-permuted": lambda query, key, value: (
        right(query, key, value) * jnp.arange(1, 1 + query.shape[2])[:, None]
    ),
    "decode-parity": _position,
    "padding": lambda query, key, value, mask=None: right(query, key, value, mask=mask) / key.shape[1],
    "hidden-gradient": lambda query, key, value, mask=None: (
        right(query, key, value, mask=mask) + value.mean()
    ),
    "empty-row-gradient": lambda query, key, value, mask=None: (
        right(query, key, value, mask=mask) + value.mean()
    ),
    "hidden-inf-key": lambda query, key, value, mask=None: (
        right(query, key, value, mask=mask) + 0 * key.sum()
    ),
}


@pytest.mark.parametrize("law", PLANTED)
def test_laws_without_a_fault_in_the_table_can_break(law):
    ruled = rulings(PLANTED[law], law)[law]
    assert ruled.ruling in ("broken", "raises") and not ruled.good


def test_what_a_function_does_wrong_is_a_ruling_and_no_crash():
    law = ["values"]
    assert rulings(lambda query: query, *law)["values"].ruling == "raises"  # another signature
    assert "ZeroDivisionError" in rulings(lambda *_: 1 / 0, *law)["values"].note
    assert rulings(lambda query, key, value: jnp.nan * query, *law)["values"].ruling == "broken"
    assert rulings(lambda query, key, value: query[0], *law)["values"].ruling in ("broken", "raises")


def test_a_function_is_asked_as_it_is_and_what_is_none_is_refused():
    head_first = lambda query, key, value: right(*(x.swapaxes(1, 2) for x in (query, key, value))).swapaxes(
        1, 2
    )
    assert_laws(head_first, laws=["values"], layout="bhqd", supports=["cross"], quick=True)
    test = law_tests(right, laws=["values", "scale"], quick=True)
    test("values")
    assert [mark.args for mark in test.pytestmark] == [("law", ["values", "scale"])]
    with pytest.raises(TypeError, match=r"attention: got int, expected a function .* Fix:"):
        run(3)
    with pytest.raises(ValueError, match="layout: got them for a Subject"):
        run(of_function(right), layout="bhqd")
    many = of_function(right)._replace(least_heads=99)
    (ruled,) = run(many, laws=["values"]).rulings
    assert ruled.ruling == "not asked" and "so many heads" in ruled.note


def test_what_is_declared_impossible_must_raise():
    grouped = run(of_function(lambda query, key, value: query, supports=("cross",)), quick=True)
    found = {ruled.law: ruled.ruling for ruled in grouped.rulings}
    assert found["gqa-refused"] == found["d_v-refused"] == "taken silently"
    assert found["causal-refused"] == found["bias-refused"] == "refused"  # it has no such keywords
    assert found["mask-polarity"] == "not asked"


def test_layouts_are_by_name():
    moved = lambda query, key, value: right(*(x.swapaxes(1, 2) for x in (query, key, value))).swapaxes(1, 2)
    assert rulings(moved, "values", layout="bhqd")["values"].good
    assert not rulings(moved, "values")["values"].good
    single = lambda query, key, value: right(query[None], key[None], value[None])[0]
    assert rulings(single, "values", layout="qhd")["values"].good
    with pytest.raises(ValueError, match="layout.*bqdd.*expected an order of b, q, h and d"):
        of_function(right, layout="bqdd")
    with pytest.raises(ValueError, match="supports.*'wings'.*expected some of"):
        of_function(right, supports=("wings",))
    with pytest.raises(ValueError, match="laws.*'gravity'.*expected some of"):
        run(of_function(right), laws=["gravity"])


def test_a_report_prints_and_is_strict_json():
    report = run(FAULTS["no scale"].subject, laws=["scale", "bias-added"])
    text = str(report)
    assert text.startswith("planted (Subject): 2 broken") and "no scale" in text and "b=1 h=2 q=3 k=5" in text
    read = json.loads(report.as_json(), parse_constant=pytest.fail)
    assert read["passed"] is False and read["laws"][0]["sizes"]["q"] == 3
    with pytest.raises(AssertionError, match=r"scale: broken .* \(no scale\)"):
        assert_laws(FAULTS["no scale"].subject, laws=["scale"])


def test_to_import_it_starts_no_backend():
    """The command line sets flags of XLA afterwards."""
    code = "import jaxattn.check.__main__; from jax._src import xla_bridge; print(len(xla_bridge._backends))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_the_command_line_says_by_its_status(monkeypatch, tmp_path, capsys):
    module = types.ModuleType("somebody")
    module.attention, module.wrong = (
        right,
        lambda q, k, v, mask=None: right(q, k, v, mask=~mask if mask is not None else None),
    )
    monkeypatch.setitem(sys.modules, "somebody", module)
    few = {name: LAWS[name] for name in ("values", "mask-polarity")}
    monkeypatch.setattr("jaxattn.check.report.LAWS", few)
    assert command.main(["somebody:attention", "--quick"]) == 0
    assert command.main(["somebody:wrong", "--quick", "--json", str(tmp_path)]) == 1
    assert "True hides" in capsys.readouterr().out
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text())["subject"] == "somebody:wrong"
    assert command.main(["no.such.module:attention"]) == 2
    assert "no.such" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["jaxattn", "jax.nn", "flax.nnx", "flax.linen"])
def test_adapters_ask_the_same_question(name):
    """Every adapter reaches its library, and plain values agree."""
    laws = ["output-shape", "values", "mask-polarity", "causal-square", "gqa-order"]
    report = run(SUBJECTS[name][0](), laws=laws)
    assert report.passed and sum(r.ruling == "holds" for r in report.rulings) >= 3


def test_a_variant_is_asked_as_a_sublayer_of_merged_heads():
    attn_of = lambda spec: ja.attention(spec, variants.mohsa(overlap=4))
    laws = ["output-shape", "hidden-nan-value", "causality", "values"]
    report = run(of_attention("mohsa", attn_of, "blocked", least_width=4), laws=laws, quick=True)
    assert [ruled.ruling for ruled in report.rulings] == ["holds", "holds", "holds", "not asked"]
    narrow = run(of_attention("mohsa", attn_of, "blocked"), laws=laws[:1], quick=True)
    assert narrow.rulings[0].ruling == "raises" and "overlap = 4" in narrow.rulings[0].note
