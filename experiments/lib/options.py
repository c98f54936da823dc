"""The command line: frozen dataclasses, read by tyro; a variant's options are the fields of its class."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

import tyro

import jaxattn as ja
import variants
from experiments.lib.model import Shape
from experiments.lib.named import usual


@dataclass(frozen=True)
class Overlaps:
    """How mohsa's overlap goes with depth; `variants.overlap_schedule` has the formulas."""

    kind: Literal["fixed", "inc", "dec"] = "fixed"
    """How the overlap goes with the layer l = 0, 1, ...: the same everywhere, growing or shrinking by one."""
    start: Literal[0, 1] = 0
    """Whether counting starts from 0 (the first, or last, layer is plain MHA) or 1."""
    every: int = 1
    """Layers that share one overlap."""

    def layers(self, transform: Any, depth: int) -> list[ja.HeadTransform]:
        overlaps = variants.overlap_schedule(
            self.kind, depth, overlap=transform.overlap, start=self.start, every=self.every
        )
        return [dataclasses.replace(transform, overlap=overlap) for overlap in overlaps]


# Variants that may differ from layer to layer, and the options that say how.
SCHEDULES: dict[str, type] = {"mohsa": Overlaps}

# What people type for an option of another name.
ALIASES = {
    "--lr": "--learning-rate",
    "--wd": "--weight-decay",
    "--bs": "--batch",
    "--batch-size": "--batch",
    "--max-steps": "--steps",
    "--iters": "--steps",
    "--n-layers": "--layers",
    "--num-layers": "--layers",
    "--depth": "--layers",
    "--n-heads": "--heads",
    "--num-heads": "--heads",
    "--d-model": "--width",
    "--dim": "--width",
    "--seq-len": "--context",
    "--block-size": "--context",
    "--output": "--out",
    "--output-dir": "--out",
    "--data": "--text-file",
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    layers: int = 4
    """Blocks of attention and MLP."""
    width: int = 128
    """Width of the states; the MLP is four times as wide inside."""
    heads: int = 4
    """Attention heads a layer; must divide the width."""
    context: int = 128
    """Symbols a window: how far back attention can see."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary queries and keys, or a learned vector for each place."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm (without bias) before attention, MLP and readout."""
    init_sd: float | None = None
    """Standard deviation of the initial weights; None: 1/sqrt(fan-in)."""


@dataclass(frozen=True)
class Training:
    """How it is trained: AdamW, linear warm-up, cosine to a final rate."""

    steps: int = 1500
    """Optimizer steps; the default sees each symbol at most once. More than a run has, with --resume,
    extends it: from then on the learning rate follows the schedule of the larger number, so it jumps up
    where the shorter schedule had come down, and the numbers are not those of one long run."""
    batch: int = 16
    """Windows a step."""
    learning_rate: float = 4e-3
    """Highest learning rate, reached after the warm-up."""
    final_rate: float = 0.1
    """Last learning rate, as a part of the highest."""
    warmup: int = 100
    """Steps of warm-up (at most a tenth of all steps)."""
    weight_decay: float = 0.1
    """Decay of the weights (not of scales and biases)."""
    b2: float = 0.99
    """Adam's decay of the second moment."""
    clip: float = 1.0
    """Largest global norm of the gradient."""
    chunk: int = 20
    """Most steps in one compiled call; fewer where something is due before."""


Asked = TypeVar("Asked")


def prefix(name: str) -> str:
    """What the options of a variant begin with.

    >>> prefix("talking_heads"), prefix("my.module:head_scale")
    ('talking-heads', 'head-scale')
    """
    return dashed(name.rpartition(":")[2].rpartition(".")[2])


def complete(base: type[Asked], names: Sequence[str]) -> type[Asked]:
    """`base` with a group of options for each of these variants that has any.

    Raises:
        ValueError: a variant is not there, or two have options that begin alike.
    """
    fields, taken = [], {}
    for name in names:
        transform: Any = usual(name)
        schedule = SCHEDULES.get(name)
        if not dataclasses.fields(transform) and schedule is None:
            continue
        if prefix(name) in taken:
            raise ValueError(
                f"{taken[prefix(name)]} and {name} both have options --{prefix(name)}.*; rename one"
            )
        taken[prefix(name)] = name
        said = (type(transform).__doc__ or "").partition("\n")[0]
        kind: Any = type(transform)
        default: Any = transform
        if schedule is not None:
            parts = [("transform", default), ("schedule", schedule())]
            kind = dataclasses.make_dataclass(
                kind.__name__,
                [(part, _merged(type(value)), dataclasses.field(default=value)) for part, value in parts],
                frozen=True,
            )
            kind.__doc__ = said
            default = kind()
        kind = Annotated[kind, tyro.conf.arg(name=prefix(name), help=said)]
        fields.append((_field(name), kind, dataclasses.field(default=default)))
    made = dataclasses.make_dataclass(base.__name__, fields, bases=(base,), frozen=True)
    made.__doc__ = base.__doc__
    return cast(type[Asked], made)


def _values(made: Any) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}


