"""float64 everywhere: a wrong formula must not hide behind rounding."""

import os
from pathlib import Path

# Before jax starts: tests compile many small programs and run each once, so compile time is what counts.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
    )
)

import jax

jax.config.update("jax_enable_x64", True)


def pytest_addoption(parser):
    parser.addoption(
        "--golden",
        type=Path,
        default=Path(__file__).parent / "golden",
        metavar="DIR",
        help="folder of golden fixtures: the names of tests/golden, other sizes, seeds and settings",
    )
