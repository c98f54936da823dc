"""A run survives people and machines: locks, signals, full disks, outputs that close or cannot encode."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
import running
from running import (
    LONG,
    ROOT,
    SIZES,
    TINY,
    config_of,
    refused,
    start,
    steps_of,
    until,
)

from experiments import compare, scale_sweep, train_variant
from experiments.lib import checkpoints, folder, lock, screen, stop, train

compile_once, text, done = running.compile_once, running.text, running.done  # fixtures
pytestmark = pytest.mark.usefixtures("compile_once")


def test_r2_25_letters_that_the_output_lacks_are_replaced(text, tmp_path):
    out = tmp_path / "run"
    arguments = [*TINY, "--steps", "4", "--text-file", text, "--out", str(out)]
    process = start(*arguments, PYTHONIOENCODING="ascii")
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert told.isascii() and "?" in told and f"written to {out}" in told
    assert set((out / "sample.txt").read_text(encoding="utf-8")) & set("é你好")
    assert not re.search("[\x1b\r━]", told)  # lines, not a bar
    assert re.search(
        r"^compiling .*\ncompiled, took .* s\nstep 2 of 4: loss .* tokens/s, .* elapsed", told, re.M
    )


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_what_is_printed_never_fails_on_its_encoding(encoding, tmp_path, monkeypatch):
    with (tmp_path / "out").open("w", encoding=encoding) as out:
        monkeypatch.setattr(sys, "stdout", out)
        with screen.script("x.py") as (shown, _):
            shown.say("é 你 [/red] :smile: [bold]")
            shown.rule("ζ")
    told = (tmp_path / "out").read_text(encoding=encoding)
    assert "[/red] :smile: [bold]" in told and "?" in told


def test_r2_27_a_second_process_is_refused_and_each_step_comes_once(text, tmp_path):
    out = tmp_path / "run"
    arguments = [*TINY, *LONG, "--text-file", text, "--out", str(out)]
    first = start(*arguments)
    until(first, r"^step \d+ of")
    first.send_signal(signal.SIGINT)
    errors = refused(first, "stopped by Ctrl-C", f"--resume --out {out}")
    stopped = steps_of(out)
    assert stopped == list(range(1, len(stopped) + 1)) and len(stopped) >= 20
    assert f"goes on from step {len(stopped)}" in errors  # no step is lost
    assert "not finished: step" in (out / "report.md").read_text()

    again = start(*arguments, "--resume")
    assert until(again, "^resuming").endswith(f"step {len(stopped)}\n")
    with pytest.raises(SystemExit, match=rf"{out} is in use by pid {again.pid} on \S+, since"):
        train_variant.main([*arguments, "--resume", "--steps", "8"])
    with pytest.raises(SystemExit, match="is in use by pid"):
        compare.main([*SIZES, "--variants", "mha", "--text-file", text, "--out", str(out)])
    with pytest.raises(SystemExit, match="is in use by pid"):
        scale_sweep.main(scale_sweep.Options(quick=True, out=out))
    until(again, r"^step \d+ of")
    again.kill()
    again.communicate()
    with folder.hold(out, "x", goes_on=True):  # the lock went with its process
        assert steps_of(out) == list(range(1, len(steps_of(out)) + 1))
        assert len(steps_of(out)) > len(stopped)


def test_r2_28_no_space_at_a_checkpoint_is_one_line_and_no_checkpoint(text, tmp_path):
    out = tmp_path / "run"
    arguments = [*TINY, "--steps", "4", "--text-file", text, "--out", str(out)]
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, 2**14)); "
    command = f"{limited} sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = str(ROOT / "experiments/train_variant.py")
    process = subprocess.Popen(
        [sys.executable, "-c", command, script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    refused(process, "File too large", f"{out}/checkpoints/2.npz", f"--resume --out {out}")
    assert not list((out / "checkpoints").iterdir())
    train_variant.main([*arguments, "--resume"])
    assert steps_of(out) == [1, 2, 3, 4]


def test_ctrl_c_during_compilation_ends_at_once_with_the_command_that_goes_on(text, tmp_path):
    out = tmp_path / "run"
    process = start(*TINY, "--text-file", text, "--out", str(out), JAX_ENABLE_COMPILATION_CACHE="0")
    until(process, "^compiling")
    process.send_signal(signal.SIGINT)
    refused(process, "stopped by Ctrl-C; --resume starts anew", f"--resume --out {out}")
    assert process.returncode == 1
    assert config_of(out)["variant"] == "mha"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_folder_that_goes_away_ends_the_run(how, text, tmp_path):
    out = tmp_path / "run"
    process = start(*TINY, *LONG, "--text-file", text, "--out", str(out))
    until(process, r"^step \d+ of")
    out.rename(tmp_path / "elsewhere")
    if how == "replaced":
        out.mkdir()
    refused(process, f"the run folder {out} was removed or replaced", "start again with: python", str(out))
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_saves_first(number, text, tmp_path):
    out = tmp_path / "run"
    process = start(*TINY, *LONG, "--text-file", text, "--out", str(out))
    until(process, r"^step \d+ of")
    process.send_signal(number)
    refused(process, "stopped by", "goes on from step")
    assert folder.checkpoints(out, writes=False).latest_step() == steps_of(out)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_variant.py", "compare.py"])
def test_an_output_that_closes_is_one_line(script, text, tmp_path):
    trains = script.startswith("train")
    arguments = [*TINY, *LONG, "--evaluate-every", "1000"] if trains else [*SIZES, "--variants", "mha"]
    process = start(*arguments, "--text-file", text, "--out", str(tmp_path / "run"), script=script)
    until(process, r"^step \d+ of" if trains else "^compiling")
    process.stdout.close()
    process.stdout = None
    refused(process, "standard output: Broken pipe")


@pytest.mark.slow
def test_a_full_output_is_one_line(text, tmp_path):
    with Path("/dev/full").open("w") as full:
        process = start(*TINY, "--text-file", text, "--out", str(tmp_path / "run"), stdout=full)
        refused(process, "standard output: No space left on device")


def stopping(monkeypatch, when):
    """Ask the next run to stop by itself when it has made this many calls."""
    whole, calls = folder.append, []

    def append(path, lines):
        whole(path, lines)
        calls.append(lines)
        if len(calls) == when:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):
                time.sleep(0.01)  # the thread that answers needs a moment

    monkeypatch.setattr(folder, "append", append)


def test_a_stopped_run_gives_the_numbers_of_an_unbroken_one(text, done, tmp_path, monkeypatch):
    out = tmp_path / "run"
    command = [*TINY, "--chunk", "1", "--save-every", "4", "--steps", "4", "--text-file", text, "--out"]
    train_variant.main([*command, str(tmp_path / "whole")])
    with monkeypatch.context() as patch:
        stopping(patch, 1)  # after the first step, which no checkpoint is due for
        with pytest.raises(SystemExit, match="stopped by SIGTERM; --resume goes on from step 1"):
            train_variant.main([*command, str(out)])
    assert steps_of(out) == [1]
    train_variant.main([*command, str(out), "--resume"])
    for one, other in zip(
        *(folder.read(p / "metrics.jsonl") for p in (out, tmp_path / "whole")), strict=True
    ):
        assert one | {"seconds": 0} == other | {"seconds": 0}


def test_a_stop_that_fails_to_save_says_what_is_saved(text, tmp_path, monkeypatch):
    def full(self, step, tree):
        raise OSError(28, "No space left on device", f"{self.folder}/{step}.npz")

    out = tmp_path / "run"
    monkeypatch.setattr(checkpoints.Checkpoints, "save", full)
    with pytest.raises(
        SystemExit, match=r"No space left on device: '.*/run/checkpoints/2.npz'; --resume starts"
    ):
        train_variant.main([*TINY, "--steps", "4", "--text-file", text, "--out", str(out)])


def test_device_memory_that_ends_is_one_line(text, tmp_path, monkeypatch):
    def refuse(self, *arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile allocating")

    monkeypatch.setattr(train.Programs, "ready", refuse)
    with pytest.raises(
        SystemExit, match="the device refused: RESOURCE_EXHAUSTED: Out of memory; --resume starts"
    ):
        train_variant.main([*TINY, "--text-file", text, "--out", str(tmp_path / "run")])


# The lock


def test_a_lock_is_held_by_one_and_released(tmp_path):
    with lock.locked(tmp_path):
        with pytest.raises(BlockingIOError, match=rf"in use by pid {os.getpid()} on"), lock.locked(tmp_path):
            pass
    with lock.locked(tmp_path) as held:
        held.check()
    assert not list(tmp_path.iterdir())


def test_one_of_many_gets_a_new_folder(tmp_path, monkeypatch):
    """Each of the others gets another folder (default names) or is refused (the same --out)."""
    monkeypatch.chdir(tmp_path)
    together, got, refusals = threading.Barrier(8), [], []

    def take(out):
        together.wait()
        try:
            with folder.hold(out, "mha-seed0") as held:
                got.append(held.path)
                time.sleep(0.5)
        except BlockingIOError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=take, args=(Path("asked") if i % 2 else None,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = sorted(path.name for path in got)
    assert names == ["asked", "mha-seed0", "mha-seed0-2", "mha-seed0-3", "mha-seed0-4"] and len(refusals) == 3


def test_a_folder_in_which_nothing_was_written_goes_again(tmp_path):
    out = tmp_path / "new"
    with pytest.raises(ValueError), folder.hold(out, "x"):
        raise ValueError("refused")
    assert not out.exists()
    out.mkdir()
    with folder.hold(out, "x"):
        pass
    assert out.exists() and not list(out.iterdir())


def test_a_folder_that_was_replaced_is_left_alone(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(lock.Lost, match="was removed or replaced"), folder.hold(out, "x") as held:
        out.rename(tmp_path / "elsewhere")
        out.mkdir()
        (out / "theirs").touch()
        folder.write(out / "gone" / "file", "x")
    assert [p.name for p in out.iterdir()] == ["theirs"]
    with pytest.raises(lock.Lost):
        held.check()


# The frame of a script


def test_stops_are_told_in_one_line():
    asked = stop.Stop()
    asked.check()
    asked.ask("first")
    asked.ask("second")
    with pytest.raises(stop.Stopped, match="first"):
        asked.check()


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(SystemExit), screen.script("x.py"):
        assert signal.getsignal(signal.SIGINT) is not before
        raise OSError("x")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_fault_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), screen.script("x.py"):
        raise ZeroDivisionError
