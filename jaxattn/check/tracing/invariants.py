"""What must be true at each stage of an attention, and by how much it is."""

from typing import Any, NamedTuple

import numpy as np

from jaxattn.check.tracing.lookalikes import lookalikes
from jaxattn.check.tracing.stages import Found, axes_of, take

# What one number of each stage says.
MEANINGS = {
    "input": "channel m of the state of row q",
    "head round trip": "a number of its own for each row and channel, split and merged again",
    "Q": "channel d of what query row q asks, in head h",
    "K": "channel d of what key row k answers to, in key head hK",
    "V": "channel v of what key row k gives, in value head hV",
    "scores": "how much query row q asks for key row k in head h, before the softmax",
    "mixed scores": "the same after scores of other heads, biases and a soft cap came in",
    "masked scores": "the same where q may see k; -inf where it may not",
    "weights": "the share of key row k in what query row q receives in head h",
    "mixed weights": "how much of value row k output head h takes for query row q; may be signed",
    "heads": "channel v of what query row q receives in head h, a sum over the keys it sees",
    "merged": "channel v of head h, at place h*v + v of row q",
    "output": "channel m of what the sublayer gives back to row q",
}
RULES = {
    "Q": "is the split projection of x_q",
    "K": "is the split projection of x_k",
    "V": "is the split projection of x_v",
    "scores": "is scale * <query, key>",
    "mixed scores": "is the mix of the scores",
    "weights": "is the softmax over keys of the masked scores",
    "mixed weights": "is the mix of the weights",
    "heads": "is the sum over keys of weights times values",
    "merged": "is the heads side by side, head h first at h*v",
    "output": "is the merged heads through the output map",
}


class Invariant(NamedTuple):
    """One thing that must be true at a stage.

    Attributes:
        name: what.
        holds: whether it does; None where it is only measured, or does not apply here.
        measured: a number, or words.
        limit: what a measured number may be at most.
        where: the place of the worst finding, and what it looks like.
    """

    name: str
    holds: bool | None
    measured: float | str = ""
    limit: float | None = None
    where: str = ""

    def __str__(self) -> str:
        text = self.name
        if self.measured != "":
            text += f": {self.measured if isinstance(self.measured, str) else f'{self.measured:.2e}'}"
        if self.limit is not None:
            text += f" (limit {self.limit:.1e})"
        return f"{text} at {self.where}" if self.where and not self.holds else text


class Facts(NamedTuple):
    """What the invariants know of a call beside its arrays.

    Attributes:
        visible: [..., h or 1, q, k]; rows: [..., q], False for padding.
        scale: of the scores.
        sizes: by axis name.
        deliberate: what explains packed widths h*d that are not m, or "".
        residual: whether the output joins x_q's stream.
        mixes: whether weights are mixed between softmax and values.
        dead_rows: whether queries without a visible key are meant.
        value_of: the value head of each output head, or None for block order.
        tolerance: of every comparison of numbers.
    """

    visible: np.ndarray
    rows: np.ndarray | None
    scale: float
    sizes: dict[str, int]
    deliberate: str
    residual: bool
    mixes: bool
    dead_rows: bool
    value_of: tuple[int, ...] | None
    tolerance: float

    @property
    def dead(self) -> np.ndarray:
        """Queries that are no padding and see no key, [..., h or 1, q]."""
        none = np.asarray(~self.visible.any(-1))
        return none if self.rows is None else none & self.rows[..., None, :]

    @property
    def unseen(self) -> np.ndarray:
        """Key rows that no query sees in any head, [..., k]: what they hold counts for nothing."""
        return np.asarray(~self.visible.any((-3, -2)))


def place(name: str, bad: np.ndarray) -> str:
    """The coordinates of the largest entry, by axis name."""
    index = np.unravel_index(int(np.argmax(bad)), bad.shape)
    axes = axes_of(name, bad.ndim)
    return " ".join(f"{axis}={int(i)}" for axis, i in zip(axes, index, strict=True))


