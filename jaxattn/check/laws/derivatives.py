"""Laws of derivatives, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import Outcome, distance, doubles, law, table
from jaxattn.check.subject import Call
from jaxattn.check.verdict import enable_x64


@law("behaviour", "<J v, u> = <v, J' u> in float64", "float64", "tracing")
def adjoint(subject, sizes):
    with enable_x64(True):
        sides, move = doubles(sizes, 0), doubles(sizes, 5)
        run = jax.jit(lambda *sides: subject.attend(Call(*sides)))
        out, pushed = jax.jvp(run, sides, move)
        u = jnp.asarray(np.random.default_rng(6).normal(size=out.shape), out.dtype)
        pulled = jax.vjp(run, *sides)[1](u)
        left, right = float(jnp.vdot(pushed, u)), _inner(pulled, move)
        size = float(jnp.linalg.norm(pushed) * jnp.linalg.norm(u))
        return Outcome(abs(left - right) / max(size, 1e-300), 1e-13)


@law(
    "behaviour",
    "the gradient is what the function does, by central differences in float64",
    "float64",
    "tracing",
)
def finite_differences(subject, sizes):
    with enable_x64(True):
        sides, move = doubles(sizes, 0), doubles(sizes, 5)
        loss = jax.jit(lambda *sides: jnp.sum(jnp.sin(subject.attend(Call(*sides)))))
        at = lambda step: float(loss(*(x + step * y for x, y in zip(sides, move, strict=True))))
        h = 1e-4  # the error of the five-point rule is of order h^4, of rounding eps / h
        want = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        got = _inner(jax.grad(loss, (0, 1, 2))(*sides), move)
        return Outcome(abs(got - want) / max(1.0, abs(want)), 1e-9)


@law("behaviour", "second derivatives exist, and are symmetric", "float64", "tracing")
def second_order(subject, sizes):
    with enable_x64(True):
        query, key, value = doubles(sizes._replace(b=1, q=max(3, sizes.q)), 0)
        loss = lambda x: jnp.sum(jnp.sin(subject.attend(Call(x.reshape(query.shape), key, value))))
        square = np.asarray(jax.jit(jax.jacfwd(jax.grad(loss)))(query.ravel()))
        off = distance(square, square.T)
        return Outcome(off if np.abs(square).max() > 0 else np.inf, 1e-10)


def _inner(a: Any, b: Any) -> float:
    return float(sum(jnp.vdot(x, y) for x, y in zip(a, b, strict=True)))


LAWS = table(
    adjoint,
    finite_differences,
    second_order,
)
