"""Engine routed: the function of dense from active heads alone; what it refuses, what it counts."""

import jax
import jax.numpy as jnp
import jaxpr
import numpy as np
import pytest
import table
from jax import export

import jaxattn as ja
import variants
from jaxattn import route

pytestmark = pytest.mark.heavy

ROWS, KEYS, MODEL, HEADS = 37, 23, 11, 6
SEEN = np.random.default_rng(0).random((HEADS, ROWS, ROWS)) < 0.5
MASKS = {
    "none": None,
    "causal": ja.causal(),
    "window": ja.window(5) & ja.explicit(np.arange(ROWS) % 9 != 4, axes="k"),
    "segments": ja.segments(np.arange(ROWS) // 7) & ja.causal(),
    "padding": ja.padding(np.arange(ROWS) % 11 < 8),
    "by head": ja.explicit(SEEN, axes="h q k"),
    "rows without a key": ja.window(4) & ja.explicit(np.arange(ROWS) > 9, axes="q"),
    "nothing": ja.window(0),
}
SIZES = {
    "paper": (dict(), dict(shared=1, top_k=2)),
    "grouped": (
        dict(kv_heads=2, rotary=ja.Rotary(), qk_norm="rms", use_bias=True),
        dict(shared=2, top_k=2, gates="released"),
    ),
    "soft cap": (dict(softcap=1.5, scale=0.3), dict(shared=0, top_k=3)),
    "shared only": (dict(dropout=0.3, head_dropout=0.2), dict(shared=3, top_k=0)),
}
ROUTED = [case for case in table.TABLE["moh"] if table.attention(case).why_not_routed() is None]
ROUTED = [case for case in ROUTED if case.bias_heads is None]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a head, several reaches: as in long rows."""
    monkeypatch.setattr("jaxattn.route.LEAST", 4)
    monkeypatch.setattr("jaxattn.route.MOST", 8)
    monkeypatch.setattr("jaxattn.engines.routed.SLOTS", 4)
    monkeypatch.setattr("jaxattn.engines.routed.CHUNKS", (4, 64))
    monkeypatch.setattr("jaxattn.engines.routed.REACHES", 3)
    monkeypatch.setattr("jaxattn.engines.blocked.GRAIN", 4)


def made(name="paper"):
    spec, options = SIZES[name]
    attn = ja.attention(ja.HeadSpec(model=MODEL, heads=HEADS, d_qk=8, d_v=3, **spec), variants.moh(**options))
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, ROWS, MODEL)))
    return attn, jax.tree.map(jnp.asarray, table.drawn(attn, rng)), x


def assert_same(attn, params, x, mask, dropout_key=None):
    """Output, losses and gradients of every leaf and state, as dense gives them."""

    def step(engine):
        def loss(params, x):
            y, aux = attn.apply(params, x, mask=mask, engine=engine, dropout_key=dropout_key)
            return jnp.sin(y).sum() + aux.total(), y

        return table.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    (got, y), (want, want_y) = step("routed"), step("dense")
    table.assert_close(y, want_y, 1e-12, "output")
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (got, want)]
    table.assert_close(*flat, 1e-12, "gradient")


@pytest.mark.parametrize("case", ROUTED, ids=lambda case: case.name)
def test_law_1_equals_the_loops(case):
    attn = table.attention(case)
    inputs = table.draw(case)
    params = table.drawn(attn, np.random.default_rng(3))
    y, _ = table.jit(lambda p: table.call(case, attn, p, inputs, engine="routed"))(params)
    table.assert_close(y, table.loops(case, params, inputs), 1e-12, case.name)


@pytest.mark.parametrize("mask", MASKS)
def test_equals_dense_under_every_mask(mask):
    assert_same(*made(), MASKS[mask])


@pytest.mark.parametrize("name", SIZES)
def test_equals_dense_with_every_option(name):
    assert_same(*made(name), ja.causal(), jax.random.key(5))


@pytest.mark.parametrize("bias", [0.0, 1e3])
def test_no_pair_is_dropped_when_all_rows_choose_the_same_heads(bias):
    """A router that has collapsed, and one with equal scores everywhere: the lowest index wins."""
    attn, params, x = made()
    kernel = jnp.zeros_like(params["heads"]["moh"]["routed"]).at[0, 2].set(bias)
    params["heads"]["moh"]["routed"] = kernel
    assert_same(attn, params, x.at[..., 0].set(1.0), ja.causal())


def test_law_5_is_causal_by_exact_zeros():
    attn, params, x = made()
    rows = np.array([0, 3, 4, 20, 36])

    @table.jit
    def reach(x):
        _, pull = jax.vjp(lambda x: attn.apply(params, x[None], mask=ja.causal(), engine="routed")[0][0], x)
        return jax.lax.map(lambda u: pull(u)[0], jnp.eye(ROWS)[rows][..., None] * jnp.ones((ROWS, MODEL)))

    for gradient, i in zip(np.abs(reach(x[0])).max(-1), rows, strict=True):
        assert np.all(gradient[i + 1 :] == 0)
        assert np.all(gradient[: i + 1] > 0)


def test_hidden_rows_reach_nothing_even_as_nan():
    attn, params, x = made()
    mask = ja.causal() & ja.padding(np.arange(ROWS) % 5 != 2)
    step = table.jit(jax.grad(lambda x: jnp.sin(attn.apply(params, x, mask=mask, engine="routed")[0]).sum()))
    poisoned = x.at[:, np.arange(ROWS) % 5 == 2].set(jnp.nan)
    np.testing.assert_array_equal(step(poisoned), step(x.at[:, np.arange(ROWS) % 5 == 2].set(0)))


def test_law_9_forward_and_reverse_are_adjoint_and_modes_nest():
    attn, params, x = made()
    u = jnp.asarray(np.random.default_rng(2).normal(size=x.shape))
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.9 * leaf]), params)

    def results(engine):
        def loss(x, params=params):
            return jnp.sin(attn.apply(params, x, mask=ja.causal(), engine=engine)[0]).sum()

        @table.jit
        def run(x, u):
            return {
                "adjoint": jnp.vdot(jax.grad(loss)(x), u),
                "jvp": jax.jvp(loss, (x,), (u,))[1],
                "forward over reverse": jax.jvp(jax.grad(loss), (x,), (u,))[1],
                "reverse over forward": jax.grad(lambda x: jax.jvp(loss, (x,), (u,))[1])(x),
                "vmap": jax.vmap(jax.grad(loss))(jnp.stack([x, u]), twice),
                "remat": jax.grad(jax.checkpoint(loss))(x),
                "scan": jax.lax.scan(lambda c, row: (c, jax.grad(loss)(row)), 0, x)[1],
            }

        return run(x, u)

    got, want = results("routed"), results("dense")
    for name in want:
        table.assert_close(got[name], want[name], 1e-11, name)
    table.assert_close(got["adjoint"], got["jvp"], 1e-12, "adjoint")


def test_against_a_stored_source_in_half_precision_and_in_unusual_shapes():
    attn, params, x = made()
    source = x[:, :KEYS]
    side = attn.key_side(params, source)
    stored = table.jit(lambda p, x: attn.attend(p, x, side, engine="routed")[0])
    table.assert_close(stored(params, x), attn.attend(params, x, side, engine="dense")[0], 1e-12, "attend")
    half = [table.cast(tree, jnp.bfloat16) for tree in (params, x, source)]
    got, _ = table.jit(lambda *z: attn.apply(*z, engine="routed"))(*half)
    assert got.dtype == jnp.bfloat16
    table.assert_close(
        got.astype(float), attn.apply(*half, engine="dense")[0].astype(float), 3e-2, "bfloat16"
    )
    for shape in [(1,), (0, 5), (2, 1, 3)]:
        run = lambda x, engine: attn.apply(params, x, mask=ja.causal(), engine=engine)[0]
        both = table.jit(lambda x: (run(x, "routed"), run(x, "dense")))  # noqa: B023  (called in this turn of the loop)
        np.testing.assert_allclose(*both(jnp.ones((*shape, MODEL))), atol=1e-12)


def test_blocks_hold_every_pair_and_are_no_more_than_stated():
    rng = np.random.default_rng(4)
    for rows, active, heads in [(1, 1, 1), (5, 2, 3), (37, 3, 6), (64, 8, 8), (200, 2, 7)]:
        n, slots = route.block_shape(rows, active, heads)
        assert n <= -(-rows * active // slots) + heads
        for head in (
            np.argsort(rng.random((rows, heads)))[:, :active],
            np.broadcast_to(np.arange(active), (rows, active)),
        ):
            where = jax.jit(route.route, static_argnums=1)(head, heads)
            assert where.pair.shape == (n, slots)
            np.testing.assert_array_equal(np.sort(where.pair[where.filled]), np.arange(rows * active))
            of_slot = np.repeat(where.head, slots)
            np.testing.assert_array_equal(of_slot[where.slot], head)
            for block in np.asarray(where.pair):
                assert np.all(np.diff(block[block < rows * active]) > 0)


def test_law_11_the_ledger_counts_the_program_and_its_empty_slots():
    for name in SIZES:
        attn, params, x = made(name)
        book = ja.ledger(attn, 2, ROWS, ROWS, routed=True)
        program = jaxpr.trace(lambda p, x: attn.apply(p, x, engine="routed")[0], params, x)  # noqa: B023  (called in this turn of the loop)
        assert sum(book.macs.values()) == jaxpr.dot_macs(program)
        whole = ja.ledger(attn, 2, ROWS, ROWS)
        active = attn.sizes.active_heads
        assert book.heads == {"executed": active, "active": active} and whole.heads["executed"] == HEADS
        for term in ("query projection", "scores", "values", "output projection"):
            share = book.macs[term] / whole.macs[term]
            blocks = -(-ROWS * active // 4) + HEADS
            assert active / HEADS <= share <= blocks * 4 / (ROWS * HEADS)
        assert book.macs["key projection"] == whole.macs["key projection"]


def test_the_program_never_projects_or_scores_what_is_not_active():
    """No value of forward or backward is as large as all heads of all pairs."""
    attn, params, x = made()
    loss = lambda p, x: attn.apply(p, x, mask=ja.causal(), engine="routed")[0].sum()
    for value in jaxpr.values(jaxpr.trace(jax.grad(loss, (0, 1)), params, x)):
        assert np.prod(value.shape) < 2 * HEADS * ROWS * ROWS / 2


def test_law_12_lowers_for_every_platform():
    attn, params, x = made()
    step = jax.jit(jax.grad(lambda p: attn.apply(p, x, mask=ja.causal(), engine="routed")[0].sum()))
    assert export.export(step, platforms=["cuda", "tpu"])(params).platforms == ("cuda", "tpu")


MIXED = variants.talking_heads()
REFUSED = {
    "mha": (variants.mha(), "routes by the states alone"),
    "mixed": (ja.chain(variants.moh(), MIXED), "heads are mixed"),
    "query norms": (variants.moh(router="query_norm"), "routes by the states alone"),
    "wide": (ja.chain(variants.mohsa(overlap=1), variants.moh()), "mohsa works on the queries"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_routed_without_routing_is_refused_by_name(what):
    transform, reason = REFUSED[what]
    attn = ja.attention(ja.HeadSpec(model=MODEL, heads=HEADS, d_qk=4, d_v=4), transform)
    params = attn.init(jax.random.key(0))
    with pytest.raises(ValueError, match=f"engine 'routed' cannot run this attention: .*{reason}.*Fix"):
        attn.apply(params, jnp.ones((5, MODEL)), engine="routed")
    assert reason in attn.explain(1, 5, 5).refused["routed"]
    with pytest.raises(ValueError, match=reason):
        ja.ledger(attn, 1, 5, 5, routed=True)


def test_what_routed_cannot_hold_names_the_engines_that_can():
    attn, params, x = made()
    with pytest.raises(
        ValueError, match="no additive biases.*Fix: with every head held, one of reference, dense"
    ):
        attn.apply(params, x, bias=jnp.zeros((1, 1, ROWS)), engine="routed")
    with pytest.raises(ValueError, match="never holds weights"):
        attn.apply(params, x, capture=("weights",), engine="routed")
    record = attn.explain(1, 5, 5, engine="routed")
    assert record.chosen == "routed" and "[1, 5, 3, 8]" in record.shapes["query"]


def test_a_side_of_active_heads_goes_to_the_engine_that_takes_it():
    attn, params, x = made()
    query, key = attn.query_side(params, x, routed=True), attn.key_side(params, x)
    assert query.query.shape == (2, ROWS, 3, 8) and query.head.shape == (2, ROWS, 3)
    heads, _ = ja.attend(query, key, attn.coupling(params))
    assert heads.shape == (2, ROWS, 3, 3)
    whole, _ = ja.attend(attn.query_side(params, x), key, attn.coupling(params))
    held = np.take_along_axis(np.asarray(whole), np.asarray(query.head)[..., None], axis=2)
    table.assert_close(heads, held, 1e-12, "active heads")
    with pytest.raises(ValueError, match=r"'dense' cannot.*active heads alone.*one of routed"):
        ja.attend(query, key, attn.coupling(params), engine="dense")
    with pytest.raises(ValueError, match="without QuerySide.gate"):
        ja.attend(query._replace(gate=None), key, attn.coupling(params))
    with pytest.raises(ValueError, match="axis a"):
        ja.attend(query._replace(head=query.head[..., :2]), key, attn.coupling(params))
    with pytest.raises(TypeError, match=r"QuerySide.head: dtype is float.*integers"):
        ja.attend(query._replace(head=query.head * 1.0), key, attn.coupling(params))
