"""Public cases of the whole layer: rows without a key, types, sizes, construction, scale."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, expected
from flax import nnx
from jax.test_util import check_grads

import jaxattn as ja
import variants

pytestmark = pytest.mark.heavy
each_engine = pytest.mark.parametrize("engine", cases.ENGINES)
each_variant = pytest.mark.parametrize("name", sorted(cases.ARGUMENTS))
SMALL = ja.HeadSpec(model=6, heads=2, d_qk=5, d_v=5, bias_v=True, bias_out=True)


def layer(case_id, **changes):
    """(Attention, parameters, input) of plain attention in a case."""
    case = CASES[case_id]["input"]
    spec, params = cases.layer(case)
    return ja.attention(dataclasses.replace(spec, **changes)), params, case


# PUB-04

DEAD_ROW = ja.explicit(np.asarray(CASES["PUB-04"]["input"]["mask"], bool), axes="q k")
OTHER_ROWS = np.array([0, 2])


ALL_ROWS = ja.explicit(np.ones((3, 3), bool), axes="q k")


def dead_row_gradient(attn, engine):
    """(params, x, mask) -> gradients of a loss over rows 0 and 2, and the output."""

    def loss(params, x, mask):
        out = attn.apply(params, x, mask=mask, engine=engine)[0]
        weighted = out[0] * cases.fill((3, x.shape[-1]), 20)
        return jnp.sum(weighted[np.array([0, 2])]), out

    return jax.jit(jax.grad(loss, has_aux=True))


@each_engine
def test_pub_04_fully_masked_row_is_the_output_bias(engine):
    attn, params, case = layer("PUB-04")
    x = jnp.asarray(cases.filled(case["x"]))
    gradient = dead_row_gradient(attn, engine)
    got, out = gradient(params, x, DEAD_ROW)
    np.testing.assert_allclose(out[0], expected("PUB-04", "out"), atol=1e-9)
    np.testing.assert_array_equal(out[0, 1], params["out"]["bias"])
    cases.tree_close(got, gradient(params, x, ALL_ROWS)[0], 1e-12)
    for norm, want in CASES["PUB-04"]["expect"]["values"]["grad_norms"].items():
        name = {"q": "query", "k": "key", "v": "value", "o": "out"}[norm[1]]
        leaf = got[name]["kernel" if norm[0] == "W" else "bias"]
        np.testing.assert_allclose(jnp.linalg.norm(leaf.ravel()), want, atol=1e-9)


@each_engine
@each_variant
def test_pub_04_fully_masked_row_in_every_variant(name, engine):
    attn, params = cases.variant(name, SMALL)
    x = jnp.asarray(cases.fill((1, 3, 6), 10))
    gradient = dead_row_gradient(attn, engine)
    got, out = gradient(params, x, DEAD_ROW)
    np.testing.assert_array_equal(out[0, 1], params["out"]["bias"])
    cases.tree_close(got, gradient(params, x, ALL_ROWS)[0], 1e-12)


LOW = [(name, "dense") for name in sorted(cases.ARGUMENTS)]
LOW += [("mha", "blocked"), ("mha", "reference"), ("mha", "eager")]


@pytest.mark.parametrize(("name", "engine"), LOW)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pub_04_fully_masked_row_in_the_loss_at_low_precision(name, engine, dtype):
    attn, params = cases.variant(name, SMALL)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    x = jnp.asarray(cases.fill((1, 3, 6), 10), dtype)

    def loss(params, x):
        chosen = "auto" if engine == "eager" else engine
        out = attn.apply(params, x, mask=DEAD_ROW, engine=chosen)[0]
        return out.astype(jnp.float32).sum()

    gradient = jax.grad(loss, (0, 1))
    gradient = gradient if engine == "eager" else jax.jit(gradient)
    for leaf in jax.tree.leaves(gradient(params, x)):
        assert leaf.dtype == dtype
        assert np.all(np.isfinite(np.asarray(leaf, np.float32)))


# PUB-07


@pytest.fixture
def no_x64():
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@each_engine
def test_pub_07_float64_stays_float64(engine):
    attn, params, case = layer("PUB-10")
    out = cases.apply(attn, params, cases.filled(case["x"]), engine=engine)
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out[0], layer_in_numpy(params, cases.filled(case["x"]))[0], atol=1e-12)


@each_engine
def test_pub_07_without_x64_the_output_says_float32(engine, no_x64):
    attn, params, case = layer("PUB-10")
    out = cases.apply(attn, params, jnp.asarray(cases.filled(case["x"])), engine=engine)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out[0], expected("PUB-10", "out[0]"), atol=2e-5)


@each_variant
@pytest.mark.parametrize(
    ("dtype", "engine", "tolerance"),
    [("float32", "dense", 1e-5), ("bfloat16", "dense", 0.3), ("bfloat16", "blocked", 0.3)],
)
def test_pub_07_the_precision_reaches_every_variant(name, dtype, engine, tolerance):
    """The type of x and of the parameters decides the type of the output."""
    attn, params = cases.variant(name, SMALL)
    x = jnp.asarray(cases.fill((1, 3, 6), 10))
    want = cases.apply(attn, params, x)
    assert want.dtype == jnp.float64
    low = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    got = cases.apply(attn, low, x.astype(dtype), engine=engine)
    assert got.dtype == dtype
    error = np.max(np.abs(np.asarray(got, np.float64) - want))
    assert 0 < error < tolerance * np.max(np.abs(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pub_07_gradient_check_at_its_default_step(dtype, no_x64):
    """What users run is `jax.test_util.check_grads`; it says nothing of the dtype it used.

    In float32 it passes and flags a gradient scaled by 1.1; in bfloat16 its step of 1e-4 is below
    the spacing of the numbers, so that its differences are zeros or noise, and it fails loudly.
    """
    attn, params, case = layer("PUB-10")
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def out(x):
        return cases.apply(attn, params, x)

    @jax.custom_vjp
    def scaled(x):
        return out(x)

    def backward(x, cotangent):
        (gradient,) = jax.vjp(out, x)[1](cotangent)
        return (1.1 * gradient,)

    scaled.defvjp(lambda x: (out(x), x), backward)
    x = jnp.asarray(cases.filled(case["x"]), dtype)
    if dtype == "float32":
        check_grads(out, (x,), 1, modes=("fwd", "rev"))
    with pytest.raises(AssertionError):
        check_grads(scaled, (x,), 1, modes=("rev",))


# PUB-08


@each_engine
def test_pub_08_one_key_needs_no_query(engine):
    attn, params, case = layer("PUB-08")
    x = cases.filled(case["a"])
    out = cases.apply(attn, params, x, engine=engine)
    np.testing.assert_allclose(out[0, 0], expected("PUB-08", "a out[0,0]"), atol=1e-9)
    other = {**params, **cases.redraw({k: params[k] for k in ("query", "key")}, 5)}
    np.testing.assert_allclose(cases.apply(attn, other, x, engine=engine), out, atol=1e-12)


@each_engine
def test_pub_08_a_batch_of_one_is_not_special(engine):
    attn, params, case = layer("PUB-08")
    x, valid = cases.filled(case["b"]), np.array([[True, True, False]])
    hidden = ja.explicit(valid, axes="b k")
    one = cases.apply(attn, params, x, mask=hidden, engine=engine)
    np.testing.assert_allclose(one[0], expected("PUB-08", "b out[0]"), atol=1e-9)
    twice = ja.explicit(np.tile(valid, (2, 1)), axes="b k")
    two = cases.apply(attn, params, np.tile(x, (2, 1, 1)), mask=twice, engine=engine)
    np.testing.assert_allclose(two, np.tile(one, (2, 1, 1)), atol=1e-14)


@each_engine
def test_pub_08_no_batch_axis(engine):
    attn, params, case = layer("PUB-08")
    hidden = ja.explicit(np.array([True, True, False]), axes="k")
    out = cases.apply(attn, params, cases.filled(case["b"]), mask=hidden, engine=engine)[0]
    np.testing.assert_allclose(out, expected("PUB-08", "b out[0]"), atol=1e-9)


EMPTY = {
    "no keys": ((2, 3, 4), (2, 0, 4)),
    "no queries": ((2, 0, 4), (2, 3, 4)),
    "no rows": ((2, 0, 4), None),
    "no batch": ((0, 3, 4), None),
}


@each_engine
@pytest.mark.parametrize("empty", EMPTY)
def test_pub_08_empty_axes_give_empty_or_biased_rows(empty, engine):
    attn, params, _ = layer("PUB-08")
    q_shape, kv_shape = EMPTY[empty]
    x_q = jnp.asarray(cases.fill(q_shape, 43))
    x_kv = None if kv_shape is None else jnp.asarray(cases.fill(kv_shape, 44))

    def out(params, x_q, x_kv):
        return cases.apply(attn, params, x_q, x_kv, engine=engine)

    got = out(params, x_q, x_kv)
    assert got.shape == q_shape
    np.testing.assert_array_equal(got, np.broadcast_to(params["out"]["bias"], q_shape))
    gradients = jax.grad(lambda *a: out(*a).sum(), (0, 1))(params, x_q, x_kv)
    bias = gradients[0]["out"].pop("bias")
    np.testing.assert_array_equal(bias, q_shape[0] * q_shape[1])
    for leaf in jax.tree.leaves(gradients):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("empty", EMPTY)
def test_pub_08_requested_weights_keep_their_axes_when_empty(empty):
    attn, params, _ = layer("PUB-08")
    q_shape, kv_shape = EMPTY[empty]
    x_q = jnp.zeros(q_shape)
    x_kv = None if kv_shape is None else jnp.zeros(kv_shape)
    _, aux = attn.apply(params, x_q, x_kv, engine="dense", capture=("weights",))
    k_len = (kv_shape or q_shape)[1]
    assert aux.captured["weights"].shape == (q_shape[0], 2, q_shape[1], k_len)


# PUB-09


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ja.HeadSpec(model=10, heads=4), r"10\D+4"),
        (lambda: ja.HeadSpec(model=12, heads=6, kv_heads=4), r"6\D+4"),
        (lambda: ja.HeadSpec(model=12, heads=6, kv_heads=0), r"kv_heads = 0.*at least 1"),
        (lambda: ja.HeadSpec(model=12, heads=0), r"heads = 0.*at least 1"),
        (lambda: ja.HeadSpec(model=12, heads=6, dropout=-0.1), r"dropout = -0\.1.*\[0, 1\)"),
        (lambda: ja.HeadSpec(model=12, heads=6, dropout=float("nan")), r"dropout = nan.*\[0, 1\)"),
        (lambda: ja.HeadSpec(model=12, heads=6, dropout=1.5), r"dropout = 1\.5.*\[0, 1\)"),
        (
            lambda: ja.attention(ja.HeadSpec(model=12, heads=6), variants.moh(shared=2, top_k=5)),
            r"top_k = 5\D.*4",
        ),
        (
            lambda: ja.attention(ja.HeadSpec(model=12, heads=6), variants.moh(shared=2, top_k=-1)),
            r"top_k = -1",
        ),
    ],
)
def test_pub_09_invalid_sizes_name_both_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_pub_09_valid_sizes_build():
    free = ja.attention(ja.HeadSpec(model=10, heads=4, d_qk=3, d_v=3))
    assert free.init(jax.random.key(0))["query"]["kernel"].size == 120
    for kv_heads in (6, 1):
        grouped = ja.attention(ja.HeadSpec(model=12, heads=6, kv_heads=kv_heads))
        assert grouped.init(jax.random.key(0))["key"]["kernel"].shape == (12, kv_heads, 2)


def test_pub_09_training_dropout_without_a_key_asks_for_one():
    """The pure functions train only with a key; it is the module that has a mode to mistake."""
    module = ja.MultiHeadAttention(2, 6, dropout_rate=0.5, deterministic=False, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 3, 6))
    assert module(x).shape == x.shape
    module.rngs = None
    with pytest.raises(ValueError, match=r"training with dropout needs a PRNG key.*rngs"):
        module(x)
    module(x, deterministic=True)


# PUB-10


def layer_in_numpy(params, x, scale=None):
    q, k, v = (
        np.einsum("btm,mhd->bthd", x, params[name]["kernel"]) + params[name]["bias"]
        for name in ("query", "key", "value")
    )
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    logits = scale * np.einsum("bqhd,bkhd->bhqk", q, k)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum("bhqk,bkhv->bqhv", weights, v)
    return np.einsum("bqhv,hvm->bqm", heads, params["out"]["kernel"]) + params["out"]["bias"]


@each_engine
def test_pub_10_value_width_and_scale(engine):
    attn, params, case = layer("PUB-10")
    assert params["out"]["kernel"].shape == (2, 3, 5)  # inner value width 6, output width 5
    out = cases.apply(attn, params, cases.filled(case["x"]), engine=engine)
    np.testing.assert_allclose(out[0], expected("PUB-10", "out[0]"), atol=1e-9)


@each_engine
def test_pub_10_an_explicit_scale_overrides(engine):
    attn, params, case = layer("PUB-10", scale=0.125)
    x = cases.filled(case["x"])
    out = cases.apply(attn, params, x, engine=engine)
    np.testing.assert_allclose(out, layer_in_numpy(params, x, 0.125), atol=1e-12)
    assert np.max(np.abs(out[0] - expected("PUB-10", "out[0]"))) > 0.01
