"""The kind of subject that turns queries and keys by their positions (rotary)."""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array

import jaxattn as ja

ROTATION_FEATURES = ("positions", "half_precision", "tracing")


class Rotation(NamedTuple):
    """Rotary positions, anyone's; the fields that are not here are those of `Subject`.

    Attributes:
        turn: `(x [b, t, h, d], positions [b, t])` to [b, t, h, d].
        rotary: which channels are pairs, and the frequencies.
        supports: of `ROTATION_FEATURES`; without "positions" the rows are 0, 1, 2, ... and nothing else
            is asked.
        plain: whether it is the map of `rotary`; one with other frequencies is not, and its values are not
            asked.

    Example:
        >>> from jaxattn.check import run
        >>> forgets = Rotation("forgets", lambda x, positions: x)
        >>> [ruled.law for ruled in run(forgets, laws=["turn-keeps-length", "turn-tells-order"]).broken]
        ['turn-tells-order']
    """

    name: str
    turn: Callable[[Array, Array], Array]
    rotary: ja.Rotary = ja.Rotary()
    supports: frozenset[str] = frozenset(ROTATION_FEATURES)
    plain: bool = True
    version: str = ""
    least_heads: int = 1
    least_width: int = 2
