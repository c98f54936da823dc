"""Train every registered variant in the same way, and put them under one ledger.

    python experiments/compare.py                two seeds
    python experiments/compare.py --quick        one seed, a smaller model, few steps
    python experiments/compare.py --variants mha moh my.module:factory

Paired: at one seed all variants start with the same values in the weights that they share and see
the same batches in the same order, so that their difference to mha says more than either loss. All
variants advance in turn, a compiled call each, so that their step times are measured side by side.
The folder holds report.md, report.png, results.json, metrics.jsonl and config.json. There are no
checkpoints: a comparison that was stopped starts again, in another folder.

The learning rate was chosen for mha at the steps of this command, by the validation loss of
    python experiments/train_variant.py --steps 360 --learning-rate RATE
which at seed 0 was 1.986 for 1e-3, 1.889 for 2e-3, 1.854 for 4e-3 and 1.909 for 8e-3. All variants
take it, so one that wants another rate is at a disadvantage here.
"""

if __name__ == "__main__":  # Ctrl-C while the imports run, which take seconds: nothing is begun, so just end
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import tyro

import jaxattn as ja
import variants
from experiments.lib import batches, facts, folder, model, named, options, plays, report, train
from experiments.lib.options import Sizes, Training
from experiments.lib.screen import Screen, Steps, refusals, script
from experiments.lib.stop import Stop

NAME = "compare.py"
SCRIPT = f"experiments/{NAME}"
BASELINE = "mha"


@dataclass(frozen=True)
class Options:
    variants: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="[{" + named.KNOWN + "}|MODULE:FACTORY ...]")
    ] = ()
    """Which to compare; none: every registered one. mha always joins, as the baseline. With --help
    after them, the options of these variants are listed."""
    seeds: tuple[int, ...] = (0, 1)
    """One training of each variant for each."""
    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small defaults for the other options: to see that it works, not who is better."""
    out: Path | None = None
    """Folder for the results; left out: a new one under runs/."""
    text_file: Path | None = None
    """A UTF-8 text to train on (first 90 %) and validate on (last 10 %), instead of the plays."""
    sizes: tyro.conf.OmitArgPrefixes[Sizes] = field(default_factory=Sizes)
    training: tyro.conf.OmitArgPrefixes[Training] = field(default_factory=lambda: Training(steps=360))


NOTES = [
    "Parameters and the cache are of the whole model, MACs and cache of all attention layers for "
    "one token in a full window; heads that a router leaves out are counted as executed.",
    "Peak memory: temporaries of the compiled training step. Step time: median; its ratio to mha: "
    "median over calls that were made in turn.",
    "Validation loss: nats a symbol over the whole validation part, mean of the seeds. Minus mha: "
    "mean and range of the differences at equal seeds.",
]

QUICK: dict[str, Any] = {
    "seeds": (0,),
    "sizes": Sizes(layers=2, width=64, context=64),
    "training": Training(steps=300),
}


class Plan(NamedTuple):
    """All that the options lead to, before the first step."""

    options: Any
    text: plays.Text
    shape: model.Shape
    transforms: dict[str, list[ja.HeadTransform]]
    argv: list[str]
    folder: Path = Path()


class Runner(NamedTuple):
    """One variant, compiled: the same program serves all seeds."""

    model: model.Model
    optimizer: Any
    advance: Any
    evaluate: Any
    memory: int | None
    seconds: list[float]  # of each compiled call


class Outcome(NamedTuple):
    """Of one training."""

    loss: float  # over the whole validation part
    balance: float | None  # of the last step, where the variant has such a loss


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    with script(NAME) as (screen, stop):
        asked = parse(argv)
        with refusals(NAME):
            plan = prepare(asked, argv)
            models = {name: create(plan, name, asked.seeds[0]) for name in plan.transforms}
        with folder.hold(asked.out, "compare", way_out="compare.py does not go on with one: ") as held:
            plan = plan._replace(folder=held.path)
            again = facts.command([*facts.without(argv, "--out"), "--out", f"{plan.folder}-again"], SCRIPT)
            stop.anew = again
            stop.advice = f"there are no checkpoints; start again with: {again}"
            runners = {name: compiled(plan, name, made, screen) for name, made in models.items()}
            outcomes = fit(plan, runners, screen, stop, held.check)
            base = runners[BASELINE]
            rows = [ledger_row(plan, name, runners[name], outcomes[name], base) for name in runners]
            held.check()
            finish(plan, rows, screen)


def parse(argv: Sequence[str]) -> Any:
    named = options.peek_all(argv, "--variants")
    listed = named if {"-h", "--help"} & set(argv) else names(named)
    try:
        complete = options.complete(Options, listed)
    except ValueError as error:
        raise options.misused(f"--variants: {error}") from None
    options.check_flags(argv, names(named))
    return options.parse(complete(**(QUICK if "--quick" in argv else {})), __doc__ or "", argv)


def names(asked: Sequence[str]) -> list[str]:
    """The variants to compare, the baseline first.

    >>> names(["moh"])
    ['mha', 'moh']
    """
    return list(dict.fromkeys([BASELINE, *(asked or variants.VARIANTS)]))


def prepare(asked: Any, argv: list[str]) -> Plan:
    """Check the options and build what they ask for; writes nothing.

    Raises:
        ValueError, OSError: an option cannot be followed; the message names it.
    """
    options.check(asked.sizes, asked.training, asked.seeds)
    if not asked.seeds:
        raise ValueError("--seeds: got none, expected at least one")
    text = plays.load_file(asked.text_file) if asked.text_file else plays.load_plays()
    batches.check(text, asked.sizes.context, asked.training.batch)
    layers = asked.sizes.layers
    transforms = {name: options.transforms(asked, name, layers) for name in names(asked.variants)}
    return Plan(asked, text, options.shape(asked.sizes, len(text.symbols)), transforms, argv)


def compiled(plan: Plan, name: str, made: model.Model, screen: Screen) -> Runner:
    """Compile a variant's training steps, ahead of the first one."""
    started = time.monotonic()
    screen.say(f"compiling {name} ...")
    training, shape = plan.options.training, plan.shape
    optimizer, advance = train.build(model.loss_fn(made), training)
    state = train.init(made.params, optimizer, jax.random.key(0))
    windows = np.zeros((chunk(training), training.batch, shape.context + 1), np.int32)
    program = advance.lower(state, windows).compile()
    usage = program.memory_analysis()
    memory = None if usage is None else usage.temp_size_in_bytes
    screen.say(f"compiled, took {time.monotonic() - started:.1f} s")
    return Runner(made, optimizer, program, model.make_evaluate(made, training.batch), memory, [])


