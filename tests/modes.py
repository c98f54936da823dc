"""What the tables of JAX's modes are run over: variants x engines, forward, gradient and decode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from jax.sharding import PartitionSpec

import jaxattn as ja
import variants

B, T, MODEL, SIZE = 2, 5, 12, 6  # rows of the cache: SIZE
OPTIONS = {
    "mha": {},
    "mohsa": {"overlap": 2},
    "talking_heads": {},
    "dcmha": {},
    "moh": {"shared": 1, "top_k": 2},
    "collab": {},
}
ENGINES = ("reference", "dense", "blocked", "auto")
CELLS = [(name, engine) for name in variants.VARIANTS for engine in ENGINES] + [("moh", "routed")]
cells = pytest.mark.parametrize(("name", "engine"), CELLS)
each_variant = pytest.mark.parametrize("name", variants.VARIANTS)
P = PartitionSpec


@functools.cache
def made(name, dtype=jnp.float32):
    """An attention of this variant with biases, rotary positions and head norms; parameters of order 1."""
    norm = None if name == "collab" else "rms"  # one basis for all heads: it refuses head norms
    spec = ja.HeadSpec(
        model=MODEL, heads=4, d_qk=4, d_v=4, use_bias=True, rotary=ja.Rotary(pairs="adjacent"), qk_norm=norm
    )
    attn = ja.attention(spec, variants.VARIANTS[name](**OPTIONS[name]))
    params = table.cast(table.drawn(attn, np.random.default_rng(4)), dtype)
    return attn, params, attn.empty_cache(B, SIZE, dtype=dtype)


def drawn(dtype=jnp.float32, batch=B, rows=T):
    """States, and how many rows of each example are real: none of the last one's."""
    x = np.random.default_rng(5).normal(size=(batch, rows, MODEL))
    n = np.arange(batch)[::-1] * (rows - 2)
    return jnp.asarray(x, dtype), jnp.asarray(n, jnp.int32)


def whole(attn, engine):
    """The output and its gradients, of (params, x, n)."""

    def loss(params, x, n):
        y, aux = attn.apply(params, x, mask=ja.causal() & ja.lengths(n), engine=engine)
        return (y * y).sum() + aux.total().astype(y.dtype), y

    def both(params, x, n):
        gradient, y = jax.grad(loss, (0, 1), has_aux=True)(params, x, n)
        return y, gradient

    return both


def steps(attn, engine):
    """A prompt of three rows and a step, of (params, cache, x)."""

    def decode(params, cache, x):
        prompt, _, cache = attn.decode(params, cache, x[:, :3], engine=engine)
        return prompt, attn.decode(params, cache, x[:, 3:4], engine=engine)[0]

    return decode


def cell(name, engine, dtype=jnp.float32):
    """Both functions of a cell with their arguments."""
    attn, params, cache = made(name, dtype)
    x, n = drawn(dtype)
    return (whole(attn, engine), (params, x, n)), (steps(attn, engine), (params, cache, x))


@functools.cache
def expected(name):
    """What the cells of a variant give without any mode."""
    return [jax.tree.map(np.asarray, table.jit(f)(*args)) for f, args in cell(name, "dense")]


def assert_near(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))


MASKS = {
    "causal": lambda n, ids: ja.causal(align="end"),
    "window": lambda n, ids: ja.window(2, ahead=1),
    "padding": lambda n, ids: ja.padding(ids > 0),
    "padding of all examples": lambda n, ids: ja.padding(ids[0] > 0),
    "lengths": lambda n, ids: ja.lengths(n),
    "lengths int8": lambda n, ids: ja.lengths(n.astype(jnp.int8)),
    "lengths int64": lambda n, ids: ja.lengths(n.astype(jnp.int64)),
    "one length": lambda n, ids: ja.lengths(n[0]),
    "segments": lambda n, ids: ja.segments(ids),
    "segments of two ranks": lambda n, ids: ja.segments(ids, ids[0]),
    "explicit": lambda n, ids: ja.explicit(ids > 0, axes="b k"),
    "explicit h q": lambda n, ids: ja.explicit(jnp.ones((4, 6), bool), axes="h q"),
    "not, or": lambda n, ids: ~ja.causal() | ja.padding(ids > 0),
    "all": lambda n, ids: (ja.causal() & ja.lengths(n)) | ja.padding(ids[0] > 0) & ja.segments(ids),
}
