"""Wrong routers of heads. `right_router` is what they are made of; a fault replaces one of its steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.faults.fault import Fault
from jaxattn.check.subjects import router as routers
from jaxattn.check.subjects.router import RouteCall, Routed, Router, route_call
from jaxattn.check.tracing.stages import Stages
from jaxattn.check.tracing.trace import trace_of
from jaxattn.check.tracing.traced import Trace


def chosen(call: RouteCall) -> Array:
    """[t, hr] bool, the k best by index: the lowest wins a tie."""
    best = jax.lax.top_k(probabilities(call), call.k)[1]  # of scores, 0.0 and -0.0 would differ
    return jax.nn.one_hot(best, call.routed.shape[-1], dtype=bool).any(-2)


def probabilities(call: RouteCall) -> Array:
    return jax.nn.softmax(call.routed, -1)


def gates(call: RouteCall, picked: Array) -> Array:
    """[t, s + hr]: softmax values times those of the stage."""
    a = jax.nn.softmax(call.stage, -1)
    return jnp.concatenate(
        [a[:, :1] * jax.nn.softmax(call.shared, -1), a[:, 1:] * probabilities(call) * picked], -1
    )


def loss(call: RouteCall, picked: Array, probability: Callable[[RouteCall], Array] = probabilities) -> Array:
    """sum_i f_i P_i over the tokens that are no padding."""
    real = jnp.ones(len(picked), bool) if call.valid is None else call.valid
    mean = lambda x: jnp.where(real[:, None], x, 0).sum(0) / real.sum()
    return (mean(picked) * mean(probability(call))).sum()


def share(call: RouteCall) -> float:
    """Heads that are active, of all."""
    shared, routed = call.shared.shape[1], call.routed.shape[1]
    return (shared + call.k) / (shared + routed)


def total(layers: tuple[RouteCall, ...], route: Callable[[RouteCall], Routed]) -> Array:
    """The mean of the layers' own losses."""
    each = [route(one).loss for one in layers]
    return jnp.stack([x for x in each if x is not None]).mean()


STEPS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (chosen, gates, loss, share, total)}


def right_router(call: RouteCall, **steps: Callable[..., Any]) -> Routed:
    """Gates, loss and share; `steps` replaces `STEPS`."""
    s = {**STEPS, **steps}
    picked = s["chosen"](call)
    return Routed(s["gates"](call, picked), s["loss"](call, picked), s["share"](call))


def _router(name: str, **steps: Callable[..., Any]) -> Router:
    run = jax.jit(
        lambda k, *arrays: right_router(route_call(arrays[:3], k, arrays[3]), **steps), static_argnums=0
    )
    route = lambda call: run(call.k, *call[:3], call.valid)
    sum_of = {**STEPS, **steps}["total"]
    return Router(name, route, lambda layers: sum_of(layers, route))


RIGHT = _router("right")


def traced_router(subject: Router = RIGHT) -> Trace:
    """The trace of six heads that are gated before they merge: two shared, two of four routed."""
    heads, rng = 6, np.random.default_rng(14)
    x, stage, shared = (rng.normal(size=s) for s in ((5, 24), (5, 2), (5, 2)))
    scores = np.array([[-0.0, 0, -0.0, 0], [3, 1, 2, 0], [0, 1, 2, 2], [1, -1, 0, 2], [-2, -1, -3, 0]], float)
    call = route_call((jnp.asarray(x, jnp.float32) for x in (scores, shared, stage)), 2)
    given = Stages(finish=lambda heads: heads * np.asarray(subject.route(call).gates)[..., None])
    want = routers.gates(call, renormalised=False)
    formula = Stages(finish=lambda heads: heads * want[..., None])
    return trace_of(given, x, heads=heads, expected=formula, tolerance=1e-5)


def _gated(says: str, source: str, law: str, **steps: Callable[..., Any]) -> Fault:
    """Wrong gates, which a trace shows where heads merge."""
    subject = _router("planted", **steps)
    return Fault(says, source, law, subject, "merged", functools.partial(traced_router, subject))


def _beside(says: str, source: str, law: str, why: str, **steps: Callable[..., Any]) -> Fault:
    """Right gates, and something else that is wrong."""
    return Fault(says, source, law, _router("planted", **steps), why=why)


