"""Attentions whose heads depend on each other, behind one signature a kind, and what each should come to.

    Mixer     linear maps over heads before and after the softmax, learned or of each row's own
    Overlap   heads that read channels of their neighbours
    Basis     heads that weigh the channels of one shared query and key

What should come out is computed by loops over numpy in float64, from the equations of the papers.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import numpy as np
from jax import Array

MIXER_FEATURES = ("mask", "head_mask", "counts", "groups", "bias", "dynamic", "float64", "tracing")
Maps = tuple[Array, Array]


class MixCall(NamedTuple):
    """One call of an attention that mixes heads.

    Attributes:
        query: [b, q, hl, d]; key: [b, k, hl, d]; value: [b, k, hv, v].
        pre: [hl, hs], mixes scaled scores before the softmax; with groups [g, hl / g, hs / g].
        post: [hs, hv], mixes weights after it, likewise.
        mask: bool [b or 1, h or 1, q or 1, k], True = visible. One with heads (hs = hv) hides its pairs
            from the softmax and from the mixed weights.
        pre_bias, post_bias: [hs], [hv]; the second reaches visible pairs alone.
        query_maps, key_maps: what each row adds to `pre` and `post`: [b, q, hl, hs] and [b, q, hs, hv],
            of a key row [b, k, ...].
    """

    query: Array
    key: Array
    value: Array
    pre: Array
    post: Array
    mask: Array | None = None
    pre_bias: Array | None = None
    post_bias: Array | None = None
    query_maps: Maps | None = None
    key_maps: Maps | None = None


class Mixer(NamedTuple):
    """An attention that mixes heads; the fields that are not here are those of `Subject`.

    Attributes:
        attend: from a call to [b, q, hv, v].
        supports: of `MIXER_FEATURES`; "counts" is hl, hs and hv apart, "dynamic" maps of rows.
    """

    name: str
    attend: Callable[[MixCall], Array]
    supports: frozenset[str] = frozenset(MIXER_FEATURES)
    plain: bool = False
    version: str = ""
    least_heads: int = 1
    least_width: int = 1


class Overlap(NamedTuple):
    """An attention whose heads are widened by channels of their neighbours.

    Attributes:
        attend: `(query, key, value, overlap)`: heads [b, t, h, d], values [b, k, h, v], and the number r
            of channels from each neighbour, to [b, q, h, v + 2 r].
    """

    name: str
    attend: Callable[[Array, Array, Array, int], Array]
    supports: frozenset[str] = frozenset()
    plain: bool = False
    version: str = ""
    least_heads: int = 1
    least_width: int = 1


class BasisCall(NamedTuple):
    """One call of an attention whose heads share a query and a key.

    Attributes:
        query: [b, q, c]; key: [b, k, c]; value: [b, k, h, v].
        mixing: [h, c], by which head h weighs the channels.
        width: d, the head width of the attention that is factorised; c may be any number.
        bias: [b, k, h], each key's own content bias, scaled as the scores are.
    """

    query: Array
    key: Array
    value: Array
    mixing: Array
    width: int
    bias: Array | None = None


class Basis(NamedTuple):
    """An attention on one shared basis; `attend` goes from a call to [b, q, h, v]. Features: "bias"."""

    name: str
    attend: Callable[[BasisCall], Array]
    supports: frozenset[str] = frozenset({"bias"})
    plain: bool = False
    version: str = ""
    least_heads: int = 1
    least_width: int = 1


OPTIONAL = {
    "mask": ("mask",), "bias": ("pre_bias", "post_bias"), "dynamic": ("query_maps", "key_maps"),
}  # fmt: skip


def of_mixer(
    function: Callable[..., Array],
    *,
    layout: str = "bqhd",
    supports: tuple[str, ...] | None = None,
    name: str | None = None,
) -> Mixer:
    """A function `function(query, key, value, pre, post, mask=..., pre_bias=..., ...)` as a Mixer.

    Args:
        function: called with five arrays and, where a call needs them, with keywords named as in `MixCall`.
        layout: order of the axes of heads: b, q (time), h, d.
        supports: of `MIXER_FEATURES`; None reads mask, bias and dynamic off its keywords, assumes counts,
            float64 and tracing, and leaves out groups and masks with heads.

    Raises:
        ValueError: for a layout or a feature that is not known.

    Example:
        >>> sorted(of_mixer(lambda query, key, value, pre, post, mask=None: value).supports)
        ['counts', 'float64', 'mask', 'tracing']
    """
    if sorted(layout) != sorted("bqhd"):
        raise ValueError(f"layout: got {layout!r}, expected an order of b, q, h and d. Fix: 'bqhd', 'bhqd'.")
    if supports is None:
        takes = set(inspect.signature(function).parameters)
        has = tuple(feature for feature, names in OPTIONAL.items() if takes.issuperset(names))
        supports = (*has, "counts", "float64", "tracing")
    check_known(supports, MIXER_FEATURES)
    own = " ".join(layout)

    def attend(call: MixCall) -> Array:
        heads = (einops.rearrange(x, f"b q h d -> {own}") for x in call[:3])
        asked = {name: value for name, value in call._asdict().items() if value is not None}
        more = {name: asked[name] for names in OPTIONAL.values() for name in names if name in asked}
        return einops.rearrange(function(*heads, call.pre, call.post, **more), f"{own} -> b q h d")

    return Mixer(name or getattr(function, "__qualname__", repr(function)), attend, frozenset(supports))


def check_known(supports: tuple[str, ...], features: tuple[str, ...]) -> None:
    """Raise a ValueError for a feature that there is not."""
    for feature in supports:
        if feature not in features:
            raise ValueError(f"supports: got {feature!r}, expected some of {', '.join(features)}.")


def doubles(x: Any) -> np.ndarray:
    """As numpy has it, in float64."""
    return np.asarray(x, np.float64)


def blocks(matrix: Any) -> np.ndarray:
    """[g, i, o] as one matrix with zeros between groups; [i, o] as it is."""
    matrix = doubles(matrix)
    if matrix.ndim == 2:
        return matrix
    g, i, o = matrix.shape
    whole = np.zeros((g * i, g * o))
    for n in range(g):
        whole[n * i : n * i + i, n * o : n * o + o] = matrix[n]
    return whole


def shares(scores: np.ndarray) -> np.ndarray:
    """The softmax of one row."""
    raised = np.exp(scores - scores.max())
    return raised / raised.sum()


def mixed(call: MixCall) -> np.ndarray:
    """What a call should come to, pair by pair: [b, q, hv, v]; a row without a key is zero."""
    query, key, value = map(doubles, call[:3])
    matrices = blocks(call.pre), blocks(call.post)
    biases = tuple(0.0 if x is None else doubles(x) for x in (call.pre_bias, call.post_bias))
    (b, q, _, d), k = query.shape, key.shape[1]
    seen = np.ones((b, 1, q, k), bool) if call.mask is None else np.asarray(call.mask)
    seen = np.broadcast_to(seen, (b, seen.shape[1], q, k))

    def mix(site: int, x: np.ndarray, n: int, row: int) -> np.ndarray:
        out = np.zeros((k, matrices[site].shape[1]))
        for j in range(k):
            own = matrices[site]
            own = own if call.query_maps is None else own + doubles(call.query_maps[site][n, row])
            own = own if call.key_maps is None else own + doubles(call.key_maps[site][n, j])
            out[j] = x[j] @ own + biases[site]
        return out

    out = np.zeros((b, q, *value.shape[2:]))
    for n, row in np.ndindex(b, q):
        scores = np.einsum("hd,khd->kh", query[n, row], key[n]) / np.sqrt(d)
        logits = mix(0, scores, n, row)
        weights = np.zeros_like(logits)
        for h in range(logits.shape[1]):
            shown = np.flatnonzero(seen[n, h % seen.shape[1], row])
            if shown.size:
                weights[shown, h] = shares(logits[shown, h])
        weights = mix(1, weights, n, row)
        for h in range(value.shape[2]):
            out[n, row, h] = np.where(seen[n, h % seen.shape[1], row], weights[:, h], 0) @ value[n, :, h]
    return out


def widened(heads: Any, overlap: int) -> np.ndarray:
    """Head i with the packed channels i d - r .. (i + 1) d + r; zeros beyond both ends."""
    heads = doubles(heads)
    b, t, h, d = heads.shape
    out = np.zeros((b, t, h, d + 2 * overlap))
    for i, c in np.ndindex(h, d + 2 * overlap):
        source = i * d - overlap + c
        if 0 <= source < h * d:
            out[:, :, i, c] = heads[:, :, source // d, source % d]
    return out
