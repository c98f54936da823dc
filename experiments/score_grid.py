"""The quadratic grid: how many scores there are, and what compiled programs hold of them.

    python experiments/score_grid.py             a minute on two cores
    python experiments/score_grid.py --quick     seconds: two short lengths

One score for each example, head, query and key: b h q k of them, 16 times as many for 4 times the length.
Memory is the temporaries of the compiled program, as XLA states them. Programs are compiled for shapes and
never run, so lengths whose grid fits into no memory are measured too. The folder holds grid.json, grid.md and
grid.png.
"""

import itertools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import tyro
from matplotlib.figure import Figure

import jaxattn as ja
import variants
from experiments import bench
from experiments.lib import facts, folder, report, tables
from experiments.lib.screen import Screen, script

MIB = 2**20
ENGINES = ("dense", "blocked")
MODES = (bench.FORWARD, bench.BOTH)
SLOPES = {"dense": 2, "blocked": 1}  # what each engine is built for


@dataclass(frozen=True)
class Options:
    lengths: tuple[int, ...] = (128, 512, 2048, 8192)
    """Rows T, of queries and of keys."""
    batch: int = 8
    heads: int = 8
    width: int = 64
    """Of a head."""
    variant: str = "mha"
    """A name of `variants.VARIANTS`, at its defaults."""
    quick: bool = False
    """Short rows: to see that it works."""
    out: Path | None = None
    """Folder for the results; left out: a new one under runs/."""


class Point(NamedTuple):
    """One length: scores and their bytes, and bytes of temporaries by engine and mode."""

    length: int
    entries: int
    grid: int
    memory: dict[str, int]  # "dense, forward" and so on


def key_of(engine: str, mode: str) -> str:
    return f"{engine}, {mode}"


def measure(options: Options, length: int) -> Point:
    """Count the grid, and compile every engine forward and backward.

    Raises:
        ArithmeticError: the ledger counts another number of scores than b h q k.
    """
    attn = bench.at_defaults(options.variant, options.heads, options.width)
    entries = options.batch * attn.sizes.logit_heads * length * length
    counted = ja.ledger(attn, batch=options.batch, q_len=length, k_len=length).score_elements
    if counted != entries:
        raise ArithmeticError(f"scores: the ledger counts {counted}, b h q k is {entries}")
    sides = jax.eval_shape(lambda: bench.form(attn, options.batch, length))
    memory = {}
    for engine, mode in itertools.product(ENGINES, MODES):
        run = lambda *sides, engine=engine: ja.attend(*sides, mask=ja.causal(), engine=engine)[0]
        told = bench.compiled(run if mode == bench.FORWARD else bench.gradient(run), *sides).memory
        if told is None:
            raise SystemExit(
                "score_grid: this backend tells no memory of compiled programs. Fix: run on CPU."
            )
        memory[key_of(engine, mode)] = told
    return Point(length, entries, entries * sides[0].query.dtype.itemsize, memory)


def slopes(points: list[Point]) -> dict[str, tuple[float, float]]:
    """The power of T with which each program grows: over all lengths, and over the last two."""
    lengths = [point.length for point in points]
    grown = {}
    for name in points[0].memory:
        bytes_ = [point.memory[name] for point in points]
        grown[name] = tables.power(lengths, bytes_), tables.power(lengths[-2:], bytes_[-2:])
    return grown


def grid_table(points: list[Point], mode: str) -> tables.Lines:
    """Lengths, the grid, and what both engines hold."""
    lines: tables.Lines = [
        ("T", "entries b h q k", "grid MiB", "dense MiB", "dense/grid", "blocked MiB", "blocked/grid")
    ]
    for point in points:
        held = [point.memory[key_of(engine, mode)] for engine in ENGINES]
        cells = (cell for n in held for cell in (f"{n / MIB:,.1f}", f"{n / point.grid:.3f}"))
        lines.append((f"{point.length}", f"{point.entries:,}", f"{point.grid / MIB:,.1f}", *cells))
    return lines


