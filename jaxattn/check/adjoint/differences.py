"""The slope of a function of one number, from differences whose step an error analysis chooses."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

EPS = float(np.finfo(np.float64).eps)
RATIO = 4.0  # of neighbouring steps
STEPS = RATIO ** -np.arange(1.0, 11.0)  # 0.25 to 1e-6


class Slope(NamedTuple):
    """A derivative by differences.

    Attributes:
        value: of the derivative at 0.
        error: about what it is off by, truncation and rounding together; inf where nothing settles.
        step: h, the one with the least error.
        kink: right slope less left slope, where these two do not approach each other; else 0.
    """

    value: float
    error: float
    step: float
    kink: float


def noise(phi: Callable[[float], float]) -> float:
    """Standard deviation of the rounding in `phi` near 0, measured.

    Fourth differences at the least step: so small that the smooth part leaves nothing, and large enough for
    float32 to move. What remains is rounding, sqrt(8!/4!^2) = sqrt(70) times enlarged. The median of nine
    leaves out the four that a kink or jump at 0 can touch.

    Source: Hamming, 1962, difference tables; Moré and Wild, 2011, estimating computational noise.
    """
    values = np.array([phi(j * STEPS[-1]) for j in range(-6, 7)])
    measured = float(np.median(np.abs(np.diff(values, 4)))) / (0.6745 * 70**0.5)
    return max(measured, EPS * float(np.abs(values).max()) / 2)


def extrapolated(phi: Callable[[float], float], step: float) -> float:
    """(16 D(h) - D(4 h)) / 15 of central differences D: the error of order h^2 cancels."""
    near, far = (_central(phi, h) for h in (step, RATIO * step))
    return (RATIO**2 * near - far) / (RATIO**2 - 1)


def slope(phi: Callable[[float], float], rounding: float) -> Slope:
    """The derivative at 0 and about what it is off by.

    D(h) = (phi(h) - phi(-h)) / 2h is off by h^2 phi'''/6 + h^4 phi'''''/120 + ... and by rounding / h. Each
    step's extrapolation (error h^4) is judged by the next smaller one, which has 1/256 of its truncation:

        error(h) = |D*(h) - D*(h/4)| + rounding / h

    The first falls with h, the second grows; the step is where their sum is least.

    Args:
        phi: smooth near 0; where it is not finite a step is passed over.
        rounding: see `noise`.

    Example:
        >>> found = slope(np.exp, noise(np.exp))
        >>> bool(abs(found.value - 1) < 10 * found.error < 1e-10), found.kink
        (True, 0.0)
    """
    sides = np.array([[phi(h), phi(-h)] for h in STEPS])
    with np.errstate(invalid="ignore"):
        central = (sides[:, 0] - sides[:, 1]) / (2 * STEPS)
        better = (RATIO**2 * central[1:] - central[:-1]) / (RATIO**2 - 1)
        error = np.abs(np.diff(better)) + rounding / STEPS[1:-1]
        parting = (sides.sum(1) - 2 * phi(0.0)) / STEPS  # right slope less left slope
    error = np.where(np.isfinite(error), error, np.inf)
    best = int(np.argmin(error))
    return Slope(float(better[best]), float(error[best]), float(STEPS[1 + best]), _kink(parting, rounding))


def _central(phi: Callable[[float], float], step: float) -> float:
    return (phi(step) - phi(-step)) / (2 * step)


def _kink(parting: np.ndarray, rounding: float) -> float:
    """The one-sided slopes' difference at the least step, where it has not shrunk with the step.

    Smooth functions: h phi'', a quarter of that at the step before. A kink: the same; a jump: four times.
    """
    last, before = parting[-1], parting[-2]
    clear = abs(last) > 100 * rounding / STEPS[-1]
    return float(last) if clear and abs(last) > 0.6 * abs(before) else 0.0
