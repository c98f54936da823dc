"""Imports point down: experiments -> variants -> jaxattn; and jaxattn knows no variant's name.

One exception: `ja.variants`, which finds our variants by their place, for people in whose folder another
module is called `variants`.
"""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

import variants

ROOT = pathlib.Path(__file__).parent.parent
FORBIDDEN = {"jaxattn": {"variants", "experiments"}, "variants": {"experiments"}}


def imported(path: pathlib.Path) -> set[str]:
    """Top-level packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_down(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path) & FORBIDDEN[package], path


def test_only_the_modules_import_flax_and_the_check_of_it():
    files = [path for path in (ROOT / "jaxattn").rglob("*.py") if "flax" in imported(path)]
    known = {"modules.py", "module_state.py", "linen.py", "decoder.py"}
    assert {path.name for path in files} <= known


def code_without_docstrings(path: pathlib.Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant):
                body[0] = ast.Pass()
    return ast.unparse(tree)


def test_no_variant_is_named_in_jaxattn():
    names = re.compile("|".join(rf"\b{name}\b" for name in set(variants.VARIANTS) - {"mha"}))
    for path in (ROOT / "jaxattn").rglob("*.py"):
        found = names.search(code_without_docstrings(path))
        assert not found, f"{path} names {found and found.group()}"


def test_a_planted_upward_import_is_seen(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from variants.moh import moh\n    return moh\n")
    assert imported(bad) & FORBIDDEN["jaxattn"]


def test_another_module_called_variants_is_named_once_and_ours_is_still_found(tmp_path):
    """A local variants.py would break the first line of the README without a word."""
    other = tmp_path / "variants.py"
    other.write_text("mine = 1\n")
    program = (
        "import pickle, sys, jaxattn as ja, variants\n"
        "assert variants.mine == 1\n"
        "moh = ja.variants.moh(top_k=1)\n"
        "assert repr(moh) == 'moh(top_k=1)' and ja.attention(ja.HeadSpec(model=8, heads=4), moh).links == "
        "(moh,)\n"
        "sys.stdout.buffer.write(pickle.dumps(moh))\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu", "PATH": ""}
    options = dict(env=environment, cwd=tmp_path, capture_output=True, check=True)
    made = subprocess.run([sys.executable, "-c", program], **options)
    said = made.stderr.decode()
    assert said.count("UserWarning") == 1 and str(other) in said and "ja.variants" in said
    read = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()))"
    again = subprocess.run([sys.executable, "-c", read], input=made.stdout, **options)
    assert again.stdout.decode().strip() == "moh(top_k=1)"


def test_without_another_module_ja_variants_is_the_package():
    import jaxattn as ja

    assert ja.variants is variants
