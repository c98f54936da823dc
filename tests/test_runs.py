"""A run survives people and machines: locks, stops, full disks, closed outputs, longer and other runs."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import variants
from experiments import compare, sample, scale_sweep, train_variant
from experiments.lib import checkpoints, facts, folder, lock, screen, stop, train

ROOT = Path(__file__).parents[1]
SIZES = "--layers 1 --width 16 --heads 2 --context 8 --batch 2".split()
TINY = [*SIZES, *"--evaluate-every 2 --save-every 2 --sample 40".split()]
LONG = "--steps 3000000 --evaluate-every 100000 --save-every 100000".split()


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Runs of one model share what XLA made of it, subprocesses too."""
    cache = str(tmp_path_factory.mktemp("xla"))
    names = {"jax_compilation_cache_dir": cache, "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
        del os.environ[name.upper()]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "verse.txt"
    path.write_text("".join(f"{i} café 你好 green bottles {i * i}\n" for i in range(300)), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def done(text, tmp_path_factory):
    """A finished run of four steps."""
    path = tmp_path_factory.mktemp("done") / "run"
    train_variant.main([*TINY, "--steps", "4", "--text-file", text, "--out", str(path)])
    return path


@pytest.fixture
def copied(done, tmp_path):
    return Path(shutil.copytree(done, tmp_path / "copied"))


def start(*arguments, script="train_variant.py", stdout=subprocess.PIPE, **environment):
    command = [sys.executable, str(ROOT / "experiments" / script), *arguments]
    told = dict(stdout=stdout, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    known = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(command, env=known, **told)


def until(process, pattern):
    """Read its lines up to one that has the pattern."""
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"it ended: {process.stderr.read()}")


def refused(process, *told):
    """It ended by itself, with one line on stderr that has all of `told`."""
    _, errors = process.communicate(timeout=120)
    assert process.returncode > 0, errors
    assert errors.count("\n") == 1 and "Traceback" not in errors, errors
    for part in told:
        assert part in errors
    return errors


def steps_of(path):
    return [line["step"] for line in folder.read(path / "metrics.jsonl") if "loss" in line]


def config_of(path):
    return json.loads((path / "config.json").read_text())


# What ends a run before its time


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


# Checkpoints


def state(dtype=jnp.float32, **params):
    params = params or {"a/b": jnp.ones((3, 2), dtype), "scale": jnp.ones(2, jnp.bfloat16)}
    optimizer = train.adamw(b2=0.9, weight_decay=0.1, clip=1.0)
    return train.init(params, optimizer, jax.random.key(3))


def test_a_checkpoint_keeps_types_and_bits(tmp_path):
    had = state(jnp.float64)
    with folder.checkpoints(tmp_path) as manager:
        folder.save(manager, had)
        got = folder.restore(manager, had)
    for one, other in zip(jax.tree.leaves(had), jax.tree.leaves(got), strict=True):
        assert one.dtype == other.dtype and (one == other).all()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (state(jnp.bfloat16), r"params/a/b: saved float64\[3, 2\], asked for bfloat16\[3, 2\]"),
        (state(jnp.float32), r"mu/a/b: saved float64\[3, 2\], asked for float32"),
        (
            state(**{"a/c": jnp.ones((3, 2))}),
            r"params/a/b: saved float64\[3, 2\], not asked for.*a/c: asked for",
        ),
        (state(**{"a/b": jnp.ones((3, 4))}), r"saved float64\[3, 2\], asked for float64\[3, 4\]"),
    ],
)
def test_restore_casts_nothing_and_names_the_leaf(like, message, tmp_path):
    with folder.checkpoints(tmp_path) as manager:
        folder.save(manager, state(jnp.float64))
        with pytest.raises(ValueError, match=message):
            folder.restore(manager, like)


def test_restore_does_not_narrow_where_the_process_has_no_doubles(tmp_path):
    with folder.checkpoints(tmp_path) as manager:
        folder.save(manager, state(jnp.float64))
        like = jax.tree.map(
            np.asarray, state(jnp.float64)._replace(rng=jax.random.key_data(jax.random.key(3)))
        )
        with (
            jax.enable_x64(False),
            pytest.raises(ValueError, match="a/b was saved as float64.*JAX_ENABLE_X64"),
        ):
            manager.restore_like(0, like)


