"""A module's state out and in again by every way that Flax has, with a cache; and what compares modules."""

import copy
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization

import jaxattn as ja
import variants
from jaxattn import linen

B, T, SIZE, M, H = 2, 3, 8, 12, 4
X = np.random.default_rng(0).normal(size=(B, T, M)).astype(np.float32)


def made(seed=0, **options):
    named = dict(variant=variants.dcmha(rank=1), rotary=ja.Rotary(width=2), **options)
    return ja.MultiHeadAttention(H, M, **named, rngs=nnx.Rngs(seed))


def empty(seed=0, **options):
    layer = made(seed, decode=True, **options)
    layer.init_cache((B, SIZE, M))
    return layer


def pure_dict(layer, through=lambda tree: tree):
    other = empty(1)
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, through(nnx.to_pure_dict(nnx.state(layer))))
    nnx.update(other, state)
    return other


def updated(layer):
    other = empty(1)
    nnx.update(other, nnx.state(layer))
    return nnx.clone(other)


def by_abstract_model(layer):
    graph, abstract = nnx.split(nnx.eval_shape(empty))
    state = nnx.state(layer)
    jax.tree.map(lambda a, b: None if a.shape == b.shape and a.dtype == b.dtype else 1 / 0, abstract, state)
    return nnx.clone(nnx.merge(graph, state))


WAYS = {
    "split and merge": lambda layer: nnx.merge(*nnx.split(layer), copy=True),
    "params and the rest": lambda layer: nnx.merge(*nnx.split(layer, nnx.Param, nnx.Cache, ...), copy=True),
    "update": updated,
    "pure dict": pure_dict,
    "msgpack": lambda layer: pure_dict(
        layer, lambda tree: serialization.msgpack_restore(serialization.msgpack_serialize(tree))
    ),
    "eval_shape": by_abstract_model,
    "clone": nnx.clone,
    "copy": lambda layer: nnx.clone(copy.copy(layer)),  # a copy holds the same variables
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "tree.map": lambda layer: jax.tree.map(jnp.copy, layer),
    "jit": nnx.jit(lambda layer: nnx.clone(layer)),
}


@pytest.fixture(scope="module")
def begun():
    """A layer with three cached rows, and what comes next."""
    layer = empty()
    layer(X)
    step = nnx.jit(lambda layer, x: layer(x))
    return layer, step, step(nnx.clone(layer), X[:, :1])


@pytest.mark.parametrize("way", WAYS)
def test_state_goes_out_and_in_with_its_cache(begun, way):
    layer, step, want = begun
    np.testing.assert_array_equal(step(WAYS[way](layer), X[:, :1]), want)
    assert int(layer.cache_index[...]) == T


def test_an_orbax_checkpoint_holds_the_cache(begun, tmp_path):
    import orbax.checkpoint as ocp

    layer, step, want = begun
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(layer))
        checkpointer.wait_until_finished()
        graph, abstract = nnx.split(nnx.eval_shape(empty))
        restored = checkpointer.restore(tmp_path / "state", abstract)
    np.testing.assert_array_equal(step(nnx.merge(graph, restored), X[:, :1]), want)


def test_a_cache_of_other_options_is_told_apart():
    moh = lambda top_k: empty() if top_k is None else ja.MultiHeadAttention(
        H, M, variant=variants.moh(shared=1, top_k=top_k), decode=True, rngs=nnx.Rngs(0)
    )  # fmt: skip
    first, second = moh(1), moh(2)
    for layer in (first, second):
        layer.init_cache((B, SIZE, M))
    first(X)
    nnx.update(second, nnx.state(first, nnx.Cache))
    with pytest.raises(ValueError, match=r"cache: made by moh\(top_k=1\), used by moh"):
        second(X)


def test_a_cache_of_flax_s_own_layer_is_refused_and_says_what_it_lacks():
    theirs = nnx.MultiHeadAttention(num_heads=H, in_features=M, decode=True, rngs=nnx.Rngs(0))
    theirs.init_cache((B, SIZE, M))
    layer = ja.MultiHeadAttention(H, M, decode=True, rngs=nnx.Rngs(0))
    for name in ("cached_key", "cached_value", "cache_index"):
        setattr(layer, name, nnx.Cache(getattr(theirs, name)[...]))
    peer = nn.MultiHeadDotProductAttention(H, decode=True).init(jax.random.key(0), X)
    module = linen.MultiHeadDotProductAttention(H, decode=True)
    for step in (lambda: layer(X), lambda: module.apply(peer, X, mutable=["cache"])):
        with pytest.raises(ValueError, match="cache: cached_valid, cached_position, cache_refused missing"):
            step()


