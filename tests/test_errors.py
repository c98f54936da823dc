"""Bad input is refused by name: the argument or axis, what came, what was expected, the fix.

And what is unusual but right is not: one row, one example, no batch axis, several, and none at all.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxattn as ja
import variants

MODEL, HEADS, Q, K, BATCH = 12, 4, 5, 7, 2
SPEC = ja.HeadSpec(model=MODEL, heads=HEADS, d_qk=6, d_v=3)
PLAIN = ja.attention(SPEC)
PARAMS = PLAIN.init(jax.random.key(0), jnp.float64)
X_Q, X_KV = jnp.ones((BATCH, Q, MODEL)), jnp.ones((BATCH, K, MODEL))


def apply(*arguments, **options):
    return PLAIN.apply(PARAMS, *(arguments or (X_Q, X_KV)), **options)


def build(*transforms, **sizes):
    return ja.attention(ja.HeadSpec(**{"model": MODEL, "heads": HEADS, **sizes}), *transforms)


def masked(array, axes):
    return apply(X_Q, X_KV, ja.explicit(np.ones(array, bool), axes=axes))


def module(**options):
    return ja.MultiHeadAttention(**{"num_heads": HEADS, "in_features": MODEL, **options},
                                 rngs=nnx.Rngs(0))  # fmt: skip


def bias_of(*shape):
    return lambda: apply(X_Q, X_KV, bias=jnp.ones(shape))


class Refusal(NamedTuple):
    """A bad call, and what its error must say: argument or axis, got, expected, fix."""

    call: Callable[[], object]
    argument: str
    got: str
    expected: str
    fix: str
    error: type[Exception] = ValueError


def sides(query=(Q, HEADS, 6), key=(K, HEADS, 6), value=(K, HEADS, 3), **coupling):
    form = ja.QuerySide(jnp.ones(query)), ja.KeySide(jnp.ones(key), jnp.ones(value))
    return lambda: ja.attend(*form, ja.Coupling(scale=1.0, **coupling))


WIDTHS = {
    "x_q": Refusal(lambda: apply(X_Q[..., :11]), r"x_q: axis m", "11", "expected 12", "Fix"),
    "x_kv": Refusal(lambda: apply(X_Q, X_KV[..., :5]), r"x_k: axis m", "5", "expected 12", "Fix"),
    "x_v of a pair": Refusal(
        lambda: apply(X_Q, (X_KV, X_KV[..., :5])), r"x_v: axis m", "5", "expected 12", "Fix"
    ),
    "rows of a pair": Refusal(
        lambda: apply(X_Q, (X_KV, X_KV[:, :6])), r"x_v: axis k", "6", "expected 7", "same rows"
    ),
    "rank": Refusal(lambda: apply(X_Q[0, 0]), "x_q", r"shape \(12,\)", "at least 2", "Fix"),
    "batch": Refusal(
        lambda: apply(X_Q, X_KV[:1]), "batch axes b", r"\(1,\)", r"\(2,\)", "same leading axes"
    ),
    "batch of a pair": Refusal(
        lambda: apply(X_Q, (X_KV, X_KV[:1])), r"x_k.*x_v", r"\(1,\)", r"\(2,\)", "same leading axes"
    ),
    "integers": Refusal(
        lambda: apply(jnp.ones((Q, MODEL), int)), "x_q", "int64", "floating", "cast", TypeError
    ),
    "head width": Refusal(
        sides(key=(K, HEADS, 5)), "key: axis d", "5", "expected 6", "Fix"
    ),
    "value rows": Refusal(
        sides(value=(K + 1, HEADS, 3)), "value: axis k", "8", "expected 7", "Fix"
    ),
    "positions of queries": Refusal(
        lambda: apply(positions=(jnp.arange(Q + 1), None)), "positions", "6", "5", "position"
    ),
    "positions of keys": Refusal(
        lambda: apply(positions=(None, jnp.arange(K - 1))), "positions", "6", "7", "position"
    ),
    "positions in rotation": Refusal(
        lambda: build(rotary=ja.Rotary(), d_qk=6).apply(
            build(rotary=ja.Rotary(), d_qk=6).init(jax.random.key(0)), X_Q, positions=jnp.arange(3)
        ),
        "positions", "3", "5", "position",
    ),
    "one array of positions for two sides": Refusal(
        lambda: apply(positions=jnp.arange(K)), "positions", "7", "5", "position"
    ),
}  # fmt: skip

SIZES = {
    "heads": Refusal(lambda: ja.HeadSpec(model=10, heads=4), "heads", "10", "4", "Fix"),
    "kv_heads": Refusal(lambda: build(kv_heads=3), "kv_heads", "3", "4", "Fix"),
    "no heads": Refusal(lambda: build(heads=0), "heads", "0", "at least 1", "whole number"),
    "no width": Refusal(lambda: build(d_v=0), "d_v", "0", "at least 1", "whole number"),
    "half a head": Refusal(lambda: build(heads=1.5), "heads", "1.5", "whole number", "at least 1"),
    "module features": Refusal(
        lambda: module(qkv_features=10), "qkv_features", "10", "num_heads = 4", "Fix"
    ),
    "module kv heads": Refusal(lambda: module(num_kv_heads=3), "kv_heads", "3", "4", "Fix"),
    "dropout": Refusal(lambda: build(dropout=1.0), "dropout", r"1\.0", r"\[0, 1\)", "Fix"),
    "negative dropout": Refusal(
        lambda: build(head_dropout=-0.5), "head_dropout", r"-0\.5", r"\[0, 1\)", "Fix"
    ),
    "module dropout": Refusal(
        lambda: module(dropout_rate=2.0), "dropout", r"2\.0", r"\[0, 1\)", "Fix"
    ),
    "dropout of a coupling": Refusal(
        sides(dropout=1.5), "Coupling: dropout", r"1\.5", r"\[0, 1\)", "Fix"
    ),
    "soft cap": Refusal(lambda: build(softcap=0.0), "softcap", r"0\.0", "positive", "None"),
    "rotary width": Refusal(
        lambda: build(d_qk=6, rotary=ja.Rotary(width=8)), "width", "8", "6", "Fix"
    ),
    "odd rotary width": Refusal(
        lambda: build(d_qk=3, rotary=ja.Rotary()), "width", "3", "even", "Fix"
    ),
    "split": Refusal(
        lambda: ja.project.split_heads(jnp.ones((2, 7)), 3), r"\(h d\)", "7", "3", "Fix"
    ),
    "shared keys of the core": Refusal(
        sides(key=(K, 3, 6)), "key", "4", "3", "Fix"
    ),
    "key_of": Refusal(
        sides(key_of=(0, 1, 2, 4)), "key_of", "4", "4 indices below 4", "Fix"
    ),
}  # fmt: skip

OPTIONS = {
    "qk_norm": Refusal(lambda: build(qk_norm="batch"), "qk_norm", "'batch'", "'rms'", "one of"),
    "rotary pairs": Refusal(
        lambda: build(rotary=ja.Rotary(pairs="both"), d_qk=6), "pairs", "'both'", "'half'", "one of"
    ),
    "engine": Refusal(
        lambda: apply(engine="flash"), "engine", "'flash'", "'dense'.*'blocked'", "one of"
    ),
    "capture": Refusal(
        lambda: apply(capture=("scores",)), "capture", "'scores'", "'logits'.*'weights'", "one of"
    ),
    "capture by blocks": Refusal(
        lambda: apply(engine="blocked", capture=("weights",)),
        "engine", "'blocked'.*weights", "reference, dense", "Fix",
    ),
    "not a transform": Refusal(
        lambda: build(variants.moh), "transform", "class moh", "HeadTransform",
        "pass what a factory returns", TypeError,
    ),
    "alignment": Refusal(lambda: ja.causal(align="left"), "align", "'left'", '"start"', '"end"'),
    "gelu": Refusal(lambda: variants.dcmha(gelu="relu"), "gelu", "'relu'", "'tanh'", "one of"),
    "gates": Refusal(
        lambda: variants.moh(gates="softmax"), "gates", "'softmax'", "'paper'", "one of"
    ),
    "router": Refusal(
        lambda: variants.moh(router="random"), "router", "'random'", "'learned'", "one of"
    ),
    "balance": Refusal(
        lambda: variants.moh(balance="entropy"), "balance", "'entropy'", "'paper'", "one of"
    ),
    "mixing": Refusal(
        lambda: variants.collab(mixing="zeros"), "mixing", "'zeros'", "'blocks'", "one of"
    ),
    "talking init": Refusal(
        lambda: variants.talking_heads(start="zeros"), "start", "'zeros'", "'identity'", "one of"
    ),
    "dynamic": Refusal(
        lambda: variants.talking_heads(dynamic=("x2l",)), "dynamic", "'x2l'", "'pre_query'",
        "one of",
    ),
    "schedule": Refusal(
        lambda: variants.overlap_schedule("up", 3), "kind", "'up'", "'inc'", "one of"
    ),
    "dropout key": Refusal(
        lambda: apply(dropout_key=0), "dropout_key", "int", "PRNG key", "jax.random.key", TypeError
    ),
    "dropout site": Refusal(
        sides(dropout_site="logits"), "dropout_site", "'logits'", "'values'", "one of"
    ),
}  # fmt: skip

VARIANTS = {
    "top_k": Refusal(
        lambda: build(variants.moh(shared=2, top_k=3)), "top_k", "3", "2 routed heads", "Fix"
    ),
    "negative top_k": Refusal(lambda: variants.moh(top_k=-1), "top_k", "-1", "at least 0", "Fix"),
    "no active head": Refusal(
        lambda: variants.moh(shared=0, top_k=0), "top_k", "0", "one active head|at least one", "Fix"
    ),
    "overlap": Refusal(lambda: variants.mohsa(overlap=-1), "overlap", "-1", "at least 0", "Fix"),
    "overlap above the width": Refusal(
        lambda: build(variants.mohsa(overlap=4), d_qk=6, d_v=3), "overlap", "4", "3", "Fix"
    ),
    "overlap through rotary pairs": Refusal(
        lambda: build(variants.mohsa(overlap=1), d_qk=6, d_v=3, rotary=ja.Rotary()),
        "overlap", "1", "multiple of 6", "Fix",
    ),
    "groups": Refusal(
        lambda: build(variants.dcmha(groups=3)), "groups", "3", "heads = 4", "Fix"
    ),
    "rank": Refusal(lambda: variants.dcmha(rank=0), "rank", "0", "at least 1", "expected"),
    "width": Refusal(lambda: variants.collab(width=0), "width", "0", "at least 1", "expected"),
    "width through rotary blocks": Refusal(
        lambda: build(variants.collab(width=8), d_qk=6, rotary=ja.Rotary()),
        "width", "8", "multiple of 6", "Fix",
    ),
    "normed basis": Refusal(
        lambda: build(variants.collab(width=8), qk_norm="rms"), "qk_norm", "'rms'", "None", "Fix"
    ),
    "kv_heads of collab": Refusal(
        lambda: build(variants.collab(), kv_heads=2), "collab.*kv_heads", "2", "4", "Fix"
    ),
    "kv_heads of mohsa": Refusal(
        lambda: build(variants.mohsa(overlap=1), kv_heads=2), "mohsa.*kv_heads", "2", "4", "Fix"
    ),
    "softmax heads without a map": Refusal(
        lambda: build(variants.talking_heads(pre=False, softmax_heads=3)),
        "softmax_heads", "3", "4", "Fix",
    ),
    "projections redefined twice": Refusal(
        lambda: build(variants.collab(width=6), variants.mohsa(overlap=1)),
        "mohsa", "collab", "first", "Fix",
    ),
    "projections redefined after a mix": Refusal(
        lambda: build(variants.talking_heads(), variants.mohsa(overlap=1)),
        "mohsa", "talking_heads|mixes heads", "first", "Fix",
    ),
    "content bias before a mix": Refusal(
        lambda: build(variants.collab(width=6), variants.talking_heads()),
        "content_bias|content bias", "collab", "mix", "Fix",
    ),
    "content bias before a dynamic mix": Refusal(
        lambda: build(variants.collab(width=6), variants.dcmha()),
        "content_bias|content bias", "collab", "mix", "Fix",
    ),
    "query-norm router without queries": Refusal(
        lambda: build(variants.collab(width=6), variants.moh(1, 1, router="query_norm")),
        "router", "query_norm", "query heads", "Fix",
    ),
}  # fmt: skip

MASKS = {
    "array": Refusal(
        lambda: apply(X_Q, X_KV, jnp.ones((Q, K), bool)),
        "mask", r"bool array of shape \(5, 7\)", "jaxattn mask or None", "explicit", TypeError,
    ),
    "integers": Refusal(
        lambda: ja.explicit(np.ones((Q, K), int), axes="q k"),
        r"explicit\(array\)", "int64", "boolean", "array != 0", TypeError,
    ),
    "floats": Refusal(
        lambda: ja.explicit(np.zeros((Q, K)), axes="q k"),
        r"explicit\(array\)", "float64", "boolean", "from_additive", TypeError,
    ),
    "float padding": Refusal(
        lambda: ja.padding(np.ones((BATCH, K))), r"padding\(valid\)", "float64", "boolean",
        "from_additive", TypeError,
    ),
    "float lengths": Refusal(
        lambda: ja.lengths(np.ones(BATCH)), r"lengths\(n\)", "float64", "integers", "expected",
        TypeError,
    ),
    "a mask and an array": Refusal(
        lambda: ja.causal() & np.ones((Q, K), bool), "mask", r"\(5, 7\)", "jaxattn mask",
        "explicit", TypeError,
    ),
    "axes": Refusal(
        lambda: ja.explicit(np.ones((Q, K), bool), axes="b q k"),
        "axes='b q k'", "2", "3 axes", "name every axis",
    ),
    "unknown axes": Refusal(
        lambda: ja.explicit(np.ones((Q, K), bool), axes="t k"), "axes='t k'", "'t'", "expected",
        "queries are q",
    ),
    "queries": Refusal(
        lambda: masked((BATCH, 6, K), "b q k"), "axis 'q'", "6", "expected 5", "one row for each"
    ),
    "keys": Refusal(
        lambda: masked((BATCH, 6), "b k"), "axis 'k'", "6", "expected 7", "one entry for each"
    ),
    "heads": Refusal(
        lambda: masked((3, Q, K), "h q k"), "axis 'h'", "3", "expected 4", "one entry for each head"
    ),
    "batch": Refusal(
        lambda: masked((3, Q, K), "b q k"), "batch axis 'b'", "3", "expected 2", "or 1 where"
    ),
    "batch axes": Refusal(
        lambda: masked((1, 2, Q, K), "b1 b2 q k"), "batch axes", "2 batch axes", "1", "call's"
    ),
    "padding length": Refusal(
        lambda: apply(X_Q, X_KV, ja.padding(np.ones((BATCH, 6), bool))),
        "padding", "6", "7", "one entry",
    ),
    "padding batch": Refusal(
        lambda: apply(X_Q, X_KV, ja.padding(np.ones((3, K), bool))), "padding", "3", "2",
        "as in|same",
    ),
    "padding of a batch that is not there": Refusal(
        lambda: apply(X_Q[0], None, ja.padding(np.ones((3, Q), bool))),
        "padding", "3", "0|none", "call|batch",
    ),
    "lengths of a batch that is not there": Refusal(
        lambda: apply(X_Q[0], None, ja.lengths(np.array([1, 2, 3]))),
        "lengths", "3", "0|none", "call|batch",
    ),
    "rows that a side declares": Refusal(
        lambda: PLAIN.key_side(PARAMS, X_KV, valid=np.ones((BATCH, 6), bool)),
        "valid", "6", "7", "row|entry",
    ),
    "lengths batch": Refusal(
        lambda: apply(X_Q, X_KV, ja.lengths(np.array([1, 2, 3]))), "lengths", "3", "2", "as in|same"
    ),
    "a mask of heads before a post mix": Refusal(
        lambda: build(variants.talking_heads()).apply(
            build(variants.talking_heads()).init(jax.random.key(0)), X_Q, X_KV,
            ja.explicit(np.ones((HEADS, Q, K), bool), axes="h q k"),
        ),
        "axis h", r"h q k: 4x5x7", "post mix", "remask=True",
    ),
    "window": Refusal(lambda: ja.window(-1), r"window\(n", "-1", "0 or more", "keys"),
}  # fmt: skip

BIASES = {
    "heads": Refusal(
        bias_of(BATCH, 3, Q, K), "bias", r"\(2, 3, 5, 7\)", r"\(2, 4, 5, 7\)", "Fix"
    ),
    "queries": Refusal(bias_of(HEADS, 6, K), "bias", r"\(4, 6, 7\)", r"\(2, 4, 5, 7\)", "Fix"),
    "keys": Refusal(bias_of(HEADS, Q, 6), "bias", r"\(4, 5, 6\)", r"\(2, 4, 5, 7\)", "Fix"),
    "axes": Refusal(bias_of(Q, K), "bias", r"\(5, 7\)", r"\(2, 4, 5, 7\)", "Fix"),
    "batch": Refusal(
        bias_of(3, HEADS, Q, K), "bias", r"\(3, 4, 5, 7\)", r"\(2, 4, 5, 7\)", "Fix"
    ),
    "integers": Refusal(
        lambda: apply(X_Q, X_KV, bias=jnp.ones((HEADS, Q, K), int)), "bias", "int64", "floating",
        "cast", TypeError,
    ),
}  # fmt: skip

CALLS = {
    "float validity": Refusal(
        lambda: PLAIN.key_side(PARAMS, X_KV, valid=jnp.ones((BATCH, K))),
        "valid", "float", "expected bool", "x != 0", TypeError,
    ),
    "float dropout key": Refusal(
        lambda: apply(dropout_key=jnp.ones(2)),
        "dropout_key", "float", "PRNG key", "jax.random.key", TypeError,
    ),
    "capture as a string": Refusal(
        lambda: apply(capture="weights"), "capture", "'weights'", "tuple", r"\('weights',\)", TypeError
    ),
    "tree without heads": Refusal(
        lambda: PLAIN.apply({n: v for n, v in PARAMS.items() if n != "heads"}, X_Q),
        "params", "query, key, value, out", "expected `heads`", "init",
    ),
    "scale": Refusal(lambda: build(scale=float("nan")), "scale", "nan", "finite", ""),
    "negative batch": Refusal(lambda: ja.ledger(PLAIN, -1, Q, K), "ledger: batch", "-1", "at least 0", ""),
    "no stream for dropout": Refusal(
        lambda: ja.MultiHeadAttention(HEADS, MODEL, dropout_rate=0.5, rngs=nnx.Rngs(params=0)),
        "rngs", "params", "no stream for dropout", r"dropout=\.\.\.",
    ),
}  # fmt: skip

MODULE = {
    "values without keys": Refusal(lambda: module()(X_Q, None, X_KV), "inputs_v", "given", "inputs_k", "Fix"),
    "no mode": Refusal(lambda: module(dropout_rate=0.5)(X_Q), "deterministic", "None", "True.*False", "Fix"),
}

REFUSALS = {
    f"{group}: {name}": refusal
    for group, table in {
        "widths": WIDTHS, "sizes": SIZES, "options": OPTIONS, "variants": VARIANTS,
        "masks": MASKS, "bias": BIASES, "calls": CALLS, "module": MODULE,
    }.items()
    for name, refusal in table.items()
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_the_error_says_what_where_and_how_to_mend_it(name):
    refusal = REFUSALS[name]
    with pytest.raises(refusal.error) as caught:
        refusal.call()
    assert type(caught.value) is refusal.error
    message = str(caught.value)
    for part in ("argument", "got", "expected", "fix"):
        pattern = getattr(refusal, part)
        assert re.search(pattern, message, re.DOTALL), f"{part} ({pattern}) is not in: {message}"


def test_unknown_arguments_are_not_swallowed():
    for call in (
        lambda: ja.HeadSpec(model=MODEL, heads=HEADS, num_kv_heads=2),  # pyright: ignore[reportCallIssue]
        lambda: apply(X_Q, X_KV, msk=None),
        lambda: module(dropout=0.1),
        *(lambda make=make: make(ranks=2) for make in variants.VARIANTS.values()),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call()


def test_an_unknown_variant_is_a_key_error():
    with pytest.raises(KeyError, match="mha2"):
        variants.VARIANTS["mha2"]


def test_a_float16_overflow_is_an_error_that_names_the_fix():
    params = jax.tree.map(lambda leaf: 1e3 * jnp.ones_like(leaf, jnp.float16), PARAMS)
    with pytest.raises(FloatingPointError, match=r"float16.*65504.*Fix: bfloat16 or float32"):
        PLAIN.apply(params, jnp.ones((Q, MODEL), jnp.float16))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    y = PLAIN.apply(wide, jnp.ones((Q, MODEL), jnp.bfloat16))[0]
    assert np.all(np.isfinite(np.asarray(y, np.float32)))


def test_moh_gates_of_bad_scores_are_never_nan():
    attn = build(variants.moh(shared=1, top_k=2))
    params = attn.init(jax.random.key(0))
    kernel = params["heads"]["moh"]["routed"]
    for bad in (
        kernel.at[:, 0].set(jnp.nan),
        jnp.full_like(kernel, jnp.nan),
        jnp.zeros_like(kernel),
    ):
        own = {**params["heads"]["moh"], "routed": bad}
        gate = attn.query_side({**params, "heads": {"moh": own}}, X_Q).gate[..., 0]
        np.testing.assert_array_equal((gate != 0).sum(-1), 3)
        assert np.all(np.isfinite(gate))


# What is unusual and right.


@pytest.mark.parametrize("engine", ["reference", "dense", "blocked"])
@pytest.mark.parametrize("name", sorted(cases.ARGUMENTS))
@pytest.mark.heavy
class TestUnusualShapes:
    def call(self, name, engine):
        spec = ja.HeadSpec(model=6, heads=2, d_qk=5, d_v=5, bias_out=True)
        attn, params = cases.variant(name, spec)

        @jax.jit
        def out(x_q, x_kv):
            return attn.apply(params, x_q, x_kv, engine=engine)[0]

        return out, params

    def test_length_one_batch_one_and_no_batch_axis(self, name, engine):
        out, _ = self.call(name, engine)
        x_q, x_kv = jnp.asarray(cases.fill((3, 5, 6), 1)), jnp.asarray(cases.fill((3, 7, 6), 2))
        want = out(x_q, x_kv)
        for b in range(3):
            np.testing.assert_allclose(out(x_q[b], x_kv[b]), want[b], atol=1e-12)
        np.testing.assert_allclose(out(x_q[1:2], x_kv[1:2]), want[1:2], atol=1e-12)
        np.testing.assert_allclose(out(x_q[:, 4:], x_kv), want[:, 4:], atol=1e-12)
        one = out(x_q, x_kv[:, :1])
        assert one.shape == want.shape and np.all(np.isfinite(one))
        assert np.max(np.abs(one - want)) > 1e-3

    def test_several_batch_axes(self, name, engine):
        out, _ = self.call(name, engine)
        x_q, x_kv = jnp.asarray(cases.fill((6, 5, 6), 1)), jnp.asarray(cases.fill((6, 7, 6), 2))
        got = out(x_q.reshape(2, 1, 3, 5, 6), x_kv.reshape(2, 1, 3, 7, 6))
        np.testing.assert_allclose(got.reshape(6, 5, 6), out(x_q, x_kv), atol=1e-12)
        mapped = jax.vmap(jax.vmap(out))(x_q.reshape(2, 3, 5, 6), x_kv.reshape(2, 3, 7, 6))
        np.testing.assert_allclose(mapped.reshape(6, 5, 6), out(x_q, x_kv), atol=1e-12)

    def test_zero_length_axes(self, name, engine):
        """No example and no query give no row; no key gives rows of the output bias."""
        out, params = self.call(name, engine)
        for batch, q_len, k_len in ((0, 5, 7), (2, 0, 7), (2, 5, 0)):
            x_q, x_kv = jnp.ones((batch, q_len, 6)), jnp.ones((batch, k_len, 6))
            y = out(x_q, x_kv)
            assert y.shape == (batch, q_len, 6)
            np.testing.assert_array_equal(y, jnp.broadcast_to(params["out"]["bias"], y.shape))


def test_masks_take_the_shapes_of_the_batch():
    """A mask of two batch axes, of none, and of axes of size one."""
    x = jnp.asarray(cases.fill((2, 3, 5, MODEL), 3))
    visible = np.random.default_rng(0).random((2, 3, 5, 5)) < 0.7
    got = apply(x, None, ja.explicit(visible, axes="b1 b2 q k"))[0]
    for b1, b2 in np.ndindex(2, 3):
        want = apply(x[b1, b2], None, ja.explicit(visible[b1, b2], axes="q k"))[0]
        np.testing.assert_allclose(got[b1, b2], want, atol=1e-12)
    alike = apply(x, None, ja.explicit(visible[:, :1], axes="b1 b2 q k"))[0]
    for b1, b2 in np.ndindex(2, 3):
        want = apply(x[b1, b2], None, ja.explicit(visible[b1, 0], axes="q k"))[0]
        np.testing.assert_allclose(alike[b1, b2], want, atol=1e-12)