def agree(name: str, rule: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> Invariant:
    """Whether two arrays are the same, to a tolerance relative to the largest entry (at least to 1)."""
    if got.shape != want.shape:
        return Invariant(rule, False, f"shape {got.shape}, expected {want.shape}")
    finite = np.abs(want[np.isfinite(want)])
    limit = tolerance * max(1.0, float(finite.max(initial=0)))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    far = np.where(same, 0, np.abs(np.where(same, 0, got) - np.where(same, 0, want)))
    far = np.where(np.isnan(far), np.inf, far)
    worst = float(far.max(initial=0))
    return Invariant(rule, worst <= limit, worst, limit, place(name, far) if worst > limit else "")


def judge(found: Found, arrays: dict[str, np.ndarray], facts: Facts) -> list[Invariant]:
    """The invariants of one stage, given the arrays up to it."""
    if found.array is None:
        return [Invariant("comes to an array", False, found.problem)]
    if found.problem:
        return [Invariant("has its axes", False, found.problem)]
    with np.errstate(all="ignore"):  # a NaN is a finding, not a warning
        own = _OWN.get(found.name, lambda *_: [])(found, arrays, facts)
        return [*_finite(found, facts), *own, *_by_formula(found, arrays, facts)]


def _finite(found: Found, facts: Facts) -> list[Invariant]:
    assert found.array is not None
    array = found.array
    if found.name == "input" and facts.rows is not None:
        array = np.where(facts.rows[..., None], array, 0)  # what padding holds counts for nothing
    array = _seen(found.name, array, facts)
    if found.name == "masked scores":
        bad, name = np.isnan(array) | np.isposinf(array), "no NaN, no +inf"
    else:
        bad, name = ~np.isfinite(array), "finite"
    count = int(bad.sum())
    return [Invariant(name, not count, f"{count} are not" if count else "", None,
                      place(found.name, bad) if count else "")]  # fmt: skip


def _seen(name: str, array: np.ndarray, facts: Facts) -> np.ndarray:
    """An array up to the mask without what is of rows that nobody sees."""
    if name in ("K", "V"):
        return np.where(facts.unseen[..., :, None, None], 0, array)
    if name in ("scores", "mixed scores"):
        return np.where(facts.unseen[..., None, None, :], 0, array)
    return array


def _by_formula(found: Found, arrays: dict[str, np.ndarray], facts: Facts) -> list[Invariant]:
    """The stage against its formula, where a callable made it; and what it looks like if it differs."""
    if found.want is None or not found.given or found.name not in RULES:
        return []
    assert found.array is not None
    if found.array.shape != found.want.shape:
        return [agree(found.name, RULES[found.name], found.array, found.want, facts.tolerance)]
    got, want = (_seen(found.name, x, facts) for x in (found.array, found.want))
    result = agree(found.name, RULES[found.name], got, want, facts.tolerance)
    if not result.holds:
        for what, other in lookalikes(found, arrays, facts.scale, facts.visible):
            if agree(found.name, "", got, _seen(found.name, other, facts), facts.tolerance).holds:
                result = result._replace(where=f"{result.where}; it is {what}")
    return [result]


def _input(found: Found, arrays, facts: Facts) -> list[Invariant]:
    heads, width, m = facts.sizes["hl"], facts.sizes["d"], facts.sizes["m"]
    exact = heads * width == m
    text = f"{heads} * {width} = {heads * width} of m = {m}"
    if facts.deliberate and not exact:
        return [Invariant("h * d = m", None, f"{text}; {facts.deliberate}")]
    return [Invariant("h * d = m", exact, text)]


def _round_trip(found: Found, arrays, facts: Facts) -> list[Invariant]:
    assert found.array is not None and found.want is not None and found.split is not None
    trip = agree(found.name, "merge(split(x)) = x", found.array, found.want, 0)
    heads, want = found.split
    rule = "head h holds channels h*d to h*d + d of its own row"
    if heads.shape != want.shape:
        shape = f"split makes {heads.shape} of axes [t, h, d], expected {want.shape}"
        return [Invariant(rule, False, shape), trip]
    far = heads != want
    count = int(far.sum())
    return [Invariant(rule, not count, f"{count} of {far.size} are elsewhere" if count else "", None,
                      place("Q", far) if count else ""), trip]  # fmt: skip


def _key(found: Found, arrays, facts: Facts) -> list[Invariant]:
    assert found.array is not None
    width, want = found.array.shape[-1], arrays["Q"].shape[-1]
    same = Invariant("d is that of Q", width == want, f"{width} and {want}")
    return [same, _shared("hK", found.array, arrays["Q"].shape[-2])]


def _value(found: Found, arrays, facts: Facts) -> list[Invariant]:
    assert found.array is not None
    rows, want = found.array.shape[-3], arrays["K"].shape[-3]
    same = Invariant("as many rows as K", rows == want, f"{rows} and {want}")
    return [same, _shared("hV", found.array, facts.sizes.get("hv") or arrays["Q"].shape[-2])]


def _shared(axis: str, array: np.ndarray, heads: int) -> Invariant:
    sources = array.shape[-2]
    return Invariant(f"{axis} divides the heads", heads % sources == 0, f"{heads} heads on {sources}")


def _scores(found: Found, arrays, facts: Facts) -> list[Invariant]:
    assert found.array is not None
    spread = float(found.array.std())
    plain = spread / abs(facts.scale) if facts.scale else 0.0
    text = f"standard deviation {spread:.3g}, without the scale {facts.scale:.3g} it would be {plain:.3g}"
    return [Invariant("spread", None, text)]


def _masked(found: Found, arrays, facts: Facts) -> list[Invariant]:
    assert found.array is not None
    visible = np.broadcast_to(facts.visible, found.array.shape)
    seen, dead = int(facts.visible.sum()), facts.dead
    out = [Invariant("allowed pairs", None, f"{seen} of {facts.visible.size}")]
    text = f"{int(dead.sum())} queries see no key" if dead.any() else ""
    where = place("masked scores", dead[..., None] & np.ones(1, bool)).rsplit(" ", 1)[0] if text else ""
    out.append(Invariant("no dead query", None if facts.dead_rows and text else not text, text, None, where))
    if found.given:
        before = arrays["mixed scores"]
        moved = agree(found.name, "", np.where(visible, found.array, 0), np.where(visible, before, 0),
                      facts.tolerance)  # fmt: skip
        out.append(moved._replace(name="visible pairs are as before"))
        top = np.where(visible, before, -np.inf).max(-1, keepdims=True)
        left = np.where(visible | np.isneginf(top), 0, np.exp(found.array - top))
        worst = float(np.nan_to_num(left, nan=np.inf).max(initial=0))
        where = ""
        if worst > 0:
            where = place(found.name, left)
            kept = np.isfinite(found.array) & (found.array > before.min() - 1e3)
            if (kept == ~visible).all():
                where += "; it hides what is visible and shows the rest: the other polarity"
        out.append(Invariant("hidden pairs are excluded", worst == 0, worst, 0.0, where))
    return out


def _weights(found: Found, arrays, facts: Facts) -> list[Invariant]:
    assert found.array is not None
    array, visible = found.array, np.broadcast_to(facts.visible, found.array.shape)
    want = visible.any(-1).astype(float)
    far = np.abs(array.sum(-1) - want)
    if not facts.dead_rows:
        far = np.where(want == 0, 0, far)  # the masked scores answer for them
    rule = "rows sum to one" + (", dead ones to zero" if facts.dead_rows else "")
    worst = float(np.nan_to_num(far, nan=np.inf).max(initial=0))
    where = place(found.name, far[..., None]).rsplit(" ", 1)[0] if worst > facts.tolerance else ""
    for axis, what in ((-2, "queries"), (-3, "heads")):
        if where and np.abs(array.sum(axis) - 1).max() <= facts.tolerance:
            where += f"; the sums over {what} do: the softmax runs over {what}"
    low = abs(float(np.nan_to_num(array, nan=-np.inf).min(initial=0)))
    return [
        Invariant(rule, worst <= facts.tolerance, worst, facts.tolerance, where),
        _forbidden(found, facts),
        Invariant("no weight is negative", low <= facts.tolerance, low, facts.tolerance),
    ]


def _forbidden(found: Found, facts: Facts) -> Invariant:
    """Hidden pairs have no weight at all; for rows that see no key, the masked scores answer."""
    assert found.array is not None
    visible = np.broadcast_to(facts.visible, found.array.shape)
    alive = np.ones((), bool) if facts.dead_rows else visible.any(-1, keepdims=True)
    bad = np.where(~visible & alive, np.abs(found.array), 0)
    worst = float(np.nan_to_num(bad, nan=np.inf).max(initial=0))
    return Invariant(
        "forbidden weight is zero", worst == 0, worst, 0.0, place(found.name, bad) if worst else ""
    )


def _mixed_weights(found: Found, arrays, facts: Facts) -> list[Invariant]:
    assert found.array is not None
    sums = found.array.sum(-1)
    text = f"from {sums.min():.3g} to {sums.max():.3g}"
    return [_forbidden(found, facts), Invariant("row sums", None, text)]


def _heads(found: Found, arrays, facts: Facts) -> list[Invariant]:
    """A head lies inside the values that its query sees, channel by channel, if its weights are shares."""
    rule = "within the hull of the visible values"
    if facts.mixes:
        return [Invariant(rule, None, "does not apply: weights are mixed, so they may be signed")]
    assert found.array is not None
    value = take(arrays["V"], found.array.shape[-2], facts.value_of)
    value = np.moveaxis(value, -2, -3)[..., None, :, :]  # [..., hv, 1, k, v]
    seen = facts.visible[..., None]
    low = np.where(seen, value, np.inf).min(-2)
    high = np.where(seen, value, -np.inf).max(-2)
    array = np.moveaxis(found.array, -2, -3)  # [..., hv, q, v]
    dead = np.broadcast_to(~facts.visible.any(-1, keepdims=True), array.shape)
    outside = np.where(dead, 0, np.maximum(low - array, array - high))
    worst = float(np.maximum(np.nan_to_num(outside, nan=np.inf), 0).max(initial=0))
    limit = facts.tolerance * max(1.0, float(np.abs(value[np.isfinite(value)]).max(initial=0)))
    where = place(found.name, np.moveaxis(outside, -3, -2)) if worst > limit else ""
    return [Invariant(rule, worst <= limit, worst, limit, where)]


def _output(found: Found, arrays, facts: Facts) -> list[Invariant]:
    assert found.array is not None
    got, want = found.array.shape, arrays["input"].shape
    text = f"{got} and {want}"
    if not facts.residual:
        return [Invariant("has the shape of x_q, which it is added to", None, f"does not apply: {text}")]
    where = ""
    if got[-1] != want[-1]:
        where = f"axis m, {got[-1]} for {want[-1]}"
    return [Invariant("has the shape of x_q, which it is added to", got == want, text, None, where)]


_OWN: dict[str, Any] = {
    "input": _input, "head round trip": _round_trip, "K": _key, "V": _value, "scores": _scores,
    "masked scores": _masked, "weights": _weights, "mixed weights": _mixed_weights, "heads": _heads,
    "output": _output,
}  # fmt: skip
