"""Where the time of an engine goes: what XLA ran, by step of the form, and what each multiplied and moved.

    python experiments/profile.py                               talking_heads on blocked, forward and backward
    python experiments/profile.py --variant mha dcmha --cores 2

The compiled program is traced by JAX's profiler; each operation is attributed to a step by the products it
holds and by the named scopes of the engines. On one core operations do not overlap and the times add up to
the whole; on more, a step's time is what it took while others ran beside it. Memory is what an operation
reads and writes, arithmetic what its products multiply and add (2 a MAC), both from shapes.
"""

import os
import re
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tyro
from jax.profiler import ProfileData
from rich.table import Table

import jaxattn as ja
import variants
from experiments import bench
from experiments.lib.screen import script

HEADS, WIDTH = 16, 64
CONTROL = ("while", "conditional", "call")  # hold operations, and are none
BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8}  # every other type: 4
SCOPES = {  # by the name stack of an operation, the first that fits
    "factors gradient": "gradient of row factors",
    "static gradient": "gradient of static matrices",
    "softmax": "softmax and its derivative",
    "mix": "low-rank and diagonal mixes",
    "dynamic_slice": "keys and rows cut out",
    "dynamic_update_slice": "gradients of keys, added",
    "transpose": "layout",
}


@dataclass(frozen=True)
class Options:
    variant: tuple[str, ...] = ("talking_heads",)
    engine: str = "blocked"
    batch: int = 2
    length: int = 1024
    runs: int = 5
    cores: int = 1


class Operation(NamedTuple):
    """One operation of a compiled program: its result, operands, name stack, and the program it calls."""

    shape: str
    code: str
    operands: list[str]
    stack: str
    calls: str | None
    contracted: list[int]  # axes of the first operand that a product sums over


class Cost(NamedTuple):
    """What a step took in one run."""

    milliseconds: float = 0
    gigabytes: float = 0
    gigaflops: float = 0


class Program(NamedTuple):
    """Operations by name, and the names of those in each inner program."""

    operations: dict[str, Operation]
    inner: dict[str, list[str]]


def parse(text: str) -> Program:
    """The operations of a compiled program's text."""
    operations, inner, where = {}, defaultdict(list), ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            where = head[1]
        elif row := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line):
            name, shape, code, rest = row.groups()
            stack, calls = re.search(r'op_name="([^"]*)"', rest), re.search(r"calls=%?([\w.\-]+)", rest)
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            axes = re.search(r"lhs_contracting_dims={([\d,]+)}", rest)
            contracted = [int(axis) for axis in axes[1].split(",")] if axes else []
            stack, calls = (found[1] if found else "" for found in (stack, calls))
            operations[name] = Operation(shape, code, operands, stack, calls or None, contracted)
            inner[where].append(name)
    return Program(operations, dict(inner))


def sizes_of(shape: str) -> list[list[int]]:
    """The sizes of each array in an HLO shape."""
    arrays = re.findall(r"\w+\[([\d,]*)\]", shape)
    return [[int(n) for n in sizes.split(",") if n] for sizes in arrays]


def moved(program: Program, name: str) -> int:
    """Bytes that an operation reads and writes."""
    operation = program.operations[name]
    known = [program.operations[o].shape for o in operation.operands if o in program.operations]
    arrays = [a for shape in (operation.shape, *known) for a in re.findall(r"(\w+)\[([\d,]*)\]", shape)]
    return sum(
        BYTES.get(kind, 4) * int(np.prod([int(n) for n in sizes.split(",") if n])) for kind, sizes in arrays
    )


def multiplied(program: Program, name: str) -> int:
    """Multiplications and additions of an operation's products."""
    operation, total = program.operations[name], 0
    for part in (program.operations[n] for n in (name, *program.inner.get(operation.calls or "", []))):
        if part.code == "dot":
            (out,), (first,) = sizes_of(part.shape), sizes_of(program.operations[part.operands[0]].shape)
            total += 2 * int(np.prod(out)) * int(np.prod([first[axis] for axis in part.contracted]))
    return total


