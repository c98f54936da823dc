"""Checkpoints of a state: one file a step, renamed into place when it is whole, read with its own types.

A file `checkpoints/STEP.npz` holds a table of paths, types and shapes, and the bytes of each leaf. What a
killed process left behind has another name and is removed when the next one begins.
"""

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KEEP = 2


class Checkpoints:
    """The checkpoints of one folder; `writes=False` reads beside a process that writes them."""

    def __init__(self, folder: Path, writes: bool = True):
        self.folder, self.writes = folder, writes
        if writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            for half in self.folder.glob(".*"):
                half.unlink()
            if older := [p for p in self.folder.iterdir() if p.is_dir() and p.name.isdecimal()]:
                raise OSError(f"{older[0]} is a checkpoint of an older version, which is not read any more")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None: ...

    def all_steps(self) -> list[int]:
        """Steps with a whole checkpoint, in order."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(p.stem) for p in found if p.suffix == ".npz" and p.stem.isdecimal() and p.is_file())

    def latest_step(self) -> int | None:
        return max(self.all_steps(), default=None)

    def save(self, step: int, tree: Any) -> None:
        """Write all leaves, then drop all but the last checkpoints. The folder must exist."""
        leaves = [(name, np.asarray(leaf)) for name, leaf in named(tree)]
        table = [(name, leaf.dtype.name, leaf.shape) for name, leaf in leaves]
        flat = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for _, leaf in leaves]
        with beside(self._path(step)) as file:
            np.savez(file, np.array(json.dumps(table)), *flat)
        for old in self.all_steps()[:-KEEP]:
            self._path(old).unlink()

    def restore(self, step: int) -> dict[str, np.ndarray]:
        """Every leaf by its path, as it was saved.

        Raises:
            OSError: the file is damaged; the message names it and the way out.
        """
        path = self._path(step)
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                table = json.loads(str(file["arr_0"]))
                return {
                    name: file[f"arr_{place}"].view(jnp.dtype(dtype)).reshape(shape)
                    for place, (name, dtype, shape) in enumerate(table, start=1)
                }
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
            raise OSError(
                f"the checkpoint {path} is damaged ({' '.join(str(error).split())}); remove the file to go "
                "on from the one before it"
            ) from None

    def restore_like(self, step: int, like: Any) -> Any:
        """The tree of `like` with the saved leaves.

        Raises:
            ValueError: a leaf is missing, unknown, or of another type or shape; all are named.
        """
        had = self.restore(step)
        wanted = dict(named(like))
        faults = differences(
            {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in had.items()},
            {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in wanted.items()},
        )
        if faults:
            raise ValueError(
                f"the checkpoint {self._path(step)} is of another state: {'; '.join(faults)}; nothing is "
                "cast or left out unasked, so go on with the options and types that it was saved with"
            )
        leaves = [jnp.asarray(had[name]) for name in wanted]
        for name, leaf in zip(wanted, leaves, strict=True):
            if leaf.dtype != had[name].dtype:
                raise ValueError(
                    f"the checkpoint {self._path(step)}: {name} was saved as {had[name].dtype}, which this "
                    f"process would hold as {leaf.dtype}; set JAX_ENABLE_X64=1"
                )
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step}.npz"


def named(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with their paths.

    >>> named({"a": 1, "b": {"c": 2}})
    [('a', 1), ('b/c', 2)]
    """
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


def differences(had: dict[str, str], wanted: dict[str, str], most: int = 20) -> list[str]:
    """What differs between two tables, a phrase for each name.

    >>> differences({"a": "f[3]", "b": "f[1]"}, {"a": "f[4]", "c": "f[1]"})
    ['a: saved f[3], asked for f[4]', 'b: saved f[1], not asked for', 'c: asked for f[1], not saved']
    """
    told = []
    for name in had | wanted:
        if name not in wanted:
            told.append(f"{name}: saved {had[name]}, not asked for")
        elif name not in had:
            told.append(f"{name}: asked for {wanted[name]}, not saved")
        elif had[name] != wanted[name]:
            told.append(f"{name}: saved {had[name]}, asked for {wanted[name]}")
    return told if len(told) <= most else [*told[:most], f"and {len(told) - most} more"]


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Any]:
    """A file to write that takes the place of `path` when it is whole and on the disk, or is removed."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), half.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            half.replace(path)
    finally:
        with contextlib.suppress(OSError):  # the folder is gone, or its disk is
            half.unlink()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within it, an error of the system names this file, as some of them name none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
