"""The attention ledger: whole on every variant, and at the right stage on every planted fault."""

import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import variant

import jaxattn as ja
import variants
from jaxattn.check.tracing.invariants import agree
from jaxattn.check.tracing.stages import STAGES, Stages
from jaxattn.check.tracing.trace import trace, trace_of

pytestmark = pytest.mark.heavy

B, Q, K, H, D, V = 2, 5, 7, 3, 4, 11
M = H * D


def states(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def check(found, first, *texts):
    """The stage that diverged is `first`, those before are ok, those after downstream; the table says so."""
    assert found.first == first, str(found)
    index = STAGES.index(first)
    status = ["ok"] * index + ["diverged"] + ["downstream"] * (len(STAGES) - index - 1)
    assert [stage.status for stage in found.stages] == status
    assert f"FIRST DIVERGENCE: {first}: {found.stage(first).broken[0]}; the rest" in str(found)
    assert str(found).endswith(f"first divergence: {first}")
    said = " ".join(map(str, found.stage(first).broken))
    for text in texts:
        assert text in said, said


# Our own attention.


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_every_variant_is_whole(name):
    attn, params = variant(name, ja.HeadSpec(model=M, heads=H, d_v=V, use_bias=True), seed=3)
    x = jnp.asarray(states(B, Q, M))
    mask = ja.causal() & ja.padding(jnp.arange(Q) < jnp.array([[Q], [4]]))
    found = trace(attn, params, x, mask=mask)
    assert found, str(found)
    assert [stage.name for stage in found.stages] == list(STAGES)
    assert np.array_equal(found.stage("output").array, attn.apply(params, x, mask=mask)[0])
    hull = next(one for one in found.stage("heads").invariants if "hull" in one.name)
    assert (hull.holds is None) == (name in ("talking_heads", "dcmha")) and (hull.holds in (None, True))
    moved = found.stage("output").invariants[-1]
    assert "hidden source row" in moved.name and moved.holds and moved.measured == 0


def test_rotary_norms_soft_cap_bias_sharing_and_two_sources():
    spec = ja.HeadSpec(
        model=M, heads=6, kv_heads=2, d_qk=D, d_v=5, in_k=13, in_v=17, out=19, use_bias=True, softcap=2.0,
        rotary=ja.Rotary(pairs="adjacent", width=2), qk_norm="layer",
    )  # fmt: skip
    attn = ja.attention(spec, variants.talking_heads(bias=True, dynamic=("pre_key", "post_query")))
    params = attn.init(jax.random.key(0), jnp.float64)
    x, kv = states(Q, M), (states(K, 13, seed=1), states(K, 17, seed=2))
    options = dict(bias=jnp.asarray(states(1, Q, K, seed=3)), positions=(jnp.arange(Q) + 3, None))
    found = trace(attn, params, jnp.asarray(x), tuple(map(jnp.asarray, kv)), ja.window(4), **options)
    assert found, str(found)
    assert found.stage("Q").shape == (Q, 6, D) and found.stage("Q").axes == "q hl d"
    assert found.stage("V").shape == (K, 2, 5) and found.stage("merged").shape == (Q, 30)
    assert found.stage("input").invariants[1].holds is None  # h * d = 24 of m = 12, on purpose
    assert found.stage("output").invariants[1].holds is None  # an output of width 19 joins no stream of 12


def test_a_wrong_leaf_of_ours_is_found_against_another_trace():
    attn, params = variant("mha", ja.HeadSpec(model=M, heads=H))
    x = jnp.asarray(states(B, Q, M))
    right = trace(attn, params, x)
    key = params["key"] | {"kernel": params["key"]["kernel"][:, ::-1]}
    check(trace(attn, params | {"key": key}, x, against=right), "K", "is that of the other trace", "hK=")


def test_a_wrong_piece_of_ours_is_found(monkeypatch):
    """The formulas are apart from the engines: a fault planted in an engine's step shows at its own stage."""
    from jaxattn.engines import formula

    attn, params = variant("talking_heads", ja.HeadSpec(model=M, heads=H))
    x = jnp.asarray(states(B, Q, M))

    def flipped(x, static, rows):
        return jnp.einsum("...iqk,oi->...oqk", x, static.matrix)

    monkeypatch.setattr(formula, "STEPS", formula.STEPS._replace(mix=flipped))
    check(trace(attn, params, x, mask=ja.causal()), "mixed scores", "is the mix of the scores")


def test_dead_rows_diverge_unless_they_are_meant():
    attn, params = variant("mha", ja.HeadSpec(model=M, heads=H))
    x, source = jnp.asarray(states(Q, M)), jnp.asarray(states(3, M, seed=1))
    mask = ja.causal(align="end")  # the first two of five queries see none of three rows
    check(trace(attn, params, x, source, mask), "masked scores", "no dead query: 2 queries", "q=0")
    meant = trace(attn, params, x, source, mask, dead_rows=True)
    assert meant, str(meant)
    sums = next(one for one in meant.stage("weights").invariants if "rows sum" in one.name)
    assert "dead ones to zero" in sums.name and sums.holds


def test_padding_that_holds_nan_is_no_finding():
    attn, params = variant("mha", ja.HeadSpec(model=M, heads=H))
    valid = jnp.arange(Q) < 4
    x = jnp.where(valid[:, None], jnp.asarray(states(Q, M)), jnp.nan)
    assert trace(attn, params, x, mask=ja.padding(valid))
    check(trace(attn, params, x.at[1, 2].set(jnp.nan), mask=ja.padding(valid)), "input", "finite", "q=1 m=2")
    first = trace(attn, params, x[::-1], mask=ja.causal() & ja.padding(valid[::-1]))
    assert first, str(first)  # its first row is padding and sees no key


def test_a_row_that_does_not_see_itself_still_asks():
    attn, params = variant("mha", ja.HeadSpec(model=M, heads=H))
    found = trace(
        attn, params, jnp.asarray(states(Q, M)), mask=ja.explicit(~jnp.eye(Q, dtype=bool), axes="q k")
    )
    assert found, str(found)
    assert found.stage("output").invariants[-1].holds is None  # no row is hidden from another


def test_what_is_not_a_number_agrees_with_itself_alone():
    x = np.array([[1.0, np.nan], [3.0, 4.0]])
    assert agree("input", "same", x, x, 1e-9).holds
    one = agree("input", "same", np.nan_to_num(x), x, 1e-9)
    assert not one.holds and one.where == "q=0 m=1" and one.measured == np.inf
    assert not agree("input", "same", x, x[:1], 1e-9).holds
    assert not agree("input", "same", x + 1e-7, x, 1e-9).holds


def test_half_precision_is_judged_as_such():
    attn = ja.attention(ja.HeadSpec(model=M, heads=H))
    params = attn.init(jax.random.key(0), jnp.bfloat16)
    found = trace(attn, params, jnp.asarray(states(Q, M), jnp.bfloat16))
    assert found, str(found)
    strict = trace(attn, params, jnp.asarray(states(Q, M), jnp.bfloat16), tolerance=1e-6)
    assert strict.first == "Q"


def test_it_refuses_to_run_under_jit():
    attn, params = variant("mha", ja.HeadSpec(model=M, heads=H))
    with pytest.raises(TypeError, match="traced.*Fix: call it outside of jit"):
        jax.jit(lambda x: trace(attn, params, x).first)(jnp.ones((Q, M)))


# Foreign code: [b, h, t, d] arrays, packed projections, as most PyTorch modules have them.

DRAWN = {name: states(M, M, seed=n) / M**0.5 for n, name in enumerate(("q", "k", "v", "o"))}


def softmax(x, axis=-1):
    raised = np.exp(x - x.max(axis, keepdims=True))
    return raised / raised.sum(axis, keepdims=True)


def split(x, heads):
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


FOREIGN = Stages(
    split=split,
    merge=lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1),
    project_q=lambda x: x @ DRAWN["q"],
    project_k=lambda x: x @ DRAWN["k"],
    project_v=lambda x: x @ DRAWN["v"],
    scores=lambda q, k: q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5,
    mask=lambda scores, visible: np.where(visible, scores, -1e9),
    softmax=softmax,
    combine=lambda weights, value: weights @ value,
    output=lambda x: x @ DRAWN["o"],
    layout="... h t d",
)
SAME = Stages(project_q=FOREIGN.project_q, project_k=FOREIGN.project_k, project_v=FOREIGN.project_v,
              output=FOREIGN.output)  # fmt: skip


