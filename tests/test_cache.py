"""The cache: any split of a sequence equals the full pass; what does not fit is refused."""

import functools
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from golden_adapters import dcmha_layer
from golden_fixture import load

import jaxattn as ja
import variants

B, T, MODEL = 2, 9, 11
SPLITS = [(1,) * T, (4, 1, 1, 3), (T,)]
OPTIONS = {
    "mha": {},
    "mohsa": {"overlap": 2},
    "talking_heads": {"dynamic": ("pre_key", "post_query"), "bias": True},
    "dcmha": {"rank": 2, "qk_norm": "rms"},
    "moh": {"shared": 1, "top_k": 2},
    "collab": {"width": 12, "content_bias": False},
}
SPECS = {name: dict(rotary=ja.Rotary()) for name in OPTIONS} | {
    "mohsa": dict(rotary=ja.Rotary(pairs="adjacent")),
    "mha": dict(rotary=ja.Rotary(), kv_heads=2, qk_norm="layer", use_bias=True),
}


EVERY = [
    name if name in ("mha", "dcmha") else pytest.param(name, marks=pytest.mark.heavy)
    for name in variants.VARIANTS
]


@functools.cache
def made(name):
    spec = ja.HeadSpec(model=MODEL, heads=4, d_qk=6, d_v=3, **SPECS[name])
    attn = ja.attention(spec, variants.VARIANTS[name](**OPTIONS[name]))
    rng = np.random.default_rng(1)
    params = jax.tree.map(jnp.asarray, table.drawn(attn, rng))
    return attn, params, jnp.asarray(rng.normal(size=(B, T, MODEL)))


def new(attn, size=T, **named):
    return attn.empty_cache(B, size, dtype=jnp.float64, **named)


@functools.cache
def compiled(decode, **named):
    """One program for each length of a chunk, however often it is met."""
    return table.jit(functools.partial(decode, **named))


def run(attn, params, cache, x, split, **named):
    """The outputs of all chunks, each under jit, and the cache after them."""
    return cases.in_chunks(compiled(attn.decode, **named), params, cache, x, split)


@pytest.mark.parametrize("name", EVERY)
def test_law_7_any_split_equals_the_full_pass(name):
    attn, params, x = made(name)
    want, _ = attn.apply(params, x, mask=ja.causal())
    for size, split in ((T + 4, SPLITS[0]), *((T, split) for split in SPLITS)):
        got, cache = run(attn, params, new(attn, size), x, split)
        table.assert_close(got, want, 1e-12, f"{name} {split}")
        assert int(cache.count) == T and not cache.refused
    blocked, _ = run(attn, params, new(attn), x, (4, 5), engine="blocked")
    table.assert_close(blocked, want, 1e-12, "blocked")


@pytest.mark.parametrize("name", EVERY)
def test_a_ring_gives_what_a_window_sees(name):
    attn, params, x = made(name)
    want, _ = attn.apply(params, x, mask=ja.causal() & ja.window(3))
    for size, split in ((3, (1,) * T), (6, (4, 1, 3, 1))):
        got, cache = run(attn, params, new(attn, size, window=3), x, split)
        table.assert_close(got, want, 1e-12, f"{name} {split}")
        assert cache.size == size and int(cache.count) == T


@pytest.mark.heavy
def test_prompts_of_unequal_length_padded_on_either_side():
    """Each example equals itself alone; what padding rows hold, NaN included, reaches nothing."""
    attn, params, x = made("dcmha")
    prompt, lengths, decode = 5, (3, 5), compiled(attn.decode)
    alone = [attn.apply(params, x[i, : lengths[i] + 2], mask=ja.causal())[0] for i in range(B)]
    for left in (True, False):
        rows = jnp.full((B, prompt, MODEL), jnp.nan)
        valid = np.zeros((B, prompt), bool)
        for i, n in enumerate(lengths):
            place = slice(prompt - n, prompt) if left else slice(0, n)
            rows, valid[i, place] = rows.at[i, place].set(x[i, :n]), True
        positions = np.cumsum(valid, -1) - 1
        y, _, cache = decode(params, new(attn), rows, valid=valid, positions=positions)
        for i, n in enumerate(lengths):
            table.assert_close(y[i][valid[i]], alone[i][:n], 1e-12, "prompt")
        for step in range(2):
            at = np.array(lengths)[:, None] + step
            more = jnp.stack([x[i, n + step][None] for i, n in enumerate(lengths)])
            y, _, cache = decode(params, cache, more, positions=at)
            for i, n in enumerate(lengths):
                table.assert_close(y[i, 0], alone[i][n + step], 1e-12, "step")


