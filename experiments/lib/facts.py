"""With what a run was made: versions, commit, date, machine and command line."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "jaxattn")
ROOT = Path(__file__).parents[2]


def made_with(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """What is known of this process, ready for JSON."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command(sys.argv[1:] if argv is None else argv),
        "commit": commit(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "host": socket.gethostname(),
    }


def in_words() -> str:
    """The same for a line of a page."""
    known = made_with()
    return (
        f"{known['machine']}; {known['device']}; python {known['python']}, jax {known['jax']}, "
        f"jaxattn {known['jaxattn']}, commit {known['commit']}; {known['date']}"
    )


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this source tree, with "+" where files differ from it; None outside a repository."""
    head = _git("rev-parse", "HEAD")
    return head and head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def command(argv: Sequence[str], script: str = "") -> str:
    """A command line that a shell reads back.

    >>> command(["--prompt", "to be"], "experiments/sample.py")
    "python experiments/sample.py --prompt 'to be'"
    """
    return shlex.join(["python", script or sys.argv[0], *argv])


def again(argv: Sequence[str], script: str, folder: Path) -> str:
    """The command that goes on with a run.

    >>> again(["--steps", "9", "--out=old"], "experiments/train.py", Path("runs/a b"))
    "python experiments/train.py --steps 9 --resume --out 'runs/a b'"
    """
    typed = sys.argv[0] if Path(sys.argv[0]).name == Path(script).name else script
    return command([*without(argv, "--out"), "--resume", "--out", str(folder)], typed)


def without(argv: Sequence[str], option: str) -> list[str]:
    """Arguments without --resume, and without an option and its value."""
    kept, value = [], False
    for argument in argv:
        if (
            not value
            and argument != "--resume"
            and not argument.startswith(f"{option}=")
            and argument != option
        ):
            kept.append(argument)
        value = argument == option
    return kept


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
