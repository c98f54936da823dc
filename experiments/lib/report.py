"""What a run shows: the loss curve, the shared ledger of a comparison, as table, Markdown, PNG."""

import io
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.table import Table

BITS = 1 / math.log(2)


class Row(NamedTuple):
    """One variant in the shared ledger; losses by seed, in the same order for all variants."""

    variant: str
    settings: str
    parameters: int
    attention_parameters: int
    macs: int  # of all attention layers, a token
    cache_elements: int  # of all attention layers, a token
    cache_bytes: int
    memory: int | None  # bytes of temporaries of the compiled training step; None: not told
    step_seconds: float
    relative_step: float
    losses: tuple[float, ...]
    balance: float | None

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))

    def differences(self, baseline: "Row") -> tuple[float, ...]:
        """Loss minus the baseline's at the same seed: same batches, same shared start."""
        return tuple(a - b for a, b in zip(self.losses, baseline.losses, strict=True))


WIDTH = 132  # what the table needs; a narrower window breaks its lines, but cuts no number
COLUMNS = (
    "variant",
    "parameters",
    "in attention",
    "MACs a token",
    "cache a token",
    "cache bytes",
    "peak MiB",
    "ms a step",
    "step / mha",
    "validation loss",
    "minus mha",
    "balance loss",
)


def cells(rows: list[Row]) -> list[tuple[str, ...]]:
    """The shared ledger as text; the first row is the baseline."""
    return [
        (
            row.variant,
            f"{row.parameters:,}",
            f"{row.attention_parameters:,}",
            f"{row.macs:,}",
            f"{row.cache_elements:,}",
            f"{row.cache_bytes:,}",
            "not told" if row.memory is None else f"{row.memory / 2**20:.1f}",
            f"{1000 * row.step_seconds:.1f}",
            f"{row.relative_step:.2f}",
            f"{row.loss:.4f}",
            "" if row is rows[0] else spread(row.differences(rows[0])),
            "" if row.balance is None else f"{row.balance:.4f}",
        )
        for row in rows
    ]


def spread(values: tuple[float, ...]) -> str:
    """
    >>> spread((0.01, -0.03))
    '-0.0100 [-0.0300, +0.0100]'
    """
    mean = f"{np.mean(values):+.4f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):+.4f}, {max(values):+.4f}]"


def table(rows: list[Row]) -> Table:
    """For the screen: names over two lines, a range under its mean."""
    made = Table(title="One ledger for all variants", title_justify="left", box=SIMPLE_HEAD)
    for i, name in enumerate(COLUMNS):
        made.add_column(name.replace(" ", "\n", 1), justify="right" if i else "left", no_wrap=True)
    for line in cells(rows):
        made.add_row(*(cell.replace(" [", "\n[") for cell in line))
    return made


def markdown(rows: list[Row], head: dict[str, Any], notes: list[str]) -> str:
    def line(values: tuple[str, ...]) -> str:
        return "| " + " | ".join(values) + " |"

    rule = line(("---", *("---:" for _ in COLUMNS[1:])))
    return "\n".join(
        [
            "# Head-composition variants under one ledger",
            "",
            *(f"- {name}: {value}" for name, value in head.items()),
            "",
            line(COLUMNS),
            rule,
            *(line(values) for values in cells(rows)),
            "",
            *(f"{note}\n" for note in notes),
            "Settings of the variants:",
            "",
            *(f"- `{row.variant}`: {row.settings or 'none'}" for row in rows),
            "",
            "![Losses and step times](report.png)",
            "",
        ]
    )


def comparison(rows: list[Row]) -> bytes:
    """PNG: the paired differences of the validation loss, and the step times."""
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(rows))[::-1]
    for place, row in zip(places, rows, strict=True):
        differences = row.differences(rows[0])
        left.plot(differences, [place] * len(differences), "o", color="C0", alpha=0.6)
        left.plot([np.mean(differences)], [place], "|", color="black", markersize=18)
    left.axvline(0, color="grey", linewidth=0.8)
    left.xaxis.set_major_locator(MaxNLocator(5))
    left.set_yticks(places, [row.variant for row in rows])
    left.set_xlabel("validation loss minus mha (nats a symbol)\ndots: seeds, bar: mean; left is better")
    right.barh(places, [row.relative_step for row in rows], color="C1", height=0.5)
    for place, row in zip(places, rows, strict=True):
        right.text(row.relative_step, place, f" {row.relative_step:.2f}", va="center")
    right.margins(x=0.12)
    right.axvline(1, color="grey", linewidth=0.8)
    right.set_xlabel("time of a training step / mha\nmedian of interleaved calls")
    figure.suptitle("Variants against mha: quality and time")
    return png(figure)


def loss_curve(lines: list[dict[str, Any]], title: str) -> bytes:
    """PNG of a log: the loss of each step, its running mean, and the validations."""
    steps = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    valid = [(line["step"], line["valid_loss"]) for line in lines if "valid_loss" in line]
    skipped = [line["step"] for line in lines if "skipped" in line]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    if steps:
        x, y = np.array(steps).T
        width = len(y) // 50
        axes.plot(x, y, color="C0", alpha=0.25 if width > 1 else 1, linewidth=0.8, label="batch")
        if width > 1:
            mean = np.convolve(y, np.ones(width) / width, mode="valid")
            axes.plot(x[width - 1 :], mean, color="C0", label=f"mean of {width} steps")
    if valid:
        axes.plot(*np.array(valid).T, "o-", color="C1", label="validation")
    for step in skipped:
        axes.axvline(step, color="red", linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss (nats a symbol)")
    axes.set_title(title, parse_math=False)  # a file's name may have a dollar sign
    axes.grid(alpha=0.3)
    axes.legend()
    return png(figure)


def page(
    title: str, facts: dict[str, Any], result: list[str], commands: dict[str, str], care: list[str]
) -> str:
    """A run in a page of Markdown: what was run, what came out, how to go on, and what it does not show."""
    return "\n".join(
        [
            f"# {title}",
            "",
            "## What was run",
            "",
            *(f"- {name}: {value}" for name, value in facts.items()),
            "",
            "## Result",
            "",
            *(f"- {line}" for line in result),
            "",
            "## Commands",
            "",
            *(line for name, command in commands.items() for line in (f"{name}:", "", f"    {command}", "")),
            "## Read it with care",
            "",
            *(f"- {line}" for line in care),
            "",
        ]
    )


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():  # a letter that the font lacks is drawn as a box
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
