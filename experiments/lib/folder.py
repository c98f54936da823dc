"""A run on disk: files written whole or not at all, a log that only grows, checkpoints by orbax.

config.json      what was asked, and with what it was made
metrics.jsonl    a line with `step` and `loss` for each step; others for validation
ledger.json      what the attention costs
checkpoints/     the last two states; orbax renames one into place when it is complete
"""

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.lib import train
from experiments.lib.train import State


def write(path: Path, content: str | bytes) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.replace(path)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def append(path: Path, lines: list[dict[str, Any]]) -> None:
    """Add lines to a log in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that a killed process left incomplete is dropped."""
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    return [json.loads(line) for line in whole.splitlines()]


def rewind(path: Path, step: int) -> None:
    """Drop what a killed run logged after its last checkpoint: those steps come again."""
    lines = [line for line in read(path) if line["step"] <= step]
    write(path, "".join(json.dumps(line) + "\n" for line in lines))


def choose(out: Path | None, usual: str, resume: bool) -> Path:
    """The run folder: the one asked for, or runs/<usual>, runs/<usual>-2, ...

    Raises:
        FileExistsError: it holds a run already, which would be lost.
    """
    if out is not None:
        if (out / "config.json").exists() and not resume:
            raise FileExistsError(
                f"--out: {out} holds a run already; add --resume to go on with it, or name another"
            )
        if out.exists() and not out.is_dir():
            raise FileExistsError(f"--out: got {out}, which is a file; expected a folder")
        return out
    taken = 0
    names = [Path("runs", usual)]
    while names[-1].exists():
        taken += 1
        names.append(Path("runs", f"{usual}-{taken + 1}"))
    return names[-2] if resume and taken else names[-1]


def refuse_other(folder: Path, config: dict[str, Any]) -> None:
    """Raises ValueError naming the first field in which the run of the folder was another."""
    path = folder / "config.json"
    if path.exists():
        had = flatten(json.loads(path.read_text()))
        for name, value in flatten(json.loads(json.dumps(config))).items():
            if had.get(name) != value:
                raise ValueError(
                    f"--resume: the run in {folder} has {name} = {had.get(name)!r}, got {value!r}; "
                    "ask for the same, or name another folder with --out"
                )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> flatten({"seed": 0, "sizes": {"heads": 4}})
    {'seed': 0, 'sizes.heads': 4}
    """
    flat = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def made_with() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def checkpoints(folder: Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        (folder / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
    )


def save(manager: ocp.CheckpointManager, state: State) -> None:
    if not train.is_finite((state.params, state.optimizer)):
        raise train.NonFinite("the state holds numbers that are not finite; it is not saved")
    if int(state.step) not in manager.all_steps():
        manager.save(int(state.step), args=ocp.args.StandardSave(_plain(state)))


def restore(manager: ocp.CheckpointManager, like: State) -> State | None:
    """The last complete checkpoint, or None: the run was stopped before its first."""
    step = manager.latest_step()
    if step is None:
        return None
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _plain(like))
    state = cast(State, manager.restore(step, args=ocp.args.StandardRestore(target)))
    return state._replace(rng=jax.random.wrap_key_data(state.rng))


def run(
    log: Path,
    manager: ocp.CheckpointManager,
    advance: Callable,
    state: State,
    batches: Callable[[int], tuple[np.ndarray, Any]],
    *,
    steps: int,
    chunk: int,
    save_every: int,
    watch: Callable[[State, list[dict[str, Any]]], list[dict[str, Any]]] = lambda state, lines: [],
) -> State:
    """Train from `state.step` to `steps`, `chunk` steps a call, and keep log and checkpoints.

    `batches(step)` gives what a step sees and its batch; `watch` sees each chunk and returns lines
    for the log. The log is written before the checkpoint, so that it never lags behind one.

    Raises:
        NonFinite: too many steps in a row had to be left out.
    """
    while (first := int(state.step)) < steps:
        examples, inputs = zip(*map(batches, range(first, min(first + chunk, steps))), strict=True)
        state, records = advance(state, jax.tree.map(lambda *leaves: np.stack(leaves), *inputs))
        lines = train.rows(records, state, np.stack(examples))
        append(log, lines)
        train.refuse_if_ended(state, lines)
        append(log, watch(state, lines))
        if int(state.step) % save_every == 0 or int(state.step) == steps:
            save(manager, state)
    return state


def _plain(state: State) -> State:
    """Keys as the numbers they hold."""
    return state._replace(rng=jax.random.key_data(state.rng))
