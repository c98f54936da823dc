"""The kinds of mask and what builds them; validation is in the factories, not in the values.

A value is rebuilt by jax from whatever leaves jit, vmap or a tree map carry, so it checks nothing.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import Array
from jax.core import Tracer

from jaxattn.axes import same_rank
from jaxattn.mask_form import And, Fill, Frame, Mask, Named, Start, axes_text, described

Align = Literal["start", "end"]
# names of the axis vocabulary that can never be a batch axis of a mask
_NOT_BATCH = frozenset("t m d v g a r i o hl hs hv hK hV".split())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Band(Mask):
    """Positions decide: -ahead <= q_position - k_position < behind (None = no bound)."""

    behind: int | None = dataclasses.field(metadata={"static": True})
    ahead: int = dataclasses.field(metadata={"static": True})
    align: str = dataclasses.field(metadata={"static": True})

    def arrays(self) -> tuple[Named, ...]:
        return ()

    def map_arrays(self, function: Callable[[Array, int], Array]) -> Mask:
        return self

    def _shift(self, frame: Frame) -> int:
        """How far the queries are moved; positions that are given are compared as they are."""
        given = frame.q_position is not None or frame.k_position is not None
        return frame.k_len - frame.q_len if self.align == "end" and not given else 0

    def block(self, frame: Frame, q_start: Start, q_size: int, k_start: Start, k_size: int) -> Array:
        dtype = _position_type(frame)
        q = _positions(frame.q_position, self._shift(frame), q_start, q_size, dtype)
        k = _positions(frame.k_position, 0, k_start, k_size, dtype)
        q, k = same_rank(rearrange(q, "... q -> ... 1 q 1"), rearrange(k, "... k -> ... 1 1 k"))
        distance = q - k
        seen = distance >= -self.ahead
        return seen if self.behind is None else seen & (distance < self.behind)

    def fill(self, frame: Frame, q_start: int, q_size: int, k_start: int, k_size: int) -> Fill:
        behind = float("inf") if self.behind is None else self.behind
        if behind <= -self.ahead or 0 in (q_size, k_size):
            return Fill.EMPTY
        if frame.q_position is not None or frame.k_position is not None:
            return Fill.PARTIAL
        offset = q_start + self._shift(frame) - k_start
        least, most = offset - (k_size - 1), offset + (q_size - 1)
        if most < -self.ahead or least >= behind:
            return Fill.EMPTY
        return Fill.FULL if least >= -self.ahead and most < behind else Fill.PARTIAL

    def __repr__(self) -> str:
        align = "" if self.align == "start" else f'align="{self.align}"'
        if self.behind is None:
            return f"causal({align})"
        ahead = f"ahead={self.ahead}" if self.ahead else ""
        return f"window({', '.join(filter(None, (str(self.behind), ahead, align)))})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Source rows that are real, [..., k]."""

    valid: Array

    def arrays(self) -> tuple[Named, ...]:
        return (Named("padding(valid)", self.valid, ("k",)),)

    def map_arrays(self, function: Callable[[Array, int], Array]) -> Mask:
        return Padding(function(self.valid, 1))

    def source_valid(self, k_len: int) -> Array | None:
        return self.valid

    def block(self, frame: Frame, q_start: Start, q_size: int, k_start: Start, k_size: int) -> Array:
        return _rows(self.valid, k_start, k_size, -1)[..., None, None, :]

    def __repr__(self) -> str:
        return f"padding({axes_text(self.arrays()[0])})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """The first n source rows are real, n [...]."""

    n: Array

    def arrays(self) -> tuple[Named, ...]:
        return (Named("lengths(n)", self.n, ()),)

    def map_arrays(self, function: Callable[[Array, int], Array]) -> Mask:
        return Lengths(function(self.n, 0))

    def source_valid(self, k_len: int) -> Array | None:
        return self._real(jnp.arange(k_len, dtype=jnp.int32), "... -> ... 1")

    def block(self, frame: Frame, q_start: Start, q_size: int, k_start: Start, k_size: int) -> Array:
        return self._real(_count_from(k_start, k_size, jnp.dtype(jnp.int32)), "... -> ... 1 1 1")

    def _real(self, row: Array, pattern: str) -> Array:
        """Which of the rows, [k], are below n, with the axes that `pattern` gives it."""
        n = self.n.astype(_wide(self.n.dtype))
        row, n = same_rank(row.astype(n.dtype), rearrange(n, pattern))
        return row < n

    def __repr__(self) -> str:
        return f"lengths({axes_text(self.arrays()[0])})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Equal ids see each other, q_ids [..., q] and k_ids [..., k] (None: the same rows)."""

    q_ids: Array
    k_ids: Array | None

    def arrays(self) -> tuple[Named, ...]:
        if self.k_ids is None:
            keys = Named("segments(q_ids) used for the keys too", self.q_ids, ("k",))
        else:
            keys = Named("segments(k_ids)", self.k_ids, ("k",))
        return (Named("segments(q_ids)", self.q_ids, ("q",)), keys)

    def map_arrays(self, function: Callable[[Array, int], Array]) -> Mask:
        return Segments(function(self.q_ids, 1), None if self.k_ids is None else function(self.k_ids, 1))

    def block(self, frame: Frame, q_start: Start, q_size: int, k_start: Start, k_size: int) -> Array:
        k_ids = self.q_ids if self.k_ids is None else self.k_ids
        q = rearrange(_rows(self.q_ids, q_start, q_size, -1), "... q -> ... 1 q 1")
        k = rearrange(_rows(k_ids, k_start, k_size, -1), "... k -> ... 1 1 k")
        return operator.eq(*same_rank(q, k))

    def __repr__(self) -> str:
        named = self.arrays()[: 1 if self.k_ids is None else 2]
        return f"segments({', '.join(map(axes_text, named))})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explicit(Mask):
    """A table with named axes: batch axes, then `core`, a subset of (h, q, k) in that order."""

    array: Array
    core: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def arrays(self) -> tuple[Named, ...]:
        return (Named("explicit(array)", self.array, self.core),)

    def map_arrays(self, function: Callable[[Array, int], Array]) -> Mask:
        return Explicit(function(self.array, len(self.core)), self.core)

    def seen_rows(self, k_len: int) -> Array | None:
        if "k" not in self.core:
            return None
        return self.array.any(tuple(range(-len(self.core), -1)))

    def block(self, frame: Frame, q_start: Start, q_size: int, k_start: Start, k_size: int) -> Array:
        part = self.array
        for axis, start, size in (("q", q_start, q_size), ("k", k_start, k_size)):
            if axis in self.core:
                part = _rows(part, start, size, self.core.index(axis) - len(self.core))
        batch = part.shape[: part.ndim - len(self.core)]
        sizes = dict(zip(self.core, part.shape[len(batch) :], strict=True))
        return part.reshape(*batch, *(sizes.get(axis, 1) for axis in "hqk"))

    def __repr__(self) -> str:
        return f"explicit({axes_text(self.arrays()[0])})"