def _merged(kind: type) -> Any:
    return Annotated[kind, tyro.conf.arg(name="")]


def _field(name: str) -> str:
    """Of a variant in the options; no option of a script has such a name."""
    return prefix(name).replace("-", "_") + "_options"


def parse(default: Asked, description: str, argv: Sequence[str]) -> Asked:
    """Read the command line over `default`.

    What tyro refuses ends the process with code 2; what a variant refuses, in a line of its own words.
    """

    def read() -> Asked:
        return tyro.cli(type(default), description=description, default=default, args=argv)

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return read()
        except SystemExit as end:
            if not end.code:
                raise
            refusal = _refusal(end)
    if refusal is not None:
        raise SystemExit(f"{os.path.basename(sys.argv[0])}: {refusal}")
    return read()  # again, for its message


def _refusal(end: BaseException) -> ValueError | None:
    """The error of a variant's own checks that made tyro end, if it was one: tyro would put it into a box."""
    cause = end.__context__
    while cause is not None:
        frames = list(traceback.walk_tb(cause.__traceback__))
        if type(cause) is ValueError and not frames[-1][0].f_globals.get("__name__", "").startswith("tyro"):
            return cause
        cause = cause.__context__
    return None


def misused(message: str) -> SystemExit:
    """To raise where the command line cannot be read: one line, code 2."""
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    return SystemExit(2)


def check_flags(argv: Sequence[str], names: Sequence[str]) -> None:
    """Refuse names that options have in other programs (code 2), and options of other variants (code 1)."""
    for argument in argv:
        flag = dashed(argument.partition("=")[0])
        if flag in ALIASES:
            raise misused(f"{flag}: there is no such option; did you mean {ALIASES[flag]}?")
        group, dot, _ = flag.removeprefix("--").partition(".")
        for name in variants.VARIANTS:
            if flag.startswith("--") and dot and group == prefix(name) and group not in map(prefix, names):
                got = f"{argument}".partition("=")[2] or next(iter(peek_all(argv, argument)), "")
                raise SystemExit(
                    f"{os.path.basename(sys.argv[0])}: {flag}: got {got}, but the variant is "
                    f"{' '.join(names)}; add --variant {name}, or leave the option out"
                )


def peek(argv: Sequence[str], flag: str, default: str) -> str:
    """The value of `flag`, before the defaults of the other options are known.

    >>> peek(["--seed", "1", "--preset=nanogpt"], "--preset", "default")
    'nanogpt'
    """
    return (peek_all(argv, flag) or [default])[0]


def peek_all(argv: Sequence[str], flag: str) -> list[str]:
    """All values of `flag`.

    >>> peek_all(["--variants", "mha", "moh", "--quick"], "--variants")
    ['mha', 'moh']
    """
    found = []
    for place, argument in enumerate(argv):
        if argument == flag:
            found = list(itertools.takewhile(lambda value: not value.startswith("--"), argv[place + 1 :]))
        elif argument.startswith(f"{flag}="):
            found = [argument.removeprefix(f"{flag}=")]
    return found