@pytest.mark.heavy
def test_beams_are_reordered():
    attn, params, x = made("talking_heads")
    _, cache = run(attn, params, new(attn), x, (4,))
    beams = cache.reorder(jnp.array([1, 1]))
    y, _, _ = attn.decode(params, beams, x[:, 4:5])
    row = jnp.concatenate([x[1, :4], x[0, 4:5]])
    table.assert_close(y[0, 0], attn.apply(params, row, mask=ja.causal())[0][4], 1e-12, "beam")
    with pytest.raises(ValueError, match="no batch axis to reorder"):
        attn.empty_cache((), 3).reorder(jnp.array([0]))


@pytest.mark.parametrize("name", ["mha", "talking_heads"])
def test_rows_that_were_trimmed_or_reset_leave_nothing(name):
    attn, params, x = made(name)
    draft = x.at[:, 4:7].set(jnp.nan)
    _, cache = run(attn, params, new(attn), draft[:, :7], (4, 3))
    y, trimmed = run(attn, params, cache.trim(3), x[:, 4:], (3, 2))
    want = attn.apply(params, x, mask=ja.causal())[0]
    table.assert_close(y, want[:, 4:], 1e-12, "after a draft of three rows")
    assert trimmed.count == T
    y, _ = run(attn, params, cache.reset(), x, (4, 3, 2))
    table.assert_close(y, want, 1e-12, "after another sequence")
    assert cache.trim(99).count == 0 and not cache.trim(99).side.valid.any()
    with pytest.raises(ValueError, match="cache: trim of a ring .*Fix: go on with the cache from before"):
        new(attn, window=3).trim(1)
    for rows in (jnp.int64(3), np.int32(3), jnp.uint8(3)):
        shorter = jax.jit(ja.Cache.trim)(cache, rows)
        jax.tree.map(np.testing.assert_array_equal, shorter, cache.trim(3))
        assert [x.dtype for x in jax.tree.leaves(shorter)] == [x.dtype for x in jax.tree.leaves(cache)]


def test_what_is_stored_is_what_the_ledger_counts_and_mohsa_is_stored_narrow():
    for name in variants.VARIANTS:
        attn, _, _ = made(name)
        cache = attn.empty_cache(B, T)
        book = ja.ledger(attn, B, T, T)
        floats = [x for x in jax.tree.leaves(cache.side) if x.dtype == jnp.float32]
        assert sum(x.size for x in floats) == B * T * book.cache_elements
        assert cache.nbytes == 4 * B * T * (book.cache_elements + 1) + B * T
    assert made("mohsa")[0].empty_cache(B, T).side.key.shape == (B, T, 4, 6)


def test_decoding_has_gradients_and_runs_in_a_scan():
    attn, params, x = made("moh")

    def scanned(params):
        def step(cache, row):
            y, _, cache = attn.decode(params, cache, row[:, None])
            return cache, y[:, 0]

        return jnp.sin(jax.lax.scan(step, new(attn), jnp.moveaxis(x, 1, 0))[1]).sum()

    def whole(params):
        return jnp.sin(attn.apply(params, x, mask=ja.causal())[0]).sum()

    got, want = (table.jit(jax.grad(loss))(params) for loss in (scanned, whole))
    jax.tree.map(lambda a, b: table.assert_close(a, b, 1e-11, "gradient"), got, want)


