"""Sharding: rules by axis name in this process; what eight devices do, from one run of sharding_worker.py."""

import json
import math
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharding_worker as worker
import table
from jax.sharding import AbstractMesh, AxisType, Mesh

import jaxattn as ja
import variants
from jaxattn import sharding

pytestmark = pytest.mark.heavy

B, T, H = worker.BATCH, worker.TIME, worker.HEADS
OUTPUT = ["all-reduce", [[B, T, worker.OUT]]]  # the heads' parts of the output, after W_O
RUNS = [f"{name} {mode} {engine}" for name in worker.CASES for mode in worker.MODES
        for engine in (("dense", "blocked") if name in worker.ON_BLOCKED else ("dense",))
        if name != "dcmha_groups" or mode == "heads"]  # fmt: skip


def run_worker() -> str:
    """The worker's JSON, or what it printed when it failed."""
    here = pathlib.Path(__file__).parent
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    paths = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, here / "sharding_worker.py"],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=900,
    )
    failed = f"sharding_worker.py ended with {done.returncode}:\n{done.stderr[-4000:]}"
    return failed if done.returncode else done.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the worker found on eight devices. It runs once, though pytest-xdist has several processes."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    result, begun = folder / "sharding.json", folder / "sharding.begun"
    try:
        begun.touch(exist_ok=False)
    except FileExistsError:
        waited = time.monotonic()
        while not result.exists():
            assert time.monotonic() - waited < 900, "the other process did not finish sharding_worker.py"
            time.sleep(0.2)
    else:
        text = run_worker()
        (folder / "sharding.part").write_text(text)
        (folder / "sharding.part").rename(result)  # whole at once, for who waits
    text = result.read_text()
    assert text.startswith("{"), text
    found = json.loads(text)
    assert found["devices"] == 8
    return found


def size(shapes):
    """Elements of all shapes of one collective."""
    return sum(math.prod(shape) for shape in shapes)


def kinds(collectives):
    return {kind for kind, _ in collectives}


def test_every_variant_has_its_case():
    assert set(variants.VARIANTS) <= set(worker.CASES)


# Law 8: the same function.


def test_law_8_sharding_changes_neither_outputs_nor_gradients(report):
    assert set(report["cases"]) == set(RUNS)
    off = {run: (found["output"], found["gradient"]) for run, found in report["cases"].items()}
    off |= {"two axes": (report["two_axes"]["output"], report["two_axes"]["gradient"])}
    off = {run: errors for run, errors in off.items() if not max(errors) <= 1e-12}
    assert not off, f"differ from one device, outputs or gradients: {off}"


@pytest.mark.parametrize("mode", worker.MODES)
def test_law_8_dropout_is_drawn_as_on_one_device(report, mode):
    found = report["dropout"][mode]
    assert max(found["output"], found["gradient"]) <= 1e-12
    assert report["dropout"]["moved by dropout"] > 0.1


def test_pub_30_two_devices_equal_one(report):
    """Batch-sharded, then head-sharded; training is a scan of two rematerialised layers with a raw key
    against a loop on one device with the typed one."""
    limits = {"float64": 1e-10, "float32": 2e-5, "training": 1e-10}
    found = report["pub_30"]
    assert set(found) == {f"{mode} {what}" for mode in ("batch", "heads") for what in limits}
    for name, error in found.items():
        assert error <= limits[name.split()[1]], f"{name}: off by {error:.1e}"


# What is communicated.

# XLA's top-k gathers what it chooses from: a router's scores.
OF_ROUTER = ["all-gather", [[B, T, H - 2]]]
# A product joins the query heads of one key head with the rows, which are then gathered, forward and back.
OF_QUERY = {"gqa": ["all-gather", [[B, H, T, 3]]], "collab": ["all-gather", [[B, H, T, 10]]]}


@pytest.mark.parametrize("run", [run for run in RUNS if " data " in run])
def test_data_parallel_communicates_the_gradients_of_the_parameters_alone(report, run):
    found, name = report["cases"][run], run.split()[0]
    allowed = [OF_ROUTER] if name == "moh" else []
    assert all(one in allowed for one in found["forward"])
    rest = [one for one in found["reverse"] if one not in allowed]
    assert kinds(rest) == {"all-reduce"}
    of_balance = H - 2 if name == "moh" else 0  # its loss knows how often each routed head was chosen
    assert sum(size(shapes) for _, shapes in rest) == found["params"] + of_balance
    assert found["kernel on one device"] == found["kernel"]


