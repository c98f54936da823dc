"""Wrong sublayers. `right_layer` is what they are made of; a fault replaces one of its steps."""

import functools
from collections.abc import Callable
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja
from jaxattn.check.draws.layer import draw_layer, projected
from jaxattn.check.faults.fault import Fault
from jaxattn.check.faults.right import hide, scale, scores, softmax, tril
from jaxattn.check.law import Sizes
from jaxattn.check.subjects.layer import LEAVES, Layer, Params, of_layer
from jaxattn.check.tracing.stages import Stages
from jaxattn.check.tracing.trace import trace_of
from jaxattn.check.tracing.traced import Trace
from jaxattn.check.verdict import enable_x64

States = tuple[Array, Array, Array]


def sources(x_q: Array, x_k: Array, x_v: Array) -> States:
    """What queries, keys and values are projected from."""
    return x_q, x_k, x_v


def leaves(params: Params) -> Params:
    """Which parameters each projection has."""
    return params


def clean(x: Array, seen: Array) -> Array:
    """Source states, zero in rows that nobody sees: a kernel's gradient is a product with them."""
    return jnp.where(seen.any((1, 2))[:, :, None], x, 0)


def project(x: Array, leaf: dict[str, Array]) -> Array:
    """[b, t, m] to [b, h, t, d]."""
    heads = jnp.einsum("btm,mhd->bhtd", x, leaf["kernel"])
    return heads + leaf["bias"][:, None] if "bias" in leaf else heads


def repeat(x: Array, heads: int) -> Array:
    """Each key head for a block of heads."""
    return einops.repeat(x, "b g k d -> b (g n) k d", n=heads // x.shape[1])


def visible(shape: tuple[int, ...], mask: Array | None, causal: bool, alone: bool) -> Array:
    """Which pairs [b, h, q, k] are seen; `alone` says whether it is self-attention."""
    seen = jnp.ones(shape, bool) if mask is None else jnp.broadcast_to(mask, shape)
    return seen & tril(*shape[-2:]) if causal else seen


def combine(weights: Array, value: Array) -> Array:
    """[b, h, q, k] and [b, h, k, v] to heads [b, h, q, v]; rows that nobody sees are left out."""
    shown = (weights != 0).any((1, 2))[:, None, :, None]
    return jnp.einsum("bhqk,bhkv->bhqv", weights, jnp.where(shown, value, 0))


def merge(heads: Array) -> Array:
    """[b, h, q, v] to [b, q, (h v)]."""
    return einops.rearrange(heads, "b h q v -> b q (h v)")


def write(merged: Array, leaf: dict[str, Array]) -> Array:
    """Merged heads through W_O."""
    y = merged @ einops.rearrange(leaf["kernel"], "h v m -> (h v) m")
    return y + leaf["bias"] if "bias" in leaf else y


def reported(weights: Array) -> Array:
    """What a caller who asks for weights is given."""
    return weights


STEPS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        sources,
        leaves,
        clean,
        project,
        repeat,
        scores,
        visible,
        softmax,
        combine,
        merge,
        write,
        reported,
    )
}


def _answered(
    params: Params, x_q: Array, x_k: Array, x_v: Array, *, mask: Array | None = None, is_causal: bool = False,
    **steps: Callable[..., Any],
) -> tuple[Array, Array]:  # fmt: skip
    if strange := steps.keys() - STEPS.keys():
        raise TypeError(f"steps: got {', '.join(sorted(strange))}. Fix: some of {', '.join(STEPS)}.")
    s, alone = STEPS | steps, x_k is x_q and x_v is x_q
    own = s["leaves"](params)
    x_q, *source = s["sources"](x_q, x_k, x_v)
    shape = len(x_q), own["query"]["kernel"].shape[1], x_q.shape[1], source[0].shape[1]
    seen = s["visible"](shape, mask, is_causal, alone)
    states = zip((x_q, *(s["clean"](x, seen) for x in source)), LEAVES[:3], strict=True)
    query, key, value = (s["project"](x, own[name]) for x, name in states)
    key, value = (s["repeat"](x, query.shape[1]) for x in (key, value))
    weights = s["softmax"](s["scores"](scale(query), key), seen)
    y = s["write"](s["merge"](s["combine"](weights, value)), own["out"])
    return y, s["reported"](weights)


def right_layer(*call: Any, **more: Any) -> Array:
    """W_O of heads of softmax(q k / sqrt(d)) v; called with params, x_q, x_k, x_v, mask=..., is_causal=...

    Keywords that are names of `STEPS` replace these.
    """
    return _answered(*call, **more)[0]


def layer_of(name: str, **steps: Callable[..., Any]) -> Layer:
    """The right sublayer, or one with some of its steps replaced, as a subject."""
    both = functools.partial(_answered, **steps)
    return of_layer(functools.partial(right_layer, **steps), weights=both, name=name)


