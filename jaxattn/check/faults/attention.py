"""Wrong attentions of given heads. `right` is what they are made of; a fault replaces one of its steps."""

import functools
from collections.abc import Callable
from typing import Any

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.check.faults.fault import Fault
from jaxattn.check.subject import of_function

Heads = Callable[..., Array]


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
    return jnp.where(seen.any(-2)[..., None], x, 0)


def values(weights: Array, value: Array) -> Array:
    return jnp.einsum("bhqk,bhkv->bhqv", weights.astype(value.dtype), value)


def biased(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


STEPS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (split, merge, repeat, scale, scores, biased, visible, softmax, clean, values)
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
    s = {**STEPS, **steps}
    q, k, v = (s["split"](x) for x in (query, key, value))
    k, v = (s["repeat"](x, q.shape[1]) for x in (k, v))
    seen = s["visible"]((*q.shape[:3], k.shape[2]), mask, is_causal)
    k, v = s["clean"](k, seen), s["clean"](v, seen)
    logits = s["biased"](s["scores"](s["scale"](q), k), bias)
    return s["merge"](s["values"](s["softmax"](logits, seen), v))


def _with(says: str, source: str, law: str, **steps: Callable[..., Any]) -> Fault:
    """`right` with some of its steps replaced."""
    return _of(says, source, law, functools.partial(right, **steps))


def _of(says: str, source: str, law: str, attention: Heads) -> Fault:
    return Fault(says, source, law, of_function(attention, name="planted"))


def _views(x: Array) -> Array:
    """Heads by a view, without moving the axis."""
    b, t, h, d = x.shape
    return x.reshape(b, h, t, d)


def _unviews(x: Array) -> Array:
    b, h, t, d = x.shape
    return x.reshape(b, t, h, d)


def _trailing(shape: tuple[int, ...], mask: Array | None, causal: bool) -> Array:
    """A mask [b, 1, 1, k] whose examples were taken for rows."""
    if mask is not None and mask.shape[1:3] == (1, 1) and mask.shape[0] == shape[-2]:
        mask = mask[None, None, :, 0, 0]
    return visible(shape, mask, causal)


def _mean_if_empty(x: Array, seen: Array) -> Array:
    return jax.nn.softmax(jnp.where(seen, x, jnp.finfo(x.dtype).min), -1)


def _shared_dead(x: Array, seen: Array) -> Array:
    return jax.nn.softmax(jnp.where(seen, x, -jnp.inf), -1)


def _times_mask(x: Array, seen: Array) -> Array:
    return softmax(x, jnp.ones_like(seen)) * seen


def _added(x: Array, seen: Array) -> Array:
    return jax.nn.softmax(x + jnp.where(seen, 0, -1e4).astype(x.dtype), -1)


def _no_shift(x: Array, seen: Array) -> Array:
    raised = jnp.where(seen, jnp.exp(x), 0)
    total = raised.sum(-1, keepdims=True)
    return raised / jnp.where(total == 0, 1, total)


def _in_its_type(x: Array, seen: Array) -> Array:
    narrow = jnp.where(seen, jnp.exp(x - x.max(-1, keepdims=True)), 0).astype(jnp.bfloat16)
    total = functools.reduce(jnp.add, jnp.split(narrow, narrow.shape[-1], -1))
    return (narrow / jnp.where(total == 0, 1, total)).astype(x.dtype)


def _wrong_derivative(query: Array, key: Array, value: Array, **more: Any) -> Array:
    """Right values, and a reverse pass of its own that forgets the scale."""

    @jax.custom_jvp
    def same(x):
        return x

    same.defjvp(lambda x, t: (x[0], 2 * t[0]))
    return right(same(query), key, value, **more)


def _detached(query: Array, key: Array, value: Array, **more: Any) -> Array:
    return right(query, jax.lax.stop_gradient(key), value, **more)


def _mixes_examples(query: Array, key: Array, value: Array, **more: Any) -> Array:
    return right(query, key, jnp.roll(value, 1, 0), **more)


def _leaks_mean(query: Array, key: Array, value: Array, **more: Any) -> Array:
    """Rows are centred over time before attention: the future is in every row."""
    return right(query, key, value - value.mean(1, keepdims=True), **more)


def _own_length(query: Array, key: Array, value: Array, **more: Any) -> Array:
    """K and V are cut to as many rows as there are queries."""
    n = query.shape[1]
    mask = more.pop("mask", None)
    mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :n]
    bias = more.pop("bias", None)
    return right(
        query, key[:, :n], value[:, :n], mask=mask, bias=None if bias is None else bias[..., :n], **more
    )


