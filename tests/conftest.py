"""float64 everywhere: a wrong formula must not hide behind rounding."""

from pathlib import Path

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
