"""Time and memory of every variant on every engine, beside what else there is, as ratios within one run.

    python experiments/bench.py                  about ten minutes on two cores
    python experiments/bench.py --quick          two minutes: shorter rows, fewer repeats

All contestants of a group are compiled first and then run in turns, another one first in each turn; a
number is the median over turns of the ratio to the group's base in the same turn. Times are of compiled
calls on given heads (the form alone), unless a row says sublayer. torch joins where it is installed.
The folder holds bench.json, bench.md and bench.png.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from matplotlib.figure import Figure
from rich.table import Table

import jaxattn as ja
import variants
from experiments.lib import facts, folder, peers, report
from experiments.lib.screen import Screen, script

MIXED = ("mha", "talking_heads", "dcmha")  # of the figure
BOTH, FORWARD = "forward + backward", "forward"


@dataclass(frozen=True)
class Options:
    batch: int = 2
    length: int = 1024
    heads: int = 16
    width: int = 64
    """Of a head."""
    cached: int = 2048
    """Keys of the decode step."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    """Of the figure, with one example and half the heads."""
    turns: int = 9
    quick: bool = False
    """Short rows and few turns: to see that it works."""
    out: Path | None = None
    """Folder for the results; left out: a new one under runs/."""


class Entry(NamedTuple):
    """One contestant: what runs, and what was compiled for it."""

    work: Callable[[], Any]
    memory: int | None = None  # bytes of temporaries of the compiled program
    compile_seconds: float | None = None


class Result(NamedTuple):
    """One contestant of a group, measured."""

    group: str
    name: str
    milliseconds: float
    ratio: float  # time of this / time of the group's base
    memory: int | None
    compile_seconds: float | None


def compiled(function: Callable, *arguments: Any) -> Entry:
    """A jitted call, compiled now."""
    began = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - began
    analysis = program.memory_analysis()
    memory = None if analysis is None else analysis.temp_size_in_bytes
    return Entry(lambda: jax.block_until_ready(program(*arguments)), memory, seconds)


def form(attn: ja.Attention, batch: int, length: int, routed: bool = False) -> tuple[Any, ...]:
    """Both sides and the coupling of an attention, from random states."""

    @jax.jit
    def sides(rng):
        params = attn.init(rng)
        x = jax.random.normal(jax.random.fold_in(rng, 1), (batch, length, attn.spec.model))
        query = attn.query_side(params, x, routed=routed)._replace(notes={})
        return query, attn.expand(attn.key_side(params, x)), attn.coupling(params)

    return sides(jax.random.key(0))


def at_defaults(name: str, heads: int, width: int) -> ja.Attention:
    return ja.attention(ja.HeadSpec(model=heads * width, heads=heads), variants.VARIANTS[name]())


def attend(attn: ja.Attention, engine: str, mode: str, batch: int, length: int) -> Entry:
    """An attention's form on an engine, causal."""
    run = lambda *sides: ja.attend(*sides, mask=ja.causal(), engine=engine)[0]
    sides = form(attn, batch, length, routed=engine == "routed")
    return compiled(run if mode == FORWARD else gradient(run), *sides)


def gradient(run: Callable) -> Callable:
    """The gradient of the sum of squares to every argument; integers among them have none."""

    def of_all(*arguments):
        loss = lambda arguments: jnp.square(run(*arguments)).sum()
        return jax.grad(loss, allow_int=True)(arguments)

    return of_all


def jax_sdpa(mode: str, batch: int, length: int, heads: int, width: int) -> Entry:
    rng = jax.random.key(0)
    draw = lambda n: jax.random.normal(jax.random.fold_in(rng, n), (batch, length, heads, width))
    run = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    return compiled(run if mode == FORWARD else gradient(run), *map(draw, range(3)))


