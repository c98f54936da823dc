"""Laws of stored parameters and of removed heads: right programs hold them, planted faults break their own.

Numbers of PUB-18, 21, 22 and 23 are those of the public cases.
"""

import functools
from typing import Any

import golden_fixture
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import expected, fill, layer

import jaxattn as ja
from jaxattn.check.adapters.conversion import flax_nnx
from jaxattn.check.faults import conversion, surgery
from jaxattn.check.faults.conversion import APART, FUSED, GROUPED, reader
from jaxattn.check.faults.surgery import surgeon
from jaxattn.check.report import run
from jaxattn.check.subjects.conversion import Conversion, Dims, Layout, as_stored, owners, store
from jaxattn.check.subjects.params import AXES, ROLES, drawn, gated, leaves, left, same, states, tree
from jaxattn.check.subjects.surgery import Pruned, Surgery

pytestmark = pytest.mark.heavy

FAULTS = conversion.FAULTS | surgery.FAULTS
RIGHT: Any = surgeon()
LAYOUTS = {
    "role": FUSED,
    "group": GROUPED,
    "apart": APART,
    "v q k, in out": Layout("role", order=("value", "query", "key"), kernels="in out"),
    "group, k v q, in out": Layout("group", order=("key", "value", "query"), kernels="in out"),
    "no key bias": Layout(biases=("query", "value", "out")),
    "no bias": Layout("role", biases=()),
}


def planted(name) -> Any:
    return FAULTS[name].subject


def rulings(subject, *laws):
    return {ruled.law: ruled for ruled in run(subject, laws=laws or None).rulings}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_reader_holds_every_law(layout):
    found = rulings(reader(LAYOUTS[layout]))
    assert all(ruled.good for ruled in found.values()), found
    asked = {law for law, ruled in found.items() if ruled.ruling == "holds"}
    assert len(asked) == (8 if "group" in layout else 9)  # there is no way back to groups


def test_a_right_removal_holds_every_law():
    found = rulings(surgeon())
    assert {ruled.ruling for ruled in found.values()} == {"holds"} and len(found) == 11, found


def test_state_of_flax_is_taken_over_and_given_back():
    found = rulings(flax_nnx())
    assert {ruled.ruling for ruled in found.values()} == {"holds"} and len(found) == 9, found


@pytest.mark.parametrize("name", conversion.FAULTS)
def test_the_trace_of_a_right_reader_has_no_divergence(name):
    layout = planted(name).layout
    for dims in (conversion.SIZES, conversion.SHARED, conversion.SQUARE):
        found = conversion.traced(reader(layout), dims)
        assert found, str(found)


def test_the_trace_of_a_right_removal_has_no_divergence():
    found = surgery.traced(surgeon())
    assert found, str(found)
    last = []
    for silent in (surgery.by_gates, surgery.by_values):
        found = surgery.silenced(silent, silent)
        assert found, str(found)
        last.append(found.stage("output").array)
    np.testing.assert_allclose(*last, atol=1e-12)


def test_a_key_bias_from_nowhere_changes_no_output():
    """So that no comparison of outputs finds it: coordinates do."""
    subject = planted("key bias from nowhere")
    found = rulings(subject, "same-function", "biases-kept")
    assert found["same-function"].good and not found["biases-kept"].good


# Laws that no fault of the tables breaks


def _convert(change, layout=FUSED):
    right = reader(layout)
    return right._replace(name="planted", convert=lambda stored, dims: change(right.convert(stored, dims)))


def _widened(params):
    """Shared key heads, each written once for every query head."""
    h, role = params["query"]["kernel"].shape[1], params["key"]
    n = h // role["kernel"].shape[1]
    return {**params, "key": {leaf: np.repeat(x, n, -2) for leaf, x in role.items()}}


def _unordered(params, removed, state):
    """Heads are left in an order of their own, and named as if they were not."""
    found = surgery.right(params, removed, state)
    turned = tree(left(found.params, range(len(found.new_to_old))[::-1]))
    return found._replace(params=turned if len(removed) == 1 else found.params)


def _squared(params, x, gates):
    """Gates that are right at zero and one alone."""
    return gated(params, x, gates**2)


def _by_size(params, removed, state):
    """Moments cut along the first axis that is as long as there are heads."""
    found = surgery.right(params, removed, None)
    h = leaves(params)["out/kernel"].shape[0]
    cut = lambda x: np.take(x, found.new_to_old, x.shape.index(h)) if h in x.shape else x
    return found._replace(state=jax.tree.map(cut, state))


