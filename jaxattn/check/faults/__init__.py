"""Planted faults: programs that keep every shape and are wrong, each with the law that catches it.

The sources are the failure labs of the two articles (M3.2 and its sections; the second article, on debugging
attention) and public bug reports (PUB-..).
"""

from jaxattn.check.faults import (
    attention,
    basis,
    calls,
    conversion,
    decoder,
    layer,
    memory,
    mixer,
    rotation,
    router,
    surgery,
)  # fmt: skip
from jaxattn.check.faults.elsewhere import ELSEWHERE as ELSEWHERE
from jaxattn.check.faults.elsewhere import OPEN as OPEN
from jaxattn.check.faults.fault import Fault as Fault

MODULES = (attention, calls, layer, decoder, memory, conversion, surgery, mixer, basis, router, rotation)
FAULTS: dict[str, Fault] = {name: fault for module in MODULES for name, fault in module.FAULTS.items()}
"""Name of a fault: what it is, what catches it, and where a trace marks it."""
