"""Train a small language model with any head-composition variant, and print what it costs.

    python experiments/train_variant.py                                     multi-head attention
    python experiments/train_variant.py --variant moh --moh.top-k 1
    python experiments/train_variant.py --preset nanogpt --text-file tinyshakespeare.txt

Without an argument: a decoder-only transformer (pre-norm, rotary positions) on Shakespeare's 38
plays, under one epoch. The run folder holds config.json, metrics.jsonl, ledger.json, checkpoints/,
loss.png and sample.txt. A run that was stopped goes on with the same command and --resume, and
gives the numbers of one that was not.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jaxattn as ja
import variants
from experiments.lib import batches, folder, model, options, plays, report, train
from experiments.lib.options import Sizes, Training


@dataclass(frozen=True)
class Options:
    variant: Literal[tuple(variants.VARIANTS)] = "mha"  # pyright: ignore[reportInvalidTypeForm]
    """Which attention; the options of each are listed below under its name."""
    preset: Literal["default", "nanogpt"] = "default"
    """What the other options default to. nanogpt: sizes and schedule of the CPU run in its README
    (published: 1.88 on tiny Shakespeare), all weights drawn with one standard deviation."""
    seed: int = 0
    """Of the initial weights and of the order of the text."""
    out: Path | None = None
    """Run folder; left out: a new one under runs/."""
    resume: bool = False
    """Go on from the last checkpoint of --out, or of the latest run of this variant and seed."""
    text_file: Path | None = None
    """A UTF-8 text to train on (first 90 %) and validate on (last 10 %), instead of the plays."""
    evaluate_every: int = 500
    """Steps between validations; one more comes at the end."""
    save_every: int = 100
    """Steps between checkpoints; one more comes at the end."""
    sample: int = 400
    """Symbols of text to write at the end."""
    sizes: Annotated[Sizes, tyro.conf.arg(name="")] = field(default_factory=Sizes)
    training: Annotated[Training, tyro.conf.arg(name="")] = field(default_factory=Training)


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "nanogpt": {
        "preset": "nanogpt",
        "sizes": Sizes(context=64, positions="learned", norm="layer", init_sd=0.02),
        "training": Training(steps=2000, batch=12, learning_rate=1e-3),
    },
}


class Run(NamedTuple):
    """All that the options lead to, before the first step."""

    options: Any
    text: plays.Text
    model: model.Model
    ledgers: list[ja.Ledger]  # of each layer's attention, for one batch
    folder: Path


def main(argv: Sequence[str] | None = None) -> None:
    console = Console()
    asked = parse(argv)
    try:
        run = prepare(asked)
        begin(run)
    except (ValueError, OSError) as error:
        sys.exit(f"train_variant.py: {error}")
    console.print(header(run))
    print("\n\n".join(dict.fromkeys(str(ledger) for ledger in run.ledgers)))
    try:
        finish(run, fit(run, console), console)
    except train.NonFinite as error:
        sys.exit(f"train_variant.py: {error}")
    except KeyboardInterrupt:
        sys.exit(f"train_variant.py: stopped; --resume --out {run.folder} goes on")


def parse(argv: Sequence[str] | None) -> Any:
    argv = sys.argv[1:] if argv is None else argv
    preset = options.peek(argv, "--preset", "default")
    usual = options.complete(Options)(**PRESETS.get(preset, {}))
    return options.parse(usual, __doc__ or "", argv)


def prepare(asked: Any) -> Run:
    """Check the options and build what they ask for; writes nothing.

    Raises:
        ValueError, OSError: an option cannot be followed; the message names it.
    """
    sizes, training = asked.sizes, asked.training
    options.check(
        sizes,
        training,
        [asked.seed],
        evaluate_every=asked.evaluate_every,
        save_every=asked.save_every,
        sample=asked.sample,
    )
    options.refuse_idle(asked, asked.variant)
    transforms = options.transforms(asked, asked.variant, sizes.layers)
    text = plays.load_file(asked.text_file) if asked.text_file else plays.load_plays()
    batches.check(text, sizes.context, training.batch)
    made = model.create(options.shape(sizes, text), transforms, jax.random.key(asked.seed))
    ledgers = [ja.ledger(attn, training.batch, sizes.context, sizes.context) for attn in made.attention]
    usual = f"{asked.variant}-seed{asked.seed}"
    run = Run(asked, text, made, ledgers, folder.choose(asked.out, usual, asked.resume))
    folder.refuse_other(run.folder, config(run))
    return run


def config(run: Run) -> dict[str, Any]:
    """What decides the numbers of a run."""
    asked = run.options
    return {
        "variant": asked.variant,
        "settings": options.settings(asked, asked.variant),
        "preset": asked.preset,
        "seed": asked.seed,
        "sizes": dataclasses.asdict(asked.sizes),
        "training": dataclasses.asdict(asked.training),
        "evaluate_every": asked.evaluate_every,
        "save_every": asked.save_every,
        "text": {"name": run.text.name, "sha256": run.text.sha256},
    }


def begin(run: Run) -> None:
    """Make the run folder, with what is known before the first step."""
    folder.write_json(run.folder / "config.json", config(run) | {"made_with": folder.made_with()})
    folder.write_json(
        run.folder / "ledger.json",
        {
            "parameters": model.count(run.model.params),
            "layers": [ledger.as_dict() for ledger in run.ledgers],
        },
    )


def header(run: Run) -> Table:
    asked, text, training = run.options, run.text, run.options.training
    sizes, count = asked.sizes, model.count(run.model.params)
    seen = training.steps * training.batch * sizes.context
    settings = options.settings(asked, asked.variant)
    table = Table.grid(padding=(0, 2))
    for name, value in {
        "variant": asked.variant + "".join(f"  {k}={v}" for k, v in settings.items()),
        "model": f"{sizes.layers} layers, width {sizes.width}, {sizes.heads} heads, context "
        f"{sizes.context}, {sizes.positions} positions",
        "parameters": f"{count['model']:,}, of which {count['attention']:,} in attention",
        "data": f"{text.name}: {len(text.train):,} symbols to train, {len(text.valid):,} to "
        f"validate, {len(text.symbols)} kinds",
        "training": f"{training.steps:,} steps of {training.batch} windows: {seen:,} symbols, "
        f"{seen / len(text.train):.2f} epochs",
        "seed": str(asked.seed),
        "device": jax.devices()[0].device_kind,
        "folder": str(run.folder),
    }.items():
        table.add_row(name, value)
    return table


def fit(run: Run, console: Console) -> train.State:
    """Train to the last step, with validations; returns the last state.

    Raises:
        NonFinite: too many steps in a row had to be left out.
    """
    asked, text, training = run.options, run.text, run.options.training
    context, tokens_a_step = asked.sizes.context, training.batch * asked.sizes.context
    optimizer, advance = train.build(model.loss_fn(run.model), training)
    evaluate = model.make_evaluate(run.model, training.batch)
    log = run.folder / "metrics.jsonl"
    started = time.monotonic()

    with folder.checkpoints(run.folder) as manager, progress(console) as bar:
        state = train.init(run.model.params, optimizer, jax.random.key(asked.seed))
        restored = folder.restore(manager, state)
        if asked.resume:
            place = "no checkpoint, starting anew" if restored is None else f"step {restored.step}"
            bar.console.print(f"resuming {run.folder}: {place}")
        state = restored or state
        folder.rewind(log, int(state.step))
        task = bar.add_task("", total=training.steps, completed=int(state.step), loss="", speed="")
        since = time.monotonic()

        def draw(step: int) -> tuple[np.ndarray, np.ndarray]:
            starts = batches.window_starts(asked.seed, step, len(text.train), context, training.batch)
            return starts, batches.windows(text.train, starts, context)

        def watch(state: train.State, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            nonlocal since
            step, now = int(state.step), time.monotonic()
            losses = [line["loss"] for line in lines if "skipped" not in line]
            bar.update(
                task,
                completed=step,
                loss=f"loss {np.mean(losses):.3f}" if losses else "no finite loss",
                speed=f"{len(lines) * tokens_a_step / (now - since):,.0f} tokens/s",
            )
            found = []
            if step % asked.evaluate_every == 0 or step == training.steps:
                nats = evaluate(state.params, text.valid)
                seconds = round(time.monotonic() - started, 2)
                bar.console.print(f"step {step}: validation {in_words(nats)}, {seconds:.0f} s")
                found.append(
                    {"step": step, "valid_loss": nats, "valid_bits": nats * report.BITS}
                    | {"seconds": seconds}
                )
            since = time.monotonic()
            return found

        return folder.run(
            log,
            manager,
            advance,
            state,
            draw,
            steps=training.steps,
            chunk=options.chunk(training.chunk, asked.evaluate_every, asked.save_every),
            save_every=asked.save_every,
            watch=watch,
        )


def progress(console: Console) -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
    )


def finish(run: Run, state: train.State, console: Console) -> None:
    """The sample of text, the loss curve and the last word."""
    asked = run.options
    lines = folder.read(run.folder / "metrics.jsonl")
    title = f"{asked.variant}, seed {asked.seed}: {run.text.name}"
    folder.write(run.folder / "loss.png", report.loss_curve(lines, title))
    start = run.text.valid[:1]
    rng = jax.random.fold_in(jax.random.key(asked.seed), 1)
    sample = run.text.decode(model.generate(run.model, state.params, start, asked.sample, rng))
    folder.write(run.folder / "sample.txt", sample + "\n")
    console.rule("a sample")
    console.print(sample, markup=False, highlight=False)
    console.rule()
    skipped = sum("skipped" in line for line in lines)
    if skipped:
        console.print(f"{skipped} steps were left out: numbers that are not finite (see the log)")
    nats = [line["valid_loss"] for line in lines if "valid_loss" in line][-1]
    console.print(f"validation {in_words(nats)} over {len(run.text.valid):,} symbols")
    console.print(f"written to {run.folder}", soft_wrap=True)


def in_words(nats: float) -> str:
    return f"{nats:.4f} nats a symbol ({nats * report.BITS:.4f} bits)"


if __name__ == "__main__":
    main()
