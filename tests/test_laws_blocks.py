"""Laws of structure where the blocked engine really cuts: many row blocks, key spans and tiles.

37 rows and 17 keys in blocks of 8 rows, spans of 8 keys and tiles of 11; exact zeros must survive it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table

import jaxattn as ja
import variants

pytestmark = pytest.mark.heavy

BATCH, ROWS, KEYS, MODEL, HEADS = 2, 37, 17, 11, 4
OPTIONS = {
    "mha": {},
    "mohsa": {"overlap": 2},
    "talking_heads": {"bias": True, "dynamic": ("pre_key", "post_query")},
    "dcmha": {"rank": 1},
    "moh": {"shared": 1, "top_k": 2},
    "collab": {"width": 7},
}
BOTH_MIXES = "talking_heads"

each_variant = pytest.mark.parametrize("name", variants.VARIANTS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    sizes = dict(BLOCK_BYTES=(1, 1), JOINED_BYTES=1, ROWS=(8, 8), GROUPS=(2, 2), GRAIN=8, TILE=11)
    for name, size in sizes.items():
        monkeypatch.setattr(f"jaxattn.engines.blocked.{name}", size)


@pytest.fixture
def passes_of_their_own(monkeypatch):
    """As with large results: each step apart from the others, sums in lanes. Long to compile."""
    monkeypatch.setattr("jaxattn.engines.steps.ALONE", 1)
    monkeypatch.setattr("jaxattn.engines.steps.LANES", 2)


@functools.cache
def made(name, **more):
    """An attention of the variant, its redrawn parameters, states of the target and the source."""
    spec = ja.HeadSpec(model=MODEL, heads=HEADS, d_qk=6, d_v=3, bias_out=True, **more)
    attn = ja.attention(spec, variants.VARIANTS[name](**OPTIONS[name]))
    rng = np.random.default_rng(7)
    x_q, x_kv = (jnp.asarray(rng.normal(size=(BATCH, n, MODEL))) for n in (ROWS, KEYS))
    params = jax.tree.map(jnp.asarray, table.drawn(attn, rng))
    return attn, params, x_q, x_kv


def pulled(name, mask, rows, source=None, engine="blocked"):
    """Output, and the gradient of each of these rows: to parameters, target and source."""
    attn, params, x_q, _ = made(name)

    def out(params, x_q, source):
        return attn.apply(params, x_q, source, mask, engine=engine)[0]

    @table.jit
    def run(params, x_q, source):
        y, pull = jax.vjp(out, params, x_q, source)
        return y, jax.lax.map(lambda u: pull(u), jnp.eye(ROWS)[rows][:, None, :, None] * jnp.ones_like(y))

    y, gradients = run(params, x_q, source)
    return y, jax.tree.map(np.asarray, gradients)


def test_a_registered_variant_has_its_options():
    assert set(OPTIONS) == set(variants.VARIANTS)


@each_variant
def test_is_causal_by_exact_zeros(name):
    """Law 5, for the last row of a block, the first of the next, and rows of the odd rest."""
    rows = np.array([0, 7, 8, 31, 32, 36])
    _, (_, gradient, _) = pulled(name, ja.causal(), rows)
    for reach, i in zip(np.abs(gradient).max((1, 3)), rows, strict=True):
        assert np.all(reach[i + 1 :] == 0)
        assert np.all(reach[: i + 1] > 0)


@each_variant
def test_a_window_reaches_its_keys_and_no_others(name):
    """Law 4 with blocks whose keys begin in the middle."""
    rows = np.array([3, 8, 17, 24, 36])
    mask = ja.window(5) & ja.explicit(np.arange(ROWS) % 9 != 4, axes="k")
    _, (_, gradient, _) = pulled(name, mask, rows)
    for reach, i in zip(np.abs(gradient).max((1, 3)), rows, strict=True):
        seen = [j for j in range(ROWS) if i - 5 < j <= i and j % 9 != 4]
        np.testing.assert_array_equal(np.flatnonzero(reach), sorted({*seen, i}))


@each_variant
def test_blocks_of_rows_without_keys_give_the_bias_and_zero_gradients(name):
    """Law 6: of 37 rows aligned at the end of 17 keys, the first 20 see nothing: a whole group."""
    mask = ja.causal(align="end")
    dead = ROWS - KEYS
    assert np.flatnonzero(mask.dead_queries(ROWS, KEYS)).tolist() == list(range(dead))
    _, params, _, source = made(name)
    rows = np.array([0, 8, dead - 1, dead, 36])
    y, (leaves, target, reach) = pulled(name, mask, rows, source)
    np.testing.assert_array_equal(y[:, :dead], np.broadcast_to(params["out"]["bias"], (BATCH, dead, MODEL)))
    bias = leaves["out"].pop("bias")
    np.testing.assert_array_equal(bias, BATCH)
    for leaf in (*jax.tree.leaves(leaves), target, reach):
        assert np.all(leaf[:3] == 0)
    for number, i in enumerate(rows[3:], 3):
        np.testing.assert_array_equal(np.abs(reach[number]).max((0, 2)) > 0, np.arange(KEYS) <= i - dead)


@pytest.mark.parametrize("k_len", [0, KEYS])
def test_no_visible_key_at_all_has_zero_gradients(k_len):
    """Law 6, where no group has any work: an empty key axis, and a window of nothing."""
    attn, params, x_q, x_kv = made(BOTH_MIXES)

    @table.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradient(params, x_q, x_kv):
        return attn.apply(params, x_q, x_kv, ja.window(0), engine="blocked")[0].sum()

    leaves, *states = gradient(params, x_q, x_kv[:, :k_len])
    np.testing.assert_array_equal(leaves["out"].pop("bias"), BATCH * ROWS)
    for leaf in (*jax.tree.leaves(leaves), *states):
        np.testing.assert_array_equal(leaf, 0)


@each_variant
def test_padding_reaches_nothing_even_as_nan(name):
    """Law 4: rows declared invalid in the middle of blocks, as keys and as queries."""
    attn, params, x, _ = made(name)
    valid = np.ones((BATCH, ROWS), bool)
    valid[0, 5:14] = valid[1, 30:] = False
    mask = ja.causal() & ja.padding(valid)

    @table.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def step(params, x):
        y, aux = attn.apply(params, x, mask=mask, engine="blocked")
        return jnp.where(valid[..., None], jnp.sin(y), 0).sum() + aux.total()

    want = step(params, jnp.where(valid[..., None], x, 0))
    got = step(params, jnp.where(valid[..., None], x, jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.all(np.asarray(got[1][1])[~valid] == 0) and np.isfinite(got[0])


def assert_trees_close(got, want, what):
    """To the largest value of the whole tree: a leaf along a null direction holds rounding alone."""
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (got, want)]
    table.assert_close(*flat, 1e-12, what)


@pytest.mark.usefixtures("passes_of_their_own")
@each_variant
def test_dropout_does_not_depend_on_the_blocks(name):
    """Law 8: attention and head dropout, output and gradients, cut or whole."""
    attn, params, x, _ = made(name, dropout=0.4, head_dropout=0.3)

    def step(engine):
        def loss(params, x):
            y = attn.apply(params, x, mask=ja.window(12), engine=engine, dropout_key=jax.random.key(3))[0]
            return jnp.sin(y).sum(), y

        return table.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    (got, y), (want, want_y) = step("blocked"), step("dense")
    table.assert_close(y, want_y, 1e-12, "output")
    assert_trees_close(got, want, "gradient")


@pytest.mark.parametrize("joined", [1, 2**20])
def test_heads_take_turns_with_what_is_theirs(joined, monkeypatch):
    """Key heads one by one and all together, with a bias and a mask by head, positions, dropout: as dense."""
    monkeypatch.setattr("jaxattn.engines.blocked.JOINED_BYTES", joined)
    attn = ja.attention(ja.HeadSpec(model=MODEL, heads=6, kv_heads=3, d_qk=6, d_v=3, dropout=0.3))
    rng = np.random.default_rng(9)
    params = table.drawn(attn, rng)
    x_q, x_kv = (jnp.asarray(rng.normal(size=(BATCH, n, MODEL))) for n in (ROWS, KEYS))
    seen = ja.explicit(rng.random((BATCH, 6, ROWS, KEYS)) < 0.6, axes="b h q k")
    at = (jnp.asarray(rng.integers(0, 40, (BATCH, ROWS))), jnp.asarray(rng.integers(0, 40, (BATCH, KEYS))))
    bias = rng.normal(size=(BATCH, 6, 1, KEYS))

    def step(engine):
        def loss(params, x_q, x_kv, bias):
            named = dict(bias=bias, positions=at, dropout_key=jax.random.key(3), engine=engine)
            y, _ = attn.apply(params, x_q, x_kv, seen & ja.causal(), **named)
            return jnp.sin(y).sum(), y

        return table.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(params, x_q, x_kv, bias)

    (got, y), (want, want_y) = step("blocked"), step("dense")
    table.assert_close(y, want_y, 1e-12, "output")
    assert_trees_close(got, want, "gradient")


@pytest.mark.usefixtures("passes_of_their_own")
@each_variant
def test_forward_and_reverse_mode_are_adjoint(name):
    """Law 9 through the engine's own reverse pass: |<Jv,u> - <v,J'u>| <= 1e-14 |Jv| |u|."""
    attn, params, x_q, x_kv = made(name)
    arguments = (params, x_q, x_kv)
    mask = ja.causal(align="end") & ja.explicit(np.arange(KEYS) % 5 != 2, axes="k")

    def out(*arguments):
        return attn.apply(*arguments, mask, engine="blocked")[0]

    rng = np.random.default_rng(2)
    v, u = table.like(arguments, rng), rng.normal(size=x_q.shape)

    @table.jit
    def both_ways(v, u):
        return jax.jvp(out, arguments, v)[1], jax.vjp(out, *arguments)[1](u)

    pushed, pulled_back = both_ways(v, u)
    backward = sum(np.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (v, pulled_back)), strict=True))
    size = np.linalg.norm(pushed) * np.linalg.norm(u)
    assert size > 1
    assert abs(np.vdot(pushed, u) - backward) <= 1e-14 * size


def test_modes_nest_and_transforms_compose():
    """Hessian-vector products each way, vmap over parameters and masks, remat and scan, as dense."""
    attn, params, x, _ = made(BOTH_MIXES)
    hidden = jnp.asarray(np.random.default_rng(4).random((3, ROWS, ROWS)) < 0.6)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.9 * leaf, 1.1 * leaf]), params)
    u = jnp.asarray(np.random.default_rng(5).normal(size=x.shape))

    def results(engine):
        def loss(x, params=params, mask=None):
            return jnp.sin(attn.apply(params, x, mask=mask, engine=engine)[0]).sum()

        @table.jit
        def run(x, u):
            masked = lambda p, m: loss(x[0], p, ja.explicit(m, axes="q k"))
            _, scanned = jax.lax.scan(lambda c, row: (c, jax.grad(loss)(row)), 0, x)
            return {
                "forward over reverse": jax.jvp(jax.grad(loss), (x,), (u,))[1],
                "reverse over forward": jax.grad(lambda x: jax.jvp(loss, (x,), (u,))[1])(x),
                "vmap of gradients": jax.vmap(jax.grad(masked))(stacked, hidden),
                "scan": scanned,
                "remat": jax.grad(jax.checkpoint(loss))(x),
            }

        return run(x, u)

    got, want = results("blocked"), results("dense")
    for name in want:
        assert_trees_close(got[name], want[name], name)
    table.assert_close(got["reverse over forward"], got["forward over reverse"], 1e-11, "Hessian")
