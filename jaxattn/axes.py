"""The axis vocabulary, contractions over named axes, and errors that name the axis.

    b   batch (any number of leading axes, written `...`)
    t   time of a state            q   query positions         k   key positions
    m   model width                d   query/key head width    v   value head width
    h   heads: hl logit, hs softmax, hv value (output) heads, hK key heads, hV value-source heads
    g   groups of heads            a   active heads            r   rank of a dynamic mix
    i,o in and out of a mix        u   hidden units of a small generator network

States are [..., t, m], heads [..., t, h, d], logits and weights [..., h, q, k]. The same words stand
in every pattern, annotation and docstring.
"""

import string
from collections.abc import Sequence

import chex
import einops
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def contract(*operands: Array | str, dtype: DTypeLike | None = None) -> Array:
    """`einops.einsum` that can name the type its sums run in.

    out = sum over the axes named on the left only.

    Args:
        *operands: arrays, then the pattern, for example `"... q h d, ... k h d -> ... h q k"`.
        dtype: type of the products' sums and of the result; None is that of the operands.

    Example:
        >>> x = jnp.ones((3, 2), jnp.bfloat16)
        >>> contract(x, x, "q d, k d -> q k", dtype=jnp.float32).dtype
        dtype('float32')
    """
    *arrays, pattern = operands
    assert isinstance(pattern, str)
    arrays = [jnp.asarray(x) for x in arrays]  # numpy arrays beside traced ones are welcome
    if dtype is None or all(x.dtype == dtype for x in arrays):
        return einops.einsum(*arrays, pattern)  # pyright: ignore[reportCallIssue]  (stubs know few arities)
    # einops has no word for the accumulation type, so its long names become einsum's letters here.
    left, right = pattern.split("->")
    names = dict.fromkeys((left.replace(",", " ") + right).split())
    letters = dict(zip((n for n in names if n != "..."), string.ascii_letters, strict=False))
    letters["..."] = "..."
    spell = ["".join(letters[n] for n in part.split()) for part in [*left.split(","), right]]
    return jnp.einsum(",".join(spell[:-1]) + "->" + spell[-1], *arrays, preferred_element_type=dtype)


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """The type that sums of this type run in: float32, or float64 for float64.

    Example:
        >>> at_least_float32(jnp.bfloat16)
        dtype('float32')
    """
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def same_rank(*arrays: Array) -> list[Array]:
    """The arrays with leading axes of size 1, so that all have as many axes as the one with most.

    What JAX does by itself, unless `jax.numpy_rank_promotion("raise")` forbids it.

    Example:
        >>> [x.shape for x in same_rank(jnp.ones((2, 3, 4)), jnp.ones(4))]
        [(2, 3, 4), (1, 1, 4)]
    """
    arrays = tuple(map(jnp.asarray, arrays))
    rank = max(x.ndim for x in arrays)
    return [jax.lax.expand_dims(x, range(rank - x.ndim)) for x in arrays]


def check_axes(what: str, array: Array, axes: str, *, fix: str, **sizes: int) -> None:
    """Raise a ValueError that names the axis unless `array` has `axes` with the given sizes.

    Args:
        what: the argument, as its caller knows it.
        axes: the names of the trailing axes; a leading `...` allows any number before them.
        fix: what the caller should do about it.
        **sizes: expected size of each named axis; an axis without one may have any size.

    Raises:
        ValueError: with the argument, the axis, got, expected and the fix.

    Example:
        >>> check_axes("x_q", jnp.ones((2, 3, 5)), "... q m", fix="pass width 7", m=7)
        Traceback (most recent call last):
        ValueError: x_q: axis m is 5, expected 7 (axes "... q m", shape (2, 3, 5)). Fix: pass width 7.
    """
    names = axes.split()
    open_ended = names[0] == "..."
    names = names[1:] if open_ended else names
    expected = tuple(sizes.get(name) for name in names)
    try:
        chex.assert_shape(array, (..., *expected) if open_ended else expected)
    except AssertionError:
        pass
    else:
        return
    shape = tuple(array.shape)
    if len(shape) < len(names) or (len(shape) > len(names) and not open_ended):
        problem = f"has {len(shape)} axes, expected {'at least ' * open_ended}{len(names)}"
    else:
        tail = shape[len(shape) - len(names) :]
        problem = "; ".join(
            f"axis {name} is {got}, expected {want}"
            for name, got, want in zip(names, tail, expected, strict=True)
            if want is not None and got != want
        )
    raise ValueError(f'{what}: {problem} (axes "{axes}", shape {shape}). Fix: {fix}.')


def check_batch(**arrays: tuple[Array | None, int]) -> tuple[int, ...]:
    """The batch axes that all arrays share; each comes with its number of trailing axes.

    Raises:
        ValueError: when two arrays have different batch axes.
    """
    found: dict[str, tuple[int, ...]] = {
        name: tuple(array.shape[: array.ndim - trailing])
        for name, (array, trailing) in arrays.items()
        if array is not None
    }
    (first, batch), *rest = found.items()
    for name, other in rest:
        if other != batch:
            raise ValueError(
                f"batch axes b differ: {first} has {batch}, {name} has {other}. "
                "Fix: give both the same leading axes (broadcast them before the call)."
            )
    return batch


def check_floating(what: str, array: Array) -> None:
    """Raise a TypeError unless `array` is real floating point."""
    if not isinstance(array, jax.Array) and not hasattr(array, "dtype"):
        raise TypeError(f"{what}: got {type(array).__name__}, expected an array. Fix: jnp.asarray.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{what}: dtype is {array.dtype}, expected a floating type. Fix: embed or cast first."
        )


def check_boolean(what: str, array: Array) -> None:
    """Raise a TypeError unless `array` is boolean."""
    dtype = jnp.asarray(array).dtype
    if dtype != jnp.bool_:
        raise TypeError(
            f"{what}: dtype is {dtype}, expected bool, True = counts. Fix: compare, as in x != 0."
        )


def check_option(what: str, got: object, allowed: Sequence[object]) -> None:
    """Raise a ValueError that lists what is allowed unless `got` is one of it."""
    if got not in allowed:
        raise ValueError(f"{what}: got {got!r}, expected one of {', '.join(map(repr, allowed))}.")