BROKEN = {  # the right program, changed
    "kernel-shapes": _convert(_widened),
    "same-function": _convert(lambda params: {**params, "out": {"kernel": params["out"]["kernel"]}}),
    "round-trip": reader(FUSED)._replace(store=lambda params, dims: conversion.back(params, dims, APART)),
    "dtype-kept": _convert(functools.partial(jax.tree.map, lambda x: x.astype(np.float32))),
    "removals-compose": surgeon()._replace(prune=_unordered),
    "linear-in-gates": surgeon(ablate=_squared),
    "moments-follow": surgeon()._replace(prune=_by_size),
}  # fmt: skip


@pytest.mark.parametrize("law", BROKEN)
def test_laws_without_a_fault_in_the_tables_can_break(law):
    assert rulings(BROKEN[law], law)[law].ruling == "broken"


def test_other_heads_removed_and_truly_named_are_not_those_that_were_asked():
    """Numbers and names agree, so that only the set of heads tells."""
    after = lambda params, removed, state: surgery.right(params, [head + 1 for head in removed], state)
    (ruled,) = rulings(surgeon()._replace(prune=after), "survivors-named").values()
    assert ruled.ruling == "broken" and "new_to_old is (0,) without (0,) of 2 heads" in ruled.note


def test_every_law_is_seen_to_break():
    known = run(surgeon()).rulings + run(reader(FUSED)).rulings
    assert {ruled.law for ruled in known} == {fault.law for fault in FAULTS.values()} | BROKEN.keys()


def test_what_raises_is_a_ruling_and_no_crash():
    crash = Conversion("raises", lambda stored, dims: stored["qkv"], APART)
    assert {ruled.ruling for ruled in rulings(crash).values()} == {"raises", "not asked"}
    crash = Surgery("raises", lambda params, removed, state: Pruned({}, None, ()))
    assert "holds" not in {ruled.ruling for ruled in rulings(crash).values()}


# Layouts


def test_a_fused_tensor_has_all_biases_or_none():
    dims = Dims(5, 2, 2, 3, 3)
    with pytest.raises(ValueError, match="expected all or none. Fix: rows='apart'"):
        store(drawn(dims), Layout("role", biases=("query", "out")), dims)


def test_pub_18_rows_and_outputs_of_both_layouts():
    """The index check by the bias, whose numbers are those of rows; then the outputs."""
    dims = Dims(m=4, h=2, g=2, d=2, v=2)
    rows = {"A": {"query": [0, 1, 2, 3], "key": [4, 5, 6, 7], "value": [8, 9, 10, 11]},
            "B": {"query": [0, 1, 6, 7], "key": [2, 3, 8, 9], "value": [4, 5, 10, 11]}}  # fmt: skip
    out = {
        "A": [[-0.1145465739, -0.0670516737, 0.2255011183, 0.157808502],
              [-0.1168960338, -0.0488650624, 0.1001885727, 0.1783394517],
              [-0.1270481448, -0.042060265, 0.1772685208, 0.1647599994]],
        "B": [[0.1261676481, -0.1401624103, 0.1915764917, 0.1634311401],
              [0.054958707, -0.1341943329, 0.0982176296, 0.1789253808],
              [0.0987634466, -0.1466115239, 0.1532584133, 0.1693795268]],
    }  # fmt: skip
    x, outputs = fill((1, 3, 4), 86), {}
    for name, layout in (("A", FUSED), ("B", GROUPED)):
        stored = {
            "qkv": {"kernel": fill((12, 4), 85), "bias": np.arange(12.0)},
            "out": {"kernel": np.eye(4), "bias": np.zeros(4)},
        }
        params = reader(layout).convert(stored, dims)
        assert {role: params[role]["bias"].ravel().tolist() for role in ROLES} == rows[name]
        assert [row for row, (role, *_) in enumerate(owners(layout, dims)["qkv"]) if role == "query"] == (
            rows[name]["query"]
        )
        stored["qkv"]["bias"] = np.zeros(12)
        outputs[name] = gated(reader(layout).convert(stored, dims), x)[0]
        np.testing.assert_allclose(outputs[name], out[name], atol=1e-9)
        np.testing.assert_allclose(as_stored(stored, layout, dims, x)[0], out[name], atol=1e-9)
    assert np.max(np.abs(outputs["A"] - outputs["B"])) > 0.2
    wrong = planted("heads in turn read as roles in turn")
    stored = {"qkv": {"kernel": fill((12, 4), 85)}, "out": {"kernel": np.eye(4)}}
    np.testing.assert_allclose(gated(wrong.convert(stored, dims), x)[0], out["A"], atol=1e-9)
    one = Dims(m=4, h=1, g=1, d=4, v=4)
    assert owners(FUSED, one) == owners(GROUPED, one)


