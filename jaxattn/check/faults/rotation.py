"""Rotary positions at the wrong place, and the right ones that they are made of."""

from collections.abc import Callable

import einops
import jax.numpy as jnp
from jax import Array

from jaxattn.check.faults.fault import Fault
from jaxattn.check.subjects.rotation import Rotation


def angles(positions: Array, width: int) -> Array:
    """[b, t, 1, j] in float32."""
    frequencies = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return positions[..., None, None].astype(jnp.float32) * frequencies


def right_turn(x: Array, positions: Array, angles: Callable[[Array, int], Array] = angles) -> Array:
    """Channel j is paired with j + d/2."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    angle = angles(positions, x.shape[-1])
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


RIGHT = Rotation("right", right_turn)


def _merged(x: Array, positions: Array) -> Array:
    whole = right_turn(einops.rearrange(x, "b t h d -> b t 1 (h d)"), positions)
    return einops.rearrange(whole, "b t 1 (h d) -> b t h d", h=x.shape[2])


FAULTS: dict[str, Fault] = {
    "turned before the heads are split": Fault(
        "rotary positions turn the merged width: pairs cross heads, and each head has angles of its own",
        "M3.2 0x0E",
        "heads-turn-alike",
        Rotation("planted", _merged),
        why="positions are inside the stages Q and K",
    ),
}
