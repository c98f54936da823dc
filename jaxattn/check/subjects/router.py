"""Routers of heads, anyone's: which heads count for a token, and how much, and the loss that balances them.

    [a_1, a_2] = softmax(stage);  s = softmax(shared);  p = softmax(routed)
    g = a_1 s_i for shared heads, a_2 p_i for the k largest p_i, else 0
    S = sum_i f_i P_i,  f_i the share of tokens that select i, P_i its mean probability

What should come out is computed by loops over numpy in float64.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.subjects.mixer import doubles, shares

ROUTER_FEATURES = ("stages", "loss", "layers", "padding", "share", "tracing")


class RouteCall(NamedTuple):
    """Scores of one layer's router, before any softmax.

    Attributes:
        routed: [t, hr]; shared: [t, s]; stage: [t, 2], of the shared heads and the routed ones as two sets.
        k: routed heads for each token.
        valid: [t] bool, False for padding.
    """

    routed: Array
    shared: Array
    stage: Array
    k: int
    valid: Array | None = None


def route_call(scores: Iterable[Array], k: int, valid: Array | None = None) -> RouteCall:
    """A call of scores in the order routed, shared, stage."""
    routed, shared, stage = scores
    return RouteCall(routed, shared, stage, k, valid)


class Routed(NamedTuple):
    """What a router makes of them.

    Attributes:
        gates: [t, s + hr].
        loss: the balance loss, without its weight.
        share: which share of all heads it reports as active.
    """

    gates: Array
    loss: Array | None = None
    share: float | None = None


class Router(NamedTuple):
    """A router of heads; the fields that are not here are those of `Subject`.

    Attributes:
        route: from a call to its gates, loss and share.
        total: the loss of several layers, where it supports "layers".
        renormalised: whether the selected gates are divided by their sum and add up to k (and those of
            shared heads to s, twice the stage's share each), as in released code; else they are the
            softmax values.
        supports: of `ROUTER_FEATURES`; "stages" are gates from scores of shared heads and of the stage.
    """

    name: str
    route: Callable[[RouteCall], Routed]
    total: Callable[[tuple[RouteCall, ...]], Array] | None = None
    renormalised: bool = False
    supports: frozenset[str] = frozenset(ROUTER_FEATURES)
    plain: bool = False
    version: str = ""
    least_heads: int = 1
    least_width: int = 1


def of_router(
    function: Callable[[Array, int], Array],
    *,
    loss: Callable[[Array, int, Array | None], Array] | None = None,
    renormalised: bool = False,
    name: str | None = None,
) -> Router:
    """A router of routed heads alone; the shared ones are always on.

    Args:
        function: `(scores [t, hr], k)` to gates [t, hr].
        loss: `(scores, k, valid [t] or None)` to its balance loss.
        renormalised: as in `Router`.

    Example:
        >>> sorted(of_router(lambda scores, k: scores, loss=lambda scores, k, valid: scores.sum()).supports)
        ['loss', 'padding', 'tracing']
    """

    def route(call: RouteCall) -> Routed:
        routed = function(call.routed, call.k)
        value = None if loss is None else loss(call.routed, call.k, call.valid)
        return Routed(jnp.concatenate([jnp.ones_like(call.shared, routed.dtype), routed], -1), value)

    supports = frozenset({"tracing"} | ({"loss", "padding"} if loss else set()))
    title = name or getattr(function, "__qualname__", repr(function))
    return Router(title, route, renormalised=renormalised, supports=supports)


def gates(call: RouteCall, renormalised: bool, stages: bool = True) -> np.ndarray:
    """The gates [t, s + hr]; the lowest index wins a tie. Without stages, all they say is one."""
    scores, shared, stage = map(doubles, call[:3])
    t, s = shared.shape
    out = np.zeros((t, s + scores.shape[1]))
    for n in range(t):
        a, p = shares(stage[n]), shares(scores[n])
        best = sorted(range(p.size), key=lambda i: (-scores[n, i], i))[: call.k]
        own = shares(shared[n]) if s else shared[n]
        if not stages:
            a, own = np.ones(2), np.ones(s)
        if renormalised:
            p = call.k * p / max(p[best].sum(), 1e-300)
            a, own = (2 * a, s * own) if stages else (a, own)
        out[n, :s] = a[0] * own
        for i in best:
            out[n, s + i] = a[1] * p[i]
    return out


def balance(call: RouteCall) -> float:
    """S = sum_i f_i P_i: the share of tokens that select i, times its mean probability."""
    scores = doubles(call.routed)
    counted = range(len(scores)) if call.valid is None else np.flatnonzero(np.asarray(call.valid))
    f, p = np.zeros(scores.shape[1]), np.zeros(scores.shape[1])
    for n in counted:
        p += shares(scores[n]) / len(counted)
        for i in sorted(range(f.size), key=lambda i: (-scores[n, i], i))[: call.k]:
            f[i] += 1 / len(counted)
    return float(f @ p)
