"""Laws of derivatives, in float64: verdicts of the adjoint toolkit on one small call."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check import adjoint as toolkit
from jaxattn.check.law import Outcome, doubles, judged, law, of_sides, table
from jaxattn.check.verdict import enable_x64

AXES = {"query": "b q h d", "key": "b k h d", "value": "b k h v"}


@law("behaviour", "<J v, u> = <v, J' u> in float64", "float64", "tracing")
def adjoint(subject, sizes):
    with enable_x64(True):
        sides = toolkit.float64(doubles(sizes, 0))
        return judged(toolkit.dot_product(of_sides(subject), *sides, draws=2, limit=1e-13, axes=AXES))


@law(
    "behaviour",
    "the gradient is what the function does, by central differences in float64",
    "float64",
    "tracing",
)
def finite_differences(subject, sizes):
    with enable_x64(True):
        sides = toolkit.float64(doubles(sizes, 0))
        return judged(toolkit.finite_differences(of_sides(subject), *sides, draws=1, axes=AXES))


@law("behaviour", "forward and reverse mode give one Jacobian in float64", "float64", "tracing")
def forward_against_reverse(subject, sizes):
    with enable_x64(True):
        sides = doubles(sizes._replace(b=1), 0)
        run, of = of_sides(subject), (0, 1, 2)
        forward, reverse = (
            dict(zip(AXES, jax.jit(mode(run, of))(*sides), strict=True)) for mode in (jax.jacfwd, jax.jacrev)
        )
        axes = {name: f"out-b out-q out-h out-v {inputs}" for name, inputs in AXES.items()}
        return judged(toolkit.compare(forward, reverse, absolute=1e-12, axes=axes))


@law("behaviour", "second derivatives exist, and are symmetric", "float64", "tracing")
def second_order(subject, sizes):
    """<v, H u> = <u, H v>, of a loss of all that comes in, for directions u and v."""
    with enable_x64(True):
        sizes = sizes._replace(b=1, q=max(3, sizes.q))
        sides, *both = (doubles(sizes, seed) for seed in (0, 5, 6))
        run = of_sides(subject)
        slope = jax.grad(lambda sides: jnp.sum(jnp.sin(run(*sides))))
        curved = jax.jit(lambda v: jax.jvp(slope, (sides,), (v,))[1])
        u, v, of_u, of_v = (
            np.concatenate([np.ravel(x) for x in some]) for some in (*both, *map(curved, both))
        )
        size = float(np.linalg.norm(of_u) * np.linalg.norm(v))
        off = abs(float(v @ of_u - u @ of_v)) / size if size else np.inf
        return Outcome(off, 1e-10)


LAWS = table(
    adjoint,
    finite_differences,
    forward_against_reverse,
    second_order,
)
