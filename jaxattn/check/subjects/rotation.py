"""The kind of subject that turns queries and keys by their positions (rotary), and what it should come to.

    (x_a, x_b) -> (x_a cos - x_b sin, x_a sin + x_b cos),  angle = position * base^(-2 j / width)

What should come out is computed by loops over numpy in float64.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jax import Array

Pairs = Literal["half", "adjacent"]
ROTATION_FEATURES = ("positions", "half_precision", "tracing")


class Rotation(NamedTuple):
    """Rotary positions, anyone's; the fields that are not here are those of `Subject`.

    Attributes:
        turn: `(x [b, t, h, d], positions [b, t])` to [b, t, h, d].
        pairs: "half" pairs channel j with j + width/2, "adjacent" 2j with 2j + 1.
        base: of the frequencies.
        width: channels of a head that turn, from the first; None is all of them.
        supports: of `ROTATION_FEATURES`; without "positions" the rows are 0, 1, 2, ... and nothing else
            is asked.
        plain: whether it is the map above; one with other frequencies is not, and its values are not asked.

    Example:
        >>> import jaxattn as ja
        >>> from jaxattn.check import run
        >>> forgets = Rotation("forgets", lambda x, positions: x)
        >>> [ruled.law for ruled in run(forgets, laws=["turn-keeps-length", "turn-tells-order"]).broken]
        ['turn-tells-order']
    """

    name: str
    turn: Callable[[Array, Array], Array]
    pairs: Pairs = "half"
    base: float = 10000.0
    width: int | None = None
    supports: frozenset[str] = frozenset(ROTATION_FEATURES)
    plain: bool = True
    version: str = ""
    least_heads: int = 1
    least_width: int = 2


def turned(
    x: np.ndarray, positions: np.ndarray, pairs: Pairs, base: float = 10000.0, width: int | None = None
) -> np.ndarray:
    """Each pair of channels of each row, turned by its angle: [b, t, h, d] in float64."""
    out = np.array(x, np.float64)
    wide = x.shape[-1] if width is None else width
    for n, t, head, j in np.ndindex(*x.shape[:3], wide // 2):
        a, b = (j, j + wide // 2) if pairs == "half" else (2 * j, 2 * j + 1)
        angle = float(positions[n, t]) * base ** (-2 * j / wide)
        first, second = (float(x[n, t, head, c]) for c in (a, b))
        out[n, t, head, a] = first * np.cos(angle) - second * np.sin(angle)
        out[n, t, head, b] = first * np.sin(angle) + second * np.cos(angle)
    return out
