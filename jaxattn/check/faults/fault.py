"""What a planted fault is."""

from collections.abc import Callable
from typing import NamedTuple

from jaxattn.check.subjects.attention import Checked
from jaxattn.check.tracing.traced import Trace


class Fault(NamedTuple):
    """One wrong program that keeps every shape.

    Attributes:
        says: what is wrong.
        source: where it was met.
        law: the law that catches it.
        subject: the wrong program; the right one that it is made of holds every law.
        stage: where the trace of one call first diverges; "" where no single call shows it.
        traced: that trace. None where there is no such stage, and then `why` says the reason.
        why: in words.
    """

    says: str
    source: str
    law: str
    subject: Checked
    stage: str = ""
    traced: Callable[[], Trace] | None = None
    why: str = ""
