"""Law 4 for what was projected before: a row hidden from all queries has no influence, whatever it holds.

NaN, infinities, the type's maximum and what lies below it, in every array of a key side, give the outputs and
gradients of zeros there, to the bit; forward, reverse and forward mode. tests/conftest.py compiles without
optimisation, where no fused multiply-add hides anything.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from flax import nnx
from test_laws_structure import OPTIONS, SPEC

import jaxattn as ja
import variants
from jaxattn.linen import MultiHeadDotProductAttention

B, Q, K, H, D, V = 2, 5, 7, 4, 6, 3
SEEN = np.array([[True] * 5 + [False] * 2, [True, False, True, True, False, True, False]])
LARGEST = float(jnp.finfo(jnp.float32).max)
each_engine = pytest.mark.parametrize("engine", table.ENGINES)


def poisons(dtype):
    """What a hidden row may hold: no number, no finite one, the largest, and what products of it overflow."""
    largest = float(jnp.finfo(dtype).max)
    roots = [c * largest ** (1 / n) for n in (2, 4, 8) for c in (0.99, 1.01)]
    return (np.nan, np.inf, -np.inf, largest, -largest, *roots)


def filled(tree, value, shown=SEEN):
    """Every array [b, k, ...] of a tree with `value` in the rows that are not shown."""

    def one(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(shown.reshape(*shown.shape, *(1,) * (x.ndim - 2)), x, jnp.asarray(value, x.dtype))

    return jax.tree.map(one, tree)


def assert_same(got, want, what):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.isfinite(b).all()
        assert np.array_equal(a, b), (
            f"{what}: {jax.tree_util.keystr(path)} is {a[a != b][:3]}, not {b[a != b][:3]}"
        )


def derivatives(function, *operands):
    """A program of the output, the gradients of all operands, and the derivative along some direction."""
    rng = np.random.default_rng(8)
    along = lambda tree: jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)
    ways, cotangent = along(operands), along(jax.eval_shape(function, *operands))

    @table.jit
    def run(*operands):
        out, back = jax.vjp(function, *operands)
        return out, back(cotangent), jax.jvp(function, operands, ways)[1]

    return run


# The form alone


def form(dtype, mixes):
    """Sides with every array that they can have, and the matrices of the mixes."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)

    def stages(rows):
        one = ja.Factors(
            draw(B, rows, 2, 2, 1), draw(B, rows, 2, 1, 2), draw(B, rows, H), draw(B, rows, H, H)
        )
        return (one,) * mixes

    query = ja.QuerySide(draw(B, Q, H, D), stages(Q), stages(Q), gate=draw(B, Q, H, 1))
    key = ja.KeySide(draw(B, K, H, D), draw(B, K, H, V), draw(B, K, H), stages(K), stages(K))
    return query, key, (draw(H, H),) * mixes


def attend(query, key, matrices, mask=None, **more):
    coupling = ja.Coupling(0.5, *(tuple(map(ja.Mix, matrices)),) * 2)
    return ja.attend(query, key, coupling, mask, **more)[0]


FORMS = [
    pytest.param(dtype, mixes, engine, id=f"{dtype.__name__}-{mixes}_mixes-{engine}", marks=heavy)
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)
    for mixes in (0, 2)
    for engine in table.ENGINES
    if dtype == jnp.float32 or (mixes and engine != "reference")  # the loops are long to compile
    for heavy in [() if (dtype, mixes, engine) == (jnp.float32, 2, "dense") else pytest.mark.heavy]
]


@pytest.mark.parametrize("dtype, mixes, engine", FORMS)
def test_rows_that_a_side_denies_have_no_influence(dtype, mixes, engine):
    query, key, matrices = form(dtype, mixes)
    apply = lambda q, k, m: attend(q, k._replace(valid=jnp.asarray(SEEN)), m, engine=engine)
    run = derivatives(apply, query, key, matrices)
    want = run(query, filled(key, 0), matrices)
    assert max(np.abs(np.asarray(x, float)).max() for x in jax.tree.leaves(want[1][1])) > 0
    assert_same(filled(want[1][1], 0), want[1][1], "a hidden row has a gradient")
    for value in poisons(dtype):
        assert_same(run(query, filled(key, value), matrices), want, f"{value:.3g}")


