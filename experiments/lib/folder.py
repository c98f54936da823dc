"""A run on disk: files written whole or not at all, a log that only grows, checkpoints, one writer.

config.json      what was asked, with what it was made, and each time that it went on
metrics.jsonl    a line with `step` and `loss` for each step, others with `valid_loss`; `seconds` is what the
                 step (or the validation) took, without compiling
ledger.json      what the attention costs
checkpoints/     the last two states
report.md        what was run, the result, and the commands that go on
lock             of the process that writes now
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.lib import lock, options, train
from experiments.lib.checkpoints import Checkpoints, beside, differences, naming
from experiments.lib.model import Model, Params, create, described
from experiments.lib.stop import Stop
from experiments.lib.train import State

RUNS = Path("runs")
CONFIG = "config.json"
# What a run may have otherwise and be the same run: names, and what only says how it was started.
NAMES = (
    "made_with",
    "went_on",
    "preset",
    "text.name",
    "text.symbols",
    "init_from.step",  # a run that goes on has its own checkpoint, whatever became of the other one
    "init_from.sha256",
)


def write(path: Path, content: str | bytes) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never a half."""
    with beside(path) as file:
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def append(path: Path, lines: list[dict[str, Any]]) -> None:
    """Add lines to a log that exists (`rewind`) in one piece; where its folder was removed none is made."""
    with naming(path), open(path, "a", opener=lambda name, flags: os.open(name, flags & ~os.O_CREAT)) as log:
        log.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that a killed process left incomplete is dropped."""
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    return [json.loads(line) for line in whole.splitlines()]


def rewind(path: Path, step: int) -> None:
    """Drop what a killed run logged after its last checkpoint: those steps come again."""
    lines = [line for line in read(path) if line["step"] <= step]
    write(path, "".join(json.dumps(line) + "\n" for line in lines))


class Held(NamedTuple):
    """A run folder that this process alone writes, until `hold` ends."""

    path: Path
    check: Callable[[], None]  # raises lock.Lost when the folder was removed


@contextlib.contextmanager
def hold(
    out: Path | None,
    usual: str,
    *,
    holds: str = CONFIG,
    goes_on: bool = False,
    way_out: str = "",
) -> Iterator[Held]:
    """The run folder: the one asked for, or a new runs/<usual>, runs/<usual>-2, ..., locked.

    A folder with a file `holds` has a run. Nothing is written but the lock; a folder that was made here and
    stays empty is removed.

    Raises:
        FileExistsError: it holds a run already, which would be lost.
        BlockingIOError: another process has it.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise FileExistsError(f"--out: got {out}, which is a file; expected a folder")
    made = out is None or not out.exists()
    path = _new(usual) if out is None else out
    path.mkdir(parents=True, exist_ok=True)
    try:
        with lock.locked(path) as held:
            if (path / holds).exists() and not goes_on:
                raise FileExistsError(f"--out: {path} holds a run already; {way_out}name another folder")
            yield Held(path, held.check)
    except lock.Lost:
        made = False  # what is there now is not ours
        raise
    finally:
        if made:
            with contextlib.suppress(OSError):  # it holds a run
                path.rmdir()