def create(plan: Plan, name: str, seed: int) -> model.Model:
    """Raises ValueError when the sizes do not suit the variant."""
    return model.create(plan.shape, plan.transforms[name], jax.random.key(seed))


def chunk(training: Training) -> int:
    return options.chunk(training.chunk, training.steps)


def fit(
    plan: Plan, runners: dict[str, Runner], screen: Screen, stop: Stop, check: Callable[[], None]
) -> dict[str, list[Outcome]]:
    """Train all variants, seed by seed.

    Raises:
        NonFinite: too many steps of one variant had to be left out.
    """
    asked = plan.options
    folder.write_json(plan.folder / "config.json", config(plan))
    folder.rewind(plan.folder / "metrics.jsonl", 0)
    calls = len(asked.seeds) * len(runners) * asked.training.steps // chunk(asked.training)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runners}
    with screen.progress(calls, unit="call") as steps:
        done = 0
        for seed in asked.seeds:
            found = fit_seed(plan, runners, seed, steps, done, lambda: (stop.check(), check()))
            done += calls // len(asked.seeds)
            for name, outcome in found.items():
                outcomes[name].append(outcome)
                screen.say(f"seed {seed}, {name}: validation {outcome.loss:.4f} nats a symbol")
    return outcomes


def fit_seed(
    plan: Plan, runners: dict[str, Runner], seed: int, steps: Steps, done: int, check: Callable[[], Any]
) -> dict[str, Outcome]:
    """Train all variants at one seed: each takes its turn on the same batches."""
    text, training, context = plan.text, plan.options.training, plan.shape.context
    log, size = plan.folder / "metrics.jsonl", chunk(training)
    states = {name: start(plan, runner, name, seed) for name, runner in runners.items()}
    last = {}
    for turn, first in enumerate(range(0, training.steps, size)):
        starts = np.stack(
            [
                batches.window_starts(seed, step, len(text.train), context, training.batch)
                for step in range(first, first + size)
            ]
        )
        windows = batches.windows(text.train, starts, context)
        for name in rotated(list(runners), turn):
            began = time.perf_counter()
            states[name], records = runners[name].advance(states[name], windows)
            jax.block_until_ready(states[name].step)
            runners[name].seconds.append((time.perf_counter() - began) / size)
            lines = train.rows(records, states[name], starts)
            check()
            seconds = {"seconds": round(runners[name].seconds[-1], 6)}
            folder.append(log, [{"variant": name, "seed": seed} | line | seconds for line in lines])
            train.refuse_if_ended(states[name], lines, name)
            last[name] = lines[-1]
            done += 1
            steps.at(
                done, f"seed {seed}, step {first + size}, {name}, loss {lines[-1]['loss'] or np.nan:.3f}"
            )

    outcomes = {}
    for name, runner in runners.items():
        check()
        nats = runner.evaluate(states[name].params, text.valid)
        outcomes[name] = Outcome(nats, last[name].get("balance_loss"))
        line = {"variant": name, "seed": seed, "step": training.steps, "valid_loss": nats}
        folder.append(log, [line])
    return outcomes


