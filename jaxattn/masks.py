"""Masks as values: who may see whom. One polarity everywhere: True = visible (may attend).

>>> from jaxattn import masks
>>> import jax.numpy as jnp
>>> valid = jnp.array([[True, True, True], [True, False, False]])
>>> masks.causal() & masks.window(128) & masks.padding(valid)
causal() & window(128) & padding(b k: 2x3)

A mask is aligned by the names of its axes, never by sizes that happen to agree, and a layout with
another polarity or encoding comes in and goes out through a named converter, `from_*` and `to_*`.
"""

from jaxattn.mask_convert import (
    from_additive,
    from_flax,
    from_torch_mha,
    from_torch_sdpa,
    to_additive,
    to_flax,
    to_torch_mha,
    to_torch_sdpa,
)
from jaxattn.mask_form import Fill, Frame, Mask, as_mask
from jaxattn.mask_rules import causal, everything, explicit, lengths, padding, segments, window

__all__ = [
    "Fill",
    "Frame",
    "Mask",
    "as_mask",
    "causal",
    "everything",
    "explicit",
    "from_additive",
    "from_flax",
    "from_torch_mha",
    "from_torch_sdpa",
    "lengths",
    "padding",
    "segments",
    "to_additive",
    "to_flax",
    "to_torch_mha",
    "to_torch_sdpa",
    "window",
]