def everything() -> Mask:
    """Every key is visible to every query; what `mask=None` means.

    >>> from jaxattn import masks
    >>> masks.everything() & masks.causal()
    causal()
    """
    return And(())


def causal(align: Align = "start") -> Mask:
    """A query sees the keys at its own and earlier positions: q_position >= k_position.

    Both sides count from 0 by default (top-left). `align="end"` puts the last query at the last
    key: q_position = index + k_len - q_len. Positions given to the call are compared as they are.
    ValueError: another `align`.

    >>> from jaxattn import masks
    >>> print(masks.causal().show(2, 4), masks.causal(align="end").show(2, 4), sep="\\n\\n")
    1 0 0 0
    1 1 0 0
    <BLANKLINE>
    1 1 1 0
    1 1 1 1
    """
    return Band(None, 0, _alignment(align))


def window(n: int, ahead: int = 0, align: Align = "start") -> Mask:
    """A query sees the n latest keys, itself included: -ahead <= q_position - k_position < n.

    `ahead` adds that many keys after the query; `align` as in `causal`. `window(0)` hides all.
    TypeError: sizes that are not integers. ValueError: negative sizes, another `align`.

    >>> from jaxattn import masks
    >>> print(masks.window(2, ahead=1).show(4, 4))
    1 1 0 0
    1 1 1 0
    0 1 1 1
    0 0 1 1
    """
    return Band(_count("n", n), _count("ahead", ahead), _alignment(align))


def padding(valid: Any) -> Mask:
    """Source rows that are real, bool [..., k], True = real: only these are visible.

    Invalid rows are also zeroed before they are projected, as key and, in self-attention, as query,
    so that not even NaN in them matters; `explicit(valid, axes="b k")` hides keys and no more.
    TypeError: not boolean. ValueError: no k axis.

    >>> from jaxattn import masks
    >>> masks.padding([[True, True, False]])
    padding(b k: 1x3)
    """
    valid = boolean(valid, "padding(valid)")
    if valid.ndim == 0:
        raise ValueError("padding(valid) got a scalar, expected [..., k]: one entry a source row")
    return Padding(valid)


def lengths(n: Any) -> Mask:
    """The first n source rows are real: row j is visible where j < n, integer n [...].

    Rows are counted by index, whatever their positions; otherwise as `padding`.
    TypeError: not integers. ValueError: a negative length (where values are known).

    >>> from jaxattn import masks
    >>> print(masks.lengths([3, 1]).show(1, 4, batch=1))
    1 0 0 0
    """
    array = _integer(n, "lengths(n)")
    if not isinstance(n, Tracer) and (np.asarray(n) < 0).any():
        raise ValueError(f"lengths(n) got {np.asarray(n).min()}, expected lengths of 0 or more")
    return Lengths(array)