def foreign(stages=FOREIGN, mask=None, **options):
    mask = ja.causal() if mask is None else mask
    return trace_of(stages, states(B, Q, M, seed=9), mask=mask, heads=H, expected=SAME, **options)


def with_nan(x):
    return np.where(np.arange(x.shape[-1]) == 3, np.nan, x)


FAULTS = {
    "split scrambles the head axis by a reshape without transpose": (
        dict(split=lambda x, heads: x.reshape(x.shape[0], heads, x.shape[1], -1)),
        "head round trip", "head h holds channels", "merge(split(x)) = x"),
    "split and merge both wrong, so that the round trip holds": (
        dict(split=lambda x, heads: x.reshape(x.shape[0], heads, x.shape[1], -1),
             merge=lambda x: x.reshape(x.shape[0], x.shape[2], -1)),
        "head round trip", "head h holds channels h*d to h*d + d of its own row"),
    "merge in the other order": (
        dict(merge=lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape[0], x.shape[2], -1)),
        "head round trip", "merge(split(x)) = x"),
    "queries from the wrong kernel": (
        dict(project_q=FOREIGN.project_k), "Q", "is the split projection of x_q"),
    "values that are not finite": (
        dict(project_v=lambda x: with_nan(x @ DRAWN["v"])), "V", "finite", "v=3"),
    "no scale": (
        dict(scores=lambda q, k: q @ k.swapaxes(-1, -2)),
        "scores", "is scale * <query, key>", "it is the same without the scale"),
    "the mask in the other polarity": (
        dict(mask=lambda scores, blocked: np.where(blocked, -np.inf, scores)),
        "masked scores", "hidden pairs are excluded", "the other polarity"),
    "the mask by a number that is too small": (
        dict(mask=lambda scores, visible: np.where(visible, scores, scores - 30)),
        "masked scores", "hidden pairs are excluded"),
    "the mask moves what is visible": (
        dict(mask=lambda scores, visible: np.where(visible, 2 * scores, -np.inf)),
        "masked scores", "visible pairs are as before"),
    "softmax over queries": (
        dict(softmax=lambda x: softmax(x, -2)),
        "weights", "rows sum to one", "the softmax runs over queries"),
    "mask after the softmax, without renormalising": (
        dict(mask=None, softmax=None, weights=lambda x, visible: softmax(x) * visible),
        "weights", "rows sum to one"),
    "mask after the softmax, renormalised over all": (
        dict(mask=None, softmax=None, weights=lambda x, visible: softmax(x)),
        "weights", "forbidden weight is zero"),
    "a softmax at another temperature": (
        dict(softmax=lambda x: softmax(2 * x)), "weights", "is the softmax over keys of the masked scores"),
    "keys in the wrong order meet the values": (
        dict(combine=lambda w, v: w @ v[:, :, ::-1]), "heads", "within the hull of the visible values"),
    "heads of all keys at once": (
        dict(attend=lambda q, k, v, visible: (0 * q + v.mean(-2, keepdims=True), None),
             scores=None, mask=None, softmax=None, combine=None),
        "heads", "is the sum over keys"),
    "gates that are not those expected": (
        dict(finish=lambda x: 0.5 * x), "merged", "is the heads side by side"),
    "output of the wrong width for its residual": (
        dict(output=lambda x: x @ DRAWN["o"][:, :-1]), "output", "added to", "axis m, 11 for 12"),
    "output through the transposed kernel": (
        dict(output=lambda x: x @ DRAWN["o"].T), "output", "is the merged heads through the output map"),
}  # fmt: skip