def test_what_is_half_written_is_no_checkpoint(tmp_path):
    with folder.checkpoints(tmp_path) as manager:
        folder.save(manager, state())
    place = tmp_path / "checkpoints"
    (place / ".9.npz.123").write_bytes(b"half")
    (place / "notes").mkdir()
    assert folder.checkpoints(tmp_path, writes=False).all_steps() == [0]
    assert (place / ".9.npz.123").exists()  # a reader leaves the writer's file alone
    assert folder.checkpoints(tmp_path).all_steps() == [0] and not (place / ".9.npz.123").exists()
    whole = (place / "0.npz").read_bytes()
    for damaged in (whole[:-100], b"", whole[:200] + bytes([whole[200] ^ 255]) + whole[201:]):
        (place / "0.npz").write_bytes(damaged)
        with pytest.raises(OSError, match="0.npz is damaged .*remove the file to go on"):
            folder.restore(folder.checkpoints(tmp_path), state())
    (place / "4").mkdir()
    with pytest.raises(OSError, match="4 is a checkpoint of an older version"):
        folder.checkpoints(tmp_path)


# Longer and other runs


def test_a_run_can_be_extended_and_says_so(text, copied, capsys):
    arguments = [*TINY, "--text-file", text, "--out", str(copied), "--resume"]
    train_variant.main([*arguments, "--steps", "8"])
    assert steps_of(copied) == list(range(1, 9))
    known = config_of(copied)
    assert known["training"]["steps"] == 8
    assert known["went_on"][0]["extended"] == {"from": 4, "to": 8} and known["went_on"][0]["step"] == 4
    rates = [line["rate"] for line in folder.read(copied / "metrics.jsonl") if "loss" in line]
    schedule = train.warmup_cosine(4e-3, 0.1, 100, 8)
    np.testing.assert_allclose(rates[4:], [schedule(step) for step in range(4, 8)], rtol=1e-5)
    assert rates[4] > rates[3]  # it rises again, which --help and the report say
    assert "Extended from 4 to 8 steps after step 4" in (copied / "report.md").read_text()
    with pytest.raises(SystemExit, match=r"has training.steps = 8, got 6"):
        train_variant.main([*arguments, "--steps", "6"])
    capsys.readouterr()
    train_variant.main([*arguments, "--steps", "8"])  # a finished run writes its report again
    assert "step 8" in capsys.readouterr().out


def test_weights_of_another_run_start_one(text, done, tmp_path, capsys):
    out, other = tmp_path / "out", tmp_path / "other.txt"
    other.write_text("green bottles café\n" * 100, encoding="utf-8")
    command = [*TINY, "--steps", "2", "--text-file", str(other), "--seed", "1", "--init-from", str(done)]
    train_variant.main([*command, "--out", str(out), "--learning-rate", "1e-9"])
    was, now = folder.load_run(done), folder.load_run(out)
    assert now.symbols == was.symbols and now.config["init_from"]["step"] == 4
    for name, leaf in was.params.items():
        np.testing.assert_allclose(now.params[name], leaf, atol=1e-6)
    shutil.copytree(out, tmp_path / "broken")
    for path in (tmp_path / "broken" / "checkpoints").iterdir():
        path.unlink()
    train_variant.main([*command, "--out", str(out), "--learning-rate", "1e-9", "--resume"])
    for changed, message in {
        ("--variant", "moh"): "has variant = mha, got moh",
        ("--width", "32"): "has sizes.width = 16, got 32",
        ("--norm", "layer"): "has sizes.norm = 'rms', got 'layer'",
    }.items():
        with pytest.raises(SystemExit, match=f"--init-from: the run in {done} {message}"):
            train_variant.main([*command, *changed, "--out", str(tmp_path / "no")])
    other.write_text("Ω" * 999, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"trained on another text: got the letters \['Ω'\]"):
        train_variant.main([*command, "--out", str(tmp_path / "no")])
    assert not (tmp_path / "no").exists()


