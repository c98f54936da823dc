"""The two Flax faces are one layer: every argument of one means the same in the other, and errors name it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxattn as ja
import variants
from jaxattn import linen

B, Q, K, M, H, D = 2, 5, 7, 12, 4, 4
ROUTED = variants.moh(shared=1, top_k=2)


def states(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pair(**options):
    """Both faces with the same redrawn parameters: `f(*inputs, **named)` of each."""
    options = dict(num_heads=H, qkv_features=H * D, **options)
    layer = ja.MultiHeadAttention(in_features=M, **options, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(7)
    state = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype), state))
    module = linen.MultiHeadDotProductAttention(**options)
    variables = {"params": {name: leaves for name, leaves in layer.params().items() if leaves}}
    return layer, lambda *inputs, **named: module.apply(variables, *inputs, **named)


HIDDEN = np.arange(Q) < np.array([[3], [Q]])  # the first example's last rows
DIRTY = np.where(HIDDEN[..., None], states(B, Q, M), np.nan)
CALLS = {
    "raw mask, NaN behind it": (
        {}, (states(B, Q, M), DIRTY), dict(mask=np.broadcast_to(HIDDEN[:, None, None], (B, 1, Q, Q))),
    ),
    "rows and columns, float": ({}, (states(B, Q, M),), dict(mask=np.tri(Q, dtype=np.float32))),
    "causal, valid": ({}, (DIRTY,), dict(is_causal=True, valid=HIDDEN)),
    "kv heads, rotary, positions": (
        dict(num_kv_heads=2, rotary=ja.Rotary()), (states(B, Q, M), states(B, K, M, seed=3)),
        dict(positions=(np.arange(Q) + 2, 3 * np.arange(K))),
    ),
    "input_positions": (dict(rotary=ja.Rotary()), (states(B, Q, M),), dict(input_positions=np.arange(Q) * 2)),
    "norm by name, its eps, scale, cap": (
        dict(qk_norm="rms", qk_norm_eps=0.5, scale=0.3, softcap=2.0), (states(B, Q, M),), {},
    ),
    "bias, half": (dict(dtype=jnp.bfloat16), (states(B, Q, M),), dict(bias=states(1, H, Q, Q))),
    "two batch axes": ({}, (states(2, B, Q, M),), dict(mask=np.tri(Q, dtype=bool)[None, None, None])),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_both_faces_compute_the_same(name):
    options, inputs, named = CALLS[name]
    layer, other = pair(**options)
    want, got = layer(*inputs, **named), other(*inputs, **named)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert np.isfinite(np.asarray(want, np.float32)[0, :3]).all()
    if named:  # what was asked for has an effect
        assert not np.array_equal(layer(*inputs), want)


def test_options_have_an_effect_in_both_faces():
    x = states(B, Q, M)
    base = dict(qk_norm="rms")
    layer, _ = pair(**base)
    for name, value in dict(rotary=ja.Rotary(), scale=0.3, softcap=1.0, qk_norm_eps=0.5).items():
        changed, other = pair(**base, **{name: value})
        np.testing.assert_array_equal(changed(x), other(x))
        assert np.abs(changed(x) - layer(x)).max() > 1e-3, name


def test_every_option_and_argument_is_in_both_faces():
    of = lambda function: set(inspect.signature(inspect.unwrap(function)).parameters)
    nnx_options, linen_options = of(ja.MultiHeadAttention.__init__), of(linen.MultiHeadAttention.__init__)
    metadata = {name for name in nnx_options if name.endswith(("_metadata", "_promote_dtype"))}
    sizes = {"in_features", "in_kv_features"}  # Linen reads them off the inputs
    assert nnx_options - linen_options == metadata | sizes | {"rngs", "keep_rngs", "name_axes"}
    assert linen_options - nnx_options == {"force_fp32_for_softmax", "name", "parent"}
    nnx_call, linen_call = of(ja.MultiHeadAttention.__call__), of(linen.MultiHeadAttention.__call__)
    assert nnx_call - linen_call == {"rngs", "decode"}  # of the stream `dropout`, and a field
    assert linen_call - nnx_call == {"dropout_rng", "inputs_kv"}


def test_inputs_kv_is_deprecated_as_in_flax():
    x, source = states(B, Q, M), states(B, K, M, seed=2)
    peer, module = nn.MultiHeadDotProductAttention(H), linen.MultiHeadDotProductAttention(H)
    params = peer.init(jax.random.key(0), x, source)
    got = []
    for one in (peer, module):
        with pytest.warns(DeprecationWarning, match="inputs_kv arg will be deprecated"):
            got.append(one.apply(params, x, inputs_kv=source))
        with pytest.raises(ValueError, match="inputs_kv"):
            one.apply(params, x, source, inputs_kv=source)
    np.testing.assert_allclose(*got, atol=1e-6)


def test_sown_weights_are_those_that_meet_the_values_in_both():
    layer, _ = pair(variant=variants.talking_heads(), use_bias=False, dropout_rate=0.5, deterministic=False)
    x = states(B, Q, M)
    _, sown = nnx.capture(layer, nnx.Intermediate)(x, sow_weights=True, rngs=nnx.Rngs(0))
    (want,) = sown["attention_weights"].get_value()
    module = linen.MultiHeadAttention(H, qkv_features=H * D, variant=variants.talking_heads(), use_bias=False)
    y, found = module.apply({"params": layer.params()}, x, sow_weights=True, mutable=["intermediates"])
    (got,) = found["intermediates"]["attention_weights"]
    np.testing.assert_array_equal(got, want)  # before dropout, which only the first layer has
    value = np.einsum("btm,mhv->bthv", x, layer.value.kernel[...])
    np.testing.assert_allclose(
        y, np.einsum("bhqk,bkhv,hvm->bqm", got, value, layer.out.kernel[...]), atol=1e-4
    )


@pytest.mark.parametrize("engine", ["routed", "dense"])
def test_a_sharding_of_the_heads_leaves_every_engine_to_run(engine):
    """`qkv_sharding` was once a transform of its own, and `routed` refused it."""
    layer, other = pair(variant=ROUTED, engine=engine)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    named = dict(qkv_sharding=NamedSharding(mesh, PartitionSpec("data")))
    x = states(B, Q, M)
    for face in (layer, other):
        np.testing.assert_array_equal(face(x, **named), layer(x))


def decoding(**options):
    """Both faces with an empty cache for B x K rows: `step(x, **named)` of each, and the words of its fix."""
    options = dict(num_heads=H, qkv_features=H * D, decode=True, **options)
    layer = ja.MultiHeadAttention(in_features=M, **options, rngs=nnx.Rngs(0))
    layer.init_cache((B, K, M))
    module = linen.MultiHeadDotProductAttention(**options)
    variables = module.init(jax.random.key(0), states(B, K, M))
    return (
        (layer, r"layer\.init_cache\("),
        (
            lambda x, *more, **named: module.apply(variables, x, *more, mutable=["cache"], **named),
            "an empty cache for states of shape",
        ),
    )


DROP = "drop the causal mask in decode"
STEPS = {
    "is_causal": (dict(is_causal=True), f"is_causal: True.*{DROP}"),
    "causal mask of the chunk": (dict(mask=nnx.make_causal_mask(jnp.ones((B, 2)))), f"mask:.*{DROP}"),
    "causal mask of the whole": (dict(mask=nnx.make_causal_mask(jnp.ones((B, K)))), f"mask:.*{DROP}"),
    "explicit": (dict(mask=ja.explicit(np.tri(2, dtype=bool), axes="q k")), f"{DROP}.* 2, expected 7"),
    "sharding": (dict(qkv_sharding=PartitionSpec()), "qkv_sharding: given in decode"),
}


def test_what_a_block_that_decodes_cannot_take_says_so():
    for step, fix in decoding():
        for named, message in STEPS.values():
            with pytest.raises(ValueError, match=message):
                step(states(B, 2, M), **named)
        with pytest.raises(ValueError, match="inputs_k: given in decode"):
            step(states(B, 2, M), states(B, K, M))
        with pytest.raises(
            ValueError, match=rf"batch axes are \(2,\), those of inputs_q \(3,\).*{fix}.*3, 7, 12"
        ):
            step(states(3, 1, M))
        with pytest.raises(ValueError, match=rf"0 of 7 rows are taken, 8 more do not fit.*{fix}.*2, 8, 12"):
            step(states(B, 8, M))
        with pytest.raises(
            TypeError, match=rf"rows are float32, this call computes in float64.*{fix}.*float64"
        ):
            step(np.float64(states(B, 1, M)))


def test_r2_34_the_cache_has_the_layer_s_type():
    for options, x in (
        (dict(dtype=jnp.bfloat16), states(B, 1, M)), (dict(param_dtype=jnp.float64), states(B, 1, M)),
    ):  # fmt: skip
        layer = ja.MultiHeadAttention(H, M, decode=True, **options, rngs=nnx.Rngs(0))
        layer.init_cache((B, 6, M))
        y = layer(x)
        assert y.dtype == layer.cached_key.dtype == next(iter(options.values()))
        layer.init_cache((B, 6, M), jnp.float16)
        with pytest.raises(TypeError, match=rf"layer.init_cache\(\(2, 6, 12\), dtype={y.dtype}\)"):
            layer(x)


def test_a_layer_with_a_type_of_its_own_runs_under_strict_promotion():
    """States and parameters of other types are cast, by the layer and nowhere implicitly; decode too."""
    x = jnp.asarray(states(B, K, M), jnp.float16)
    with jax.numpy_dtype_promotion("strict"):
        for step, _ in decoding(dtype=jnp.bfloat16, dropout_rate=0.1, deterministic=True):
            assert jax.tree.leaves(step(x[:, :1]))[0].dtype == jnp.bfloat16
        module = linen.MultiHeadDotProductAttention(H, decode=True, dtype=jnp.bfloat16)
        assert module.init(jax.random.key(0), x)["cache"]["cached_key"].dtype == jnp.bfloat16
        layer, other = pair(dtype=jnp.bfloat16)
        assert layer(x, is_causal=True).dtype == other(x, is_causal=True).dtype == jnp.bfloat16
