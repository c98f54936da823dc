"""A run of train_variant.py as data and in words: configuration, header on the screen, report."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

import jaxattn as ja
from experiments.lib import facts, folder, model, options, plays, report
from experiments.lib.screen import printable

SCRIPT = "experiments/train_variant.py"


class Run(NamedTuple):
    """All that the options lead to, before the first step."""

    options: Any
    argv: list[str]
    text: plays.Text
    model: model.Model
    ledgers: list[ja.Ledger]  # of each layer's attention, for one batch
    init: dict[str, Any] | None  # of which run the weights are
    folder: Path = Path()


def config(run: Run) -> dict[str, Any]:
    """What decides the numbers of a run, and the symbols by which its text is written again."""
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
        "valid_symbols": asked.valid_symbols,
        "init_from": run.init,
        "text": {"name": run.text.name, "sha256": run.text.sha256, "symbols": run.text.symbols},
    }


def facts_of(run: Run) -> dict[str, str]:
    asked, text, training = run.options, run.text, run.options.training
    sizes, count = asked.sizes, model.count(run.model.params)
    seen = training.steps * training.batch * sizes.context
    settings = options.settings(asked, asked.variant)
    told = {
        "variant": asked.variant + "".join(f"  {k}={v}" for k, v in settings.items()),
        "model": f"{sizes.layers} layers, width {sizes.width}, {sizes.heads} heads, context "
        f"{sizes.context}, {sizes.positions} positions",
        "parameters": f"{count['model']:,}, of which {count['attention']:,} in attention",
        "data": f"{printable(text.name)}: {len(text.train):,} symbols to train, {len(text.valid):,} to "
        f"validate, {len(text.symbols)} kinds",
        "training": f"{training.steps:,} steps of {training.batch} windows: {seen:,} symbols, "
        f"{seen / len(text.train):.2f} epochs; highest learning rate {training.learning_rate}",
        "seed": str(asked.seed),
        "device": jax.devices()[0].device_kind,
        "folder": str(run.folder),
    }
    if run.init is not None:
        told["weights"] = f"those of {run.init['run']} at step {run.init['step']}"
    return told


def header(run: Run) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts_of(run).items():
        table.add_row(name, value)
    return table


def alike(ledgers: list[ja.Ledger]) -> dict[str, str]:
    """Each different ledger, as text, and its layers.

    >>> alike(["a", "a", "b"])
    {'a': '0, 1', 'b': '2'}
    """
    layers: dict[str, list[str]] = {}
    for number, ledger in enumerate(ledgers):
        layers.setdefault(str(ledger), []).append(str(number))
    return {ledger: ", ".join(numbers) for ledger, numbers in layers.items()}


def results(run: Run, lines: list[dict[str, Any]], compiling: float | None) -> list[str]:
    """What the log says, in sentences."""
    training, asked = run.options.training, run.options
    steps = [line for line in lines if "loss" in line]
    valid = [line for line in lines if "valid_loss" in line]
    told = []
    if not steps:
        return ["no step is logged yet"]
    if (last := steps[-1]["step"]) < training.steps:
        told.append(f"not finished: step {last} of {training.steps}")
    if skipped := sum("skipped" in line for line in steps):
        told.append(f"{skipped} steps were left out: numbers that are not finite (see metrics.jsonl)")
    if valid:
        told.append(
            f"validation {in_words(valid[-1]['valid_loss'])} over {len(run.text.valid):,} symbols, "
            f"at step {valid[-1]['step']}"
        )
    seconds = float(np.median([line["seconds"] for line in steps]))
    speed = training.batch * asked.sizes.context / seconds
    told.append(f"{seconds:.4f} s a step (median), {speed:,.0f} tokens/s")
    if compiling is not None:
        told.append(f"{compiling:.1f} s of compiling in the last start")
    return told


def summary(run: Run, compiling: float | None) -> str:
    """report.md."""
    known = folder.read_config(run.folder)
    asked, lines = run.options, folder.read(run.folder / "metrics.jsonl")
    care = [
        f"One seed and one learning rate. Runs of {asked.variant} that differ only in the seed have "
        "different losses too; a difference to another variant that is not larger shows nothing.",
        "The options may have been chosen on this validation text; no other text was looked at.",
        "Times are those of this machine with whatever else ran on it, without compiling, validation and "
        "checkpoints.",
    ]
    if asked.valid_symbols is not None:
        care.append(f"Validated on the first {len(run.text.valid):,} symbols only.")
    for start in known["went_on"]:
        if grown := start.get("extended"):
            care.append(
                f"Extended from {grown['from']} to {grown['to']} steps after step {start['step']}: the "
                "learning rate jumped there to that of the longer schedule. One run of so many steps has "
                "other numbers."
            )
    made = {name: value for name, value in known["made_with"].items() if name != "command"}
    return report.page(
        f"{asked.variant}, seed {asked.seed}",
        facts_of(run) | {"made with": ", ".join(f"{name} {value}" for name, value in made.items())},
        results(run, lines, compiling),
        {
            "Started with": known["made_with"]["command"],
            "Go on, or extend it with a larger --steps": facts.again(run.argv, SCRIPT, run.folder),
            "More text": facts.command([str(run.folder), "--prompt", "..."], "experiments/sample.py"),
        },
        care,
    )


def in_words(nats: float) -> str:
    return f"{nats:.4f} nats a symbol ({nats * report.BITS:.4f} bits)"