HIDINGS = {
    "padding": lambda: ja.padding(SEEN),
    "lengths": lambda: ja.lengths(np.array([5, 4])),
    "explicit, no query axis": lambda: ja.explicit(SEEN, axes="b k"),
    "explicit, one for all examples": lambda: ja.explicit(SEEN.all(0), axes="k"),
    "explicit, hidden from each query": lambda: ja.explicit(SEEN[:, None] & some(Q, K), axes="b q k"),
    "explicit, and from each head": lambda: ja.explicit(SEEN[:, None, None] & some(H, Q, K), axes="b h q k"),
    "two of them": lambda: ja.causal(align="end") & ja.padding(SEEN) & ja.explicit(some(Q, K), axes="q k"),
    "either of two": lambda: ja.padding(SEEN) | ja.explicit(SEEN, axes="b k"),
}


def some(*shape):
    shown = np.random.default_rng(4).random(shape) < 0.7
    shown[..., 0] = True
    return shown


@pytest.mark.parametrize("hiding", HIDINGS)
def test_whatever_hides_a_row_it_has_no_influence(hiding):
    mask = HIDINGS[hiding]()
    shown = np.asarray(mask.table(Q, K)).any(axis=(-3, -2))
    shown = np.broadcast_to(shown, (B, K))
    assert not shown.all() and shown.any()
    query, key, _ = form(jnp.float32, 0)

    @table.jit
    def run(key):
        out, back = jax.vjp(lambda q, k: attend(q, k, (), mask, engine="blocked"), query, key)
        return out, back(jnp.ones_like(out)), attend(query, key, (), mask, engine="dense")

    want = run(filled(key, 0, shown))
    for value in (np.nan, np.inf, LARGEST):
        assert_same(run(filled(key, value, shown)), want, f"{value:.3g}")


@each_engine
def test_query_rows_that_are_not_valid_reach_no_other_row(engine):
    """NaN in a padded query: gradients of keys and of the other queries are those of zeros there."""
    query, key, matrices = form(jnp.float32, 1)
    shown = np.array([[True, True, False, True, False], [True] * 4 + [False]])
    apply = lambda q, k, m: attend(q._replace(valid=jnp.asarray(shown)), k, m, engine=engine)
    run = derivatives(apply, query, key, matrices)
    want = run(filled(query, 0, shown), key, matrices)
    for value in (np.nan, np.inf, LARGEST):
        got = run(filled(query, value, shown), key, matrices)
        assert_same(
            filled(got, 0, shown) if got is None else got[1][1:], want[1][1:], f"{value:.3g}: keys, mixes"
        )
        rows = lambda found: (
            found[0][shown],
            jax.tree.map(lambda x: x[shown], found[1][0]._replace(valid=None)),
        )
        assert_same(rows(got), rows(want), f"{value:.3g}: rows that are valid")


# Every variant


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["dense", "blocked"])
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_a_side_that_was_projected_before_and_a_source_have_no_influence_where_hidden(name, engine):
    """Through `attend` and `apply`; gradients of parameters, queries, side and source."""
    attn = ja.attention(ja.HeadSpec(**SPEC, softcap=3.0), variants.VARIANTS[name](**OPTIONS[name]))
    rng = np.random.default_rng(7)
    params = table.cast(table.drawn(attn, rng), jnp.float32)
    draw = lambda rows: jnp.asarray(rng.normal(size=(B, rows, SPEC["model"])), jnp.float32)
    x_q, source = draw(Q), draw(K)
    side, mask = attn.key_side(params, source), ja.explicit(SEEN, axes="b k")

    def both(params, x_q, side, source):
        before, _ = attn.attend(params, x_q, side, mask, engine=engine)
        now, aux = attn.apply(params, x_q, source, mask, engine=engine)
        denied = attn.key_side(params, source, valid=jnp.asarray(SEEN))
        return before, now, attn.attend(params, x_q, denied, engine=engine)[0], aux.total()

    run = derivatives(both, params, x_q, side, source)
    want = run(params, x_q, filled(side, 0), filled(source, 0))
    for value in (
        np.nan,
        np.inf,
        LARGEST,
        0.99 * LARGEST**0.5,
    ):
        got = run(params, x_q, filled(side, value), filled(source, value))
        assert_same(got, want, f"{value:.3g}")


