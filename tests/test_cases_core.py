"""Public cases of the core: hidden gradients, dtypes, dropout, head order and head mixing."""

import dataclasses
import inspect

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, expected

import jaxattn as ja

pytestmark = pytest.mark.heavy

each_engine = pytest.mark.parametrize("engine", cases.ENGINES)
each_variant = pytest.mark.parametrize("name", sorted(cases.ARGUMENTS))


# PUB-05


@each_engine
@pytest.mark.parametrize("dtype", CASES["PUB-05"]["input"]["dtypes"])
def test_pub_05_a_huge_hidden_key_reaches_no_derivative(engine, dtype):
    """First and second derivatives, each in every pairing of reverse and forward mode."""
    case = CASES["PUB-05"]["input"]
    mask = ja.explicit(np.asarray(case["mask"], bool)[None], axes="b k")
    q, k, v = (jnp.asarray(case[name], dtype) for name in "qkv")

    def out(*rows):
        q, k, v = (a[None, :, None, None] for a in rows)
        return cases.attend(q, k, v, mask, engine=engine)[0, 0, 0, 0]

    modes = (jax.jacrev, jax.jacfwd)

    @jax.jit
    def derivatives(*rows):
        first = [mode(out, (0, 1, 2))(*rows) for mode in modes]
        second = [outer(inner(out, 1), 1)(*rows) for outer in modes for inner in modes]
        return out(*rows), first, second

    # The case states its value of d_out/dq with ten digits.
    tolerance = 1e-6 if dtype == "float32" else 5e-11
    value, first, second = derivatives(q, k, v)
    np.testing.assert_allclose(value, 1.75, atol=tolerance)
    for gradients in first:
        for got, name in zip(gradients, ("d_out/dq", "d_out/dk", "d_out/dv"), strict=True):
            np.testing.assert_allclose(got, expected("PUB-05", name).reshape(-1), atol=tolerance)
    for got in second:
        np.testing.assert_allclose(got, expected("PUB-05", "d2_out/dk2"), atol=tolerance)


# PUB-06


@each_engine
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pub_06_half_precision_masks_select(dtype, engine):
    value = jnp.asarray([1, 2, 4], dtype)[None, :, None, None]
    mask = ja.causal() & ja.padding(jnp.array([[False, True, True]]))
    got = cases.uniform(value, 3, mask, engine=engine)[0, :, 0, 0].astype(jnp.float32)
    tolerance = CASES["PUB-06"]["expect"]["tolerance"][dtype]
    values = CASES["PUB-06"]["expect"]["values"]
    want = [0.0, values["a row 1"], values["a row 2"]]  # row 0 sees nothing: zero heads
    np.testing.assert_allclose(got, want, atol=tolerance)


@each_engine
@pytest.mark.parametrize("key", CASES["PUB-06"]["input"]["b"]["k"])
def test_pub_06_a_very_negative_score_still_beats_a_hidden_key(key, engine):
    q, k, v = (jnp.asarray(a, jnp.float32)[None, :, None, None] for a in ([1.0], key, [7, 9]))
    mask = ja.explicit(np.array([[True, False]]), axes="b k")
    np.testing.assert_allclose(cases.attend(q, k, v, mask, engine=engine), 7.0, atol=1e-6)


@each_engine
def test_pub_06_an_empty_row_is_zero_in_float16(engine):
    q, k, v = (jnp.asarray(a, jnp.float16)[None, :, None, None] for a in ([-20.0], [1, 1], [1, 2]))
    mask = ja.explicit(np.array([[False, False]]), axes="b k")
    np.testing.assert_array_equal(cases.attend(q, k, v, mask, engine=engine), 0)


@each_engine
@pytest.mark.parametrize(("dtype", "size"), [("float16", 300.0), ("float32", 300), ("float32", 1e10)])
def test_pub_06_scores_are_formed_in_float32(dtype, size, engine):
    """300 * 300 overflows float16; a score formed in float32 does not. 1e10 has no float16.

    Compiled as users compile it: fused arithmetic may round a score of 1e20 twice in two ways, and
    their difference is large.
    """
    q, k, v = (jnp.asarray(a, dtype)[None, :, None, None] for a in ([size], [size, -size], [1, 2]))
    rows = ja.QuerySide(q), ja.KeySide(k, v), ja.Coupling(scale=1.0)
    eager = ja.attend(*rows, engine=engine)[0]
    options = {"xla_backend_optimization_level": 3}
    optimised = jax.jit(lambda *rows: ja.attend(*rows, engine=engine)[0], compiler_options=options)
    np.testing.assert_allclose(eager, 1.0, atol=1e-6)
    np.testing.assert_allclose(optimised(*rows), 1.0, atol=1e-6)


