"""The stages of an attention, a callable each, and a walk that holds every one to its own input.

Each stage is recomputed by a formula in float64 from the array that the stage before it really made. A
wrong stage therefore differs from its own formula, while those after it agree with theirs: the fault is
found where it lies, not where it ends.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

Anything = Any  # an array of the library that is looked at
Layout = Literal["... t h d", "... h t d"]

STAGES = (
    "input", "head round trip", "Q", "K", "V", "scores", "mixed scores", "masked scores", "weights",
    "mixed weights", "heads", "merged", "output",
)  # fmt: skip
AXES = {
    "input": "q m", "head round trip": "q (hl d)", "Q": "q hl d", "K": "k hK d", "V": "k hV v",
    "scores": "hl q k", "mixed scores": "hs q k", "masked scores": "hs q k", "weights": "hs q k",
    "mixed weights": "hv q k", "heads": "q hv v", "merged": "q (hv v)", "output": "q m",
}  # fmt: skip
IN_HEADS = ("Q", "K", "V", "heads")  # stages whose arrays have a layout
PATH = {
    "Q": ("project_q", "x_q"), "K": ("project_k", "x_k"), "V": ("project_v", "x_v"),
    "scores": ("scores", "Q", "K"), "mixed scores": ("mix_scores", "scores"),
    "masked scores": ("mask", "mixed scores", "visible"), "weights": ("softmax", "masked scores"),
    "mixed weights": ("mix_weights", "weights"), "heads": ("combine", "mixed weights", "V"),
    "merged": ("merge", "heads"), "output": ("output", "merged"),
}  # fmt: skip


class Stages(NamedTuple):
    """An attention as its pieces. All are optional: what is not given is done by the formula.

    Attributes:
        split: `(packed [..., t, (h d)], heads)` to heads, in `layout`.
        merge: heads to packed channels.
        project_q, project_k, project_v: states to packed channels, or to heads (one axis more) at once;
            None takes the states themselves as the projection.
        scores: `(query, key)` to scaled scores [..., h, q, k].
        mix_scores: everything between the scores and the mask: mixes of heads, biases, a soft cap.
        mask: `(scores, visible)` to masked scores; visible [..., h or 1, q, k] bool, True = visible.
        softmax: masked scores to weights.
        weights: `(scores, visible)` to weights, in place of `mask` and `softmax`.
        mix_weights: everything between the softmax and the values.
        combine: `(weights, value)` to heads.
        attend: `(query, key, value, visible)` to (heads, weights or None), in place of all from `scores` to
            `combine`.
        finish: heads to heads, before they merge: gates, norms.
        output: merged channels to the output.
        layout: the axes of arrays that hold heads.
        array: what makes an array of these callables' library from a numpy one, `torch.from_numpy` say.

    Example:
        >>> Stages(softmax=lambda scores: scores, layout="... h t d").split is None
        True
    """

    split: Callable[[Anything, int], Anything] | None = None
    merge: Callable[[Anything], Anything] | None = None
    project_q: Callable[[Anything], Anything] | None = None
    project_k: Callable[[Anything], Anything] | None = None
    project_v: Callable[[Anything], Anything] | None = None
    scores: Callable[[Anything, Anything], Anything] | None = None
    mix_scores: Callable[[Anything], Anything] | None = None
    mask: Callable[[Anything, Anything], Anything] | None = None
    softmax: Callable[[Anything], Anything] | None = None
    weights: Callable[[Anything, Anything], Anything] | None = None
    mix_weights: Callable[[Anything], Anything] | None = None
    combine: Callable[[Anything, Anything], Anything] | None = None
    attend: Callable[[Anything, Anything, Anything, Anything], tuple[Anything, Anything]] | None = None
    finish: Callable[[Anything], Anything] | None = None
    output: Callable[[Anything], Anything] | None = None
    layout: Layout = "... t h d"
    array: Callable[[np.ndarray], Anything] = lambda x: x


class Found(NamedTuple):
    """One stage as it came.

    Attributes:
        name: one of `STAGES`.
        array: its values in the axes of `AXES`, batch axes first; None where it came to none.
        want: the same by the formula, from the stage before; None where there is no formula.
        given: whether a callable made it, rather than the formula.
        problem: why the walk ends here, or "".
        split: for the round trip, the heads between split and merge, and what they should be.
        eps: the distance from 1 to the next number in the array's own type.
    """

    name: str
    array: np.ndarray | None
    want: np.ndarray | None = None
    given: bool = True
    problem: str = ""
    split: tuple[np.ndarray, np.ndarray] | None = None
    eps: float = 0.0


def check_stages(stages: Stages) -> None:
    """Raise a ValueError where two callables stand for the same stage."""
    inside = ("scores", "mix_scores", "mask", "softmax", "weights", "mix_weights", "combine")
    for whole, parts in (("weights", ("mask", "softmax")), ("attend", inside)):
        both = [name for name in parts if getattr(stages, name) is not None]
        if getattr(stages, whole) is not None and both:
            raise ValueError(
                f"Stages: got {whole} and {', '.join(both)}, expected one of them for each stage. "
                f"Fix: leave {whole} out, or what it stands for."
            )


def hosted(x: Anything) -> np.ndarray:
    """An array of any library as numpy sees it; torch's are detached and brought over first."""
    if not hasattr(x, "detach"):
        return np.asarray(x)
    x = x.detach().cpu()
    if str(x.dtype) == "torch.bfloat16":  # a type that numpy knows by another package alone
        return x.float().numpy().astype(jnp.bfloat16)
    return x.numpy()


