"""What a mask is: a rule that says which key each query may see, True = visible.

`jaxattn.masks` builds these values and is the public path; engines ask them, block by block. A mask
never has to exist as a [q, k] table, and what it knows without looking at data (`fill`) lets an
engine skip whole blocks. Every array keeps its axes by name: batch axes first, then h, q, k.
"""

import abc
import dataclasses
import enum
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.axes import same_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Start = int | Array
T = TypeVar("T")


class Frame(NamedTuple):
    """The rows of one call that a mask is asked about; positions None = 0, 1, 2, ..."""

    q_len: int
    k_len: int
    q_position: Array | None = None  # [..., q]
    k_position: Array | None = None  # [..., k]
    batch: tuple[int, ...] = ()  # sizes of the call's batch axes


class Fill(enum.Enum):
    """What is known of a block before any data is seen."""

    EMPTY = "empty"  # nothing in it is visible
    FULL = "full"  # everything in it is visible
    PARTIAL = "partial"  # mixed, or it depends on data


class Named(NamedTuple):
    """One array of a mask: what to call it in an error, and the names of its last axes."""

    label: str
    array: Any
    core: tuple[str, ...]


class Mask(abc.ABC):
    """A visibility rule, True = visible: combine with `&`, `|`, `~`; pass through jit, vmap, scan.

    Under vmap and scan the mapped axis of a mask is its first batch axis.
    """

    __array_ufunc__ = None  # numpy leaves `array & mask` to __rand__, which explains

    @abc.abstractmethod
    def block(self, frame: Frame, q_start: Start, q_size: int, k_start: Start, k_size: int) -> Array:
        """Visibility of one block: bool, axes [..., h, q, k], each of full size or 1.

        Starts may be traced; sizes are static and never reach past the end. `q_start` may be [q_size]
        row numbers instead of the first, for rows that do not lie together.
        """

    @abc.abstractmethod
    def arrays(self) -> tuple[Named, ...]:
        """The arrays in this mask, with the names of their last axes."""

    @abc.abstractmethod
    def map_arrays(self, function: Callable[[Array, int], Array]) -> "Mask":
        """The mask with `function(array, core)` for each array; core counts the axes after the batch's."""

    def fill(self, frame: Frame, q_start: int, q_size: int, k_start: int, k_size: int) -> Fill:
        """What is known of a block statically; PARTIAL where data decide."""
        return Fill.PARTIAL

    def source_valid(self, k_len: int) -> Array | None:
        """Source rows declared real by `padding` or `lengths`, bool [..., k]; None = all of them.

        A row is declared invalid only where it is hidden from every query: `&` combines with and;
        `|` with or where both sides declare, else None; `~` declares nothing.
        """
        return None

    def seen_rows(self, k_len: int) -> Array | None:
        """Source rows that some query may see, bool [..., k], as far as arrays of the mask tell; None = all
        of them.

        A row that is False here is hidden from every query. The other way round need not hold: rows that
        positions hide, or two parts only together, are not looked for.
        """
        return self.source_valid(k_len)

    @property
    def has_heads(self) -> bool:
        """True when heads may see different keys: an array with an "h" axis of size above 1."""
        return any(
            "h" in core and np.shape(array)[core.index("h") - len(core)] > 1
            for _, array, core in self.arrays()
        )

    def check(self, frame: Frame, heads: int | None) -> None:
        """Raise ValueError, naming the axis, unless every array fits the call (heads None: any).

        An array has no batch axes or exactly the call's, each equal or 1; q and k fit exactly; h
        is `heads` or 1.
        """
        named = self.arrays()
        for label, position, axis in (
            ("positions of the queries", frame.q_position, "q"),
            ("positions of the keys", frame.k_position, "k"),
        ):
            if position is not None:
                if not jnp.issubdtype(jnp.result_type(position), jnp.number):
                    raise TypeError(f"{label} are {described(position)}, expected numbers")
                named += (Named(label, position, (axis,)),)
        for one in named:
            _check_axes(one, frame, heads)

    def table(
        self,
        q_len: int,
        k_len: int,
        q_position: Array | None = None,
        k_position: Array | None = None,
    ) -> Array:
        """The whole mask, checked: bool [..., h or 1, q, k]. Quadratic: for looking and tests."""
        shapes = [np.shape(array)[: np.ndim(array) - len(core)] for _, array, core in self.arrays()]
        shapes += [np.shape(p)[:-1] for p in (q_position, k_position) if p is not None]
        longest = max(shapes, key=len, default=())
        batch = tuple(
            max((s[i] for s in shapes if len(s) == len(longest)), key=lambda n: n != 1)
            for i in range(len(longest))
        )
        frame = Frame(q_len, k_len, q_position, k_position, batch)
        self.check(frame, None)
        block = self.block(frame, 0, q_len, 0, k_len)
        return jnp.broadcast_to(block, (*block.shape[:-2], q_len, k_len))

    def dead_queries(
        self,
        q_len: int,
        k_len: int,
        q_position: Array | None = None,
        k_position: Array | None = None,
    ) -> Array:
        """Queries that see no key: bool [..., h or 1, q].

        The module gives such rows zero heads; use this to find them, or to raise.

        >>> from jaxattn import masks
        >>> masks.causal(align="end").dead_queries(3, 2)
        Array([[ True, False, False]], dtype=bool)
        """
        return _dead_queries(self, q_len, k_len, q_position, k_position)

    def show(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int | tuple[int, ...] | None = None,
        head: int = 0,
        q_position: Array | None = None,
        k_position: Array | None = None,
    ) -> str:
        """The mask of one batch row and head as a 0/1 table: a line a query, a column a key.

        `batch` is an index for each batch axis of the mask (default the first row). ValueError on
        an index that the mask does not have.

        >>> from jaxattn import masks
        >>> print((masks.causal() & masks.window(2)).show(3, 4))
        1 0 0 0
        1 1 0 0
        0 1 1 0
        """
        rows = self._one_table(q_len, k_len, batch, head, q_position, k_position)
        return "\n".join(" ".join("01"[int(seen)] for seen in row) for row in rows)

    def picture(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int | tuple[int, ...] | None = None,
        head: int = 0,
        q_position: Array | None = None,
        k_position: Array | None = None,
    ) -> "Figure":
        """The same table as a matplotlib Figure (visible dark), for `.savefig(path)`."""
        from matplotlib.figure import Figure  # an extra; nothing else here needs it

        rows = self._one_table(q_len, k_len, batch, head, q_position, k_position)
        figure = Figure(figsize=(4, 4), layout="constrained")
        axes = figure.subplots()
        axes.imshow(rows, cmap="Greys", vmin=0, vmax=1, aspect="equal", interpolation="nearest")
        axes.set(xlabel="key", ylabel="query")
        axes.set_title(repr(self), fontsize=8)
        return figure

    def _one_table(
        self,
        q_len: int,
        k_len: int,
        batch: int | tuple[int, ...] | None,
        head: int,
        q_position: Array | None,
        k_position: Array | None,
    ) -> np.ndarray:
        whole = np.asarray(self.table(q_len, k_len, q_position, k_position))
        *sizes, heads = whole.shape[:-2]
        index = (0,) * len(sizes) if batch is None else batch
        index = (index,) if isinstance(index, int) else index
        head = head if heads > 1 else 0  # one row of heads stands for all
        if len(index) != len(sizes) or not all(
            -n <= i < n for i, n in zip((*index, head), (*sizes, heads), strict=True)
        ):
            raise ValueError(
                f"{self!r} has batch axes {tuple(sizes)} and {heads} head rows: it has no table "
                f"at batch={batch}, head={head}; give an index for each batch axis"
            )
        return whole[(*index, head)]

    def __and__(self, other: "Mask | None") -> "Mask":
        return _join(And, self, other)

    def __rand__(self, other: "Mask | None") -> "Mask":
        return _join(And, other, self)

    def __or__(self, other: "Mask | None") -> "Mask":
        return _join(Or, self, other)

    def __ror__(self, other: "Mask | None") -> "Mask":
        return _join(Or, other, self)

    def __invert__(self) -> "Mask":
        return self.part if isinstance(self, Not) else Not(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """Visible in every part; no parts: everything is visible."""

    parts: tuple[Mask, ...]

    def arrays(self) -> tuple[Named, ...]:
        return tuple(named for part in self.parts for named in part.arrays())

    def map_arrays(self, function: Callable[[Array, int], Array]) -> "Mask":
        return And(tuple(part.map_arrays(function) for part in self.parts))

    def block(self, frame: Frame, q_start: Start, q_size: int, k_start: Start, k_size: int) -> Array:
        if not self.parts:
            return jnp.ones((1, 1, 1), bool)
        blocks = (part.block(frame, q_start, q_size, k_start, k_size) for part in self.parts)
        return functools.reduce(operator.and_, same_rank(*blocks))

    def fill(self, frame: Frame, q_start: int, q_size: int, k_start: int, k_size: int) -> Fill:
        fills = {part.fill(frame, q_start, q_size, k_start, k_size) for part in self.parts}
        if Fill.EMPTY in fills:
            return Fill.EMPTY
        return Fill.PARTIAL if Fill.PARTIAL in fills else Fill.FULL

    def source_valid(self, k_len: int) -> Array | None:
        return _all_of([part.source_valid(k_len) for part in self.parts])

    def seen_rows(self, k_len: int) -> Array | None:
        return _all_of([part.seen_rows(k_len) for part in self.parts])

    def __repr__(self) -> str:
        if not self.parts:
            return "everything()"
        return " & ".join(f"({p!r})" if isinstance(p, Or) else repr(p) for p in self.parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    """Visible in at least one of two or more parts."""

    parts: tuple[Mask, ...]

    def arrays(self) -> tuple[Named, ...]:
        return tuple(named for part in self.parts for named in part.arrays())

    def map_arrays(self, function: Callable[[Array, int], Array]) -> "Mask":
        return Or(tuple(part.map_arrays(function) for part in self.parts))

    def block(self, frame: Frame, q_start: Start, q_size: int, k_start: Start, k_size: int) -> Array:
        blocks = (part.block(frame, q_start, q_size, k_start, k_size) for part in self.parts)
        return functools.reduce(operator.or_, same_rank(*blocks))

    def fill(self, frame: Frame, q_start: int, q_size: int, k_start: int, k_size: int) -> Fill:
        fills = {part.fill(frame, q_start, q_size, k_start, k_size) for part in self.parts}
        if Fill.FULL in fills:
            return Fill.FULL
        return Fill.PARTIAL if Fill.PARTIAL in fills else Fill.EMPTY

    def source_valid(self, k_len: int) -> Array | None:
        return _any_of([part.source_valid(k_len) for part in self.parts])

    def seen_rows(self, k_len: int) -> Array | None:
        return _any_of([part.seen_rows(k_len) for part in self.parts])

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """Visible where the part is not."""

    part: Mask

    def arrays(self) -> tuple[Named, ...]:
        return self.part.arrays()

    def map_arrays(self, function: Callable[[Array, int], Array]) -> "Mask":
        return Not(self.part.map_arrays(function))

    def block(self, frame: Frame, q_start: Start, q_size: int, k_start: Start, k_size: int) -> Array:
        return ~self.part.block(frame, q_start, q_size, k_start, k_size)

    def fill(self, frame: Frame, q_start: int, q_size: int, k_start: int, k_size: int) -> Fill:
        swap = {Fill.EMPTY: Fill.FULL, Fill.FULL: Fill.EMPTY, Fill.PARTIAL: Fill.PARTIAL}
        return swap[self.part.fill(frame, q_start, q_size, k_start, k_size)]

    def __repr__(self) -> str:
        compound = isinstance(self.part, And | Or) and self.part.parts
        return f"~({self.part!r})" if compound else f"~{self.part!r}"


def _all_of(rows: list[Array | None]) -> Array | None:
    """Rows that every part allows; None allows all."""
    known = [x for x in rows if x is not None]
    return functools.reduce(operator.and_, same_rank(*known)) if known else None


def _any_of(rows: list[Array | None]) -> Array | None:
    """Rows that some part allows; None allows all."""
    known = [x for x in rows if x is not None]
    if len(known) < len(rows):
        return None
    return functools.reduce(operator.or_, same_rank(*known))


def as_mask(mask: Mask | None) -> Mask:
    """None -> everything visible; a mask -> itself; anything else -> TypeError.

    A raw array has no single meaning (True = visible or blocked, which axes), so none is guessed.
    """
    if mask is None:
        return And(())
    if isinstance(mask, Mask):
        return mask
    raise TypeError(
        f"mask must be a jaxattn mask or None, got {described(mask)}. Say what it means: True = "
        "visible with named axes: ja.explicit(array, axes='b q k'), or ja.padding(valid) for "
        "[b, k] rows that are real; torch MultiheadAttention, True = blocked: "
        "ja.masks.from_torch_mha; torch SDPA: ja.masks.from_torch_sdpa; 0 and -inf: "
        "ja.masks.from_additive; any other additive values: the bias= argument; Flax: "
        "ja.masks.from_flax"
    )


def described(value: Any) -> str:
    """Type, dtype and shape of anything, for an error."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {value.dtype} array of shape {tuple(value.shape)} ({type(value).__name__})"
    return f"{value!r} ({type(value).__name__})"


def _join(kind: type[And] | type[Or], left: Mask | None, right: Mask | None) -> Mask:
    """Flatten `a & b & c` into one tuple of parts; one part is itself."""
    parts: tuple[Mask, ...] = ()
    for mask in (as_mask(left), as_mask(right)):
        # an empty And is `everything`: it vanishes among And parts and stays a part of an Or
        parts += mask.parts if isinstance(mask, kind) else (mask,)
    return parts[0] if len(parts) == 1 else kind(parts)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _dead_queries(
    mask: Mask, q_len: int, k_len: int, q_position: Array | None, k_position: Array | None
) -> Array:
    # under jit the table is fused into its reduction and never stored
    return ~jnp.any(mask.table(q_len, k_len, q_position, k_position), axis=-1)


def _batch_names(n: int) -> tuple[str, ...]:
    return ("b",) if n == 1 else tuple(f"b{i + 1}" for i in range(n))


def axes_text(named: Named) -> str:
    """`b k: 3x7`, from shapes alone (a tracer has no values to print)."""
    shape = getattr(named.array, "shape", None)
    if shape is None:
        return "?"
    names = (*_batch_names(len(shape) - len(named.core)), *named.core)
    return f"{' '.join(names)}: {'x'.join(map(str, shape))}" if names else "scalar"


def _check_axes(named: Named, frame: Frame, heads: int | None) -> None:
    label, array, core = named
    shape = tuple(np.shape(array))
    here = f"{label} of shape {shape}"
    if len(shape) < len(core):
        raise ValueError(
            f"{here} lacks an axis of [..., {', '.join(core)}]; under vmap and scan only leading "
            "batch axes of a mask can be mapped: give it one, or map it with in_axes=None"
        )
    batch, sizes = shape[: len(shape) - len(core)], shape[len(shape) - len(core) :]
    expected = {"h": heads, "q": frame.q_len, "k": frame.k_len}
    owners = {"h": "heads", "q": "queries", "k": "keys"}
    fix = {
        "h": "give one entry for each head, or 1 for all heads alike",
        "q": "give one row for each query; if all queries share a row, leave q out of axes",
        "k": "give one entry for each source row, in the order of the call's keys",
    }
    for axis, got in zip(core, sizes, strict=True):
        want = expected[axis]
        if want is not None and got != want and not (axis == "h" and got == 1):
            raise ValueError(
                f"{here}: axis {axis!r} has size {got}, expected {want}, the number of "
                f"{owners[axis]}; {fix[axis]}"
            )
    if not batch:
        return
    if len(batch) != len(frame.batch):
        raise ValueError(
            f"{here} has {len(batch)} batch axes {batch} before [{', '.join(core)}], but the call "
            f"has {len(frame.batch)}: {frame.batch}; give none or exactly the call's (size 1 where "
            "all rows are alike), and name h, q and k in axes= if they are among them"
        )
    for axis, got, want in zip(_batch_names(len(batch)), batch, frame.batch, strict=True):
        if got not in (want, 1):
            raise ValueError(
                f"{here}: batch axis {axis!r} has size {got}, expected {want} as in the call "
                f"(batch axes {frame.batch}), or 1 where all rows are alike"
            )
