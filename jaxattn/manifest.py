"""The call manifest: an immutable record of one call, and its admission before anything runs.

Needs pydantic: `pip install "jaxattn[manifest]"`. `Attention.manifest` writes the record of a real call.
"""

from jaxattn.manifest_admit import RULES, Admission, Current, NotAdmitted, Reason, admit
from jaxattn.manifest_form import (
    Call,
    Checkpoint,
    Heads,
    Linear,
    Manifest,
    Projection,
    Release,
    Runtime,
    Versions,
    schema,
)

__all__ = [
    "RULES",
    "Admission",
    "Call",
    "Checkpoint",
    "Current",
    "Heads",
    "Linear",
    "Manifest",
    "NotAdmitted",
    "Projection",
    "Reason",
    "Release",
    "Runtime",
    "Versions",
    "admit",
    "schema",
]
