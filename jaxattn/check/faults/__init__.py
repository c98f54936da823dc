"""Planted faults: programs that keep every shape and are wrong, each with the law that catches it.

The sources are the failure labs of the two articles (M3.2, M3.1) and public bug reports (PUB-..).
"""

from jaxattn.check.faults import attention
from jaxattn.check.faults.fault import Fault as Fault

FAULTS: dict[str, Fault] = {**attention.FAULTS}
"""Name of a fault: what it is, what catches it, and where a trace marks it."""

ELSEWHERE: dict[str, str] = {
    "a quoted speedup": "experiments/bench.py measures it",
    "a reused test set, an untuned baseline": "experiments/compare.py states what was tuned",
    "resume from a part of the state (PUB-28)": "tests/test_cases_training.py",
    "an update by NaN (PUB-29)": "tests/test_cases_training.py",
    "a cache that overflows (PUB-13), a step against all rows (PUB-12)": "tests/test_cases_cache.py",
    "products that a ledger forgets (PUB-27)": "tests/test_ledger.py",
    "gates and losses of MoH (PUB-24, PUB-25), mask and mix (PUB-26)": "tests/test_cases_routing.py",
}
"""Faults that are no attention of given heads, and what guards against them."""
