"""Head-composition variants of multi-head attention, one paper a file, and their registry."""

from collections.abc import Callable

from jaxattn import HeadTransform

from .collab import collab as collab
from .dcmha import dcmha as dcmha
from .mha import mha as mha
from .moh import MoHSums as MoHSums
from .moh import moh as moh
from .mohsa import mohsa as mohsa
from .mohsa import overlap_schedule as overlap_schedule
from .talking_heads import talking_heads as talking_heads

VARIANTS: dict[str, Callable[..., HeadTransform]] = {
    "mha": mha,
    "mohsa": mohsa,
    "talking_heads": talking_heads,
    "dcmha": dcmha,
    "moh": moh,
    "collab": collab,
}
