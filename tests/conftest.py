"""float64 everywhere: a wrong formula must not hide behind rounding."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

# Before jax starts: tests compile many small programs and run each once, so compile time is what counts.
# XLA aborts at a flag that it does not know, so the second is for the versions that were tried.
FLAGS = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

import jax  # noqa: E402  (the flags come first)

jax.config.update("jax_enable_x64", True)

# Thousands of live programs are searched for cycles again and again: a sixth of the time.
gc.set_threshold(100_000, 20, 50)


def pytest_addoption(parser):
    parser.addoption(
        "--golden",
        type=Path,
        default=Path(__file__).parent / "golden",
        metavar="DIR",
        help="folder of golden fixtures: the names of tests/golden, other sizes, seeds and settings",
    )
