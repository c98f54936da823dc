"""PUB-28 (resume parity) and PUB-29 (non-finite training): one attention layer under our loop.

Run as a script, this file is the first half of PUB-28: `python test_cases_training.py FOLDER`.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxattn as ja
from experiments.lib import batches, folder, train

pytestmark = pytest.mark.heavy

RATE = optax.linear_schedule(0.0, 1e-2, transition_steps=6)


def fill(shape, s):
    t = np.arange(1, np.prod(shape) + 1)
    values = ((37 + 2 * s) * t * t + (101 + 7 * s) * t + 17 * s) % 997
    return (2 * values / 997 - 1).reshape(shape)


X, Y = fill((8, 3, 4), 300), fill((8, 3, 4), 301)


@functools.cache
def make(dropout=0.25, schedule=RATE):
    """What advances the layer, and the state it starts from."""
    attn = ja.attention(ja.HeadSpec(model=4, heads=2, d_qk=2, d_v=2, dropout=dropout))

    def loss_fn(params, batch, dropout_key):
        x, y, poison = batch
        out, _ = attn.apply(params, x, dropout_key=dropout_key if dropout else None)
        # 0, with a zero gradient at poison = 0 and 0 * inf = NaN at poison = 1
        trap = jnp.sqrt(1 - poison + 0 * params["query"]["kernel"].sum()) - (1 - poison)
        loss = jnp.mean((out - y) ** 2) + trap
        return loss, {"loss": loss}

    optimizer = optax.scale_by_adam()
    state = train.init(attn.init(jax.random.key(0), jnp.float64), optimizer, jax.random.key(0))
    return train.make_advance(train.make_step(loss_fn, optimizer, schedule)), state


def batch(step, inf=(), nan=()):
    """Two examples a step, in a new order each epoch of four steps; faults by step, from 1."""
    chosen = batches.indices(0, step, count=8, batch=2)
    y = Y[chosen]
    if step + 1 in inf:
        y[1, 2, 3] = np.inf
    return chosen, (X[chosen], y, np.float64(step + 1 in nan))


def go(path, advance, state, steps, draw=batch, save_every=3):
    log = path / "metrics.jsonl"
    with folder.checkpoints(path) as manager:
        state = folder.run(log, manager, advance, state, draw, steps=steps, chunk=1, save_every=save_every)
    return state, folder.read(log)


def restored(path, like):
    with folder.checkpoints(path) as manager:
        return folder.restore(manager, like)


def same(a, b):
    """Bit for bit, types too; keys by the numbers they hold."""
    a, b = (jax.tree.leaves(s._replace(rng=jax.random.key_data(s.rng))) for s in (a, b))
    return all(
        m.dtype == n.dtype and np.array_equal(np.asarray(m), np.asarray(n)) for m, n in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return go(tmp_path_factory.mktemp("straight"), *make(), steps=6)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Three steps and a checkpoint, in a process of their own."""
    path = tmp_path_factory.mktemp("half")
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_ENABLE_X64": "1"}
    subprocess.run([sys.executable, __file__, str(path)], check=True, env=environment, cwd=root)
    return path


def test_pub_28_resumed_run_equals_the_unbroken_one(straight, half, tmp_path):
    advance, fresh = make()
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    state = restored(tmp_path, fresh)
    assert int(state.step) == 3 and not same(state, fresh)
    end, lines = go(tmp_path, advance, state, steps=6)
    assert same(end, straight[0])
    assert lines == straight[1]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line.keys() >= {"loss", "rate", "examples", "dropout_key"}
    epoch = np.concatenate([line["examples"] for line in lines[:4]])
    assert sorted(epoch) == list(range(8))
    assert len({tuple(line["dropout_key"]) for line in lines}) == 6


def zero_moments(state):
    def zero(tree):
        return jax.tree.map(jnp.zeros_like, tree)

    adam = state.optimizer
    return state._replace(optimizer=adam._replace(mu=zero(adam.mu), nu=zero(adam.nu)))


DROPPED = {
    "moments": zero_moments,
    "count": lambda s: s._replace(optimizer=s.optimizer._replace(count=0 * s.optimizer.count)),
    "schedule": lambda s: s,  # it hangs on the count: see the test
    "key": lambda s: s._replace(rng=jax.random.key(1)),
    "position in shuffle": lambda s: s._replace(step=0 * s.step),
    "parameter dtype": lambda s: s._replace(
        params=jax.tree.map(lambda leaf: leaf.astype(jnp.float32), s.params)
    ),
}


