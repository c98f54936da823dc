"""A variant's balance loss reaches the training loss: collected over a whole model, in NNX and in Linen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxattn as ja
import variants
from jaxattn import linen

B, T, M, H = 2, 5, 8, 4
X = np.random.default_rng(0).normal(size=(B, T, M)).astype(np.float32)
MOH = variants.moh(shared=1, top_k=2)


def attention(rngs, variant=MOH):
    layer = ja.MultiHeadAttention(H, M, variant=variant, rngs=rngs)
    for router in layer.heads.values():  # away from its even start
        router["routed"].set_value(30 * router["routed"][...])
    return layer


def total(sown):
    return sum(jnp.sum(loss) for loss in jax.tree.leaves(sown))


def aux_loss(layer, x):
    return layer(x, return_aux=True)[1].total()


class Pair(nnx.Module):
    """Two layers one after another, the first of them twice."""

    def __init__(self, rngs):
        self.layers = nnx.List([attention(rngs), attention(rngs)])

    def __call__(self, x):
        return self.layers[1](self.layers[0](self.layers[0](x)))


def test_a_model_collects_what_its_layers_sow():
    model = Pair(nnx.Rngs(0))
    y, sown = nnx.capture(model, ja.AuxLoss)(X)
    twice = sown["layers"][0]["balance"].get_value()
    once = sown["layers"][1]["balance"].get_value()
    assert len(twice) == 2 and len(once) == 1
    first, second = model.layers
    want = aux_loss(first, X), aux_loss(first, first(X)), aux_loss(second, first(first(X)))
    np.testing.assert_allclose([*twice, *once], want, rtol=1e-6)
    assert min(want) > 0
    np.testing.assert_array_equal(y, model(X))
    _, everything = nnx.capture(model, nnx.Intermediate)(X)  # Flax's own kind takes all that is sown
    np.testing.assert_array_equal(total(everything), total(sown))
    _, weights, alone = nnx.capture(first, nnx.Intermediate, ja.AuxLoss)(X, sow_weights=True)
    assert list(weights) == ["attention_weights"] and list(alone) == ["balance"]


def test_losses_of_one_variant_twice_in_a_chain_stay_apart():
    layer = attention(nnx.Rngs(0), ja.chain(MOH, variants.moh(shared=1, top_k=1)))
    _, aux = layer(X, return_aux=True)
    assert len(aux.losses) == 2
    _, sown = nnx.capture(layer, ja.AuxLoss)(X)
    assert set(sown) == set(aux.losses)
    for name, loss in aux.losses.items():
        np.testing.assert_array_equal(sown[name].get_value()[0], loss.weight * loss.value)
    module = linen.MultiHeadAttention(H, variant=ja.chain(*layer.attn.links))
    _, found = module.apply({"params": layer.params()}, X, mutable=["losses"])
    jax.tree.map(np.testing.assert_array_equal, found["losses"], {n: sown[n].get_value() for n in sown})


def test_what_the_caller_takes_is_not_sown_again():
    layer = attention(nnx.Rngs(0))
    (_, aux), sown = nnx.capture(layer, ja.AuxLoss)(X, return_aux=True)
    assert aux.total() > 0 and not jax.tree.leaves(sown)
    module = linen.MultiHeadAttention(H, variant=MOH)
    (_, aux), found = module.apply({"params": layer.params()}, X, return_aux=True, mutable=["losses"])
    assert aux.total() > 0 and not found


def test_a_training_loop_traces_once_and_its_state_never_changes_its_form():
    import optax

    model = Pair(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    form = lambda: (nnx.graphdef(model), jax.tree.structure(nnx.state(model)))
    before, traces = form(), []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(1)

        def loss(model):
            y, sown = nnx.capture(model, ja.AuxLoss)(x)
            return 0 * (y**2).mean() + total(sown), total(sown)

        (_, balance), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, grads)
        return balance, grads

    model(X)  # a call that nobody captures leaves nothing behind
    assert form() == before
    fresh = nnx.clone(model)
    first, grads = step(model, optimizer, X)
    assert form() == before and len(traces) == 1
    np.testing.assert_allclose(first, total(nnx.capture(fresh, ja.AuxLoss)(X)[1]), rtol=1e-5)
    assert jnp.abs(grads["layers"][0]["heads"]["moh"]["routed"][...]).max() > 0
    second, _ = step(model, optimizer, X)
    np.testing.assert_allclose(second, total(nnx.capture(model, ja.AuxLoss)(X)[1]), rtol=0.2)
    assert len(traces) == 1 and second < 1.5 * first  # nothing is carried from one step to the next
    assert form() == before


class Stack(nnx.Module):
    """Three layers as one: in a scan or a vmap, recomputed in the backward pass or not."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: attention(rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x, how):
        call = lambda layer, x: layer(x)
        if how == "vmap":
            return nnx.vmap(call, in_axes=(0, None))(self.layers, x)
        call = nnx.remat(call) if how == "remat" else nnx.jit(call) if how == "jit" else call
        scan = nnx.scan(lambda x, layer: call(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.layers)


@pytest.mark.parametrize("how", ["scan", "remat", "jit", "vmap"])
def test_losses_come_through_transforms_of_nnx(how):
    model = Stack(nnx.Rngs(0))
    graph, state = nnx.split(model.layers)
    layers = [nnx.merge(graph, jax.tree.map(lambda leaf: leaf[i], state)) for i in range(3)]  # noqa: B023
    x, want = X, []
    for layer in layers:
        want.append(aux_loss(layer, x))
        x = x if how == "vmap" else layer(x)
    _, sown = nnx.capture(model, ja.AuxLoss)(X, how)
    (got,) = sown["layers"]["balance"].get_value()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    if how == "remat":
        grads = nnx.grad(lambda model: total(nnx.capture(model, ja.AuxLoss)(X, how)[1]))(model)
        assert (jnp.abs(grads["layers"]["heads"]["moh"]["routed"][...]).max((1, 2)) > 0).all()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return linen.MultiHeadAttention(H, variant=MOH, name="attention")(x), None


@pytest.mark.parametrize("how", ["scan", "remat"])
def test_losses_come_through_transforms_of_linen(how):
    block = nn.remat(Block) if how == "remat" else Block
    stack = nn.scan(block, variable_axes={"params": 0, "losses": 0}, split_rngs={"params": True}, length=3)()
    variables = stack.init(jax.random.key(0), X)
    assert set(variables) == {"params"}  # nothing of the first call is kept
    (y, _), found = stack.apply(variables, X, mutable=["losses"])
    x, want = X, []
    for at in range(3):
        one = {"params": jax.tree.map(lambda leaf: leaf[at], variables["params"]["attention"])}  # noqa: B023
        x, aux = linen.MultiHeadAttention(H, variant=MOH).apply(one, x, return_aux=True)
        want.append(aux.total())
    (got,) = found["losses"]["attention"]["balance"]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(y, x, atol=1e-5)
    np.testing.assert_array_equal(stack.apply(variables, X)[0], y)  # nobody collects: the same output
