"""Public cases of routed heads and of the ledger."""

import functools

import cases
import jax
import jax.numpy as jnp
import jaxpr
import numpy as np
import pytest
from cases import CASES, expected

import jaxattn as ja
import variants

pytestmark = pytest.mark.heavy

# The router's kernel is the identity, so that a token state is its own router logits.
SPEC = ja.HeadSpec(model=4, heads=6, d_qk=3, d_v=2)
LOGITS = jnp.asarray(list(CASES["PUB-24"]["input"]["router_logits"].values()), float)


def routed(spec=SPEC, **options):
    """(Attention, parameters): every leaf drawn at O(1), the routed router the identity."""
    attn = ja.attention(spec, variants.moh(**options))
    params = cases.redraw(attn.init(jax.random.key(0)), 1)
    own = dict(params["heads"]["moh"])
    if "routed" in own:
        own["routed"] = jnp.eye(4, own["routed"].shape[1])
    return attn, {**params, "heads": {"moh": own}}


def gates(attn, params, x):
    return jax.jit(attn.query_side)(params, x).gate[..., 0]


# PUB-24


def test_pub_24_top_k_by_index():
    attn, params = routed(shared=2, top_k=2)
    got = np.asarray(gates(attn, params, LOGITS))
    assert params["heads"]["moh"]["routed"].shape == (4, 4)  # router outputs: H - shared
    np.testing.assert_array_equal(got[:, :2] != 0, True)  # the shared heads
    np.testing.assert_array_equal((got[:, 2:] != 0).sum(-1), 2)
    np.testing.assert_array_equal((got != 0).sum(-1), 4)  # active: shared + k
    # All scores equal: the lowest indices. Scores [3, 1, 2, 0]: heads 0 and 2.
    np.testing.assert_array_equal(got[:, 2:] != 0, [[1, 1, 0, 0], [1, 0, 1, 0]])


@pytest.mark.parametrize("form", ["paper", "released"])
def test_pub_24_paper_gates_are_probabilities_and_released_ones_renormalised(form):
    """Both are documented: p_i as it is, or over the selected and times k; stage weights apart."""
    attn, params = routed(shared=0, top_k=2, spec=ja.HeadSpec(model=4, heads=4), gates=form)
    got = gates(attn, params, LOGITS)[1]
    if form == "paper":
        want = expected("PUB-24", "softmax token 1") * [1, 0, 1, 0]
    else:
        first, second = expected("PUB-24", "renormalised over {0,2}")
        want = 2 * np.array([first, 0, second, 0])
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert "renormalised" in (variants.moh.__doc__ or "")


def test_pub_24_ties_are_the_same_under_jit_vmap_and_in_any_order():
    attn, params = routed(shared=2, top_k=2)
    # 0.0 and -0.0 are equal, so that only the index may decide
    zeros = jnp.array([[0.0, -0.0, 0.0, -0.0], [-0.0, 0.0, -0.0, 0.0], [-0.0, -0.0, 0.0, 0.0]])
    x = jnp.concatenate([zeros, LOGITS])

    def function(x):
        return gates(attn, params, x)

    want = function(x)
    np.testing.assert_array_equal(want[:3, 2:] != 0, [[1, 1, 0, 0]] * 3)
    np.testing.assert_array_equal(jax.jit(function)(x) != 0, want != 0)
    np.testing.assert_array_equal(jax.vmap(lambda row: function(row[None])[0])(x) != 0, want != 0)
    order = np.array([4, 2, 0, 3, 1])
    np.testing.assert_array_equal(function(x[order]) != 0, want[order] != 0)


@pytest.mark.parametrize(("shared", "top_k"), [(2, 2), (2, 4), (2, 0), (0, 2), (1, 2), (6, 0)])
@pytest.mark.parametrize("form", ["paper", "released"])
def test_pub_24_exactly_shared_plus_k_heads_are_active(shared, top_k, form):
    attn, params = routed(shared=shared, top_k=top_k, gates=form)
    active = np.asarray(gates(attn, params, LOGITS)) != 0
    np.testing.assert_array_equal(active.sum(-1), shared + top_k)
    np.testing.assert_array_equal(active[:, :shared], True)