def sublayer(layer: nnx.Module, call: Callable, mode: str, x: jax.Array) -> Entry:
    """A whole module: states to output, and gradients of parameters and states."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    run = lambda params, x: call(nnx.merge(graph, params, rest), x)
    return compiled(run if mode == FORWARD else gradient(run), params, x)


def sublayers(mode: str, batch: int, length: int, heads: int, width: int) -> dict[str, Entry]:
    x = jax.random.normal(jax.random.key(2), (batch, length, heads * width))
    mask = peers.causal_mask(length)
    ours = ja.MultiHeadAttention(heads, heads * width, use_bias=False, engine="blocked", rngs=nnx.Rngs(0))
    return {
        "jaxattn sublayer": sublayer(ours, lambda layer, x: layer(x, mask=ja.causal()), mode, x),
        "flax sublayer": sublayer(
            peers.flax_layer(heads, width), lambda layer, x: layer(x, mask=jnp.asarray(mask)), mode, x
        ),
    }


def half_the_heads(mode: str, length: int, heads: int, width: int) -> dict[str, Entry]:
    """MoH with half its heads active, on both engines: the form on given queries, and the whole sublayer."""
    shared = max(1, heads // 8)
    transform = variants.moh(shared=shared, top_k=heads // 2 - shared)
    attn = ja.attention(ja.HeadSpec(model=heads * width, heads=heads), transform)
    params = attn.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, length, heads * width))
    made = {f"moh {engine}": attend(attn, engine, mode, 1, length) for engine in ("blocked", "routed")}
    for engine in ("blocked", "routed"):
        run = lambda params, x, engine=engine: attn.apply(params, x, mask=ja.causal(), engine=engine)[0]
        made[f"moh {engine} sublayer"] = compiled(run if mode == FORWARD else gradient(run), params, x)
    return made


def decode(name: str, options: Options) -> Entry:
    """One query row against a key side that stands, whole sublayer without the projection of the new key."""
    attn = at_defaults(name, options.heads, options.width)
    params = attn.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, options.cached, attn.spec.model))
    side = jax.jit(attn.key_side)(params, x)
    last = jnp.array([options.cached - 1])
    return compiled(lambda p, x, s: attn.attend(p, x, s, positions=last)[0], params, x[:, -1:], side)


def groups(options: Options) -> dict[str, Callable[[], dict[str, Entry]]]:
    """What is compared with what; the first of a group is its base."""
    sizes = options.batch, options.length, options.heads, options.width

    def engines(mode: str) -> dict[str, Entry]:
        made = {
            f"{name} {engine}": attend(at_defaults(name, *sizes[2:]), engine, mode, *sizes[:2])
            for name in variants.VARIANTS
            for engine in ("blocked", "dense")
        }
        made["jax.nn.dot_product_attention"] = jax_sdpa(mode, *sizes)
        if peers.HAS_TORCH:
            for name in ("sdpa", "talking_heads", "dcmha"):
                made[f"torch {name}"] = Entry(peers.torch_work(name, *sizes, mode == BOTH))
        return made

    return {
        f"the form, {BOTH}": lambda: engines(BOTH),
        f"the form, {FORWARD}": lambda: engines(FORWARD),
        f"sublayer, {BOTH}": lambda: sublayers(BOTH, *sizes),
        f"half the heads, {BOTH}": lambda: half_the_heads(BOTH, 2 * options.length, *sizes[2:]),
        f"half the heads, {FORWARD}": lambda: half_the_heads(FORWARD, 2 * options.length, *sizes[2:]),
        "one decode step": lambda: {name: decode(name, options) for name in variants.VARIANTS},
    }


def measure(group: str, entries: dict[str, Entry], turns: int) -> list[Result]:
    """Medians over turns, in each of which every contestant runs once."""
    names = list(entries)
    for entry in entries.values():
        entry.work()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            entries[name].work()
            seconds[name].append(time.perf_counter() - began)
    base = np.array(seconds[names[0]])
    return [
        Result(
            group,
            name,
            1e3 * float(np.median(seconds[name])),
            float(np.median(np.array(seconds[name]) / base)),
            entries[name].memory,
            entries[name].compile_seconds,
        )
        for name in names
    ]


def targets(results: list[Result]) -> dict[str, float]:
    """The ratios that the engines are built for; a contestant that is missing leaves its rows out."""
    times = {(r.group, r.name): r.ratio for r in results}
    core, half = f"the form, {BOTH}", f"half the heads, {BOTH}"
    rows = {f"dense / blocked: {name}": (f"{name} dense", f"{name} blocked", core) for name in MIXED}
    rows |= {
        "jax.nn.dot_product_attention / blocked mha": ("jax.nn.dot_product_attention", "mha blocked", core),
        "flax sublayer / jaxattn sublayer": ("flax sublayer", "jaxattn sublayer", f"sublayer, {BOTH}"),
        "blocked mha / torch SDPA": ("mha blocked", "torch sdpa", core),
        "torch dense talking_heads / blocked": ("torch talking_heads", "talking_heads blocked", core),
        "torch dense dcmha / blocked dcmha": ("torch dcmha", "dcmha blocked", core),
        "blocked talking_heads / blocked mha": ("talking_heads blocked", "mha blocked", core),
        "blocked dcmha / blocked mha": ("dcmha blocked", "mha blocked", core),
        "routed moh / dense moh in blocked": ("moh routed", "moh blocked", half),
        "the same, whole sublayer": ("moh routed sublayer", "moh blocked sublayer", half),
        "one decode step, dcmha / mha": ("dcmha", "mha", "one decode step"),
    }
    return {
        title: times[group, top] / times[group, bottom]
        for title, (top, bottom, group) in rows.items()
        if {(group, top), (group, bottom)} <= times.keys()
    }


def growth(options: Options) -> list[dict[str, Any]]:
    """Time and memory of forward and backward against the number of rows, one example, half the heads."""
    heads, points = max(1, options.heads // 2), []
    for length in options.lengths:
        sizes = 1, length, heads, options.width
        engines = ("blocked", "dense") if length <= 2048 else ("blocked",)  # dense would take gigabytes
        entries = {
            f"{name} {engine}": attend(at_defaults(name, *sizes[2:]), engine, BOTH, *sizes[:2])
            for name in MIXED
            for engine in engines
        }
        if "dense" in engines:
            entries["jax.nn.dot_product_attention"] = jax_sdpa(BOTH, *sizes)
        for row in measure(f"rows {length}", entries, 3):
            points.append({"rows": length} | row._asdict())
    return points


def figure(points: list[dict[str, Any]]) -> bytes:
    """PNG: milliseconds and mebibytes against rows, both axes logarithmic."""
    made = Figure(figsize=(10, 4.4), layout="constrained")
    axes = made.subplots(1, 2)
    for name in dict.fromkeys(p["name"] for p in points):
        mine = [p for p in points if p["name"] == name]
        line = "-o" if "blocked" in name else "--s" if "dense" in name else ":^"
        rows = [p["rows"] for p in mine]
        variant = name.split()[0]
        color = f"C{MIXED.index(variant)}" if variant in MIXED else "black"
        axes[0].loglog(rows, [p["milliseconds"] for p in mine], line, color=color, label=name)
        axes[1].loglog(rows, [p["memory"] / 2**20 for p in mine], line, color=color, label=name)
    for axis, unit in zip(axes, ("milliseconds", "compiled temporaries, MiB"), strict=True):
        axis.set(xlabel="rows T", ylabel=unit)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    made.suptitle("Forward + backward, causal, one example")
    return report.png(made)


def text(results: list[Result], ratios: dict[str, float], head: dict[str, Any]) -> str:
    """Markdown of everything but the figure's points."""
    lines = ["# Engines measured", "", *(f"- {k}: {v}" for k, v in head.items()), ""]
    lines += ["| ratio of times | measured |", "| --- | ---: |"]
    lines += [f"| {title} | {value:.2f} |" for title, value in ratios.items()]
    columns = "| | ms | / first | temporaries MiB | compile s |", "| --- | ---: | ---: | ---: | ---: |"
    for group in dict.fromkeys(r.group for r in results):
        lines += ["", f"## {group}", "", *columns]
        for row in (r for r in results if r.group == group):
            memory = "" if row.memory is None else f"{row.memory / 2**20:.0f}"
            compile_ = "" if row.compile_seconds is None else f"{row.compile_seconds:.1f}"
            lines.append(f"| {row.name} | {row.milliseconds:.1f} | {row.ratio:.2f} | {memory} | {compile_} |")
    return "\n".join([*lines, "", "![Time and memory against rows](bench.png)", ""])


