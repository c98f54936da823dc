"""Learned maps between states and heads, head split and merge, rotary positions, head norms."""

import operator

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.axes import at_least_float32, contract, same_rank
from jaxattn.route import collect, route, spread
from jaxattn.spec import Rotary


def project(params: dict[str, Array], x: Array) -> Array:
    """States to heads: out[t,h] = x[t] @ kernel[:,h] + bias[h].

    Args:
        params: kernel [m, h, d] and, where used, bias [h, d].
        x: [..., t, m].

    Returns:
        [..., t, h, d], in the promoted type of x and kernel; sums run in at least float32.

    Example:
        >>> project({"kernel": jnp.ones((6, 2, 3))}, jnp.ones((5, 6))).shape
        (5, 2, 3)
    """
    dtype = jnp.promote_types(x.dtype, params["kernel"].dtype)
    out = _linear(x, params["kernel"], "... t m, m h d -> ... t h d", dtype)
    return _add_bias(out, params)


def unproject(params: dict[str, Array], heads: Array) -> Array:
    """Heads to states: out[t] = sum_h heads[t,h] @ kernel[h] + bias.

    Args:
        params: kernel [h, v, m] and, where used, bias [m].
        heads: [..., t, h, v].

    Returns:
        [..., t, m].
    """
    dtype = jnp.promote_types(heads.dtype, params["kernel"].dtype)
    return _add_bias(_linear(heads, params["kernel"], "... t h v, h v m -> ... t m", dtype), params)


def project_active(params: dict[str, Array], x: Array, head: Array) -> Array:
    """States to active heads only: out[t,a] = x[t] @ kernel[:,head[t,a]] + bias[head[t,a]].

    Args:
        params: kernel [m, h, d] and, where used, bias [h, d].
        x: [..., t, m].
        head: [..., t, a] distinct indices of heads.

    Returns:
        [..., t, a, d].
    """
    kernel = einops.rearrange(params["kernel"], "m h d -> h m d")
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    rows = einops.rearrange(jnp.broadcast_to(x, (*head.shape[:-1], x.shape[-1])), "... t m -> (... t) m")
    where = route(head.reshape(-1, head.shape[-1]), kernel.shape[0])
    out = spread(rows.astype(dtype), kernel.astype(dtype), where).astype(dtype)
    out = out.reshape(*head.shape, kernel.shape[-1])
    bias = params.get("bias")
    return out if bias is None else out + bias.astype(dtype)[head]


def unproject_active(params: dict[str, Array], heads: Array, head: Array) -> Array:
    """Active heads to states: out[t] = sum_a heads[t,a] @ kernel[head[t,a]] + bias.

    Args:
        params: kernel [h, v, m] and, where used, bias [m].
        heads: [..., t, a, v].
        head: [..., t, a] distinct indices of heads.

    Returns:
        [..., t, m].
    """
    kernel = params["kernel"]
    dtype = jnp.promote_types(heads.dtype, kernel.dtype)
    pairs = heads.reshape(-1, *heads.shape[-2:]).astype(dtype)
    where = route(jnp.broadcast_to(head, heads.shape[:-1]).reshape(-1, head.shape[-1]), kernel.shape[0])
    out = collect(pairs, kernel.astype(dtype), where).astype(dtype)
    return _add_bias(out.reshape(*heads.shape[:-2], kernel.shape[-1]), params)


def _add_bias(out: Array, params: dict[str, Array]) -> Array:
    """`out` plus the bias, whose axes are the last of `out`; without one, `out`."""
    bias = params.get("bias")
    return out if bias is None else operator.add(*same_rank(out, bias.astype(out.dtype)))


def _linear(x: Array, kernel: Array, pattern: str, dtype) -> Array:
    sums = at_least_float32(dtype)
    return contract(x.astype(dtype), kernel.astype(dtype), pattern, dtype=sums).astype(dtype)


def split_heads(packed: Array, heads: int) -> Array:
    """Packed channels to heads, [..., t, (h d)] -> [..., t, h, d]; head h owns channels h*d to h*d+d.

    Raises:
        ValueError: when the packed width does not divide by the heads.

    Example:
        >>> split_heads(jnp.arange(6).reshape(1, 6), heads=2).tolist()
        [[[0, 1, 2], [3, 4, 5]]]
    """
    if packed.shape[-1] % heads:
        raise ValueError(
            f"split_heads: packed width (h d) = {packed.shape[-1]} does not divide by heads = {heads}. "
            "Fix: a width that is heads times the head width."
        )
    return einops.rearrange(packed, "... t (h d) -> ... t h d", h=heads)


def merge_heads(heads: Array) -> Array:
    """Heads to packed channels, [..., t, h, d] -> [..., t, (h d)]: the inverse of `split_heads`."""
    return einops.rearrange(heads, "... t h d -> ... t (h d)")


def rotate(heads: Array, rotary: Rotary | None, position: Array | None, block: int) -> Array:
    """Turn the channel pairs of every head by its row's position.

    Args:
        heads: [..., t, h, w], where w is one or several blocks of channels.
        rotary: which pairs, which frequencies; None returns `heads`.
        position: [..., t] integers; None is 0, 1, 2, ...
        block: head width d; a wider head is turned block by block.

    Returns:
        [..., t, h, w]; angles are computed in at least float32.

    Example:
        >>> x = jnp.ones((3, 1, 4))
        >>> bool(jnp.allclose(rotate(x, Rotary(), None, 4)[0], x[0]))
        True

    Source: Su et al., RoFormer, 2021, section 3.4.2.
    """
    if rotary is None:
        return heads
    dtype = at_least_float32(heads.dtype)
    if position is None:
        position = jnp.arange(heads.shape[-3])
    width = block if rotary.width is None else rotary.width
    frequency = rotary.base ** (-jnp.arange(0, width, 2, dtype=dtype) / width)
    position = einops.rearrange(jnp.asarray(position).astype(dtype), "... t -> ... t 1 1 1")
    blocks = einops.rearrange(heads, "... t h (n d) -> ... t h n d", d=block).astype(dtype)
    turned, rest = blocks[..., :width], blocks[..., width:]
    pairs = {"half": "... (two j) -> two ... j", "adjacent": "... (j two) -> two ... j"}[rotary.pairs]
    a, b = einops.rearrange(turned, pairs, two=2)
    _, position, frequency = same_rank(a, position, frequency)
    angle = position * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos])
    back = " -> ".join(reversed(pairs.split(" -> ")))
    out = jnp.concatenate([einops.rearrange(turned, back), rest], axis=-1)
    return einops.rearrange(out, "... t h n d -> ... t h (n d)").astype(heads.dtype)


def normalize(heads: Array, kind: str | None, scale: Array | None, eps: float = 1e-6) -> Array:
    """Normalise each head over its width: `"rms"` or `"layer"` (without a bias); None: not.

    rms: x / sqrt(mean(x^2) + eps) * scale;  layer: the same after the mean is taken away.
    """
    if kind is None or scale is None:
        return heads
    x = heads.astype(at_least_float32(heads.dtype))
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
    x, scale = same_rank(x, scale.astype(x.dtype))
    return (x * scale).astype(heads.dtype)