def test_pub_24_unselected_heads_get_no_gradient_from_a_token():
    """The heads' own leaves: output rows and, through queries of one token, query maps."""
    attn, params = routed(shared=2, top_k=2)
    x_kv = jnp.asarray(cases.fill((5, 4), 3))

    def loss(params, token):
        return jnp.sum(attn.apply(params, LOGITS[token, None], x_kv)[0] ** 2)

    for token in range(2):
        active = np.asarray(gates(attn, params, LOGITS)[token]) != 0
        gradient = jax.jit(jax.grad(loss))(params, token)
        size = {
            "query": np.abs(gradient["query"]["kernel"]).max((0, 2)),
            "value": np.abs(gradient["value"]["kernel"]).max((0, 2)),
            "out": np.abs(gradient["out"]["kernel"]).max((1, 2)),
        }
        for name, per_head in size.items():
            if name == "query" and token == 0:
                assert np.all(per_head == 0)  # its state is 0, and so is the slope of x W
                continue
            np.testing.assert_array_equal(per_head != 0, active, err_msg=name)


def test_pub_24_gates_of_one_are_plain_attention():
    """Zero routers, released gates and all heads active force every gate to 1."""
    attn, params = routed(shared=2, top_k=4, gates="released")
    params["heads"]["moh"] = jax.tree.map(jnp.zeros_like, params["heads"]["moh"])
    x = jnp.asarray(cases.fill((2, 5, 4), 3))
    np.testing.assert_allclose(gates(attn, params, x), 1, atol=1e-14)
    plain = cases.apply(ja.attention(SPEC), {**params, "heads": {}}, x)
    np.testing.assert_allclose(cases.apply(attn, params, x), plain, atol=1e-12)


# PUB-25

A, B = (np.asarray(CASES["PUB-25"]["input"][name], float) for name in "ab")
BALANCED, COLLAPSED = np.stack([A, A, B, B]), np.stack([A] * 4)


def balance_loss(x, mask=None, params_of=lambda p: p, **options):
    attn, params = routed(spec=ja.HeadSpec(model=4, heads=6, d_qk=3, d_v=2),
                          shared=2, top_k=2, **options)  # fmt: skip
    return jax.jit(attn.apply)(params_of(params), jnp.asarray(x), None, mask)[1]


@pytest.mark.parametrize(("form", "constant"), [("paper", 1), ("released", 4)])
@pytest.mark.parametrize(("name", "tokens"), [("S balanced", BALANCED), ("S collapsed", COLLAPSED)])
def test_pub_25_balance_loss(name, tokens, form, constant):
    """c = 1, the paper's; the released multiple c = number of routed heads is an option."""
    loss = balance_loss(tokens, balance=form).losses["balance"]
    want = constant * expected("PUB-25", name)
    np.testing.assert_allclose(loss.value, want, atol=1e-6)
    twice = balance_loss(np.tile(tokens, (2, 1)), balance=form).losses["balance"]
    np.testing.assert_allclose(twice.value, want, atol=1e-6)
    batched = balance_loss(np.tile(tokens, (3, 2, 1, 1)), balance=form).losses["balance"]
    np.testing.assert_allclose(batched.value, want, atol=1e-6)


def test_pub_25_padding_does_not_count():
    x = np.concatenate([COLLAPSED, np.stack([B] * 4)])
    mask = ja.padding(np.arange(8) < 4)
    aux = balance_loss(x, mask)
    np.testing.assert_allclose(aux.losses["balance"].value, expected("PUB-25", "S padded"), atol=1e-6)
    assert aux.sums["moh"].tokens == 4
    everything = balance_loss(x).losses["balance"].value
    assert abs(everything - expected("PUB-25", "S padded")) > 0.1


def test_pub_25_layers_are_added_each_on_its_own():
    """The rule for several layers is the caller's sum or mean of each layer's loss; sums and counts
    of several batches of one layer are added first (`Attention.losses`)."""
    layers = [balance_loss(np.stack([row] * 4)) for row in (A, B)]
    each = [aux.losses["balance"].value for aux in layers]
    want = expected("PUB-25", "S two layers (mean per layer)")
    np.testing.assert_allclose(np.mean(each), want, atol=1e-6)
    attn, _ = routed(shared=2, top_k=2)
    added = jax.tree.map(jnp.add, layers[0].sums, layers[1].sums)  # one layer, two batches
    np.testing.assert_allclose(attn.losses(added)["balance"].value, 0.5, atol=1e-6)


def test_pub_25_shared_heads_are_excluded():
    def other_shared(params):
        own = params["heads"]["moh"]
        return {
            **params,
            "heads": {"moh": {**own, "shared": own["shared"] + 3.0 * LOGITS.T[:, :2]}},
        }

    got = balance_loss(BALANCED, params_of=other_shared).losses["balance"].value
    np.testing.assert_allclose(got, balance_loss(BALANCED).losses["balance"].value, rtol=1e-15)


