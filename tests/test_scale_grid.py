"""The scale sweep and the score grid: theory and growth hold at small sizes, and a fault shows as a slope."""

import doctest
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from experiments import scale_sweep, score_grid
from experiments.lib import scores, tables

pytestmark = pytest.mark.heavy

SWEEP = "--widths 8 32 --queries 31 --keys 17 --examples 61 --seeds 3".split()
GRID = "--lengths 256 512 --batch 8 --heads 8 --width 8".split()
NORMAL = {"assumed", "variance 4", "repeated", "matched", "factor 1/d"}  # the model of weights is exact


def run(script, arguments, path):
    script.main(tyro.cli(script.Options, args=[*arguments, "--out", str(path)]))
    return path


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return run(scale_sweep, SWEEP, tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def gridded(tmp_path_factory):
    return run(score_grid, GRID, tmp_path_factory.mktemp("grid"))


def by_curve(path):
    rows = json.loads((path / "scale.json").read_text())["rows"]
    curves = {}
    for row in rows:
        mean = {name: np.mean([draw[name] for draw in row["draws"]]) for name in row["theory"]}
        curves.setdefault((row["case"], row["scaled"]), {})[row["width"]] = mean, row["theory"]
    return curves


def test_examples_in_docstrings_hold():
    assert doctest.testmod(tables).failed == 0


# The scale sweep


@pytest.mark.parametrize(("name", "scaled"), [("assumed", False), ("rms norm", True), ("factor 1/d", True)])
def test_what_is_measured_is_the_formula(name, scaled):
    case, grid, width = scores.CASES[name], scores.Grid(3, 5, 7), 12
    x_q, x_k = case.draw(jax.random.key(11), grid, width)
    got = scale_sweep.measured(scale_sweep.spec_of(case, width, scaled), x_q, x_k)
    factor = {"factor 1/d": 1 / width}.get(name, 1 / math.sqrt(width)) if scaled else 1
    logits, largest, entropy = [], [], []
    for b in range(grid.examples):
        for i in range(grid.queries):
            row = []
            for j in range(grid.keys):
                query, key = np.asarray(x_q[b, i]), np.asarray(x_k[b, j])
                if name == "rms norm":
                    query, key = (x / math.sqrt(np.mean(x * x) + 1e-6) for x in (query, key))
                row.append(factor * sum(query * key))
            weights = np.exp(row) / np.exp(row).sum()
            logits += row
            largest.append(weights.max())
            entropy.append(-sum(w * math.log(w) for w in weights))
    np.testing.assert_allclose(got, [np.std(logits), np.mean(largest), np.mean(entropy)], rtol=1e-9)


def test_spreads_are_what_theory_says(swept):
    grid = scores.Grid(61, 31, 17)
    curves = by_curve(swept)
    assert set(curves) == {(name, scaled) for name in scores.CASES for scaled in (False, True)}
    for width, (got, _) in curves["assumed", False].items():
        error = scores.expected_error(grid, 3, width)
        assert error < 0.015
        assert abs(got["std"] / math.sqrt(width) - 1) < 4 * error
    few = 4 * scores.expected_error(grid, 3, scores.REPEATED)  # no case has fewer coordinates
    assert few < 0.04
    for (name, _), curve in curves.items():
        for got, theory in curve.values():
            assert abs(got["std"] / theory["std"] - 1) < few, name


def test_weights_are_what_the_normal_model_says(swept):
    for (name, _), curve in by_curve(swept).items():
        for width, (got, theory) in curve.items():
            if name in NORMAL or width > 8:  # elsewhere 8 coordinates are too few to be normal
                assert abs(got["largest"] - theory["largest"]) < 0.03, (name, width)
                assert abs(got["entropy"] - theory["entropy"]) < 0.08, (name, width)


def test_each_broken_assumption_shows(swept):
    curves = by_curve(swept)
    grown = {curve: [values[d][0] for d in (8, 32)] for curve, values in curves.items()}
    for name, power in {
        "assumed": 0, "signs": 0, "variance 4": 0, "mean 1": 0, "rms norm": 0,
        "repeated": 0.5, "unit rows": -1, "factor 1/d": -0.5,
    }.items():  # fmt: skip
        assert abs(tables.power((8, 32), [m["std"] for m in grown[name, True]]) - power) < 0.04, name
        raw = {"unit rows": -0.5, "repeated": 1}.get(name, 0.5)
        assert abs(tables.power((8, 32), [m["std"] for m in grown[name, False]]) - raw) < 0.04, name
    narrow, wide = grown["matched", True]
    assert wide["largest"] > 1.5 * narrow["largest"]
    narrow, wide = grown["assumed", False]
    assert wide["largest"] > 1.3 * narrow["largest"] and wide["entropy"] < 0.6 * narrow["entropy"]
    narrow, wide = grown["assumed", True]
    assert abs(wide["largest"] - narrow["largest"]) < 0.02


def test_a_scale_that_is_missing_is_seen_as_a_slope(monkeypatch):
    options = scale_sweep.Options(widths=(8, 32), queries=31, keys=17, examples=61, seeds=3)
    plain = {"assumed": scores.CASES["assumed"]}
    rows = scale_sweep.sweep(options, plain)
    got, theory = scale_sweep.powers(rows, "assumed", True)
    assert abs(got) < 0.03 and abs(theory) < 1e-9
    right = scale_sweep.spec_of
    monkeypatch.setattr(scale_sweep, "spec_of", lambda case, width, scaled: right(case, width, False))
    rows = scale_sweep.sweep(options, plain)
    got, theory = scale_sweep.powers(rows, "assumed", True)
    assert abs(got - 0.5) < 0.03 and abs(theory) < 1e-9


def test_the_stated_error_is_that_of_many_draws():
    grid, width, draws = scores.Grid(3, 11, 13), 5, 3000
    rng = np.random.default_rng(7)
    query = rng.standard_normal((draws, grid.examples, grid.queries, width))
    key = rng.standard_normal((draws, grid.examples, grid.keys, width))
    spread = np.einsum("nbqd,nbkd->nbqk", query, key).std(axis=(1, 2, 3)) / math.sqrt(width)
    np.testing.assert_allclose(spread.std(), scores.expected_error(grid, 1, width), rtol=0.08)


@pytest.mark.parametrize(("name", "keys"), [("matched", 3), ("assumed", 7)])
def test_queries_correlate_with_their_own_key_or_with_none(name, keys):
    x_q, x_k = scores.CASES[name].draw(jax.random.key(5), scores.Grid(1, 7, keys), 20_000)
    products = jnp.einsum("qd,kd->qk", x_q[0], x_k[0]) / x_q.shape[-1]
    own = np.equal(np.arange(7)[:, None] % keys, np.arange(keys))
    np.testing.assert_allclose(products, own * (scores.MATCH if name == "matched" else 0), atol=0.04)


def test_the_sweep_leaves_its_folder_complete(swept):
    page = (swept / "scale.md").read_text()
    for name, case in scores.CASES.items():
        assert f"- {name}: {case.says}" in page and f"| {name} | " in page
    assert "| 32 | 5.6569 | " in page and "log k = 2.8332" in page
    assert (swept / "scale.png").read_bytes().startswith(b"\x89PNG")


# The score grid


def test_dense_grows_with_the_square_and_blocked_with_the_rows(gridded):
    first, second = json.loads((gridded / "grid.json").read_text())["points"]
    for point, rows in ((first, 256), (second, 512)):
        assert point["length"] == rows and point["entries"] == 8 * 8 * rows * rows
        assert point["grid"] == point["entries"] * jnp.zeros(()).dtype.itemsize
        held = {name: bytes_ / point["grid"] for name, bytes_ in point["memory"].items()}
        assert 2 <= held["dense, forward"] < 2.2 and 4 <= held["dense, forward + backward"] < 4.4
        assert max(held["blocked, forward"], held["blocked, forward + backward"]) < 0.5
    growth = {name: bytes_ / first["memory"][name] for name, bytes_ in second["memory"].items()}
    assert len(growth) == 4
    for name, factor in growth.items():
        assert (3.9 < factor <= 4) if name.startswith("dense") else (1 < factor <= 2), (name, factor)


def test_the_grid_leaves_its_folder_complete(gridded):
    page = (gridded / "grid.md").read_text()
    assert "| 512 | 16,777,216 | " in page and "| dense, forward | 1.9" in page
    assert (gridded / "grid.png").read_bytes().startswith(b"\x89PNG")
    slopes = json.loads((gridded / "grid.json").read_text())["slopes"]
    assert slopes["dense, forward"] == pytest.approx([2, 2], abs=0.02)
    assert max(slopes["blocked, forward + backward"]) <= 1


def test_a_grid_that_the_ledger_counts_otherwise_is_refused(monkeypatch):
    right = score_grid.ja.ledger
    wrong = lambda *a, **k: right(*a, **k)._replace(score_elements=41)
    monkeypatch.setattr(score_grid.ja, "ledger", wrong)
    with pytest.raises(ArithmeticError, match=r"the ledger counts 41, b h q k is 3750"):
        score_grid.measure(score_grid.Options(batch=2, heads=3, width=4), 25)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (scale_sweep, ["--widths", "8"], r"--widths: got \(8,\), expected two or more different multip"),
        (scale_sweep, ["--widths", "8", "6"], r"--widths: got \(8, 6\)"),
        (scale_sweep, ["--keys", "1"], "--keys: got 1, expected a whole number of at least 2"),
        (scale_sweep, ["--seeds", "0"], "--seeds: got 0"),
        (score_grid, ["--lengths", "64", "64"], r"--lengths: got \(64, 64\), expected two or more"),
        (score_grid, ["--heads", "0"], "--heads: got 0, expected a whole number of at least 1"),
        (score_grid, ["--variant", "moha"], "--variant: got 'moha', expected one of mha"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_and_nothing_is_written(script, arguments, message, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match=message):
        run(script, arguments, out)
    assert not out.exists()