class TestRefusals:
    def test_a_full_cache_refuses_and_keeps_its_rows(self):
        attn, params, x = made("mha")
        _, full = run(attn, params, new(attn, 4), x, (4,))
        with pytest.raises(ValueError, match="4 of 4 rows are taken, 1 more do not fit.*window="):
            attn.append(params, full, x[:, 4:5])
        decode = compiled(attn.decode)
        y, _, after = decode(params, full, x[:, 4:5])
        assert np.isnan(y).all() and after.refused and int(after.count) == 4
        jax.tree.map(np.testing.assert_array_equal, after.side, full.side)
        y, _, _ = decode(params, after, x[:, :1])
        assert np.isnan(y).all()
        y, _, long = decode(params, new(attn, 4), x)
        assert np.isnan(y).all() and long.refused
        y, _, again = attn.decode(params, after.reset(), x[:, :4])
        table.assert_close(y, attn.apply(params, x[:, :4], mask=ja.causal())[0], 1e-12, "reset")
        assert not again.refused

    def test_rows_that_were_kept_come_back_after_a_refusal_under_jit(self):
        """Each operation that clears a refusal keeps what it says, under jit and outside of it."""
        attn, params, x = made("mha")
        want = attn.apply(params, x, mask=ja.causal())[0]
        decode = compiled(attn.decode)
        _, cache = run(attn, params, new(attn, 5), x, (4,))
        _, _, refused = decode(params, cache, x[:, 4:7])
        for how, rows in ((ja.Cache.resume, 4), (lambda c: c.trim(0), 4), (lambda c: c.trim(3), 1)):
            for clear in (how, jax.jit(how)):
                after = clear(refused)
                assert not after.refused and int(after.count) == rows
                assert jax.tree.structure(after) == jax.tree.structure(cache)
                y, _, _ = decode(params, after, x[:, rows : rows + 1])
                table.assert_close(y, want[:, rows : rows + 1], 1e-12, "the next row")
        wide = jax.jit(lambda c: c.grow(T))(refused)
        y, cache = run(attn, params, wide, x[:, 4:], (3, 2))
        table.assert_close(y, want[:, 4:], 1e-12, "in a larger cache")
        assert cache.size == T and int(cache.count) == T and not cache.refused
        with pytest.raises(ValueError, match="did not fit and was not written; 4 of 5 rows are kept.*resume"):
            attn.append(params, refused, x[:, 4:5])
        y, _, _ = attn.decode(params, refused.resume(), x[:, 4:5])
        table.assert_close(y, want[:, 4:5], 1e-12, "eagerly")

    def test_a_refusal_is_cleared_inside_a_scan(self):
        """Chunks of 2 into a cache of 5: those that do not fit leave the rows before them as they are."""
        attn, params, x = made("mha")

        def step(cache, rows):
            y, _, cache = attn.decode(params, cache, rows)
            return cache.resume(), (y, cache.refused)

        chunks = jnp.stack([x[:, :2], x[:, 2:4], x[:, 4:6], x[:, 4:6]])
        cache, (_, refused) = table.jit(lambda c: jax.lax.scan(step, c, chunks))(new(attn, 5))
        assert refused.tolist() == [False, False, True, True] and int(cache.count) == 4
        y, _, _ = attn.decode(params, cache, x[:, 4:5])
        table.assert_close(y, attn.apply(params, x, mask=ja.causal())[0][:, 4:5], 1e-12, "after it")

    def test_examples_of_a_vmap_are_refused_resumed_trimmed_and_reordered_one_by_one(self):
        attn, params, x = made("mha")
        one = attn.empty_cache((), 5, dtype=jnp.float64)
        rows = lambda i, n: x[i % B, :n]
        ragged = [attn.decode(params, one, rows(i, n))[2] for i, n in ((0, 2), (1, 4))]
        both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ragged)
        step = table.jit(jax.vmap(attn.decode, in_axes=(None, 0, 0)))
        more = jnp.stack([x[0, 2:4], x[1, 4:6]])
        y, _, after = step(params, both, more)
        assert after.refused.tolist() == [False, True] and after.count.tolist() == [4, 4]
        assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()
        want = [attn.apply(params, x[i], mask=ja.causal())[0] for i in range(B)]
        for resumed in (after.resume(), jax.vmap(ja.Cache.resume)(after), after.trim(0)):
            y, _, _ = step(params, resumed, jnp.stack([x[0, 4:5], x[1, 4:5]]))
            table.assert_close(y[:, 0], jnp.stack([want[0][4], want[1][4]]), 1e-12, "resumed")
        for short in (after.trim(jnp.array([1, 3])), jax.vmap(ja.Cache.trim)(after, jnp.array([1, 3]))):
            assert short.count.tolist() == [3, 1] and not short.refused.any()
            y, _, _ = step(params, short, jnp.stack([x[0, 3:4], x[1, 1:2]]))
            table.assert_close(y[:, 0], jnp.stack([want[0][3], want[1][1]]), 1e-12, "trimmed")
        turned = after.reorder(jnp.array([1, 0]))
        assert turned.refused.tolist() == [True, False]
        y, _, _ = step(params, turned.resume(), jnp.stack([x[1, 4:5], x[0, 4:5]]))
        table.assert_close(y[:, 0], jnp.stack([want[1][4], want[0][4]]), 1e-12, "reordered")
        y, _, wide = step(params, after.grow(8), jnp.stack([x[0, 4:6], x[1, 4:6]]))
        assert wide.count.tolist() == [6, 6] and wide.batch == (2,)
        table.assert_close(y, jnp.stack([w[4:6] for w in want]), 1e-12, "grown")
        with pytest.raises(ValueError, match=r"count has shape \(2,\), one for each example of a vmap"):
            attn.decode(params, after.resume(), x[:, :1])

    def test_trim_grow_and_reorder_of_what_cannot_be(self):
        attn, params, x = made("mha")
        cache = attn.append(params, new(attn), x[:, :4])
        for rows, error, message in (
            (-1, ValueError, "trim of -1 rows.*at least 0"),
            (1.0, TypeError, "rows is float64 of shape"),
            (True, TypeError, "rows is bool"),
            (jnp.array([1, 2]), TypeError, r"of shape \(2,\), expected one integer.*vmap"),
        ):
            with pytest.raises(error, match=message):
                cache.trim(rows)
        traced = jax.jit(ja.Cache.trim)(cache, -1)
        assert traced.refused and int(traced.count) == 4
        jax.tree.map(np.testing.assert_array_equal, traced.side, cache.side)
        with pytest.raises(ValueError, match="grow to 4 rows, expected at least 9"):
            cache.grow(4)
        with pytest.raises(ValueError, match="grow of a ring for a window of 3"):
            new(attn, window=3).grow(20)
        with pytest.raises(
            ValueError, match=r"reorder: index \[0, 2\], expected rows of the first batch axis, 0 to 1"
        ):
            cache.reorder(jnp.array([0, 2]))
        for index in (jnp.array(1), jnp.array([True, False]), jnp.array([[0, 1]])):
            with pytest.raises(TypeError, match="reorder: index is .* of shape"):
                cache.reorder(index)

    def test_another_attention_batch_or_type(self):
        attn, params, x = made("mha")
        cache = new(attn)
        other, other_params, _ = made("moh")
        with pytest.raises(ValueError, match="cache: made by identity, used by moh"):
            other.decode(other_params, cache, x)
        wide = ja.attention(ja.HeadSpec(model=MODEL, heads=4, d_qk=8, d_v=3))
        with pytest.raises(ValueError, match="made by identity, used by the same with other sizes"):
            wide.decode(params, cache, x)
        three = ja.attention(attn.spec, variants.dcmha(rank=3))
        two = ja.attention(attn.spec, variants.dcmha(rank=2))
        own = three.init(jax.random.key(0), jnp.float64)
        with pytest.raises(ValueError, match=r"cache: made by dcmha\(\), used by dcmha\(rank=3\)"):
            three.append(own, new(two), x)
        with pytest.raises(ValueError, match=r"cache: pre has shape.*options"):
            new(two).extend(three.key_side(own, x, jnp.ones((B, T), bool), jnp.zeros((B, T), jnp.int32)))
        with pytest.raises(ValueError, match=r"batch axes are \(2,\), those of the states \(1,\)"):
            attn.append(params, cache, x[:1])
        with pytest.raises(
            TypeError, match=r"key is float32, the rows that came make float64.*dtype=float64"
        ):
            attn.append(params, attn.empty_cache(B, T), x)

    def test_sizes_that_cannot_be(self):
        attn, params, x = made("mha")
        with pytest.raises(ValueError, match="size = 0"):
            attn.empty_cache(B, 0)
        with pytest.raises(ValueError, match="window = 5 of size = 4.*window \\+ chunk - 1"):
            attn.empty_cache(B, 4, window=5)
        with pytest.raises(
            ValueError, match="3 rows at once in a ring of 4 rows for a window of 3.*at most 2"
        ):
            attn.append(params, new(attn, 4, window=3), x[:, :3])


def test_dcmha_decode_equals_the_official_steps():
    """Caiyun-AI/DCFormer: prefill of four rows, then `_generate_fast` row by row."""
    fixture = load(Path(__file__).parent / "golden", "dcmha_decode")
    official = fixture.official()
    spec, transform, tree = dcmha_layer(fixture, official)
    attn = ja.attention(spec, transform)
    x = fixture.rows(official, "in.x")
    cache = attn.empty_cache(x.shape[:-2], x.shape[-2], dtype=x.dtype)
    prompt = fixture.settings["prefill_len"]
    split = (prompt, *(1 for _ in range(prompt, x.shape[-2])))
    y, cache = run(attn, tree, cache, x, split)
    error = np.abs(y - fixture.expected("out.y")).max()
    assert error <= fixture.meta["tolerance"]["out_max_abs"]
    np.testing.assert_allclose(cache.side.value, fixture.expected("mid.v_cache"), atol=1e-12)
