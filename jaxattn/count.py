"""Multiply-accumulates of a traced program: its dot products, each body of a loop times its trips."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

# Products of matrices whose number is not in the program.
UNKNOWN = ("pallas_call", "ragged_dot", "ragged_dot_general")


class Uncounted(ValueError):
    """A program whose products cannot be counted."""


class Traced(NamedTuple):
    """A program that was traced by `trace_named`.

    Attributes:
        shapes: what it returns, as shapes.
        changed: the names of results that are not simply one of its arguments.
        macs: multiply-accumulates, by the names of the results that depend on the dot product.
    """

    shapes: dict[str, Any]
    changed: frozenset[str]
    macs: Counter[frozenset[str]]


def macs(function: Callable[..., Any], *args: Any) -> int:
    """Multiply-accumulates of all dot products (and convolutions) in the program of `function(*args)`.

    A MAC is one multiply-accumulate of a contraction. Loops count their body once for each trip, a
    branch counts as its costliest arm. Shapes suffice; nothing is computed.

    Args:
        function: anything that `jax.make_jaxpr` takes.
        *args: arrays or `jax.ShapeDtypeStruct`.

    Raises:
        Uncounted: for a loop whose trips are not known from the program, a Pallas kernel, a ragged product.

    Example:
        >>> import jax.numpy as jnp
        >>> macs(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 5)))
        30
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def trace_named(function: Callable[..., dict[str, Any]], *args: Any) -> Traced:
    """The program of a function that returns trees by name: which of them it changes, and what each costs.

    A result is unchanged where it is the very value that came in, whatever its shape.

    Example:
        >>> import jax.numpy as jnp
        >>> found = trace_named(lambda x, w: {"x": x, "y": x @ w}, jnp.ones((2, 3)), jnp.ones((3, 3)))
        >>> found.changed, found.macs
        (frozenset({'y'}), Counter({frozenset({'y'}): 18}))
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]]
    reach: dict[Any, frozenset[str]] = {}
    changed, came = set(), set(jaxpr.invars)
    for path, value in zip(paths, jaxpr.outvars, strict=True):
        if isinstance(value, core.Literal) or value not in came:
            changed.add(path[0].key)
        if isinstance(value, core.Var) and value not in came:
            reach[value] = reach.get(value, frozenset()) | {path[0].key}
    counted: Counter[frozenset[str]] = Counter()
    for eqn in reversed(jaxpr.eqns):
        names = frozenset().union(*(reach.get(v, frozenset()) for v in eqn.outvars))
        products = _equation(eqn)
        if products:
            counted[names] += products
        for v in eqn.invars:
            if not isinstance(v, core.Literal):
                reach[v] = reach.get(v, frozenset()) | names
    return Traced(shapes, frozenset(changed), counted)


def _count(jaxpr: core.Jaxpr) -> int:
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: core.JaxprEqn) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left, out = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))  # pyright: ignore[reportAttributeAccessIssue]  (operands of a dot product are arrays)
        return math.prod(out) * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]  (arrays, as above)
        return math.prod(out) * math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    bodies = [_count(body) for body in _bodies(eqn)]
    if name == "cond":
        return max(bodies)
    if name == "while" and sum(bodies):
        raise Uncounted("a while loop with dot products has no known number of trips")
    if name in UNKNOWN:
        raise Uncounted(f"{name} has products whose number is not in the program")
    return sum(bodies) * (eqn.params["length"] if name == "scan" else 1)


def _bodies(eqn: core.JaxprEqn):
    """The programs inside an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
