"""Laws of mixed, widened and routed heads: right programs hold them, faults break them, ours hold them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, expected
from head_subjects import VARIANTS

from jaxattn.check import report
from jaxattn.check.adapters.mixer import MIXERS
from jaxattn.check.faults import basis as bases_faults
from jaxattn.check.faults import mixer as heads_faults
from jaxattn.check.faults import router as routers_faults
from jaxattn.check.faults.basis import on_basis, overlapped, traced_basis, traced_overlap
from jaxattn.check.faults.mixer import right_mixer, traced_mixer
from jaxattn.check.faults.router import traced_router
from jaxattn.check.law import SIZES
from jaxattn.check.laws import LAWS
from jaxattn.check.laws import basis as bases_laws
from jaxattn.check.laws import mixer as heads_laws
from jaxattn.check.laws import router as routers_laws
from jaxattn.check.report import assert_laws, run
from jaxattn.check.subjects import router as routers
from jaxattn.check.subjects.mixer import Basis, MixCall, Mixer, Overlap, mixed, of_mixer
from jaxattn.check.subjects.router import RouteCall, Routed, Router, of_router, route_call

pytestmark = pytest.mark.heavy

FAULTS = heads_faults.FAULTS | bases_faults.FAULTS | routers_faults.FAULTS
OURS = heads_laws.LAWS | bases_laws.LAWS | routers_laws.LAWS
MIXER, (OVERLAP, BASIS), ROUTER = heads_faults.RIGHT, bases_faults.RIGHT, routers_faults.RIGHT


@pytest.mark.parametrize("right", [MIXER, OVERLAP, BASIS, ROUTER], ids=lambda x: type(x).__name__)
def test_the_right_program_holds_every_law(right):
    found = run(right, quick=True)
    assert found.passed and all(one.ruling == "holds" for one in found.rulings), str(found)
    assert [one.law for one in found.rulings] == [n for n, x in LAWS.items() if isinstance(right, x.about)]


def test_right_programs_show_no_divergence():
    mixers = [traced_mixer(), traced_mixer(bias=True), traced_mixer(mask=heads_faults.OF_HEADS)]
    for found in (*mixers, traced_overlap(), traced_basis(), traced_router()):
        assert found, str(found)


# Laws without a fault in the table can break too.


def _attend(change):
    """The right mixer of a changed call."""
    return Mixer("planted", lambda call: right_mixer(change(call)))


def _routes(change):
    return Router("planted", lambda call: ROUTER.route(change(call)))


def _one_count(call):
    """One number of heads everywhere: the maps must be square."""
    return call._replace(pre=call.pre.reshape(len(call.pre), len(call.pre)))


def _mean_of_empty(call):
    """A row without a key is the mean of all values."""
    out = right_mixer(call)
    if call.mask is None:
        return out
    empty = ~jnp.broadcast_to(call.mask.any(-1), (len(out), 1, out.shape[1]))[:, 0, :, None, None]
    return jnp.where(empty, call.value.mean(1, keepdims=True), out)


@jax.jit
def _by_place(scores):
    """Ties are decided by the token's place in the batch."""
    call = route_call(scores, 2)
    first, last = (routers_faults.chosen(c) for c in (call, call._replace(routed=call.routed[:, ::-1])))
    odd = jnp.arange(len(first))[:, None] % 2 == 1
    return routers_faults.gates(call, jnp.where(odd, last[:, ::-1], first))


def _late_gradient(call):
    """Right values; the map after the softmax is held fixed in the reverse pass."""
    return right_mixer(call._replace(post=jax.lax.stop_gradient(call.post)))


PLANTED = {
    "post-mix-after-softmax": _attend(lambda c: c._replace(pre=c.pre @ c.post, post=jnp.eye(len(c.post)))),
    "mix-counts": _attend(_one_count),
    "groups-are-blocks": _attend(lambda c: c._replace(pre=c.pre[::-1] if c.pre.ndim == 3 else c.pre)),
    "row-mixes": _attend(lambda c: c._replace(query_maps=c.key_maps, key_maps=c.query_maps)),
    "hidden-after-mix": _attend(lambda c: c._replace(mask=None)),
    "mixed-row-without-keys": Mixer("planted", _mean_of_empty),
    "mix-gradients": Mixer("planted", _late_gradient),
    "overlap-of-zero": Overlap("planted", lambda q, k, v, r: overlapped(q, k, v, r) * (1 if r else 2)),
    "basis-factors": Basis("planted", lambda c: on_basis(c._replace(mixing=jnp.abs(c.mixing) ** 0.5 + 0.1))),
    "basis-content-bias": Basis("planted", lambda c: on_basis(
        c._replace(bias=None if c.bias is None else c.bias * c.width**0.5 + c.bias))),
    "routed-none-or-all": _routes(lambda c: c._replace(k=max(1, c.k))),
}  # fmt: skip


