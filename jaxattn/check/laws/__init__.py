"""All laws by name, each with inputs so small that they can be read."""

from jaxattn.check.law import Law, table
from jaxattn.check.laws import (
    axes,
    basis,
    behaviour,
    conversion,
    decoder,
    derivatives,
    dropout,
    hidden,
    layer,
    memory,
    mixer,
    numbers,
    rotation,
    router,
    sharding,
    surgery,
)  # fmt: skip

MODULES = (
    axes, numbers, hidden, behaviour, sharding, derivatives, dropout,  # attention of given heads
    layer, decoder, memory, conversion, surgery, mixer, basis, router, rotation,
)  # fmt: skip
LAWS: dict[str, Law] = table(*(law for module in MODULES for law in module.LAWS.values()))
