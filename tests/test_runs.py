"""Checkpoints with their own types; longer and other runs; what a run tells; variants of one's own."""

import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
from running import SIZES, TINY, config_of, steps_of

import variants
from experiments import compare, sample, train_variant
from experiments.lib import facts, folder, train

compile_once, text = running.compile_once, running.text  # fixtures
done, copied = running.done, running.copied
pytestmark = pytest.mark.usefixtures("compile_once")

# Checkpoints


def state(dtype=jnp.float32, **params):
    params = params or {"a/b": jnp.ones((3, 2), dtype), "scale": jnp.ones(2, jnp.bfloat16)}
    optimizer = train.adamw(b2=0.9, weight_decay=0.1, clip=1.0)
    return train.init(params, optimizer, jax.random.key(3))


def test_a_checkpoint_keeps_types_and_bits(tmp_path):
    had = state(jnp.float64)
    with folder.checkpoints(tmp_path) as manager:
        folder.save(manager, had)
        got = folder.restore(manager, had)
    for one, other in zip(jax.tree.leaves(had), jax.tree.leaves(got), strict=True):
        assert one.dtype == other.dtype and (one == other).all()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (state(jnp.bfloat16), r"params/a/b: saved float64\[3, 2\], asked for bfloat16\[3, 2\]"),
        (state(jnp.float32), r"mu/a/b: saved float64\[3, 2\], asked for float32"),
        (
            state(**{"a/c": jnp.ones((3, 2))}),
            r"params/a/b: saved float64\[3, 2\], not asked for.*a/c: asked for",
        ),
        (state(**{"a/b": jnp.ones((3, 4))}), r"saved float64\[3, 2\], asked for float64\[3, 4\]"),
    ],
)
def test_restore_casts_nothing_and_names_the_leaf(like, message, tmp_path):
    with folder.checkpoints(tmp_path) as manager:
        folder.save(manager, state(jnp.float64))
        with pytest.raises(ValueError, match=message):
            folder.restore(manager, like)


def test_restore_does_not_narrow_where_the_process_has_no_doubles(tmp_path):
    with folder.checkpoints(tmp_path) as manager:
        folder.save(manager, state(jnp.float64))
        like = jax.tree.map(
            np.asarray, state(jnp.float64)._replace(rng=jax.random.key_data(jax.random.key(3)))
        )
        with (
            jax.enable_x64(False),
            pytest.raises(ValueError, match="a/b was saved as float64.*JAX_ENABLE_X64"),
        ):
            manager.restore_like(0, like)


def test_what_is_half_written_is_no_checkpoint(tmp_path):
    with folder.checkpoints(tmp_path) as manager:
        folder.save(manager, state())
    place = tmp_path / "checkpoints"
    (place / ".9.npz.123").write_bytes(b"half")
    (place / "notes").mkdir()
    assert folder.checkpoints(tmp_path, writes=False).all_steps() == [0]
    assert (place / ".9.npz.123").exists()  # a reader leaves the writer's file alone
    assert folder.checkpoints(tmp_path).all_steps() == [0] and not (place / ".9.npz.123").exists()
    whole = (place / "0.npz").read_bytes()
    for damaged in (whole[:-100], b"", whole[:200] + bytes([whole[200] ^ 255]) + whole[201:]):
        (place / "0.npz").write_bytes(damaged)
        with pytest.raises(OSError, match="0.npz is damaged .*remove the file to go on"):
            folder.restore(folder.checkpoints(tmp_path), state())
    (place / "4").mkdir()
    with pytest.raises(OSError, match="4 is a checkpoint of an older version"):
        folder.checkpoints(tmp_path)


# Longer and other runs


def test_a_run_can_be_extended_and_says_so(text, copied, capsys):
    arguments = [*TINY, "--text-file", text, "--out", str(copied), "--resume"]
    train_variant.main([*arguments, "--steps", "8"])
    assert steps_of(copied) == list(range(1, 9))
    known = config_of(copied)
    assert known["training"]["steps"] == 8
    assert known["went_on"][0]["extended"] == {"from": 4, "to": 8} and known["went_on"][0]["step"] == 4
    rates = [line["rate"] for line in folder.read(copied / "metrics.jsonl") if "loss" in line]
    schedule = train.warmup_cosine(4e-3, 0.1, 100, 8)
    np.testing.assert_allclose(rates[4:], [schedule(step) for step in range(4, 8)], rtol=1e-5)
    assert rates[4] > rates[3]  # it rises again, which --help and the report say
    assert "Extended from 4 to 8 steps after step 4" in (copied / "report.md").read_text()
    with pytest.raises(SystemExit, match=r"has training.steps = 8, got 6"):
        train_variant.main([*arguments, "--steps", "6"])
    capsys.readouterr()
    train_variant.main([*arguments, "--steps", "8"])  # a finished run writes its report again
    assert "step 8" in capsys.readouterr().out