def test_sound_foreign_code_is_whole_and_equals_ours():
    found = foreign()
    assert found, str(found)
    assert all(stage.given for stage in found.stages if "mixed" not in stage.name)
    params = {
        name: {"kernel": jnp.asarray(DRAWN[name[0]].reshape(M, H, D))} for name in ("query", "key", "value")
    }
    params |= {"out": {"kernel": jnp.asarray(DRAWN["o"].reshape(H, D, M))}, "heads": {}}
    ours = trace(ja.attention(ja.HeadSpec(model=M, heads=H)), params, jnp.asarray(states(B, Q, M, seed=9)),
                 mask=ja.causal())  # fmt: skip
    hides = FOREIGN._replace(mask=lambda scores, visible: np.where(visible, scores, -np.inf))
    assert foreign(hides, against=ours), str(foreign(hides, against=ours))
    unscaled = ours._replace(stages=tuple(
        s._replace(array=2 * s.array) if s.name == "scores" else s for s in ours.stages))  # fmt: skip
    check(foreign(hides, against=unscaled), "scores", "is that of the other trace")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_divergence_is_the_fault(fault):
    changes, first, *texts = FAULTS[fault]
    formula = SAME._replace(finish=lambda x: x) if "finish" in changes else SAME
    found = trace_of(FOREIGN._replace(**changes), states(B, Q, M, seed=9), mask=ja.causal(), heads=H,
                     expected=formula)  # fmt: skip
    check(found, first, *texts)