def numbers(x: Anything) -> np.ndarray:
    """Values as numpy holds them; every floating type as float64."""
    x = hosted(x)
    return x if x.dtype == bool or np.issubdtype(x.dtype, np.integer) else x.astype(np.float64)


def eps(x: Anything) -> float:
    """The distance from 1 to the next number in the type of `x`; 0 for whole numbers."""
    dtype = hosted(x).dtype
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def walk(
    given: Stages,
    formula: Stages,
    states: tuple[Anything, Anything, Anything],
    visible: np.ndarray,
    sizes: dict[str, int],
) -> Iterator[Found]:
    """Every stage in order, until one has no array or one that does not fit.

    Args:
        given: what is looked at.
        formula: the same in numpy, arrays in house layout.
        states: x_q, x_k, x_v.
        visible: [..., h or 1, q, k].
        sizes: known sizes by axis name; those of the batch, q, k, all kinds of heads and d among
            them.
    """
    sizes = dict(sizes)
    mine: dict[str, Anything] = dict(zip(("x_q", "x_k", "x_v"), states, strict=True))
    mine["visible"] = given.array(np.array(visible))
    house = {"visible": visible} | {name: numbers(mine[name]) for name in ("x_q", "x_k", "x_v")}
    given = _opened(given, mine)
    coarsest = max(eps(x) for x in states)
    yield Found("input", house["x_q"], problem=_misfit("input", house["x_q"], sizes), eps=coarsest)
    yield _round_trip(given, formula, house["x_q"].shape[:-1], sizes)
    given = given._replace(array=_of_type(given.array, hosted(states[0]).dtype))
    for name in STAGES[2:]:
        found, own = _step(name, given, formula, mine, house, sizes)
        if (array := found.array) is not None:
            found = found._replace(problem=found.problem or _misfit(name, array, sizes))
            mine[name], house[name] = own, array
        yield found
        if found.problem:
            return


def _of_type(array: Callable[[np.ndarray], Anything], dtype: Any) -> Callable[[np.ndarray], Anything]:
    """What makes arrays from those of a formula, in the type of the states: libraries do not mix types."""

    def made(x: np.ndarray) -> Anything:
        floats = jnp.issubdtype(dtype, jnp.floating) and x.dtype == np.float64
        return array(np.array(x, dtype if floats else None))

    return made


def _opened(given: Stages, mine: dict[str, Anything]) -> Stages:
    """Stages whose `weights` and `attend` stand at the stages that they make."""
    if given.weights is not None:
        whole = given.weights
        given = given._replace(softmax=lambda _: whole(mine["mixed scores"], mine["visible"]))
    if given.attend is not None:
        attend = given.attend
        run = functools.cache(lambda: attend(mine["Q"], mine["K"], mine["V"], mine["visible"]))
        given = given._replace(softmax=lambda _: run()[1], combine=lambda *_: run()[0])
    return given


def _round_trip(given: Stages, formula: Stages, rows: tuple[int, ...], sizes: dict[str, int]) -> Found:
    """Distinct numbers through split and merge: every channel must come back, by way of its own head."""
    assert formula.split is not None and formula.merge is not None
    shape = (*rows, sizes["hl"] * sizes["d"])
    probe = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    between = formula.split(probe, sizes["hl"])
    known = given.split is not None or given.merge is not None
    try:
        own = given.array(_turned(between, given.layout))
        if given.split is not None:
            own = given.split(given.array(probe), sizes["hl"])
        heads = _turned(numbers(own), given.layout)
        back = formula.merge(heads) if given.merge is None else numbers(given.merge(own))
    except Exception as error:  # foreign code may raise anything; it is a finding
        return Found("head round trip", None, probe, known, _said(error))
    return Found("head round trip", back, probe, known, split=(heads, between))


