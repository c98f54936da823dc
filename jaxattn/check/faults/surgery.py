"""Wrong removals of heads. `right` is what they are made of; a fault replaces one of its steps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxattn.check.faults.conversion import stages_of
from jaxattn.check.faults.fault import Fault
from jaxattn.check.subjects.params import AXES, Dims, Params, drawn, gated, leaves, left, states, terms, tree
from jaxattn.check.subjects.surgery import Pruned, State, Surgery
from jaxattn.check.tracing.stages import Stages
from jaxattn.check.tracing.trace import trace_of
from jaxattn.check.tracing.traced import Trace


def accepted(removed: Sequence[int], h: int) -> tuple[int, ...]:
    """Heads to remove, once each."""
    wrong = [head for head in removed if not 0 <= head < h]
    if wrong or len(set(removed)) == h:
        raise ValueError(f"prune: got heads {tuple(removed)} of {h}, expected some of 0 to {h - 1}, not all.")
    return tuple(sorted(set(removed)))


def kept(h: int, removed: Sequence[int]) -> tuple[int, ...]:
    return tuple(head for head in range(h) if head not in removed)


def projections(params: Params, old: tuple[int, ...]) -> dict[str, Any]:
    """Leaves of query, key and value."""
    return {path: x for path, x in left(params, old).items() if not path.startswith("out")}


def out(params: Params, old: tuple[int, ...]) -> dict[str, Any]:
    return {path: x for path, x in left(params, old).items() if path.startswith("out")}


def moments(state: State, old: tuple[int, ...]) -> State:
    """Every leaf that belongs to a parameter, cut as this one is; counts stay."""

    def cut(path: Any, x: Any) -> Any:
        keys = [str(getattr(key, "key", key)) for key in path]
        leaf = "/".join(keys[-2:])
        return left(tree({leaf: x}), old)[leaf] if leaf in AXES else x

    return jax.tree_util.tree_map_with_path(cut, state)


def names(old: tuple[int, ...]) -> tuple[int, ...]:
    return old


STEPS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (accepted, kept, projections, out, moments, names)
}


def right(params: Params, removed: Sequence[int], state: State, **steps: Callable[..., Any]) -> Pruned:
    """Without some heads; `steps` replaces `STEPS`."""
    s = {**STEPS, **steps}
    h = leaves(params)["out/kernel"].shape[0]
    old = s["kept"](h, s["accepted"](removed, h))
    after = tree({**s["projections"](params, old), **s["out"](params, old)})
    return Pruned(after, None if state is None else s["moments"](state, old), s["names"](old))


def importance(params: Params, x: np.ndarray, pull: np.ndarray) -> np.ndarray:
    """The mean over examples of |dL/dgate|."""
    return np.abs(np.einsum("bthm,btm->bh", terms(params, x), pull)).mean(0)


def surgeon(
    name: str = "right",
    ablate: Callable[..., Any] = gated,
    importance: Callable[..., Any] = importance,
    **steps: Callable[..., Any],
) -> Surgery:
    """`right` with some of its steps replaced."""
    prune = functools.partial(right, **steps)
    supports = frozenset({"d_v", "optimizer", "ablation", "importance"})
    return Surgery(name, prune, ablate, importance, supports)


DIMS = Dims(m=12, h=4, g=4, d=3, v=5)
REMOVED = (1, 2)


def traced(subject: Surgery) -> Trace:
    """One call of what is left, beside the heads that should be."""
    params = drawn(DIMS)
    found = Pruned(*subject.prune(params, REMOVED, None))
    want = tree(left(params, kept(DIMS.h, REMOVED)))
    heads, x = DIMS.h - len(REMOVED), states(DIMS, t=5)
    return trace_of(stages_of(found.params), x, heads=heads, d=DIMS.d, expected=stages_of(want))


def silenced(
    given: Callable[[Params, np.ndarray], Stages], want: Callable[[Params, np.ndarray], Stages]
) -> Trace:
    """One call with head 1 silenced in some way, beside how it should be."""
    params, gates = drawn(DIMS), np.arange(DIMS.h) != 1
    x = states(DIMS, t=5)
    return trace_of(given(params, gates), x, heads=DIMS.h, d=DIMS.d, expected=want(params, gates))


def by_gates(params: Params, gates: np.ndarray) -> Stages:
    """The stages of a layer whose heads meet their gates before they merge."""
    return stages_of(params)._replace(finish=lambda heads: heads * gates[:, None])


def by_values(params: Params, gates: np.ndarray) -> Stages:
    """The stages of one whose silent heads have values of zero, which gives the same output."""
    return stages_of(_without(params, gates, ("kernel", "bias")))


def _pruning(says: str, source: str, law: str, stage: str, **steps: Callable[..., Any]) -> Fault:
    subject = surgeon("planted", **steps)
    return Fault(says, source, law, subject, stage, functools.partial(traced, subject))


def _unseen(says: str, source: str, law: str, why: str, **steps: Callable[..., Any]) -> Fault:
    return Fault(says, source, law, surgeon("planted", **steps), why=why)


def _one_by_one(h: int, removed: Sequence[int]) -> tuple[int, ...]:
    """Each head by its first number, out of a list that is already shorter."""
    heads = list(range(h))
    for head in removed:
        del heads[min(head, len(heads) - 1)]
    return tuple(heads)


def _wider(params: Params, old: tuple[int, ...]) -> Params:
    """All packed channels, cut into fewer heads."""

    def fewer(x: np.ndarray, axis: int) -> np.ndarray:
        shape = list(x.shape)
        shape[axis : axis + 2] = [len(old), shape[axis] * shape[axis + 1] // len(old)]
        return x.reshape(shape)

    flat = leaves(params)
    return {path: fewer(x, AXES[path].split().index("h")) for path, x in flat.items() if "h" in AXES[path]}


def _first_heads(params: Params, old: tuple[int, ...]) -> dict[str, Any]:
    return out(params, tuple(range(len(old))))


def _emptied(state: State, old: tuple[int, ...]) -> State:
    return jax.tree.map(np.zeros_like, moments(state, old))


def _recounted(state: State, old: tuple[int, ...]) -> State:
    return jax.tree.map(lambda x: np.zeros_like(x) if x.ndim == 0 else x, moments(state, old))


def _after_the_sum(params: Params, x: np.ndarray, gates: np.ndarray) -> np.ndarray:
    """Slices of the output, as if each head owned one."""
    y = gated(params, x)
    return y * np.repeat(gates, -(-y.shape[-1] // len(gates)))[: y.shape[-1]]


def _sliced(params: Params, gates: np.ndarray) -> Stages:
    """The stages of `_after_the_sum`: heads are not gated, the output is."""
    own = stages_of(params)
    output, slices = own.output, np.repeat(gates, DIMS.m // DIMS.h)
    assert output is not None
    return own._replace(finish=lambda heads: heads, output=lambda x: output(x) * slices)


def _without(params: Params, gates: np.ndarray, names: tuple[str, ...] = ("kernel",)) -> Params:
    """Parameters without some leaves of the values of silent heads."""
    value = {name: x * np.asarray(gates, np.float32)[:, None] for name, x in params["value"].items()}
    return {**params, "value": {**params["value"], **{name: value[name] for name in names}}}


STATE = "the state of an optimizer is in no call"

FAULTS: dict[str, Fault] = {
    "removed by numbers that moved": _pruning(
        "heads are removed one after another by numbers of the whole layer",
        "PUB-22",
        "pruned-is-gated",
        "Q",
        kept=_one_by_one,
    ),
    "head width worked out anew": _pruning(
        "fewer heads share all channels, each wider than before",
        "M3.2 0x0BAA",
        "head-width-kept",
        "Q",
        projections=lambda params, old: {
            path: x for path, x in _wider(params, old).items() if not path.startswith("out")
        },
        out=lambda params, old: {**out(params, old), "out/kernel": _wider(params, old)["out/kernel"]},
    ),
    "rows of W_O stay": _pruning(
        "Q, K and V lose the heads, W_O its last ones",
        "M3.2 0x0BAA",
        "out-rows-go",
        "output",
        out=_first_heads,
    ),
    "labels by new numbers": _unseen(
        "heads that are left are named by their new places",
        "M3.2 0x0BAA",
        "survivors-named",
        "names are in no call",
        names=lambda old: tuple(range(len(old))),
    ),
    "head -1 is the last": _unseen(
        "a head that is none is taken from the other end",
        "PUB-22",
        "odd-removals",
        "the call is right for the heads that are left",
        accepted=lambda removed, h: accepted(tuple(head % h for head in removed), h),
    ),
    "optimizer from the start": _unseen(
        "moments are zero and the count too", "PUB-23", "next-step-is-gated", STATE, moments=_emptied
    ),
    "count from the start": _unseen(
        "moments are kept, their count is not", "PUB-23", "next-step-is-gated", STATE, moments=_recounted
    ),
    "moments of other heads": _unseen(
        "moments are cut to the right shape, the last heads away",
        "PUB-23; M3.2 0x0BAA",
        "moments-follow",
        STATE,
        moments=lambda state, old: moments(state, tuple(range(len(old)))),
    ),
    "slice of the output zeroed": Fault(
        "a head is taken for a slice of the output, after the sum over heads",
        "PUB-21",
        "ablated-term",
        surgeon("planted", ablate=_after_the_sum),
        "merged",
        functools.partial(silenced, _sliced, by_gates),
    ),
    "head silenced by its value kernel": Fault(
        "the value kernel is zero, and its bias still speaks",
        "M3.2 0x0BAA",
        "ablated-term",
        surgeon("planted", ablate=lambda params, x, gates: gated(_without(params, gates), x)),
        "V",
        functools.partial(silenced, lambda params, gates: stages_of(_without(params, gates)), by_values),
    ),
    "signed sensitivity": _unseen(
        "gate gradients are averaged before the absolute value, and cancel",
        "M3.2 0x0BAA",
        "importance-absolute",
        "a mean over examples is no stage",
        importance=lambda params, x, pull: np.abs(np.einsum("bthm,btm->bh", terms(params, x), pull).mean(0)),
    ),
}
