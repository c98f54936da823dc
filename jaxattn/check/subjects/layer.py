"""A whole sublayer behind one signature: states in, states out, with parameters that are given."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import einops
import jax.numpy as jnp
from jax import Array

from jaxattn.check.subjects.attention import KEYWORDS, Call, Dropout, Subject, keywords_of, states

Params = dict[str, dict[str, Array]]
LayerFeature = Literal[
    "mask", "head_mask", "causal", "cross", "bias", "gqa", "in_k", "in_v", "d", "d_v", "out", "dropout",
    "float64", "tracing", "weights",
]  # fmt: skip
LAYER_FEATURES: tuple[LayerFeature, ...] = (
    "mask", "head_mask", "causal", "cross", "bias", "gqa", "in_k", "in_v", "d", "d_v", "out", "dropout",
    "float64", "tracing", "weights",
)  # fmt: skip
LEAVES = ("query", "key", "value", "out")


class LayerCall(NamedTuple):
    """One call of a sublayer.

    Attributes:
        params: "query" kernel [m, h, d], "key" [m_k, g, d], "value" [m_v, g, v], "out" [h, v, m_out]; each
            with a bias, [h, d], [g, d], [g, v] and [m_out], or none of them.
        x_q: [b, q, m]; x_k: [b, k, m_k]; x_v: [b, k, m_v]. In self-attention all three are one object.
        mask: bool [b or 1, h or 1, q or 1, k], True = visible; None shows all.
        causal: row i sees rows up to i; the mask holds as well.
        dropout: of the weights, as in `Call`.
    """

    params: Params
    x_q: Array
    x_k: Array
    x_v: Array
    mask: Array | None = None
    causal: bool = False
    dropout: Dropout | None = None


class Layer(NamedTuple):
    """A sublayer to check.

    Attributes:
        name: as a verdict calls it.
        apply: from a call to [b, q, m_out].
        weights: from a call to the same output and the weights of every head, [b, h, q, k]; None where it
            gives none.
        supports: what it declares, of `LAYER_FEATURES`; "in_k": sources of another width than the queries',
            "in_v": x_v of another width than x_k, "d": h * d other than m, "d_v", "out": widths of their own.
        plain: whether it is W_O of heads of softmax(q k / sqrt(d)) v, and nothing else.
        version: of the library.
        least_heads, least_width: sizes with fewer or narrower heads are left out.
    """

    name: str
    apply: Callable[[LayerCall], Array]
    weights: Callable[[LayerCall], tuple[Array, Array]] | None = None
    supports: frozenset[str] = frozenset(LAYER_FEATURES) - {"weights", "dropout"}
    plain: bool = True
    version: str = ""
    least_heads: int = 1
    least_width: int = 1


class Widths(NamedTuple):
    """What the shapes of parameters say."""

    in_q: int
    in_k: int
    in_v: int
    h: int
    g: int
    d: int
    v: int
    out: int


def widths_of(params: Params) -> Widths:
    """The sizes of a sublayer, from its kernels.

    Example:
        >>> kernel = lambda *shape: {"kernel": jnp.ones(shape)}
        >>> shapes = dict(query=(6, 2, 3), key=(5, 1, 3), value=(5, 1, 4), out=(2, 4, 7))
        >>> widths_of({name: kernel(*shape) for name, shape in shapes.items()})
        Widths(in_q=6, in_k=5, in_v=5, h=2, g=1, d=3, v=4, out=7)
    """
    q, k, v, o = (params[name]["kernel"].shape for name in LEAVES)
    return Widths(q[0], k[0], v[0], q[1], k[1], q[2], v[2], o[2])


def asked(call: LayerCall) -> set[str]:
    """The features without which a call cannot be answered."""
    w = widths_of(call.params)
    needs = {
        "mask": call.mask is not None,
        "head_mask": call.mask is not None and call.mask.shape[1] > 1,
        "causal": call.causal,
        "cross": call.x_k is not call.x_q or call.x_v is not call.x_q,
        "bias": "bias" in call.params["out"],
        "gqa": w.g != w.h,
        "in_k": w.in_k != w.in_q,
        "in_v": w.in_v != w.in_k,
        "d": w.h * w.d != w.in_q,
        "d_v": w.v != w.d,
        "out": w.out != w.in_q,
        "dropout": call.dropout is not None,
    }
    return {name for name, needed in needs.items() if needed}


def of_layer(
    function: Callable[..., Array],
    *,
    supports: tuple[str, ...] | None = None,
    keywords: dict[str, str] | None = None,
    weights: Callable[..., tuple[Array, Array]] | None = None,
    name: str | None = None,
) -> Layer:
    """A function of states, `function(params, x_q, x_k, x_v, mask=..., is_causal=...)`.

    Args:
        function: from a tree of parameters as in `LayerCall`, and states, to [b, q, m_out].
        supports: of `LAYER_FEATURES`; None reads mask and causal off its keywords and assumes the rest.
        keywords: what it calls "mask" and "causal".
        weights: the same call, answered by (output, weights [b, h, q, k]).

    Raises:
        ValueError: for a feature that is not known.

    Example:
        >>> layer = of_layer(lambda params, x_q, x_k, x_v: x_q, supports=("cross",), name="nothing")
        >>> layer.name, sorted(layer.supports)
        ('nothing', ['cross'])
    """
    called = dict(KEYWORDS, **(keywords or {}))
    if supports is None:
        takes = keywords_of(function)
        none = {feature for feature in ("mask", "causal") if called[feature] not in takes}
        none |= {"head_mask", "dropout"} if "mask" in none else {"dropout"}
        supports = tuple(f for f in LAYER_FEATURES if f not in none)
    for feature in supports:
        if feature not in LAYER_FEATURES:
            raise ValueError(f"supports: got {feature!r}, expected some of {', '.join(LAYER_FEATURES)}.")

    def ask(answer: Callable[..., Any]) -> Callable[[LayerCall], Any]:
        def one(call: LayerCall) -> Any:
            more: dict[str, Any] = {} if call.mask is None else {called["mask"]: call.mask}
            more |= {called["causal"]: True} if call.causal else {}
            return answer(call.params, call.x_q, call.x_k, call.x_v, **more)

        return one

    title = name or getattr(function, "__qualname__", repr(function))
    given = frozenset(supports) - {"weights"} | ({"weights"} if weights else set())
    return Layer(title, ask(function), None if weights is None else ask(weights), given)


def heads_of(layer: Layer) -> Subject:
    """The attention inside a sublayer whose projections only split and merge heads: laws of heads for it.

    Example:
        >>> from jaxattn.check.adapters.layer import LAYERS
        >>> from jaxattn.check.report import run
        >>> run(heads_of(LAYERS["jaxattn"]()), laws=["values", "mask-polarity"], quick=True).passed
        True
    """

    def attend(call: Call) -> Array:
        if call.bias is not None:
            raise NotImplementedError("bias: not asked of a sublayer here.")
        heads, d = call.query.shape[2:]
        (groups, v), dtype = call.value.shape[2:], call.query.dtype
        eye = lambda h, d: jnp.eye(h * d, dtype=dtype).reshape(h * d, h, d)
        kernels = eye(heads, d), eye(groups, d), eye(groups, v), eye(heads, v).transpose(1, 2, 0)
        params = {name: {"kernel": kernel} for name, kernel in zip(LEAVES, kernels, strict=True)}
        x_q, x_k, x_v = (states(x) for x in (call.query, call.key, call.value))
        y = _checked(layer, LayerCall(params, x_q, x_k, x_v, call.mask, call.causal, call.dropout))
        return einops.rearrange(y, "b q (h v) -> b q h v", h=heads)

    has = layer.supports
    own = has & {"mask", "head_mask", "causal", "cross", "dropout", "float64", "tracing"}
    own |= {"eager"}
    own |= {"d_v"} if {"d_v", "in_v", "out"} <= has else set()
    own |= {"gqa"} if {"gqa", "in_k"} <= has else set()
    return Subject(layer.name, attend, own, layer.plain, layer.version, layer.least_heads, layer.least_width)


def _checked(layer: Layer, call: LayerCall) -> Array:
    if missing := asked(call) - layer.supports - {"cross"}:
        raise NotImplementedError(f"{', '.join(sorted(missing))}: {layer.name} declares that it cannot.")
    return layer.apply(call)
