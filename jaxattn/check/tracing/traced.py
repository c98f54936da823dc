"""What a trace found: its stages as records, as a table, as data, as a picture."""

import io
import math
from typing import Any, NamedTuple

import numpy as np

from jaxattn.check.tracing.invariants import Invariant


class TracedStage(NamedTuple):
    """One row of the ledger.

    Attributes:
        name: of the stage.
        shape: of its array; None where it came to none.
        axes: their names.
        meaning: what one number of it says.
        invariants: what becomes checkable here, and whether it holds.
        status: "ok"; "diverged" at the first stage where an invariant is broken; "downstream" after it.
        given: whether the code that is looked at made the array; else the formula did.
        array: [batch axes, axes], floating types as float64; None where it came to none.
    """

    name: str
    shape: tuple[int, ...] | None
    axes: str
    meaning: str
    invariants: tuple[Invariant, ...]
    status: str
    given: bool
    array: np.ndarray | None

    @property
    def broken(self) -> tuple[Invariant, ...]:
        """The invariants that do not hold."""
        return tuple(one for one in self.invariants if one.holds is False)

    def __str__(self) -> str:
        mark = {"ok": "  ", "diverged": "->", "downstream": " ."}[self.status]
        shape = "not reached" if self.shape is None else str(self.shape)
        by = "" if self.given or self.name == "input" else " (by the formula)"
        by += " (downstream)" if self.status == "downstream" else ""
        lines = [f"{mark} {self.name:<16}{shape:<18}{self.axes:<12}{self.meaning}{by}"]
        for one in self.invariants:
            word = {True: "yes", False: "NO", None: "-"}[one.holds]
            lines.append(f"     {word:<4}{one}")
        if self.status == "diverged":
            lines.append(f"   ^^ FIRST DIVERGENCE: {self.name}: {self.broken[0]}; the rest is downstream")
        return "\n".join(lines)


class Trace(NamedTuple):
    """The ledger of one call. Prints as a table, is true where nothing diverged.

    Attributes:
        stages: in order.
        sizes: by axis name.
        visible: [..., h or 1, q, k] bool, what the mask lets be seen.
    """

    stages: tuple[TracedStage, ...]
    sizes: dict[str, int]
    visible: np.ndarray

    def __bool__(self) -> bool:
        return self.first is None

    @property
    def first(self) -> str | None:
        """The name of the stage that diverged first, or None."""
        return next((stage.name for stage in self.stages if stage.status == "diverged"), None)

    def stage(self, name: str) -> TracedStage:
        """The stage of this name.

        Raises:
            KeyError: with the names that there are.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"trace: no stage {name!r}. Fix: one of {', '.join(s.name for s in self.stages)}.")

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis} = {size}" for axis, size in self.sizes.items())
        first = self.first or "none"
        return "\n".join([f"attention ledger: {sizes}", *map(str, self.stages), f"first divergence: {first}"])

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without the arrays: for JSON, or to compare."""
        stages = []
        for stage in self.stages:
            row = {k: v for k, v in stage._asdict().items() if k != "array"}
            row["shape"] = None if stage.shape is None else list(stage.shape)
            row["invariants"] = [_plain(one) for one in stage.invariants]
            stages.append(row)
        return {"first_divergence": self.first, "sizes": dict(self.sizes), "stages": stages}

    def picture(self, stage: str = "weights", batch: int | tuple[int, ...] = 0) -> bytes:
        """A PNG of scores or weights, one panel a head: query rows down, key rows across.

        Masked scores of hidden pairs are left blank, whatever stands for minus infinity there.

        Args:
            stage: one with the axes [h, q, k].
            batch: the example, an index for each batch axis.

        Raises:
            ModuleNotFoundError: without matplotlib, naming the command that installs it.
            ValueError: for a stage without heads by pairs, or one that was not reached.
        """
        return _picture(self.stage(stage), self.visible, batch)


def _plain(one: Invariant) -> dict[str, Any]:
    row = one._asdict()
    measured = one.measured
    if isinstance(measured, float) and not math.isfinite(measured):
        row["measured"] = str(measured)  # JSON knows no infinity
    return row


def _picture(stage: TracedStage, visible: np.ndarray, batch: int | tuple[int, ...]) -> bytes:
    if stage.array is None or not stage.axes.endswith("q k"):
        raise ValueError(
            f"picture: stage {stage.name!r} has axes [{stage.axes}] and shape {stage.shape}, expected "
            "an array [..., h, q, k]. Fix: scores or weights that were reached."
        )
    try:
        from matplotlib.figure import Figure  # an extra; nothing else here needs it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "picture: matplotlib is not installed. Fix: pip install 'jaxattn[experiments]'."
        ) from error
    array = stage.array
    if stage.name == "masked scores":
        array = np.where(visible, array, np.nan)
    index = (batch,) * (array.ndim - 3) if isinstance(batch, int) else batch
    heads = np.where(np.isfinite(array), array, np.nan)[index]
    finite = heads[np.isfinite(heads)]
    signed = finite.min(initial=0) < 0
    most = float(np.abs(finite).max(initial=0)) or 1.0
    columns = math.ceil(math.sqrt(len(heads)))
    rows = math.ceil(len(heads) / columns)
    figure = Figure(figsize=(2.2 * columns + 1, 2.4 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    low, colours = (-most, "RdBu") if signed else (0, "Greys")
    images = []
    for number, (panel, head) in enumerate(zip(panels.flat, heads, strict=False)):
        images.append(panel.imshow(head, cmap=colours, vmin=low, vmax=most, interpolation="nearest"))
        panel.set(xlabel="key row k", ylabel="query row q", title=f"head {number}")
    for panel in panels.flat[len(heads) :]:
        panel.set_axis_off()
    example = f", example {', '.join(map(str, index))}" if index else ""
    figure.suptitle(f"{stage.name} [{stage.axes}]{example}")
    figure.colorbar(images[0], ax=panels)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()