def traced(square: bool = False, mask: bool = False, width: int = 11, **steps: Callable[..., Any]) -> Trace:
    """The trace of one call of `right_layer`, with `steps` in place of its own.

    Args:
        square: x_k has as many rows as x_q.
        mask: the last row of the source is hidden.
        width: of a head; 7 is the number of keys.
    """
    s = STEPS | steps
    with enable_x64(True):
        call = draw_layer(Sizes(2, 3, 5, 5 if square else 7, width, width, 3), bias=True, dtype=jnp.float64)
        own, x, k = s["leaves"](call.params), call[1:4], call.x_k.shape[1]
        real = jnp.arange(k) < (k - 1 if mask else k)

        def side(n: int, name: str) -> Callable[[Array], Array]:
            return lambda state: s["project"](s["sources"](*x[:n], state, *x[n + 1 :])[n], own[name])

        def weigh(masked: Array) -> Array:
            return s["reported"](s["softmax"](masked, jnp.isfinite(masked)))

        out = call.params["out"]
        flat = np.asarray(out["kernel"]).reshape(-1, out["kernel"].shape[-1])
        formula = lambda name: lambda state: projected(state, call.params[name])
        return trace_of(
            Stages(
                project_q=side(0, "query"), project_k=side(1, "key"), project_v=side(2, "value"),
                scores=lambda query, key: s["scores"](scale(query), key),
                mask=lambda x, _: hide(x, s["visible"](x.shape, real if mask else None, False, False)),
                softmax=weigh,
                combine=s["combine"], merge=s["merge"],
                output=lambda merged: s["write"](merged, own["out"]),
                layout="... h t d", array=jnp.asarray,
            ),
            x[0], x[1:], ja.padding(real), heads=3,
            expected=Stages(
                project_q=formula("query"), project_k=formula("key"), project_v=formula("value"),
                output=lambda merged: merged @ flat + np.asarray(out["bias"]),
            ),
        )  # fmt: skip


def _planted(
    says: str, source: str, law: str, stage: str, example: dict[str, Any] | None = None, why: str = "",
    **steps: Callable[..., Any],
) -> Fault:  # fmt: skip
    shown = functools.partial(traced, **(example or {}), **steps) if stage else None
    return Fault(says, source, law, layer_of("planted", **steps), stage, shown, why)


def _shared(params: Params) -> Params:
    """The query's kernel and bias for all three, where they fit."""
    one = params["query"]
    same = lambda name: params[name]["kernel"].shape == one["kernel"].shape
    return {name: one if name != "out" and same(name) else leaf for name, leaf in params.items()}


def _key_bias_asks(params: Params) -> Params:
    """The key's bias lands on the query."""
    if "bias" not in params["key"] or params["key"]["bias"].shape != params["query"]["bias"].shape:
        return params
    query, key = params["query"], params["key"]
    moved = {"bias": query["bias"] + key["bias"]}
    return {**params, "query": query | moved, "key": key | {"bias": 0 * key["bias"]}}


def _transposed(x: Array, leaf: dict[str, Array]) -> Array:
    """x W^T, where W is square."""
    m, h, d = leaf["kernel"].shape
    if m != h * d:
        return project(x, leaf)
    return project(x, leaf | {"kernel": leaf["kernel"].reshape(m, m).T.reshape(m, h, d)})


def _locally(x: Array, leaf: dict[str, Array]) -> Array:
    """States are split into heads first; each head is projected from its own channels alone."""
    m, h, d = leaf["kernel"].shape
    if m != h * d:
        return project(x, leaf)
    own = jnp.arange(m)[:, None] // d == jnp.arange(h)
    return project(x, leaf | {"kernel": jnp.where(own[..., None], leaf["kernel"], 0)})


def _swapped(x_q: Array, x_k: Array, x_v: Array) -> States:
    """Queries from the source, keys and values from the target, where all fit."""
    return (x_k, x_q, x_q) if x_q.shape == x_k.shape == x_v.shape else (x_q, x_k, x_v)


def _key_source(x_q: Array, x_k: Array, x_v: Array) -> States:
    return (x_q, x_k, x_k) if x_k.shape == x_v.shape else (x_q, x_k, x_v)


def _detached(x_q: Array, x_k: Array, x_v: Array) -> States:
    alone = x_k is x_q
    return (x_q, x_k, x_v) if alone else (x_q, jax.lax.stop_gradient(x_k), jax.lax.stop_gradient(x_v))


def _query_path(x_q: Array, x_k: Array, x_v: Array) -> States:
    """A wrapper that returns three gradients, of which the caller of one array takes the first."""
    alone = x_k is x_q and x_v is x_q
    return (x_q, jax.lax.stop_gradient(x_k), jax.lax.stop_gradient(x_v)) if alone else (x_q, x_k, x_v)


