"""Our variants as subjects of the checks: given heads, maps and scores reach them through their states.

Projections are made of zeros and ones: they only read channels, so that a state holds what a call gives.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxattn as ja
import variants
from jaxattn.check.subjects.mixer import MIXER_FEATURES, Basis, Mixer, Overlap
from jaxattn.check.subjects.router import Routed, Router, route_call


def _place(rows, start, *shape):
    """A kernel [rows, *shape] that reads channels from `start` on, in order."""
    size = math.prod(shape)
    return jnp.eye(rows, size, -start).reshape(rows, *shape)


def _sides(call, *more):
    """The states of a call: its heads, then the maps of its rows, then `more` ones."""
    hl, (hs, hv) = call.query.shape[2], call.post.shape[-2:]
    for x, maps in ((call.query, call.query_maps), (call.key, call.key_maps)):
        rows = x.shape[:2]
        maps = tuple(jnp.zeros((*rows, *s)) for s in ((hl, hs), (hs, hv))) if maps is None else maps
        yield jnp.concatenate([*(y.reshape(*rows, -1) for y in (x, *maps)), jnp.ones((*rows, len(more)))], -1)


def _layer(call, x_q, transform, own):
    """(Attention, parameters) that takes heads out of the states and gives heads."""
    (hl, d), (hv, v), m = call.query.shape[2:], call.value.shape[2:], x_q.shape[-1]
    sizes = dict(d_qk=d, d_v=v, in_q=m, in_k=m, in_v=hv * v, out=hv * v)
    attn = ja.attention(ja.HeadSpec(model=m, heads=hl, **sizes), transform)
    params = {name: {"kernel": _place(m, 0, hl, d)} for name in ("query", "key")}
    params["value"] = {"kernel": _place(hv * v, 0, hv, v)}
    params["out"] = {"kernel": jnp.eye(hv * v).reshape(hv, v, hv * v)}
    return attn, params | {"heads": {transform.name: own}}


def _heads_of(call, x_q, x_k, attn, params):
    x_v = call.value.reshape(*call.value.shape[:2], -1)
    mask = None if call.mask is None else ja.masks.from_flax(call.mask)
    remask = call.mask is not None and call.mask.shape[1] > 1
    params = jax.tree.map(lambda x: x.astype(call.query.dtype), params)
    x_q, x_k = x_q.astype(call.query.dtype), x_k.astype(call.query.dtype)
    y, _ = attn.apply(params, x_q, (x_k, x_v), mask, remask=remask)
    return y.reshape(*y.shape[:2], *call.value.shape[2:])


def by_talking_heads(call):
    """Rows bring their maps in their states; the projections of maps only read them."""
    x_q, x_k = _sides(call)
    (hl, d), (hs, hv), m = call.query.shape[2:], call.post.shape, x_q.shape[-1]
    own, start = {}, hl * d
    for site, kernel, bias in (("pre", call.pre, call.pre_bias), ("post", call.post, call.post_bias)):
        reads = _place(m, start, *kernel.shape)
        own[site] = {"kernel": kernel, "query": reads, "key": reads}
        own[site]["bias"] = jnp.zeros(kernel.shape[1]) if bias is None else bias
        start += kernel.size
    transform = variants.talking_heads(
        hl, hs, hv, bias=True, dynamic=("pre_query", "pre_key", "post_query", "post_key")
    )
    return _heads_of(call, x_q, x_k, *_layer(call, x_q, transform, own))


BASE = 10.0  # gelu(x) = x to the last digit, from BASE - 4 on


def by_dcmha(call):
    """Whole maps by full rank: w1 is the identity, w2 the map of the row, read through the gelu."""
    x_q, x_k = _sides(call, "one")
    h, m, groups = call.query.shape[2], x_q.shape[-1], call.pre.shape[0] if call.pre.ndim == 3 else 1
    n = h // groups
    u, own, start = 2 * n * n, {}, math.prod(call.query.shape[2:])
    by = 1 / math.sqrt(1 / n + 1e-6)  # what the norm of w1 makes of a one
    for site, static in (("pre", call.pre), ("post", call.post)):
        hidden, down, up = np.zeros((m, groups, u)), np.zeros((u, n, h)), np.zeros((u, n, h))
        if groups == 1:
            hidden[-1], down[0], up[0] = BASE, np.eye(n) / BASE, -1 / by
            hidden[start : start + n * n, 0, 1 : 1 + n * n] = np.eye(n * n)
            hidden[-1, 0, 1 + n * n :] = 0
            up[1 : 1 + n * n] = np.eye(n * n).reshape(-1, n, n) / by
        leaves = {"hidden": hidden, "down": down, "up": up, "diag": np.zeros((m, h))}
        leaves = {name: jnp.asarray(leaf) for name, leaf in leaves.items()}
        own[site] = {"query": leaves, "key": leaves, "static": static.reshape(groups, n, n) - jnp.eye(n)}
        start += n * n
    transform = variants.dcmha(rank=n, groups=groups, static=True)
    return _heads_of(call, x_q, x_k, *_layer(call, x_q, transform, own))


def by_mohsa(query, key, value, overlap):
    (h, d), v = query.shape[2:], value.shape[3]
    wide = v + 2 * overlap
    spec = ja.HeadSpec(model=h * d, heads=h, d_qk=d, d_v=v, in_v=h * v, out=h * wide)
    attn = ja.attention(spec, variants.mohsa(overlap))
    packed = {name: {"kernel": jnp.eye(h * n).reshape(h * n, h, n)} for name, n in
              (("query", d), ("key", d), ("value", v))}  # fmt: skip
    params = packed | {"out": {"kernel": jnp.eye(h * wide).reshape(h, wide, h * wide)}, "heads": {}}
    x_q, x_k, x_v = (x.reshape(*x.shape[:2], -1) for x in (query, key, value))
    y, _ = attn.apply(params, x_q, (x_k, x_v))
    return y.reshape(*y.shape[:2], h, wide)


def by_collab(call):
    (h, c), v = call.mixing.shape, call.value.shape[3]
    bias = jnp.zeros((*call.key.shape[:2], h)) if call.bias is None else call.bias
    sizes = dict(d_qk=call.width, d_v=v, in_k=c + h, in_v=h * v, out=h * v)
    attn = ja.attention(ja.HeadSpec(model=c, heads=h, **sizes), variants.collab(width=c))
    params = {"query": {"kernel": _place(c, 0, 1, c)}, "key": {"kernel": _place(c + h, 0, 1, c)}}
    params |= {
        "value": {"kernel": _place(h * v, 0, h, v)},
        "out": {"kernel": jnp.eye(h * v).reshape(h, v, -1)},
    }
    params["heads"] = {"collab": {"mixing": call.mixing, "content_bias": _place(c + h, c, h)}}
    x_v = call.value.reshape(*call.value.shape[:2], -1)
    y, _ = attn.apply(params, call.query, (jnp.concatenate([call.key, bias], -1), x_v))
    return y.reshape(*y.shape[:2], h, v)


def by_moh(form: Any, balance: Any = "paper") -> Router:
    """The state of a token is its scores, which the router only reads."""

    def route(call):
        routed, shared = call.routed.shape[1], call.shared.shape[1]
        x = jnp.concatenate(call[:3], -1)
        m, heads = x.shape[-1], shared + routed
        transform = variants.moh(shared, call.k, gates=form, balance=balance)
        attn = ja.attention(ja.HeadSpec(model=m, heads=heads, d_qk=1, d_v=1), transform)
        params = jax.eval_shape(attn.init, jax.random.key(0))
        reads = {"routed": (0, routed), "shared": (routed, shared), "stage": (routed + shared, 2)}
        own = {name: _place(m, *reads[name]) for name in params["heads"].get("moh", {})}
        params = jax.tree.map(lambda x: jnp.ones(x.shape), params) | {"heads": {"moh": own}}
        mask = None if call.valid is None else ja.padding(call.valid)
        _, aux = attn.apply(params, x, None, mask)
        loss = aux.losses["balance"].value if aux.losses else jnp.zeros(())
        share = attn.sizes.active_heads / attn.sizes.output_heads
        return Routed(attn.query_side(params, x).gate[..., 0], loss, share)

    run = jax.jit(lambda k, scores, valid: route(route_call(scores, k, valid)), static_argnums=0)
    one = lambda call: run(call.k, call[:3], call.valid)
    mean = lambda layers: jnp.stack([jnp.asarray(one(layer).loss) for layer in layers]).mean()
    return Router(f"moh {form}", one, mean, renormalised=form == "released")


def _compiled(attend):
    """One program, the width apart, which is no array."""

    def run(call):
        arrays = {name: x for name, x in call._asdict().items() if name != "width"}
        return jax.jit(lambda given: attend(call._replace(**given)))(arrays)

    return run


def _without(*features):
    return frozenset(MIXER_FEATURES) - set(features)


VARIANTS = {
    "talking_heads": Mixer("talking_heads", jax.jit(by_talking_heads), _without("groups")),
    "dcmha": Mixer("dcmha", jax.jit(by_dcmha), _without("counts", "bias", "float64")),
    "mohsa": Overlap("mohsa", jax.jit(by_mohsa, static_argnums=3)),
    "collab": Basis("collab", _compiled(by_collab)),
    "moh paper": by_moh("paper"),
    "moh released": by_moh("released", "released"),
}
