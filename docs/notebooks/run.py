"""Runs the notebooks, and writes each as a page with its output beside it.

python docs/notebooks/run.py                 all of them
python docs/notebooks/run.py tour FOLDER     one of them, its page and pictures into FOLDER

A notebook is a script in jupytext's percent format: VS Code and Jupyter (with jupytext) open it as it is,
and `jupytext --to ipynb tour.py` makes an .ipynb of it. A cell shows what it prints, and the picture that its
last expression is.
"""

import ast
import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

HERE = Path(__file__).parent
NAMES = ("tour", "compare", "bug")


class Cell(NamedTuple):
    """One cell: Markdown or code."""

    markdown: bool
    text: str


def cells(source: str) -> list[Cell]:
    """The cells of a percent script."""
    found = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        markdown = "[markdown]" in head
        if markdown:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        found.append(Cell(markdown, body.strip()))
    return found


def run_cell(text: str, where: str, namespace: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last expression."""
    tree = ast.parse(text, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), namespace)
        value = None if last is None else eval(compile(ast.Expression(last.value), where, "eval"), namespace)
    return printed.getvalue().rstrip(), value


def page(name: str, folder: Path) -> str:
    """The notebook as a page; its pictures go into the folder."""
    notebook, namespace = cells((HERE / f"{name}.py").read_text()), {}
    parts, pictures = [], 0
    for number, cell in enumerate(notebook):
        if cell.markdown:
            parts.append(cell.text)
            continue
        parts.append(f"```python\n{cell.text}\n```")
        printed, value = run_cell(cell.text, f"{name}.py, cell {number}", namespace)
        if printed:
            parts.append(f"```text\n{printed}\n```")
        if isinstance(value, Figure):
            pictures += 1
            value.savefig(folder / f"{name}-{pictures}.svg", metadata={"Date": None, "Creator": None})
            parts.append(f"![Output of the cell above]({name}-{pictures}.svg)")
    parts.append(
        f"---\n\nThis page is the output of `python docs/notebooks/run.py {name}`; the notebook is "
        f"`docs/notebooks/{name}.py`."
    )
    return "\n\n".join(parts) + "\n"


def main(names: list[str], folder: Path) -> None:
    for name in names:
        (folder / f"{name}.md").write_text(page(name, folder))
        print(folder / f"{name}.md")


if __name__ == "__main__":
    main(sys.argv[1:2] or list(NAMES), Path(sys.argv[2]) if len(sys.argv) > 2 else HERE)