def start(plan: Plan, runner: Runner, name: str, seed: int) -> train.State:
    params = create(plan, name, seed).params
    return train.init(params, runner.optimizer, jax.random.key(seed))


def rotated(names: list[str], turn: int) -> list[str]:
    """Another one goes first at each turn, so that none always follows the same other.

    >>> rotated(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    first = turn % len(names)
    return names[first:] + names[:first]


def config(plan: Plan) -> dict[str, Any]:
    asked = plan.options
    return {
        "seeds": list(asked.seeds),
        "sizes": dataclasses.asdict(asked.sizes),
        "training": dataclasses.asdict(asked.training),
        "settings": {name: options.settings(asked, name) for name in plan.transforms},
        "text": {"name": plan.text.name, "sha256": plan.text.sha256},
        "made_with": facts.made_with(plan.argv),
    }


def ledger_row(plan: Plan, name: str, runner: Runner, outcomes: list[Outcome], base: Runner):
    """What is counted, what was measured and what was learned, in one row."""
    context = plan.shape.context
    ledgers = [ja.ledger(attn, 1, context, context).as_dict() for attn in runner.model.attention]
    cache = sum(ledger["cache_elements"] for ledger in ledgers)
    count = model.count(runner.model.params)
    ratios = np.array(runner.seconds) / np.array(base.seconds)
    balances = [o.balance for o in outcomes if o.balance is not None]
    return report.Row(
        variant=name,
        settings=", ".join(f"{k}={v}" for k, v in options.settings(plan.options, name).items()),
        parameters=count["model"],
        attention_parameters=count["attention"],
        macs=sum(ledger["total_macs"] for ledger in ledgers) // context,
        cache_elements=cache,
        cache_bytes=cache * np.dtype(np.float32).itemsize,
        memory=runner.memory,
        step_seconds=float(np.median(runner.seconds)),
        relative_step=float(np.median(ratios)),
        losses=tuple(outcome.loss for outcome in outcomes),
        balance=float(np.mean(balances)) if balances else None,
    )


def finish(plan: Plan, rows: list[report.Row], screen: Screen) -> None:
    """The shared ledger, on the screen and as files."""
    training = plan.options.training
    seen = training.steps * training.batch * plan.shape.context
    head = {
        "Text": f"{plan.text.name}, {len(plan.text.train):,} symbols to train",
        "Model": ", ".join(f"{k} {v}" for k, v in plan.shape._asdict().items()),
        "Training": f"{training.steps} steps of {training.batch} windows: {seen:,} symbols, "
        f"{seen / len(plan.text.train):.2f} epochs; learning rate {training.learning_rate}",
        "Seeds": ", ".join(map(str, plan.options.seeds)),
        "Made with": facts.in_words(),
    }
    folder.write_json(plan.folder / "results.json", [row._asdict() for row in rows])
    folder.write(plan.folder / "report.png", report.comparison(rows))
    folder.write(plan.folder / "report.md", report.markdown(rows, head, NOTES))
    screen.show(report.table(rows), report.WIDTH)
    for note in NOTES:
        screen.say(note)
    screen.say(f"written to {plan.folder}")


if __name__ == "__main__":
    main()