@pytest.mark.parametrize("tokens", [BALANCED, COLLAPSED, np.stack([A, B, B])])
def test_pub_25_the_gradient_is_that_of_the_probabilities(tokens):
    """d S = sum_i f_i dP_i: the share f is a count, and counts have no slope."""
    attn, params = routed(shared=2, top_k=2)

    def loss(routed_kernel):
        own = {**params["heads"]["moh"], "routed": routed_kernel}
        aux = attn.apply({**params, "heads": {"moh": own}}, jnp.asarray(tokens))[1]
        return aux.losses["balance"].value

    share = np.mean([row >= np.sort(row)[-2] for row in tokens], axis=0)

    def through_probabilities(routed_kernel):
        return jnp.dot(jax.nn.softmax(jnp.asarray(tokens) @ routed_kernel).mean(0), share)

    kernel = params["heads"]["moh"]["routed"]
    got = jax.grad(loss)(kernel)
    np.testing.assert_allclose(got, jax.grad(through_probabilities)(kernel), atol=1e-12)
    assert np.all(np.isfinite(got))
    if tokens is not BALANCED:
        assert np.max(np.abs(got)) > 1e-3


def test_pub_25_collapse_costs_more_than_balance():
    collapsed, balanced = (balance_loss(x).losses["balance"].value for x in (COLLAPSED, BALANCED))
    assert collapsed > balanced


def test_pub_25_the_weight_joins_in_the_total():
    aux = balance_loss(COLLAPSED, balance_weight=0.5)
    np.testing.assert_allclose(aux.total(), 0.5 * expected("PUB-25", "S collapsed"), atol=1e-6)


# PUB-27


def ledger_layer(**changes):
    sizes = dict(model=12, heads=6, kv_heads=2, d_qk=4, d_v=3, out=12, use_bias=True)
    return ja.attention(ja.HeadSpec(**{**sizes, **changes}))


TERMS = {
    "q": "query projection", "k": "key projection", "v": "value projection",
    "scores": "scores", "weighted sum": "values", "out": "output projection",
}  # fmt: skip


def test_pub_27_parameters_are_those_of_the_tree():
    """Counts after a prune belong to pruning, which another part of the project brings."""
    attn = ledger_layer()
    params = attn.init(jax.random.key(0))
    want = CASES["PUB-27"]["expect"]["values"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == want["parameters"]
    ledger = ja.ledger(attn, batch=2, q_len=3, k_len=5)
    assert ledger.as_dict()["total_parameters"] == want["parameters"]
    for letter, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
        kernel, bias = (int(n) for n in want["split"][letter].split("+"))
        assert (params[name]["kernel"].size, params[name]["bias"].size) == (kernel, bias)
        assert ledger.parameters[name] == kernel + bias


def test_pub_27_macs_by_term():
    want = dict(CASES["PUB-27"]["expect"]["values"]["MACs"])
    ledger = ja.ledger(ledger_layer(), batch=2, q_len=3, k_len=5)
    assert ledger.as_dict()["total_macs"] == want.pop("total")
    assert ledger.macs == {TERMS[name]: count for name, count in want.items()}
    assert "MACs" in str(ledger) and "one multiply and one add" in (ja.Ledger.__doc__ or "")


def test_pub_27_twice_the_rows_cost_twice_the_maps_and_four_times_the_products():
    short, long = (ja.ledger(ledger_layer(), 2, n, n).macs for n in (7, 14))
    for name, count in short.items():
        factor = 4 if name in ("scores", "values") else 2
        assert long[name] == factor * count


def test_pub_27_a_mask_takes_nothing_from_the_count():
    """The traced program of a causal call has the same dot products as one without a mask."""
    attn = ledger_layer()
    params = attn.init(jax.random.key(0))
    x_q, x_kv = jnp.ones((2, 3, 12)), jnp.ones((2, 5, 12))
    want = CASES["PUB-27"]["expect"]["values"]["MACs"]["total"]
    for mask in (None, ja.causal()):
        call = functools.partial(attn.apply, mask=mask, engine="dense")
        assert jaxpr.dot_macs(jaxpr.trace(call, params, x_q, x_kv)) == want
    assert "mask takes nothing away" in (ja.ledger.__doc__ or "")