def _causal_if_square(shape: tuple[int, ...], mask: Array | None, causal: bool, alone: bool) -> Array:
    """The target's triangle for every source that it fits."""
    return visible(shape, mask, causal or (not alone and shape[-2] == shape[-1]), alone)


def _mask_of_itself(shape: tuple[int, ...], mask: Array | None, causal: bool, alone: bool) -> Array:
    return visible(shape, mask if alone else None, causal, alone)


def _unwritten(merged: Array, leaf: dict[str, Array]) -> Array:
    return merged if merged.shape[-1] == leaf["kernel"].shape[-1] else write(merged, leaf)


def _weights_as_heads(weights: Array, value: Array) -> Array:
    return weights if weights.shape[-1] == value.shape[-1] else combine(weights, value)


def _reversed_queries(params: Params) -> Params:
    leaf = params["query"]
    own = {name: x[:, ::-1] if name == "kernel" else x[::-1] for name, x in leaf.items()}
    return {**params, "query": own}


NO_STAGE = "derivatives are no stage"
FAULTS: dict[str, Fault] = {
    "hidden states projected": _planted(
        "0 times NaN in the gradient of a kernel, from a source row that nobody sees",
        "PUB-05",
        "hidden-source-holds-anything",
        "",
        why=NO_STAGE,
        clean=lambda x, seen: x,
    ),
    "one kernel for Q, K and V": _planted(
        "the three projections share their weights", "M3.2 0x0E", "own-kernels", "K", leaves=_shared
    ),
    "weights returned": _planted(
        "what comes back is the probabilities, side by side, and not what they mix",
        "M3.2 0x0E",
        "out-projection-used",
        "heads",
        {"width": 7},
        combine=_weights_as_heads,
        write=_unwritten,
    ),
    "no W_O": _planted(
        "the merged heads are the output",
        "M3.2 0x0E; 0x09",
        "out-projection-used",
        "output",
        write=_unwritten,
    ),
    "channels before heads": _planted(
        "heads are merged as (v h), where W_O expects (h v)",
        "M3.2 0x0E",
        "identity-layer",
        "head round trip",
        merge=lambda heads: einops.rearrange(heads, "b h q v -> b q (v h)"),
    ),
    "W_O blocks reversed": _planted(
        "heads are written through the blocks of others",
        "M3.2 0x09B",
        "out-blocks",
        "output",
        write=lambda merged, leaf: write(merged, leaf | {"kernel": leaf["kernel"][::-1]}),
    ),
    "heads of Q reversed": _planted(
        "heads of Q in another order than those of K and V",
        "M3.2 0x09B",
        "heads-permuted-jointly",
        "Q",
        leaves=_reversed_queries,
    ),
    "kernels transposed": _planted(
        "x W^T where W is square", "PUB-19; M3.2 0x09B", "kernel-orientation", "Q", project=_transposed
    ),
    "split before projecting": _planted(
        "each head is projected from its own channels of the state alone",
        "M3.2 0x05A",
        "layer-values",
        "Q",
        project=_locally,
    ),
    "V of the source of K": _planted(
        "K and V are both made of the source of K",
        "M3.2 0x01A; 0x0AA",
        "cross-values",
        "V",
        sources=_key_source,
    ),
    "the target's triangle": _planted(
        "a source of as many rows is read under the target's causal mask",
        "M3.2 0x0AA; 0x0E",
        "cross-square",
        "masked scores",
        {"square": True},
        visible=_causal_if_square,
    ),
    "source and target swapped": _planted(
        "the source asks and the target answers",
        "M3.2 0x0AA",
        "cross-square",
        "Q",
        {"square": True},
        sources=_swapped,
    ),
    "no mask for a source": _planted(
        "the mask holds in self-attention alone",
        "M3.2 0x0AA",
        "cross-mask",
        "masked scores",
        {"mask": True},
        visible=_mask_of_itself,
    ),
    "source detached": _planted(
        "no gradient reaches the source", "M3.2 0x0AA", "source-gradient", "", why=NO_STAGE, sources=_detached
    ),
    "paths not summed": _planted(
        "in self-attention x has the gradient of its path through Q alone",
        "M3.2 0x09B; 0x0AA",
        "aliased-gradient",
        "",
        why=NO_STAGE,
        sources=_query_path,
    ),
    "key bias on the query": _planted(
        "the key's bias is added to the query",
        "PUB-20; M3.2 0x09B",
        "key-bias-null",
        "Q",
        leaves=_key_bias_asks,
    ),
    "weights averaged": _planted(
        "every head reports the average over heads",
        "second article",
        "layer-weights",
        "weights",
        reported=lambda weights: jnp.broadcast_to(weights.mean(1, keepdims=True), weights.shape),
    ),
}
