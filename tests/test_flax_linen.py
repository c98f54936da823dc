"""The Linen module: Flax's own as the peer, on equal parameters."""

import dataclasses
import inspect
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization

import jaxattn as ja
import variants
from jaxattn import linen

B, Q, K, M, SOURCE, OUT, H, D = 2, 5, 7, 11, 13, 17, 3, 4
SAME = dict(num_heads=H, qkv_features=H * D, out_features=OUT, param_dtype=jnp.float64)


def states(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def redrawn(variables, seed=2):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), variables)


X, SOURCE_K, SOURCE_V = states(B, Q, M), states(B, K, SOURCE, seed=3), states(B, K, M, seed=4)
CALLS = {
    "self": (dict(), (X,), dict(mask=nn.make_causal_mask(jnp.ones((B, Q))))),
    "plain mask": (dict(), (X,), dict(mask=jnp.tril(jnp.ones((Q, Q), bool)))),
    "cross": (dict(), (X, SOURCE_K), dict()),
    "pair": (dict(use_bias=False), (X, SOURCE_K, SOURCE_V), dict(mask=states(B, H, Q, K) > -1)),
    "norms": (dict(normalize_qk=True, precision="highest"), (X,), dict()),
    "defaults": (dict(qkv_features=None, out_features=None, num_heads=1), (X[0],), dict()),
}


@pytest.mark.parametrize("name", CALLS)
def test_equals_flax_on_equal_parameters_and_draws_them_alike(name):
    options, args, named = CALLS[name]
    peer = nn.MultiHeadDotProductAttention(**SAME | options)
    layer = linen.MultiHeadDotProductAttention(**SAME | options)
    drawn, own = (x.init(jax.random.key(0), *args, **named) for x in (peer, layer))
    jax.tree.map(np.testing.assert_array_equal, dict(own), dict(drawn))  # one seed, one tree, both ways
    params = redrawn(drawn)

    def output_and_gradient(module):
        def loss(params, args):
            y = module.apply(params, *args, **named)
            return (y**3).sum(), y

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, args)

    cases.tree_close(output_and_gradient(layer), output_and_gradient(peer), 1e-10)


def test_fields_and_call_arguments_are_flax_s():
    """But for what Flax calls deprecated, and with what is ours after them."""
    gone = ("dot_general", "_cls")
    fields = lambda cls: [f for f in dataclasses.fields(cls) if f.name not in ("parent", "name")]
    theirs = [f for f in fields(nn.MultiHeadDotProductAttention) if not f.name.endswith(gone)]
    ours = {f.name: f.default for f in fields(linen.MultiHeadDotProductAttention)}
    assert [f.name for f in theirs] == list(ours)[: len(theirs)]
    same = {f.name for f in theirs if not callable(f.default)}
    assert all(ours[f.name] == f.default for f in theirs if f.name in same)
    call = lambda cls: set(inspect.signature(inspect.unwrap(cls.__call__)).parameters)
    assert call(nn.MultiHeadDotProductAttention) <= call(linen.MultiHeadDotProductAttention)


def variant(name):
    return variants.VARIANTS[name](**cases.ARGUMENTS[name])


@pytest.mark.heavy
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_variants_keep_their_leaves_under_heads(name):
    layer = linen.MultiHeadDotProductAttention(4, qkv_features=12, variant=variant(name), d_v=5)
    variables = redrawn(layer.init(jax.random.key(0), X))
    y, found = layer.apply(variables, X, mask=ja.causal(), mutable=["losses"])
    sizes = dict(d_qk=3, d_v=5, use_bias=True)
    attn = ja.attention(ja.HeadSpec(model=M, heads=4, **sizes), variant(name))
    params = {"heads": {}, **variables["params"]}
    assert jax.tree.structure(params) == jax.tree.structure(attn.init(jax.random.key(0)))
    want, aux = attn.apply(params, X, mask=ja.causal())
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-12 * np.max(np.abs(want)))
    assert jax.tree.leaves(found) == ([aux.total()] if aux.losses else [])


