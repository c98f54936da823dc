"""The right attention of given heads, step by step; and a trace of its steps or of what replaces them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja
from jaxattn.check.faults.fault import Fault
from jaxattn.check.subjects.attention import Call, of_function, states
from jaxattn.check.tracing.stages import Stages
from jaxattn.check.tracing.trace import trace_of
from jaxattn.check.tracing.traced import Trace
from jaxattn.check.verdict import enable_x64


def kept(x: Any, *_: Any) -> Any:
    """What stands where a step is left out."""
    return x


def sides(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """What a call gives: which array is query, key and value."""
    return query, key, value


def split(x: Array) -> Array:
    """[b, t, h, d] to [b, h, t, d]."""
    return einops.rearrange(x, "b t h d -> b h t d")


def merge(x: Array) -> Array:
    """The inverse of `split`."""
    return einops.rearrange(x, "b h t d -> b t h d")


def repeat(x: Array, heads: int) -> Array:
    """[b, g, k, d] to [b, h, k, d]: each head of g serves a block of h / g."""
    return einops.repeat(x, "b g k d -> b (g n) k d", n=heads // x.shape[1])


def scale(query: Array) -> Array:
    return query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)


def scores(query: Array, key: Array) -> Array:
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=wide)


def tril(q: int, k: int) -> Array:
    return jnp.tril(jnp.ones((q, k), bool))


def visible(shape: tuple[int, ...], mask: Array | None, causal: bool) -> Array:
    seen = jnp.ones(shape, bool) if mask is None else jnp.broadcast_to(mask, shape)
    return seen & tril(*shape[-2:]) if causal else seen


def hide(x: Array, seen: Array) -> Array:
    return jnp.where(seen, x, -jnp.inf)


def softmax(x: Array, seen: Array) -> Array:
    """Over keys; a row without one gives zeros, and nothing that is hidden reaches a derivative."""
    x = jnp.where(seen, x, 0)
    top = jnp.max(x, -1, keepdims=True, initial=-jnp.inf, where=seen)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    raised = jnp.where(seen, jnp.exp(jnp.where(seen, x - top, 0)), 0)
    total = raised.sum(-1, keepdims=True)
    return raised / jnp.where(total == 0, 1, total)


def clean(x: Array, seen: Array) -> Array:
    """Rows [b, h, k, d] of a source, those that nobody sees zeroed."""
    return jnp.where(seen.any((1, 2))[:, None, :, None], x, 0)


def values(weights: Array, value: Array) -> Array:
    return jnp.einsum("bhqk,bhkv->bhqv", weights.astype(value.dtype), value)


def biased(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


STEPS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (sides, split, merge, repeat, scale, scores, biased, visible, hide, softmax, clean, values)
}


def right(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    bias: Array | None = None,
    **steps: Callable[..., Any],
) -> Array:
    """softmax(q k / sqrt(d)) v of [b, q, h, d], [b, k, g, d] and [b, k, g, v]; `steps` replaces `STEPS`."""
    s = _steps(steps)
    q, k, v = (s["split"](x) for x in s["sides"](query, key, value))
    k, v = (s["repeat"](x, q.shape[1]) for x in (k, v))
    seen = s["visible"]((*q.shape[:3], k.shape[2]), mask, is_causal)
    k, v = s["clean"](k, seen), s["clean"](v, seen)
    logits = s["biased"](s["scores"](s["scale"](q), k), bias)
    return s["merge"](s["values"](s["softmax"](s["hide"](logits, seen), seen), v))


def _steps(steps: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    if strange := steps.keys() - STEPS.keys():
        raise TypeError(f"steps: got {', '.join(sorted(strange))}. Fix: some of {', '.join(STEPS)}.")
    return STEPS | steps


class Example(NamedTuple):
    """The one call that a trace looks at: its sizes, g key heads, and what is particular in it.

    Attributes:
        mask: the axes that its mask has, "b k" say; the others have size 1. Every row sees the first key.
        dead: the first row sees no key.
        causal, bias: of the call.
        reach: a factor of the queries, and so of the scores.
        poison: the last value is NaN, and hidden.
    """

    b: int = 2
    h: int = 3
    q: int = 5
    k: int = 7
    g: int = 3
    d: int = 11
    v: int = 13
    mask: str = ""
    dead: bool = False
    causal: bool = False
    bias: bool = False
    reach: float = 1.0
    poison: bool = False


def call_of(example: Example) -> Call:
    """An example as a call, in float64."""
    b, h, q, k, g, d, v, *_ = example
    rng = np.random.default_rng(0)
    query, key, value, bias = (
        rng.normal(size=s) for s in ((b, q, h, d), (b, k, g, d), (b, k, g, v), (b, h, q, k))
    )
    shape = [
        size if axis in example.mask.split() else 1 for axis, size in zip("bhqk", (b, h, q, k), strict=True)
    ]
    mask = rng.random(shape) < 0.5
    mask[..., 0] = True
    if example.dead:
        mask[:, :, 0] = False
    if example.poison:
        value[:, -1], mask[..., -1] = np.nan, False
    return Call(
        *(jnp.asarray(x) for x in (query * example.reach, key, value)),
        mask=jnp.asarray(mask) if example.mask else None,
        causal=example.causal,
        bias=jnp.asarray(bias) if example.bias else None,
    )


def stages_of(call: Call, **steps: Callable[..., Any]) -> Stages:
    """The steps of `right` in a call as stages; without `hide`, one stage leads from scores to weights."""
    s = _steps(steps)
    given = call.query, call.key, call.value
    heads = call.query.shape[2]
    rows = s["sides"](*given)[1].shape[1]
    seen = s["visible"]((len(call.query), heads, call.query.shape[1], rows), call.mask, call.causal)

    def project(n: int) -> Callable[[Array], Array]:
        """Of the states of one side, the others being those of the call."""

        def run(x: Array) -> Array:
            own = _heads(x, given[n].shape[2])
            return states(s["sides"](*given[:n], own, *given[n + 1 :])[n])

        return run

    weigh = lambda x: s["softmax"](x, seen)
    masking: dict[str, Any] = dict(mask=lambda x, _: s["hide"](x, seen), softmax=weigh)
    return Stages(
        split=lambda x, heads: s["split"](_heads(x, heads)),
        merge=lambda x: states(s["merge"](x)),
        project_q=project(0),
        project_k=project(1),
        project_v=project(2),
        scores=lambda q, k: s["scores"](s["scale"](q), s["repeat"](k, heads)),  # what is hidden, is later
        mix_scores=None if call.bias is None else lambda x: s["biased"](x, call.bias),
        **(dict(weights=lambda x, _: weigh(x)) if s["hide"] is kept else masking),
        combine=lambda weights, v: s["values"](weights, s["clean"](s["repeat"](v, heads), seen)),
        layout="... h t d",
        array=jnp.asarray,
    )


def _heads(x: Array, heads: int) -> Array:
    return einops.rearrange(x, "b t (h d) -> b t h d", h=heads)


def traced(example: Example, **steps: Callable[..., Any]) -> Trace:
    """The trace of `right`, with `steps` in place of its own, in one call; rows without a key are meant."""
    with enable_x64(True):
        call = call_of(example)
        mask = ja.causal() if call.causal else ja.everything()
        if call.mask is not None:
            mask = mask & ja.masks.from_flax(call.mask)
        bias = call.bias
        add = None if bias is None else lambda x: x + np.asarray(bias)
        x_q, x_k, x_v = (states(x) for x in call[:3])
        return trace_of(
            stages_of(call, **steps), x_q, (x_k, x_v), mask, heads=example.h, kv_heads=example.g, d=example.d,
            residual=False, dead_rows=True,
            expected=Stages(project_q=kept, project_k=kept, project_v=kept, mix_scores=add),
        )  # fmt: skip


def planted(
    says: str,
    source: str,
    law: str,
    stage: str,
    example: Example | None = None,
    *,
    attention: Callable[..., Array] | None = None,
    why: str = "",
    **steps: Callable[..., Any],
) -> Fault:
    """`right` with some of its steps replaced; a trace of `example` shows it at `stage`.

    Args:
        attention: the wrong function, where it replaces the steps in some calls only, to keep every shape.
        why: the reason where `stage` is "".
    """
    subject = of_function(
        functools.partial(right, **steps) if attention is None else attention, name="planted"
    )
    shown = functools.partial(traced, example or Example(), **steps) if stage else None
    return Fault(says, source, law, subject, stage, shown, why)