def _step(name, given: Stages, formula: Stages, mine, house, sizes) -> tuple[Found, Anything]:
    """One stage by its callable, or by the formula where there is none; and its array as it came."""
    field, *inputs = PATH[name]
    call, rule = getattr(given, field), getattr(formula, field)
    known = call is not None
    try:
        if name in ("Q", "K", "V"):
            own, want, known = _projected(name, given, formula, mine, house, sizes)
        elif name == "merged":
            own, want, known = _merged(given, formula, mine, house)
        else:
            own = call(*(mine[i] for i in inputs)) if call is not None else None
            known = own is not None
            want = rule(*(house[i] for i in inputs)) if rule is not None else None
        if own is None and want is None:
            own, want = mine[inputs[0]], house[inputs[0]]
        elif own is None:
            assert want is not None
            own = given.array(_turned(want, given.layout) if name in IN_HEADS else want)
        array = _turned(numbers(own), given.layout) if name in IN_HEADS else numbers(own)
        return Found(name, array, want, known, eps=eps(own)), own
    except Exception as error:  # foreign code may raise anything; it is a finding
        return Found(name, None, None, known, _said(error)), None


def _projected(name, given: Stages, formula: Stages, mine, house, sizes):
    """States to heads: a projection, then a split where it left the channels packed."""
    field, source = PATH[name]
    heads = sizes["hl" if name == "Q" else "hK" if name == "K" else "hV"]
    call, rule, split = getattr(given, field), getattr(formula, field), formula.split
    assert split is not None
    x = house[source]
    own = mine[source] if call is None else call(mine[source])
    packed = numbers(own)
    want = packed if rule is None else numbers(rule(x))
    want = want if want.ndim > x.ndim else split(want, heads)
    if packed.ndim > x.ndim:
        return own, None if rule is None else want, True
    if given.split is not None:
        own = given.split(own, heads)
    else:
        own = given.array(_turned(split(packed, heads), given.layout))
    return own, want, call is not None or given.split is not None


def _merged(given: Stages, formula: Stages, mine, house):
    """Finished heads, side by side in one row."""
    assert formula.merge is not None
    own, heads = mine["heads"], house["heads"]
    if given.finish is not None:
        own = given.finish(own)
        heads = _turned(numbers(own), given.layout) if formula.finish is None else formula.finish(heads)
    elif formula.finish is not None:
        heads = formula.finish(heads)
        own = given.array(_turned(heads, given.layout))
    want = formula.merge(heads)
    merged = None if given.merge is None else given.merge(own)
    if merged is None and given.finish is not None:
        merged = given.array(formula.merge(_turned(numbers(own), given.layout)))
    return merged, want, given.merge is not None or given.finish is not None


def _turned(heads: np.ndarray, layout: Layout) -> np.ndarray:
    """Between a layout and the house's [..., t, h, d]; its own inverse."""
    return heads if layout == "... t h d" else np.swapaxes(heads, -3, -2)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def axes_of(name: str, ndim: int) -> tuple[str, ...]:
    """The axis names of a stage whose array has `ndim` axes, those of the batch first.

    Example:
        >>> axes_of("heads", 4)
        ('b', 'q', 'hv', 'v')
    """
    core = ("q", AXES[name][2:]) if "(" in AXES[name] else tuple(AXES[name].split())
    extra = ndim - len(core)
    return (*(("b",) if extra == 1 else (f"b{i + 1}" for i in range(extra))), *core)


def _misfit(name: str, array: np.ndarray, sizes: dict[str, int]) -> str:
    """What is wrong with a shape, axis by axis, or ""; axes met for the first time are noted in `sizes`."""
    names = axes_of(name, array.ndim)
    known = sum(axis[0] == "b" for axis in sizes)
    if len(names) != array.ndim or sum(axis[0] == "b" for axis in names) != known:
        return f"shape {array.shape} has {array.ndim} axes, expected {known} of the batch, then {AXES[name]}"
    wrong = []
    for axis, size in zip(names, array.shape, strict=True):
        if name == "output" and axis == "m":
            continue  # the residual's rule says more
        want = sizes["hv"] * sizes["v"] if axis == "(hv v)" else sizes.setdefault(axis, size)
        if size != want:
            wrong.append(f"axis {axis} is {size}, expected {want}")
    return "; ".join(wrong)


def take(x: np.ndarray | Array, heads: int, of: tuple[int, ...] | None) -> np.ndarray:
    """Rows of source heads, one for each head: [..., t, hK, d] to [..., t, h, d]; None is block order."""
    sources = x.shape[-2]
    of = tuple(i * sources // heads for i in range(heads)) if of is None else of
    return np.asarray(x)[..., list(of), :]
