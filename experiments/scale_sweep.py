"""How far scores spread as heads grow wider, with and without 1/sqrt(d), and where that argument fails.

    python experiments/scale_sweep.py            under a minute on two cores
    python experiments/scale_sweep.py --quick    seconds: narrow heads, few draws

The assumptions and what follows from each are in experiments/lib/scores.py. What is measured is the library's
own: one head with W_Q = W_K = I, its captured logits and weights. The folder holds scale.json, scale.md and
scale.png.
"""

import functools
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import jaxattn as ja
from experiments.lib import facts, folder, report, scores, tables
from experiments.lib.scores import Case, Stats
from experiments.lib.screen import Screen, script

PLAIN = "assumed"  # the case in which all assumptions hold
MARKS = "osD^vP*Xh"


@dataclass(frozen=True)
class Options:
    widths: tuple[int, ...] = (8, 32, 128, 512)
    """Of a head; multiples of 4."""
    queries: int = 64
    keys: int = 32
    examples: int = 16
    """Score matrices of one draw."""
    seeds: int = 5
    """Draws, from seed 0 on."""
    quick: bool = False
    """Narrow heads and few draws: to see that it works."""
    out: Path | None = None
    """Folder for the results; left out: a new one under runs/."""

    @property
    def grid(self) -> scores.Grid:
        return scores.Grid(self.examples, self.queries, self.keys)


class Row(NamedTuple):
    """One case at one head width, with its factor or without: each draw, and what theory says."""

    case: str
    width: int
    scaled: bool
    draws: tuple[Stats, ...]
    theory: Stats

    @property
    def mean(self) -> Stats:
        return Stats(*np.mean(self.draws, axis=0).tolist())

    @property
    def low(self) -> Stats:
        return Stats(*np.min(self.draws, axis=0).tolist())

    @property
    def high(self) -> Stats:
        return Stats(*np.max(self.draws, axis=0).tolist())

    def as_dict(self) -> dict[str, Any]:
        draws = [draw._asdict() for draw in self.draws]
        return self._asdict() | {"draws": draws, "theory": self.theory._asdict()}


def spec_of(case: Case, width: int, scaled: bool) -> ja.HeadSpec:
    """One head as wide as the states; values play no part."""
    spec = ja.HeadSpec(model=width, heads=1, d_v=1, qk_norm=case.qk_norm)
    if not scaled:
        return replace(spec, scale=1.0)
    return spec if case.factor is None else replace(spec, scale=case.factor(width))


@functools.partial(jax.jit, static_argnums=0)
def measured(spec: ja.HeadSpec, x_q: Array, x_k: Array) -> Array:
    """The three Stats of the logits and weights that the library captures."""
    attn = ja.attention(spec)
    params = attn.init(jax.random.key(0), x_q.dtype)
    for name in ("query", "key"):
        params[name]["kernel"] = jnp.eye(spec.model, dtype=x_q.dtype)[:, None, :]
    _, aux = attn.apply(params, x_q, x_k, capture=("logits", "weights"))
    weights = aux.captured["weights"]
    entropy = jax.scipy.special.entr(weights).sum(-1)
    return jnp.stack([aux.captured["logits"].std(), weights.max(-1).mean(), entropy.mean()])


def sweep(options: Options, cases: dict[str, Case]) -> list[Row]:
    """Every case at every width, with and without its factor; cases share their draws."""
    rows = []
    for (name, case), width in ((item, d) for item in cases.items() for d in options.widths):
        rngs = [jax.random.fold_in(jax.random.key(seed), width) for seed in range(options.seeds)]
        states = [case.draw(rng, options.grid, width) for rng in rngs]
        told = case.theory(options.grid, width)
        wanted = width**-0.5 if case.factor is None else case.factor(width)
        for scaled, factor in ((False, 1.0), (True, wanted)):
            spec = spec_of(case, width, scaled)
            draws = tuple(Stats(*map(float, measured(spec, x_q, x_k))) for x_q, x_k in states)
            theory = scores.predicted(told, factor, options.keys)
            rows.append(Row(name, width, scaled, draws, theory))
    return rows


