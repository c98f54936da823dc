"""Told apart: each option of an attention, changed alone, by the cache, the identity and the manifest.

And a cache is a value: it comes back from every way in which trees are taken apart, stored and moved.
"""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn as ja
import variants

SPEC = dict(model=16, heads=4)
# Each option of each variant: another value, with what else it needs.
OPTIONS = {
    "mha": {},
    "mohsa": dict(overlap=1, beyond_neighbours=True),
    "talking_heads": dict(
        logit_heads=2, softmax_heads=6, value_heads=2, pre=False, post=False, start="paper", bias=True,
        dynamic=("pre_key",), dropout_over_queries=True,
    ),
    "dcmha": dict(rank=3, groups=2, gelu="erf", static=True, qk_norm="rms", pre=False, post=False),
    "moh": dict(
        shared=2, top_k=1, gates="released", router="query_norm", straight_through=False, balance="released",
        balance_weight=0.02,
    ),
    "collab": dict(width=8, content_bias=False, mixing="normal"),
}  # fmt: skip
SIZES = dict(
    model=12, heads=2, kv_heads=2, d_qk=6, d_v=6, in_q=8, in_k=8, in_v=8, out=8, use_bias=True, bias_q=True,
    bias_k=True, bias_v=True, bias_out=True, scale=0.3, rotary=ja.Rotary(), qk_norm="rms", qk_norm_eps=1e-5,
    dropout=0.1, head_dropout=0.1, dropout_shared=("q",), softcap=2.0,
)  # fmt: skip
ROTARY = dict(base=100.0, pairs="adjacent", width=2)


def identities(attn):
    """What the cache, the cross memory and the call manifest take this attention for."""
    spec = attn.spec
    params = jax.eval_shape(attn.init, jax.random.key(0))
    states = lambda rows, m: jax.ShapeDtypeStruct((1, rows, m), jnp.float32)
    source = states(3, spec.in_k), states(3, spec.in_v)
    record = attn.manifest(
        params,
        states(2, spec.in_q),
        source,
        manifest_id="m",
        q_origin="q",
        source_origin="k",
        checkpoint="r1",
    )
    return (
        jax.eval_shape(lambda: attn.empty_cache(1, 2)).owner,
        ja.expected_identity(attn, params, jax.tree.map(lambda x: np.zeros(x.shape), source), ja.Identity()),
        record,
    )


def assert_told_apart(attn, other):
    for name, mine, theirs in zip(
        ("cache", "identity", "manifest"), identities(attn), identities(other), strict=True
    ):
        assert mine != theirs, f"{name}: {attn!r} is taken for {other!r}"


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_each_option_of_a_variant_changed_alone(name):
    make, spec = variants.VARIANTS[name], ja.HeadSpec(**SPEC)
    assert OPTIONS[name].keys() == {field.name for field in dataclasses.fields(make)}, (
        "an option without its row"
    )
    plain = ja.attention(spec, make())
    for option, value in OPTIONS[name].items():
        other = ja.attention(spec, make(**{option: value}))
        again = ja.attention(ja.HeadSpec(**SPEC), make(**{option: copy.deepcopy(value)}))
        assert other == again and other.variant == again.variant
        assert_told_apart(plain, other)
    assert identities(plain) == identities(ja.attention(ja.HeadSpec(**SPEC), make()))


def test_each_size_and_option_of_the_spec_changed_alone():
    assert SIZES.keys() == {field.name for field in dataclasses.fields(ja.HeadSpec)}, (
        "an option without its row"
    )
    plain = ja.attention(ja.HeadSpec(**SPEC))
    for option, value in SIZES.items():
        assert_told_apart(plain, ja.attention(ja.HeadSpec(**SPEC | {option: value})))
    assert ROTARY.keys() == {field.name for field in dataclasses.fields(ja.Rotary)}
    turned = lambda **rotary: ja.attention(ja.HeadSpec(**SPEC, rotary=ja.Rotary(**rotary)))
    for option, value in ROTARY.items():
        assert_told_apart(turned(), turned(**{option: value}))
    assert identities(turned()) == identities(turned(base=10000.0, pairs="half"))


def test_the_order_of_a_chain():
    spec, pair = ja.HeadSpec(**SPEC), (variants.dcmha(), variants.talking_heads())
    assert_told_apart(ja.attention(spec, *pair), ja.attention(spec, *reversed(pair)))
    assert identities(ja.attention(spec, *pair)) == identities(ja.attention(spec, ja.chain(*pair)))


ATTN = ja.attention(ja.HeadSpec(**SPEC, rotary=ja.Rotary()), variants.dcmha())


def stored(tree):
    """As a checkpoint keeps a tree: numpy arrays by path, put back into another tree of the same kind."""
    found = {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    put = lambda path, x: found[jax.tree_util.keystr(path)]
    return jax.tree_util.tree_map_with_path(put, tree.reset())


@pytest.mark.parametrize("window", [None, 3])
def test_a_cache_comes_back_from_wherever_trees_go(window):
    params, x = ATTN.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (1, 3, 16), jnp.float32)
    cache = ATTN.append(params, ATTN.empty_cache(1, 4, window=window), x[:, :2])
    want, _, after = ATTN.decode(params, cache, x[:, 2:])
    leaves, tree = jax.tree.flatten(cache)
    for name, back in {
        "tree.map": jax.tree.map(lambda x: x, cache),
        "device_put": jax.device_put(cache, jax.devices()[0]),
        "flatten": jax.tree.unflatten(tree, leaves),
        "checkpoint": stored(cache),
        "pickle": pickle.loads(pickle.dumps(cache)),
        "deepcopy": copy.deepcopy(cache),
    }.items():
        assert back.owner == cache.owner and back.window == window and back.size == 4, name
        y, _, next_ = ATTN.decode(params, back, x[:, 2:])
        np.testing.assert_array_equal(y, want, name)
        jax.tree.map(np.testing.assert_array_equal, next_, after)
    with pytest.raises(ValueError, match=r"cache: made by dcmha\(\), used by dcmha\(gelu='erf'\)"):
        other = ja.attention(ATTN.spec, variants.dcmha(gelu="erf"))
        other.decode(params, pickle.loads(pickle.dumps(cache)), x[:, 2:])