def step_of(program: Program, name: str, heads: int) -> str:
    """The step of the form to which an operation belongs."""
    operation = program.operations[name]
    names = [name, *program.inner.get(operation.calls or "", [])]
    parts = [program.operations[n] for n in names]
    for part in parts:
        if part.code == "dot":
            operands = [program.operations[o].shape for o in part.operands if o in program.operations]
            square = lambda shape: any(sizes[-2:] == [heads, heads] for sizes in sizes_of(shape))
            if square(part.shape):
                return "gradient of static matrices"
            return "static mixes" if any(map(square, operands)) else "products of heads"
    stack = " ".join(part.stack for part in parts)
    found = (title for scope, title in SCOPES.items() if re.search(rf"(^|[/(]){scope}($|[/) ])", stack))
    return next(found, "layout" if operation.code == "copy" or "copy" in name else "rest")


def measure(program_text: str, folder: Path, runs: int) -> dict[str, Cost]:
    """What each step took in one run, from the traces in a folder."""
    program = parse(program_text)
    steps: dict[str, Cost] = defaultdict(Cost)
    for trace in folder.glob("**/*.xplane.pb"):
        for plane in ProfileData.from_file(str(trace)).planes:
            for event in (event for line in plane.lines for event in line.events):
                operation = program.operations.get(event.name)
                if operation is not None and operation.code not in CONTROL:
                    name, step = event.name, step_of(program, event.name, HEADS)
                    more = (
                        event.duration_ns / 1e6,
                        moved(program, name) / 1e9,
                        multiplied(program, name) / 1e9,
                    )
                    steps[step] = Cost(*(a + b / runs for a, b in zip(steps[step], more, strict=True)))
    return dict(sorted(steps.items(), key=lambda item: -item[1].milliseconds))


def profile(variant: str, options: Options) -> tuple[float, dict[str, Cost]]:
    """Milliseconds of a run that is not traced, and of the traced ones by step."""
    attn = bench.at_defaults(variant, HEADS, WIDTH)
    if options.engine == "routed":
        spec = ja.HeadSpec(model=HEADS * WIDTH, heads=HEADS)
        attn = ja.attention(spec, variants.moh(shared=HEADS // 8, top_k=HEADS // 2 - HEADS // 8))
    sides = bench.form(attn, options.batch, options.length, routed=options.engine == "routed")
    run = lambda *sides: ja.attend(*sides, mask=ja.causal(), engine=options.engine)[0]
    program = jax.jit(bench.gradient(run)).lower(*sides).compile()

    def turn() -> float:
        began = time.perf_counter()
        jax.block_until_ready(program(*sides))
        return 1e3 * (time.perf_counter() - began)

    turn()
    whole = float(np.median([turn() for _ in range(options.runs)]))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(options.runs):
                turn()
        return whole, measure(program.as_text() or "", Path(folder), options.runs)


def main(options: Options) -> None:
    os.sched_setaffinity(0, set(range(options.cores)))
    with script("profile.py") as (screen, _):
        for variant in options.variant:
            whole, steps = profile(variant, options)
            sizes = f"B={options.batch} T={options.length} H={HEADS} D={WIDTH}"
            title = f"{variant} on {options.engine}, {sizes}, cores: {options.cores}; a run: {whole:.0f} ms"
            table = Table("step", "ms", "share", "GB", "GB/s", "GFLOP", "GFLOP/s", title=title)
            total = sum(cost.milliseconds for cost in steps.values())
            for step, (spent, memory, work) in steps.items():
                rates = f"{1e3 * memory / spent:.0f}", f"{work:.1f}", f"{1e3 * work / spent:.0f}"
                table.add_row(step, f"{spent:.0f}", f"{spent / total:.0%}", f"{memory:.2f}", *rates)
            table.add_row("all", f"{total:.0f}")
            screen.show(table)


if __name__ == "__main__":
    with script("profile.py"):
        asked = tyro.cli(Options, description=__doc__)
    main(asked)
