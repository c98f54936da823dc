"""A table as lines of cells, the first its head: as Markdown and on the screen; and the power of a curve."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

Lines = list[tuple[str, ...]]
WIDTH = 120  # a narrower window breaks lines, but cuts no number


def markdown(lines: Lines) -> list[str]:
    """All columns but the first to the right.

    >>> markdown([("T", "MiB"), ("128", "4")])
    ['| T | MiB |', '| --- | ---: |', '| 128 | 4 |']
    """
    rule = ("---", *("---:" for _ in lines[0][1:]))
    return ["| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:])]


def table(lines: Lines, title: str) -> Table:
    """For a screen of WIDTH columns: what stands in brackets goes under its number, heads over two lines."""
    made = Table(title=title, title_justify="left")
    for number, name in enumerate(lines[0]):
        made.add_column(name.replace(" ", "\n", 1), justify="right" if number else "left", no_wrap=True)
    for line in lines[1:]:
        made.add_row(*(cell.replace(" [", "\n[").replace(" (", "\n(") for cell in line))
    return made


def power(x: Sequence[float], y: Sequence[float]) -> float:
    """p of y ~ x^p: least squares on logarithms.

    >>> round(power([8, 32, 128], [0.5, 1.0, 2.0]), 6)
    0.5
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