@pytest.mark.parametrize(("kernels", "name"), [("in out", "a (in,out)"), ("out in", "a (out,in)")])
def test_pub_19_orientation_is_stated_and_not_read_off_the_shape(kernels, name):
    dims, kernel = Dims(m=3, h=1, g=1, d=3, v=3), np.array([[1.0, 2, 3], [0, 1, 4], [0, 0, 1]])
    layout = Layout(kernels=kernels, biases=())
    stored = {role: {"kernel": kernel} for role in (*ROLES, "out")}
    found = reader(layout).convert(stored, dims)["query"]["kernel"]
    np.testing.assert_array_equal(np.array([1.0, 2, 3]) @ found[:, 0], expected("PUB-19", name))


def test_the_packed_weights_of_torch_are_rows_by_role(request):
    """Numbers of `torch.nn.MultiheadAttention` itself: its tensors, and what it returned for them."""
    fixture = golden_fixture.load(request.config.getoption("golden"), "torch_mha_self")
    heads, width = fixture.sizes["H"], fixture.sizes["D"]
    dims = Dims(fixture.sizes["E"], heads, heads, width, width)
    of = {key.removeprefix("p."): x for key, x in fixture.arrays.items()}
    stored = {
        "qkv": {"kernel": of["in_proj_weight"], "bias": of["in_proj_bias"]},
        "out": {"kernel": of["out_proj.weight"], "bias": of["out_proj.bias"]},
    }
    params = reader(FUSED).convert(stored, dims)
    assert not same(leaves(store(params, FUSED, dims)), leaves(stored)).broken
    spec = ja.HeadSpec(model=dims.m, heads=heads, use_bias=True)
    mask = ja.masks.from_torch_mha(of["mask.attn"], of["mask.key_padding"])

    def output(layout):
        read = {**reader(layout).convert(stored, dims), "heads": {}}
        return ja.attention(spec).apply(read, jnp.asarray(of["in.x"]), mask=mask)[0]

    tolerance = fixture.meta["tolerance"]["out_max_abs"]
    np.testing.assert_allclose(output(FUSED), of["out.y"], atol=tolerance)
    for wrong in (GROUPED, FUSED._replace(order=("key", "query", "value"))):
        assert np.max(np.abs(output(wrong) - of["out.y"])) > 1e-3


# Removal of heads

SIZES = "D={m},H={h},Hkv={h},dk=2,dv=2,Do={m};"


def of_case(seed, m, h):
    """Parameters of a public case, whose eight leaves are filled from `seed` on."""
    axes = {"Wq": "D,H,dk", "bq": "H,dk", "Wk": "D,Hkv,dk", "bk": "Hkv,dk", "Wv": "D,Hkv,dv", "bv": "Hkv,dv",
            "Wo": "H,dv,Do", "bo": "Do,"}  # fmt: skip
    leaf = ", ".join(f"{name}=fill(({of}),{seed + i})" for i, (name, of) in enumerate(axes.items()))
    _, params = layer({"params": SIZES.format(m=m, h=h) + leaf})
    return {role: params[role] for role in (*ROLES, "out")}


def test_pub_21_one_head_is_a_term_of_the_output():
    params = of_case(100, 6, 3)
    x, gates = fill((1, 3, 6), 108), np.array([1, 0, 1])
    full = [3.5891786563, -0.4055061825, -0.3527453328, -0.1498611541, -0.080767392, -2.1454640463]
    ablated = [2.5634072454, -0.16327829, 0.0754992482, -0.6175824995, -0.3646403506, -1.1656743053]
    np.testing.assert_allclose(gated(params, x)[0, 0], full, atol=1e-9)
    np.testing.assert_allclose(RIGHT.ablate(params, x, gates)[0, 0], ablated, atol=1e-9)
    sliced = planted("slice of the output zeroed").ablate(params, x, gates)[0, 0]
    np.testing.assert_allclose(sliced, [*full[:2], 0, 0, *full[4:]], atol=1e-9)


