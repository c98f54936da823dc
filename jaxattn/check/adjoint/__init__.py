"""The adjoint toolkit: is a derivative the derivative, of anyone's function over trees of arrays.

    dot_product          forward and reverse mode are each other's adjoint
    finite_differences   reverse mode is the derivative of the function itself
    jacobian_structure   which inputs may reach which outputs
    reach                every parameter has a gradient, but for the null directions that are named
    compare              two trees of gradients, coordinate by coordinate

Each returns a `Verdict`, also for a function that raises or returns NaN. All run in 64 bits and call the
function many times: pass a jitted one where that is possible.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from jaxattn.check.adjoint.differences import EPS, Slope, extrapolated, noise, slope
from jaxattn.check.adjoint.point import Point, generator, locate
from jaxattn.check.adjoint.reach import Null as Null
from jaxattn.check.adjoint.reach import axes_of as axes_of
from jaxattn.check.adjoint.reach import nulls_of as nulls_of
from jaxattn.check.adjoint.reach import reach as reach
from jaxattn.check.adjoint.structure import jacobian_structure as jacobian_structure
from jaxattn.check.verdict import Finding as Finding
from jaxattn.check.verdict import Verdict as Verdict
from jaxattn.check.verdict import compare as compare
from jaxattn.check.verdict import float64 as float64
from jaxattn.check.verdict import run, verdicts

SAFETY = 10.0  # of an estimated error
SETTLED = 1e-4  # an estimated error above this part of the slopes decides nothing


@verdicts
def dot_product(
    fn: Callable[..., Any],
    *operands: Any,
    rng: Array | None = None,
    draws: int = 3,
    limit: float = 1e-14,
    axes: Mapping[str, str] | None = None,
) -> Verdict:
    """Forward and reverse mode are each other's adjoint.

        |<J v, u> - <v, J' u>| <= limit |J v| |u|,  v and u random in all operands and outputs

    Both sides are sums of the same products in another order, each rounded to 1.1e-16 of itself; errors of
    n roundings add up as sqrt(n), so that 1e-14 leaves room for some thousand in a row. A step in float32
    gives 1e-8 to 1e-7, a wrong transpose 1e-2 to 1.

    Two modes that are wrong alike agree: `finite_differences` compares with the function. One without
    forward mode (a `custom_vjp`) fails here with that reason.

    Args:
        fn: `(*operands) -> ` a tree of arrays.
        operands: trees; every floating leaf must be float64, others are held fixed. See `float64`.
        rng: PRNG key of the draws; None is key 0.
        draws: pairs of v and u; the worst counts.
        limit: of the disagreement.
        axes: names of axes by path, for the report.

    Returns:
        The verdict; where it fails, a coordinate of the operands whose <J e_i, u> is not (J' u)[i], found by
        halving.

    Raises:
        TypeError: for operands that are not float64.

    Example:
        >>> dot_product(lambda x, w: x @ w, np.ones((2, 3)), np.ones((3, 5))).passed
        True
    """
    point, draw = Point.of(fn, operands, axes), generator(rng)
    pull, worst = point.puller(), None
    for _ in range(draws):
        v, u = draw.normal(size=point.x.size), draw.normal(size=point.value.size)
        pulled, pushed = pull(u), point.push(v)
        apart = abs(_dot(pushed, u) - _dot(v, pulled))
        size = math.sqrt(_dot(pushed, pushed) * _dot(u, u))
        measured = apart / size if size else (math.inf if apart else 0.0)
        if worst is None or measured > worst[0]:
            worst = measured, v, u, pulled
    assert worst is not None, "draws is at least 1"
    measured, v, u, pulled = worst
    if measured <= limit:
        return Verdict("dot_product", True, measured, limit, "", "<J v, u> = <v, J' u>")

    def residual(part: np.ndarray) -> float:
        some = _only(v, part)
        return _dot(point.push(some), u) - _dot(some, pulled)

    entry = locate(residual, np.arange(v.size))
    unit = np.zeros_like(v)
    unit[entry] = 1.0
    numbers = {"forward mode there": _dot(point.push(unit), u), "reverse mode there": float(pulled[entry])}
    near = "near float32's rounding: a step runs in less than float64" if measured < 1e-5 else ""
    reason = near or "forward and reverse mode disagree: a transpose or a derivative rule is wrong"
    where = point.inputs.spot(entry, axes)
    return Verdict("dot_product", False, measured, limit, where, reason, numbers)


class _Row(NamedTuple):
    """One leaf along one direction."""

    path: str
    part: np.ndarray
    v: np.ndarray
    u: np.ndarray
    gradient: np.ndarray
    slope: Slope
    limit: float

    @property
    def apart(self) -> float:
        return abs(self.slope.value - _dot(self.gradient, self.v))


@verdicts
def finite_differences(
    fn: Callable[..., Any],
    *operands: Any,
    rng: Array | None = None,
    draws: int = 2,
    axes: Mapping[str, str] | None = None,
) -> Verdict:
    """The gradient is the slope of the function itself, leaf by leaf along random directions.

        |<J' u, v> - d/dt <u, fn(x + t v)>| <= 10 (estimated error of the difference) + 1000 eps sum |g v|

    Steps run from 1/4 to 1e-6 of the leaf's typical value. Rounding is measured, truncation estimated from
    neighbouring steps, and the step with the least sum of both is taken (`differences.slope`); in a smooth
    function this leaves 1e-13 to 1e-10 of the slope. So a wrong gradient is told apart from a bad step: the
    first is off by more than the estimate; where the estimate itself is large, the verdict says that
    differences do not settle. A kink or jump at the point is a finding of its own.

    Args:
        fn: `(*operands) -> ` a tree of arrays. It is called 21 times for each leaf and draw.
        operands, rng, axes: as in `dot_product`.
        draws: directions u and v for each leaf; the worst counts.

    Returns:
        The verdict; where it fails, a coordinate that is wrong, found by halving, with its slope by
        difference and by gradient.

    Raises:
        TypeError: for operands that are not float64.

    Example:
        >>> from jax.lax import stop_gradient
        >>> verdict = finite_differences(lambda x: x * stop_gradient(x), np.array([1.0, 0.0, 0.0]))
        >>> verdict.where, verdict.reason
        ('x[0]', 'the gradient is not the slope of the function')
    """
    point, draw = Point.of(fn, operands, axes), generator(rng)
    pull, rows, largest = point.puller(), [], 0.0
    scale = np.ones_like(point.x)
    leaves = [both for both in zip(point.inputs.paths, point.inputs.parts, strict=True) if both[1].size]
    for _, part in leaves:
        scale[part] = math.sqrt(np.mean(point.x[part] ** 2)) or 1.0
    for _ in range(draws):
        u = draw.normal(size=point.value.size)
        gradient, everywhere = pull(u), scale * draw.normal(size=point.x.size)
        largest = max(largest, float(np.abs(u * point.value).sum()))
        rounding = noise(_along(point, u, everywhere))
        for path, part in leaves:
            v = _only(everywhere, part)
            found = slope(_along(point, u, v), rounding)
            limit = SAFETY * found.error + 1e3 * EPS * float(np.abs(gradient * v).sum())
            rows.append(_Row(path, part, v, u, gradient, found, limit))
            largest = max(largest, abs(found.value) if math.isfinite(found.value) else 0.0)
    return _judge(point, rows, largest)


def _judge(point: Point, rows: list[_Row], largest: float) -> Verdict:
    """The worst row: a kink, a wrong gradient, differences that do not settle, or none of these."""
    name = "finite_differences"
    broken = max(rows, key=lambda row: abs(row.slope.kink))
    if broken.slope.kink:
        entry = locate(
            lambda part: slope(_along(point, broken.u, _only(broken.v, part)), 0.0).kink, broken.part
        )
        reason = "right and left slope differ: a kink or a jump, no derivative there"
        numbers = {"right slope less left slope": broken.slope.kink}
        where = point.inputs.spot(entry, point.axes)
        return Verdict(name, False, abs(broken.slope.kink), 0.0, where, reason, numbers)
    loose = max(rows, key=lambda row: row.limit)
    settled = [row for row in rows if row.limit <= SETTLED * largest]
    worst = max(settled, key=lambda row: row.apart / row.limit if row.limit else row.apart, default=loose)
    if settled and worst.apart > worst.limit:
        return _wrong(point, worst)
    if len(settled) < len(rows):
        reason = "differences do not settle: a noisy or rough function, which says nothing of the gradient"
        numbers = {"estimated error": loose.slope.error, "largest slope or value": largest}
        return Verdict(name, False, loose.limit, SETTLED * largest, loose.path, reason, numbers)
    numbers = {"step": worst.slope.step, "estimated error": worst.slope.error}
    reason = "gradients are slopes; the nearest to its limit is named"
    return Verdict(name, True, worst.apart, worst.limit, worst.path, reason, numbers)


def _wrong(point: Point, row: _Row) -> Verdict:
    """Where a gradient is wrong, by halving with the step that was chosen."""

    def residual(part: np.ndarray) -> float:
        v = _only(row.v, part)
        return extrapolated(_along(point, row.u, v), row.slope.step) - _dot(row.gradient, v)

    entry = locate(residual, row.part)
    unit = np.zeros_like(row.v)
    unit[entry] = abs(row.v[entry])
    phi = _along(point, row.u, unit)
    found = slope(phi, noise(phi))
    numbers = {
        "by difference": found.value / unit[entry],
        "by gradient": float(row.gradient[entry]),
        "step": found.step,
        "estimated error": found.error / unit[entry],
    }
    reason = "the gradient is not the slope of the function"
    where = point.inputs.spot(entry, point.axes)
    return Verdict("finite_differences", False, row.apart, row.limit, where, reason, numbers)


def _along(point: Point, u: np.ndarray, v: np.ndarray) -> Callable[[float], float]:
    """t -> <u, fn(x + t v)>, nan where that is not finite."""

    def phi(t: float) -> float:
        values = run("the function, moved", point.values, point.x + t * v)
        return _dot(u, values) if np.isfinite(values).all() else math.nan

    return phi


def _only(v: np.ndarray, part: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(v)
    kept[part] = v[part]
    return kept


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """The inner product, summed exactly, so that a check adds no rounding of its own."""
    return math.fsum((a * b).tolist())
