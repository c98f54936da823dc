"""The planted faults as a page in Markdown."""

from collections.abc import Mapping

from jaxattn.check.faults import ELSEWHERE, FAULTS, OPEN
from jaxattn.check.faults.fault import Fault

HEAD = ("fault", "what is wrong", "law", "stage", "source")


def rows(faults: Mapping[str, Fault]) -> list[str]:
    """A line for each fault, after the two of the head.

    Example:
        >>> print("\\n".join(rows({name: FAULTS[name] for name in ("no scale", "a derivative without the scale")})))
        | fault | what is wrong | law | stage | source |
        |---|---|---|---|---|
        | no scale | scores are not scaled | scale | scores | PUB-10; second article |
        | a derivative without the scale | right values, a reverse pass that is twice too large | finite-differences | none: derivatives are no stage | second article |
    """  # noqa: E501
    head = [_line(*HEAD), "|" + "---|" * len(HEAD)]
    return head + [
        _line(name, fault.says, fault.law, fault.stage or f"none: {fault.why}", fault.source)
        for name, fault in faults.items()
    ]


def page() -> str:
    """All faults, what else the sources name and what guards it, and what nothing catches."""
    listed = lambda entries: [f"- {name}: {said}" for name, said in entries.items()]
    lines = [
        "# Planted faults",
        "",
        f"{len(FAULTS)} wrong programs that keep every shape, of `jaxattn/check/faults`.",
        "Each is caught by the law that is named, and the trace of one call marks its stage first. A test",
        "plants them all. Sources are sections of the article on multi-head attention (M3.2), the second",
        "article, on debugging attention, and public bug reports (PUB).",
        "Written by `python -m jaxattn.check.faults`.",
        "",
        *rows(FAULTS),
        "",
        "## Claims, procedures, refusals",
        "",
        "What the same sources name and no output could show, with what guards it here:",
        "",
        *listed(ELSEWHERE),
        "",
        "## Open",
        "",
        "What nothing here catches:",
        "",
        *listed(OPEN),
    ]
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