def test_linen_variables_go_out_and_in_with_their_cache():
    module = linen.MultiHeadAttention(H, variant=variants.dcmha(rank=1), decode=True)
    full = np.concatenate([X, X], 1)
    start = module.init(jax.random.key(0), full)
    step = jax.jit(lambda variables, x: module.apply(variables, x, mutable=["cache"]))
    variables = {**start, **step(start, X)[1]}
    want, _ = step(variables, X[:, :1])
    zeros = jax.tree.map(jnp.zeros_like, start)
    for back in (
        serialization.from_state_dict(zeros, serialization.to_state_dict(variables)),
        serialization.from_bytes(zeros, serialization.to_bytes(variables)),
        serialization.msgpack_restore(serialization.to_bytes(variables)),
        pickle.loads(pickle.dumps(variables)),
    ):
        np.testing.assert_array_equal(step(back, X[:, :1])[0], want)


def test_r2_05_a_module_is_pickled_into_a_process_of_its_own(tmp_path):
    chain = ja.chain(variants.talking_heads(), variants.moh(shared=1, top_k=2))
    layer = ja.MultiHeadAttention(num_heads=4, in_features=16, variant=chain, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
    (tmp_path / "layer").write_bytes(pickle.dumps((layer, x, layer.attn)))
    code = (
        "import pickle, sys, numpy as np, jax; jax.config.update('jax_enable_x64', True)\n"
        "layer, x, attn = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert layer.attn == attn\n"
        "np.save(sys.argv[2], layer(x))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "layer", tmp_path / "y.npy"], check=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), layer(x), atol=1e-6)
    module = linen.MultiHeadAttention(4, variant=chain)
    assert pickle.loads(pickle.dumps(module)) == module


def test_r2_06_layers_made_alike_are_one_program_and_stack():
    make = lambda seed: ja.MultiHeadAttention(
        num_heads=4, in_features=16, variant=variants.talking_heads(), rngs=nnx.Rngs(seed)
    )
    traces = []

    @nnx.jit
    def run(layer, x):
        traces.append(1)
        return layer(x)

    layers = [make(seed) for seed in range(3)]
    x = np.ones((2, 5, 16), np.float32)
    want = [run(layer, x) for layer in layers]
    assert len(traces) == 1
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    got = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stacked, x)
    np.testing.assert_allclose(got, jnp.stack(want), atol=1e-6)
    replaced, _ = jax.lax.scan(
        lambda layer, seed: (make(jax.random.key(seed)), None), layers[0], jnp.arange(2)
    )
    np.testing.assert_allclose(replaced(x), want[1], atol=1e-6)  # it was made in the body of a scan
    # Linen: equal fields are equal modules, the variant among them.
    one, two = (linen.MultiHeadAttention(4, variant=variants.talking_heads()) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != linen.MultiHeadAttention(4, variant=variants.talking_heads(softmax_heads=6))


@pytest.mark.heavy
def test_stacked_layers_decode_in_a_scan_each_with_its_cache():
    def start(rngs):
        layer = ja.MultiHeadAttention(H, M, variant=variants.dcmha(rank=1), decode=True, rngs=rngs)
        layer.init_cache((B, T, M))
        return layer

    layers = nnx.split_rngs(splits=2)(nnx.vmap(start, in_axes=0, out_axes=0))(nnx.Rngs(0))
    body = nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    step = nnx.jit(lambda layers, x: body(x, layers))
    graph, state = nnx.split(layers)
    want = X
    for at in range(2):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[at], state))  # noqa: B023
        want = want + layer(want, decode=False, is_causal=True)
    got = np.concatenate([step(layers, X[:, :2]), step(layers, X[:, 2:])], 1)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(layers.cache_index[...], [T, T])


class Model(nnx.Module):
    def __init__(self, attention):
        self.attention, self.norm = attention, nnx.LayerNorm(16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.attention(x))


def test_r2_08_tabulate_gives_a_table_and_leaves_the_class_as_it_was():
    make = lambda kind=ja.MultiHeadAttention: kind(
        num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0)
    )
    x = jnp.ones((2, 5, 16))
    want = make()(x)
    wide = dict(console_kwargs=dict(width=200, force_terminal=False))
    for held, count in ((lambda layer: layer, "1,088 (4.4 KB)"), (Model, "1,120 (4.5 KB)")):
        for depth in (None, 0):
            theirs, ours = (
                nnx.tabulate(held(make(kind)), x, depth=depth, **wide)
                for kind in (nnx.MultiHeadAttention, ja.MultiHeadAttention)
            )
            for part in ("MultiHeadAttention", "float32[2,5,16]", "1,088 (4.4 KB)"):
                assert (part in theirs) == (part in ours)
            last = lambda table: [line.strip() for line in table.splitlines() if line.strip()][-1]
            assert last(theirs) == last(ours) == f"Total Parameters: {count}"
    np.testing.assert_array_equal(make()(x), want)


def test_a_layer_displays_and_prints_its_attention_once(capsys):
    layer = made()
    nnx.display(layer)
    shown = capsys.readouterr().out
    assert "MultiHeadAttention" in shown
    first = repr(layer).split("query=")[0]
    assert first.count("HeadSpec(") == 1 and first.count("dcmha(") == 1 and len(first) < 300
    assert repr(layer.attn) in first
