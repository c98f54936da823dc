"""Draws the figures of the site as SVG, from nothing but this file and the library.

python docs/figures/draw.py            beside this file
python docs/figures/draw.py FOLDER     elsewhere

Times and memory in cost.svg are those of docs/benchmarks.md, where their commands are.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

import jaxattn as ja
import variants

INK, SOFT, BLUE, RED, GREEN, AMBER = "#20242c", "#8a93a3", "#3f51b5", "#c2453d", "#2e7d5b", "#c98a1b"
matplotlib.rcParams.update(
    {
        "svg.fonttype": "path",
        "svg.hashsalt": "jaxattn",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": SOFT,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one axes in inches, from the lower left corner, without a frame."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, color=color, lw=1.1, shrinkA=0, shrinkB=0
        )
    )


def box(
    axes: Axes, x: float, y: float, width: float, height: float, color: str, title: str, text: str
) -> None:
    """A rounded box with a title and lines below it."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", fc="white", ec=color, lw=1.5
        )
    )
    axes.text(x + 0.12, y + height - 0.12, title, color=color, weight="bold", va="top")
    axes.text(x + 0.12, y + height - 0.38, text, va="top", fontsize=9, linespacing=1.5)


def form() -> Figure:
    """One call in pictures: three heads from scores to output, with a mix before and after the softmax."""
    attn = ja.attention(ja.HeadSpec(model=12, heads=3), variants.talking_heads(start="paper"))
    params = attn.init(jax.random.key(31))
    x = 1.6 * jax.random.normal(jax.random.key(5), (7, 12))
    capture = ("logits", "mixed_logits", "weights", "mixed_weights")
    captured = attn.apply(params, x, mask=ja.causal(), capture=capture)[1].captured
    stages = [np.array(captured[name], float) for name in capture]
    hidden = ~np.tril(np.ones((7, 7), bool))
    for stage in stages[1:]:
        stage[:, hidden] = np.nan
    titles = [
        "scores\n[hl, q, k]",
        "mixed scores\n[hs, q, k]",
        "weights\n[hs, q, k]",
        "mixed weights\n[hv, q, k]",
    ]

    figure, axes = canvas(7.6, 4.3)
    side, left, gap, row = 0.82, 0.42, 0.72, 0.98
    place = lambda column, head: (left + column * (side + gap), 2.55 - head * row)
    for column, (stage, title) in enumerate(zip(stages, titles, strict=True)):
        limit = np.nanmax(np.abs(stage))
        x0, y0 = place(column, 0)
        axes.text(
            x0 + side / 2, y0 + side + 0.1, title, ha="center", va="bottom", fontsize=9.5, linespacing=1.3
        )
        for head in range(3):
            x0, y0 = place(column, head)
            part = figure.add_axes((x0 / 7.6, y0 / 4.3, side / 7.6, side / 4.3))
            part.set_facecolor("#e9ebf0")
            part.imshow(stage[head], cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            part.set(xticks=(), yticks=())
            if column == 0:
                axes.text(
                    x0 - 0.08,
                    y0 + side / 2,
                    f"head {head}",
                    rotation=90,
                    ha="right",
                    va="center",
                    fontsize=8.5,
                )
    own = params["heads"]["talking_heads"]
    for column, matrix in ((0, own["pre"]["kernel"]), (2, own["post"]["kernel"])):
        matrix = np.asarray(matrix)
        for i in range(3):
            for o in range(3):
                (x0, y0), (x1, y1) = place(column, i), place(column + 1, o)
                color = BLUE if matrix[i, o] < 0 else RED
                axes.plot(
                    [x0 + side + 0.06, x1 - 0.06],
                    [y0 + side / 2, y1 + side / 2],
                    color=color,
                    lw=0.4 + 2.6 * abs(matrix[i, o]) / np.abs(matrix).max(),
                    alpha=0.75,
                    solid_capstyle="round",
                )
    for head in range(3):
        x0, y0 = place(1, head)
        arrow(axes, (x0 + side + 0.08, y0 + side / 2), (x0 + side + gap - 0.08, y0 + side / 2))
        x0, y0 = place(3, head)
        arrow(axes, (x0 + side + 0.08, y0 + side / 2), (6.72, y0 + side / 2))
        axes.text(6.78, y0 + side / 2, "$\\times$ V, gate", va="center", fontsize=9)
    label = lambda column, text, color: axes.text(
        left + column * (side + gap) - gap / 2,
        0.5,
        text,
        ha="center",
        va="top",
        fontsize=9,
        color=color,
        linespacing=1.25,
    )
    label(1, "pre mix\nover heads", RED)
    label(2, "mask,\nsoftmax", INK)
    label(3, "post mix\nover heads", RED)
    axes.text(7.5, 0.5, "sum over\nheads, W$_O$", ha="right", va="top", fontsize=9, linespacing=1.25)
    axes.text(
        0.1, 4.22, "Lines: what each head takes of the others (red +, blue \N{MINUS SIGN}). "
        "In plain attention they are level.",
        fontsize=8.6, va="top", color=SOFT,
    )  # fmt: skip
    return figure


def hooks() -> Figure:
    """Which hook of a variant changes what."""
    figure, axes = canvas(7.6, 4.1)
    box(
        axes,
        0.1,
        2.55,
        2.3,
        1.45,
        BLUE,
        "query_side",
        "from target states\nquery [q, hl, d]\nrow factors of mixes\ngate [q, hv, 1]",
    )
    box(
        axes,
        2.65,
        2.55,
        2.3,
        1.45,
        RED,
        "coupling",
        "the same for all pairs\nscale, soft cap\nstatic mixes\nbias by position",
    )
    box(
        axes,
        5.2,
        2.55,
        2.3,
        1.45,
        GREEN,
        "key_side",
        "from source states\nkey [k, hK, d]\nvalue [k, hV, v]\nrow factors, bias",
    )
    steps = [
        "scores\n[hl, q, k]",
        "pre mixes\nhl to hs",
        "mask,\nsoftmax",
        "post mixes\nhs to hv",
        "times\nvalues",
        "finish,\ngate",
        "W$_O$",
    ]
    width, y = 0.93, 0.95
    for n, step in enumerate(steps):
        x = 0.1 + n * (width + 0.148)
        own = n in (2, 6)
        axes.add_patch(
            FancyBboxPatch(
                (x, y), width, 0.75, boxstyle="round,pad=0,rounding_size=0.06",
                fc="#eef0f4" if own else "#fff7e6", ec=SOFT if own else AMBER, lw=1.2,
            )
        )  # fmt: skip
        axes.text(x + width / 2, y + 0.375, step, ha="center", va="center", fontsize=8.8, linespacing=1.3)
        if n:
            arrow(axes, (x - 0.14, y + 0.375), (x - 0.01, y + 0.375))
    for x, color in ((1.25, BLUE), (3.8, RED), (6.35, GREEN)):
        arrow(axes, (x, 2.52), (x, 1.78), color)
    axes.text(
        3.9,
        2.15,
        "an engine combines\nthem, block by block",
        fontsize=8.8,
        color=SOFT,
        va="center",
        linespacing=1.3,
    )
    axes.text(
        0.1, 0.55, "adapt: head counts, widths, which mixes there are.   init: leaves.   "
        "aux, losses: what joins the training loss.\n"
        "declare: axis names, the start from plain attention.   "
        "Grey steps belong to the library: a variant cannot change them.",
        fontsize=8.4, va="top", color=INK, linespacing=1.5,
    )  # fmt: skip
    return figure


def sheets(axes, x, y, width, height, count, color, name, rows, columns, heads) -> None:
    """An array as `count` sheets of rows by columns, with the name of each axis at its edge."""
    step = 0.09
    for n in reversed(range(count)):
        axes.add_patch(
            Rectangle(
                (x + n * step, y + n * step), width, height, fc="white" if n else "#f4f5f9", ec=color, lw=1.2
            )
        )
    axes.text(x - 0.07, y + height / 2, rows, ha="right", va="center", color=color, weight="bold")
    axes.text(x + width / 2, y - 0.06, columns, ha="center", va="top", color=color, weight="bold")
    if heads:
        axes.text(
            x + width + count * step + 0.02,
            y + height + 0.02,
            heads,
            ha="left",
            va="center",
            color=color,
            weight="bold",
        )
    axes.text(
        x + (width + count * step) / 2,
        y + height + count * step + 0.08,
        name,
        ha="center",
        va="bottom",
        fontsize=9,
    )


def axes_of_arrays() -> Figure:
    """Every array of one call with the names of its axes; b, the batch, is in front of all."""
    figure, axes = canvas(7.6, 5.1)
    sheets(axes, 0.4, 3.45, 0.5, 0.95, 1, INK, "target states", "q", "m", "")
    sheets(axes, 0.4, 0.95, 0.5, 1.15, 1, INK, "source states", "k", "m", "")
    sheets(axes, 1.75, 3.45, 0.4, 0.95, 4, BLUE, "query", "q", "d", "hl")
    sheets(axes, 1.75, 1.75, 0.4, 0.95, 2, GREEN, "key", "k", "d", "hK")
    sheets(axes, 1.75, 0.3, 0.55, 0.75, 2, GREEN, "value", "k", "v", "hV")
    sheets(axes, 3.15, 2.95, 0.75, 0.75, 4, INK, "logits", "q", "k", "hl")
    sheets(axes, 4.7, 2.95, 0.75, 0.75, 5, INK, "weights", "q", "k", "hs")
    sheets(axes, 6.3, 2.95, 0.75, 0.75, 3, INK, "mixed weights", "q", "k", "hv")
    sheets(axes, 4.7, 0.6, 0.55, 0.75, 3, INK, "heads", "q", "v", "hv")
    sheets(axes, 6.3, 0.6, 0.5, 0.75, 1, INK, "output", "q", "m", "")
    for start, end in (
        ((1.02, 3.9), (1.48, 3.9)), ((1.02, 1.7), (1.48, 2.15)), ((1.02, 1.3), (1.48, 0.8)),
        ((2.62, 3.75), (2.92, 3.5)), ((2.45, 2.4), (2.92, 3.1)), ((4.32, 3.4), (4.48, 3.4)),
        ((5.98, 3.4), (6.1, 3.4)),
        ((2.72, 0.7), (4.42, 0.9)), ((6.6, 2.65), (5.5, 1.65)), ((5.62, 0.97), (6.05, 0.97)),
    ):  # fmt: skip
        arrow(axes, start, end, SOFT)
    for x, y, text in ((4.42, 2.6, "pre mix i to o,\nsoftmax"), (5.72, 2.6, "post mix\ni to o")):
        axes.text(x, y, text, ha="center", va="top", fontsize=8.4, color=RED, linespacing=1.25)
    axes.text(5.84, 0.87, "W$_O$", ha="center", va="top", fontsize=8.4)
    axes.text(1.25, 3.96, "W$_Q$", ha="center", va="bottom", fontsize=8.4)
    axes.text(1.15, 2.0, "W$_K$", ha="center", va="bottom", fontsize=8.4)
    axes.text(1.12, 0.95, "W$_V$", ha="center", va="top", fontsize=8.4)
    axes.text(
        3.15, 4.98, "A sheet is one head. The three head counts hl, hs, hv are equal unless a\n"
        "mix changes them; hK and hV are smaller with grouped keys (GQA).",
        fontsize=8.6, va="top", color=SOFT, linespacing=1.4,
    )  # fmt: skip
    return figure


def masks() -> Figure:
    """Six masks; dark is visible, a row a query, a column a key."""
    valid = np.array([True] * 6 + [False] * 2)
    ids = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    shown = [
        ("causal()", ja.causal(), 8),
        ("causal() & window(3)", ja.causal() & ja.window(3), 8),
        ("window(2, ahead=1)", ja.window(2, ahead=1), 8),
        ("causal() & padding(valid)", ja.causal() & ja.padding(valid), 8),
        ("causal() & segments(ids)", ja.causal() & ja.segments(ids), 8),
        ('causal(align="end")', ja.causal(align="end"), 5),
    ]
    figure = Figure(figsize=(7.6, 4.7), facecolor="white", layout="constrained")
    for part, (title, mask, q_len) in zip(figure.subplots(2, 3).flat, shown, strict=True):
        table = np.array([[int(seen) for seen in line.split()] for line in mask.show(q_len, 8).splitlines()])
        colors = matplotlib.colors.ListedColormap(["#f1f2f6", BLUE])
        part.pcolormesh(table, cmap=colors, edgecolors="white", lw=1.5, vmin=0, vmax=1)
        part.invert_yaxis()
        part.set(xticks=(), yticks=(), aspect="equal", xlabel="key", ylabel="query")
        part.set_title(title, fontsize=9.5, family="DejaVu Sans Mono")
        for spine in part.spines.values():
            spine.set_visible(False)
    return figure


def links(axes: Axes, pairs: Sequence[tuple[int, int, float]], color: str = RED) -> None:
    for i, o, width in pairs:
        axes.plot(
            [0.12, 0.88], [3 - i, 3 - o], color=color, lw=width, alpha=0.8, solid_capstyle="round", zorder=1
        )


def mixes() -> Figure:
    """What each variant lets heads take of one another."""
    figure = Figure(figsize=(7.6, 4.5), facecolor="white", layout="constrained")
    level = [(h, h, 2.2) for h in range(4)]
    every = np.random.default_rng(4).uniform(0.3, 2.6, (2, 4, 4))
    panels = figure.subplots(2, 3).flat
    titles = ["mha", "talking_heads", "dcmha", "moh", "collab", "mohsa"]
    notes = [
        "each head alone",
        "one matrix for all pairs,\nbefore and after the softmax",
        "a matrix for each pair (q, k),\nfrom both rows",
        "a router turns heads\noff for a row",
        "one key for all heads,\neach weighs its channels",
        "channels of the\nneighbouring heads",
    ]
    for part, title, note in zip(panels, titles, notes, strict=True):
        part.set(xlim=(-0.08, 1.08), ylim=(-1.35, 3.6))
        part.axis("off")
        part.set_title(title, fontsize=10.5, weight="bold", color=BLUE, pad=2)
        part.text(0.5, -0.55, note, ha="center", va="top", fontsize=8.8, linespacing=1.3)
        left = right = [INK] * 4
        if title == "mha":
            links(part, level)
        elif title == "talking_heads":
            links(part, [(i, o, every[0, i, o]) for i in range(4) for o in range(4)])
        elif title == "dcmha":
            links(part, [(i, o, every[0, i, o]) for i in range(4) for o in range(4)])
            links(part, [(i, o, every[1, i, o]) for i in range(4) for o in range(4)], AMBER)
        elif title == "moh":
            right = [INK, INK, "#d5d9e2", INK]
            links(part, [(0, 0, 2.2), (1, 1, 3.2), (3, 3, 1.2)])
        elif title == "collab":
            left = ["white", "white", "white", "white"]
            part.plot([0.05], [1.5], "o", ms=15, color=GREEN, zorder=2)
            for o in range(4):
                part.plot([0.1, 0.88], [1.5, 3 - o], color=GREEN, lw=2, alpha=0.8, zorder=1)
        else:
            links(part, level)
            links(part, [(i, o, 0.9) for i in range(4) for o in (i - 1, i + 1) if 0 <= o < 4])
        for h in range(4):
            if left[h] != "white":
                part.plot([0.05], [3 - h], "o", ms=10, color=left[h], zorder=2)
            part.plot([0.95], [3 - h], "o", ms=10, color=right[h], zorder=2)
    return figure


def cost() -> Figure:
    """Memory and time, as docs/benchmarks.md has them."""
    names = ["mha", "mohsa", "talking_heads", "dcmha", "moh", "collab"]
    memory = {4096: [91, 115, 91, 104, 84, 133], 8192: [179, 230, 186, 205, 164, 267]}
    scores = {4096: 512, 8192: 2048}
    figure = Figure(figsize=(7.6, 3.5), facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    place = np.arange(len(names) + 1)
    for shift, (rows, color) in zip((-0.21, 0.21), ((4096, "#9fa8da"), (8192, BLUE)), strict=True):
        heights = [*memory[rows], scores[rows]]
        bars = left.bar(place + shift, heights, 0.4, color=color, label=f"{rows} rows")
        bars[-1].set_color(RED if rows == 8192 else "#e3a29e")
        for x, height in zip(place + shift, heights, strict=True):
            left.text(x, height * 1.06, str(height), ha="center", va="bottom", fontsize=5.8)
    left.set_yscale("log")
    left.set(ylim=(40, 5000), ylabel="MiB")
    left.set_xticks(place, [*names, "one dense\nscore tensor"], rotation=40, ha="right", fontsize=8.2)
    left.set_title("Memory of a training step, engine blocked", fontsize=9.5)
    left.legend(fontsize=8, frameon=False, loc="upper left")
    rows = [
        ("dense / blocked, mha", 2.5),
        ("dense / blocked, talking_heads", 2.6),
        ("dense / blocked, dcmha", 6.6),
        ("jax.nn / blocked, mha", 3.6),
        ("Flax's layer / ours, mha", 1.7),
        ("torch SDPA / blocked, mha", 1 / 1.1),
        ("torch dense / blocked, talking_heads", 4.0),
        ("torch dense / blocked, dcmha", 7.0),
    ]
    labels, ratios = zip(*rows, strict=True)
    right.barh(range(len(rows)), ratios, 0.62, color=[BLUE if ratio >= 1 else RED for ratio in ratios])
    right.axvline(1, color=INK, lw=0.8)
    right.set_yticks(range(len(rows)), labels, fontsize=8.2)
    right.invert_yaxis()
    for n, ratio in enumerate(ratios):
        right.text(max(ratio, 1) + 0.1, n, f"{ratio:.1f}", va="center", fontsize=8)
    right.set(xlim=(0, 8))
    right.set_title("Time, 1024 rows, two CPU cores", fontsize=9.5)
    for part in (left, right):
        part.spines[["top", "right"]].set_visible(False)
    return figure


FIGURES = {"form": form, "hooks": hooks, "axes": axes_of_arrays, "masks": masks, "mixes": mixes, "cost": cost}


def main(folder: Path) -> None:
    for name, draw in FIGURES.items():
        draw().savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
