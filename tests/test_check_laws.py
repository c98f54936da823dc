"""The laws of attention of given heads: the right program holds each, and a planted one breaks each."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jaxattn as ja
import variants
from jaxattn.check.adjoint import Verdict
from jaxattn.check.faults import calls
from jaxattn.check.faults.right import Example, right, traced, tril, visible
from jaxattn.check.law import SIZES, Outcome, Unasked, judged
from jaxattn.check.laws import LAWS, behaviour, sharding
from jaxattn.check.report import run
from jaxattn.check.subjects.attention import Subject, of_attention, of_function

pytestmark = pytest.mark.heavy


def ruled(subject, law):
    """The ruling on a subject, or on a function of heads."""
    subject = subject if isinstance(subject, Subject) else of_function(subject, name="planted")
    (found,) = run(subject, laws=[law]).rulings
    return found


def steps(**replaced):
    return functools.partial(right, **replaced)


def test_the_right_dropout_holds_its_laws_and_says_nothing_of_what_would_be_wrong():
    """All other laws are asked of the same program without dropout, in test_check.py."""
    names = [name for name in LAWS if name.startswith("dropout-")] + [
        "causal-rectangle",
        "integer-mask",
        "scale",
    ]
    report = run(calls.RIGHT, laws=names, quick=True)
    assert len(names) == 8 and [r.law for r in report.rulings if r.ruling != "holds"] == [], str(report)
    notes = {r.law: r.note for r in report.rulings if r.note}
    assert notes == {"causal-rectangle": "aligned at the start", "integer-mask": "refused: int32, uint8"}


@pytest.mark.parametrize("training", [True, False])
def test_the_right_dropout_shows_no_divergence(training):
    found = calls.traced_dropout(calls.dropped, training)
    assert found, str(found)
    before, after = (np.asarray(found.stage(name).array) for name in ("weights", "mixed weights"))
    moved = np.abs(after - before).max()
    assert (moved > 0.01) == training


def test_the_right_steps_show_none_in_the_calls_of_the_faults():
    shown = [f.traced for f in calls.FAULTS.values() if isinstance(f.traced, functools.partial)]
    examples = {one.args[0] for one in shown if one.func is traced}
    assert len(examples) >= 6 and all(isinstance(example, Example) for example in examples)
    for example in examples:
        found = traced(example)
        assert found, str(found)


# Programs that break a law for which no article and no bug report has an entry.


def _scales_in_place(query, key, value):
    query *= query.shape[-1] ** -0.5
    return right(query, key, value, scale=lambda x: x)


def _takes_all(query, key, value):
    """One more key of score 0 in the sum, which has no value."""
    zero = lambda x: jnp.concatenate([x, jnp.zeros_like(x[:, :1])], 1)
    return right(query, zero(key), zero(value))


TWICE = Primitive("twice_in_reverse")
TWICE.def_impl(lambda x: x)
TWICE.def_abstract_eval(lambda x: x)
mlir.register_lowering(TWICE, lambda _, x: [x])
ad.deflinear2(TWICE, lambda cotangent, _: [2 * cotangent])
batching.defvectorized(TWICE)


@jax.custom_jvp
def _no_gradient_of_any(x):
    return x


_no_gradient_of_any.defjvp(lambda x, t: (x[0], t[0] * (1 + jnp.roll(x[0], 1))))


def _branches_on_the_mask(query, key, value, *, mask=None):
    return right(query, key, value, mask=mask if mask is not None and mask.any() else None)


def _first_mask(query, key, value, *, mask=None):
    """The mask of the first example for all that come together."""
    return right(query, key, value, mask=None if mask is None else mask[:1])


def _softcap(query, key, value):
    return right(query, key, value, biased=lambda x, bias: 2 * jnp.tanh(x / 2))


WRONG = {
    "no scale": (steps(scale=lambda q: q), "scale", "no scale"),
    "1/d": (steps(scale=lambda q: q / q.shape[-1]), "scale", "1/d"),
    "the model width": (
        steps(scale=lambda q: q * (q.shape[1] * q.shape[-1]) ** -0.5), "scale", "the model width"),
    "another temperature": (steps(scale=lambda q: q * (3 * q.shape[-1] ** -0.5)), "scale", "times 3, not 1"),
    "a soft cap": (_softcap, "scale", "they are about q k times"),
    "no softmax": (steps(softmax=lambda x, seen: x), "scale", ""),
    "one key more": (_takes_all, "one-key", ""),
    "0 / 0 without keys": (
        lambda *sides: right(*sides) / (sides[1].shape[1] > 0), "no-keys", "it is not finite"),
    "a bias that stops at -1": (
        steps(biased=lambda x, bias: x + jnp.maximum(bias, -1)), "bias-inf", ""),
    "NaN for a row of -inf": (
        steps(softmax=lambda x, seen: jax.nn.softmax(x, -1)), "bias-inf-row", "it is NaN"),
    "written to": (_scales_in_place, "inputs-untouched", "written to: query"),
    "a new jit": (lambda *sides: jax.jit(lambda *x: right(*x))(*sides), "no-retrace", "1 programs each time"),
    "a loop outside of jit": (
        lambda query, key, value: jax.lax.map(lambda x: right(x, key, value), query[None])[0],
        "no-retrace", "1 programs each time"),
    "twice in reverse": (
        lambda query, key, value: right(query, TWICE.bind(key), value),
        "forward-against-reverse", "key[out-b=0"),
    "a wrong transpose": (
        lambda query, key, value: right(query, key, TWICE.bind(value)), "adjoint", "value[b=0,k="),
    "a gradient of no function": (
        lambda query, key, value: right(_no_gradient_of_any(query), key, value), "second-order", ""),
    "a branch on the mask": (_branches_on_the_mask, "under-jit", "TracerBoolConversionError"),
    "the mask of the first example": (_first_mask, "under-vmap", ""),
    "no mask in batches": (
        steps(visible=lambda shape, mask, causal: visible(shape, mask if shape[0] == 1 else None, causal)),
        "batch-of-one", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_breaks_its_law_and_the_note_says_how(name):
    function, law, note = WRONG[name]
    found = ruled(function, law)
    assert found.ruling == ("raises" if "Tracer" in note else "broken"), str(found)
    assert note in found.note, found.note


def test_a_derivative_is_found_by_its_coordinate():
    detached = lambda query, key, value: right(query, jax.lax.stop_gradient(key), value)
    found = ruled(detached, "finite-differences")
    assert found.ruling == "broken" and found.note.startswith("key[b=0,k=")
    assert found.note.endswith("the gradient is not the slope of the function")
    single = ruled(lambda q, k, v: right(*(x.astype(jnp.float32) for x in (q, k, v))), "adjoint")
    assert single.ruling == "broken" and "it is float32 for float64 operands" in single.note
    json.loads(
        run(of_function(lambda q, k, v: jnp.nan * q), laws=["adjoint"]).as_json(), parse_constant=pytest.fail
    )


def test_a_finding_without_a_number_is_broken():
    assert judged(Verdict("adjoint", False, np.nan, np.nan, "x[0]", "it is NaN")).broken
    assert judged(Verdict("adjoint", True, 1.0, 2.0, "x[0]", "fine")) == Outcome(1.0, 2.0)


def _end(shape, mask, causal):
    seen = visible(shape, mask, False)
    return seen & jnp.tril(jnp.ones(shape[-2:], bool), shape[-1] - shape[-2]) if causal else seen


def _square_alone(shape, mask, causal):
    assert not causal or shape[-2] == shape[-1]
    return visible(shape, mask, causal)


def _start_or_nothing(shape, mask, causal):
    assert not causal or shape[-2] <= shape[-1]
    return visible(shape, mask, causal)


@pytest.mark.parametrize(
    ("seen", "note"),
    [
        (_end, "aligned at the end"),
        (_square_alone, "refused"),
        (_start_or_nothing, "aligned at the start; refused for q=7 k=5"),
    ],
)
def test_every_convention_of_a_causal_rectangle_holds(seen, note):
    found = ruled(steps(visible=seen), "causal-rectangle")
    assert (found.ruling, found.note) == ("holds", note)


def test_a_causal_rectangle_that_is_neither_is_broken_and_each_size_says_what_it_is():
    turned = lambda shape, mask, causal: (
        visible(shape, mask, False) & (tril(*shape[:1:-1]).swapaxes(0, 1) if causal else True)
    )
    found = ruled(steps(visible=turned), "causal-rectangle")
    assert found.ruling == "broken" and "neither" in found.note


@pytest.mark.parametrize(("read", "note"), [(lambda m: m != 0, ""), (None, "refused: int32, uint8")])
def test_a_mask_of_whole_numbers_is_read_or_refused(read, note):
    def attention(query, key, value, *, mask=None):
        if read is None and mask is not None and mask.dtype != bool:
            raise TypeError("a mask is boolean")
        return right(query, key, value, mask=read(mask) if read else mask)

    found = ruled(attention, "integer-mask")
    assert (found.ruling, found.note) == ("holds", note)


def test_numpy_arrays_may_be_refused():
    def attention(query, key, value):
        return right(query.at[:].set(query), key, value)

    found = ruled(attention, "inputs-untouched")
    assert (found.ruling, found.note) == ("holds", "refused: AttributeError")


def test_where_jax_does_not_tell_what_it_compiles_the_law_is_not_asked(monkeypatch):
    monkeypatch.setattr(behaviour, "_compiled", lambda: [0])
    found = ruled(right, "no-retrace")
    assert found.ruling == "not asked" and "does not tell" in found.note


def test_a_variant_compiles_its_loop_once():
    attn_of = lambda spec: ja.attention(spec, variants.talking_heads())
    subject = of_attention("talking heads", attn_of, "blocked", least_heads=4)
    for law in ("no-retrace", "integer-mask", "batch-of-one"):
        assert ruled(subject, law).ruling == "holds", law


# Two devices.

DEVICES = """
import jax, jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jaxattn.check.faults.right import right
from jaxattn.check.law import SIZES
from jaxattn.check.laws.sharding import LAWS
from jaxattn.check.subjects.attention import of_function

def centred(axis):
    @custom_partitioning
    def run(x):
        return x - x.mean(axis, keepdims=True)

    def partition(mesh, args, result):  # each device centres what it holds
        of = jax.tree.map(lambda x: x.sharding, args)
        return mesh, lambda x: x - x.mean(axis, keepdims=True), of[0], of

    run.def_partition(partition, infer_sharding_from_operands=lambda mesh, args, _: args[0].sharding,
                      sharding_rule="b t h d -> b t h d")
    return run

def ruling(function):
    outcome = LAWS["sharding"].judge(of_function(function), SIZES[1])
    return "broken: " + outcome.note if outcome.broken else "holds"

print(ruling(right))
for axis in (0, 1, 2):
    local = centred(axis)
    print(ruling(lambda query, key, value: right(query, key, local(value))))
"""


def test_one_device_is_not_asked_to_share(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(Unasked, match="one device: XLA_FLAGS=--xla_force_host_platform_device_count=2"):
        sharding.LAWS["sharding"].judge(of_function(right), SIZES[0])


def test_two_devices_give_what_one_does_and_a_partition_without_a_sum_is_found():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", DEVICES], env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[:4] == [
        "holds", "broken: examples were split", "holds", "broken: heads were split"
    ]  # fmt: skip