APART = [
    run for run in RUNS if run.startswith(("mha heads", "gqa heads", "collab heads", "dcmha_groups heads"))
]


@pytest.mark.parametrize("run", APART)
def test_head_parallel_sums_the_output_and_no_more_where_heads_are_apart(report, run):
    """Groups that do not cross devices are such a case, with mixes before and after the softmax."""
    found = report["cases"][run]
    assert found["forward"] == [OUTPUT]
    if run.startswith(("mha", "dcmha_groups")):
        assert kinds(found["reverse"]) == {"all-reduce"}
        m, heads, d = found["kernel"]
        assert found["kernel on one device"] == [m, heads // 8, d]


@pytest.mark.parametrize("engine", ["dense", "blocked"])
def test_head_parallel_communicates_whole_scores_in_a_mix_of_all_heads(report, engine):
    found = report["cases"][f"talking_heads heads {engine}"]["forward"]
    assert OUTPUT in found
    of_scores = [one for one in found if size(one[1]) >= B * H * T * T]
    assert of_scores, f"no scores in {found}"
    if engine == "dense":  # one before the softmax, one after it
        assert [kind for kind, _ in of_scores] == ["all-gather", "all-gather"]


def test_head_parallel_communicates_rank_sums_in_a_low_rank_mix_of_all_heads(report):
    """A rank r of 2 from each of two sides in each of two stages, in place of 8 heads."""
    found = report["cases"]["dcmha heads dense"]["forward"]
    assert OUTPUT in found
    assert kinds(found) == {"all-reduce"}
    of_pairs = [shape for _, shapes in found for shape in shapes if math.prod(shape) >= B * T * T]
    assert [math.prod(shape) for shape in of_pairs] == [B * T * T * 2] * 4


def test_head_parallel_routers_communicate_gates_alone(report):
    found = report["cases"]["moh heads dense"]["forward"]
    assert OUTPUT in found
    assert all(size(shapes) <= B * T * H for one, shapes in found if [one, shapes] != OUTPUT)


def test_head_parallel_neighbours_exchange_their_overlap_alone(report):
    found = report["cases"]["mohsa heads dense"]["forward"]
    assert OUTPUT in found
    found.remove(OUTPUT)
    assert kinds(found) == {"collective-permute"}
    assert all(shapes == [[B, T, 1, 2]] for _, shapes in found)


@pytest.mark.parametrize("run", [run for run in RUNS if " rows " in run])
def test_query_rows_need_nothing_of_each_other_where_keys_are_whole(report, run):
    found, name = report["cases"][run], run.split()[0]
    allowed = [OF_ROUTER] if name == "moh" else [OF_QUERY[name]] if name in OF_QUERY else []
    assert all(one in allowed for one in found["forward"])
    if name not in OF_QUERY:
        assert kinds(one for one in found["reverse"] if one not in allowed) == {"all-reduce"}


def test_examples_and_groups_of_heads_are_sharded_at_once(report):
    found = report["two_axes"]
    assert found["forward"] == [["all-reduce", [[B // 2, T, worker.OUT]]]]
    assert kinds(found["reverse"]) == {"all-reduce"}
    m, heads, d = found["kernel"]
    assert found["kernel on one device"] == [m, heads // 4, d]


@pytest.mark.parametrize("mode", ["data", "rows"])
@pytest.mark.parametrize("name", ["talking_heads", "moh"])
def test_r2_17_shard_map_gives_each_device_blocks_of_its_own(report, name, mode):
    found = report["loops"][f"{name} {mode}"]
    assert max(found["output"], found["gradient"], found["gradient within"]) <= 1e-12
    assert found["forward"] == []
    assert kinds(found["reverse"]) == {"all-reduce"}


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_mixes_are_another_function(groups):
    """A head sees those of its group: the logits of others do not reach it."""
    attn = ja.attention(ja.HeadSpec(model=6, heads=4, d_qk=3, d_v=5), variants.dcmha(groups=groups))
    params = table.drawn(attn, np.random.default_rng(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 6)))

    def first_two(kernel):
        changed = {**params, "query": {"kernel": kernel}}
        return attn.apply(changed, x, capture=("heads",))[1].captured["heads"][:, :2].sum()

    reach = np.abs(table.jit(jax.grad(first_two))(params["query"]["kernel"])).max((0, 2))
    assert (reach[:2] > 1e-6).all()
    assert (reach[2:] == 0).all() if groups == 2 else (reach[2:] > 1e-6).all()


# Names and rules.


def tuples(tree):
    """PartitionSpecs as tuples, at the places of the leaves."""
    return jax.tree.map(tuple, tree, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))


@pytest.mark.parametrize("case", table.CASES, ids=lambda case: case.name)
def test_every_leaf_has_a_name_for_each_axis(case):
    attn = table.attention(case)
    z, s = attn.sizes, attn.spec
    known = {
        "hl": {z.logit_heads, z.query_heads}, "hs": {z.softmax_heads}, "hv": {z.output_heads},
        "h": {z.output_heads}, "hK": {z.key_heads}, "hV": {z.value_heads}, "d": {z.qk_width},
        "c": {z.qk_width}, "v": {z.value_width, z.output_width}, "m": {s.in_q, s.in_k, s.in_v, s.out},
        "one": {1}, "two": {2},
    }  # fmt: skip
    shapes = jax.eval_shape(attn.init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    axes = sharding.leaf_axes(attn)
    for path, leaf in leaves:
        names = axes
        for part in path:
            names = names[part.key]
        assert len(names) == len(leaf.shape), (path, names)
        for name, n in zip(names, leaf.shape, strict=True):
            assert n in known.get(name, {n}), (path, name, n)


def test_rules_by_kind_of_head():
    spec = ja.HeadSpec(model=24, heads=4, kv_heads=2, use_bias=True)
    attn = ja.attention(spec, variants.talking_heads(), variants.moh(shared=2, top_k=1))
    got = tuples(sharding.partition_specs(attn, {"h": "x", "hK": None, "hV": "y", "m": "z", "b": "w"}))
    assert got["query"] == {"kernel": ("z", "x", None), "bias": ("x", None)}
    assert got["key"] == {"kernel": ("z", None, None), "bias": (None, None)}
    assert got["value"] == {"kernel": ("z", "y", None), "bias": ("y", None)}
    assert got["out"] == {"kernel": ("x", None, "z"), "bias": ("z",)}
    maps = {"kernel": (None, "x")}  # heads that come out are apart
    assert got["heads"]["talking_heads"] == {"pre": maps, "post": maps}
    assert got["heads"]["moh"] == dict.fromkeys(("routed", "shared", "stage"), ("z", None))


def test_several_mesh_axes_share_one_axis():
    assert tuple(sharding.spec_of("m hl d", {"hl": ("x", "y")})) == (None, ("x", "y"), None)
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    assert tuple(sharding.spec_of("hl d", {"h": ("x", "y")}, mesh, (16, 3))) == (("x", "y"), None)
    with pytest.raises(ValueError, match='axis hl is 12, which 8 devices of mesh axis "x y"'):
        sharding.spec_of("hl d", {"h": ("x", "y")}, mesh, (12, 3))


GQA = ja.attention(ja.HeadSpec(model=24, heads=8, kv_heads=2))
EIGHT = AbstractMesh((8,), ("heads",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"head": "heads"}, r"'head' is no axis name.* hl, .*Fix: axis names on the left"),
        ({"h": "head"}, "h goes to mesh axis 'head', which the mesh has not; it has heads"),
        ({"h": "heads"}, r'key/kernel: axis hK is 2, which 8 devices of mesh axis "heads" do not divide .*'
                         r'"m hK d", shape \(24, 2, 3\).*Fix: a rule \{"hK": None\}'),
        ({"hl": "heads", "m": "heads"}, "query/kernel: .* axes m and hl both to mesh axis 'heads'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(rules, message):
    with pytest.raises(ValueError, match=message):
        sharding.partition_specs(GQA, rules, EIGHT)


def test_the_fix_for_shared_key_heads_works():
    specs = sharding.partition_specs(GQA, {"h": "heads", "hK": None, "hV": None}, EIGHT)
    assert tuple(specs["key"]["kernel"]) == (None, None, None)


def test_a_mesh_of_explicit_axes_is_refused():
    mesh = Mesh(np.array(jax.devices()[:1]), ("heads",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"'heads' is Explicit.*AxisType\.Auto"):
        sharding.shardings(GQA, {"h": "heads"}, mesh)


def test_a_name_for_each_axis_of_a_state():
    with pytest.raises(ValueError, match=r'states: shape \(2, 3\) has 2 axes, expected 3 \(axes "b q m"\)'):
        sharding.spec_of("b q m", {"b": "heads"}, EIGHT, (2, 3), "states")
