"""A cache is a key side that grows: prefill, chunks and single steps of self-attention, for every variant.

    cache = attn.empty_cache(batch, size)
    y, aux, cache = attn.decode(params, cache, x)      # any number of rows, again and again

Rows keep their absolute positions, so causality, windows and rotary angles are those of one full pass.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.core import Tracer
from jax.typing import DTypeLike

from jaxattn.sides import KeySide, static_field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Source rows so far, as their attention stores them; a tree, so it passes through jit, vmap and scan.

    Attributes:
        side: a key side of `size` rows; those that were not written are invalid.
        count: int32, rows appended since it was empty, those that a ring has overwritten included.
        refused: bool, whether rows did not fit since it was made. Outside of jit such an append raises; under
            jit and vmap it writes nothing and sets this, and `decode` returns NaN from then on. `resume`,
            `trim`, `grow` and `reset` clear it.
        owner: the attention that it belongs to.
        window: how many of the newest positions are needed; rows are then a ring. None keeps all.

    A `jax.vmap` over `decode` makes `count` and `refused` arrays, one for each example; every method takes
    such a cache too, and `decode` takes it under the same `vmap`.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> attn = attention(HeadSpec(model=6, heads=2))
        >>> params, x, decode = attn.init(jax.random.key(0)), jnp.ones((1, 3, 6)), jax.jit(attn.decode)
        >>> _, _, cache = decode(params, attn.empty_cache(1, 4, dtype=x.dtype), x)
        >>> y, _, cache = decode(params, cache, x)  # three more rows than the one that is free
        >>> bool(jnp.isnan(y).all()), bool(cache.refused), int(cache.count)
        (True, True, 3)
        >>> y, _, cache = decode(params, cache.grow(8), x)  # the three rows that were kept, and three more
        >>> bool(jnp.isnan(y).any()), bool(cache.refused), int(cache.count)
        (False, False, 6)
    """

    side: KeySide
    count: Array
    refused: Array
    owner: tuple[str, str] = static_field()
    window: int | None = static_field(None)

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch axes."""
        return self.side.key.shape[:-3]

    @property
    def size(self) -> int:
        """Rows that it holds at most."""
        return self.side.key.shape[-3]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the side."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.side))

    def reset(self) -> "Cache":
        """The same cache without rows; nothing of them stays, NaN neither."""
        side = jax.tree.map(jnp.zeros_like, self.side)
        none = jnp.zeros_like(self.count), jnp.zeros_like(self.refused)
        return dataclasses.replace(self, side=side, count=none[0], refused=none[1])

    def resume(self) -> "Cache":
        """The same cache with its rows, and no longer refused.

        Rows that were refused are not in it: append them again, in pieces that fit or after `grow` or `trim`.
        """
        return dataclasses.replace(self, refused=jnp.zeros_like(self.refused))

    def trim(self, rows: int | Array) -> "Cache":
        """The same cache without its last rows, as after a draft that was rejected; no longer refused.

        Rows that were refused were never written: after a refusal the last rows are those before it. A loop
        that trims its draft whether or not it fitted trims `jnp.where(cache.refused, 0, rejected)`.

        Args:
            rows: how many, an integer, or one for each example of a cache that vmap made; more than there are
                empties the cache.

        Raises:
            ValueError: for a ring, whose last rows have overwritten older ones; for a negative number (one
                that is traced trims nothing, and the cache is refused).
            TypeError: for what is no integer.
        """
        if self.window is not None:
            raise ValueError(
                f"cache: trim of a ring for a window of {self.window}: the last rows have overwritten older "
                "ones. Fix: go on with the cache from before them; it is a value."
            )
        rows = jnp.asarray(rows)
        if not jnp.issubdtype(rows.dtype, jnp.integer) or rows.shape not in ((), self.count.shape):
            raise TypeError(
                f"cache: trim: rows is {rows.dtype} of shape {rows.shape}, expected one integer, as all "
                "examples have equally many rows. Fix: an int; a cache made by vmap where the numbers differ."
            )
        if not isinstance(rows, Tracer) and bool((rows < 0).any()):
            raise ValueError(f"cache: trim of {rows} rows. Fix: how many of the last rows, at least 0.")
        none = jnp.zeros_like(self.count)
        rows = rows.astype(jnp.int32) + none
        count = jnp.clip(self.count - rows, none, self.count)
        kept = jnp.arange(self.size, dtype=jnp.int32) < count[..., None]
        stacked, plain = self.count.ndim, len(self.batch)
        lead = (*count.shape, *(1,) * (plain - stacked), self.size)
        cut = lambda x: jnp.where(kept.reshape(*lead, *(1,) * (x.ndim - plain - 1)), x, jnp.zeros_like(x))
        return dataclasses.replace(self, side=jax.tree.map(cut, self.side), count=count, refused=rows < 0)

    def grow(self, size: int) -> "Cache":
        """A cache of `size` rows with the same rows, no longer refused; under jit its shapes are others.

        Raises:
            ValueError: for fewer rows than this one has; for a ring, which never fills.
        """
        if self.window is not None:
            raise ValueError(
                f"cache: grow of a ring for a window of {self.window}, which never fills. "
                "Fix: shorter chunks, or empty_cache with a larger size."
            )
        if size < self.size:
            raise ValueError(f"cache: grow to {size} rows, expected at least {self.size}, its size now.")
        axis = len(self.batch)

        def wider(x: Array) -> Array:
            more = (*x.shape[:axis], size - self.size, *x.shape[axis + 1 :])
            return jnp.concatenate([x, jnp.zeros(more, x.dtype)], axis)

        return dataclasses.replace(self.resume(), side=jax.tree.map(wider, self.side))

    def check_owner(self, attn: Any) -> None:
        """Raise unless the cache is of this attention, options and sizes included."""
        have, asked = self.owner, _owner(attn)
        if have != asked:
            other = "the same with other sizes" if have[0] == asked[0] else asked[0]
            raise ValueError(
                f"cache: made by {have[0]}, used by {other}. "
                "Fix: a cache that the attention's own empty_cache made."
            )
        if self.count.ndim:
            raise ValueError(
                f"cache: count has shape {self.count.shape}, one for each example of a vmap, expected a "
                "scalar. Fix: use it under the same vmap, jax.vmap(...)(..., cache, ...)."
            )

    def next_positions(self, rows: int) -> Array:
        """The positions of the next rows where they continue to count, int32 [rows]."""
        return self.count + jnp.arange(rows, dtype=jnp.int32)

    def of_rows(self, x: Array, valid: Array | None, positions: Array | None) -> tuple[Array, Array]:
        """`valid` and `positions` of new rows x [..., k, m], with all batch axes.

        Raises:
            ValueError: for batch axes other than those of the cache.
        """
        batch, n = x.shape[:-2], x.shape[-2]
        if batch != self.batch:
            raise ValueError(
                f"cache: batch axes are {self.batch}, those of the states {batch}. "
                f"Fix: a cache that was made for a batch of {batch}."
            )
        whole = lambda x: jnp.broadcast_to(x, (*batch, n))
        positions = self.next_positions(n) if positions is None else positions
        return whole(True if valid is None else valid), whole(positions).astype(jnp.int32)

    def extend(self, side: KeySide) -> "Cache":
        """The cache with the rows of `side`, projected by its attention.

        Raises:
            ValueError, TypeError: as `Attention.append` does; nothing is written then.
        """
        axis, n = len(self.batch), side.key.shape[-3]
        _check_like(self.side, side, axis)
        if self.window is not None:
            longest = self.size - self.window + 1
            if n > longest:
                raise ValueError(
                    f"cache: {n} rows at once in a ring of {self.size} rows for a window of {self.window}, "
                    f"expected at most {longest}. Fix: shorter chunks, or size = window + chunk - 1."
                )
            at = (slice(None),) * axis + ((self.count + jnp.arange(n)) % self.size,)
            written = jax.tree.map(lambda old, new: jnp.asarray(old).at[at].set(new), self.side, side)
            return dataclasses.replace(self, side=written, count=self.count + n)
        refused = self.refused | (self.count + n > self.size)
        if not isinstance(refused, Tracer) and bool(refused):
            if bool(self.refused):
                raise ValueError(
                    f"cache: an append under jit did not fit and was not written; {int(self.count)} of "
                    f"{self.size} rows are kept. Fix: cache.resume() to go on from these, cache.grow(size) "
                    "or cache.trim(rows) to make room as well, or cache.reset()."
                )
            raise ValueError(
                f"cache: {int(self.count)} of {self.size} rows are taken, {n} more do not fit. "
                "Fix: cache.grow(size), a larger size from the start, or window= for a ring."
            )
        if n > self.size:
            return dataclasses.replace(self, refused=jnp.ones_like(self.refused))

        def write(old: Array, new: Array) -> Array:
            here = jax.lax.dynamic_slice_in_dim(old, self.count, n, axis)
            return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(refused, here, new), self.count, axis)

        written = jax.tree.map(write, self.side, side)
        count = jnp.where(refused, self.count, self.count + n)
        return dataclasses.replace(self, side=written, count=count, refused=refused)

    def nan_where_refused(self, y: Array) -> Array:
        """What was computed from this cache; NaN where rows were refused."""
        return jnp.where(self.refused, jnp.nan, y).astype(y.dtype)

    def reorder(self, index: Array) -> "Cache":
        """The cache of chosen examples: row i of the first batch axis is row index[i], as beams need it.

        Args:
            index: integers [rows]; rows may be repeated, left out, or be fewer or more than before.

        Raises:
            ValueError: without a batch axis; for an index that is no row of it (where values are known).
            TypeError: for what is no row of integers.
        """
        if not self.batch:
            raise ValueError("cache: it has no batch axis to reorder. Fix: empty_cache with a batch.")
        index = jnp.asarray(index)
        if index.ndim != 1 or not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(
                f"cache: reorder: index is {index.dtype} of shape {index.shape}, expected one row of "
                "integers. Fix: the old row of each new row, [rows]."
            )
        if not isinstance(index, Tracer) and bool(((index < 0) | (index >= self.batch[0])).any()):
            raise ValueError(
                f"cache: reorder: index {index.tolist()}, expected rows of the first batch axis, 0 to "
                f"{self.batch[0] - 1}. Fix: the old row of each new row."
            )
        pick = lambda x: x[index] if x.ndim else x  # count and refused are one for all, or one for each row
        return jax.tree.map(pick, self)


def empty_cache(
    attn: Any,
    batch: int | tuple[int, ...],
    size: int,
    *,
    window: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Cache:
    """A cache without rows, for one attention.

    Args:
        attn: what `attention` made; this is also its method.
        batch: the batch axes of the states that will come.
        size: rows that fit. With `window`, chunks of up to size - window + 1 rows can be appended for ever.
        window: keep only what the newest positions need, in a ring; `decode` then hides what is older.
        dtype: of states and parameters.

    Raises:
        ValueError: for sizes that cannot be.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> attn = attention(HeadSpec(model=6, heads=2))
        >>> params, x = attn.init(jax.random.key(0)), jnp.ones((3, 5, 6))
        >>> y, _, cache = attn.decode(params, attn.empty_cache(3, 8, dtype=x.dtype), x)
        >>> y.shape, int(cache.count), cache.size
        ((3, 5, 6), 5, 8)
    """
    batch = (batch,) if isinstance(batch, int) else tuple(batch)
    if size < 1:
        raise ValueError(f"empty_cache: size = {size}, expected at least 1 row.")
    if window is not None and not 1 <= window <= size:
        raise ValueError(
            f"empty_cache: window = {window} of size = {size}, expected 1 <= window <= size. "
            "Fix: size = window + chunk - 1, for the longest chunk that is appended at once."
        )
    params = jax.eval_shape(lambda: attn.init(jax.random.key(0), dtype))
    states = [ShapeDtypeStruct((*batch, size, m), dtype) for m in (attn.spec.in_k, attn.spec.in_v)]
    valid = ShapeDtypeStruct((*batch, size), bool)
    positions = ShapeDtypeStruct((*batch, size), jnp.int32)
    side = jax.eval_shape(attn.key_side, params, tuple(states), valid, positions)
    side = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), side)
    return Cache(side, jnp.zeros((), jnp.int32), jnp.zeros((), bool), _owner(attn), window)


def _owner(attn: Any) -> tuple[str, str]:
    """What tells two attentions apart: the transforms with their options, and every resolved size."""
    return attn.variant, repr(attn.sizes)


def _check_like(old: KeySide, new: KeySide, axis: int) -> None:
    """Raise unless every array of the new rows is of the cache's type and, but for rows, of its shape."""
    but_rows = lambda x: (*x.shape[:axis], *x.shape[axis + 1 :])
    for name, have, came in zip(KeySide._fields, old, new, strict=True):
        for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(came), strict=True):
            if a.dtype != b.dtype:
                raise TypeError(
                    f"cache: {name} is {a.dtype}, the rows that came make {b.dtype}. Fix: "
                    f"dtype={b.dtype} where the cache is made, or states and parameters in {a.dtype}."
                )
            if but_rows(a) != but_rows(b):
                raise ValueError(
                    f"cache: {name} has shape {a.shape}, the rows that came {b.shape}. "
                    "Fix: options as in the attention that made the cache."
                )