def slope_table(points: list[Point]) -> tables.Lines:
    lines: tables.Lines = [("temporaries", "power of T", "last two", "built for")]
    for name, (whole, last) in slopes(points).items():
        lines.append((name, f"{whole:.3f}", f"{last:.3f}", f"{SLOPES[name.split(',')[0]]}"))
    return lines


def figure(points: list[Point], options: Options) -> bytes:
    """PNG: mebibytes against rows, both axes logarithmic, fitted powers in the legend."""
    made = Figure(figsize=(7.4, 5.2), layout="constrained")
    axes = made.subplots()
    lengths = [point.length for point in points]
    axes.plot(lengths, [p.grid / MIB for p in points], ":", color="black", label="the grid itself: power 2")
    sides = [16 * options.batch * options.heads * options.width * length / MIB for length in lengths]
    axes.plot(lengths, sides, "-.", color="grey", label="4 b h T d numbers (q, k, v, heads): power 1")
    for name, (whole, _) in slopes(points).items():
        engine, mode = name.split(", ")
        color, line = f"C{ENGINES.index(engine)}", "--s" if mode == bench.FORWARD else "-o"
        label = f"{name}: power {whole:.2f}"
        axes.plot(lengths, [p.memory[name] / MIB for p in points], line, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    title = f"{options.variant}, b={options.batch} h={options.heads} d={options.width}, causal, float32"
    axes.set(xlabel="rows T", ylabel="compiled temporaries, MiB", title=title)
    axes.set_xticks(lengths, [f"{length}" for length in lengths])
    axes.grid(alpha=0.3)
    axes.legend()
    return report.png(made)


def check(options: Options) -> Options:
    """The options that run, lengths in order; raises SystemExit for one that cannot."""
    if options.quick:
        options = replace(options, lengths=(256, 512))
    if options.variant not in variants.VARIANTS:
        known = ", ".join(variants.VARIANTS)
        raise SystemExit(f"--variant: got {options.variant!r}, expected one of {known}")
    lengths = tuple(sorted(set(options.lengths)))
    if len(lengths) < 2 or lengths[0] < 1:
        raise SystemExit(f"--lengths: got {options.lengths}, expected two or more different numbers of rows")
    for name in ("batch", "heads", "width"):
        if (got := getattr(options, name)) < 1:
            raise SystemExit(f"--{name}: got {got}, expected a whole number of at least 1")
    return replace(options, lengths=lengths)


def main(options: Options) -> None:
    options = check(options)
    with script("score_grid.py") as (screen, _), folder.hold(options.out, "grid", holds="grid.json") as held:
        measure_all(options, held.path, screen)


def measure_all(options: Options, out: Path, screen: Screen) -> None:
    """Measure, print, and write to the folder `out`."""
    points = []
    for length in options.lengths:
        screen.say(f"T={length} ...")
        points.append(measure(options, length))
    sizes = f"{options.variant}, b={options.batch} h={options.heads} d={options.width}, causal, float32"
    head = {
        "Sizes": sizes,
        "Counted": "entries b h q k, equal to the ledger's score_elements at every length",
        "Machine": facts.in_words(),
    }
    shown = {f"{mode}, compiled temporaries": grid_table(points, mode) for mode in MODES}
    shown["Powers of T, fitted"] = slope_table(points)
    about = [f"- {name}: {value}" for name, value in head.items()]
    page = ["# The score grid", "", *about, ""]
    screen.say("\n".join(about))
    for title, lines in shown.items():
        page += [f"## {title}", "", *tables.markdown(lines), ""]
        screen.show(tables.table(lines, title), tables.WIDTH)
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
    record = {"options": asked, "machine": head, "slopes": slopes(points)}
    folder.write_json(out / "grid.json", record | {"points": [point._asdict() for point in points]})
    folder.write(out / "grid.md", "\n".join([*page, "![Memory against rows](grid.png)", ""]))
    folder.write(out / "grid.png", figure(points, options))
    screen.say(f"written to {out}")


if __name__ == "__main__":
    with script("score_grid.py"):
        asked = tyro.cli(Options, description=__doc__)
    main(asked)