def test_weights_of_another_run_start_one(text, done, tmp_path, capsys):
    out, other = tmp_path / "out", tmp_path / "other.txt"
    other.write_text("green bottles café\n" * 100, encoding="utf-8")
    command = [*TINY, "--steps", "2", "--text-file", str(other), "--seed", "1", "--init-from", str(done)]
    train_variant.main([*command, "--out", str(out), "--learning-rate", "1e-9"])
    was, now = folder.load_run(done), folder.load_run(out)
    assert now.symbols == was.symbols and now.config["init_from"]["step"] == 4
    for name, leaf in was.params.items():
        np.testing.assert_allclose(now.params[name], leaf, atol=1e-6)
    shutil.copytree(out, tmp_path / "broken")
    for path in (tmp_path / "broken" / "checkpoints").iterdir():
        path.unlink()
    train_variant.main([*command, "--out", str(out), "--learning-rate", "1e-9", "--resume"])
    for changed, message in {
        ("--variant", "moh"): "has variant = mha, got moh",
        ("--width", "32"): "has sizes.width = 16, got 32",
        ("--norm", "layer"): "has sizes.norm = 'rms', got 'layer'",
    }.items():
        with pytest.raises(SystemExit, match=f"--init-from: the run in {done} {message}"):
            train_variant.main([*command, *changed, "--out", str(tmp_path / "no")])
    other.write_text("Ω" * 999, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"trained on another text: got the letters \['Ω'\]"):
        train_variant.main([*command, "--out", str(tmp_path / "no")])
    assert not (tmp_path / "no").exists()


def test_options_of_the_variant_tell_runs_apart(text, tmp_path):
    command = [*TINY, "--steps", "2", "--text-file", text, "--variant", "moh", "--moh.shared", "0"]
    out = str(tmp_path / "out")
    train_variant.main([*command, "--moh.top-k", "1", "--out", out])
    loaded = folder.load_run(out)
    assert loaded.model.attention[0].links == (variants.moh(shared=0, top_k=1),)
    with pytest.raises(SystemExit, match=r"has settings.top_k = 1, got 2"):
        train_variant.main([*command, "--out", out, "--resume"])
    with pytest.raises(SystemExit, match=r"has settings.top_k = 1, got 2"):
        train_variant.main([*command, "--out", str(tmp_path / "no"), "--init-from", out])


def test_a_run_is_known_by_its_content(text, done, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [*TINY, "--text-file", text, "--resume"]
    with pytest.raises(SystemExit, match=r"no run in runs/ was started with these options; name its folder"):
        train_variant.main([*command, "--steps", "4"])
    assert not Path("runs").exists()
    for name, changes in {"any name": {}, "mha-seed0": {"seed": 5}, "moh-seed1": {"variant": "moh"}}.items():
        shutil.copytree(done, Path("runs") / name)
        folder.write_json(Path("runs") / name / "config.json", config_of(done) | changes)
    Path("runs/damaged").mkdir()
    Path("runs/damaged/config.json").write_text("{")
    for steps in ("4", "6"):
        train_variant.main([*command, "--steps", steps])
        assert "written to runs/any name" in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match=r"the newest, runs/.*, has sizes.layers = 1, got 2; name its folder"
    ):
        train_variant.main([*command, "--steps", "6", "--layers", "2"])


def test_a_sample_is_written_from_a_run(done, capsys):
    sample.main([str(done), "--prompt", "café", "--symbols", "7"])
    told = capsys.readouterr().out
    assert told.startswith("café") and len(told) == 4 + 7 + 1
    sample.main([str(done), "--prompt", "café", "--symbols", "7"])
    assert capsys.readouterr().out == told
    for arguments, message in {
        (str(done), "--prompt", "XY"): r"--prompt: got the letters \['X', 'Y'\]",
        (str(done), "--prompt", ""): "--prompt: got no text",
        (str(done), "--symbols", "0"): "--symbols: got 0",
        (str(done.parent),): "holds no run: there is no",
    }.items():
        with pytest.raises(SystemExit, match=message):
            sample.main(list(arguments))


def test_a_loaded_run_gives_its_own_logits(text, done):
    loaded = folder.load_run(done)
    assert loaded.step == 4 and loaded.config["seed"] == 0
    assert {leaf.dtype for leaf in loaded.params.values()} == {
        leaf.dtype for leaf in loaded.model.params.values()
    }
    logits, _ = loaded.model.apply(loaded.params, jnp.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, len(loaded.symbols))
    other, _ = loaded.model.apply(loaded.model.params, jnp.array([[1, 2, 3]]))
    assert not np.allclose(logits, other)


# What a run tells


def test_the_folder_says_with_what_it_was_made(text, done):
    made = config_of(done)["made_with"]
    for name in ("jax", "flax", "jaxattn", "python", "date", "host", "machine", "device"):
        assert made[name], name
    assert "--text-file" in made["command"] and made["commit"] == facts.commit()
    report = (done / "report.md").read_text(encoding="utf-8")
    for part in ("validation", "tokens/s", f"--resume --out {done}", "experiments/sample.py", "One seed"):
        assert part in report
    for line in folder.read(done / "metrics.jsonl"):
        assert line["seconds"] > 0


