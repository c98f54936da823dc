"""Whole sublayers: the right one and ours hold every law of theirs, each planted fault breaks its own."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.check.adapters.layer import LAYERS
from jaxattn.check.draws.layer import WIDTHS, draw_layer, layer_loops, turned
from jaxattn.check.faults.layer import FAULTS, layer_of, project, right_layer, softmax, traced
from jaxattn.check.law import SIZES
from jaxattn.check.laws.layer import LAWS, WIDE
from jaxattn.check.report import run
from jaxattn.check.subjects.layer import (
    LAYER_FEATURES,
    LEAVES,
    LayerCall,
    asked,
    heads_of,
    of_layer,
    widths_of,
)

pytestmark = pytest.mark.heavy

NAN = "hidden-source-nan"


def rulings(layer, *laws):
    return {ruled.law: ruled for ruled in run(layer, laws=laws or list(LAWS)).rulings}


def broken(layer, *laws):
    """What does not hold, with its note."""
    return {name: ruled.note for name, ruled in rulings(layer, *laws).items() if not ruled.good}


# The right sublayer, and the planted faults.


def test_the_right_sublayer_holds_every_law():
    found = rulings(layer_of("right"))
    assert {name: ruled.ruling for name, ruled in found.items()} == dict.fromkeys(LAWS, "holds"), found


@pytest.mark.parametrize("example", [{}, {"square": True}, {"mask": True}, {"width": 7}], ids=str)
def test_the_right_sublayer_has_no_divergence(example):
    found = traced(**example)
    assert found, str(found)
    made = {"Q", "K", "V", "scores", "masked scores", "weights", "heads", "merged", "output"}
    assert made <= {stage.name for stage in found.stages if stage.given}


def test_faults_keep_every_shape():
    one, two = draw_layer(WIDE, alone=True, bias=True), draw_layer(WIDE)
    for fault in FAULTS.values():
        alone = lambda x, apply=fault.subject.apply: apply(LayerCall(one.params, x, x, x))
        cross = lambda *states, apply=fault.subject.apply: apply(LayerCall(two.params, *states))
        assert jax.eval_shape(alone, one.x_q).shape == one.x_q.shape, fault.says
        assert jax.eval_shape(cross, *two[1:4]).shape == two.x_q.shape, fault.says


def _tripled(x, leaf):
    """Wrong where h * d is not m."""
    return project(x, leaf) * (1 if x.shape[-1] == math.prod(leaf["kernel"].shape[1:]) else 3)


def _centred(params, x_q, x_k, x_v, **more):
    """Rows are centred over all of time."""
    x = x_q - x_q.mean(1, keepdims=True)
    return right_layer(params, x, x, x, **more) if x_k is x_q else right_layer(params, x_q, x_k, x_v, **more)


def _looks_behind(params, x_q, x_k, x_v, **more):
    return right_layer(params, x_q, x_k, x_v, **more) + x_v.mean((1, 2), keepdims=True)


def _residual(params, x_q, x_k, x_v, **more):
    y = right_layer(params, x_q, x_k, x_v, **more)
    return x_q + y if x_q.shape == y.shape else y


def _all_values(weights, value):
    """0 times NaN where a row is hidden."""
    return jnp.einsum("bhqk,bhkv->bhqv", weights, value)


UNPLANTED = {  # laws without a fault of their own in the table
    "layer-widths": layer_of("", project=_tripled),
    "layer-causality": of_layer(_centred),
    "hidden-source": of_layer(_looks_behind),
    NAN: layer_of("", combine=_all_values, clean=lambda x, seen: x),
}


def test_laws_without_a_fault_in_the_table_can_break():
    assert {fault.law for fault in FAULTS.values()} | UNPLANTED.keys() == LAWS.keys()
    for law, layer in UNPLANTED.items():
        assert rulings(layer, law)[law].ruling == "broken", law


def test_notes_say_what_a_wrong_answer_looks_like():
    note = lambda name, law: rulings(FAULTS[name].subject, law)[law].note
    assert note("kernels transposed", "kernel-orientation") == "query is transposed"
    assert note("one kernel for Q, K and V", "own-kernels") == "of no effect: key, value"
    assert note("one kernel for Q, K and V", "layer-values") == "one kernel for Q, K and V"
    assert note("W_O blocks reversed", "layer-values") == "the blocks of W_O in the other order"
    assert note("V of the source of K", "cross-values") == "V is made of x_k"
    assert note("the target's triangle", "cross-square") == "causal, though nobody asked"
    assert note("source and target swapped", "cross-square") == "x_q and x_k are swapped"
    assert note("no mask for a source", "cross-mask") == "the mask is dropped"
    assert note("source detached", "source-gradient") == "none reaches x_k and x_v"
    assert note("weights averaged", "layer-weights") == "the average over heads"
    assert broken(of_layer(_residual), "out-projection-used") == {"out-projection-used": "x itself is added"}
    wide = lambda x, leaf: project(x, leaf) * (1 if x.shape[-1] % 2 == 0 or x.shape[-1] == 1 else 3)
    narrow = layer_of("", project=wide)._replace(supports=frozenset({"cross", "in_k", "out"}))
    assert broken(narrow, "layer-widths") == {"layer-widths": "in_k alone breaks it"}


def test_controls_of_laws_speak_up():
    """A sublayer that does nothing breaks the laws that ask for a change."""
    nothing = of_layer(lambda params, x_q, x_k, x_v, *, mask=None, is_causal=False: 0 * x_q)
    laws = "out-blocks", "heads-permuted-jointly", "own-kernels", "layer-causality", "hidden-source"
    found = broken(nothing, *laws, "key-bias-null")
    assert found.keys() == {*laws, "key-bias-null"}
    assert all("control" in note for law, note in found.items() if law != "own-kernels")
    assert found["own-kernels"] == "of no effect: query, key, value, out"


# The loops, and what a call asks.


def test_loops_are_the_sublayer_of_the_public_case():
    """PUB-19 b by hand: unit kernels, each row seeing itself; and W of (in, out) times [1, 2, 3]."""
    unit = jnp.eye(4).reshape(4, 2, 2)
    params = {name: {"kernel": unit} for name in LEAVES[:3]} | {"out": {"kernel": unit.transpose(1, 2, 0)}}
    x = jnp.arange(12.0).reshape(1, 3, 4)
    call = LayerCall(params, x, x, x, jnp.eye(3, dtype=bool)[None, None])
    assert np.array_equal(layer_loops(call), x)
    one = {name: {"kernel": jnp.eye(3)[:, None]} for name in LEAVES[:3]} | {
        "out": {"kernel": jnp.eye(3)[None]}
    }
    one["value"] = {"kernel": jnp.array([[1.0, 2, 3], [0, 1, 4], [0, 0, 1]])[:, None]}
    row = jnp.array([[[1.0, 2, 3]]])
    assert layer_loops(LayerCall(one, row, row, row)).tolist() == [[[1, 4, 14]]]
    one["value"] = {"kernel": turned(one["value"]["kernel"])}
    assert layer_loops(LayerCall(one, row, row, row)).tolist() == [[[14, 14, 3]]]


def test_a_call_says_what_it_needs():
    assert asked(draw_layer(WIDE, alone=True)) == set()
    whole = draw_layer(SIZES[2], frozenset(WIDTHS), groups=True, bias=True)
    assert asked(whole) == {"cross", "bias", "gqa", *WIDTHS}
    assert widths_of(whole.params) == (24, 25, 26, 6, 3, 5, 7, 27)
    for name in WIDTHS:
        assert asked(draw_layer(SIZES[1], frozenset({name}), alone=name[:2] != "in")) - {"cross"} == {name}
    mask = jnp.ones((1, 2, 1, 5), bool)
    assert asked(draw_layer(SIZES[1], alone=True)._replace(mask=mask, causal=True)) == {
        "mask", "head_mask", "causal"
    }  # fmt: skip


def test_of_layer_reads_keywords_and_refuses_unknown_features():
    mine = lambda params, x_q, x_k, x_v, *, shown=None: right_layer(params, x_q, x_k, x_v, mask=shown)
    layer = of_layer(mine, keywords={"mask": "shown"}, name="mine")
    assert layer.name == "mine" and "mask" in layer.supports and "causal" not in layer.supports
    assert not broken(layer, "cross-mask", "identity-layer")
    assert rulings(layer, "layer-causality", "layer-weights")["layer-weights"].ruling == "not asked"
    with pytest.raises(ValueError, match="supports.*'wings'.*expected some of mask"):
        of_layer(mine, supports=("wings",))
    unable = of_layer(mine, supports=("cross",), name="unable")
    assert rulings(unable, "layer-widths")["layer-widths"].note.startswith("needs one of in_k")
    with pytest.raises(TypeError, match="steps: got sofmax"):
        layer_of("", sofmax=softmax).apply(draw_layer(WIDE))


def test_what_a_sublayer_does_wrong_is_a_ruling():
    wrong = of_layer(lambda params, x_q, x_k, x_v: x_q[0], name="wrong")
    assert rulings(wrong, "layer-values")["layer-values"].ruling == "broken"
    raises = of_layer(lambda params: 1 / 0, name="raises")
    assert "TypeError" in rulings(raises, "layer-values")["layer-values"].note


# Known libraries.


def test_our_module_holds_every_law_of_sublayers():
    found = rulings(LAYERS["jaxattn"]())
    assert {name: ruled.ruling for name, ruled in found.items()} == dict.fromkeys(LAWS, "holds"), found


NEEDED = {
    "jaxattn.linen": "flax", "jaxattn.attention": "jaxattn", "flax.nnx": "flax", "flax.linen": "flax",
    "equinox": "equinox", "torch.mha": "torch",
}  # fmt: skip


INSTALLED = [name for name, package in NEEDED.items() if importlib.util.find_spec(package)]


def test_our_module_declares_all_but_a_width():
    """What is read off a signature is read off the right one."""
    assert LAYERS["jaxattn"]().supports == frozenset(LAYER_FEATURES) - {"in_v"}


@pytest.mark.parametrize("name", INSTALLED)
def test_adapters_ask_the_same_question(name):
    """Every adapter places each leaf where it belongs and turns the mask; what it declares, it can."""
    layer = LAYERS[name]()
    laws = "layer-values", "layer-widths", "cross-mask", "layer-weights", "layer-causality"
    found = rulings(layer, *laws)
    assert all(ruled.good for ruled in found.values()), found
    asked_of = {law for law in laws if LAWS[law].needs <= layer.supports}
    assert {law for law, ruled in found.items() if ruled.ruling == "holds"} == asked_of and len(asked_of) >= 3


def test_heads_of_a_sublayer_are_asked_the_laws_of_heads():
    laws = ["values", "heads-in-order", "mask-polarity", "value-width"]
    assert run(heads_of(layer_of("right")), laws=laws, quick=True).passed
    found = run(heads_of(FAULTS["channels before heads"].subject), laws=laws, quick=True)
    assert {"heads-in-order", "values"} <= {ruled.law for ruled in found.broken}
    narrow = heads_of(layer_of("right")._replace(supports=frozenset({"cross", "mask"})))
    assert narrow.supports == {"cross", "mask", "eager"}
    refused = run(narrow, laws=["causal-refused", "gqa-refused", "d_v-refused", "bias-refused"])
    assert [ruled.ruling for ruled in refused.rulings] == ["refused"] * 4
