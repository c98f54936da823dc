"""Wrong attentions of given heads. `right` is what they are made of; a fault replaces one of its steps."""

from typing import Any

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.check.faults import masks
from jaxattn.check.faults.fault import Fault
from jaxattn.check.faults.right import (
    Example,
    biased,
    kept,
    planted,
    right,
    scale,
    scores,
    softmax,
    values,
    visible,
)
from jaxattn.check.faults.right import split as split
from jaxattn.check.faults.right import tril as tril

SQUARE, GROUPED, BIASED, NARROW = Example(k=5), Example(h=6), Example(bias=True), Example(v=11)


def _views(x: Array) -> Array:
    """Heads by a view, without moving the axis."""
    b, t, h, d = x.shape
    return x.reshape(b, h, t, d)


def _unviews(x: Array) -> Array:
    b, h, t, d = x.shape
    return x.reshape(b, t, h, d)


def _over_heads(query: Array, key: Array, value: Array, **more: Any) -> Array:
    """Heads and rows are not exchanged, wherever as many rows ask as answer."""
    steps: dict[str, Any] = dict(split=kept, merge=kept) if query.shape == key.shape else {}
    return right(query, key, value, **more, **steps)


def _heads_for_keys(query: Array, key: Array) -> Array:
    """k.transpose(1, 2), where it fits."""
    return scores(query, key.swapaxes(1, 2) if key.shape[1] == key.shape[2] else key)


def _doubled(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """The query as it is, with a derivative twice as large."""

    @jax.custom_jvp
    def same(x):
        return x

    same.defjvp(lambda x, t: (x[0], 2 * t[0]))
    return same(query), key, value


def _cut(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    n = query.shape[1]
    return query, key[:, :n], value[:, :n]


def _seen_by_cut(shape: tuple[int, ...], mask: Array | None, causal: bool) -> Array:
    return visible(shape, mask if mask is None or mask.shape[-1] == 1 else mask[..., : shape[-1]], causal)


FAULTS: dict[str, Fault] = {
    "heads by a view": planted(
        "split without moving the head axis",
        "M3.2 0x0E; PUB-19; second article",
        "heads-in-order",
        "head round trip",
        split=_views,
    ),
    "merge by a view": planted(
        "heads merged without moving them back: concatenated along the sequence",
        "M3.2 0x08A; PUB-19",
        "heads-in-order",
        "head round trip",
        merge=_unviews,
    ),
    "both by a view": planted(
        "split and merge by views: each undoes the other, and heads are chunks of time",
        "M3.2 0x0E",
        "values",
        "head round trip",
        split=_views,
        merge=_unviews,
    ),
    "attention over heads": planted(
        "split and merge leave out their transposes: the heads of a row attend to one another",
        "M3.2 0x0E; second article",
        "causal-square",
        "head round trip",
        SQUARE,
        attention=_over_heads,
        split=kept,
        merge=kept,
    ),
    "heads for keys": planted(
        "k.transpose(1, 2) before the product, where there are as many keys as heads",
        "second article",
        "mask-broadcast",
        "scores",
        Example(k=3),
        scores=_heads_for_keys,
    ),
    "no scale": planted(
        "scores are not scaled", "PUB-10; second article", "scale", "scores", scale=lambda q: q
    ),
    "scaled twice": planted(
        "1/d in place of 1/sqrt(d)", "PUB-10", "scale", "scores", scale=lambda q: scale(scale(q))
    ),
    "scale by the model": planted(
        "the model width in place of the head's",
        "PUB-10",
        "scale",
        "scores",
        scale=lambda q: q * (q.shape[1] * q.shape[-1]) ** -0.5,
    ),
    "softmax over queries": planted(
        "weights add up to one over the queries",
        "second article",
        "softmax-over-keys",
        "weights",
        softmax=lambda x, seen: softmax(x.swapaxes(2, 3), seen.swapaxes(2, 3)).swapaxes(2, 3),
    ),
    "key heads tiled": planted(
        "query head h reads key head h mod g",
        "PUB-17",
        "gqa-order",
        "scores",
        GROUPED,
        repeat=lambda x, heads: einops.repeat(x, "b g k d -> b (n g) k d", n=heads // x.shape[1]),
    ),
    "first key head for all": planted(
        "grouped heads all read the first key head",
        "M3.2 0x0E; PUB-17",
        "gqa-order",
        "scores",
        GROUPED,
        repeat=lambda x, heads: jnp.repeat(x[:, :1], heads, 1) if x.shape[1] != heads else x,
    ),
    "weights turned": planted(
        "weights meet values by their transpose where they are square",
        "second article",
        "causal-square",
        "heads",
        SQUARE,
        values=lambda w, v: values(w.swapaxes(2, 3) if w.shape[2] == w.shape[3] else w, v),
    ),
    "K cut to the queries": planted(
        "the rows of Q give the rows of K and V",
        "M3.2 0x0E",
        "values",
        "K",
        sides=_cut,
        visible=_seen_by_cut,
        biased=lambda x, bias: biased(x, None if bias is None else bias[..., : x.shape[-1]]),
    ),
    "bias before the scale": planted(
        "the bias is scaled as the scores are",
        "M3.2 0x0E",
        "bias-added",
        "mixed scores",
        BIASED,
        biased=lambda x, bias: x if bias is None else x + bias / 2,
    ),
    "a derivative without the scale": planted(
        "right values, a reverse pass that is twice too large",
        "second article",
        "finite-differences",
        "",
        why="derivatives are no stage",
        sides=_doubled,
    ),
} | masks.FAULTS