def test_options_of_the_variant_tell_runs_apart(text, tmp_path):
    command = [*TINY, "--steps", "2", "--text-file", text, "--variant", "moh", "--moh.shared", "0"]
    out = str(tmp_path / "out")
    train_variant.main([*command, "--moh.top-k", "1", "--out", out])
    loaded = folder.load_run(out)
    assert loaded.model.attention[0].links == (variants.moh(shared=0, top_k=1),)
    with pytest.raises(SystemExit, match=r"has settings.top_k = 1, got 2"):
        train_variant.main([*command, "--out", out, "--resume"])
    with pytest.raises(SystemExit, match=r"has settings.top_k = 1, got 2"):
        train_variant.main([*command, "--out", str(tmp_path / "no"), "--init-from", out])


def test_a_run_is_known_by_its_content(text, done, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [*TINY, "--text-file", text, "--resume"]
    with pytest.raises(SystemExit, match=r"no run in runs/ was started with these options; name its folder"):
        train_variant.main([*command, "--steps", "4"])
    assert not Path("runs").exists()
    for name, changes in {"any name": {}, "mha-seed0": {"seed": 5}, "moh-seed1": {"variant": "moh"}}.items():
        shutil.copytree(done, Path("runs") / name)
        folder.write_json(Path("runs") / name / "config.json", config_of(done) | changes)
    Path("runs/damaged").mkdir()
    Path("runs/damaged/config.json").write_text("{")
    for steps in ("4", "6"):
        train_variant.main([*command, "--steps", steps])
        assert "written to runs/any name" in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match=r"the newest, runs/.*, has sizes.layers = 1, got 2; name its folder"
    ):
        train_variant.main([*command, "--steps", "6", "--layers", "2"])


def test_a_sample_is_written_from_a_run(done, capsys):
    sample.main([str(done), "--prompt", "café", "--symbols", "7"])
    told = capsys.readouterr().out
    assert told.startswith("café") and len(told) == 4 + 7 + 1
    sample.main([str(done), "--prompt", "café", "--symbols", "7"])
    assert capsys.readouterr().out == told
    for arguments, message in {
        (str(done), "--prompt", "XY"): r"--prompt: got the letters \['X', 'Y'\]",
        (str(done), "--prompt", ""): "--prompt: got no text",
        (str(done), "--symbols", "0"): "--symbols: got 0",
        (str(done.parent),): "holds no run: there is no",
    }.items():
        with pytest.raises(SystemExit, match=message):
            sample.main(list(arguments))


def test_a_loaded_run_gives_its_own_logits(text, done):
    loaded = folder.load_run(done)
    assert loaded.step == 4 and loaded.config["seed"] == 0
    assert {leaf.dtype for leaf in loaded.params.values()} == {
        leaf.dtype for leaf in loaded.model.params.values()
    }
    logits, _ = loaded.model.apply(loaded.params, jnp.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, len(loaded.symbols))
    other, _ = loaded.model.apply(loaded.model.params, jnp.array([[1, 2, 3]]))
    assert not np.allclose(logits, other)


# What a run tells


def test_the_folder_says_with_what_it_was_made(text, done):
    made = config_of(done)["made_with"]
    for name in ("jax", "flax", "jaxattn", "python", "date", "host", "machine", "device"):
        assert made[name], name
    assert "--text-file" in made["command"] and made["commit"] == facts.commit()
    report = (done / "report.md").read_text(encoding="utf-8")
    for part in ("validation", "tokens/s", f"--resume --out {done}", "experiments/sample.py", "One seed"):
        assert part in report
    for line in folder.read(done / "metrics.jsonl"):
        assert line["seconds"] > 0


def test_no_repository_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert facts.commit() is None
    monkeypatch.setenv("PATH", "")
    assert facts.commit() is None