@each_engine
def test_pub_06_hidden_weights_are_exactly_zero(engine):
    mask = ja.causal() & ja.padding(jnp.array([[False, True, True]]))
    got = cases.uniform(cases.units(3), 3, mask, engine=engine)[0, :, 0]
    np.testing.assert_array_equal(np.asarray(got)[[0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 2, 0]], 0)


# PUB-07


@each_engine
def test_pub_07_a_bfloat16_sum_of_1024_weights_is_one(engine):
    got = cases.uniform(jnp.ones((1, 1024, 1, 1), jnp.bfloat16), 1, engine=engine)
    assert abs(float(got[0, 0, 0, 0]) - 1) <= 2**-8


@each_engine
def test_pub_07_bfloat16_keeps_the_accuracy_of_float32_accumulation(engine):
    q, k, v = (jnp.asarray(4 * cases.fill((1, 64, 2, 16), seed), jnp.bfloat16) for seed in (30, 31, 32))
    got = cases.attend(q, k, v, scale=0.25, engine=engine)
    assert got.dtype == jnp.bfloat16
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    logits = 0.25 * np.einsum("bqhd,bkhd->bhqk", q, k)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhqk,bkhv->bqhv", weights, v)
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) <= 0.03


# PUB-16

A, B = jax.random.key(0), jax.random.key(1)
DROPPING = ja.Coupling(scale=1.0, dropout=0.25)


def dropped(rng, engine):
    ones = jnp.ones((4, 64, 4, 1))
    return cases.uniform(ones, 64, coupling=DROPPING, dropout_key=rng, engine=engine)[..., 0]


@each_engine
def test_pub_16_a_key_decides_the_dropout(engine):
    first, again, other = (np.asarray(dropped(rng, engine)) for rng in (A, A, B))
    np.testing.assert_array_equal(first, again)
    assert np.max(np.abs(first - other)) > 0.01


@each_engine
def test_pub_16_dropout_keeps_the_mean(engine):
    assert abs(float(dropped(A, engine).mean()) - 1) < 0.02


@each_engine
def test_pub_16_rows_heads_and_queries_drop_apart(engine):
    """No sharing unless `dropout_shared` names an axis: the default drops every pair by itself."""
    heads = np.asarray(dropped(A, engine))  # [b, q, h]
    for axis in range(3):
        rows = np.moveaxis(heads, axis, 0).reshape(heads.shape[axis], -1)
        assert len({row.tobytes() for row in rows}) == len(rows), f"axis {axis} shares its dropout"


@each_engine
def test_pub_16_sharing_over_queries_is_an_option(engine):
    shared = dataclasses.replace(DROPPING, dropout_shared=("q",))
    heads = cases.uniform(jnp.ones((4, 64, 4, 1)), 64, coupling=shared, dropout_key=A, engine=engine)
    np.testing.assert_allclose(heads, jnp.broadcast_to(heads[:, :1], heads.shape), rtol=1e-12)
    assert len(np.unique(np.asarray(heads)[:, 0])) > 4


@each_engine
def test_pub_16_weights_are_zero_or_rescaled(engine):
    value = jnp.broadcast_to(jnp.eye(64)[:, None, :], (4, 64, 4, 64))
    weights = cases.uniform(value, 64, coupling=DROPPING, dropout_key=A, engine=engine)
    kept = np.asarray(weights) != 0
    np.testing.assert_allclose(np.asarray(weights)[kept], (1 / 64) / 0.75, rtol=1e-12)
    assert abs(kept.mean() - 0.75) < 0.01


def test_pub_16_returned_weights_are_before_dropout_and_documented():
    side = ja.QuerySide(query=jnp.zeros((4, 64, 4, 1)))
    key = ja.KeySide(jnp.zeros((4, 64, 4, 1)), jnp.ones((4, 64, 4, 1)))
    _, captured = ja.attend(
        side, key, DROPPING, engine="dense", dropout_key=A, capture=("weights", "mixed_weights")
    )
    np.testing.assert_allclose(captured["weights"], 1 / 64, rtol=1e-12)
    np.testing.assert_allclose(captured["mixed_weights"], 1 / 64, rtol=1e-12)
    assert "before dropout" in " ".join((inspect.getdoc(ja.attend) or "").split())


# PUB-17


