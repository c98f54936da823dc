"""The planted faults as a table in Markdown."""

from collections.abc import Mapping

from jaxattn.check.faults.fault import Fault

HEAD = ("fault", "what is wrong", "law", "stage", "source")


def rows(faults: Mapping[str, Fault]) -> list[str]:
    """A line for each fault, after the two of the head.

    Example:
        >>> from jaxattn.check.faults.attention import FAULTS
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


def rows_in(text: str) -> list[str]:
    """The lines of the one such table in a page; none where there is not just one."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line == _line(*HEAD)]
    if len(starts) != 1:
        return []
    rest = lines[starts[0] :]
    ends = [number for number, line in enumerate(rest) if not line.startswith("|")]
    return rest[: ends[0]] if ends else rest


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