def test_only_the_wrong_stage_differs_from_its_own_formula():
    """After a missing scale everything else is still what it should make of what it got."""
    found = foreign(FOREIGN._replace(scores=FAULTS["no scale"][0]["scores"]))
    assert [stage.name for stage in found.stages if stage.broken] == ["scores"]


def test_values_of_the_wrong_head_in_shared_heads():
    heads, shared = 6, 3
    x, kv = states(B, Q, 6 * D), (states(B, K, 3 * D, seed=1), states(B, K, 3 * V, seed=2))

    def options(repeat):
        return Stages(
            scores=lambda q, k: np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, 2, -2)) / D**0.5,
            combine=lambda w, v: np.einsum("bhqk,bkhv->bqhv", w, repeat(v)),
        )

    right = trace_of(
        options(lambda v: np.repeat(v, 2, -2)), x, kv, heads=heads, kv_heads=shared, residual=False
    )
    assert right, str(right)
    wrong = trace_of(options(lambda v: np.tile(v, (1, 1, 2, 1))), x, kv, heads=heads, kv_heads=shared)
    check(wrong, "heads", "within the hull", "it is head h with value head h % hV (tile order)")


def test_a_mask_that_leaks_through_a_neighbour_is_found_at_the_output():
    """Every stage is as expected, but the projection reads the next row too."""
    wrong = lambda x: (x + np.roll(x, -1, 1)) @ DRAWN["v"]
    found = trace_of(FOREIGN._replace(project_v=wrong), states(B, Q, M), mask=ja.causal(), heads=H)
    check(found, "output", "a hidden source row moves no output", "k=4", "q=3")


def test_what_raises_or_does_not_fit_ends_the_walk_there():
    def broken(*_):
        raise RuntimeError("no such kernel")

    found = foreign(FOREIGN._replace(softmax=broken))
    check(found, "weights", "RuntimeError: no such kernel")
    assert found.stage("heads").shape is None and "not reached" in str(found.stage("output"))
    assert not found.stage("heads").invariants
    narrow = foreign(FOREIGN._replace(project_k=lambda x: x @ DRAWN["k"][:, :9]))
    check(narrow, "K", "axis d is 3, expected 4")
    odd = trace_of(Stages(), states(B, Q, 13), heads=H)
    check(odd, "input", "h * d = m: 3 * 4 = 12 of m = 13")


