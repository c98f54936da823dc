"""What a wrong stage looks like: the usual mistakes at it, computed from the same input."""

from collections.abc import Iterator

import numpy as np

from jaxattn.check.tracing import formulas
from jaxattn.check.tracing.stages import Found


def lookalikes(
    found: Found, arrays: dict[str, np.ndarray], scale: float, visible: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Mistakes in words, each with the array that it would give."""
    made = {"scores": _scores, "weights": _weights, "heads": _heads, "merged": _merged}.get(found.name)
    return iter(()) if made is None else made(found, arrays, scale, visible)


def _tiles(heads: int, sources: int) -> tuple[int, ...]:
    return tuple(h % sources for h in range(heads))


def _scores(found: Found, arrays, scale: float, visible: np.ndarray):
    assert found.want is not None
    query, key = arrays["Q"], arrays["K"]
    heads, sources = query.shape[-2], key.shape[-2]
    yield "the same without the scale", found.want / scale
    yield "scaled twice", found.want * scale
    yield "scaled by 1/sqrt(h * d), the model width", found.want / scale / (heads * query.shape[-1]) ** 0.5
    if heads != sources:
        tiled = formulas.scores(query, key, scale, _tiles(heads, sources))
        yield "head h with key head h % hK (tile order)", tiled
        yield "every head with key head 0", formulas.scores(query, key, scale, (0,) * heads)


def _weights(found: Found, arrays, scale: float, visible: np.ndarray):
    masked = arrays["masked scores"]
    yield "the softmax over queries", formulas.softmax(masked, -2)
    yield "the softmax over heads", formulas.softmax(masked, -3)
    open_ = formulas.softmax(arrays["mixed scores"])
    yield "the softmax of what is not masked", open_
    yield "the softmax of what is not masked, zeroed afterwards", np.where(np.isneginf(masked), 0, open_)


def _heads(found: Found, arrays, scale: float, visible: np.ndarray):
    weights, value = arrays["mixed weights"], arrays["V"]
    heads, sources = weights.shape[-3], value.shape[-2]
    yield (
        "head h with value head h % hV (tile order)",
        formulas.combine(weights, value, _tiles(heads, sources)),
    )
    if heads == sources:
        following = tuple((h + 1) % heads for h in range(heads))
        yield "head h with value head h + 1", formulas.combine(weights, value, following)
    for what, seen in (("the mask in the other polarity", ~visible), ("no mask", np.ones_like(visible))):
        other = formulas.softmax(formulas.hide(arrays["mixed scores"], seen))
        yield f"what comes of {what}", formulas.combine(other, value)
    if weights.shape[-1] == weights.shape[-2]:
        yield "weights by their transpose", formulas.combine(np.swapaxes(weights, -1, -2), value)


def _merged(found: Found, arrays, scale: float, visible: np.ndarray):
    heads = arrays["heads"]
    yield "channels first, head h at v*hv + h", formulas.merge(np.swapaxes(heads, -1, -2))
    turned = np.swapaxes(heads, -2, -3)
    yield "a reshape of [h, q, v] without a transpose", turned.reshape(*heads.shape[:-2], -1)
