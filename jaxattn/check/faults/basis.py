"""Wrong heads that are widened by their neighbours' channels, and wrong heads on one shared basis.

`overlapped` and `on_basis` are what they are made of; a fault replaces one step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.faults.fault import Fault
from jaxattn.check.subjects.mixer import Basis, BasisCall, Overlap, widened
from jaxattn.check.tracing.stages import Stages
from jaxattn.check.tracing.trace import trace_of
from jaxattn.check.tracing.traced import Trace


def widen(heads: Array, overlap: int) -> Array:
    """[b, t, h, d] to d + 2 r channels: those beside a head's own in the packed row, zeros beyond it."""
    b, t, h, d = heads.shape
    packed = jnp.pad(heads.reshape(b, t, h * d), ((0, 0), (0, 0), (overlap, overlap)))
    return _windows(packed, h, d, overlap)


def _windows(packed: Array, h: int, d: int, overlap: int) -> Array:
    return jnp.stack([packed[..., i * d : (i + 1) * d + 2 * overlap] for i in range(h)], 2)


def overlapped(
    query: Array, key: Array, value: Array, overlap: int, *, widen: Any = widen, scale: Any = lambda d, r: d
) -> Array:
    """Attention of widened heads; a fault replaces the widening, or the width of the scale."""
    q, k, v = (widen(x, overlap) for x in (query, key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale(query.shape[-1], overlap) ** -0.5
    return jnp.einsum("bhqk,bkhv->bqhv", jax.nn.softmax(scores, -1), v)


def _overlap(name: str, **steps: Any) -> Overlap:
    return Overlap(name, jax.jit(functools.partial(overlapped, **steps), static_argnums=3))


def traced_overlap(widen: Any = widen, scale: Any = lambda d, r: d) -> Trace:
    """The trace of three heads of 4 channels and one from each neighbour."""
    h, d, r = 3, 4, 1
    x = np.random.default_rng(12).normal(size=(2, 5, h * d))
    heads = lambda x: x.reshape(*x.shape[:2], h, d)
    wide, want = lambda x: widen(heads(x), r), lambda x: widened(heads(x), r)
    factor = lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale(d, r) ** -0.5
    given = Stages(project_q=wide, project_k=wide, project_v=wide, scores=factor, array=jnp.asarray)
    formula = Stages(project_q=want, project_k=want, project_v=want)
    return trace_of(given, x, heads=h, d=d + 2 * r, scale=d**-0.5, residual=False, expected=formula)


def _overlapped(says: str, source: str, law: str, stage: str, **steps: Any) -> Fault:
    subject = _overlap("planted", **steps)
    return Fault(says, source, law, subject, stage, functools.partial(traced_overlap, **steps))


def _around(heads: Array, overlap: int) -> Array:
    b, t, h, d = heads.shape
    packed = heads.reshape(b, t, h * d)
    ring = jnp.concatenate([packed[..., h * d - overlap :], packed, packed[..., :overlap]], -1)
    return _windows(ring, h, d, overlap)


def _clamped(heads: Array, overlap: int) -> Array:
    """Slices of the packed row that may not leave it move inside, as `jax.lax.dynamic_slice` moves them."""
    b, t, h, d = heads.shape
    packed, wide = heads.reshape(b, t, h * d), d + 2 * overlap
    if wide > h * d:
        return widen(heads, overlap)
    return jnp.stack(
        [jax.lax.dynamic_slice_in_dim(packed, i * d - overlap if i else 0, wide, -1) for i in range(h)], 2
    )


def _swapped(heads: Array, overlap: int) -> Array:
    wide, r = widen(heads, overlap), overlap
    n = wide.shape[-1]
    return jnp.concatenate([wide[..., n - r :], wide[..., r : n - r], wide[..., :r]], -1)


def on_basis(call: BasisCall, *, scale: Callable[[BasisCall], float] = lambda call: call.width) -> Array:
    """Heads that weigh the channels of one query and one key; a fault replaces the width of the scale."""
    scores = jnp.einsum("bqc,hc,bkc->bhqk", call.query, call.mixing, call.key)
    if call.bias is not None:
        scores = scores + call.bias.swapaxes(1, 2)[:, :, None]
    return jnp.einsum("bhqk,bkhv->bqhv", jax.nn.softmax(scores * scale(call) ** -0.5, -1), call.value)


def _basis(name: str, **steps: Any) -> Basis:
    def attend(call: BasisCall) -> Array:
        arrays = {name: x for name, x in call._asdict().items() if name != "width"}
        return jax.jit(lambda given: on_basis(call._replace(**given), **steps))(arrays)

    return Basis(name, attend)


def traced_basis(scale: Callable[[BasisCall], float] = lambda call: call.width) -> Trace:
    """The trace of three heads of width 4 on a basis of 7 channels."""
    h, d, c, rng = 3, 4, 7, np.random.default_rng(13)
    x, w_q, w_k, rows = (rng.normal(size=s) for s in ((2, 5, h * d), (h * d, c), (h * d, c), (h, c)))
    call = BasisCall(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()), jnp.asarray(rows), d)
    own = lambda x: (x @ w_q)[..., None, :] * rows
    shared = lambda x: np.repeat((x @ w_k)[..., None, :], h, -2)
    scores = lambda q, k: jnp.einsum("bqhc,bkc->bhqk", q, k[:, :, 0]) * scale(call) ** -0.5
    values = lambda x: x.reshape(*x.shape[:2], h, d)
    given = Stages(project_q=own, project_k=shared, project_v=values, scores=scores)
    formula = Stages(project_q=own, project_k=shared, project_v=values)
    return trace_of(given, x, heads=h, d=c, scale=d**-0.5, residual=False, expected=formula)


def _by_heads(call: BasisCall) -> float:
    return call.mixing.shape[1] / call.mixing.shape[0]


RIGHT = (_overlap("right"), _basis("right"))

FAULTS: dict[str, Fault] = {
    "overlap around the ends": _overlapped(
        "no padding: the first head reads the last, the last reads the first", "M3.2 0x0BBA",
        "overlap-ends", "Q", widen=_around,
    ),
    "overlap inside the ends": _overlapped(
        "no padding: the slices of the first and last head move inward", "M3.2 0x0BBA",
        "overlap-ends", "Q", widen=_clamped,
    ),
    "overlap with its sides swapped": _overlapped(
        "channels of the head before lie behind, those of the head after in front", "M3.2 0x0BBA",
        "overlap-order", "Q", widen=_swapped,
    ),
    "overlap in the scale": _overlapped(
        "scores are scaled by the widened width", "M3.2 0x0BBA", "overlap-scale", "scores",
        scale=lambda d, r: d + 2 * r,
    ),
    "basis in the scale": Fault(
        "scores on a shared basis are scaled by its width over the heads, whatever was factorised",
        "M3.2 0x0BBB", "basis-scale",
        _basis("planted", scale=_by_heads), "scores",
        functools.partial(traced_basis, _by_heads),
    ),
}  # fmt: skip