def _new(usual: str) -> Path:
    RUNS.mkdir(exist_ok=True)
    number = 1
    while True:
        path = RUNS / (usual if number == 1 else f"{usual}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def read_config(folder: Path) -> dict[str, Any]:
    """What was asked of the run in a folder.

    Raises:
        ValueError: there is no run in it.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no run: there is no {path}")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def other(had: dict[str, Any], asked: dict[str, Any], longer: bool = True) -> str | None:
    """The first thing that decides the numbers of a run and differs, in words; None: the same run.

    With `longer`, more steps are the same run extended.

    >>> other({"seed": 0, "text": {"name": "a"}}, {"seed": 1, "text": {"name": "b"}})
    'has seed = 0, got 1'
    """
    before, now = flatten(had), flatten(json.loads(json.dumps(asked)))
    for name in before | now:
        if name in NAMES or name.startswith(tuple(f"{known}." for known in NAMES)):
            continue
        fits = before.get(name) == now.get(name)
        if longer and name == "training.steps" and name in before:
            fits = before[name] <= now[name]
        if not fits:
            return f"has {name} = {before.get(name)!r}, got {now.get(name)!r}"
    return None


def refuse_other(folder: Path, config: dict[str, Any]) -> None:
    """Raises ValueError naming the first field in which the run of the folder was another."""
    if (folder / CONFIG).exists() and (differs := other(read_config(folder), config)):
        raise ValueError(
            f"--resume: the run in {folder} {differs}; ask for the same (--steps may grow), "
            "or name another folder with --out"
        )


def find(config: dict[str, Any]) -> Path:
    """The newest run under runs/ that is the one asked for, whatever its folder is called.

    One with fewer steps counts, as it can be extended, where none has as many.

    Raises:
        ValueError: there is none; the message says in what the most similar one differs.
    """
    found = sorted(RUNS.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime, reverse=True)
    runs = []
    for path in found:
        with contextlib.suppress(ValueError):  # a damaged file is no run
            if "training" in (had := read_config(path.parent)):
                runs.append((path.parent, had))
    for longer in (False, True):
        for folder, had in runs:
            if other(had, config, longer) is None:
                return folder
    same = [run for run in runs if run[1].get("variant") == config["variant"]] or runs
    nearest = f": the newest, {same[0][0]}, {other(same[0][1], config)}" if same else ""
    raise ValueError(
        f"--resume: no run in {RUNS}/ was started with these options{nearest}; name its folder with --out, "
        "or leave --resume out to start a new one"
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def checkpoints(folder: Path, writes: bool = True) -> Checkpoints:
    """Those of a run folder; `writes=False` for a reader, which a process that writes does not notice."""
    return Checkpoints(folder / "checkpoints", writes)


def save(manager: Checkpoints, state: State) -> None:
    if not train.is_finite((state.params, state.optimizer)):
        raise train.NonFinite("the state holds numbers that are not finite; it is not saved")
    if int(state.step) not in manager.all_steps():
        manager.save(int(state.step), _plain(state))


def restore(manager: Checkpoints, like: State) -> State | None:
    """The last complete checkpoint, or None: the run was stopped before its first.

    Raises:
        ValueError: a leaf of `like` has another type or shape than the saved one, or is missing.
        OSError: the file is damaged.
    """
    step = manager.latest_step()
    if step is None:
        return None
    state = manager.restore_like(step, _plain(like))
    return state._replace(rng=jax.random.wrap_key_data(state.rng))


def run(
    log: Path,
    manager: Checkpoints,
    advance: Callable,
    state: State,
    batches: Callable[[int], tuple[np.ndarray, Any]],
    *,
    steps: int,
    chunk: int,
    save_every: int,
    watch: Callable[[State, list[dict[str, Any]]], list[dict[str, Any]]] = lambda state, lines: [],
    ready: Callable[[Any, State, Any], Any] = lambda advance, state, batches: advance,
    check: Callable[[], None] = lambda: None,
    saved: Callable[[int], None] = lambda step: None,
    stop: Stop | None = None,
    timed: bool = False,
) -> State:
    """Train from `state.step` to `steps`, `chunk` steps a call, and keep log and checkpoints.

    `batches(step)` gives what a step sees and its batch; `watch` sees each chunk and returns lines
    for the log. The log is written before the checkpoint, so that it never lags behind one.

    `ready` compiles what is called, out of the time that is measured; `check` raises where the folder
    is lost; `saved` hears of each checkpoint; with `timed`, the line of a step has its seconds.

    Raises:
        NonFinite: too many steps in a row had to be left out.
        Stopped: `stop` was asked to end; the last step is saved.
    """
    stop = stop or Stop()
    log.touch()
    while (first := int(state.step)) < steps:
        last = min(first - first % chunk + chunk, steps)
        examples, inputs = zip(*map(batches, range(first, last)), strict=True)
        inputs = jax.tree.map(lambda *leaves: np.stack(leaves), *inputs)
        program = ready(advance, state, inputs)
        stop.unsaved = True
        began = time.perf_counter()
        state, records = jax.block_until_ready(program(state, inputs))
        seconds = round((time.perf_counter() - began) / (last - first), 6)
        lines = train.rows(records, state, np.stack(examples))
        if timed:
            lines = [line | {"seconds": seconds} for line in lines]
        check()
        append(log, lines)
        train.refuse_if_ended(state, lines)
        append(log, watch(state, lines))
        step = int(state.step)
        if step % save_every == 0 or step == steps or stop.cause is not None:
            check()
            save(manager, state)
            stop.unsaved = False
            saved(step)
            stop.check()
    return state


def _plain(state: State) -> State:
    """Keys as the numbers they hold."""
    return state._replace(rng=jax.random.key_data(state.rng))


class Loaded(NamedTuple):
    """A run read back."""

    config: dict[str, Any]
    model: Model
    params: Params
    step: int  # of the checkpoint that `params` are from
    symbols: str  # the character of each token


def load_run(folder: str | Path) -> Loaded:
    """The model of a run folder with the parameters of its last checkpoint.

        run = load_run("runs/moh-seed0")
        logits, auxes = run.model.apply(run.params, tokens)  # tokens [b, t], indices into run.symbols

    Raises:
        ValueError: there is no run of train_variant.py in it, or none with a checkpoint.
        OSError: the checkpoint is damaged.
    """
    folder = Path(folder)
    config = read_config(folder)
    if "variant" not in config or "symbols" not in config["text"]:
        raise ValueError(f"{folder} holds no run of train_variant.py, or one of an older version")
    sizes = options.Sizes(**config["sizes"])
    transforms = options.rebuilt(config["variant"], config["settings"], sizes.layers)
    symbols = config["text"]["symbols"]
    made = create(options.shape(sizes, len(symbols)), transforms, jax.random.key(config["seed"]))
    manager = checkpoints(folder, writes=False)
    step = manager.latest_step()
    if step is None:
        raise ValueError(f"{folder} has no checkpoint yet: its run was stopped before the first one")
    saved = {
        name.removeprefix("params/"): leaf
        for name, leaf in manager.restore(step).items()
        if name.startswith("params/")
    }
    faults = differences(described(saved), described(made.params))
    if faults:
        raise ValueError(f"the weights in {folder} are not those of its config.json: {'; '.join(faults)}")
    return Loaded(config, made, jax.tree.map(jax.numpy.asarray, saved), step, symbols)
