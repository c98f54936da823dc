"""Laws of routers of heads: which heads count, what their gates are, and what the balance loss is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.law import SINGLE, Outcome, Sizes, distance, law, noted, table
from jaxattn.check.subjects.router import RouteCall, Router, balance, gates, route_call


def _call(sizes: Sizes, seed: int = 0, tokens: int | None = None) -> RouteCall:
    """s shared heads, hr routed ones, k of them for each token; normal scores."""
    rng = np.random.default_rng(seed)
    shared, routed, k = (sizes.h + 1) // 2, sizes.h + 2, sizes.h // 2 + 1
    t = sizes.k + 2 if tokens is None else tokens
    drawn = (2 * rng.normal(size=(t, n)).astype(np.float32) for n in (routed, shared, 2))
    return route_call(map(jnp.asarray, drawn), k)


def _tied(sizes: Sizes) -> RouteCall:
    """Equal scores in the first two tokens, zeros of either sign; the best two of the third are equal."""
    call = _call(sizes, tokens=5)
    routed = np.array(call.routed)
    routed[0], routed[1] = 0.0, np.where(np.arange(routed.shape[1]) % 2, 0.0, -0.0)
    routed[2, -2:] = 9.0
    return call._replace(routed=jnp.asarray(routed))


def _rows(*parts: Any) -> Array:
    """One after another."""
    return jnp.asarray(np.concatenate([np.asarray(x) for x in parts]))


def _sizes_of(call: RouteCall) -> str:
    return f"s = {call.shared.shape[1]}, hr = {call.routed.shape[1]}, k = {call.k}"


def _gates(subject: Router, call: RouteCall) -> np.ndarray:
    return np.asarray(subject.route(call).gates)


def _off_by(got: np.ndarray, call: RouteCall) -> float:
    """By how many the routed heads of a token differ from k, at most."""
    return float(np.abs((got[:, call.shared.shape[1] :] != 0).sum(-1) - call.k).max())


@law("axes", "exactly k of the routed heads count for a token, also where scores are equal", about=Router)
def routed_exactly_k(subject, sizes):
    call = _tied(sizes)
    return noted(_off_by(_gates(subject, call), call), 0.0, f"{_sizes_of(call)}; all scores of two are equal")


@law("axes", "k may be none or all of the routed heads, and shared heads may be none", about=Router)
def routed_none_or_all(subject, sizes):
    call = _call(sizes)
    some = [call._replace(k=k) for k in (0, call.routed.shape[1])] + [
        call._replace(shared=jnp.asarray(np.asarray(call.shared)[:, :0]))
    ]
    return Outcome(max(_off_by(_gates(subject, one), one) for one in some), 0.0)


@law("axes", "the shared heads count for every token", about=Router)
def shared_always_on(subject, sizes):
    call = _call(sizes)
    call = call._replace(
        shared=jnp.asarray(np.asarray(call.shared) - 6), routed=jnp.asarray(np.asarray(call.routed) + 6)
    )  # whatever the scores say
    off = (_gates(subject, call)[:, : call.shared.shape[1]] == 0).sum()
    return noted(float(off), 0.0, f"shared heads that are off, of {call.shared.size}")


@law("numbers", "gates are the softmax values, over all routed heads, times the stage's", about=Router)
def gates_are_declared(subject, sizes):
    call, stages = _call(sizes), "stages" in subject.supports
    got = _gates(subject, call)
    want = gates(call, subject.renormalised, stages)
    other = distance(got, gates(call, not subject.renormalised, stages)) <= SINGLE
    form = (
        "they add up to k, which is not declared" if not subject.renormalised else "they do not add up to k"
    )
    return noted(distance(got, want), SINGLE, form if other else "")


@law(
    "behaviour",
    "equal scores, and 0.0 and -0.0, are decided by the head alone: in any batch, under jit",
    "tracing",
    about=Router,
)
def ties_by_index(subject, sizes):
    call = _tied(sizes)
    whole = _gates(subject, call) != 0
    some = lambda at: route_call((jnp.asarray(np.asarray(x)[at]) for x in call[:3]), call.k)
    order = np.roll(np.arange(len(whole)), 1)
    turned = np.roll(_gates(subject, some(order)) != 0, -1, 0)
    alone = np.concatenate([_gates(subject, some(slice(n, n + 1))) != 0 for n in range(len(whole))])
    traced = jax.jit(lambda *a: subject.route(route_call(a, call.k)).gates)(*call[:3]) != 0
    differ = (turned != whole) | (alone != whole) | (np.asarray(traced) != whole)
    if differ.any():
        return Outcome(float(differ.sum()), 0.0, "gates that are on in one place and off in another")
    return noted(float((whole[0] != whole[1]).sum()), 0.0, "zeros of either sign are decided apart")


@law("numbers", "the share of active heads is (s + k) / H: shared heads are heads", "share", about=Router)
def share_counts_shared(subject, sizes):
    call = _call(sizes)
    (shared, all_) = call.shared.shape[1], call.shared.shape[1] + call.routed.shape[1]
    share = subject.route(call).share
    share = np.nan if share is None else float(share)
    routed = abs(share - call.k / all_) < 1e-6
    return noted(abs(share - (shared + call.k) / all_), 1e-6, "k / H" if routed else _sizes_of(call))


def _loss(subject: Router, call: RouteCall) -> float:
    loss = subject.route(call).loss
    return float("nan") if loss is None else float(loss)


def _constants(call: RouteCall) -> dict[str, float]:
    """What the published losses multiply S with."""
    routed = call.routed.shape[1]
    return {"1": 1.0, "hr": float(routed), "hr / k": routed / call.k}


@law(
    "numbers",
    "the balance loss is S = sum_i f_i P_i, times 1, hr or hr / k, for any tokens",
    "loss",
    about=Router,
)
def balance_loss(subject, sizes):
    call = _call(sizes)
    twice = route_call((_rows(x, x) for x in call[:3]), call.k)
    one, rows = np.asarray(call.routed)[:1], len(call.routed)
    alike = call._replace(routed=_rows(*[one] * rows))
    turned = call._replace(routed=_rows(*([one, one[:, ::-1]] * rows)[:rows]))
    calls = (call, twice, alike, turned)
    got = [_loss(subject, x) for x in calls]
    off = {
        name: max(abs(g / c - balance(x)) for g, x in zip(got, calls, strict=True))
        for name, c in _constants(call).items()
    }
    best = min(off, key=lambda name: off[name] if off[name] == off[name] else np.inf)
    return noted(off[best], SINGLE, f"as {best} times S; {_sizes_of(call)}")


def _two_layers(sizes: Sizes) -> tuple[RouteCall, RouteCall]:
    """Each has a favourite head, another one: together they look balanced."""
    first = _call(sizes, 1)
    ramp = np.broadcast_to(np.arange(first.routed.shape[1], dtype=np.float32), first.routed.shape)
    return first._replace(routed=jnp.asarray(ramp)), first._replace(routed=jnp.asarray(ramp[:, ::-1]))


@law(
    "numbers",
    "each layer is balanced on its own: the sum or the mean of their losses",
    "loss",
    "layers",
    about=Router,
)
def balance_by_layer(subject, sizes):
    layers = _two_layers(sizes)
    total = float(subject.total(layers))
    each = sum(_loss(subject, one) for one in layers)
    return noted(
        min(abs(total - each), abs(total - each / 2)), SINGLE, "two layers with another favourite head"
    )


@law("numbers", "tokens of padding count in no mean of the balance loss", "loss", "padding", about=Router)
def balance_padding(subject, sizes):
    call = _call(sizes)
    more = _call(sizes, 3, tokens=3)
    both = [_rows(*pair) for pair in zip(call[:3], more[:3], strict=True)]
    valid = jnp.asarray(np.arange(len(both[0])) < len(call.routed))
    padded = route_call(both, call.k, valid)
    return noted(abs(_loss(subject, padded) - _loss(subject, call)), SINGLE, "three tokens of padding")


@law(
    "behaviour",
    "the loss slopes by its probabilities alone: dS = sum_i f_i dP_i",
    "loss",
    "tracing",
    about=Router,
)
def balance_gradient(subject, sizes):
    call = _call(sizes)
    f = (_gates(subject, call)[:, call.shared.shape[1] :] != 0).mean(0)
    raised = np.exp(np.asarray(call.routed, np.float64))
    p = raised / raised.sum(-1, keepdims=True)
    through = p * (f - (p @ f)[:, None]) / len(p)  # of sum_i f_i mean(p_i)
    got = np.asarray(jax.jit(jax.grad(lambda x: subject.route(call._replace(routed=x)).loss))(call.routed))
    off = min(distance(got / c, through) for c in _constants(call).values())
    return noted(off, SINGLE, "" if np.any(got) else "no slope at all")


LAWS = table(
    routed_exactly_k,
    routed_none_or_all,
    shared_always_on,
    gates_are_declared,
    ties_by_index,
    share_counts_shared,
    balance_loss,
    balance_by_layer,
    balance_padding,
    balance_gradient,
)