def test_validation_can_be_short(text, tmp_path):
    out = tmp_path / "run"
    command = [*TINY, "--steps", "2", "--text-file", text, "--out", str(out), "--valid-symbols"]
    train_variant.main([*command, "9"])
    assert "over 9 symbols" in (out / "report.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="has valid_symbols = 9, got 12"):
        train_variant.main([*command, "12", "--resume"])


def test_names_are_not_read_as_markup_or_mathematics(text, tmp_path, capsys):
    name = tmp_path / "[red]$x^$ 你 :smile: [b].txt"
    shutil.copy(text, name)
    train_variant.main([*TINY, "--steps", "2", "--text-file", str(name), "--out", str(tmp_path / "[/i]")])
    told = capsys.readouterr().out
    assert name.name in told and "written to" in told and "[/i]" in told


# Variants of one's own, seeds


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_variants.py").write_text(
        '''
import jax.numpy as jnp, jaxattn as ja, variants

class head_scale(ja.HeadTransform):
    """Scales each head by a learned number.

    Args:
        at_first: where the numbers start.
    """

    at_first: float = 1.0

    def init(self, rng, at, dtype):
        return {"scale": jnp.full(at.sizes.output_heads, self.at_first, dtype)}

    def query_side(self, params, x_q, side, at):
        return at.gate(side, params["scale"][:, None])

    def declare(self, at):
        return ja.Declaration({"scale": "h"})

def one_head(): return variants.moh(shared=0, top_k=1)
def needs(what): return head_scale()
def nothing(): return None
number = 3
'''
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_variants"
    sys.modules.pop("own_variants", None)


def test_a_variant_of_ones_own(own, text, tmp_path, capsys):
    command = [*TINY, "--steps", "2", "--text-file", text, "--out", "run"]
    train_variant.main([*command, "--variant", f"{own}:head_scale", "--head-scale.at-first", "2"])
    assert config_of(tmp_path / "run")["settings"] == {"at_first": 2.0}
    assert folder.load_run("run").model.attention[0].links[0].at_first == 2.0
    with pytest.raises(SystemExit, match="has settings.at_first = 2.0, got 1.0"):
        train_variant.main([*command, "--variant", f"{own}:head_scale", "--resume"])
    with pytest.raises(SystemExit):
        train_variant.main(["--variant", f"{own}:head_scale", "--help"])
    assert "where the numbers start" in capsys.readouterr().out
    plan = train_variant.parse(["--variant", f"{own}:one_head", "--one-head.shared", "1"])
    assert plan.one_head_options == variants.moh(shared=1, top_k=1)
    names = ["--variants", f"{own}:head_scale", "--head-scale.at-first", "3"]
    compare.main([*SIZES, *names, "--steps", "2", "--seeds", "0", "--text-file", text, "--out", "two"])
    rows = json.loads(Path("two/results.json").read_text())
    assert [row["variant"] for row in rows] == ["mha", f"{own}:head_scale"]
    assert rows[1]["settings"] == "at_first=3.0"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("moha", "invalid choice 'moha'; expected one of mha, "),
        ("nowhere:x", "there is no module nowhere"),
        ("nowhere.at.all:x", "there is no module nowhere"),
        ("own_variants.at:x", "there is no module own_variants.at"),
        ("own_variants:other", "own_variants.py) has no other"),
        ("own_variants:needs", "missing a required argument: 'what'"),
        ("own_variants:number", "is a int, expected a ja.HeadTransform"),
        ("own_variants:nothing", "makes a NoneType, expected a ja.HeadTransform"),
        ("own_variants:", "invalid choice 'own_variants:'"),
    ],
)
@pytest.mark.parametrize("script", [train_variant, compare])
def test_a_variant_that_is_not_there_is_one_line(script, name, message, own, capsys):
    with pytest.raises(SystemExit) as refusal:
        script.main([*SIZES, "--variants" if script is compare else "--variant", name])
    told = capsys.readouterr().err
    assert refusal.value.code == 2 and message in told and told.count("\n") == 1


def test_repeated_seeds_are_refused(text, tmp_path):
    with pytest.raises(SystemExit, match="--seeds: got 1 twice, expected different seeds"):
        compare.main([*SIZES, "--seeds", "1", "0", "1", "--text-file", text, "--out", str(tmp_path / "no")])
    assert not (tmp_path / "no").exists()


def test_compare_recommends_what_it_has(text, done, tmp_path):
    command = [*SIZES, "--variants", "mha", "--text-file", text, "--out", str(done)]
    with pytest.raises(SystemExit, match="holds a run already; compare.py does not go on") as refusal:
        compare.main(command)
    assert "--resume" not in str(refusal.value)


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