@pytest.mark.parametrize("law", PLANTED)
def test_a_law_without_a_fault_in_the_table_can_break(law):
    (ruled,) = run(PLANTED[law], laws=[law]).rulings
    assert ruled.ruling in ("broken", "raises") and not ruled.good, str(ruled)
    assert (ruled.ruling == "raises") == (law == "mix-counts")  # one H everywhere cannot be called at all


def test_ties_by_the_place_in_a_batch_are_seen():
    subject = Router("planted", lambda call: Routed(_by_place(call[:3])))
    (ruled,) = run(subject, laws=["ties-by-index"]).rulings
    assert ruled.ruling == "broken" and "in one place and off in another" in ruled.note


def test_every_law_is_broken_by_something():
    assert {fault.law for fault in FAULTS.values()} | PLANTED.keys() == OURS.keys()


# What the loops say is what the public cases state.


def test_pub_26_by_the_loops_and_by_the_right_program():
    case = CASES["PUB-26"]["input"]
    scores = np.asarray(list(case["scores after scale"].values()), float)  # [h, q, k]
    query = jnp.asarray(np.sqrt(2) * np.moveaxis(scores, 0, 1)[None])
    key = jnp.asarray(np.broadcast_to(np.eye(2)[:, None], (1, 2, 2, 2)))
    maps = (jnp.asarray(case[name], float) for name in ("pre (mixed[g]=sum_h s[h]*pre[h][g])", "post"))
    causal = jnp.asarray(np.tril(np.ones((1, 1, 2, 2), bool)))
    call = MixCall(query, key, jnp.asarray(case["v"], float), *maps, mask=causal)
    want = expected("PUB-26", "ctx[0,i,h]")
    np.testing.assert_allclose(mixed(call)[0, :, :, 0], want, atol=1e-9)
    np.testing.assert_allclose(right_mixer(call)[0, :, :, 0], want, atol=1e-9)


def _scores(rows):
    rows = jnp.asarray(rows, float)
    return RouteCall(rows, jnp.zeros((len(rows), 2)), jnp.zeros((len(rows), 2)), 2)


def test_pub_24_and_pub_25_by_the_loops_and_by_the_right_router():
    call = _scores(list(CASES["PUB-24"]["input"]["router_logits"].values()))
    alone = call._replace(shared=call.shared[:, :0])
    paper, released = (routers.gates(alone, form, stages=False) for form in (False, True))
    want = expected("PUB-24", "softmax token 1") * [1, 0, 1, 0]
    np.testing.assert_allclose(paper[1], want, atol=1e-9)
    np.testing.assert_allclose(
        released[1, [0, 2]] / 2, expected("PUB-24", "renormalised over {0,2}"), atol=1e-9
    )
    assert (paper[0] != 0).tolist() == [True, True, False, False]  # a tie goes to the lowest index
    np.testing.assert_allclose(ROUTER.route(call).gates, routers.gates(call, False), atol=1e-12)
    a, b = CASES["PUB-25"]["input"]["a"], CASES["PUB-25"]["input"]["b"]
    for name, rows in (("S balanced", [a, a, b, b]), ("S collapsed", [a] * 4)):
        call = _scores(rows)
        np.testing.assert_allclose(routers.balance(call), expected("PUB-25", name), atol=1e-9)
        np.testing.assert_allclose(ROUTER.route(call).loss, expected("PUB-25", name), atol=1e-9)
    layers = (_scores([a] * 4), _scores([b] * 4))
    want = expected("PUB-25", "S two layers (mean per layer)")
    np.testing.assert_allclose(ROUTER.total(layers), want, atol=1e-6)
    wrong = {
        "softmax of a softmax": 0.59892,
        "layers balanced as one": 0.5,
        "balance of the selected alone": 1.0,
    }
    for name, value in wrong.items():  # what the case says that bad programs give
        subject = FAULTS[name].subject
        got = subject.total(layers) if "layers" in name else subject.route(layers[0]).loss
        np.testing.assert_allclose(got, value, atol=1e-5)
    padded = _scores([a] * 4 + [b] * 4)._replace(valid=jnp.arange(8) < 4)
    np.testing.assert_allclose(routers.balance(padded), expected("PUB-25", "S padded"), atol=1e-9)


