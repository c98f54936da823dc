"""The benchmark measures what it says, on a small scale; times themselves are never tested."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench, profile

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


def test_a_profile_attributes_operations_to_steps():
    heads, rows, width = 3, 5, 7
    text = f"""
%fused (a: f32[{heads},{heads}], b: f32[{heads},{rows}]) -> f32[{heads},{rows}] {{
  %a = f32[{heads},{heads}]{{1,0}} parameter(0)
  %b = f32[{heads},{rows}]{{1,0}} parameter(1)
  ROOT %dot.1 = f32[{heads},{rows}]{{1,0}} dot(%a, %b), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (m: f32[{heads},{heads}], x: f32[{heads},{rows}]) -> f32[{heads},{rows}] {{
  %m = f32[{heads},{heads}]{{1,0}} parameter(0)
  %x = f32[{heads},{rows}]{{1,0}} parameter(1)
  %mixed = f32[{heads},{rows}]{{1,0}} fusion(%m, %x), kind=kCustom, calls=%fused
  %owed = f32[{heads},{heads}]{{1,0}} dot(%x, %mixed), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %heads = f32[{rows},{width}]{{1,0}} dot(%x, %y), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  ROOT %weights = f32[{heads},{rows}]{{1,0}} exponential(%mixed), metadata={{op_name="jvp(softmax)/exp"}}
}}
"""
    program = profile.parse(text)
    steps = {name: profile.step_of(program, name, heads) for name in ("mixed", "owed", "heads", "weights")}
    assert steps == {
        "mixed": "static mixes",
        "owed": "gradient of static matrices",
        "heads": "products of heads",
        "weights": "softmax and its derivative",
    }
    assert profile.multiplied(program, "mixed") == 2 * heads * heads * rows
    assert profile.multiplied(program, "weights") == 0
    assert profile.moved(program, "weights") == 2 * 4 * heads * rows


def test_a_profile_of_a_run_adds_up_to_something(monkeypatch):
    monkeypatch.setattr(profile, "HEADS", 4)
    monkeypatch.setattr(profile, "WIDTH", 16)
    whole, steps = profile.profile("talking_heads", profile.Options(batch=1, length=256, runs=2))
    assert whole > 0 and {"static mixes", "products of heads"} <= steps.keys()
    products = steps["products of heads"]
    # Two products forward and five backward, of 256 rows in blocks that see between half and all keys.
    square = 2 * 4 * 16 * 256**2 / 1e9
    assert 7 * square / 2 < products.gigaflops < 7 * square