@each_engine
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 3), (4, 1), (4, 4)])
def test_pub_17_query_head_reads_its_block_of_heads(heads, groups, engine):
    """Head i reads i // (heads // groups): blocks, never tiles."""
    value = jnp.broadcast_to((jnp.arange(groups) + 1.0)[:, None], (2, 2, groups, 1))
    got = cases.attend(jnp.zeros((2, 2, heads, 1)), jnp.zeros((2, 2, groups, 1)), value, engine=engine)[
        0, 0, :, 0
    ]
    np.testing.assert_allclose(got, np.repeat(np.arange(groups) + 1, heads // groups), atol=1e-6)
    if (heads, groups) != (4, 1) and groups != heads:
        np.testing.assert_allclose(got, expected("PUB-17", f"per-head ctx, H={heads}"), atol=1e-6)


@each_engine
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_pub_17_equals_mha_with_repeated_weights(groups, engine):
    shared = ja.attention(ja.HeadSpec(model=12, heads=4, kv_heads=groups, d_qk=3, d_v=5))
    full = ja.attention(ja.HeadSpec(model=12, heads=4, d_qk=3, d_v=5))
    params = cases.redraw(shared.init(jax.random.key(0)), 1)
    repeated = dict(params)
    for name in ("key", "value"):
        kernel = jnp.repeat(params[name]["kernel"], 4 // groups, axis=1)
        repeated[name] = {**params[name], "kernel": kernel}
    x = jnp.asarray(cases.fill((2, 5, 12), 3))
    got, want = (cases.apply(attn, p, x, engine=engine) for attn, p in ((shared, params), (full, repeated)))
    np.testing.assert_allclose(got, want, atol=1e-12)


# PUB-26


def talking(pre, post, scores, mask, engine, value=None):
    query = np.sqrt(2) * np.moveaxis(np.asarray(scores), 0, 1)[None]  # [b, q, h, d]
    key = np.broadcast_to(np.eye(2)[:, None], (2, 2, 2))[None]
    value = CASES["PUB-26"]["input"]["v"] if value is None else value
    coupling = ja.Coupling(
        scale=1 / np.sqrt(2), pre=(ja.Mix(jnp.asarray(pre)),), post=(ja.Mix(jnp.asarray(post)),)
    )
    value = jnp.asarray(value, float)
    return cases.attend(query, key, value, mask, coupling=coupling, engine=engine)


def talking_case():
    case = CASES["PUB-26"]["input"]
    pre = np.asarray(case["pre (mixed[g]=sum_h s[h]*pre[h][g])"], float)
    scores = np.asarray(list(case["scores after scale"].values()), float)
    return pre, np.asarray(case["post"], float), scores


@each_engine
def test_pub_26_the_mask_follows_the_mix(engine):
    pre, post, scores = talking_case()
    got = talking(pre, post, scores, ja.causal(), engine)[0, :, :, 0]
    np.testing.assert_allclose(got, expected("PUB-26", "ctx[0,i,h]"), atol=1e-9)


@each_engine
def test_pub_26_final_weights_and_exact_zeros(engine):
    pre, post, scores = talking_case()
    value = np.broadcast_to(np.eye(2)[:, None], (2, 2, 2))[None]
    weights = talking(pre, post, scores, ja.causal(), engine, value)[0].transpose(1, 0, 2)
    np.testing.assert_allclose(weights, expected("PUB-26", "final weights[h]"), atol=1e-9)
    np.testing.assert_array_equal(weights[:, 0, 1], 0)


@each_engine
def test_pub_26_the_first_row_does_not_feel_the_second_token(engine):
    pre, post, scores = talking_case()

    def first_row(value):
        return talking(pre, post, scores, ja.causal(), engine, value)[0, 0].sum()

    gradient = jax.grad(first_row)(jnp.asarray(CASES["PUB-26"]["input"]["v"], float))
    np.testing.assert_array_equal(gradient[0, 1], 0)
    assert np.all(np.asarray(gradient[0, 0]) != 0)


@each_engine
def test_pub_26_identity_maps_are_plain_attention_and_post_matters(engine):
    pre, post, scores = talking_case()
    eye = np.eye(2)
    plain = talking(eye, eye, scores, ja.causal(), engine)
    query = np.sqrt(2) * np.moveaxis(scores, 0, 1)[None]
    key = np.broadcast_to(np.eye(2)[:, None], (2, 2, 2))[None]
    value = jnp.asarray(CASES["PUB-26"]["input"]["v"], float)
    want = cases.attend(query, key, value, ja.causal(), scale=1 / np.sqrt(2), engine=engine)
    np.testing.assert_allclose(plain, want, atol=1e-12)
    mixed, other = (talking(pre, p, scores, ja.causal(), engine) for p in (post, post.T))
    assert np.max(np.abs(mixed - other)) > 0.1


@each_engine
def test_pub_26_a_fully_masked_row_is_zero(engine):
    pre, post, scores = talking_case()
    mask = ja.explicit(np.array([[True, True], [False, False]]), axes="q k")

    def rows(value):
        return talking(pre, post, scores, mask, engine, value)

    value = jnp.asarray(CASES["PUB-26"]["input"]["v"], float)
    np.testing.assert_array_equal(rows(value)[0, 1], 0)
    assert np.all(np.isfinite(jax.grad(lambda v: rows(v).sum())(value)))