def test_dropout_follows_linen():
    layer = linen.MultiHeadAttention(**SAME, dropout_rate=0.5, engine="dense")
    params = redrawn(layer.init(jax.random.key(0), X, deterministic=True))
    apply = lambda seed, x=X, module=layer, **named: module.apply(
        params, x, deterministic=False, rngs={"dropout": jax.random.key(seed)}, **named
    )
    quiet = layer.apply(params, X, deterministic=True)
    assert jnp.array_equal(quiet, linen.MultiHeadAttention(**SAME).apply(params, X))
    assert jnp.array_equal(apply(1), apply(1))
    assert jnp.abs(apply(1) - apply(2)).max() > 1e-3
    given = apply(1, dropout_rng=jax.random.key(7))
    assert jnp.array_equal(given, apply(2, dropout_rng=jax.random.key(7)))  # it goes before the stream
    twice = jnp.stack([X[0], X[0]])
    shared, own = apply(1, twice), apply(1, twice, layer.clone(broadcast_dropout=False))
    np.testing.assert_allclose(shared[0], shared[1], atol=1e-12)
    assert jnp.abs(own[0] - own[1]).max() > 1e-3
    whole = apply(1, module=layer.clone(dropout_rate=0.0, head_dropout_rate=0.5))
    assert jnp.abs(whole - quiet).max() > 1e-3
    for module, named in ((layer, {}), (layer.clone(deterministic=True), {"deterministic": True})):
        with pytest.raises(ValueError, match="deterministic"):  # said nowhere, or twice
            module.apply(params, X, **named)


def test_sows_the_weights_that_flax_sows():
    peer, layer = (x(**SAME) for x in (nn.MultiHeadAttention, linen.MultiHeadAttention))
    params = redrawn(peer.init(jax.random.key(0), X))
    got, want = (
        x.apply(params, X, sow_weights=True, mutable=["intermediates"])[1]["intermediates"]
        for x in (layer, peer)
    )
    assert jax.tree.structure(got) == jax.tree.structure(want)
    np.testing.assert_allclose(got["attention_weights"][0], want["attention_weights"][0], atol=1e-12)


def steps(module, variables, x, split):
    """Outputs of chunks of x one after another, and the cache after them."""
    step = jax.jit(lambda variables, x: module.apply(variables, x, mutable=["cache"]))
    outs, start = [], 0
    for n in split:
        y, changed = step(variables, x[:, start : start + n])
        variables, start = {**variables, **changed}, start + n
        outs.append(y)
    return jnp.concatenate(outs, 1), variables["cache"]


def test_decode_equals_flax_step_by_step_and_takes_prompts():
    x = states(B, Q, M, seed=6)
    peer, layer = (
        cls(**SAME, decode=True)
        for cls in (nn.MultiHeadDotProductAttention, linen.MultiHeadDotProductAttention)
    )
    zeros, own = (module.init(jax.random.key(0), x) for module in (peer, layer))
    assert set(zeros["cache"]) <= set(own["cache"])
    for name, leaf in zeros["cache"].items():
        assert own["cache"][name].shape == leaf.shape and own["cache"][name].dtype == leaf.dtype
        assert not own["cache"][name].any()
    params = redrawn(zeros["params"])
    want, cache = steps(peer, {**zeros, "params": params}, x, [1] * Q)
    for split in ([1] * Q, [3, 1, 1], [Q]):
        got, kept = steps(layer, {**own, "params": params}, x, split)
        np.testing.assert_allclose(got, want, atol=1e-11)
        for name, leaf in cache.items():
            np.testing.assert_allclose(kept[name], leaf, atol=1e-12)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["dcmha", "mohsa", "collab"])
def test_decode_of_variants_equals_the_causal_pass(name):
    layer = linen.MultiHeadDotProductAttention(4, qkv_features=12, variant=variant(name), decode=True)
    variables = layer.init(jax.random.key(0), X)
    variables = {**variables, "params": redrawn(variables["params"])}
    restored = serialization.from_bytes(variables, serialization.to_bytes(variables))
    want = layer.clone(decode=False).apply({"params": variables["params"]}, X, mask=ja.causal())
    got, _ = steps(layer, restored, X, [3, 2])
    np.testing.assert_allclose(got, want, atol=1e-11 * np.max(np.abs(want)))


def test_a_full_cache_refuses():
    layer = linen.MultiHeadDotProductAttention(**SAME, decode=True)
    variables = layer.init(jax.random.key(0), X)
    y, cache = steps(layer, variables, jnp.concatenate([X, X], 1), [3, 4, 1])
    assert jnp.isfinite(y[:, :3]).all() and jnp.isnan(y[:, 3:]).all()  # under jit: NaN from then on
    assert cache["cache_refused"] and cache["cache_index"] == 3
    variables = {**variables, "cache": {**cache, "cache_refused": jnp.array(False)}}
    with pytest.raises(ValueError, match="3 of 5 rows are taken, 4 more do not fit"):
        layer.apply(variables, X[:, :4], mutable=["cache"])


