"""Wrong readings of a call: dropout and its mode, the kind of a mask, one example, the layout, causality."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.faults.fault import Fault
from jaxattn.check.faults.right import (
    Example,
    call_of,
    kept,
    merge,
    planted,
    right,
    softmax,
    split,
    stages_of,
    tril,
    values,
    visible,
)
from jaxattn.check.subjects.attention import FEATURES, Call, Subject, states
from jaxattn.check.tracing.stages import Stages
from jaxattn.check.tracing.trace import trace_of
from jaxattn.check.tracing.traced import Trace
from jaxattn.check.verdict import enable_x64

Drop = Callable[[Array, float, Array | None], Array]
RATE = 0.25  # of the calls that are traced


def dropped(weights: Array, rate: float, key: Array | None) -> Array:
    """Each weight [b, h, q, k] kept with probability 1 - rate, and then divided by it; all without a key."""
    if key is None:
        return weights
    return jnp.where(jax.random.bernoulli(key, 1 - rate, weights.shape), weights / (1 - rate), 0)


def with_dropout(call: Call, *, drop: Drop = dropped) -> Array:
    """`right` with dropout of its weights."""
    rate, key = call.dropout or (0.0, None)
    some = {} if call.dropout is None else {"values": lambda w, v: values(drop(w, rate, key), v)}
    return right(*call[:3], mask=call.mask, is_causal=call.causal, bias=call.bias, **some)


def subject_of(drop: Drop = dropped, name: str = "planted") -> Subject:
    """`with_dropout`, or with another way to drop, as a subject."""
    return Subject(name, functools.partial(with_dropout, drop=drop), frozenset(FEATURES))


RIGHT = subject_of(name="right with dropout")


def traced_dropout(drop: Drop, training: bool) -> Trace:
    """The trace of one call with dropout, beside the right weights of the same key."""
    with enable_x64(True):
        key = jax.random.key(1) if training else None
        example = Example()
        call = call_of(example)
        x_q, x_k, x_v = (states(x) for x in call[:3])
        mix = lambda drop: lambda weights: drop(jnp.asarray(weights), RATE, key)
        right_mix = lambda weights: np.asarray(mix(dropped)(weights))
        return trace_of(
            stages_of(call)._replace(mix_weights=mix(drop)), x_q, (x_k, x_v), heads=example.h, d=example.d,
            residual=False,
            expected=Stages(project_q=kept, project_k=kept, project_v=kept, mix_weights=right_mix),
        )  # fmt: skip


def _dropping(says: str, source: str, law: str, drop: Drop, training: bool = True) -> Fault:
    """`with_dropout` with another way to drop; a call in training shows it, or one in evaluation."""
    shown = functools.partial(traced_dropout, drop, training)
    return Fault(says, source, law, subject_of(drop), "mixed weights", shown)


def _always(weights: Array, rate: float, key: Array | None) -> Array:
    return dropped(weights, rate, jax.random.key(0) if key is None else key)


def _times(factor: Callable[[float], float]) -> Drop:
    """Another factor of what is kept."""
    return lambda weights, rate, key: dropped(weights, rate, key) * (1 if key is None else factor(rate))


def _shared(*axes: int) -> Drop:
    """One draw along some of the axes b, h, q, k."""

    def drop(weights: Array, rate: float, key: Array | None) -> Array:
        if key is None:
            return weights
        shape = [1 if axis in axes else size for axis, size in enumerate(weights.shape)]
        return weights * dropped(jnp.ones(shape, weights.dtype), rate, key)

    return drop


def _own_key(weights: Array, rate: float, key: Array | None) -> Array:
    return dropped(weights, rate, None if key is None else jax.random.key(0))


def _host() -> Drop:
    """Draws of a generator outside of JAX, which goes on whenever a pass is computed again."""
    rng = np.random.default_rng(0)

    def drop(weights: Array, rate: float, key: Array | None) -> Array:
        if key is None:
            return weights
        shape = jax.ShapeDtypeStruct(weights.shape, jnp.dtype(bool))
        keep = jax.pure_callback(lambda _: rng.random(weights.shape) >= rate, shape, weights)
        return jnp.where(keep, weights / (1 - rate), 0)

    return drop


def _guessed(
    query: Array, key: Array, value: Array, *, mask: Any = None, bias: Any = None, **more: Any
) -> Array:
    """Whatever is not boolean is taken for a bias."""
    if mask is not None and mask.dtype != bool:
        mask, bias = None, mask if bias is None else mask + bias
    return right(query, key, value, mask=mask, bias=bias, **more)


TIME_FIRST: dict[str, Any] = dict(
    split=lambda x: split(x.swapaxes(0, 1)),
    merge=lambda x: merge(x).swapaxes(0, 1),
)


def _time_first(query: Array, key: Array, value: Array, **more: Any) -> Array:
    """[b, t, h, d] read as [t, b, h, d], where nothing else of the call says which is which."""
    alone = query.shape[1] == key.shape[1] and more.get("mask") is None and more.get("bias") is None
    return right(query, key, value, **more, **TIME_FIRST) if alone else right(query, key, value, **more)


def _skips_one(shape: tuple[int, ...], mask: Array | None, causal: bool) -> Array:
    return visible(shape, None if shape[0] == 1 else mask, causal)


def _causal_squares(shape: tuple[int, ...], mask: Array | None, causal: bool) -> Array:
    """The triangle of another call, wherever it fits."""
    return visible(shape, mask, causal or (mask is None and shape[-2] == shape[-1]))


def _drops_mask(shape: tuple[int, ...], mask: Array | None, causal: bool) -> Array:
    return visible(shape, None if causal else mask, causal)


def _both_ends(shape: tuple[int, ...], mask: Array | None, causal: bool) -> Array:
    """One row is taken for the last, several for the first."""
    seen = visible(shape, mask, False)
    return seen & tril(*shape[-2:]) if causal and shape[-2] > 1 else seen


def _scale_of_values(query: Array, key: Array, value: Array, **more: Any) -> Array:
    return right(query, key, value, **more, scale=lambda q: q * value.shape[-1] ** -0.5)


FAULTS: dict[str, Fault] = {
    "dropout in evaluation": _dropping(
        "weights are dropped whatever the mode is",
        "second article; PUB-15",
        "dropout-in-evaluation",
        _always,
        training=False,
    ),
    "dropout times its rate": _dropping(
        "what is kept is multiplied by the rate",
        "PUB-16",
        "dropout-mean",
        _times(lambda rate: rate * (1 - rate)),
    ),
    "dropout not rescaled": _dropping(
        "what is kept stays as it was", "PUB-16", "dropout-mean", _times(lambda rate: 1 - rate)
    ),
    "one dropout mask for the batch": _dropping(
        "examples and heads lose the same weights", "PUB-16", "dropout-by-row", _shared(0, 1)
    ),
    "one dropout mask for all rows": _dropping(
        "query rows lose the same keys", "PUB-16", "dropout-by-row", _shared(2)
    ),
    "dropout by a key of its own": _dropping(
        "the key that is given draws nothing", "PUB-16", "dropout-by-key", _own_key
    ),
    "dropout drawn again": Fault(
        "a pass that is computed again for its derivative draws another mask",
        "PUB-30",
        "dropout-under-remat",
        subject_of(_host()),
        why="derivatives are no stage",
    ),
    "mask kind guessed": planted(
        "a mask of 0 and 1 that is not boolean is added to the scores",
        "PUB-02",
        "integer-mask",
        "masked scores",
        Example(mask="b q k"),
        attention=_guessed,
        hide=lambda x, seen: x + seen,
        softmax=lambda x, seen: softmax(x, jnp.ones_like(seen)),
    ),
    "mask skipped for one example": planted(
        "a batch of one is not masked",
        "PUB-08",
        "batch-of-one",
        "masked scores",
        Example(b=1, mask="b k"),
        visible=_skips_one,
    ),
    "time read as the batch": planted(
        "[b, t] is read as [t, b], and examples attend to each other",
        "second article",
        "batch-independence",
        "head round trip",
        Example(b=5, k=5),
        attention=_time_first,
        **TIME_FIRST,
    ),
    "causal where it fits": planted(
        "the causal mask of another call is used wherever q = k",
        "M3.2 0x0AA",
        "open-square",
        "masked scores",
        Example(k=5),
        visible=_causal_squares,
    ),
    "causal drops the mask": planted(
        "a causal call forgets its mask",
        "PUB-12",
        "mask-and-causal",
        "masked scores",
        Example(k=5, mask="b q k", causal=True),
        visible=_drops_mask,
    ),
    "causal from both ends": planted(
        "one row alone sees all keys, several are aligned at the start",
        "PUB-11",
        "causal-rectangle",
        "masked scores",
        Example(q=1, causal=True),
        visible=_both_ends,
    ),
    "scale by the value width": planted(
        "sqrt of the values' width in place of the keys'",
        "PUB-10",
        "scale",
        "scores",
        attention=_scale_of_values,
        scale=lambda q: q * 13**-0.5,
    ),
}
