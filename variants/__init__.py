"""Head-composition variants of multi-head attention, one paper a file, and their registry."""

from collections.abc import Callable

from jaxattn import HeadTransform
from variants.collab import collab as collab
from variants.dcmha import dcmha as dcmha
from variants.mha import mha as mha
from variants.moh import MoHSums as MoHSums
from variants.moh import moh as moh
from variants.mohsa import mohsa as mohsa
from variants.mohsa import overlap_schedule as overlap_schedule
from variants.talking_heads import talking_heads as talking_heads

VARIANTS: dict[str, Callable[..., HeadTransform]] = {
    "mha": mha,
    "mohsa": mohsa,
    "talking_heads": talking_heads,
    "dcmha": dcmha,
    "moh": moh,
    "collab": collab,
}
