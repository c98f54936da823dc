"""What a script prints: lines that cannot fail, and progress as a bar in a terminal, as lines elsewhere.

Letters that the output's encoding lacks are replaced. Names of files and the user's text are never read as
markup. An output that closes (`| head -1`) or is full asks the script to save and end.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import jax
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.lib import train
from experiments.lib.lock import Lost
from experiments.lib.stop import Stop, Stopped, signals

EVERY = 30.0  # seconds after which a line of progress comes in any case
PLAIN_WIDTH = 120  # of tables in a file or a pipe


class Screen:
    """Prints for one script; what cannot be printed any more is reported to `stop`."""

    def __init__(self, stop: Stop):
        self.stop = stop
        self.terminal = _is_terminal()
        self.bar: Progress | None = None

    def say(self, text: str = "") -> None:
        """Print a line, at once and as it is."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
            return
        try:
            print(text, flush=True)
        except OSError as error:
            silence(sys.stdout)
            self.stop.ask(f"standard output: {error.strerror}")
            if not self.stop.unsaved:
                self.stop.check()

    def show(self, table: RenderableType, width: int = 0) -> None:
        """Print what rich draws, at least `width` columns wide."""
        drawn = io.StringIO()
        self._console(width, drawn).print(table)
        self.say("\n".join(line.rstrip() for line in drawn.getvalue().rstrip("\n").split("\n")))

    def rule(self, title: str = "") -> None:
        self.say(f"---- {title} ".ljust(72, "-") if title else 72 * "-")

    @contextlib.contextmanager
    def progress(self, total: int, done: int = 0, unit: str = "step") -> Iterator["Steps"]:
        """Steps from `done` to `total`, told by `Steps.at`."""
        if not self.terminal:
            yield Steps(self, total, done, unit)
            return
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[now]}", markup=False))
        with Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=self._console()) as bar:
            task = bar.add_task("", total=total, completed=done, now="")
            self.bar = bar
            try:
                yield Steps(self, total, done, unit, lambda at, now: bar.update(task, completed=at, now=now))
            finally:
                self.bar = None

    def _console(self, width: int = 0, file: TextIO | None = None) -> Console:
        made = Console(
            file=file,
            force_terminal=self.terminal,
            safe_box=True,
            markup=False,
            emoji=False,
            highlight=False,
        )
        usual = made.width if self.terminal or "COLUMNS" in os.environ else PLAIN_WIDTH
        made.width = max(usual, width)
        return made


class Steps:
    """Where a loop is: each call moves the bar; without one, a line comes now and then."""

    def __init__(self, screen: Screen, total: int, done: int, unit: str, move: Any = None):
        self.screen, self.total, self.unit, self.move = screen, total, unit, move
        self.began = self.told = time.monotonic()
        self.first = self.last = done

    def at(self, done: int, now: str) -> None:
        """`done` of all steps are behind; `now` says what was seen there."""
        if self.move is not None:
            self.move(done, now)
            return
        clock = time.monotonic()
        tenth = 10 * done // self.total > 10 * self.last // self.total
        if self.last == self.first or tenth or done == self.total or clock - self.told > EVERY:
            elapsed = clock - self.began
            left = elapsed * (self.total - done) / max(1, done - self.first)
            self.screen.say(
                f"{self.unit} {done} of {self.total}: {now}, {elapsed:.0f} s elapsed, about {left:.0f} s left"
            )
            self.told = clock
        self.last = done


@contextlib.contextmanager
def script(name: str) -> Iterator[tuple[Screen, Stop]]:
    """The frame of every script: what goes wrong outside of it ends it with one line and exit code 1.

    That is the disk, the run folder, the outputs, signals, memory, and numbers that are not finite. Errors in
    the program itself keep their traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace", line_buffering=True)
    stop = Stop()
    screen = Screen(stop)
    try:
        with signals(stop, name):
            yield screen, stop
            stop.check()
    except (Stopped, train.NonFinite, OSError) as error:
        if isinstance(error, BrokenPipeError):
            silence(sys.stdout)
        if isinstance(error, Lost):
            stop.advice = f"start again with: {stop.anew}"
        raise SystemExit(f"{name}: {stop.told(str(error))}") from None
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise SystemExit(f"{name}: {stop.told(f'the device refused: {_first_line(error)}')}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"{name}: {stop.told('stopped')}") from None


@contextlib.contextmanager
def refusals(name: str) -> Iterator[None]:
    """Within it, a ValueError is an option that cannot be followed: one line, exit code 1."""
    try:
        yield
    except ValueError as error:
        raise SystemExit(f"{name}: {error}") from None


def printable(text: str) -> str:
    """Text without the characters that move a terminal's cursor or colour it.

    >>> printable("a\\x1b[2Jb\\tc")
    'a�[2Jb\\tc'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def silence(stream: Any) -> None:
    """Send what is still to come to nowhere, so that Python's last flush does not fail too."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _is_terminal() -> bool:
    return (
        sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
