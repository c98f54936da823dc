"""Laws 4, 5, 6, 8 and 12 for every variant on every engine: who reaches whom, and what lowers.

Every leaf is redrawn at order 1, so that a near-identity start hides nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from jax import export

import jaxattn as ja
import variants

B, T, M, HEADS = 2, 5, 11, 4

OPTIONS = {
    "mha": {},
    "mohsa": {"overlap": 2},
    "talking_heads": {"bias": True, "dynamic": ("pre_query", "post_key")},
    "dcmha": {"static": True},
    "moh": {"shared": 1, "top_k": 2},
    "collab": {"width": 12},
}
SPEC = {
    "model": M,
    "heads": HEADS,
    "d_qk": 6,
    "d_v": 3,
    "use_bias": True,
    "rotary": ja.Rotary(pairs="adjacent"),
}

pytestmark = pytest.mark.heavy
each_variant = pytest.mark.parametrize("name", variants.VARIANTS)
each_engine = pytest.mark.parametrize("engine", table.ENGINES)


@functools.cache
def made(name, **more):
    """An attention of the variant, its redrawn parameters, and states [b, t, m]."""
    attn = ja.attention(ja.HeadSpec(**SPEC | more), variants.VARIANTS[name](**OPTIONS[name]))
    rng = np.random.default_rng(7)
    return attn, table.drawn(attn, rng), rng.normal(size=(B, T, M))


def leaves_of(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def test_the_table_lists_every_variant_and_engine():
    """Law 13: a registered variant or engine without a row is an error."""
    assert set(OPTIONS) == set(variants.VARIANTS) == set(table.TAKES_GQA)
    assert {*table.ENGINES, *table.KERNELS, *table.ROUTED} == set(ja.ENGINES)


@each_engine
@each_variant
def test_is_causal_by_exact_zeros(name, engine):
    """Law 5: the output at i has zero gradient to later inputs, and some to earlier ones."""
    attn, params, x = made(name)
    rows = table.jit(
        jax.jacrev(lambda x: attn.apply(params, x, mask=ja.causal(), engine=engine)[0].sum((0, 2)))
    )(x)  # [i, b, j, m]
    reach = np.abs(np.asarray(rows)).max((1, 3))
    for i in range(T):
        assert (reach[i, i + 1 :] == 0).all()
        assert reach[i, : i + 1].max() > 0


@each_engine
@each_variant
def test_padding_rows_have_no_influence_even_as_nan(name, engine):
    """Law 4: declared invalid rows may hold NaN or inf; nothing finite changes, in any gradient."""
    attn, params, x = made(name)
    valid = jnp.array([[True] * T, [True, True, False, True, False]])
    mask = ja.causal() & ja.padding(valid)

    def loss(params, x):
        y, aux = attn.apply(params, x, mask=mask, engine=engine)
        return jnp.where(valid[..., None], y, 0).sum() + aux.total()

    step = table.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    want, (want_params, want_x) = step(params, x)
    for poison in (np.nan, np.inf):
        bad = np.where(valid[..., None], x, poison)
        got, (got_params, got_x) = step(params, bad)
        assert got == want
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got_params, want_params))
        assert (np.asarray(got_x)[~np.asarray(valid)] == 0).all()
        assert np.isfinite(got_x).all()
    assert np.abs(want_x).max() > 0


@each_engine
@each_variant
def test_a_hidden_pair_has_no_influence(name, engine):
    """Law 4: a key hidden by a mask that is no padding keeps its value and gradient out."""
    attn, params, x = made(name)
    hidden = jnp.ones((T, T), bool).at[:3, 4].set(False)
    mask = ja.explicit(hidden, axes="q k")
    source = np.random.default_rng(3).normal(size=(B, T, M))

    def heads(source):
        return attn.apply(params, x, source, mask, engine=engine)[0]

    out, moved = table.jit(heads)(source), source.copy()
    moved[:, 4] += 1.0
    changed = np.abs(np.asarray(table.jit(heads)(moved) - out)).max((0, 2))
    assert (changed[:3] == 0).all() and (changed[3:] > 0).all()
    grad = table.jit(jax.grad(lambda s: heads(s)[:, :3].sum()))(source)
    assert (np.asarray(grad)[:, 4] == 0).all() and np.abs(grad[:, :4]).min() > 0


@each_engine
@each_variant
def test_a_row_without_keys_gives_the_bias_and_zero_gradients(name, engine):
    """Law 6: heads are zero, the output is b_O, gradients are zero and finite."""
    attn, params, x = made(name)
    seen = jnp.ones((T, T), bool).at[2].set(False)
    mask = ja.explicit(seen, axes="q k")
    assert mask.dead_queries(T, T).reshape(-1, T)[0].tolist() == [i == 2 for i in range(T)]
    out = lambda params, x: attn.apply(params, x, mask=mask, engine=engine)[0]
    y = table.jit(out)(params, x)
    assert (np.asarray(y)[:, 2] == params["out"]["bias"]).all()
    grads = table.jit(jax.grad(lambda p, x: out(p, x)[:, 2].sum(), argnums=(0, 1)))(params, x)
    for path, leaf in leaves_of(grads):
        inside = "'out'" in str(path) and "'bias'" in str(path)
        assert (np.asarray(leaf) == (B if inside else 0)).all(), path


@each_variant
def test_asking_and_transforming_never_change_the_function(name):
    """Law 8: captures, dropout at rate 0, jit, vmap, scan and remat give the same numbers."""
    attn, params, x = made(name)
    mask = ja.causal()
    plain = lambda x, **asked: attn.apply(params, x, mask=mask, **asked)[0]
    want = plain(x)
    same = functools.partial(np.testing.assert_allclose, desired=want, rtol=0, atol=1e-12)
    same(plain(x, capture=("logits", "mixed_logits", "weights", "mixed_weights", "heads")))
    same(plain(x, dropout_key=jax.random.key(0)))
    same(table.jit(plain)(x))
    same(jax.vmap(plain)(x))
    same(jax.lax.scan(lambda carry, row: (carry, plain(row)), 0, x)[1])
    loss = lambda x: (plain(x) ** 2).sum()
    grads = [table.jit(jax.grad(f))(x) for f in (loss, jax.checkpoint(loss))]
    np.testing.assert_allclose(*grads, rtol=0, atol=1e-12)


@each_variant
def test_dropout_is_the_same_on_every_engine_and_number_of_keys(name):
    """Law 8: the draw depends on query row and head, not on the engine, its blocks, the keys."""
    attn, params, x = made(name, dropout=0.4, head_dropout=0.3)
    key = jax.random.key(5)

    def drawn(x, engine, mask):
        return table.jit(lambda x: attn.apply(params, x, mask=mask, engine=engine, dropout_key=key)[0])(x)

    want = drawn(x, "dense", ja.causal())
    for engine in table.ENGINES:
        np.testing.assert_allclose(drawn(x, engine, ja.causal()), want, atol=1e-12)
    longer = np.concatenate([x, x], axis=1)
    np.testing.assert_allclose(drawn(longer, "dense", ja.causal())[:, :T], want, atol=1e-12)
    assert np.abs(np.asarray(want - attn.apply(params, x, mask=ja.causal())[0])).max() > 0.01


# Law 12: lowering for accelerators, on this machine.


@each_engine
@each_variant
def test_lowers_for_cuda_and_tpu(name, engine):
    attn, params, x = made(name, dropout=0.1)
    params = table.cast(params, jnp.float32)
    key = jax.random.key(0)

    def loss(params, x, key):
        y, aux = attn.apply(params, x, mask=ja.causal(), engine=engine, dropout_key=key)
        return y.sum() + aux.total()

    x = jnp.asarray(x, jnp.float32)
    for function in (loss, jax.grad(loss)):
        exported = export.export(jax.jit(function), platforms=["cuda", "tpu"])(params, x, key)
        assert exported.platforms == ("cuda", "tpu")
