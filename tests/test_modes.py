"""JAX's strict and tracing modes: a table of variants x engines x modes, forward, gradient and decode.

A mode is a setting of JAX under which a program either still gives its value or raises. Most of them show in
tracing alone, so those cells compile nothing. Symbolic sizes are in test_modes_symbolic.py, numbers at the
edge of a type in test_modes_numbers.py.
"""

import contextlib
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from flax import nnx
from jax.sharding import AxisType
from modes import (
    CELLS,
    MASKS,
    MODEL,
    OPTIONS,
    P,
    T,
    assert_near,
    cell,
    cells,
    drawn,
    each_variant,
    expected,
    made,
    steps,
    whole,
)

import jaxattn as ja
import variants
from jaxattn.linear import linear_map


def test_every_variant_and_engine_has_its_row():
    assert set(OPTIONS) == set(variants.VARIANTS)
    engines = {engine for _, engine in CELLS} | set(table.KERNELS)
    assert engines == {*ja.ENGINES, "auto"}


# Types and ranks


@contextlib.contextmanager
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@cells
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_nothing_is_promoted_implicitly(name, engine, dtype):
    for function, args in cell(name, engine, dtype):
        with strict():
            jax.eval_shape(function, *args)


def test_r2_01_a_router_takes_no_bool_as_a_number():
    attn, params, _ = made("moh")
    sums = lambda x: attn.apply(params, x)[1].sums
    want = table.jit(sums)(drawn()[0])
    with strict():
        got = table.jit(sums)(drawn()[0])
    jax.tree.map(np.testing.assert_array_equal, got, want)


OF_RANKS = {
    "bias": {"use_bias": True},
    "rotary": {"rotary": ja.Rotary()},
    "part of the width": {"rotary": ja.Rotary(width=2)},
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer"},
    "soft cap": {"softcap": 2.0},
    "fewer key heads": {"kv_heads": 2, "use_bias": True},
    "dropout": {"dropout": 0.5, "head_dropout": 0.5, "dropout_shared": ("q",)},
}


@pytest.mark.parametrize("options", OF_RANKS.values(), ids=OF_RANKS)
def test_r2_02_options_promote_no_rank(options):
    attn = ja.attention(ja.HeadSpec(model=16, heads=4, **options))
    x, key = jnp.ones((2, 6, 16), jnp.float32), jax.random.key(1)
    with strict():
        params = jax.eval_shape(attn.init, jax.random.key(0))
        for engine in ("reference", "dense", "blocked"):
            call = functools.partial(attn.apply, engine=engine, dropout_key=key)
            jax.eval_shape(lambda params, x, call=call: call(params, x)[0], params, x)


@each_variant
def test_r2_02_initial_values_promote_no_rank(name):
    with strict():
        jax.eval_shape(made(name)[0].init, jax.random.key(0))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_r2_02_masks_promote_neither_rank_nor_type(mask):
    x, n = jnp.ones((2, 6, 16), jnp.float32), jnp.array([6, 4], jnp.int32)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 6)), jnp.int32)
    attn = ja.attention(ja.HeadSpec(model=16, heads=4))
    params = jax.eval_shape(attn.init, jax.random.key(0))
    want = mask(n, ids).table(6, 6)
    with strict():
        np.testing.assert_array_equal(mask(n, ids).table(6, 6), want)
        for engine in ("reference", "dense", "blocked"):
            call = functools.partial(attn.apply, mask=mask(n, ids), engine=engine)
            jax.eval_shape(lambda params, x, call=call: call(params, x)[0], params, x)


KINDS = ("int8", "uint8", "int32", "uint32", "int64", "float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", (None, "int32", "int64"))
def test_r2_02_positions_of_any_two_types_are_compared(kind, other):
    q = jnp.arange(4, dtype=kind)
    k = None if other is None else jnp.arange(4, dtype=other)[None]  # of another rank too
    mask = ja.causal() & ja.window(2)
    with strict():
        np.testing.assert_array_equal(mask.table(4, 4, q, k)[..., 0, :, :].reshape(4, 4), mask.table(4, 4)[0])


def distances(slope, q, k):
    """slope[h] * (q - k), of positions [q] and [k]."""
    distance = (q[:, None] - k[None, :]).astype(slope.dtype)
    return slope[:, None, None] * distance[None]


@pytest.mark.parametrize("engine", ("reference", "dense", "blocked"))
def test_r2_02_a_pair_bias_and_a_bias_of_fewer_axes_promote_nothing(engine):
    side = jnp.ones((2, 5, 4, 3), jnp.float32)
    coupling = ja.Coupling(scale=0.5, pair_bias=ja.PairBias(jnp.ones(4, jnp.float32), distances))
    with strict():
        jax.eval_shape(
            lambda bias: ja.attend(
                ja.QuerySide(side), ja.KeySide(side, side), coupling, bias=bias, engine=engine
            )[0],
            jnp.ones((4, 1, 5), jnp.float32),
        )


# NaN and infinity, with compiled functions and one operation at a time


@contextlib.contextmanager
def finite():
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


