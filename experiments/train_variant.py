"""Train a small language model with any head-composition variant, and print what it costs.

    python experiments/train_variant.py                                     multi-head attention
    python experiments/train_variant.py --variant moh --help                the options of a variant
    python experiments/train_variant.py --variant moh --moh.top-k 1
    python experiments/train_variant.py --variant my.module:factory         your own
    python experiments/train_variant.py --preset nanogpt --text-file tinyshakespeare.txt

Without an argument: a decoder-only transformer (pre-norm, rotary positions) on Shakespeare's 38
plays, under one epoch. The run folder holds config.json, metrics.jsonl, ledger.json, checkpoints/,
loss.png, sample.txt and report.md. A run that was stopped goes on with the same command and --resume,
and gives the numbers of one that was not; report.md has the command. More --steps extend it.
`python experiments/sample.py RUN --prompt TEXT` writes more text.
"""

if __name__ == "__main__":  # Ctrl-C while the imports run, which take seconds: nothing is begun, so just end
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import dataclasses
import hashlib
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

import jaxattn as ja
from experiments.lib import (
    batches,
    checkpoints,
    facts,
    folder,
    model,
    named,
    options,
    plays,
    record,
    report,
    train,
)
from experiments.lib.options import Sizes, Training
from experiments.lib.screen import Screen, printable, refusals, script
from experiments.lib.stop import Stop, Stopped

NAME = "train_variant.py"


