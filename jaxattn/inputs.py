"""States as a caller gives them: checked once, with hidden rows set to zero before anything is projected."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxattn.axes import check_axes, check_batch, check_boolean, check_floating
from jaxattn.masks import Frame, Mask, as_mask, padding
from jaxattn.sides import calm_rows, zero_rows
from jaxattn.spec import HeadSpec


class States(NamedTuple):
    """Both states of one call, and what belongs to their rows.

    Attributes:
        x_q: [..., q, m]; x_k, x_v: [..., k, m_k] and [..., k, m_v], hidden rows zero.
        mask: all that hides pairs, rows that are not real included.
        q_valid, k_valid: [..., t] bool, the rows that are real; None is all.
        q_positions, k_positions: [..., t], or None.
    """

    x_q: Array
    x_k: Array
    x_v: Array
    mask: Mask
    q_valid: Array | None
    k_valid: Array | None
    q_positions: Array | None
    k_positions: Array | None


def read_states(
    spec: HeadSpec,
    x_q: Array,
    x_kv: Array | tuple[Array, Array] | None,
    mask: Mask | None,
    positions: Any,
    valid: Array | None,
    softmax_heads: int,
) -> States:
    """The states of `Attention.apply`, whose arguments these are.

    A source row that is not real (`padding`, `lengths`, `valid`) is zeroed as key and, in self-attention,
    as query. A row that one array of the mask hides from every query is zeroed as key alone, and only where
    it holds values that could spread (`calm_rows`): as a query it still counts.
    """
    itself = x_kv is None
    x_q = check_state("x_q", x_q, "q", spec.in_q, "HeadSpec(in_q=...)")
    if itself and spec.in_q == spec.in_k == spec.in_v:
        x_k = x_v = x_q
    else:
        x_k, x_v = _pair(spec, x_q if itself else x_kv)
    q_positions, k_positions = positions if isinstance(positions, tuple) else (positions, None)
    if itself and not isinstance(positions, tuple):
        k_positions = positions
    _check_rows("q", x_q, positions=q_positions)
    _check_rows("k", x_k, positions=k_positions, valid=valid)
    mask = as_mask(mask) if valid is None else as_mask(mask) & padding(valid)
    k_len = x_k.shape[-2]
    frame = Frame(x_q.shape[-2], k_len, q_positions, k_positions, batch=x_k.shape[:-2])
    mask.check(frame, softmax_heads)
    real, seen = mask.source_valid(k_len), mask.seen_rows(k_len)
    q_valid = real if itself else None
    hidden = lambda x: calm_rows(zero_rows(x, real, core=2), seen, core=2)
    x_k, x_v = (hidden(x_k),) * 2 if x_v is x_k else (hidden(x_k), hidden(x_v))
    return States(zero_rows(x_q, q_valid, core=2), x_k, x_v, mask, q_valid, real, q_positions, k_positions)


def read_rows(spec: HeadSpec, axis: str, x: Array, valid: Array | None, positions: Array | None) -> Array:
    """Query states [..., q, m], with the rows zero that are not valid."""
    x = check_state(f"x_{axis}", x, axis, spec.in_q, "HeadSpec(in_q=...)")
    _check_rows(axis, x, valid=valid, positions=positions)
    return zero_rows(x, valid, core=2)


def read_pair(
    spec: HeadSpec, x_kv: Array | tuple[Array, Array], valid: Array | None, positions: Array | None
) -> tuple[Array, Array]:
    """Key and value states of the same rows, with the rows zero that are not valid."""
    x_k, x_v = _pair(spec, x_kv)
    _check_rows("k", x_k, valid=valid, positions=positions)
    shared = x_v is x_k
    x_k = zero_rows(x_k, valid, core=2)
    return x_k, x_k if shared else zero_rows(x_v, valid, core=2)


def _pair(spec: HeadSpec, x_kv: Any) -> tuple[Array, Array]:
    x_k, x_v = x_kv if isinstance(x_kv, tuple) else (x_kv, x_kv)
    shared = x_v is x_k and spec.in_k == spec.in_v
    x_k = check_state("x_k", x_k, "k", spec.in_k, "HeadSpec(in_k=...)")
    if shared:
        return x_k, x_k
    x_v = check_state("x_v", x_v, "k", spec.in_v, "HeadSpec(in_v=...)")
    check_axes("x_v", x_v, "... k m", fix="x_k and x_v are the same rows", k=x_k.shape[-2])
    check_batch(x_k=(x_k, 2), x_v=(x_v, 2))
    return x_k, x_v


def check_state(what: str, x: Array, axis: str, width: int, where: str) -> Array:
    """States [..., t, m] as an array; raises unless they are floating and of this width."""
    check_floating(what, x)
    fix = f"states of this width, or {where}"
    check_axes(what, x, f"... {axis} m", fix=fix, m=width)
    return jnp.asarray(x)


def _check_rows(axis: str, x: Array, **per_row: Array | None) -> None:
    """Raise unless what is given per row has the rows of `x`, with its batch axes or without."""
    for what, array in per_row.items():
        if array is not None and jnp.shape(array) not in (x.shape[-2:-1], x.shape[:-1]):
            raise ValueError(
                f"{what}: shape {jnp.shape(array)}, expected axes [..., {axis}] = {x.shape[:-1]}, or "
                f"[{axis}] = {x.shape[-2:-1]} for all examples. Fix: one entry for each row."
            )
        if array is not None and what == "valid":
            check_boolean(what, array)