def test_arrays_of_another_library_and_heads_at_once():
    """Projections that make heads at once, on jax arrays alone."""

    def project(name):
        def run(x):
            assert isinstance(x, jax.Array)
            return jnp.einsum("btm,mhd->bthd", x, DRAWN[name].reshape(M, H, D))

        return run

    def attend(query, key, value, visible):
        assert all(isinstance(x, jax.Array) for x in (query, key, value, visible))
        bhtd = (x.swapaxes(1, 2) for x in (query, key))
        return jax.nn.dot_product_attention(query, key, value, mask=visible), jax.nn.softmax(
            jnp.where(visible, FOREIGN.scores(*bhtd), -jnp.inf))  # fmt: skip

    stages = Stages(attend=attend, array=jnp.asarray, **{f"project_{n}": project(n) for n in "qkv"})
    x = jnp.asarray(states(B, Q, M))
    options = dict(mask=ja.causal(), heads=H, expected=SAME._replace(output=None))
    found = trace_of(stages, x, **options)
    check(found, "heads", "is the sum over keys")  # jax.nn rounds its weights to float32
    found = trace_of(stages, x, **options, tolerance=1e-5)
    assert found, str(found)
    assert [s.name for s in found.stages if not s.given] == [
        "head round trip", "scores", "mixed scores", "masked scores", "mixed weights", "merged", "output"
    ]  # fmt: skip


class Tensor:
    """An array that, as a torch tensor with a gradient, gives its numbers only once it is detached."""

    def __init__(self, array, attached=True):
        self.array, self.attached, self.dtype = np.asarray(array), attached, np.asarray(array).dtype
        self.shape, self.ndim = self.array.shape, self.array.ndim

    def __array__(self, *_, **__):
        raise RuntimeError("numpy() of a tensor that requires grad")

    def detach(self):
        return Tensor(self.array.copy(), attached=False)

    cpu = clone = lambda self: self

    def numpy(self):
        assert not self.attached
        return self.array

    def __getitem__(self, index):
        return self.array[index]

    def __setitem__(self, index, value):
        self.array[index] = value


def test_arrays_with_a_gradient_are_detached_and_keep_their_type():
    """Callables get arrays of their library in the type of the states, whatever the formulas are made in."""
    seen = []

    def scores(query, key):
        seen.extend(x.dtype.name for x in (query, key))
        return Tensor(FOREIGN.scores(query.array, key.array))

    x = Tensor(states(B, Q, M).astype(np.float32))
    found = trace_of(Stages(scores=scores, layout="... h t d", array=Tensor), x, mask=ja.causal(), heads=H)
    assert found, str(found)
    assert set(seen) == {"float32"} and found.stage("output").invariants[-2].holds
    doubled = Stages(scores=lambda q, k: Tensor(2 * FOREIGN.scores(q.array, k.array)), layout="... h t d",
                     array=Tensor)  # fmt: skip
    check(trace_of(doubled, x, heads=H), "scores", "is scale * <query, key>")


def test_stages_that_are_left_out_hand_on_the_array_as_it_is():
    kinds = []
    stages = Stages(
        scores=lambda q, k: (q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5).astype(np.float16),
        softmax=softmax,
        mask=lambda x, visible: kinds.append(x.dtype.name) or np.where(visible, x, np.float16(-np.inf)),
        layout="... h t d",
    )
    assert foreign(stages)
    assert set(kinds) == {"float16"}


