"""The NNX module: the pure function inside, Flax's names outside."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxattn as ja
import variants

M, H, T = 12, 3, 5


def states(*shape, seed=1):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_is_the_pure_function_of_its_parameters(name):
    layer = ja.MultiHeadAttention(H, M, variant=variants.VARIANTS[name](), rngs=nnx.Rngs(0))
    x = states(2, T, M)
    y, aux = layer(x, mask=ja.causal(), return_aux=True)
    want, want_aux = layer.attn.apply(layer.params(), x, mask=ja.causal())
    assert jnp.array_equal(y, want)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, aux.losses, want_aux.losses))


def test_equals_flax_on_equal_parameters():
    flax_layer = nnx.MultiHeadAttention(H, M, decode=False, rngs=nnx.Rngs(0))
    layer = ja.MultiHeadAttention(H, M, rngs=nnx.Rngs(1))
    nnx.update(layer, nnx.state(flax_layer, nnx.Param))
    x, mask = states(2, T, M), nnx.make_causal_mask(jnp.ones((2, T)), dtype=jnp.bool_)
    want = flax_layer(x, mask=mask)
    assert jnp.allclose(layer(x, mask=mask), want, atol=1e-6)
    assert jnp.allclose(layer(x, mask=ja.causal()), want, atol=1e-6)


def test_cross_attention_with_widths_of_its_own():
    layer = ja.MultiHeadAttention(H, M, in_kv_features=7, out_features=5, d_v=11, rngs=nnx.Rngs(0))
    assert layer(states(2, T, M), states(2, 8, 7)).shape == (2, T, 5)
    assert layer.value.kernel.shape == (7, H, 11)


def test_inputs_v_without_inputs_k_is_refused():
    layer = ja.MultiHeadAttention(H, M, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="inputs_v.*inputs_k"):
        layer(states(T, M), inputs_v=states(T, M))


def test_gradients_reach_every_parameter():
    layer = ja.MultiHeadAttention(H, M, variant=variants.dcmha(), use_bias=False, rngs=nnx.Rngs(0))
    x = states(2, T, M)
    grads = nnx.grad(lambda layer: (layer(x, mask=ja.causal()) ** 2).sum())(layer)
    leaves = jax.tree.leaves(grads)
    assert len(leaves) == 4 + 16
    assert all(jnp.abs(leaf).max() > 0 for leaf in leaves)


def test_trains_under_nnx_jit_and_optimizer():
    import optax

    layer = ja.MultiHeadAttention(H, M, variant=variants.talking_heads(), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    x = states(4, T, M)
    goal = jnp.roll(x, 1, axis=-2)

    @nnx.jit
    def step(layer, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - goal) ** 2).mean())(layer)
        optimizer.update(layer, grads)
        return loss

    losses = [float(step(layer, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_dropout_needs_a_mode_and_in_training_a_key():
    layer = ja.MultiHeadAttention(H, M, dropout_rate=0.5, rngs=nnx.Rngs(0))
    x = states(2, T, M)
    with pytest.raises(ValueError, match="deterministic.*dropout_rate = 0.5"):
        layer(x)
    assert jnp.array_equal(layer(x, deterministic=True), layer(x, deterministic=True))
    first, second = layer(x, deterministic=False), layer(x, deterministic=False)
    assert not jnp.array_equal(first, second)  # the stream moves on
    layer.rngs = None
    with pytest.raises(ValueError, match="rngs.*PRNG key"):
        layer(x, deterministic=False)
    drawn = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=3))
    assert jnp.array_equal(drawn, layer(x, deterministic=False, rngs=nnx.Rngs(dropout=3)))


def test_broadcast_dropout_shares_one_draw():
    shared = ja.MultiHeadAttention(H, M, dropout_rate=0.5, rngs=nnx.Rngs(0))
    x = jnp.broadcast_to(states(1, T, M), (4, T, M))
    y = shared(x, deterministic=False)
    assert jnp.allclose(y[0], y[1], atol=1e-6)
    own = ja.MultiHeadAttention(H, M, dropout_rate=0.5, broadcast_dropout=False, rngs=nnx.Rngs(0))
    y = own(x, deterministic=False)
    assert not jnp.allclose(y[0], y[1], atol=1e-3)


def test_dtype_computes_in_half_and_keeps_parameters():
    layer = ja.MultiHeadAttention(H, M, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer(states(T, M)).dtype == jnp.bfloat16
    assert layer.query.kernel.dtype == jnp.float32


def test_what_is_no_mask_is_refused_by_name():
    layer = ja.MultiHeadAttention(H, M, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="mask"):
        layer(states(T, M), mask="causal")
    with pytest.raises(ValueError, match=r"axis 'k' has size 4, expected 5"):
        layer(states(T, M), mask=jnp.ones((T, 4), bool))


def test_widths_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="qkv_features = 10 .* num_heads = 3"):
        ja.MultiHeadAttention(3, 10, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Fix: qkv_features=33 \(width 11\), or num_heads=4"):
        ja.MultiHeadAttention(num_heads=3, in_features=32, rngs=nnx.Rngs(0))
    assert ja.MultiHeadAttention(3, 32, 33, rngs=nnx.Rngs(0)).head_dim == 11


def test_weights_are_reachable():
    layer = ja.MultiHeadAttention(H, M, rngs=nnx.Rngs(0))
    _, aux = layer(states(2, T, M), mask=ja.causal(), capture=("weights",), return_aux=True)
    weights = aux.captured["weights"]
    assert weights.shape == (2, H, T, T)
    assert jnp.allclose(weights.sum(-1), 1, atol=1e-6)