def of(rows: list[Row], case: str, scaled: bool) -> list[Row]:
    """The rows of one curve, by width."""
    return [row for row in rows if (row.case, row.scaled) == (case, scaled)]


def powers(rows: list[Row], case: str, scaled: bool) -> tuple[float, float]:
    """The power of d with which the spread grows: measured, and by theory."""
    curve = of(rows, case, scaled)
    widths = [row.width for row in curve]
    got, want = [row.mean.std for row in curve], [row.theory.std for row in curve]
    return tables.power(widths, got), tables.power(widths, want)


def plain_table(rows: list[Row], options: Options) -> tables.Lines:
    """Where all assumptions hold, with and without the factor."""
    lines: tables.Lines = [
        ("d", "sqrt(d)", "raw std", "raw std/sqrt(d)", "expected error", "scaled std",
         "raw largest", "scaled largest", "raw nats", "scaled nats")
    ]  # fmt: skip
    for raw, scaled in zip(of(rows, PLAIN, False), of(rows, PLAIN, True), strict=True):
        root = math.sqrt(raw.width)
        ratio = f"{raw.mean.std / root:.4f} [{raw.low.std / root:.4f}, {raw.high.std / root:.4f}]"
        error = scores.expected_error(options.grid, options.seeds, raw.width)
        pairs = (f"{row.mean[i]:.4f}" for i in (1, 2) for row in (raw, scaled))
        spread = f"{raw.mean.std:.4f}", ratio, f"{error:.4f}", f"{scaled.mean.std:.4f}"
        lines.append((f"{raw.width}", f"{root:.4f}", *spread, *pairs))
    return lines


def case_table(rows: list[Row]) -> tables.Lines:
    """Every case: powers of d, and its scaled scores at the narrowest and the widest head."""
    first, last = (f"d={width}" for width in (rows[0].width, of(rows, PLAIN, True)[-1].width))
    lines: tables.Lines = [
        ("case", "raw power", "scaled power", "std/theory", f"std {first}", f"std {last}",
         f"largest {first}", f"largest {last}", f"nats {first}", f"nats {last}")
    ]  # fmt: skip
    for name in dict.fromkeys(row.case for row in rows):
        curve = of(rows, name, True)
        both = (powers(rows, name, scaled) for scaled in (False, True))
        grown = (f"{got:+.3f} ({want:+.3f})" for got, want in both)
        ratios = [row.mean.std / row.theory.std for row in rows if row.case == name]
        cells = (f"{row.mean[i]:.3f}" for i in range(3) for row in (curve[0], curve[-1]))
        lines.append((name, *grown, f"{min(ratios):.3f} to {max(ratios):.3f}", *cells))
    return lines


