"""Tiny runs for the tests of the scripts, here and in processes of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from experiments import train_variant
from experiments.lib import folder

ROOT = Path(__file__).parents[1]
SIZES = "--layers 1 --width 16 --heads 2 --context 8 --batch 2".split()
TINY = [*SIZES, *"--evaluate-every 2 --save-every 2 --sample 40".split()]
LONG = "--steps 3000000 --evaluate-every 100000 --save-every 100000".split()


@pytest.fixture(scope="module")
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
