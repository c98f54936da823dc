"""Attention that keeps state, anyone's: a cache that grows by steps, and the stored rows of a source.

A `Decoder` is asked by values of heads: `start` makes a state, `step` takes one and some rows and gives
another. A library whose cache changes in place is wrapped so that it gives a new one. A `Memory` keeps what
was projected from one source.
"""

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import numpy as np
from jax import Array

PyTree = Any
Decodes = Literal[
    "chunks", "gqa", "d_v", "padding", "window", "reset", "reorder", "rollback", "buffers", "float64",
    "tracing",
]  # fmt: skip
DECODES: tuple[Decodes, ...] = (
    "chunks", "gqa", "d_v", "padding", "window", "reset", "reorder", "rollback", "buffers", "float64",
    "tracing",
)  # fmt: skip


class Room(NamedTuple):
    """What a state is made for.

    Attributes:
        batch, heads, key_heads, d, v: axes of the rows that will come.
        capacity: rows that fit.
        window: the newest positions that a row sees, itself among them; None sees all.
        dtype: of the rows, by name.
    """

    batch: int
    heads: int
    key_heads: int
    d: int
    v: int
    capacity: int
    window: int | None = None
    dtype: str = "float32"


class Rows(NamedTuple):
    """The rows of one step: query [b, n, h, d], key [b, n, g, d], value [b, n, g, v], valid [b, n] or None.

    A row that is not valid is padding: it takes a place and is never seen.
    """

    query: Array
    key: Array
    value: Array
    valid: Array | None = None


class Decoder(NamedTuple):
    """Self-attention that keeps a state; row i of a sequence sees the rows up to i.

    Attributes:
        name: as a verdict calls it.
        start: an empty state for a room.
        step: a state and n rows to the next state and [b, n, h, v]; the old state stays as it was.
        supports: of `DECODES`, what it declares: "chunks" is n > 1, "padding" is `Rows.valid`, "buffers" is
            `stored` and `placed`; a step that needs more must raise.
        reset: a state to one without rows, of the same room.
        reorder: a state and [b] integers to one whose example i was example index[i].
        rollback: a state and n to one without its last n rows.
        stored: a state to key [b, s, g, d] and value [b, s, g, v] as they lie, row i of a sequence at i.
        placed: a state with other key and value rows in their place.
        whole: its own causal pass, rows and a window to [b, t, h, v]; None for plain attention.
        plain: whether it is softmax(q k / sqrt(d)) v head by head; if not, `whole` is what steps must be.
        version, least_heads, least_width: as in `Subject`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.check.adapters.decoder import DECODERS
        >>> decoder = DECODERS["jaxattn"]()
        >>> state = decoder.start(Room(batch=1, heads=2, key_heads=2, d=3, v=3, capacity=4))
        >>> row = jnp.ones((1, 1, 2, 3), jnp.float32)
        >>> state, out = decoder.step(state, Rows(row, row, row))
        >>> out.shape, bool((out == row).all())  # the first row sees itself
        ((1, 1, 2, 3), True)
    """

    name: str
    start: Callable[[Room], PyTree]
    step: Callable[[PyTree, Rows], tuple[PyTree, Array]]
    supports: frozenset[str] = frozenset({"gqa", "d_v", "float64", "tracing"})
    reset: Callable[[PyTree], PyTree] | None = None
    reorder: Callable[[PyTree, Array], PyTree] | None = None
    rollback: Callable[[PyTree, int], PyTree] | None = None
    stored: Callable[[PyTree], tuple[Array, Array]] | None = None
    placed: Callable[[PyTree, Array, Array], PyTree] | None = None
    whole: Callable[[Rows, int | None], Array] | None = None
    plain: bool = True
    version: str = ""
    least_heads: int = 1
    least_width: int = 1


class Source(NamedTuple):
    """The rows of a source, key [b, k, g, d] and value [b, k, g, v], and what tells it from any other."""

    key: Array
    value: Array
    name: Hashable


class Memory(NamedTuple):
    """Cross-attention to a source that is stored once.

    Attributes:
        name: as a verdict calls it.
        project: a source, and the number of query heads that will read it, to what is stored of it.
        read: what is stored, a query [b, q, h, d] and the source that the reader means, to what is stored
            from then on and [b, q, h, v]. Asked for another source it gives that one's, or raises.
        supports: "gqa", "d_v"; "share" and "reorder" are the two below.
        share: what is stored, for beams: the source row of each; b of a query is then the beams.
        reorder: beam i goes on from the hypothesis of beam index[i], and reads the source of that one.
        plain, version, least_heads, least_width: as in `Subject`.
    """

    name: str
    project: Callable[[Source, int], Any]
    read: Callable[[Any, Array, Source], tuple[Any, Array]]
    supports: frozenset[str] = frozenset({"gqa", "d_v"})
    share: Callable[[Any, np.ndarray], Any] | None = None
    reorder: Callable[[Any, np.ndarray], Any] | None = None
    plain: bool = True
    version: str = ""
    least_heads: int = 1
    least_width: int = 1
