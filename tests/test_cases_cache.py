"""Public cases of what is kept between calls: decode parity and overflow of the cache, reuse of cross K/V."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, expected

import jaxattn as ja
from jaxattn import CrossMemory, Identity, content_digest, expected_identity

pytestmark = pytest.mark.heavy

SPEC, PARAMS = cases.layer(CASES["PUB-12"]["input"])
ATTN = ja.attention(SPEC)
TOLERANCE = CASES["PUB-12"]["expect"]["tolerance"]


def with_rubbish(cache):
    """1e4 in every slot that is not used."""
    rubbish = lambda x: jnp.full_like(x, 1e4) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return dataclasses.replace(cache, side=jax.tree.map(rubbish, cache.side))


@pytest.mark.parametrize("flag", [None, ja.causal()], ids=["off", "on"])
@pytest.mark.parametrize("capacity", [6, 10])
@pytest.mark.parametrize("split", [(1,) * 6, (3, 1, 1, 1), (2, 2, 2)])
def test_pub_12_every_schedule_equals_the_full_pass(split, capacity, flag):
    """Causality holds in decoding whether or not the mask says it again."""
    x = jnp.asarray(cases.filled(CASES["PUB-12"]["input"]["x"]))
    want, _ = ATTN.apply(PARAMS, x, mask=ja.causal())
    np.testing.assert_allclose(want[:, 5], expected("PUB-12", "out[:,5]"), atol=TOLERANCE["float64"])
    traced = []

    @jax.jit
    def decode(params, cache, x):
        traced.append(x.shape[1])
        return ATTN.decode(params, cache, x, flag)

    cache = with_rubbish(ATTN.empty_cache(2, capacity, dtype=x.dtype))
    got, _ = cases.in_chunks(decode, PARAMS, cache, x, split)
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_allclose(got[0, 1], expected("PUB-12", "out[0,1]"), atol=TOLERANCE["float64"])
    assert sorted(traced) == sorted(set(split))


def test_pub_13_a_full_cache_refuses_the_write():
    x = jnp.asarray(cases.fill((1, 5, 8), 69))
    want, _ = ATTN.apply(PARAMS, x, mask=ja.causal())
    got, full = cases.in_chunks(ATTN.decode, PARAMS, ATTN.empty_cache(1, 4, dtype=x.dtype), x, (1,) * 4)
    np.testing.assert_allclose(got, want[:, :4], atol=1e-12)
    with pytest.raises(ValueError, match="4 of 4 rows are taken"):
        ATTN.decode(PARAMS, full, x[:, 4:])
    y, _, after = jax.jit(ATTN.decode)(PARAMS, full, x[:, 4:])
    assert np.isnan(y).all() and after.refused
    jax.tree.map(np.testing.assert_array_equal, after.side, full.side)
    again, cache = cases.in_chunks(ATTN.decode, PARAMS, after.reset(), x, (1,))
    np.testing.assert_allclose(again, want[:, :1], atol=1e-12)
    assert int(cache.count) == 1


PUB_14 = CASES["PUB-14"]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_pub_14_stored_kv_is_read_for_its_own_source_or_not_at_all(dtype):
    spec, params = cases.layer(PUB_14["input"])
    attn, atol = ja.attention(spec), PUB_14["expect"]["tolerance"][dtype]
    x_q, m1, m2 = (cases.filled(PUB_14["input"][name]) for name in ("x_q", "M1", "M2"))
    params, x_q, m1, m2 = jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, x_q, m1, m2))
    direct = {name: attn.apply(params, x_q, m)[0] for name, m in (("M1", m1), ("M2", m2))}
    for name, y in direct.items():
        assert y.dtype == dtype
        np.testing.assert_allclose(y[0, 0], PUB_14["expect"]["values"][f"out({name})[0,0]"], atol=atol)

    def named(source):
        return Identity("r", "s", content_digest(source), adapter="none", projection_version=0)

    def stored(source):
        memory = CrossMemory(attn)
        memory.bind(source, named(source))
        memory.project(params, projection_version=0)
        memory.attach(expected_identity(attn, params, source, named(source)))
        return memory

    one, two = (expected_identity(attn, params, m, named(m)) for m in (m1, m2))
    memory = stored(m1)
    reused = memory.attend(params, x_q, expected=one)[0]
    np.testing.assert_allclose(reused, direct["M1"], atol=atol)
    np.testing.assert_allclose(
        jax.jit(attn.attend)(params, x_q, memory.read(one))[0], direct["M1"], atol=atol
    )
    for read in (memory.read, lambda two: memory.attend(params, x_q, expected=two)):
        with pytest.raises(ValueError, match="memory_id is .*, expected"):
            read(two)
    assert memory.drift(two) == ("memory_id",)
    with pytest.raises(RuntimeError, match="read in INVALIDATED.*memory_id"):
        memory.read(one)
    np.testing.assert_allclose(stored(m2).attend(params, x_q, expected=two)[0], direct["M2"], atol=atol)

    swapped = stored(m1)
    swapped.share([1, 0])
    y, _ = swapped.attend(params, x_q[::-1], expected=one)
    np.testing.assert_allclose(y, direct["M1"][::-1], atol=atol)
    y, _ = attn.attend(params, x_q[::-1], jax.tree.map(lambda x: x[::-1], stored(m1).read(one)))
    np.testing.assert_allclose(y, direct["M1"][::-1], atol=atol)

    with pytest.raises(ValueError, match=r"batch axes b differ: query has \(1,\), key has \(2,\)"):
        stored(m1).attend(params, x_q[:1], expected=one)
    three = ja.attention(dataclasses.replace(spec, heads=3, kv_heads=3))
    other = three.init(jax.random.key(0), dtype)
    with pytest.raises(ValueError, match="key_heads is 2, expected 3, value_heads is 2, expected 3"):
        stored(m1).read(expected_identity(three, other, m1, named(m1)))
    with pytest.raises(ValueError, match="3 heads do not divide by 2"):
        three.attend(other, x_q, stored(m1).read(one))

    def through(m1):
        memory = CrossMemory(attn)
        memory.bind(m1, Identity("r", "s"))
        memory.project(params, projection_version=0, training=True)
        return jnp.sin(attn.attend(params, x_q, memory.consume(0))[0]).sum()

    got, want = (jax.grad(f)(m1) for f in (through, lambda m: jnp.sin(attn.apply(params, x_q, m)[0]).sum()))
    assert np.abs(want).max() > 0.01
    np.testing.assert_allclose(got, want, atol=atol)
