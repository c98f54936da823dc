"""An encoder-decoder owns its rows: target-indexed outputs, a padded source, K and V paths that add up."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxattn as ja
import variants
from experiments.lib.encoder_decoder import EncoderDecoder, Shape, attach, beam, greedy

pytestmark = pytest.mark.heavy

BATCH, SOURCE, SYMBOLS = 2, 5, 7
TARGETS = (3, SOURCE)  # rectangular, and square, where nothing but names tells rows from keys
TRANSFORMS = {
    "mha": variants.mha,
    "talking_heads": variants.talking_heads,
    "mohsa": lambda: variants.mohsa(overlap=1),
}


@functools.cache
def model(name: str = "mha") -> EncoderDecoder:
    """A model whose every leaf is redrawn, so that nothing starts near the identity."""
    made = EncoderDecoder(Shape(SYMBOLS), TRANSFORMS[name](), rngs=nnx.Rngs(0))
    graph, params = nnx.split(made)
    rng = np.random.default_rng(1)
    redrawn = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 3, jnp.float32), params)
    return nnx.merge(graph, redrawn)


@functools.cache
def inputs(target: int):
    rng = np.random.default_rng(2)
    source = jnp.asarray(rng.integers(0, SYMBOLS, (BATCH, SOURCE)))
    valid = jnp.array([[True] * SOURCE, [True] * (SOURCE - 2) + [False] * 2])
    return source, valid, jnp.asarray(rng.integers(0, SYMBOLS, (BATCH, target)))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("length", TARGETS)
def test_rows_belong_to_the_target_and_keys_to_the_source(name, length):
    made = model(name)
    source, valid, target = inputs(length)

    @jax.jit
    def reach(of_target, of_source):
        """Which embedded rows reach which row of the output: gradients of one output row after another."""
        logits = lambda x, z: made.decode(x, made.sides(made.encode(z, valid), valid))
        out, pull = jax.vjp(logits, of_target, of_source)
        one_row = jnp.eye(length, dtype=out.dtype)[:, None, :, None] * jnp.cos(out)
        return out, jax.vmap(pull)(one_row)

    out, (to_target, to_source) = reach(made.embed(target), made.embed(source))
    assert out.shape == (BATCH, length, SYMBOLS)
    seen = np.abs(to_target).sum(axis=(1, 3)) > 0
    np.testing.assert_array_equal(seen, np.tril(np.ones((length, length), bool)))
    of_source = np.abs(to_source).sum(axis=3) > 0
    np.testing.assert_array_equal(of_source, np.broadcast_to(valid, of_source.shape))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_memory_is_owed_the_sum_of_its_key_and_value_paths(name):
    made = model(name)
    source, valid, target = inputs(TARGETS[0])
    memory = made.encode(made.embed(source), valid)

    def loss(memories):
        pairs = zip(made.decoder, memories, strict=True)
        sides = tuple(x.cross.attn.key_side(x.cross.params(), pair, valid) for x, pair in pairs)
        return jnp.square(made.decode(made.embed(target), sides)).sum()

    paths = jax.jit(jax.grad(loss))([(memory, memory)] * made.shape.layers)
    whole = jax.jit(jax.grad(lambda memory: loss([(memory, memory)] * made.shape.layers)))(memory)
    each = jax.tree.leaves(paths)
    assert len(each) == 2 * made.shape.layers and all(np.abs(x).max() > 1e-3 for x in each)
    np.testing.assert_allclose(whole, sum(each), rtol=1e-4, atol=1e-5)
    assert not np.asarray(whole)[~np.asarray(valid)].any()


def test_a_few_steps_learn_to_reverse():
    made = EncoderDecoder(Shape(SYMBOLS), rngs=nnx.Rngs(3))
    rng = np.random.default_rng(4)
    source = jnp.asarray(rng.integers(1, SYMBOLS, (16, SOURCE)))
    valid = jnp.ones_like(source, bool)
    wanted = source[:, ::-1]
    target = jnp.pad(wanted[:, :-1], ((0, 0), (1, 0)))
    optimizer = nnx.Optimizer(made, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(made, optimizer):
        def loss(made):
            sides = made.sides(made.encode(made.embed(source), valid), valid)
            logits = made.decode(made.embed(target), sides)
            return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

        value, gradients = nnx.value_and_grad(loss)(made)
        optimizer.update(made, gradients)
        return value

    losses = [float(step(made, optimizer)) for _ in range(60)]
    assert losses[0] > 1.5 and losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", TRANSFORMS)
def test_greedy_by_steps_is_greedy_by_whole_passes(name):
    made, steps = model(name), 4
    source, valid, _ = inputs(TARGETS[0])
    found = greedy(made, source, valid, start=0, steps=steps)
    sides = made.sides(made.encode(made.embed(source), valid), valid)
    target = jnp.zeros((BATCH, 1), int)
    for _ in range(steps):
        logits = made.decode(made.embed(target), sides)
        target = jnp.concatenate([target, logits[:, -1:].argmax(-1)], axis=1)
    np.testing.assert_array_equal(found, target[:, 1:])
    other = greedy(made, source[:, ::-1], valid, start=0, steps=steps)
    assert (found != other).any()  # what is decoded depends on the source


def test_beams_find_what_trying_everything_finds_and_share_what_they_could_store():
    made, steps = model(), 2
    source, valid, _ = inputs(TARGETS[0])
    every = np.array(list(itertools.product(range(SYMBOLS), repeat=steps)))
    target = np.pad(every[:, :-1], ((0, 0), (1, 0)))
    sides = made.sides(made.encode(made.embed(source), valid), valid)
    scores = []
    for example in range(BATCH):
        one = jax.tree.map(lambda x, n=example: jnp.repeat(x[n : n + 1], len(every), 0), sides)
        own = jax.nn.log_softmax(made.decode(made.embed(jnp.asarray(target)), one))
        scores.append(np.take_along_axis(np.asarray(own), every[..., None], -1).sum((1, 2)))
    order = np.argsort(-np.array(scores), axis=1)[:, :SYMBOLS]

    shared, total = beam(made, source, valid, start=0, steps=steps, beams=SYMBOLS)
    np.testing.assert_array_equal(shared, every[order])
    np.testing.assert_allclose(total, np.take_along_axis(np.array(scores), order, 1), rtol=1e-5)
    stored, again = beam(made, source, valid, start=0, steps=steps, beams=SYMBOLS, expand=True)
    np.testing.assert_array_equal(stored, shared)
    np.testing.assert_allclose(again, total, rtol=1e-6)


def test_a_causal_mask_of_the_target_is_refused_in_cross_attention_by_its_axes():
    made = model()
    source, valid, _ = inputs(SOURCE)
    memories = attach(made, made.encode(made.embed(source), valid), valid, "mine")
    layer, memory = made.decoder[0], memories.each[0]
    with pytest.raises(ValueError, match=r"axis k counts source rows.*causal.*axis q.*Fix"):
        memory.attend(layer.cross.params(), made.embed(source), ja.causal(), expected=memories.expected[0])
    with pytest.raises(ValueError, match="layer is 'decoder/0', expected 'decoder/1'"):
        memory.read(memories.expected[1])  # the memory of another layer, of the same shape