def _at_least_the_kth(call: RouteCall) -> Array:
    return call.routed >= jax.lax.top_k(call.routed, call.k)[0][..., -1:]


def _by_sign(call: RouteCall) -> Array:
    """`top_k` orders the scores themselves, and to it 0.0 is more than -0.0."""
    return jax.nn.one_hot(jax.lax.top_k(call.routed, call.k)[1], call.routed.shape[-1], dtype=bool).any(-2)


def _less_the_shared(call: RouteCall) -> Array:
    return chosen(call._replace(k=max(0, call.k - call.shared.shape[1])))


def _over_the_selected(call: RouteCall, picked: Array) -> Array:
    own = gates(call, picked)
    s = call.shared.shape[1]
    a = jax.nn.softmax(call.stage, -1)[:, 1:]
    return own.at[:, s:].set(a * jnp.nan_to_num(jax.nn.softmax(jnp.where(picked, call.routed, -jnp.inf), -1)))


def _all_compete(call: RouteCall, picked: Array) -> Array:
    """The best s + k of all heads."""
    scores = jnp.concatenate([call.shared, call.routed], -1)
    every = jnp.ones_like(picked)
    return gates(call, every) * chosen(
        RouteCall(scores, call.shared, call.stage, call.shared.shape[1] + call.k)
    )


def _selected_alone(call: RouteCall, picked: Array) -> Array:
    among = lambda call: jnp.nan_to_num(jax.nn.softmax(jnp.where(picked, call.routed, -jnp.inf), -1))
    return loss(call, picked, among)


def _as_one_layer(layers: tuple[RouteCall, ...], route: Callable[[RouteCall], Routed]) -> Array:
    parts = [jnp.concatenate(x) for x in zip(*(one[:3] for one in layers), strict=True)]
    whole = route(route_call(parts, layers[0].k)).loss
    assert whole is not None
    return whole


NO_STAGE = "a loss is no stage"
FAULTS: dict[str, Fault] = {
    "all that equal the k-th": _gated(
        "heads are chosen by value: equal scores choose more than k", "PUB-24", "routed-exactly-k",
        chosen=_at_least_the_kth,
    ),
    "zeros by their sign": _gated(
        "of equal scores 0.0 wins over -0.0, wherever it stands", "PUB-24", "ties-by-index", chosen=_by_sign
    ),
    "k with the shared heads in it": _gated(
        "of k heads for each token the shared ones are taken off", "PUB-24; M3.2 0x0BBA", "routed-exactly-k",
        chosen=_less_the_shared,
    ),
    "shared heads compete": _gated(
        "the best of all heads are taken, so that a shared one may be off", "PUB-24", "shared-always-on",
        gates=_all_compete,
    ),
    "gates over the selected": _gated(
        "the softmax runs over the selected scores, which is not declared", "PUB-24", "gates-are-declared",
        gates=_over_the_selected,
    ),
    "active share without the shared heads": _beside(
        "k / H is reported as active", "M3.2 0x0BBA", "share-counts-shared",
        "a report is no stage",
        share=lambda call: call.k / (call.shared.shape[1] + call.routed.shape[1]),
    ),
    "softmax of a softmax": _beside(
        "probabilities go through the softmax once more before their mean", "PUB-25", "balance-loss",
        NO_STAGE, loss=functools.partial(loss, probability=lambda x: jax.nn.softmax(probabilities(x), -1)),
    ),
    "balance of the selected alone": _beside(
        "probabilities are those over the selected heads", "PUB-25", "balance-loss", NO_STAGE,
        loss=_selected_alone,
    ),
    "layers balanced as one": _beside(
        "tokens of all layers are one list: layers that collapse apart look balanced", "PUB-25",
        "balance-by-layer", NO_STAGE, total=_as_one_layer,
    ),
    "padding in the balance": _beside(
        "tokens of padding count in both means", "PUB-25", "balance-padding", NO_STAGE,
        loss=lambda call, picked: loss(call._replace(valid=None), picked),
    ),
    "balance without a slope": _beside(
        "the probabilities of the loss are held fixed: no gradient reaches the router", "PUB-25",
        "balance-gradient", NO_STAGE,
        loss=functools.partial(loss, probability=lambda call: jax.lax.stop_gradient(probabilities(call))),
    ),
}  # fmt: skip