@pytest.mark.parametrize("what", DROPPED)
def test_pub_28_fails_when_any_part_of_the_state_is_dropped(what, straight, half, tmp_path):
    advance, fresh = make()
    if what == "schedule":
        advance, _ = make(schedule=lambda count: RATE(count - 3))  # the rate starts anew
    kept = restored(half, fresh)
    assert int(kept.step) == 3
    state = DROPPED[what](kept)
    end, lines = go(tmp_path, advance, state, steps=int(state.step) + 3)
    assert not same(end, straight[0])
    assert lines != straight[1][3:]


def test_pub_28_saving_changes_nothing(straight, tmp_path):
    end, lines = go(tmp_path, *make(), steps=6, save_every=1)
    with folder.checkpoints(tmp_path) as manager:
        folder.save(manager, end)
        folder.save(manager, end)
        assert same(folder.restore(manager, end), end)
    assert same(end, straight[0])
    assert lines == straight[1]


def faulty(**faults):
    return lambda step: batch(step, **faults)


def without(left_out):
    return lambda step: batch(step if step + 1 < left_out else step + 1)


@pytest.mark.parametrize(
    ("faults", "culprit", "loss_is_finite"),
    [({"inf": (3,)}, "the loss", False), ({"nan": (3,)}, "the gradient of query/kernel", True)],
    ids=["a", "b"],
)
def test_pub_29_a_bad_step_is_left_out(faults, culprit, loss_is_finite, tmp_path):
    advance, fresh = make(dropout=0.0)
    draw = faulty(**faults)
    before, _ = go(tmp_path / "two", advance, fresh, steps=2, draw=draw)
    after, lines = go(tmp_path / "three", advance, fresh, steps=3, draw=draw)
    assert same(before, after._replace(step=before.step, bad=before.bad))
    assert int(after.step) == 3
    assert lines[2]["skipped"] == culprit
    assert (lines[2]["loss"] is not None) == loss_is_finite
    assert not any("skipped" in line for line in lines[:2])

    end, lines = go(tmp_path / "five", advance, fresh, steps=5, draw=draw, save_every=1)
    skipping, others = go(tmp_path / "others", advance, fresh, steps=4, draw=without(3))
    assert same(end, skipping._replace(step=end.step))
    told = [(line["loss"], line["rate"], line["examples"]) for line in lines]
    assert told[3:] == [(line["loss"], line["rate"], line["examples"]) for line in others[2:]]

    with folder.checkpoints(tmp_path / "five") as manager:
        for step in manager.all_steps():
            tree = manager.restore(step)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def test_pub_29_three_bad_steps_in_a_row_end_the_run(tmp_path):
    advance, fresh = make(dropout=0.0)
    with pytest.raises(train.NonFinite, match=r"3 steps in a row, .* step 5, .* the loss"):
        go(tmp_path, advance, fresh, steps=6, draw=faulty(inf=(3, 4, 5)), save_every=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "skipped" in line] == [3, 4, 5]
    assert "Infinity" not in (tmp_path / "metrics.jsonl").read_text()
    state = restored(tmp_path, fresh)
    assert train.is_finite((state.params, state.optimizer))


def test_pub_29_the_end_comes_in_the_middle_of_a_chunk_too(tmp_path):
    advance, fresh = make(dropout=0.0)
    draw = faulty(inf=(2, 3, 4))
    examples, inputs = zip(*map(draw, range(6)), strict=True)
    end, records = advance(fresh, jax.tree.map(lambda *leaves: np.stack(leaves), *inputs))
    lines = train.rows(records, end, np.stack(examples))
    assert int(end.step) == 4 and [line["step"] for line in lines] == [1, 2, 3, 4]
    one, _ = go(tmp_path, advance, fresh, steps=1)
    for a, b in zip(jax.tree.leaves(end.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13)


def test_pub_29_a_state_that_is_not_finite_is_never_saved(tmp_path):
    _, fresh = make()
    bad = fresh._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, fresh.params))
    with folder.checkpoints(tmp_path) as manager:
        with pytest.raises(train.NonFinite, match="not saved"):
            folder.save(manager, bad)
        assert manager.all_steps() == []


if __name__ == "__main__":
    go(Path(sys.argv[1]), *make(), steps=3)
