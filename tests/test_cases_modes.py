"""Public cases of how a layer is run: dropout by mode, layout, null directions, transforms."""

import dataclasses
import functools

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


# PUB-15


@each_engine
@each_variant
def test_pub_15_dropout_only_with_a_key(name, engine):
    x = jnp.asarray(cases.fill((1, 3, 6), 10))
    spec = dataclasses.replace(SMALL, dropout=0.5)
    attn, params = cases.variant(name, spec)
    plain = ja.attention(SMALL, variants.VARIANTS[name](**cases.ARGUMENTS[name]))
    first, again = (cases.apply(attn, params, x, engine=engine) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, cases.apply(plain, params, x, engine=engine))
    rng = jax.random.key(0)
    trained = cases.apply(attn, params, x, engine=engine, dropout_key=rng)
    assert np.max(np.abs(trained - first)) > 1e-3
    rate_zero = cases.apply(plain, params, x, engine=engine, dropout_key=rng)
    np.testing.assert_array_equal(rate_zero, first)


@each_variant
def test_pub_15_the_module_threads_its_mode(name):
    """A key in evaluation changes nothing; rate 0 in training needs none."""

    def module(rate, rngs):
        return ja.MultiHeadAttention(
            2, 6, qkv_features=10, variant=variants.VARIANTS[name](**cases.ARGUMENTS[name]),
            use_bias=False, dropout_rate=rate, param_dtype=jnp.float64, rngs=rngs,
        )  # fmt: skip

    x = jnp.asarray(cases.fill((1, 3, 6), 10))
    layer = module(0.5, nnx.Rngs(0))
    evaluated = layer(x, deterministic=True)
    np.testing.assert_array_equal(layer(x, deterministic=True), evaluated)
    with_key = layer(x, deterministic=True, rngs=nnx.Rngs(dropout=1))
    np.testing.assert_array_equal(with_key, evaluated)
    trained = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=1))
    assert np.max(np.abs(trained - evaluated)) > 1e-6
    np.testing.assert_array_equal(module(0.0, nnx.Rngs(0))(x, deterministic=False), evaluated)


# PUB-19


@each_engine
def test_pub_19_identity_weights_and_mask_return_the_input(engine):
    x = np.arange(12.0).reshape(1, 3, 4)
    kernel = jnp.asarray(np.eye(4).reshape(4, 2, 2))
    spec = ja.HeadSpec(model=4, heads=2)
    params = {name: {"kernel": kernel} for name in ("query", "key", "value")}
    params |= {"out": {"kernel": jnp.asarray(np.eye(4).reshape(2, 2, 4))}, "heads": {}}
    itself = ja.explicit(np.eye(3, dtype=bool), axes="q k")
    out = cases.apply(ja.attention(spec), params, x, mask=itself, engine=engine)
    np.testing.assert_allclose(out[0], expected("PUB-19", "b out"), atol=1e-6)


def test_pub_19_kernels_are_stored_in_out():
    """Orientation is a stated property: kernel [m, h, d] is (in, out), also where it is square.

    Converters that take the other orientation by name are another part of the project.
    """
    case = CASES["PUB-19"]["input"]["a"]
    kernel = jnp.asarray(case["W"], float)[:, None, :]
    got = ja.project.project({"kernel": kernel}, jnp.asarray([case["x"]], float))
    np.testing.assert_allclose(got[0, 0], expected("PUB-19", "a (in,out)"), atol=1e-6)
    assert np.max(np.abs(got[0, 0] - expected("PUB-19", "a (out,in)"))) > 1


# PUB-20


def key_bias_shift(params, by):
    key = {**params["key"], "bias": params["key"]["bias"] + by}
    return {**params, "key": key}


KINDS = [(kind, causal, "dense") for kind in ("case", "grouped", "talking") for causal in (0, 1)]
KINDS += [("case", 0, "blocked"), ("case", 0, "reference")]


@pytest.mark.parametrize(("kind", "causal", "engine"), KINDS)
def test_pub_20_key_bias_is_a_null_direction(kind, causal, engine):
    """Importers of formats without a key bias are another part of the project."""
    spec, params = cases.layer(CASES["PUB-20"]["input"])
    links = ()
    if kind == "grouped":
        spec = dataclasses.replace(spec, kv_heads=1)
    elif kind == "talking":
        links = (variants.talking_heads(),)
    attn = ja.attention(spec, *links)
    if kind != "case":
        params = cases.redraw(attn.init(jax.random.key(0)), 3)
    x = jnp.asarray(cases.filled(CASES["PUB-20"]["input"]["x"]))
    mask = ja.explicit(np.array([[True, True, True, False]]), axes="b k")
    mask = mask & ja.causal() if causal else mask

    @jax.jit
    def out(params):
        return attn.apply(params, x, mask=mask, engine=engine)[0]

    gradient = jax.grad(lambda p: jnp.sum(out(p) ** 2))(params)
    norms = jax.tree.map(lambda leaf: float(jnp.linalg.norm(leaf.ravel())), gradient)
    assert norms["key"].pop("bias") <= 1e-11
    if kind == "case" and not causal:
        assert all(2 <= norm <= 52 for norm in jax.tree.leaves(norms)), norms
    else:
        assert all(norm > 1e-3 for norm in jax.tree.leaves(norms)), norms
    np.testing.assert_allclose(out(key_bias_shift(params, 5.0)), out(params), atol=1e-12)
    bias = params["key"]["bias"]
    check_grads(lambda b: out(key_bias_shift(params, b - bias)), (bias,), 1, atol=1e-6)


# PUB-30


