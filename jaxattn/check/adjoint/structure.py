"""The structure of a Jacobian: which slices of an input reach which slices of an output."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import Array

from jaxattn.check.adjoint.point import Point, generator
from jaxattn.check.verdict import Finding, Verdict, spot, verdicts


@verdicts
def jacobian_structure(
    fn: Callable[[Any], Any],
    x: Any,
    allowed: Any,
    *,
    required: Any | None = None,
    out_axis: int = -2,
    in_axis: int = -2,
    names: tuple[str, str] = ("q", "k"),
    rng: Array | None = None,
    axes: Mapping[str, str] | None = None,
) -> Verdict:
    """Which slices of the input may reach which slices of the output, by exact zeros.

        allowed[o,i] is False:  d y[o] / d x[i] = 0, exactly, in every coordinate of the two slices

    Causality is `np.tri(t)` over rows; batch independence `np.eye(b)` over axis 0; heads that do not see each
    other `np.eye(h)` over the head axis. The gradient of a random functional of y[o] stands for all its
    coordinates: no sum of them cancels by chance. What is cut by `stop_gradient` has no gradient and is not
    seen; change the input for that.

    Args:
        fn: from one float64 array to one array.
        x: its operand.
        allowed: bool [o, i].
        required: bool [o, i], the pairs that must be reached; None: each output that has allowed inputs is
            reached by at least one of them.
        out_axis, in_axis: where o and i lie in output and input.
        names: of the two axes, for the report.
        rng, axes: as in `dot_product`.

    Returns:
        The verdict; where it fails, the first pair that is reached and may not be, else the first that should
        be and is not. `measured` is the largest gradient that may not be.

    Raises:
        TypeError: for an operand that is not float64.

    Example:
        >>> verdict = jacobian_structure(lambda x: x[::-1].cumsum(0)[::-1], np.ones((3, 1)), np.tri(3))
        >>> verdict.where, verdict.reason
        ('x[1,0]', 'output q=0 is reached by input k=1')
    """
    point = Point.of(fn, (x,), axes)
    if len(point.outputs.shapes) != 1 or len(point.inputs.shapes) != 1:
        raise Finding(f"expected one array to one array, got {point.inputs.paths} to {point.outputs.paths}")
    size = point.outputs.shapes[0][out_axis], point.inputs.shapes[0][in_axis]
    allowed = _pairs("allowed", allowed, size, names)
    gradient = _gradients(point, generator(rng), out_axis, in_axis)
    strength = gradient.reshape(*size, -1).max(-1, initial=0.0)
    reached = strength > 0
    leaks = reached & ~allowed
    counts = {"allowed": allowed.sum(), "reached": reached.sum(), "reached but not allowed": leaks.sum()}
    numbers = {f"pairs {name}": float(count) for name, count in counts.items()}
    measured = float(strength.max(initial=0.0, where=leaks))
    where, reason = "", ""
    if leaks.any():
        o, i = (int(n) for n in np.argwhere(leaks)[0])
        index = [int(n) for n in np.unravel_index(np.argmax(gradient[o, i]), gradient.shape[2:])]
        index.insert(in_axis % x.ndim, i)
        where = spot(point.inputs.paths[0], tuple(index), axes)
        reason = f"output {names[0]}={o} is reached by input {names[1]}={i}"
    elif required is not None:
        missing = np.argwhere(_pairs("required", required, size, names) & ~reached)
        if len(missing):
            reason = f"output {names[0]}={missing[0, 0]} is not reached by input {names[1]}={missing[0, 1]}"
    else:
        alone = np.argwhere(allowed.any(1) & ~(reached & allowed).any(1))
        if len(alone):
            reason = f"output {names[0]}={alone[0, 0]} is reached by no input that may reach it"
    passed = "no pair is reached that may not be"
    return Verdict("jacobian_structure", not reason, measured, 0.0, where, reason or passed, numbers)


def _pairs(what: str, pairs: Any, size: tuple[int, int], names: tuple[str, str]) -> np.ndarray:
    pairs = np.asarray(pairs, bool)
    if pairs.shape != size:
        raise Finding(f"{what} has shape {pairs.shape}, but the axes ({', '.join(names)}) have {size}")
    return pairs


def _gradients(point: Point, draw: np.random.Generator, out_axis: int, in_axis: int) -> np.ndarray:
    """|gradient| of a random functional of each output slice, [o, i, the input's other axes]."""
    (shape,), (out_shape,) = point.inputs.shapes, point.outputs.shapes
    pull, rows = point.puller(), []
    for o in range(out_shape[out_axis]):
        u = np.zeros(out_shape)
        at_o = (*[slice(None)] * (out_axis % len(out_shape)), o)
        u[at_o] = draw.normal(size=u[at_o].shape)
        rows.append(np.abs(pull(u.ravel())).reshape(shape))
    return np.moveaxis(np.stack(rows), 1 + in_axis % len(shape), 1)
