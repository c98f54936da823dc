"""The command line: frozen dataclasses, read by tyro; a group of options for each variant.

A variant's group is made from the signature of its factory, so no list of options is kept twice.
"""

import dataclasses
import inspect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

import tyro

import jaxattn as ja
import variants
from experiments.lib.model import Shape
from experiments.lib.plays import Text

# Arguments that may differ from layer to layer, and what gives each layer its own.
SCHEDULES: dict[str, tuple[tuple[str, Callable[..., Sequence[Any]]], ...]] = {
    "mohsa": (("overlap", variants.overlap_schedule),)
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
    """Optimizer steps; the default sees each symbol at most once."""
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


def variant_group(name: str) -> type:
    """A dataclass with the arguments of the variant's factory, and the help of its docstring.

    >>> variant_group("dcmha")(rank=3).rank
    3
    """
    fields = {}
    for function in (
        variants.VARIANTS[name],
        *(schedule for _, schedule in SCHEDULES.get(name, ())),
    ):
        hints, texts = get_type_hints(function), argument_texts(function.__doc__ or "")
        for argument in _arguments(function):
            default = "fixed" if argument.name == "kind" else argument.default
            kind = Annotated[hints[argument.name], tyro.conf.arg(help=texts.get(argument.name, ""))]
            fields.setdefault(argument.name, (argument.name, kind, dataclasses.field(default=default)))
    group = dataclasses.make_dataclass(name, fields.values(), frozen=True)
    group.__doc__ = (variants.VARIANTS[name].__doc__ or "").partition("\n")[0]
    return group


def argument_texts(docstring: str) -> dict[str, str]:
    """What a docstring says about each argument under `Args:`.

    >>> argument_texts("One line.\\n\\nArgs:\\n    a, b: two\\n        things.\\n    c: one.\\n")
    {'a': 'two things.', 'b': 'two things.', 'c': 'one.'}
    """
    section = inspect.cleandoc(docstring).partition("Args:\n")[2].partition("\n\n")[0]
    texts = {}
    for entry in re.split(r"\n(?=    \S)", section):
        names, _, text = entry.partition(": ")
        for name in names.split(","):
            texts[name.strip()] = " ".join(text.split())
    return texts


def complete(base: type[Asked]) -> type[Asked]:
    """`base` with a group of options for each variant that has any."""
    groups = {name: variant_group(name) for name in variants.VARIANTS}
    fields = [
        (name, group, dataclasses.field(default=group()))
        for name, group in groups.items()
        if dataclasses.fields(group)
    ]
    made = dataclasses.make_dataclass(base.__name__, fields, bases=(base,), frozen=True)
    made.__doc__ = base.__doc__
    return cast(type[Asked], made)


def parse(default: Asked, description: str, argv: Sequence[str] | None) -> Asked:
    """Read the command line over `default`; what tyro refuses ends the process with code 2."""
    return tyro.cli(
        type(default),
        description=description,
        default=default,
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def peek(argv: Sequence[str], flag: str, default: str) -> str:
    """The value of `flag`, before the defaults of the other options are known.

    >>> peek(["--seed", "1", "--preset=nanogpt"], "--preset", "default")
    'nanogpt'
    """
    for argument, following in itertools.pairwise([*argv, ""]):
        if argument == flag:
            return following
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return default


def settings(options: Any, name: str) -> dict[str, Any]:
    """The arguments of the variant's factory, as they were asked for."""
    group = getattr(options, name, None)
    return {} if group is None else dataclasses.asdict(group)


def refuse_idle(options: Any, variant: str) -> None:
    """Raises ValueError when an option of another variant was given: it would do nothing."""
    for name in variants.VARIANTS:
        asked = settings(options, name)
        usual = dataclasses.asdict(variant_group(name)())
        for argument in asked:
            if name != variant and asked[argument] != usual[argument]:
                raise ValueError(
                    f"--{dashed(name)}.{dashed(argument)}: got {asked[argument]!r}, but the "
                    f"variant is {variant}; add --variant {name}, or leave the option out"
                )


def transforms(options: Any, name: str, layers: int) -> list[ja.HeadTransform]:
    """The variant's transform for each layer.

    Raises:
        ValueError: the factory refuses the options.
    """
    factory, asked = variants.VARIANTS[name], settings(options, name)
    for argument, value in asked.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{dashed(name)}.{dashed(argument)}: got {value}, expected a finite number")
    own = {argument.name for argument in _arguments(factory)}
    layer_settings = [{k: v for k, v in asked.items() if k in own} for _ in range(layers)]
    for argument, schedule in SCHEDULES.get(name, ()):
        keys = [a.name for a in _arguments(schedule)]
        values = schedule(depth=layers, **{key: asked[key] for key in keys})
        for layer, value in zip(layer_settings, values, strict=True):
            layer[argument] = value
    return [factory(**layer) for layer in layer_settings]


def dashed(name: str) -> str:
    return name.replace("_", "-")


def _arguments(function: Callable) -> list[inspect.Parameter]:
    """What a user may choose: the depth of a schedule is the number of layers."""
    return [a for a in inspect.signature(function).parameters.values() if a.name != "depth"]


def shape(sizes: Sizes, text: Text) -> Shape:
    return Shape(symbols=len(text.symbols), **dataclasses.asdict(sizes))


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
    for seed in seeds:
        expect("seed", seed, 0 <= seed < 2**31, "a whole number from 0 to 2147483647")
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