@cells
@pytest.mark.heavy
def test_no_infinity_or_nan_on_the_way(name, engine):
    """Without jit every intermediate is looked at, and loops are Python's."""
    for (function, args), want in zip(cell(name, engine), expected(name), strict=True):
        with finite(), jax.disable_jit():
            got = function(*args)
        assert_near(got, want)


@pytest.mark.heavy
@each_variant
def test_compiled_functions_under_debug_nans_and_infs(name):
    for (function, args), want in zip(cell(name, "blocked"), expected(name), strict=True):
        with finite():
            got = table.jit(function)(*args)
        assert_near(got, want)


# Leaks


@pytest.fixture
def leaks(monkeypatch):
    """JAX looks for who holds a leaked tracer; that may take hours, and the tests need not know."""

    def found(name, trace, tracers):
        return AssertionError(f"leaked from {trace}: {tracers}")

    monkeypatch.setattr("jax._src.core.leaked_tracer_error", found, raising=False)
    gc.collect()
    gc.freeze()  # every trace collects garbage: what stands before need not be searched
    yield
    gc.unfreeze()


@cells
@pytest.mark.heavy
def test_no_tracer_outlives_its_call(name, engine, leaks):
    for function, args in cell(name, engine):
        with jax.checking_leaks():
            jax.eval_shape(function, *args)


# shard_map with its default check; values on several devices: test_sharding.py


@cells
def test_r2_17_gradients_and_steps_under_shard_map(name, engine):
    attn, params, cache = made(name)
    x, n = drawn()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    split = functools.partial(jax.shard_map, mesh=mesh)
    both, decode = whole(attn, engine), steps(attn, engine)
    ins = (P(), P("data"), P("data"))

    # The gradient of a sharded call, and a gradient taken inside of one.
    forward = lambda params, x, n: attn.apply(params, x, mask=ja.causal() & ja.lengths(n), engine=engine)[0]
    outer = split(forward, in_specs=ins, out_specs=P("data"))
    jax.eval_shape(jax.grad(lambda *args: outer(*args).sum(), (0, 1)), params, x, n)
    inner = split(lambda *args: both(*args)[1], in_specs=ins, out_specs=(P(), P("data")))
    jax.eval_shape(inner, params, x, n)
    jax.eval_shape(jax.grad(lambda x: inner(params, x, n)[1].sum()), x)  # a derivative of it
    of_cache = jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), cache)
    jax.eval_shape(split(decode, in_specs=(P(), of_cache, P("data")), out_specs=P("data")), params, cache, x)


@cells
def test_r2_17_a_source_that_is_the_same_on_all_devices(name, engine):
    """Query rows are split: queries vary between devices, keys and values do not."""
    attn, params, _ = made(name)
    x, _ = drawn()
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    rows = P(None, "rows")

    def call(params, x_q, x_kv, positions):
        return attn.apply(params, x_q, x_kv, ja.causal(), engine=engine, positions=(positions, None))[0]

    split = jax.shard_map(call, mesh=mesh, in_specs=(P(), rows, P(), P("rows")), out_specs=rows)
    loss = lambda *args: split(*args, jnp.arange(T)).sum()
    jax.eval_shape(jax.grad(loss, (0, 1, 2)), params, x, x)


def test_r2_17_a_linear_map_of_an_operand_that_is_the_same_on_all_devices():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    scale = lambda factor, x: factor * x
    split = jax.shard_map(
        lambda factor, x: linear_map(scale, scale, factor, x),
        mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"),
    )  # fmt: skip
    factor, x = jnp.arange(3.0), jnp.ones(3)
    loss = lambda x: split(factor, x).sum()
    np.testing.assert_array_equal(jax.grad(loss)(x), factor)
    np.testing.assert_array_equal(jax.jvp(loss, (x,), (x,))[1], factor.sum())


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "engine"), [("talking_heads", "blocked"), ("moh", "routed")])
def test_r2_17_gradient_under_shard_map_is_that_without(name, engine):
    attn, params, _ = made(name)
    x, n = drawn()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    mask = lambda n: ja.causal() & ja.lengths(n)
    call = lambda params, x, n: attn.apply(params, x, mask=mask(n), engine=engine)[0]
    split = jax.shard_map(call, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data"))
    got, want = (
        table.jit(jax.grad(lambda params, x, f=f: (f(params, x, n) ** 2).sum(), (0, 1)))(params, x)
        for f in (split, call)
    )
    assert_near(got, want)


# Flax's own views of a layer


@each_variant
def test_flax_shows_splits_and_merges_a_layer(name, capsys):
    layer = ja.MultiHeadAttention(
        num_heads=4, in_features=MODEL, variant=variants.VARIANTS[name](**OPTIONS[name]), rngs=nnx.Rngs(0)
    )
    x, _ = drawn()
    assert "Total Parameters" in nnx.tabulate(layer, x)
    nnx.display(layer)
    assert capsys.readouterr().out
    graph, state = nnx.split(layer)
    want = layer(x)
    np.testing.assert_array_equal(nnx.merge(graph, state)(x), want)
    np.testing.assert_array_equal(
        table.jit(lambda state: nnx.merge(graph, state)(x))(state).shape, want.shape
    )
