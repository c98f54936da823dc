"""Masks of other libraries, in and out: every other polarity and encoding has a named converter."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import Array
from jax.core import Tracer

from jaxattn.mask_form import Mask, as_mask, described
from jaxattn.mask_rules import Explicit, boolean, everything, explicit


def from_torch_mha(attn_mask: Any = None, key_padding_mask: Any = None, *, heads: int | None = None) -> Mask:
    """Masks of torch.nn.MultiheadAttention, True = blocked, as one mask (True = visible).

    attn_mask [q, k] or [(b h), q, k] with `heads` given; key_padding_mask [b, k] or [k]. As in
    torch, blocked keys are hidden and no more: use `padding(~key_padding_mask)` to zero them too.
    TypeError: not boolean (torch adds float masks to the logits: `from_additive`, or `bias=`).
    ValueError: another rank; 3 axes without `heads`; rows that `heads` does not divide.

    >>> from jaxattn import masks
    >>> print(masks.from_torch_mha([[False, True], [False, False]]).show(2, 2))
    1 0
    1 1
    """
    mask = everything()
    if attn_mask is not None:
        blocked = boolean(attn_mask, "from_torch_mha(attn_mask)")
        if blocked.ndim == 2:
            mask &= explicit(~blocked, "q k")
        elif blocked.ndim == 3:
            if heads is None or heads < 1 or blocked.shape[0] % heads:
                raise ValueError(
                    f"from_torch_mha(attn_mask) of shape {blocked.shape} is [(b h), q, k]: heads= "
                    f"must divide its first axis {blocked.shape[0]}, got heads={heads}"
                )
            mask &= _broadcast_axes(rearrange(~blocked, "(b h) q k -> b h q k", h=heads))
        else:
            raise ValueError(
                f"from_torch_mha(attn_mask) has shape {blocked.shape}, expected [q, k] or "
                "[(b h), q, k]; for another layout use explicit(~array, axes=...)"
            )
    if key_padding_mask is not None:
        blocked = boolean(key_padding_mask, "from_torch_mha(key_padding_mask)")
        if blocked.ndim not in (1, 2):
            raise ValueError(
                f"from_torch_mha(key_padding_mask) has shape {blocked.shape}, expected [b, k] or "
                "[k]; for more batch axes use explicit(~array, axes=...)"
            )
        mask &= explicit(~blocked, "b k" if blocked.ndim == 2 else "k")
    return mask


def to_torch_mha(
    mask: Mask | None,
    q_len: int,
    k_len: int,
    *,
    heads: int | None = None,
    batch: int | None = None,
    q_position: Array | None = None,
    k_position: Array | None = None,
) -> Array:
    """The attn_mask of torch.nn.MultiheadAttention, True = blocked: [q, k] or [(b h), q, k].

    [q, k] where all batch rows and heads share the mask; else `heads`, and `batch` where the mask
    itself does not have that axis, give the sizes of the other form.
    ValueError: more than one batch axis; a size that is needed and missing, or disagrees.

    >>> from jaxattn import masks
    >>> masks.to_torch_mha(masks.causal(), 2, 2)
    Array([[False,  True],
           [False, False]], dtype=bool)
    """
    blocked = ~as_mask(mask).table(q_len, k_len, q_position, k_position)
    if blocked.ndim > 4:
        raise ValueError(
            f"to_torch_mha: {mask!r} has {blocked.ndim - 3} batch axes, torch has one; flatten them"
        )
    blocked = blocked if blocked.ndim == 4 else blocked[None]
    sizes = []
    for name, got, asked in (
        ("batch", blocked.shape[0], batch),
        ("heads", blocked.shape[1], heads),
    ):
        if got != 1 and asked not in (None, got):
            raise ValueError(f"to_torch_mha: {mask!r} has {name} {got}, but {name}={asked} is asked")
        sizes.append(got if got != 1 else asked)
    if blocked.shape[:2] == (1, 1):
        return blocked[0, 0]
    if None in sizes:
        raise ValueError(
            f"to_torch_mha: {mask!r} is not the same for all batch rows and heads, so torch wants "
            f"[(b h), q, k]: give batch= and heads=, got batch={batch}, heads={heads}"
        )
    blocked = jnp.broadcast_to(blocked, (*sizes, q_len, k_len))
    return rearrange(blocked, "b h q k -> (b h) q k")


def from_torch_sdpa(attn_mask: Any) -> Mask:
    """A boolean attn_mask of torch's scaled_dot_product_attention, True = may attend.

    [q, k], [h, q, k] or [..., h, q, k], read from the right as SDPA broadcasts it; an h, q or k
    axis of size 1 holds for all. TypeError: not boolean (SDPA adds float masks to the logits:
    `from_additive`, or `bias=`). ValueError: fewer than 2 axes.

    >>> from jaxattn import masks
    >>> masks.from_torch_sdpa([[[[True, False]]]])
    explicit(k: 2)
    """
    visible = boolean(attn_mask, "from_torch_sdpa(attn_mask)")
    if visible.ndim < 2:
        raise ValueError(
            f"from_torch_sdpa(attn_mask) has shape {visible.shape}, expected [..., h, q, k] or "
            "[q, k]; for rows that are real use padding(valid)"
        )
    return _broadcast_axes(visible if visible.ndim > 2 else visible[None])


def to_torch_sdpa(
    mask: Mask | None,
    q_len: int,
    k_len: int,
    *,
    q_position: Array | None = None,
    k_position: Array | None = None,
) -> Array:
    """The attn_mask of torch's scaled_dot_product_attention, True = may attend.

    bool [..., h or 1, q, k].

    >>> from jaxattn import masks
    >>> masks.to_torch_sdpa(masks.causal(), 2, 2)
    Array([[[ True, False],
            [ True,  True]]], dtype=bool)
    """
    return as_mask(mask).table(q_len, k_len, q_position, k_position)


def from_flax(mask: Any) -> Mask:
    """A Flax attention mask [..., h or 1, q, k]: boolean, or the 0/1 numbers Flax also makes.

    An h, q or k axis of size 1 holds for all. With three axes the first is h, as in Flax.
    ValueError: fewer than 3 axes; numbers other than 0 and 1 (where values are known; traced
    numbers count as visible where they are not 0, as in Flax).

    >>> from jaxattn import masks
    >>> import jax.numpy as jnp
    >>> print(masks.from_flax(jnp.array([[[1.0, 0.0], [1.0, 1.0]]])).show(2, 2))
    1 0
    1 1
    """
    array = jnp.asarray(mask)
    if array.ndim < 3:
        raise ValueError(
            f"from_flax(mask) has shape {array.shape}, expected [..., h or 1, q, k]; for fewer "
            "axes use explicit(array, axes=...) or padding(valid)"
        )
    if array.dtype != bool:
        if not isinstance(mask, Tracer) and not np.isin(np.asarray(mask), (0, 1)).all():
            raise ValueError(
                f"from_flax(mask) got {array.dtype} values other than 0 and 1: additive 0 and "
                "-inf go through ja.masks.from_additive, any other additive values through bias="
            )
        array = array != 0
    return _broadcast_axes(array)


def to_flax(
    mask: Mask | None,
    q_len: int,
    k_len: int,
    *,
    q_position: Array | None = None,
    k_position: Array | None = None,
) -> Array:
    """The mask as Flax's attention takes it: bool [..., h or 1, q, k], True = visible.

    >>> from jaxattn import masks
    >>> masks.to_flax(masks.window(1), 2, 2).shape
    (1, 2, 2)
    """
    return as_mask(mask).table(q_len, k_len, q_position, k_position)


def from_additive(array: Any, axes: str, *, hidden_at: float | None = None) -> Mask:
    """A float array added to logits to hide pairs: 0 = visible, `hidden_at` or less = hidden.

    `hidden_at` is by default half the dtype's least number, which takes in -inf and finfo.min; give
    it for other habits (-1e9, -1e4). `axes` as in `explicit`. Values are read, so call it outside
    jit. TypeError: not floating, or traced. ValueError: any other value, which belongs in `bias=`.

    >>> from jaxattn import masks
    >>> import jax.numpy as jnp
    >>> print(masks.from_additive(jnp.array([[0.0, -jnp.inf], [0.0, 0.0]]), axes="q k").show(2, 2))
    1 0
    1 1
    """
    if isinstance(array, Tracer):
        raise TypeError(
            "from_additive(array) got traced values and cannot read them: convert outside jit and "
            "pass the mask in, or add the array to the logits with bias="
        )
    values = np.asarray(array)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(
            f"from_additive(array) got {described(array)}, expected a floating array of 0 and "
            "-inf; booleans with True = visible go through ja.explicit(array, axes=...)"
        )
    limit = float(jnp.finfo(values.dtype).min) / 2 if hidden_at is None else float(hidden_at)
    if not limit < 0:
        raise ValueError(f"from_additive(hidden_at={hidden_at}) must be below 0")
    other = values[~((values == 0) | (values <= limit))]
    if other.size:
        raise ValueError(
            f"from_additive(array) got {other[0]}, expected 0 (visible) or {limit:.6g} and less "
            "(hidden): add such values to the logits with bias=, or set hidden_at="
        )
    return explicit(values == 0, axes)


def to_additive(
    mask: Mask | None,
    q_len: int,
    k_len: int,
    *,
    dtype: Any = jnp.float32,
    q_position: Array | None = None,
    k_position: Array | None = None,
) -> Array:
    """0 where visible, -inf where hidden, to add to logits: [..., h or 1, q, k] of `dtype`.

    -inf hides exactly, at any logit and precision. A softmax over a row of -inf alone is NaN: for
    code that cannot bear it, `jnp.maximum(x, jnp.finfo(dtype).min)`. Here a boolean mask is better.

    >>> from jaxattn import masks
    >>> masks.to_additive(masks.causal(), 2, 2)
    Array([[[  0., -inf],
            [  0.,   0.]]], dtype=float32)
    """
    visible = as_mask(mask).table(q_len, k_len, q_position, k_position)
    return jnp.where(visible, jnp.zeros((), dtype), jnp.full((), -jnp.inf, dtype))


def _broadcast_axes(visible: Array) -> Mask:
    """[..., h, q, k] in which an axis of size 1 holds for all: such axes are left out."""
    core = tuple(axis for axis, n in zip("hqk", visible.shape[-3:], strict=True) if n != 1)
    batch, sizes = visible.shape[:-3], [n for n in visible.shape[-3:] if n != 1]
    if batch and set(batch) == {1}:
        batch = ()
    return Explicit(visible.reshape(*batch, *sizes), core)