def segments(q_ids: Any, k_ids: Any = None) -> Mask:
    """Only rows of the same segment see each other: q_ids[..., q] == k_ids[..., k], integers.

    `k_ids=None`: the keys are the same rows as the queries. No id is special: hide padding with
    `padding`. TypeError: not integers. ValueError: a scalar.

    >>> from jaxattn import masks
    >>> print(masks.segments([0, 0, 1]).show(3, 3))
    1 1 0
    1 1 0
    0 0 1
    """
    named = {"q": _integer(q_ids, "segments(q_ids)")}
    if k_ids is not None:
        named["k"] = _integer(k_ids, "segments(k_ids)")
    for axis, ids in named.items():
        if ids.ndim == 0:
            raise ValueError(f"segments({axis}_ids) got a scalar, expected [..., {axis}]")
    return Segments(named["q"], named.get("k"))


def explicit(array: Any, axes: str) -> Mask:
    """A boolean table whose axes are named, True = visible.

    `axes` names every axis of `array`: h, q, k where present (h of size 1: all heads alike), and
    before them any names for the call's batch axes, in order: "b q k", "h q k", "b k", "b1 b2 k".
    TypeError: not boolean. ValueError: names that repeat, do not fit, or stand in the wrong place.

    >>> from jaxattn import masks
    >>> masks.explicit([[True, False], [True, True]], axes="q k")
    explicit(q k: 2x2)
    """
    array = boolean(array, "explicit(array)")
    names = axes.split()
    got = f"explicit(array, axes={axes!r})"
    if len(names) != array.ndim:
        raise ValueError(
            f"{got} names {len(names)} axes, but the array has {array.ndim}: shape {array.shape}; "
            'name every axis, for example axes="b h q k"'
        )
    core = [name for name in names if name in ("h", "q", "k")]
    batch = names[: len(names) - len(core)]
    unfit = [name for name in batch if name in _NOT_BATCH or not name.isidentifier()]
    if len(set(names)) != len(names) or set(batch) & {"h", "q", "k"} or unfit:
        raise ValueError(
            f"{got}: expected batch axes first, in the call's order (b, or b1 b2 ...), then h, q "
            "and k where present, each name once"
            + (f"; {unfit} cannot be batch axes (queries are q, keys are k)" if unfit else "")
        )
    order = tuple(name for name in "hqk" if name in core)
    return Explicit(rearrange(array, f"{axes} -> {' '.join((*batch, *order))}"), order)


def boolean(array: Any, name: str) -> Array:
    array = jnp.asarray(array)
    if array.dtype == bool:
        return array
    if jnp.issubdtype(array.dtype, jnp.floating):
        fix = (
            "for 0 and -inf use ja.masks.from_additive, for other additive values bias=, and "
            "ja.masks.from_flax for the 0/1 floats of Flax"
        )
    else:
        fix = "for 0/1 numbers use array != 0, or ja.masks.from_flax for [..., h, q, k]"
    raise TypeError(f"{name} got {described(array)}, expected booleans; {fix}")


def _integer(array: Any, name: str) -> Array:
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} got {described(array)}, expected integers")
    return array


def _alignment(align: str) -> str:
    if align not in ("start", "end"):
        raise ValueError(f'align must be "start" or "end", got {align!r}')
    return align


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise TypeError(f"window({name}) must be an integer, got {described(value)}")
    if count < 0:
        raise ValueError(f"window({name}={count}) must be 0 or more keys")
    return count


def _rows(array: Array, start: Start, size: int, axis: int) -> Array:
    if isinstance(start, int):
        return jax.lax.slice_in_dim(array, start, start + size, axis=axis)
    if jnp.ndim(start):
        return jnp.take(array, start, axis=axis)
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=axis)


def _positions(position: Array | None, shift: int, start: Start, size: int, dtype: jnp.dtype) -> Array:
    """Positions of rows start .. start + size: [..., size], those that are given, or counted from `shift`."""
    if position is None:
        return _count_from(start, size, dtype) + jnp.asarray(shift, dtype)
    return _rows(jnp.asarray(position).astype(dtype), start, size, -1)


def _count_from(start: Start, size: int, dtype: jnp.dtype) -> Array:
    """start, start + 1, ...; row numbers that are given one by one as they are."""
    start = jnp.asarray(start, dtype)
    return start if start.ndim else start + jnp.arange(size, dtype=dtype)


def _position_type(frame: Frame) -> jnp.dtype:
    """One type for the positions of both sides; rows that are counted take the other side's."""
    types = [_wide(jnp.result_type(p)) for p in (frame.q_position, frame.k_position) if p is not None]
    kinds = [t for t in types if jnp.issubdtype(t, jnp.floating)] or types
    return max(kinds, key=lambda dtype: dtype.itemsize, default=jnp.dtype(jnp.int32))


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    """Signed and at least int32: a difference of unsigned or narrow numbers would wrap."""
    if jnp.issubdtype(dtype, jnp.floating) or dtype in (jnp.int32, jnp.int64):
        return dtype
    return jnp.result_type(int) if dtype in (jnp.uint32, jnp.uint64) else jnp.dtype(jnp.int32)
