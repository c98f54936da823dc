"""Rotary positions that are known by name."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

import jaxattn as ja
from jaxattn.check.subjects.attention import version_of
from jaxattn.check.subjects.rotation import Rotation
from jaxattn.project import rotate


def of_rotary(rotary: ja.Rotary) -> Rotation:
    """This library's, as `HeadSpec(rotary=...)` turns queries and keys.

    Example:
        >>> of_rotary(ja.Rotary(pairs="adjacent")).name
        'jaxattn adjacent'
    """
    turn = lambda x, positions: rotate(x, rotary, positions, x.shape[-1])
    return Rotation(f"jaxattn {rotary.pairs}", turn, rotary, version=version_of("jaxattn"))


def equinox() -> Rotation:
    """`equinox.nn.RotaryPositionalEmbedding`, head by head; it counts its rows itself."""
    import equinox as eqx  # pyright: ignore[reportMissingImports]  (only where installed)

    def turn(x: Array, positions: Array) -> Array:
        one = eqx.nn.RotaryPositionalEmbedding(x.shape[-1], dtype=x.dtype)
        return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(jnp.asarray(x))

    return Rotation("equinox", turn, supports=frozenset({"tracing"}), version=version_of("equinox"))


ROTATIONS: dict[str, Callable[[], Rotation]] = {
    "jaxattn": functools.partial(of_rotary, ja.Rotary()),
    "equinox": equinox,
}