def at_once(query, key, value, seen):
    """Heads by loops over the shared key heads; a row that sees nothing gives zeros."""
    heads = []
    for h in range(query.shape[2]):
        scores = np.einsum("bqd,bkd->bqk", query[:, :, h], key[:, :, h // 2]) / D**0.5
        raised = np.exp(scores) * seen[:, 0]
        total = raised.sum(-1, keepdims=True)
        heads.append(raised / np.where(total == 0, 1, total) @ value[:, :, h // 2])
    return np.stack(heads, 2)


LOOKALIKES = {
    "keys in tile order": (
        dict(scores=lambda q, k: np.einsum("bqhd,bkhd->bhqk", q, np.tile(k, (1, 1, 2, 1))) / D**0.5),
        "scores", "it is head h with key head h % hK (tile order)"),
    "the first key head": (
        dict(scores=lambda q, k: np.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) / D**0.5),
        "scores", "it is every head with key head 0"),
    "the model width": (
        dict(scores=lambda q, k: np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, 2, 2)) / (6 * D) ** 0.5),
        "scores", "it is scaled by 1/sqrt(h * d), the model width"),
    "the softmax over heads": (
        dict(softmax=lambda x: softmax(x, -3)), "weights", "the softmax runs over heads"),
    "the other polarity, in one call": (
        dict(attend=lambda q, k, v, visible: (at_once(q, k, v, ~visible), None)),
        "heads", "it is what comes of the mask in the other polarity"),
    "no mask, in one call": (
        dict(attend=lambda q, k, v, visible: (at_once(q, k, v, np.ones_like(visible)), None)),
        "heads", "it is what comes of no mask"),
    "zeroed afterwards": (
        dict(weights=lambda x, visible: softmax(x) * visible),
        "weights", "it is the softmax of what is not masked, zeroed afterwards"),
}  # fmt: skip


@pytest.mark.parametrize("what", LOOKALIKES)
def test_a_usual_mistake_is_named(what):
    changes, first, text = LOOKALIKES[what]
    mask = ja.everything() if what == "the softmax over heads" else ja.window(2)
    kv = states(B, Q, 3 * D, seed=1)
    found = trace_of(Stages(**changes), states(B, Q, 6 * D), kv, mask, heads=6, kv_heads=3, residual=False)
    check(found, first, text)
    after = STAGES[STAGES.index(first) + 1]
    assert "(downstream)" in str(found.stage(after)).splitlines()[0]


def test_two_callables_for_one_stage_and_odd_sharing_are_refused():
    with pytest.raises(ValueError, match="got weights and mask.*Fix: leave weights out"):
        trace_of(Stages(weights=lambda x, seen: x, mask=lambda x, seen: x), states(Q, M), heads=H)
    with pytest.raises(ValueError, match="got attend and scores"):
        trace_of(Stages(attend=lambda *_: (0, 0), scores=lambda q, k: q), states(Q, M), heads=H)
    with pytest.raises(ValueError, match="heads = 3, kv_heads = 2"):
        trace_of(Stages(), states(Q, M), heads=3, kv_heads=2)
    with pytest.raises(TypeError, match="mask must be a jaxattn mask"):
        trace_of(Stages(), states(Q, M), mask=np.ones((Q, Q), bool), heads=H)


# What it prints, gives and draws.


def test_as_data_and_as_a_picture(monkeypatch):
    found = foreign(FOREIGN._replace(softmax=lambda x: softmax(x, -2)))
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert data["first_divergence"] == "weights" and len(data["stages"]) == 13
    scores = data["stages"][5]
    assert (scores["shape"], scores["axes"]) == ([B, H, Q, Q], "b hl q k")
    assert scores["meaning"].startswith("how much query row q asks for key row k in head h")
    assert {"name", "holds", "measured", "limit", "where"} == set(scores["invariants"][0])
    with pytest.raises(KeyError, match="no stage 'context'.*heads"):
        found.stage("context")
    with pytest.raises(ValueError, match="stage 'heads' has axes"):
        found.picture("heads")
    from matplotlib import image

    panels = image.imread(io.BytesIO(found.picture("masked scores", batch=1)))
    assert panels.ndim == 3 and panels[..., :3].std() > 0.1
    other = image.imread(io.BytesIO(found.picture("masked scores", batch=0)))
    assert np.abs(panels - other)[50:].max() > 0.1  # below the title
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxattn\[experiments\]'"):
        found.picture()
