"""One process at a time writes a run: a lock that the system drops with the process, however it ends."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

NAME = "lock"


class Lost(OSError):
    """The folder that was locked is not there any more."""


class Lock:
    """A lock that is held on a folder."""

    def __init__(self, folder: Path, held: int):
        self.folder, self.held = folder, held

    def check(self) -> None:
        """Raises Lost when the folder was removed, or another one is in its place."""
        if not _is_at(self.folder / NAME, self.held):
            raise Lost(f"the run folder {self.folder} was removed or replaced while it was written")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Hold the lock of a folder that exists.

    Raises:
        BlockingIOError: another process has it; the message names its number and machine.
        Lost: something within failed on the disk because the folder was removed.
    """
    held = _take(folder)
    lock = Lock(folder, held)
    try:
        _sign(held)
        yield lock
    except OSError:
        lock.check()
        raise
    finally:
        if _is_at(folder / NAME, held):
            with contextlib.suppress(OSError):  # a disk that went read-only: the lock goes with the process
                (folder / NAME).unlink()
        os.close(held)


def _take(folder: Path) -> int:
    path = folder / NAME
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            told = os.pread(held, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(held)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise OSError(
                    error.errno, f"{error.strerror}: the file system has no locks", str(path)
                ) from None
            raise BlockingIOError(
                f"{folder} is in use by {told}: one process at a time may write a run; wait for it to end, "
                "or name another folder with --out"
            ) from None
        if _is_at(path, held):
            return held
        os.close(held)  # its owner removed it after we opened it


def _sign(held: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(held, 0)
    os.pwrite(held, f"pid {os.getpid()} on {socket.gethostname()}, since {since}\n".encode(), 0)


def _is_at(path: Path, held: int) -> bool:
    try:
        there, ours = os.stat(path), os.fstat(held)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