# Caches and memories


@pytest.mark.parametrize("name", ["mha", "dcmha"])
def test_a_cache_row_that_a_mask_hides_may_hold_anything(name):
    attn = ja.attention(ja.HeadSpec(**SPEC), variants.VARIANTS[name](**OPTIONS[name]))
    rng = np.random.default_rng(7)
    params = table.cast(table.drawn(attn, rng), jnp.float32)
    x = jnp.asarray(rng.normal(size=(B, 5, SPEC["model"])), jnp.float32)
    cache = attn.append(params, attn.empty_cache(B, 6, dtype=jnp.float32), x[:, :4])
    shown = np.ones((B, 6), bool)
    shown[0, 1] = shown[1, 2] = False
    mask = ja.explicit(shown, axes="b k")

    @jax.jit
    def step(side, params):
        def loss(params, side):
            y, _, after = attn.decode(params, dataclasses.replace(cache, side=side), x[:, 4:], mask)
            return (y**2).sum(), (y, after.count)

        return jax.value_and_grad(loss, has_aux=True)(params, side)

    want = step(filled(cache.side, 0, shown), params)
    for value in (np.nan, np.inf, LARGEST):
        assert_same(step(filled(cache.side, value, shown), params), want, f"{value:.3g}")


# Modules


def test_both_faces_of_flax_take_a_raw_mask_with_nan_behind_it():
    mask, rng = jnp.asarray(SEEN)[:, None, None], np.random.default_rng(7)
    x_q, source = (jnp.asarray(rng.normal(size=(B, n, 8)), jnp.float32) for n in (Q, K))
    layer = ja.MultiHeadAttention(num_heads=4, in_features=8, decode=False, rngs=nnx.Rngs(0))
    face = MultiHeadDotProductAttention(num_heads=4)
    variables = face.init(jax.random.key(0), x_q, source)
    for value in (np.nan, np.inf, LARGEST):
        bad = filled(source, value)
        assert_same(layer(x_q, bad, mask=mask), layer(x_q, filled(source, 0), mask=mask), "nnx")
        loss = lambda v, s: (face.apply(v, x_q, s, mask=mask) ** 2).sum()
        assert_same(*(jax.value_and_grad(loss)(variables, s) for s in (bad, filled(source, 0))), "linen")
        loss = lambda m, s: (m(x_q, s, mask=mask) ** 2).sum()
        slopes = [nnx.value_and_grad(loss)(layer, s) for s in (bad, filled(source, 0))]
        assert_same(*(jax.tree.leaves(found) for found in slopes), "nnx gradients")


# What is not promised (docs/form.md)


def test_a_row_that_some_query_sees_is_no_hidden_row():
    """Its finite numbers reach those queries alone; NaN in it is the caller's, and may reach all."""
    query, key, _ = form(jnp.float32, 0)
    shown = np.ones((Q, K), bool)
    shown[:3, 4] = False
    run = jax.jit(lambda key: attend(query, key, (), ja.explicit(shown, axes="q k"), engine="dense"))
    far = key._replace(value=key.value.at[:, 4].set(1e6), key=key.key.at[:, 4].set(1e6))
    assert np.array_equal(run(far)[:, :3], run(key)[:, :3]) and not np.array_equal(run(far), run(key))
