"""A cache is a key side that grows: prefill, chunks and single steps of self-attention, for every variant.

    cache = attn.empty_cache(batch, size)
    y, aux, cache = attn.decode(params, cache, x)      # any number of rows, again and again

Rows keep their absolute positions, so causality, windows and rotary turns are those of one full pass.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.core import Tracer
from jax.typing import DTypeLike

from jaxattn.masks import Mask, as_mask, causal, window
from jaxattn.sides import KeySide, static_field

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Source rows so far, as their attention stores them; a tree, so it passes through jit, vmap and scan.

    Attributes:
        side: a key side of `size` rows; those that were not written are invalid.
        count: int32, rows appended since it was empty, those that a ring has dropped included.
        refused: bool, True from the first append that did not fit. Outside of jit such an append raises;
            under jit it changes no row, sets this, and `decode` returns NaN from then on.
        owner: the attention that it belongs to.
        window: the newest positions that are needed; rows are then a ring. None keeps all.
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

    def trim(self, rows: int | Array) -> "Cache":
        """The same cache without its last rows, such as those of a draft that was rejected.

        Raises:
            ValueError: for a ring, whose last rows have taken the place of older ones.
        """
        if self.window is not None:
            raise ValueError(
                f"cache: trim of a ring for a window of {self.window}: the last rows took the place of older "
                "ones. Fix: go on with the cache from before them; it is a value."
            )
        count = jnp.maximum(self.count - rows, 0)
        kept, axis = jnp.arange(self.size) < count, len(self.batch)
        cut = lambda x: jnp.where(kept.reshape(-1, *(1,) * (x.ndim - axis - 1)), x, jnp.zeros_like(x))
        return dataclasses.replace(self, side=jax.tree.map(cut, self.side), count=count)

    def reorder(self, index: Array) -> "Cache":
        """The cache of chosen examples: row i of the first batch axis is row index[i], as beams need it."""
        if not self.batch:
            raise ValueError("cache: it has no batch axis to reorder. Fix: empty_cache with a batch.")
        return dataclasses.replace(self, side=jax.tree.map(lambda x: x[jnp.asarray(index)], self.side))


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


def append(
    attn: Any,
    params: PyTree,
    cache: Cache,
    x_kv: Array | tuple[Array, Array],
    valid: Array | None = None,
    positions: Array | None = None,
) -> Cache:
    """The cache with more source rows.

    Args:
        attn: the attention that made the cache; this is also its method.
        params: the tree that `init` made.
        cache: what `empty_cache` or `append` returned.
        x_kv: [..., k, m], or a pair (x_k, x_v) of the same rows.
        valid: [..., k] bool, False for padding rows, left or right; they take a place and are never seen.
        positions: [..., k]; None continues to count. With padding on the left, say where real rows stand.

    Raises:
        ValueError, TypeError: for another attention, batch or dtype than the cache's, and, outside of jit,
            for more rows than fit: nothing is written. Under jit see `Cache.refused`.
    """
    _check_owner(cache.owner, _owner(attn))
    rows = x_kv[0] if isinstance(x_kv, tuple) else x_kv
    batch, n = rows.shape[:-2], rows.shape[-2]
    if batch != cache.batch:
        raise ValueError(
            f"cache: batch axes are {cache.batch}, those of the states {batch}. "
            f"Fix: empty_cache({batch}, ...)."
        )
    whole = lambda x: jnp.broadcast_to(x, (*batch, n))
    positions = whole(_positions(cache, n) if positions is None else positions).astype(jnp.int32)
    side = attn.key_side(params, x_kv, whole(True if valid is None else valid), positions)
    axis = len(batch)
    _check_like(cache.side, side, axis)
    if cache.window is not None:
        longest = cache.size - cache.window + 1
        if n > longest:
            raise ValueError(
                f"cache: {n} rows at once in a ring of {cache.size} rows for a window of {cache.window}, "
                f"expected at most {longest}. Fix: shorter chunks, or size = window + chunk - 1."
            )
        at = (slice(None),) * axis + ((cache.count + jnp.arange(n)) % cache.size,)
        side = jax.tree.map(lambda old, new: old.at[at].set(new), cache.side, side)
        return dataclasses.replace(cache, side=side, count=cache.count + n)
    refused = cache.refused | (cache.count + n > cache.size)
    if not isinstance(refused, Tracer) and bool(refused):
        raise ValueError(
            f"cache: {int(cache.count)} of {cache.size} rows are taken, {n} more do not fit. "
            "Fix: a larger size, or window= for a ring."
        )
    if n > cache.size:
        return dataclasses.replace(cache, refused=jnp.ones_like(cache.refused))

    def write(old: Array, new: Array) -> Array:
        here = jax.lax.dynamic_slice_in_dim(old, cache.count, n, axis)
        return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(refused, here, new), cache.count, axis)

    side = jax.tree.map(write, cache.side, side)
    count = jnp.where(refused, cache.count, cache.count + n)
    return dataclasses.replace(cache, side=side, count=count, refused=refused)


def decode(
    attn: Any,
    params: PyTree,
    cache: Cache,
    x: Array,
    mask: Mask | None = None,
    *,
    valid: Array | None = None,
    positions: Array | None = None,
    bias: Array | None = None,
    engine: str = "auto",
    dropout_key: Array | None = None,
    capture: tuple[str, ...] = (),
) -> tuple[Array, Any, Cache]:
    """Append rows and let them attend to all rows so far: a prompt, a chunk, or one step.

    Any split of a sequence gives what one causal pass over it gives.

    Args:
        attn: the attention that made the cache; this is also its method.
        params, cache, valid, positions: as in `append`.
        x: [..., t, m], rows that are queries and keys.
        mask: what more to hide, by position (`ja.window`), or by the cache's rows (axes k of its size).
            Causality always holds.
        bias, engine, dropout_key, capture: as in `apply`; k counts the cache's rows.

    Returns:
        y [..., t, m], `Aux`, and the cache with these rows. y is NaN where `Cache.refused`.

    Raises:
        ValueError, TypeError: as `append` and `attend` do.
    """
    if positions is None:
        positions = _positions(cache, x.shape[-2])
    after = append(attn, params, cache, x, valid, positions)
    seen = as_mask(mask) & causal()
    if cache.window is not None:
        seen = seen & window(cache.window)
    y, aux = attn.attend(
        params, x, after.side, seen, valid=valid, positions=positions, bias=bias, engine=engine,
        dropout_key=dropout_key, capture=capture,
    )  # fmt: skip
    return jnp.where(after.refused, jnp.nan, y).astype(y.dtype), aux, after


def _positions(cache: Cache, n: int) -> Array:
    return cache.count + jnp.arange(n, dtype=jnp.int32)


def _owner(attn: Any) -> tuple[str, str]:
    """What tells two attentions apart: the transforms in order and every resolved size."""
    return " + ".join(link.name for link in attn.links) or "identity", repr(attn.sizes)


def _check_owner(have: tuple[str, str], asked: tuple[str, str]) -> None:
    if have != asked:
        other = "the same with other sizes" if have[0] == asked[0] else asked[0]
        raise ValueError(
            f"cache: made by {have[0]}, used by {other}. "
            "Fix: a cache that the attention's own empty_cache made."
        )


def _check_like(old: KeySide, new: KeySide, axis: int) -> None:
    """Raise unless every array of the new rows is of the cache's type and, but for rows, of its shape."""
    but_rows = lambda x: (*x.shape[:axis], *x.shape[axis + 1 :])
    for name, have, came in zip(KeySide._fields, old, new, strict=True):
        for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(came), strict=True):
            if a.dtype != b.dtype:
                raise TypeError(
                    f"cache: {name} is {a.dtype}, the rows that came make {b.dtype}. Fix: "
                    f"empty_cache(..., dtype={b.dtype}), or states and parameters in {a.dtype}."
                )
            if but_rows(a) != but_rows(b):
                raise ValueError(
                    f"cache: {name} has shape {a.shape}, the rows that came {b.shape}. "
                    "Fix: options as in the attention that made the cache."
                )