def figure(rows: list[Row], options: Options) -> bytes:
    """PNG: spread, largest weight and entropy against d; lines are theory, marks and bars are draws."""
    made = Figure(figsize=(13, 5.4), layout="constrained")
    panels, legend = made.subplots(1, 3), []
    shown = [*((name, True) for name in dict.fromkeys(row.case for row in rows)), (PLAIN, False)]
    for number, (name, scaled) in enumerate(shown):
        curve = of(rows, name, scaled)
        widths = [row.width for row in curve]
        color, line = (f"C{number}", "-") if scaled else ("black", "--")
        mark: dict[str, Any] = dict(marker=MARKS[number % len(MARKS)], color=color, markerfacecolor="none")
        label = name if scaled else f"{name}, no factor"
        legend.append(Line2D([], [], linestyle=line, label=label, **mark))
        for i, panel in enumerate(panels):
            middle, low, high = (np.array([s[i] for s in x]) for x in zip(*map(summary, curve), strict=True))
            panel.plot(widths, [row.theory[i] for row in curve], line, color=color, linewidth=1.2)
            spread = np.abs([middle - low, high - middle])  # rounding may leave -0.0000001
            panel.errorbar(widths, middle, spread, linestyle="", capsize=3, **mark)
    titles = "standard deviation of scores", "mean largest weight", "mean entropy, nats"
    uniform = None, 1 / options.keys, math.log(options.keys)
    for panel, title, even in zip(panels, titles, uniform, strict=True):
        panel.set_xscale("log", base=2)
        panel.set(xlabel="head width d", title=title, xticks=options.widths, xticklabels=options.widths)
        panel.grid(alpha=0.3, which="both")
        if even is not None:
            panel.axhline(even, color="grey", linestyle=":")
            place = dict(xytext=(0, -11), textcoords="offset points", ha="right", color="grey")
            panel.annotate("uniform", (options.widths[-1], even), **place)
    panels[0].set_yscale("log", base=2)
    panels[1].set_yscale("log")
    made.legend(handles=legend, loc="outside lower center", ncols=5)
    made.suptitle(
        "Lines: theory. Marks: measured, with factor 1/sqrt(d) unless named otherwise; bars: all seeds"
    )
    return report.png(made)


def summary(row: Row) -> tuple[Stats, Stats, Stats]:
    return row.mean, row.low, row.high


def check(options: Options) -> Options:
    """The options that run, widths in order; raises SystemExit for one that cannot."""
    if options.quick:
        options = replace(options, widths=(8, 32), examples=8, seeds=2)
    widths = tuple(sorted(set(options.widths)))
    unit = scores.REPEATED
    if len(widths) < 2 or any(width < unit or width % unit for width in widths):
        raise SystemExit(
            f"--widths: got {options.widths}, expected two or more different multiples of {unit}"
        )
    for name, least in (("queries", 1), ("keys", 2), ("examples", 1), ("seeds", 1)):
        if (got := getattr(options, name)) < least:
            raise SystemExit(f"--{name}: got {got}, expected a whole number of at least {least}")
    return replace(options, widths=widths)


def main(options: Options) -> None:
    options = check(options)
    with (
        script("scale_sweep.py") as (screen, _),
        folder.hold(options.out, "scale", holds="scale.json") as held,
    ):
        measure_all(options, held.path, screen)


def measure_all(options: Options, out: Path, screen: Screen) -> None:
    """Measure, print, and write to the folder `out`."""
    rows = sweep(options, scores.CASES)
    sizes = f"{options.examples} x {options.queries} queries x {options.keys} keys, {options.seeds} seeds"
    head = {
        "Assumed": scores.CASES[PLAIN].says,
        "Sizes": f"{sizes}; log k = {math.log(options.keys):.4f} nats",
        "Machine": facts.in_words(),
    }
    shown = {
        "Where all assumptions hold (in brackets: the lowest and the highest seed)": plain_table(
            rows, options
        ),
        "Each case: powers of d (in brackets: theory), and scores with their factor": case_table(rows),
    }
    cases = [f"- {name}: {case.says}" for name, case in scores.CASES.items()]
    about = [f"- {name}: {value}" for name, value in head.items()]
    page = ["# Scale sweep", "", *about, ""]
    screen.say("\n".join(about))
    for title, lines in shown.items():
        page += [f"## {title}", "", *tables.markdown(lines), ""]
        screen.show(tables.table(lines, title), tables.WIDTH)
    screen.say("\n".join(cases))
    page += [*cases, "", "![Spread, largest weight and entropy against head width](scale.png)", ""]
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
    record = {"options": asked, "machine": head, "rows": [row.as_dict() for row in rows]}
    folder.write_json(out / "scale.json", record)
    folder.write(out / "scale.md", "\n".join(page))
    folder.write(out / "scale.png", figure(rows, options))
    screen.say(f"written to {out}")


if __name__ == "__main__":
    with script("scale_sweep.py"):
        asked = tyro.cli(Options, description=__doc__)
    main(asked)