# Our own engines and variants, asked through their public faces.


@pytest.mark.parametrize("name", VARIANTS)
def test_our_variants_hold_every_law(name, monkeypatch):
    monkeypatch.setattr(report, "SIZES", SIZES[1:2])
    assert_laws(VARIANTS[name])


def test_an_engine_of_ours_holds_every_law(monkeypatch):
    monkeypatch.setattr(report, "SIZES", SIZES[1:2])
    subject = MIXERS["jaxattn.blocked"]()
    assert subject.name == "jaxattn.blocked"
    assert_laws(subject._replace(attend=jax.jit(subject.attend)))


def test_the_adapters_of_variants_reach_them(monkeypatch):
    """A fault planted in the library itself is seen through the adapter."""
    monkeypatch.setattr(report, "SIZES", SIZES[1:2])
    from jaxattn.engines import formula

    flipped = lambda x, static, rows: jnp.einsum("...iqk,oi->...oqk", x, static.matrix)
    monkeypatch.setattr(formula, "STEPS", formula.STEPS._replace(mix=flipped))
    (ruled,) = run(MIXERS["jaxattn.dense"](), laws=["mix-direction"]).rulings
    assert ruled.ruling == "broken" and "transpose" in ruled.note, str(ruled)


# Anyone's.


def test_a_function_of_two_maps_is_read_by_its_keywords_and_layout(monkeypatch):
    monkeypatch.setattr(report, "SIZES", SIZES[1:2])

    def mine(query, key, value, pre, post, mask=None, pre_bias=None, post_bias=None):
        turn = lambda x: x.swapaxes(1, 2)
        call = MixCall(turn(query), turn(key), turn(value), pre, post, mask, pre_bias, post_bias)
        return turn(MIXER.attend(call))

    subject = of_mixer(mine, layout="bhqd")
    assert subject.supports == {"mask", "bias", "counts", "float64", "tracing"} and subject.name.endswith(
        "mine"
    )
    laws = ["mix-direction", "mix-counts", "mask-after-mix", "mix-bias-is-masked", "row-mixes"]
    found = run(subject, laws=laws, quick=True)
    assert [one.ruling for one in found.rulings] == ["holds"] * 4 + ["not asked"], str(found)
    wrong = run(of_mixer(mine), laws=laws[:1], quick=True)  # the axes of time and heads are swapped
    assert not wrong.passed
    with pytest.raises(ValueError, match="layout: got 'bqdd'.*Fix: 'bqhd'"):
        of_mixer(mine, layout="bqdd")
    with pytest.raises(ValueError, match="supports: got 'wings', expected some of mask"):
        of_mixer(mine, supports=("wings",))


def test_a_function_of_routed_scores_is_a_router(monkeypatch):
    monkeypatch.setattr(report, "SIZES", SIZES[1:2])

    @functools.partial(jax.jit, static_argnums=1)
    def picked(scores, k):
        p = jax.nn.softmax(scores, -1)  # of the scores themselves 0.0 and -0.0 would differ
        return p * jax.nn.one_hot(jax.lax.top_k(p, k)[1], p.shape[1]).sum(-2)

    @functools.partial(jax.jit, static_argnums=1)
    def loss(scores, k, valid):
        real = jnp.ones(len(scores)) if valid is None else valid
        mean = lambda x: (x * real[:, None]).sum(0) / real.sum()
        return scores.shape[1] * (mean(picked(scores, k) != 0) * mean(jax.nn.softmax(scores, -1))).sum()

    found = run(of_router(picked, loss=loss))
    ruling = {one.law: one.ruling for one in found.rulings}
    assert found.passed and ruling["share-counts-shared"] == ruling["balance-by-layer"] == "not asked", str(
        found
    )
    assert ruling["balance-loss"] == ruling["gates-are-declared"] == "holds"
    undeclared = run(of_router(picked, renormalised=True), laws=["gates-are-declared"], quick=True)
    assert "do not add up to k" in undeclared.rulings[0].note
