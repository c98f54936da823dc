"""Multiply-accumulates of a traced program: its dot products, inner bodies times their trips."""

import math

import jax
from jax.extend import core


def macs(function, *args) -> int:
    """Multiply-accumulates of all dot products in the program of `function(*args)`.

    A MAC is one multiply-accumulate of a contraction. Loops count their body once for each trip, a
    branch counts as its costliest arm. Shapes suffice; nothing is computed.

    Args:
        function: anything that `jax.make_jaxpr` takes.
        *args: arrays or `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: for a loop whose trips are not known from the program.

    Example:
        >>> import jax.numpy as jnp
        >>> macs(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 5)))
        30
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: core.Jaxpr) -> int:
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: core.JaxprEqn) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left, out = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))  # pyright: ignore[reportAttributeAccessIssue]  (operands of a dot product are arrays)
        return math.prod(out) * math.prod(left[axis] for axis in contracted)
    bodies = [_count(body) for body in _bodies(eqn)]
    if name == "cond":
        return max(bodies)
    if name == "while" and sum(bodies):
        raise ValueError("macs: a while loop with dot products has no known number of trips.")
    return sum(bodies) * (eqn.params["length"] if name == "scan" else 1)


def _bodies(eqn: core.JaxprEqn):
    """The programs inside an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