def settings(options: Any, name: str) -> dict[str, Any]:
    """The options of a variant as they were asked for, ready for JSON."""
    group = getattr(options, _field(name), None)
    if group is None:
        return {}
    values = {}
    for part in [group.transform, group.schedule] if name in SCHEDULES else [group]:
        values |= _values(part)
    return json.loads(json.dumps(values, default=repr))


def transforms(options: Any, name: str, layers: int) -> list[ja.HeadTransform]:
    """The variant's transform for each layer.

    Raises:
        ValueError: an option has a value that the variant refuses.
    """
    group = getattr(options, _field(name), None)
    for option, value in settings(options, name).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{prefix(name)}.{dashed(option)}: got {value}, expected a finite number")
    if name in SCHEDULES and group is not None:
        return group.schedule.layers(group.transform, layers)
    return [usual(name) if group is None else group] * layers


def rebuilt(name: str, settings: dict[str, Any], layers: int) -> list[ja.HeadTransform]:
    """The transforms again from what `settings` wrote.

    >>> rebuilt("moh", {"top_k": 1}, layers=2) == [variants.moh(top_k=1)] * 2
    True
    """

    def own(kind: Any) -> dict[str, Any]:
        known = {field.name for field in dataclasses.fields(kind)}
        return {k: _tuples(v) for k, v in settings.items() if k in known}

    transform: Any = usual(name)
    transform = dataclasses.replace(transform, **own(transform))
    schedule = SCHEDULES.get(name)
    return [transform] * layers if schedule is None else schedule(**own(schedule)).layers(transform, layers)


def _tuples(value: Any) -> Any:
    """JSON has lists for tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def dashed(name: str) -> str:
    return name.replace("_", "-")


def shape(sizes: Sizes, symbols: int) -> Shape:
    return Shape(symbols=symbols, **dataclasses.asdict(sizes))


def chunk(most: int, *due: int) -> int:
    """Steps of one compiled call: at most `most`, and a divisor of what is `due`.

    >>> chunk(20, 500, 50)
    10
    """
    return max(size for size in range(1, most + 1) if math.gcd(*due) % size == 0)


def check(sizes: Sizes, training: Training, seeds: Sequence[int], **counts: int) -> None:
    """Raises ValueError naming the option, what was got and what was expected."""

    def expect(name: str, got: Any, fits: bool, expected: str) -> None:
        if not fits:
            raise ValueError(f"--{dashed(name)}: got {got}, expected {expected}")

    whole = {**dataclasses.asdict(sizes), **dataclasses.asdict(training), **counts}
    for name, value in whole.items():
        if isinstance(value, int) and name != "warmup":
            expect(name, value, value >= 1, "a whole number of at least 1")
    check_seeds(seeds)
    expect("heads", sizes.heads, sizes.width % sizes.heads == 0, f"a divisor of --width {sizes.width}")
    sd = sizes.init_sd
    expect("init_sd", sd, sd is None or 0 < sd < math.inf, "a positive number")
    t = training
    expect("learning_rate", t.learning_rate, 0 < t.learning_rate < math.inf, "a positive number")
    expect("final_rate", t.final_rate, 0 <= t.final_rate <= 1, "a number from 0 to 1")
    expect("warmup", t.warmup, t.warmup >= 0, "a whole number of at least 0")
    expect("weight_decay", t.weight_decay, 0 <= t.weight_decay < math.inf, "a number of at least 0")
    expect("b2", t.b2, 0 <= t.b2 < 1, "a number in [0, 1)")
    expect("clip", t.clip, 0 < t.clip < math.inf, "a positive number")


def check_seeds(seeds: Sequence[int]) -> None:
    """Raises ValueError for a seed that is none, and for one that comes twice."""
    for place, seed in enumerate(seeds):
        if not 0 <= seed < 2**31:
            raise ValueError(f"--seed: got {seed}, expected a whole number from 0 to 2147483647")
        if seed in seeds[:place]:
            raise ValueError(
                f"--seeds: got {seed} twice, expected different seeds: the same one adds no evidence"
            )
