"""How a script ends before its time: signals, an output that closes, and one line that says what to do.

A signal (Ctrl-C, SIGTERM, SIGHUP) is answered by a thread, as the main thread may be inside XLA for a minute
and must not be thrown out of it: an exception in the middle of a compilation ended in a segmentation fault.
Where trained steps are not saved yet, the main thread is asked to save them and then ends; a second signal,
or a signal at any other time, ends the process at once. Files are renamed into place, so that is safe.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it
NAMES = {"SIGINT": "Ctrl-C"}


class Stopped(Exception):
    """The script was asked to end; the message says by what."""


class Stop:
    """Whether a script was asked to end, and what its user should know then.

    Attributes:
        cause: by what it was asked to end, or None.
        unsaved: whether there is work that is worth saving first.
        advice: what is saved, and the command that goes on.
        anew: the command that starts again, where what was saved is lost.
    """

    def __init__(self) -> None:
        self.cause: str | None = None
        self.unsaved = False
        self.advice = ""
        self.anew = ""

    def ask(self, cause: str) -> None:
        """Ask the main thread to save and end; the first cause is the one that is told."""
        self.cause = self.cause or cause

    def check(self) -> None:
        """Raises Stopped when the script was asked to end."""
        if self.cause is not None:
            raise Stopped(self.cause)

    def told(self, cause: str) -> str:
        """One line: the cause, and what to do.

        >>> stop = Stop()
        >>> stop.advice = "go on with: python train.py"
        >>> stop.told("no space left\\non device")
        'no space left on device; go on with: python train.py'
        """
        return "; ".join(" ".join(part.split()) for part in (cause, self.advice) if part)


@contextlib.contextmanager
def signals(stop: Stop, script: str) -> Iterator[None]:
    """Within it, signals are answered as this file says. One that was ignored before stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread have handlers
        return
    known = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    answered = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in answered}
    watcher = threading.Thread(target=_answer, args=(stop, script, read_end), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(write_end)
        watcher.join()
        os.close(read_end)


def _answer(stop: Stop, script: str, read_end: int) -> None:
    while number := os.read(read_end, 1):
        name = signal.Signals(number[0]).name
        first = stop.cause is None
        stop.ask(f"stopped by {NAMES.get(name, name)}")
        if stop.unsaved and first:
            if sys.stderr is not None and sys.stderr.isatty():
                _write(b"saving, then ending; the same again ends at once and loses steps\n")
            continue
        _write((SHOW_CURSOR if os.isatty(2) else b"") + f"{script}: {stop.told(stop.cause or '')}\n".encode())
        os._exit(1)


def _write(line: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line)
