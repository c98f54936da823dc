"""The code of README and docs runs, block after block of a page in one namespace."""

import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
EVERYWHERE = ("README.md", "CONTRIBUTING.md", "flax.md")  # on every Python: what a user runs first


def blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [page if page.name in EVERYWHERE else pytest.param(page, marks=pytest.mark.heavy) for page in PAGES],
    ids=lambda page: page.name,
)
def test_code_of_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)  # as a reader's session starts
    try:
        for number, block in enumerate(blocks(page)):
            exec(compile(block, f"{page.name}[{number}]", "exec"), namespace)
    finally:
        jax.config.update("jax_enable_x64", before)


def test_readme_has_code_to_run():
    assert len(blocks(ROOT / "README.md")) >= 3


def test_readme_gives_the_two_commands_word_for_word():
    text = (ROOT / "README.md").read_text()
    for last in ("python experiments/train_variant.py", "pytest"):
        assert f'pip install -e ".[dev]" && {last}\n' in text