def test_a_step_takes_what_it_can_carry_out():
    layer = linen.MultiHeadDotProductAttention(**SAME, decode=True, dropout_rate=0.5)
    variables = layer.init(jax.random.key(0), X, deterministic=True)
    step = lambda *args, deterministic=True, **named: layer.apply(
        variables, X[:, :1], *args, deterministic=deterministic, mutable=["cache"], **named
    )
    with pytest.raises(ValueError, match="inputs_k: given in decode.*Fix: .*decode=False"):
        step(X[:, 1:2])
    still = step()[0]
    hide = jnp.where(jnp.arange(Q) > 0, 0.0, -jnp.inf)
    np.testing.assert_allclose(step(bias=hide[None, None])[0], jnp.zeros((B, 1, OUT)), atol=0)
    drawn = step(deterministic=False, dropout_rng=jax.random.key(0))[0]
    assert jnp.abs(drawn - still).max() > 1e-3
    hidden = jnp.arange(Q) > 0  # by rows of the cache: the step's own row is hidden
    np.testing.assert_allclose(step(mask=hidden[None, None])[0], jnp.zeros((B, 1, OUT)), atol=0)


def test_partitioning_names_each_axis_of_the_kernel():
    """Names meant for [m, h, d] must not slide onto other axes, as two names of a flat kernel do in Flax."""
    named = lambda init, *names: nn.with_partitioning(init, names)
    normal, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros
    layer = linen.MultiHeadDotProductAttention(
        **SAME,
        kernel_init=named(normal, "data", "heads", None),
        bias_init=named(zeros, "heads", None),
        out_kernel_init=named(normal, "heads", None, "data"),
        out_bias_init=named(zeros, "data"),
    )
    boxed = layer.init(jax.random.key(0), X)
    specs = nn.get_partition_spec(boxed)["params"]
    for name in ("query", "key", "value"):
        assert tuple(specs[name]["kernel"]) == ("data", "heads", None)
        assert tuple(specs[name]["bias"]) == ("heads", None)
    assert tuple(specs["out"]["kernel"]) == ("heads", None, "data")
    assert tuple(specs["out"]["bias"]) == ("data",)
    assert boxed["params"]["query"]["kernel"].value.shape == (M, H, D)
    plain = linen.MultiHeadDotProductAttention(**SAME)
    unboxed = plain.init(jax.random.key(0), X)
    jax.tree.map(np.testing.assert_array_equal, nn.unbox(boxed), unboxed)
    np.testing.assert_array_equal(layer.apply(boxed, X), plain.apply(unboxed, X))
    four = layer.clone(kernel_init=named(normal, "data", "heads", None, None))
    with pytest.raises(ValueError, match=r"query/kernel: .* at most one for each of the axes \[m, h, d\]"):
        four.init(jax.random.key(0), X)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        (dict(attention_fn=jnp.dot), (X,), "attention_fn: got .*dot"),
        (dict(qkv_features=10), (X,), "qkv_features = 10 does not divide by num_heads = 3"),
        (dict(), (X, None, X), "inputs_v: given without inputs_k"),
        (dict(precision=("high", "default")), (X,), "precision: got the pair"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, args, message):
    layer = linen.MultiHeadDotProductAttention(**SAME | options)
    with pytest.raises((ValueError, TypeError), match=message):
        layer.init(jax.random.key(0), *args)


def test_dtype_bias_and_flax_s_attention_fn():
    default = nn.dot_product_attention
    layer = linen.MultiHeadDotProductAttention(**SAME, attention_fn=default, dtype=jnp.bfloat16)
    variables = layer.init(jax.random.key(0), X)
    assert variables["params"]["query"]["kernel"].dtype == jnp.float64
    assert layer.apply(variables, X).dtype == jnp.bfloat16
    layer = layer.clone(dtype=None)
    hide = jnp.where(jnp.tril(jnp.ones((Q, Q), bool)), 0.0, -1e9)[None]
    got, want = layer.apply(variables, X, bias=hide), layer.apply(variables, X, mask=ja.causal())
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_import_jaxattn_leaves_linen_out():
    code = "import sys, jaxattn; assert 'jaxattn.linen' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
