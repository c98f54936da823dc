"""Public cases of the self-attention cache: decode parity and overflow."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, expected

import jaxattn as ja

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
