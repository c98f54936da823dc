"""The benchmark measures what it says, on a small scale; times themselves are never tested."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench

SMALL = (1, 24, 2, 8)


def test_a_group_is_measured_in_turns_against_its_first():
    ran = []
    entries = {name: bench.Entry(lambda name=name: ran.append(name)) for name in ("a", "b", "c")}
    first, *others = bench.measure("group", entries, 3)
    assert ran == [*"abc", *"abc", *"bca", *"cab"]  # once to warm up
    assert first.ratio == 1.0 and [row.name for row in others] == ["b", "c"]


def test_what_is_compiled_tells_its_memory_and_computes_the_gradient():
    batch, length, heads, width = SMALL
    attn = bench.at_defaults("talking_heads", heads, width)
    entry = bench.attend(attn, "blocked", bench.BOTH, batch, length)
    assert entry.memory is not None and entry.memory > 0
    ((query, key, coupling),) = [entry.work()]
    assert all(np.abs(x).max() > 0 for x in (query.query, key.value, coupling.pre[0].matrix))
    gradient = bench.gradient(lambda x, y: x * y)(jnp.array(2.0), jnp.array(3.0))
    assert [float(g) for g in gradient] == [36.0, 24.0]


def test_both_sublayers_compute_the_same_shape():
    entries = bench.sublayers(bench.FORWARD, *SMALL)
    assert {entry.work().shape for entry in entries.values()} == {(1, 24, 16)}


def test_half_the_heads_are_active_and_both_engines_give_the_same():
    entries = bench.half_the_heads(bench.FORWARD, 24, 8, 4)
    assert list(entries) == ["moh blocked", "moh routed", "moh blocked sublayer", "moh routed sublayer"]
    whole, held = entries["moh blocked"].work(), entries["moh routed"].work()
    assert whole.shape == (1, 24, 8, 4) and held.shape == (1, 24, 4, 4)
    np.testing.assert_allclose(np.sum(whole), np.sum(held), rtol=1e-4)


def test_ratios_and_report_come_from_the_results():
    group = f"the form, {bench.BOTH}"
    results = [
        bench.Result(group, "mha blocked", 10.0, 1.0, 2**20, 1.0),
        bench.Result(group, "mha dense", 25.0, 2.5, 2**22, 1.0),
        bench.Result(group, "dcmha blocked", 15.0, 1.5, None, None),
    ]
    ratios = bench.targets(results)
    assert ratios == pytest.approx({"dense / blocked: mha": 2.5, "blocked dcmha / blocked mha": 1.5})
    page = bench.text(results, ratios, {"Sizes": "small"})
    assert "| dense / blocked: mha | 2.50 |" in page and "| mha dense | 25.0 | 2.50 | 4 | 1.0 |" in page
    json.dumps([row._asdict() for row in results], allow_nan=False)
    points = [{"rows": n, "name": "mha blocked", "milliseconds": n / 10, "memory": n << 12} for n in (8, 16)]
    assert bench.figure(points).startswith(b"\x89PNG")