def main(options: Options) -> None:
    if options.quick:
        options = Options(options.batch, 256, 8, 32, 256, (128, 256), 3, True, options.out)
    with script("bench.py") as (screen, _), folder.hold(options.out, "bench", holds="bench.json") as held:
        measure_all(options, held.path, screen)


def measure_all(options: Options, out: Path, screen: Screen) -> None:
    """Measure, print, and write to the folder `out`."""
    results: list[Result] = []
    for group, build in groups(options).items():
        screen.say(f"{group} ...")
        results += measure(group, build(), options.turns)
    screen.say("against rows ...")
    points = growth(options)
    ratios = targets(results)
    head = {
        "Sizes": f"B={options.batch} T={options.length} H={options.heads} D={options.width}, float32, causal",
        "Machine": facts.in_words(),
        "torch": "joined" if peers.HAS_TORCH else "not installed",
    }
    record = {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()},
        "machine": head,
        "ratios": ratios,
        "results": [r._asdict() for r in results],
        "against_rows": points,
    }
    folder.write_json(out / "bench.json", record)
    folder.write(out / "bench.md", text(results, ratios, head))
    folder.write(out / "bench.png", figure(points))
    table = Table("ratio of times", "measured", title="\n".join(f"{k}: {v}" for k, v in head.items()))
    for title, value in ratios.items():
        table.add_row(title, f"{value:.2f}")
    screen.show(table)
    screen.say(f"written to {out}")


if __name__ == "__main__":
    with script("bench.py"):
        asked = tyro.cli(Options, description=__doc__)
    main(asked)
