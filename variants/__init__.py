"""Head-composition variants of multi-head attention, one paper a file, and their registry."""

from collections.abc import Callable

from jaxattn import HeadTransform

from .collab import collab
from .dcmha import dcmha
from .mha import mha
from .moh import MoHSums, moh
from .mohsa import mohsa, overlap_schedule
from .talking_heads import talking_heads

__all__ = [
    "VARIANTS",
    "MoHSums",
    "collab",
    "dcmha",
    "mha",
    "moh",
    "mohsa",
    "overlap_schedule",
    "talking_heads",
]

VARIANTS: dict[str, Callable[..., HeadTransform]] = {
    "mha": mha,
    "mohsa": mohsa,
    "talking_heads": talking_heads,
    "dcmha": dcmha,
    "moh": moh,
    "collab": collab,
}
