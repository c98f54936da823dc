"""Laws of heads that are removed: what is left keeps its numbers, its names and its optimizer state."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxattn.check.law import SINGLE, Outcome, Sizes, distance, law, noted, table
from jaxattn.check.subjects.params import (
    AXES,
    Dims,
    Params,
    differ,
    drawn,
    gated,
    leaves,
    left,
    same,
    states,
    terms,
    tree,
)
from jaxattn.check.subjects.surgery import Pruned, Surgery


def layer_of(subject: Surgery, sizes: Sizes, same: bool = False) -> Dims:
    """Sizes of a layer; same makes all of them equal, so that no shape tells which axis is that of heads."""
    n = max(3, sizes.h)
    if same:
        return Dims(n, n, n, n, n)
    h, d = sizes.h, sizes.d
    return Dims(h * d, h, h, d, d + 1 if "d_v" in subject.supports else d)


def removed_of(h: int) -> tuple[int, ...]:
    """Heads to remove: not the last ones, and where possible two that follow one another."""
    return (1, 2) if h >= 4 else (0,)


def others(h: int, removed: Iterable[int]) -> tuple[int, ...]:
    return tuple(head for head in range(h) if head not in set(removed))


def _pruned(subject: Surgery, dims: Dims, state: Any = None) -> tuple[Params, tuple[int, ...], Pruned]:
    params, removed = drawn(dims), removed_of(dims.h)
    return params, removed, Pruned(*subject.prune(params, removed, state))


@law("numbers", "without the heads, the layer is the whole one with their gates at zero", about=Surgery)
def pruned_is_gated(subject, sizes):
    dims = layer_of(subject, sizes)
    params, removed, found = _pruned(subject, dims)
    gates = [float(head not in removed) for head in range(dims.h)]
    return Outcome(distance(gated(found.params, states(dims)), gated(params, states(dims), gates)), SINGLE)


@law("axes", "heads that are left keep their numbers, and their old names by new_to_old", about=Surgery)
def survivors_named(subject, sizes):
    dims = layer_of(subject, sizes)
    params, removed, found = _pruned(subject, dims)
    names = tuple(int(head) for head in found.new_to_old)
    if sorted(names) != list(others(dims.h, removed)):
        return Outcome(np.inf, 0.0, f"new_to_old is {names} without {removed} of {dims.h} heads")
    paths = [path for path in AXES if not path.startswith("out")]
    got, want = leaves(found.params), left(params, names)
    return same({p: got[p] for p in paths}, {p: want[p] for p in paths})


@law("shape", "heads that are left are as wide as before", about=Surgery)
def head_width_kept(subject, sizes):
    dims = layer_of(subject, sizes)
    _, removed, found = _pruned(subject, dims)
    count = dims.h - len(removed)
    want = Dims(dims.m, count, count, dims.d, dims.v).shapes()
    got = {path: x.shape for path, x in leaves(found.params).items()}
    wrong = [path for path in want if got.get(path) != want[path]]
    note = f"{wrong[0]}: {got.get(wrong[0], 'missing')}, expected {want[wrong[0]]}" if wrong else ""
    return Outcome(len(wrong), 0.0, note)


@law("axes", "rows of W_O go with their heads, and its bias stays", about=Surgery)
def out_rows_go(subject, sizes):
    dims = layer_of(subject, sizes)
    params, removed, found = _pruned(subject, dims)
    kept, want = others(dims.h, removed), leaves(params)["out/kernel"]
    got = leaves(found.params)["out/kernel"]
    if got.shape != want[list(kept)].shape:
        return Outcome(np.inf, 0.0, f"out/kernel: {got.shape}, expected {want[list(kept)].shape}")
    order = [kept[int(i)] for i in np.argsort(np.argsort(found.new_to_old))]
    whole = same({"out/bias": leaves(found.params)["out/bias"]}, {"out/bias": leaves(params)["out/bias"]})
    wrong = [new for new, old in enumerate(order) if np.any(got[new] != want[old])]
    note = f"block {wrong[0]} is not that of old head {order[wrong[0]]}" if wrong else whole.note
    return Outcome(len(wrong) + whole.measured, 0.0, note)


def _optimizer(params: Params, make: Any) -> Any:
    """A state of optax after two steps: its trees drawn, its counts two."""
    rng = np.random.default_rng(5)

    def draw(x: Any) -> np.ndarray:
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        return np.asarray(2, x.dtype) if whole else rng.random(x.shape).astype(np.float32) + 0.1

    return jax.tree.map(draw, make.init(params))


@law("behaviour", "moments go with their coordinates, though all sizes are equal; counts stay",
     "optimizer", about=Surgery)  # fmt: skip
def moments_follow(subject, sizes):
    dims = layer_of(subject, sizes, same=True)
    for make in (optax.adam(1e-2), optax.sgd(1e-2, momentum=0.9)):
        state = _optimizer(drawn(dims), make)
        _, _, found = _pruned(subject, dims, state)
        want, names = jax.tree_util.tree_flatten_with_path(state)[0], found.new_to_old
        got = jax.tree_util.tree_flatten_with_path(found.state)[0]
        if [path for path, _ in got] != [path for path, _ in want]:
            return Outcome(np.inf, 0.0, "the state is another tree")
        for (path, x), (_, old) in zip(got, want, strict=True):
            keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
            leaf = "/".join(keys[-2:])
            cut = left(tree({leaf: old}), names)[leaf] if leaf in AXES else old
            if differ(np.asarray(x), np.asarray(cut)):
                return Outcome(np.inf, 0.0, f"{'/'.join(keys)} is not that of the heads that are left")
    return Outcome(0.0, 0.0)


def _adam(params: dict, grads: dict, state: Any) -> dict[str, np.ndarray]:
    """One step of Adam on leaves by path, with 0.9, 0.999, 1e-8 and rate 0.01."""
    mu, nu, t = leaves(state[0].mu), leaves(state[0].nu), int(state[0].count) + 1
    after = {}
    for path, x in params.items():
        first = 0.9 * mu[path] + 0.1 * grads[path]
        second = 0.999 * nu[path] + 0.001 * grads[path] ** 2
        step = first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        after[path] = x - 0.01 * step
    return after


@law("behaviour", "the next step of Adam is that of the whole layer with gates at zero", "optimizer",
     about=Surgery)  # fmt: skip
def next_step_is_gated(subject, sizes):
    dims = layer_of(subject, sizes)
    state = _optimizer(drawn(dims), optax.adam(1e-2))
    params, removed, found = _pruned(subject, dims, state)
    grads = leaves(drawn(dims, seed=6))  # those of removed heads have no effect on what is compared
    whole = tree(_adam(leaves(params), grads, state))
    got = _adam(leaves(found.params), left(tree(grads), found.new_to_old), found.state)
    want = left(whole, found.new_to_old)
    return noted(max(distance(got[path], want[path]) for path in want), SINGLE, f"without heads {removed}")


@law("behaviour", "two removals are one, by way of new_to_old", "optimizer", about=Surgery)
def removals_compose(subject, sizes):
    h = max(4, sizes.h)
    dims = layer_of(subject, sizes)._replace(h=h, g=h, m=h * sizes.d)
    params = drawn(dims)
    state = _optimizer(params, optax.adam(1e-2))
    once = Pruned(*subject.prune(params, (1, 2), state))
    first = Pruned(*subject.prune(params, (1,), state))
    second = Pruned(*subject.prune(first.params, (list(first.new_to_old).index(2),), first.state))
    names = tuple(first.new_to_old[new] for new in second.new_to_old)
    if names != tuple(once.new_to_old):
        return Outcome(np.inf, 0.0, f"old heads {names} after two removals, {once.new_to_old} after one")
    flat = lambda x: {str(p): np.asarray(y) for p, y in jax.tree_util.tree_flatten_with_path(x)[0]}
    return same(flat((second.params, second.state)), flat((once.params, once.state)))


@law(
    "behaviour", "no head removed changes nothing; one that is none is refused; all leave b_O or are refused",
    about=Surgery,
)  # fmt: skip
def odd_removals(subject, sizes):
    dims = layer_of(subject, sizes)
    params = drawn(dims)
    none = Pruned(*subject.prune(params, (), None))
    if (off := same(leaves(none.params), leaves(params))).broken:
        return off._replace(note=f"nothing removed, and {off.note}")
    for head in (dims.h, -1):
        try:
            subject.prune(params, (head,), None)
        except Exception:  # any error is a refusal
            continue
        return Outcome(np.inf, 0.0, f"head {head} of {dims.h} was removed")
    try:
        found = Pruned(*subject.prune(params, tuple(range(dims.h)), None))
    except Exception:  # a layer without heads may be refused
        return Outcome(0.0, 0.0)
    y, bias = gated(found.params, states(dims)), leaves(params)["out/bias"]
    return noted(distance(y, np.broadcast_to(bias, y.shape)), SINGLE, "without any head")


@law("numbers", "a head at gate zero takes its term heads[h] W_O[h] out of the output", "ablation",
     about=Surgery)  # fmt: skip
def ablated_term(subject, sizes):
    dims = layer_of(subject, sizes)
    params, x = drawn(dims), states(dims)
    worst, note = 0.0, ""
    for head in range(dims.h):
        gates = (np.arange(dims.h) != head).astype(np.float32)
        off = distance(subject.ablate(params, x, gates), gated(params, x, gates))
        if not off <= worst:
            worst, note = off, f"head {head} of {dims.h}"
    return noted(worst, SINGLE, note)


@law(
    "numbers", "the output is linear in the gates: b_O at zero, halfway at a half", "ablation", about=Surgery
)
def linear_in_gates(subject, sizes):
    dims = layer_of(subject, sizes)
    params, x = drawn(dims), states(dims)
    full, none = (np.asarray(subject.ablate(params, x, np.full(dims.h, g, np.float32))) for g in (1, 0))
    half = np.ones(dims.h, np.float32)
    half[0] = 0.5
    off = distance(none, np.broadcast_to(params["out"]["bias"], none.shape))
    if off > SINGLE:
        return Outcome(off, SINGLE, "all gates at zero do not leave b_O")
    want = full - 0.5 * terms(params, x)[:, :, 0]
    return noted(distance(subject.ablate(params, x, half), want), SINGLE, "head 0 at a half")


@law("numbers", "importance is the mean size of dL/dgate over examples: signs do not cancel", "importance",
     about=Surgery)  # fmt: skip
def importance_absolute(subject, sizes):
    dims = layer_of(subject, sizes)
    params, x = drawn(dims), states(dims, b=3)
    pull = states(dims, b=3, seed=8)
    pull[1] = -pull[0] + 0.1 * pull[2]
    x[1] = x[0]
    each = np.einsum("bthm,btm->bh", terms(params, x), pull)
    want, got = np.abs(each).mean(0), np.asarray(subject.importance(params, x, pull), np.float64)
    share = lambda y: y / y.sum()
    signed = distance(share(np.abs(got)), share(np.abs(each.mean(0)))) <= SINGLE
    note = "it is the absolute of the mean" if signed else ""
    return noted(distance(share(got), share(want)), SINGLE, note)


LAWS = table(
    pruned_is_gated,
    survivors_named,
    head_width_kept,
    out_rows_go,
    moments_follow,
    next_step_is_gated,
    removals_compose,
    odd_removals,
    ablated_term,
    linear_in_gates,
    importance_absolute,
)