@dataclass(frozen=True)
class Options:
    variant: Annotated[str, tyro.conf.arg(metavar="{" + named.KNOWN + "}|MODULE:FACTORY")] = "mha"
    """Which attention; --variant NAME --help lists the options of NAME. MODULE:FACTORY is your own:
    a ja.HeadTransform, or what makes one without arguments, found from the current directory."""
    preset: Literal["default", "nanogpt"] = "default"
    """What the other options default to. nanogpt: sizes and schedule of the CPU run in its README
    (published: 1.88 on tiny Shakespeare), all weights drawn with one standard deviation."""
    seed: int = 0
    """Of the initial weights and of the order of the text."""
    out: Path | None = None
    """Run folder; left out: a new one under runs/."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on from the last checkpoint of --out; without --out, of the newest run under runs/ that was
    started with these options. --steps may be larger than before."""
    init_from: Path | None = None
    """Start with the weights of another run: its folder. Variant, sizes and weights must agree."""
    text_file: Path | None = None
    """A UTF-8 text to train on (first 90 %) and validate on (last 10 %), instead of the plays."""
    valid_symbols: int | None = None
    """Validate on so many symbols only, the first ones: for a quick look. None: on all."""
    evaluate_every: int = 500
    """Steps between validations; one more comes at the end."""
    save_every: int = 100
    """Steps between checkpoints; one more comes at the end."""
    sample: int = 400
    """Symbols of text to write at the end."""
    sizes: tyro.conf.OmitArgPrefixes[Sizes] = field(default_factory=Sizes)
    training: tyro.conf.OmitArgPrefixes[Training] = field(default_factory=Training)


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "nanogpt": {
        "preset": "nanogpt",
        "sizes": Sizes(context=64, positions="learned", norm="layer", init_sd=0.02),
        "training": Training(steps=2000, batch=12, learning_rate=1e-3),
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    with script(NAME) as (screen, stop):
        asked = parse(argv)
        with refusals(NAME):
            run = prepare(asked, argv)
            found = folder.find(record.config(run)) if asked.resume and asked.out is None else asked.out
        usual = f"{asked.variant.replace(':', '.')}-seed{asked.seed}"
        way_out = "add --resume to go on with it, or "
        with folder.hold(found, usual, goes_on=asked.resume, way_out=way_out) as held:
            run = run._replace(folder=held.path)
            with refusals(NAME):
                folder.refuse_other(run.folder, record.config(run))
            train_in(run, held.check, screen, stop)


def parse(argv: Sequence[str]) -> Any:
    names = [options.peek(argv, "--variant", "mha")]
    preset = PRESETS.get(options.peek(argv, "--preset", "default"), {})
    try:
        complete = options.complete(Options, names)
    except ValueError as error:
        raise options.misused(f"--variant: {error}") from None
    options.check_flags(argv, names)
    return options.parse(complete(**preset), __doc__ or "", argv)


def prepare(asked: Any, argv: list[str]) -> record.Run:
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
    transforms = options.transforms(asked, asked.variant, sizes.layers)
    text = plays.load_file(asked.text_file) if asked.text_file else plays.load_plays()
    if asked.valid_symbols is not None:
        if asked.valid_symbols < 2:
            raise ValueError(f"--valid-symbols: got {asked.valid_symbols}, expected at least 2")
        text = text._replace(valid=text.valid[: asked.valid_symbols])
    batches.check(text, sizes.context, training.batch)
    loaded = initial(asked)
    if loaded is not None:
        try:
            text = text.recoded(loaded.symbols)
        except ValueError as error:
            raise ValueError(f"--init-from: {asked.init_from} was trained on another text: {error}") from None
    made = model.create(options.shape(sizes, len(text.symbols)), transforms, jax.random.key(asked.seed))
    init = None
    if loaded is not None:
        made, init = started_from(loaded, made, asked)
    ledgers = [ja.ledger(attn, training.batch, sizes.context, sizes.context) for attn in made.attention]
    return record.Run(asked, argv, text, made, ledgers, init)


def initial(asked: Any) -> folder.Loaded | None:
    """The run that --init-from names.

    Raises:
        ValueError: it has another variant, other options of it, or other sizes than asked for.
    """
    if asked.init_from is None:
        return None
    loaded = folder.load_run(asked.init_from)
    had = loaded.config
    if had["variant"] != asked.variant:
        raise ValueError(
            f"--init-from: the run in {asked.init_from} has variant = {had['variant']}, got {asked.variant}; "
            "weights start a run of the same variant only"
        )
    # what leaves the function of given weights as it is: the start, and with rotary positions the window
    free = {"init_sd"} | ({"context"} if asked.sizes.positions == "rotary" else set())
    sizes = {k: v for k, v in dataclasses.asdict(asked.sizes).items() if k not in free}
    differs = folder.other(
        {"settings": had["settings"], "sizes": {k: had["sizes"].get(k) for k in sizes}},
        {"settings": options.settings(asked, asked.variant), "sizes": sizes},
    )
    if differs:
        raise ValueError(f"--init-from: the run in {asked.init_from} {differs}; ask for the same")
    return loaded


def started_from(loaded: folder.Loaded, made: model.Model, asked: Any) -> tuple[model.Model, dict[str, Any]]:
    """The model with the weights of another run, and what tells them again.

    Raises:
        ValueError: the two trees differ; all differences are named.
    """
    faults = checkpoints.differences(model.described(loaded.params), model.described(made.params))
    if faults:
        raise ValueError(f"--init-from: {asked.init_from} has other weights: {'; '.join(faults)}")
    digest = hashlib.sha256()
    for name in sorted(loaded.params):
        digest.update(np.asarray(loaded.params[name]).tobytes())
    params = {name: loaded.params[name] for name in made.params}
    return made._replace(params=params), {
        "run": str(asked.init_from.resolve()),
        "step": loaded.step,
        "sha256": digest.hexdigest(),
    }


def train_in(run: record.Run, check: Callable[[], None], screen: Screen, stop: Stop) -> None:
    """From the options to the report, in a folder that is ours."""
    goes_on = facts.again(run.argv, record.SCRIPT, run.folder)

    def saved(step: int) -> None:
        place = (
            f"goes on from step {step}, the last saved one"
            if step
            else "starts anew, as no step is saved yet"
        )
        stop.advice = f"--resume {place}: {goes_on}"

    stop.anew = goes_on
    manager = folder.checkpoints(run.folder)
    optimizer, advance = train.build(model.loss_fn(run.model), run.options.training)
    state = train.init(run.model.params, optimizer, jax.random.key(run.options.seed))
    with refusals(NAME):
        restored = folder.restore(manager, state)
    state = restored or state
    saved(int(state.step))
    begin(run, int(state.step))
    folder.rewind(run.folder / "metrics.jsonl", int(state.step))
    if run.init is not None and restored is None:
        folder.save(manager, state)  # the other run may go on or go away
    folder.write(run.folder / "report.md", record.summary(run, None))
    screen.show(record.header(run))
    for ledger, layers in record.alike(run.ledgers).items():
        screen.say(f"\nattention of layer {layers}, cost of one batch:\n{ledger}")
    screen.say()
    if run.options.resume:
        place = "no checkpoint, starting anew" if restored is None else f"step {int(state.step)}"
        screen.say(f"resuming {run.folder}: {place}")
    programs = train.Programs(screen.say)
    try:
        state = fit(run, manager, advance, state, programs, check, saved, screen, stop)
    except (Stopped, train.NonFinite):
        folder.write(run.folder / "report.md", record.summary(run, programs.seconds))
        raise
    finish(run, state, programs.seconds, screen)


def begin(run: record.Run, step: int) -> None:
    """Write what is known before the first step; a run that goes on from `step` keeps how it was begun."""
    path = run.folder / folder.CONFIG
    known: dict[str, Any] = record.config(run) | {"made_with": facts.made_with(run.argv), "went_on": []}
    if path.exists():
        had = folder.read_config(run.folder)
        now = known["made_with"] | {"step": step, "steps": run.options.training.steps}
        known |= {"made_with": had["made_with"], "went_on": [*had.get("went_on", []), now]}
        if had["training"]["steps"] != run.options.training.steps:
            now["extended"] = {"from": had["training"]["steps"], "to": run.options.training.steps}
    folder.write_json(path, known)
    folder.write_json(
        run.folder / "ledger.json",
        {
            "parameters": model.count(run.model.params),
            "layers": [ledger.as_dict() for ledger in run.ledgers],
        },
    )


def fit(
    run: record.Run,
    manager: checkpoints.Checkpoints,
    advance: train.Advance,
    state: train.State,
    programs: train.Programs,
    check: Callable[[], None],
    saved: Callable[[int], None],
    screen: Screen,
    stop: Stop,
) -> train.State:
    """Train to the last step, with validations; returns the last state.

    Raises:
        NonFinite: too many steps in a row had to be left out.
        Stopped: the script was asked to end, and the last step is saved.
    """
    asked, text, training = run.options, run.text, run.options.training
    context, tokens_a_step = asked.sizes.context, training.batch * asked.sizes.context
    evaluate = model.make_evaluate(run.model, training.batch)
    stop.check()

    def draw(step: int) -> tuple[np.ndarray, np.ndarray]:
        starts = batches.window_starts(asked.seed, step, len(text.train), context, training.batch)
        return starts, batches.windows(text.train, starts, context)

    with screen.progress(training.steps, int(state.step)) as steps:

        def watch(state: train.State, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            step = int(state.step)
            losses = [line["loss"] for line in lines if "skipped" not in line]
            told = f"loss {np.mean(losses):.3f}" if losses else "no finite loss"
            steps.at(step, f"{told}, {tokens_a_step / lines[-1]['seconds']:,.0f} tokens/s")
            if step % asked.evaluate_every and step != training.steps:
                return []
            began = time.perf_counter()
            nats = evaluate(state.params, text.valid)
            seconds = time.perf_counter() - began
            screen.say(f"step {step}: validation {record.in_words(nats)}, took {seconds:.1f} s")
            found = {"step": step, "valid_loss": nats, "valid_bits": nats * report.BITS}
            return [found | {"seconds": round(seconds, 6)}]

        return folder.run(
            run.folder / "metrics.jsonl",
            manager,
            advance,
            state,
            draw,
            steps=training.steps,
            chunk=options.chunk(training.chunk, asked.evaluate_every, asked.save_every),
            save_every=asked.save_every,
            watch=watch,
            ready=programs.ready,
            check=check,
            saved=saved,
            stop=stop,
            timed=True,
        )


def finish(run: record.Run, state: train.State, compiling: float, screen: Screen) -> None:
    """The sample of text, the loss curve, the report and the last word."""
    asked = run.options
    lines = folder.read(run.folder / "metrics.jsonl")
    settings = options.settings(asked, asked.variant)
    told = "".join(f" {k}={v}" for k, v in settings.items())
    title = f"{asked.variant}{told}, seed {asked.seed}: {run.text.name}"
    folder.write(run.folder / "loss.png", report.loss_curve(lines, "\n".join(textwrap.wrap(title, 90))))
    start = run.text.valid[:1]
    rng = jax.random.fold_in(jax.random.key(asked.seed), 1)
    sample = run.text.decode(model.generate(run.model, state.params, start, asked.sample, rng))
    folder.write(run.folder / "sample.txt", sample + "\n")
    folder.write(run.folder / "report.md", record.summary(run, compiling))
    screen.rule("a sample")
    screen.say(printable(sample))
    screen.rule()
    for line in record.results(run, lines, compiling):
        screen.say(line)
    screen.say(f"written to {run.folder}")


if __name__ == "__main__":
    main()
