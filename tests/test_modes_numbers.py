"""Finite logits up to the type's largest: exact weights and derivatives, and no infinity on the way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn as ja
from jaxattn.engines import formula, steps

pytestmark = pytest.mark.heavy

M = {np.float32: np.finfo(np.float32).max, np.float64: np.finfo(np.float64).max}
TYPES = pytest.mark.parametrize("dtype", M, ids=["float32", "float64"])
ENGINES = pytest.mark.parametrize("engine", ["reference", "dense", "blocked"])

# Logits, of the type's largest number m; which of them are visible; their weights.
ROWS = {
    "an overflowing difference": (lambda m: [m, -m, 0], [1, 1, 1], [1, 0, 0]),
    "a tie at the largest": (lambda m: [m, m, -m], [1, 1, 1], [0.5, 0.5, 0]),
    "a tie at the lowest": (lambda m: [-m, -m, m], [1, 1, 0], [0.5, 0.5, 0]),
    "the lowest alone": (lambda m: [-m, 0, m], [1, 0, 0], [1, 0, 0]),
    "a tie": (lambda m: [2.0, 2.0, 2.0], [1, 1, 1], [1 / 3, 1 / 3, 1 / 3]),
    "a hidden one far above": (lambda m: [0, m, 500.0], [1, 0, 0], [1, 0, 0]),
    "a neighbour of the largest": (lambda m: [m, np.nextafter(m, 0), 0], [1, 1, 1], [1, 0, 0]),
    "none visible": (lambda m: [m, -m, 0], [0, 0, 0], [0, 0, 0]),
    "large and close": (lambda m: [1e4, 1e4, 1e4 - 800], [1, 1, 1], [0.5, 0.5, 0]),
}
each_row = pytest.mark.parametrize(("logits", "visible", "weights"), ROWS.values(), ids=ROWS)


def of_block(x, visible):
    """`blocked`: the weights as it finds them, and again from what it kept of the rows."""
    weights, known = steps.softmax(x, visible)
    return jnp.stack([weights, steps.softmax(x, visible, known)[0]])


SOFTMAX = {"dense": lambda x, visible: formula.softmax(x, visible)[None], "blocked": of_block}


@TYPES
@each_row
@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_weights_and_derivatives_at_the_edges_of_a_type(softmax, logits, visible, weights, dtype):
    x = jnp.asarray(np.array(logits(M[dtype]), dtype)[None, None])
    visible, want = jnp.array(visible, bool)[None, None], np.array(weights)
    row = lambda x: softmax(x, visible)[:, 0, 0]
    with jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit():
        got = row(x)
        reverse, forward = (jac(row)(x)[:, :, 0, 0] for jac in (jax.jacrev, jax.jacfwd))
        second = jax.jacfwd(jax.jacrev(row))(x)[:, :, 0, 0, :, 0, 0]
    slope = np.diag(want) - np.outer(want, want)
    # d2 w_i = w_i (d_ij d_ik - w_j d_ik - w_k d_ij - w_j d_jk + 2 w_j w_k)
    eye = np.eye(3)
    curve = np.einsum("i,ij,ik->ijk", want, eye - want, eye - want)
    curve -= np.einsum("i,jk->ijk", want, slope)
    for kind in range(len(got)):
        np.testing.assert_allclose(got[kind], want, atol=1e-6)
        np.testing.assert_allclose(reverse[kind], slope, atol=1e-6)
        np.testing.assert_allclose(forward[kind], slope, atol=1e-6)
        np.testing.assert_allclose(second[kind], curve, atol=1e-6)


@ENGINES
@TYPES
@each_row
def test_engines_at_the_edges_of_a_type(engine, logits, visible, weights, dtype):
    """Logits come as a bias: [h, q, k] = [1, 1, 3]."""
    bias = jnp.asarray(np.array(logits(M[dtype]), dtype)[None, None])
    side = jnp.zeros((3, 1, 2), dtype)
    value = jnp.asarray(np.eye(3)[:, None], dtype)
    mask = ja.explicit(np.array(visible, bool), axes="k")

    def heads(bias):
        query, key = ja.QuerySide(side[:1]), ja.KeySide(side, value)
        return ja.attend(query, key, ja.Coupling(scale=1.0), mask, bias=bias, engine=engine)[0][0, 0]

    with jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit():
        got, slope = heads(bias), jax.jacrev(heads)(bias)[:, 0, 0]
    want = np.array(weights)
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(slope, np.diag(want) - np.outer(want, want), atol=1e-6)


@ENGINES
def test_a_logit_that_is_not_finite_is_not_hidden_by_the_cap(engine):
    """NaN stays NaN; minus infinity hides its pair, also where a whole row is of it."""
    side, value = jnp.zeros((3, 1, 2)), jnp.asarray(np.eye(3)[:, None])
    call = functools.partial(
        ja.attend, ja.QuerySide(side[:1]), ja.KeySide(side, value), ja.Coupling(scale=1.0), engine=engine
    )
    heads = lambda *row: call(bias=jnp.array(row)[None, None])[0][0, 0]
    assert np.isnan(heads(0.0, jnp.nan, 0.0)).any()
    np.testing.assert_array_equal(heads(0.0, -jnp.inf, 0.0), [0.5, 0, 0.5])
    np.testing.assert_array_equal(heads(-jnp.inf, -jnp.inf, -jnp.inf), [0, 0, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_nothing_within_reach_is_left_out(dtype):
    assert jnp.exp(jnp.asarray(-formula.reach(dtype), dtype)) == 0
    assert formula.reach(dtype) < 1.02 * -np.log(np.finfo(dtype).smallest_subnormal.astype(np.float64))
