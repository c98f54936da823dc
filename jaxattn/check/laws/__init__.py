"""The laws that an attention is asked to hold, each with inputs so small that they can be read."""

from jaxattn.check.law import Law
from jaxattn.check.laws import axes, behaviour, derivatives, dropout, numbers

LAWS: dict[str, Law] = {}
for _module in (axes, numbers, behaviour, derivatives, dropout):
    LAWS |= _module.LAWS