def test_pub_22_heads_are_removed_by_the_numbers_that_they_have():
    params = of_case(110, 8, 4)
    x = fill((1, 3, 8), 118)
    right = [-1.9364715359, -1.0868301703, 0.8708062318, -0.0932663136, -0.4475592487, -0.0069557574,
             0.110496566, 0.7373861464]  # fmt: skip
    moved = [-1.7082839135, -0.8134018024, 0.2813846038, -0.4667808808, 0.0307707519, 0.2914467845,
             -0.0724391261, 1.1116901456]  # fmt: skip
    prune = RIGHT.prune
    found = prune(params, (1, 2), None)
    assert found.new_to_old == (0, 3) and prune(params, (1, 1), None).new_to_old == (0, 2, 3)
    np.testing.assert_allclose(gated(found.params, x)[0, 0], right, atol=1e-9)
    np.testing.assert_allclose(gated(params, x, [1, 0, 0, 1])[0, 0], right, atol=1e-9)
    wrong = planted("removed by numbers that moved").prune(params, (1, 2), None)
    np.testing.assert_allclose(gated(wrong.params, x)[0, 0], moved, atol=1e-9)
    for removed in ((4,), (-1,), (0, 1, 2, 3)):
        with pytest.raises(ValueError, match="of 4, expected some of 0 to 3, not all"):
            prune(params, removed, None)


def test_pub_23_the_third_step_of_adam_is_that_of_the_gated_layer():
    """Real gradients, real optax; and how far each wrong state leads, as the case states it."""
    params = of_case(120, 6, 3)
    x, target, adam = fill((2, 4, 6), 128), fill((2, 4, 6), 129), optax.adam(1e-2)

    @jax.jit
    def step(params, state, gates):
        heads = params["out"]["kernel"].shape[0]
        layer = ja.attention(ja.HeadSpec(model=6, heads=heads, d_qk=2, d_v=2, use_bias=True))

        def loss(params):  # a gate on a head is one on its rows of W_O
            out = {**params["out"], "kernel": params["out"]["kernel"] * gates[:, None, None]}
            y = layer.apply({**params, "out": out, "heads": {}}, x)[0]
            return jnp.mean((y - target) ** 2)

        updates, state = adam.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state: Any = adam.init(params)
    for _ in range(2):
        params, state = step(params, state, jnp.ones(3))
    want = left(step(params, state, jnp.array([1.0, 0, 1]))[0], (0, 2))

    def third(prune):
        found = prune(params, (1,), state)
        after, last = step(found.params, found.state, jnp.ones(2))
        assert all(2 in x.shape for leaf, x in leaves(last[0].mu).items() if "h" in AXES[leaf])
        return max(np.max(np.abs(x - want[path])) for path, x in leaves(after).items())

    found = RIGHT.prune(params, (1,), state)
    assert int(found.state[0].count) == 2
    assert not same(leaves(found.state[0].mu), left(state[0].mu, (0, 2))).broken
    assert third(RIGHT.prune) < 1e-12
    for name, stated in (
        ("optimizer from the start", 1.8e-2),
        ("count from the start", 5.7e-3),
        ("moments of other heads", 1.6e-2),
    ):
        assert third(planted(name).prune) == pytest.approx(stated, rel=0.05), name


def test_importance_is_the_derivative_by_the_gate():
    """Against differences of the loss of each example alone, and against the sum that cancels."""
    dims = Dims(m=7, h=3, g=3, d=2, v=5)
    params, x, pull = drawn(dims), states(dims, b=5), states(dims, b=5, seed=11)
    gates = lambda head, g: np.where(np.arange(3) == head, g, 1.0)
    each = [
        [np.sum(pull[b] * (gated(params, x, gates(head, 1.5)) - gated(params, x, gates(head, 0.5)))[b])
         for head in range(3)] for b in range(5)
    ]  # fmt: skip
    np.testing.assert_allclose(RIGHT.importance(params, x, pull), np.abs(each).mean(0), rtol=1e-12)
    signed = planted("signed sensitivity").importance(params, x, pull)
    np.testing.assert_allclose(signed, np.abs(np.mean(each, 0)), rtol=1e-12)