def test_no_repository_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert facts.commit() is None
    monkeypatch.setenv("PATH", "")
    assert facts.commit() is None


def test_validation_can_be_short(text, tmp_path):
    out = tmp_path / "run"
    command = [*TINY, "--steps", "2", "--text-file", text, "--out", str(out), "--valid-symbols"]
    train_variant.main([*command, "9"])
    assert "over 9 symbols" in (out / "report.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="has valid_symbols = 9, got 12"):
        train_variant.main([*command, "12", "--resume"])


def test_names_are_not_read_as_markup_or_mathematics(text, tmp_path, capsys):
    name = tmp_path / "[red]$x^$ 你 :smile: [b].txt"
    shutil.copy(text, name)
    train_variant.main([*TINY, "--steps", "2", "--text-file", str(name), "--out", str(tmp_path / "[/i]")])
    told = capsys.readouterr().out
    assert name.name in told and "written to" in told and "[/i]" in told


# Variants of one's own, seeds


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_variants.py").write_text(
        '''
import jax.numpy as jnp, jaxattn as ja, variants

class head_scale(ja.HeadTransform):
    """Scales each head by a learned number.

    Args:
        at_first: where the numbers start.
    """

    at_first: float = 1.0

    def init(self, rng, at, dtype):
        return {"scale": jnp.full(at.sizes.output_heads, self.at_first, dtype)}

    def query_side(self, params, x_q, side, at):
        return at.gate(side, params["scale"][:, None])

    def declare(self, at):
        return ja.Declaration({"scale": "h"})

def one_head(): return variants.moh(shared=0, top_k=1)
def needs(what): return head_scale()
def nothing(): return None
number = 3
'''
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_variants"
    sys.modules.pop("own_variants", None)


def test_a_variant_of_ones_own(own, text, tmp_path, capsys):
    command = [*TINY, "--steps", "2", "--text-file", text, "--out", "run"]
    train_variant.main([*command, "--variant", f"{own}:head_scale", "--head-scale.at-first", "2"])
    assert config_of(tmp_path / "run")["settings"] == {"at_first": 2.0}
    assert folder.load_run("run").model.attention[0].links[0].at_first == 2.0
    with pytest.raises(SystemExit, match="has settings.at_first = 2.0, got 1.0"):
        train_variant.main([*command, "--variant", f"{own}:head_scale", "--resume"])
    with pytest.raises(SystemExit):
        train_variant.main(["--variant", f"{own}:head_scale", "--help"])
    assert "where the numbers start" in capsys.readouterr().out
    plan = train_variant.parse(["--variant", f"{own}:one_head", "--one-head.shared", "1"])
    assert plan.one_head_options == variants.moh(shared=1, top_k=1)
    names = ["--variants", f"{own}:head_scale", "--head-scale.at-first", "3"]
    compare.main([*SIZES, *names, "--steps", "2", "--seeds", "0", "--text-file", text, "--out", "two"])
    rows = json.loads(Path("two/results.json").read_text())
    assert [row["variant"] for row in rows] == ["mha", f"{own}:head_scale"]
    assert rows[1]["settings"] == "at_first=3.0"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("moha", "invalid choice 'moha'; expected one of mha, "),
        ("nowhere:x", "there is no module nowhere"),
        ("nowhere.at.all:x", "there is no module nowhere"),
        ("own_variants.at:x", "there is no module own_variants.at"),
        ("own_variants:other", "own_variants.py) has no other"),
        ("own_variants:needs", "missing a required argument: 'what'"),
        ("own_variants:number", "is a int, expected a ja.HeadTransform"),
        ("own_variants:nothing", "makes a NoneType, expected a ja.HeadTransform"),
        ("own_variants:", "invalid choice 'own_variants:'"),
    ],
)
@pytest.mark.parametrize("script", [train_variant, compare])
def test_a_variant_that_is_not_there_is_one_line(script, name, message, own, capsys):
    with pytest.raises(SystemExit) as refusal:
        script.main([*SIZES, "--variants" if script is compare else "--variant", name])
    told = capsys.readouterr().err
    assert refusal.value.code == 2 and message in told and told.count("\n") == 1


def test_repeated_seeds_are_refused(text, tmp_path):
    with pytest.raises(SystemExit, match="--seeds: got 1 twice, expected different seeds"):
        compare.main([*SIZES, "--seeds", "1", "0", "1", "--text-file", text, "--out", str(tmp_path / "no")])
    assert not (tmp_path / "no").exists()


def test_compare_recommends_what_it_has(text, done, tmp_path):
    command = [*SIZES, "--variants", "mha", "--text-file", text, "--out", str(done)]
    with pytest.raises(SystemExit, match="holds a run already; compare.py does not go on") as refusal:
        compare.main(command)
    assert "--resume" not in str(refusal.value)