def causal_layer(dropout=0.25):
    spec, params = cases.layer(CASES["PUB-30"]["input"]["layer of PUB-12"])
    x = jnp.asarray(cases.filled(CASES["PUB-30"]["input"]["layer of PUB-12"]["x"]))
    return ja.attention(dataclasses.replace(spec, dropout=dropout)), params, x


def value_and_gradient(attn, engine, rng=None, wrap=lambda f: f):
    def loss(params, x):
        out = attn.apply(params, x, mask=ja.causal(), engine=engine, dropout_key=rng)[0]
        return jnp.sum(out**2), out

    return wrap(jax.grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("engine", "training"),
    [("dense", False), ("dense", True), ("blocked", True), ("reference", False)],
)
def test_pub_30_jit_changes_nothing(engine, training):
    attn, params, x = causal_layer()
    rng = jax.random.key(0) if training else None
    want = value_and_gradient(attn, engine, rng)(params, x)
    got = value_and_gradient(attn, engine, rng, jax.jit)(params, x)
    cases.tree_close(got, want, 1e-10)


@pytest.mark.parametrize("engine", ["dense", "blocked"])
def test_pub_30_vmap_over_the_batch_equals_the_batched_call(engine):
    attn, params, x = causal_layer()

    def out(x):
        return attn.apply(params, x, mask=ja.causal(), engine=engine)[0]

    np.testing.assert_allclose(jax.vmap(out)(x), out(x), atol=1e-10)
    got = jax.vmap(jax.grad(lambda x: jnp.sum(out(x) ** 2)))(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sum(out(x) ** 2))(x), atol=1e-10)


@pytest.mark.parametrize("engine", ["dense", "blocked"])
def test_pub_30_scan_over_layers_equals_a_loop(engine):
    attn, params, x = causal_layer()
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, cases.redraw(params, 7))

    def step(x, layer):
        return x + attn.apply(layer, x, mask=ja.causal(), engine=engine)[0], None

    def loop(x):
        for i in range(2):
            x, _ = step(x, jax.tree.map(lambda leaf, i=i: leaf[i], layers))
        return x

    def scan(x):
        return jax.lax.scan(step, x, layers)[0]

    np.testing.assert_allclose(scan(x), loop(x), rtol=0, atol=1e-10 * np.max(np.abs(loop(x))))
    got, want = (jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(x) for f in (scan, loop))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * np.max(np.abs(want)))


@pytest.mark.parametrize("engine", ["dense", "blocked"])
def test_pub_30_recomputed_training_gradient_has_the_same_dropout(engine):
    attn, params, x = causal_layer()

    def loss(params, rng):
        return jnp.sum(attn.apply(params, x, mask=ja.causal(), engine=engine, dropout_key=rng)[0] ** 2)

    rng = jax.random.key(0)
    want = jax.grad(loss)(params, rng)
    cases.tree_close(jax.grad(jax.checkpoint(loss))(params, rng), want, 1e-10)
    other = jax.grad(loss)(params, jax.random.key(1))
    assert np.max(np.abs(other["query"]["kernel"] - want["query"]["kernel"])) > 1e-3


def test_pub_30_one_compilation_per_mode():
    attn, params, x = causal_layer()
    traces = []

    @functools.partial(jax.jit, static_argnames="training")
    def out(params, x, rng, training):
        traces.append(training)
        return attn.apply(params, x, mask=ja.causal(), dropout_key=rng if training else None)[0]

    for seed in range(3):
        for training in (False, True):
            out(params, x, jax.random.key(seed), training=training)
    assert traces == [False, True]


@each_engine
def test_pub_30_typed_and_raw_keys_draw_the_same(engine):
    attn, params, x = causal_layer()
    typed, raw = (
        attn.apply(params, x, engine=engine, dropout_key=rng)[0]
        for rng in (jax.random.key(0), jax.random.PRNGKey(0))
    )
    np.testing.assert_array_equal(typed, raw)


def test_pub_30_one_seed_is_one_run():
    attn, _, x = causal_layer()

    def three_steps():
        params = attn.init(jax.random.key(0))
        for step in range(3):
            rng = jax.random.fold_in(jax.random.key(0), step)
            gradient = value_and_gradient(attn, "auto", rng)(params, x)[0][0]
            params = jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)
        return params

    jax.tree.map(np.testing.assert_array_equal, three_steps(), three_steps())


def test_pub_30_long_rows_take_linear_memory():
    """B=1, H=4, L=4096, float32: dense scores alone are 268,435,456 bytes. Two devices: test_sharding.py."""
    attn = ja.attention(ja.HeadSpec(model=12, heads=4, d_qk=3, d_v=2))
    params = attn.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, 4096, 12), jnp.float32)

    def run(engine):
        call = jax.jit(lambda p, x: attn.apply(p, x, mask=ja.causal(), engine=engine)[0])
        compiled = call.lower(params, x).compile()
        return compiled(params, x), compiled.memory_analysis().temp_size_in_bytes

    (blocked, small), (dense, large) = run("blocked"), run("dense")
    assert large >= 268_435_456
    assert small < large / 4
    np.testing.assert_allclose(blocked, dense, atol=2e-5)


def test_pub_30_gradients_through_two_mixes_take_linear_memory():
    """Four score tensors of both stages dense; the blocks of a few rows at a time otherwise."""
    attn = ja.attention(ja.HeadSpec(model=12, heads=4, d_qk=3, d_v=2), variants.talking_heads())
    params = jax.eval_shape(lambda: attn.init(jax.random.key(0)))

    def temporary(engine):
        def loss(p, x):
            return jnp.sum(attn.apply(p, x, mask=ja.causal(), engine=engine)[0] ** 2)

        x = jax.ShapeDtypeStruct((1, 4096, 12), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower(params, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary("blocked") < temporary("dense") / 16
