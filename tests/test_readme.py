"""The code of README and docs runs, block after block of a page in one namespace."""

import pathlib
import re
import sys
import textwrap
import types

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
ELSEWHERE = {DOCS / "tasks/shard.md", *(DOCS / "notebooks").glob("*.md")}  # run by test_site.py
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")} - ELSEWHERE)
EVERYWHERE = {ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "index.md", DOCS / "tasks/nnx.md"}
WITHOUT_CODE = {
    *(
        DOCS / f"{name}.md"
        for name in "benchmarks changelog cite contributing faq faults glossary laws peers".split()
    ),
    DOCS / "scale.md",
    DOCS / "tasks/index.md",
    *(DOCS / "reference").glob("*.md"),
}


def blocks(page: pathlib.Path) -> list[str]:
    """The Python of a page, also where a list indents it."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


@pytest.mark.parametrize(
    "page",
    [page if page in EVERYWHERE else pytest.param(page, marks=pytest.mark.heavy) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_code_of_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bool(blocks(page)) == (page not in WITHOUT_CODE), "a page lost its code, or WITHOUT_CODE is wrong"
    module = types.ModuleType("page")  # what a page defines is then found by pickle
    monkeypatch.setitem(sys.modules, "page", module)
    namespace = vars(module)
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