FAULTS: dict[str, Fault] = {
    "heads by a view": _with(
        "split without moving the head axis", "M3.2 0x0E; PUB-19", "heads-in-order", split=_views
    ),
    "merge by a view": _with(
        "heads merged without moving them back", "M3.2 0x0E", "heads-in-order", merge=_unviews
    ),
    "both by a view": _with(
        "split and merge by views: each undoes the other, and heads are chunks of time",
        "M3.2 0x0E",
        "values",
        split=_views,
        merge=_unviews,
    ),
    "heads reversed": _with(
        "heads merged in the other order", "M3.2 0x0E", "heads-in-order", merge=lambda x: merge(x[:, ::-1])
    ),
    "channels reversed": _with(
        "channels of a head in another order in Q than in K",
        "M3.2 0x01A",
        "values",
        scale=lambda q: scale(q[..., ::-1]),
    ),
    "no scale": _with("scores are not scaled", "PUB-10", "values", scale=lambda q: q),
    "scale by d": _with("1/d in place of 1/sqrt(d)", "PUB-10", "values", scale=lambda q: q / q.shape[-1]),
    "scale by the model": _with(
        "the model width in place of the head's",
        "PUB-10",
        "values",
        scale=lambda q: q * (q.shape[1] * q.shape[-1]) ** -0.5,
    ),
    "scaled twice": _with(
        "query and scores are both scaled", "PUB-10", "values", scale=lambda q: scale(scale(q))
    ),
    "softmax over queries": _with(
        "weights add up to one over the queries",
        "M3.2",
        "softmax-over-keys",
        softmax=lambda x, seen: softmax(x.swapaxes(2, 3), seen.swapaxes(2, 3)).swapaxes(2, 3),
    ),
    "softmax over heads": _with(
        "weights add up to one over the heads",
        "M3.2",
        "softmax-over-keys",
        softmax=lambda x, seen: jnp.where(seen, jax.nn.softmax(x, 1), 0),
    ),
    "sigmoid": _with(
        "each weight by itself",
        "M3.2",
        "softmax-over-keys",
        softmax=lambda x, seen: jnp.where(seen, jax.nn.sigmoid(x), 0),
    ),
    "True hides": _with(
        "the mask's other polarity",
        "PUB-01",
        "mask-polarity",
        visible=lambda shape, mask, causal: visible(shape, None if mask is None else ~mask, causal),
    ),
    "mask ignored": _with(
        "the mask is dropped on the way",
        "PUB-01",
        "mask-polarity",
        visible=lambda shape, mask, causal: visible(shape, None, causal),
    ),
    "mask of the first head": _with(
        "a mask of heads is cut to its first",
        "PUB-03",
        "mask-broadcast",
        visible=lambda shape, mask, causal: visible(shape, None if mask is None else mask[:, :1], causal),
    ),
    "examples taken for rows": _with(
        "a padding mask spread over the wrong axis", "PUB-03; M3.2 0x0E", "mask-broadcast", visible=_trailing
    ),
    "mask turned": _with(
        "rows and keys of the mask are swapped where it is square",
        "M3.2 0x0E",
        "mask-broadcast",
        visible=lambda shape, mask, causal: visible(
            shape, mask if mask is None or mask.shape[2] != mask.shape[3] else mask.swapaxes(2, 3), causal
        ),
    ),
    "weights times mask": _with(
        "hidden weights are zeroed and the rest not made one again",
        "M3.2",
        "mask-polarity",
        softmax=_times_mask,
    ),
    "mask adds -1e4": _with(
        "hidden scores are lowered by a number that large scores beat",
        "PUB-06",
        "empty-row-value",
        softmax=_added,
    ),
    "fill by the least number": _with(
        "a row without keys becomes the mean of all values",
        "PUB-04",
        "empty-row-value",
        softmax=_mean_if_empty,
    ),
    "fill by -inf": _with(
        "a row without keys is 0/0", "PUB-04; PUB-05", "empty-row-value", softmax=_shared_dead
    ),
    "causal from the other side": _with(
        "row i sees keys from i on",
        "PUB-11",
        "causal-square",
        visible=lambda shape, mask, causal: (
            visible(shape, mask, False)
            & (tril(*shape[-2:]).swapaxes(0, 1) if causal and shape[-2] == shape[-1] else True)
        ),
    ),
    "causal and one more": _with(
        "row i sees key i + 1",
        "PUB-11",
        "causality",
        visible=lambda shape, mask, causal: (
            visible(shape, mask, False) & (jnp.tril(jnp.ones(shape[-2:], bool), 1) if causal else True)
        ),
    ),
    "causal without itself": _with(
        "row i does not see key i",
        "PUB-11",
        "causal-square",
        visible=lambda shape, mask, causal: (
            visible(shape, mask, False) & (jnp.tril(jnp.ones(shape[-2:], bool), -1) if causal else True)
        ),
    ),
    "causal drops the mask": _with(
        "a causal call forgets its mask, and another its causality",
        "PUB-11",
        "causality",
        visible=lambda shape, mask, causal: visible(shape, mask, False),
    ),
    "key heads tiled": _with(
        "query head h reads key head h mod g",
        "PUB-17",
        "gqa-order",
        repeat=lambda x, heads: einops.repeat(x, "b g k d -> b (n g) k d", n=heads // x.shape[1]),
    ),
    "first key head for all": _with(
        "grouped heads all read the first key head",
        "M3.2 0x0E; PUB-17",
        "gqa-order",
        repeat=lambda x, heads: jnp.repeat(x[:, :1], heads, 1) if x.shape[1] != heads else x,
    ),
    "value from the query's row": _with(
        "values are those of the row, not of the keys",
        "M3.2",
        "values",
        values=lambda w, v: v[:, :, : w.shape[2]] if v.shape[2] >= w.shape[2] else values(w, v),
    ),
    "weights turned": _with(
        "weights meet values by their transpose where they are square",
        "M3.2",
        "causal-square",
        values=lambda w, v: values(w.swapaxes(2, 3) if w.shape[2] == w.shape[3] else w, v),
    ),
    "values of the next head": _with(
        "weights of a head meet the values of the next",
        "M3.2 0x01A",
        "heads-in-order",
        values=lambda w, v: values(w, jnp.roll(v, 1, 1)),
    ),
    "K read as V": _of(
        "fused K and V are taken in the other order",
        "M3.2 0x01A",
        "values",
        lambda query, key, value, **more: (
            right(query, value, key, **more) if key.shape == value.shape else right(query, key, value, **more)
        ),
    ),
    "Q read as K": _of(
        "fused Q and K are taken in the other order",
        "M3.2 0x01A",
        "causal-square",
        lambda query, key, value, **more: (
            right(key, query, value, **more) if key.shape == query.shape else right(query, key, value, **more)
        ),
    ),
    "V of another example": _of("K and V come from two sources", "M3.2 0x01A", "values", _mixes_examples),
    "K cut to the queries": _of("the rows of Q give the rows of K", "M3.2 0x0E", "values", _own_length),
    "no maximum": _with("exp without the row's maximum", "PUB-06", "large-scores", softmax=_no_shift),
    "sums of half precision": _with(
        "the sum of a row in bfloat16", "PUB-07", "half-precision-sums", softmax=_in_its_type
    ),
    "float32 within float64": _with(
        "the softmax in float32 whatever comes in",
        "PUB-07",
        "float64-throughout",
        softmax=lambda x, seen: softmax(x.astype(jnp.float32), seen).astype(x.dtype),
    ),
    "bias before the scale": _with(
        "the bias is scaled as the scores are",
        "M3.2 0x0E",
        "bias-added",
        biased=lambda x, bias: x if bias is None else x + bias / 2,
    ),
    "bias after the softmax": _with(
        "the bias is dropped", "M3.2 0x0E", "bias-added", biased=lambda x, bias: x
    ),
    "hidden NaN": _with(
        "0 times NaN in a hidden value", "PUB-05", "hidden-nan-value", clean=lambda x, seen: x
    ),
    "a leak by the mean": _of("values are centred over time", "M3.2", "causality", _leaks_mean),
    "a derivative without the scale": _of(
        "right values, a reverse pass that is twice too large",
        "second article",
        "finite-differences",
        _wrong_derivative,
    ),
    "K is detached": _of(
        "no gradient reaches the keys", "second article; PUB-14", "finite-differences", _detached
    ),
}
