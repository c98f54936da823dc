"""Reads a traced program: its dot products with their trips, and every value it makes.

The ledger counts from shapes; this counts from the program, and knows nothing of attention.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core


def trace(function, *arguments):
    """The jaxpr of `function` at these arguments."""
    return jax.make_jaxpr(function)(*arguments).jaxpr


def _bodies(equation) -> list[Any]:
    """Every jaxpr held by an equation's parameters (pjit, remat, scan, cond, custom rules ...)."""
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, core.Jaxpr):
                found.append(item)
    return found


def _dot_macs(equation) -> int:
    contracted, _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted[0])


def dot_macs(jaxpr) -> int:
    """Multiply-accumulates of every `dot_general`; a body counts as often as it runs.

    A scan's body counts `length` times and a conditional as its dearest branch. A loop whose number
    of trips is not in the program is an error where its body multiplies matrices. A contraction over
    heads that blocked writes out as a sum counts its multiplications.
    """
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            total += _dot_macs(equation)
            continue
        if equation.params.get("name") == "_sum_over_heads":
            total += sum(_products(body) for body in _bodies(equation))
            continue
        inner = [dot_macs(body) for body in _bodies(equation)]
        if name == "cond":
            total += max(inner)
        elif name == "scan":
            total += equation.params["length"] * sum(inner)
        elif name == "while":
            assert not any(inner), f"a while loop of unknown trips holds {inner} MACs"
        else:
            total += sum(inner)
    return total


def _products(jaxpr) -> int:
    """Elements of every elementwise product."""
    own = sum(e.outvars[0].aval.size for e in jaxpr.eqns if e.primitive.name == "mul")
    return own + sum(_products(body) for e in jaxpr.eqns for body in _bodies(e))


def values(jaxpr) -> Iterator[Any]:
    """The abstract value of every result in the program, inner bodies included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval
        for body in _bodies(equation):
            yield from values(body)


def prime_factors(number: int) -> list[int]:
    """The prime factors of `number`, with repetition: what a reshape cannot hide."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
