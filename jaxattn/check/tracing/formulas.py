"""The stages as formulas in float64 numpy, apart from the engines: of plain attention, and of any form."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.attention import Attention
from jaxattn.check.tracing.stages import Stages, numbers, take
from jaxattn.sides import Coupling, Factors, KeySide, Mix, QuerySide
from jaxattn.spec import Rotary

PyTree = Any


def split(packed: np.ndarray, heads: int) -> np.ndarray:
    """[..., t, (h d)] to [..., t, h, d]: head h holds channels h*d to h*d + d of its own row."""
    return packed.reshape(*packed.shape[:-1], heads, packed.shape[-1] // heads)


def merge(heads: np.ndarray) -> np.ndarray:
    """[..., t, h, v] to [..., t, (h v)]."""
    return heads.reshape(*heads.shape[:-2], heads.shape[-2] * heads.shape[-1])


def scores(
    query: np.ndarray, key: np.ndarray, scale: float, key_of: tuple[int, ...] | None = None
) -> np.ndarray:
    """scale * <query[q,h], key[k,key_of(h)]>, as [..., h, q, k]."""
    return scale * np.einsum("...qhd,...khd->...hqk", query, take(key, query.shape[-2], key_of))


def hide(x: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Hidden pairs at -inf."""
    return np.where(visible, x, -np.inf)


def softmax(masked: np.ndarray, axis: int = -1) -> np.ndarray:
    """Over keys; a row of -inf alone gives zeros."""
    top = masked.max(axis=axis, keepdims=True)
    raised = np.exp(masked - np.where(np.isneginf(top), 0, top))
    total = raised.sum(axis=axis, keepdims=True)
    return raised / np.where(total == 0, 1, total)


def combine(weights: np.ndarray, value: np.ndarray, value_of: tuple[int, ...] | None = None) -> np.ndarray:
    """sum_k weights[h,q,k] value[k,value_of(h)], as [..., q, h, v]; a row without any weight gives 0."""
    value = take(value, weights.shape[-3], value_of)
    if not np.isfinite(value).all():
        asked = (weights != 0).any(-2)  # [..., h, k]
        value = np.where(np.swapaxes(asked, -1, -2)[..., None], value, 0)
    return np.einsum("...hqk,...khv->...qhv", weights, value)


def plain(scale: float) -> Stages:
    """Plain multi-head attention, with shared key heads in block order; projections as they come."""
    return Stages(
        split=split,
        merge=merge,
        scores=lambda query, key: scores(query, key, scale),
        mask=hide,
        softmax=softmax,
        combine=combine,
    )


def of_form(
    query_side: QuerySide,
    key_side: KeySide,
    coupling: Coupling,
    bias: Array | None,
    visible: np.ndarray,
    finish: Callable[[Array], Array],
) -> Stages:
    """The stages between two sides and the output, as the coupling states them."""
    c = coupling

    def raw(query, key):
        x = scores(query, key, c.scale, c.key_of)
        if key_side.bias is not None:
            x = x + np.swapaxes(numbers(key_side.bias), -1, -2)[..., None, :]
        return x

    def before(x):
        for static, rows, keys in zip(c.pre, query_side.pre, key_side.pre, strict=True):
            x = mixed(x, static, rows, keys)
        if c.pair_bias is not None:
            positions = (_positions(s.position, n) for s, n in zip(
                (query_side, key_side), x.shape[-2:], strict=True))  # fmt: skip
            x = x + numbers(c.pair_bias.of(c.pair_bias.params, *positions))
        if bias is not None:
            x = x + numbers(bias)
        return x if c.softcap is None else c.softcap * np.tanh(x / c.softcap)

    def after(weights):
        for static, rows, keys in zip(c.post, query_side.post, key_side.post, strict=True):
            weights = np.where(visible, mixed(weights, static, rows, keys), 0)
        return weights

    def finished(heads):
        heads = numbers(finish(jnp.asarray(heads)))
        return heads if query_side.gate is None else heads * numbers(query_side.gate)

    return Stages(
        split=split, merge=merge, scores=raw, mix_scores=before, mask=hide, softmax=softmax,
        mix_weights=after, combine=lambda w, v: combine(w, v, c.value_of), finish=finished,
    )  # fmt: skip


def _positions(position: Array | None, rows: int) -> Array:
    return jnp.arange(rows) if position is None else position


def mixed(x: np.ndarray, static: Mix, rows: Factors | None, keys: Factors | None) -> np.ndarray:
    """One mix stage on [..., i, q, k]: out[o] = sum_i x[i] M[i,o] of this pair (q, k)."""
    out = x
    if static.matrix is not None:
        out = np.einsum("...iqk,io->...oqk", x, _whole(numbers(static.matrix)))
        out = out + x if static.skip else out
    if static.bias is not None:
        out = out + numbers(static.bias)[:, None, None]
    for n, factors in (("q", rows), ("k", keys)):
        if factors is None:
            continue
        down, up, diag, dense = (None if f is None else numbers(f) for f in factors)
        if down is not None and up is not None:
            low = _whole(np.einsum("...gir,...gro->...gio", down, up))
            out = out + np.einsum(f"...iqk,...{n}io->...oqk", x, low)
        if diag is not None:
            out = out + np.einsum(f"...hqk,...{n}h->...hqk", x, diag)
        if dense is not None:
            out = out + np.einsum(f"...iqk,...{n}io->...oqk", x, dense)
    return out


def _whole(groups: np.ndarray) -> np.ndarray:
    """[..., g, i, o] as one [..., (g i), (g o)] with zeros between groups; [i, o] as it is."""
    if groups.ndim == 2:
        return groups
    g, i, o = groups.shape[-3:]
    out = np.zeros((*groups.shape[:-3], g, i, g, o))
    for n in range(g):
        out[..., n, :, n, :] = groups[..., n, :, :]
    return out.reshape(*groups.shape[:-3], g * i, g * o)


def projected(params: PyTree, name: str, x: Array, norm: str | None, rotary, position, block: int):
    """States to heads [..., t, h, d]: x W + b, normalised, turned; name is "query", "key" or "value"."""
    out = np.einsum("...tm,mhd->...thd", numbers(x), numbers(params[name]["kernel"]))
    if "bias" in params[name]:
        out = out + numbers(params[name]["bias"])
    if norm is not None and f"{name}_ln" in params:
        out = out - out.mean(-1, keepdims=True) if norm == "layer" else out
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * numbers(params[f"{name}_ln"]["scale"])
    return out if rotary is None else turned(out, rotary, position, block)


def turned(heads: np.ndarray, rotary: Rotary, position: np.ndarray | Array | None, block: int) -> np.ndarray:
    """Rotary positions as products of complex numbers."""
    width = block if rotary.width is None else rotary.width
    rows = np.arange(heads.shape[-3]) if position is None else numbers(position)
    angle = rows[..., None, None, None] * rotary.base ** (-np.arange(0, width, 2) / width)
    out = heads.reshape(*heads.shape[:-1], -1, block).copy()
    half = rotary.pairs == "half"
    first, second = (slice(width // 2), slice(width // 2, width)) if half else (
        slice(0, width, 2), slice(1, width, 2))  # fmt: skip
    turned = (out[..., first] + 1j * out[..., second]) * np.exp(1j * angle)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out.reshape(heads.shape)


def with_projections(
    formula: Stages,
    attn: Attention,
    params: PyTree,
    query_side: QuerySide,
    key_side: KeySide,
    source: tuple[Array, Array],
) -> Stages:
    """The formula with this attention's own projections and output; transforms add theirs by their hooks."""
    spec, z = attn.spec, attn.sizes
    own = [(link, params["heads"].get(site.name, {}), site) for link, site in
           zip(attn.links, attn.sites, strict=True)]  # fmt: skip

    def real(x, side):
        return jnp.asarray(x) if side.valid is None else jnp.where(side.valid[..., None], x, 0)

    def query(x):
        x = real(x, query_side)
        made = projected(params, "query", x, z.qk_norm, z.rotary_q, query_side.position, spec.d_qk)
        nothing = (None,) * len(z.pre), (None,) * len(z.post)
        side = QuerySide(jnp.asarray(made), *nothing, valid=query_side.valid, position=query_side.position)
        for link, leaves, site in own:
            side = link.query_side(leaves, x, side, site)
        return numbers(side.query)

    def keys(x_k, x_v) -> KeySide:
        x_k, x_v = real(x_k, key_side), real(x_v, key_side)
        made = projected(params, "key", x_k, z.qk_norm, z.rotary_k, key_side.position, spec.d_qk)
        value = projected(params, "value", x_v, None, None, None, 1)
        nothing = (None,) * len(z.pre), (None,) * len(z.post)
        side = KeySide(jnp.asarray(made), jnp.asarray(value), None, *nothing,
                       valid=key_side.valid, position=key_side.position)  # fmt: skip
        for link, leaves, site in own:
            side = link.key_side(leaves, x_k, side, site)
        return attn.expand(side)

    def output(merged):
        kernel = numbers(params["out"]["kernel"])
        out = merged @ kernel.reshape(-1, kernel.shape[-1])
        return out + numbers(params["out"]["bias"]) if "bias" in params["out"] else out

    return formula._replace(
        project_q=query,
        project_k=lambda x_k: numbers(keys(x_k, source[1]).key),
        project_v=lambda x_v: numbers(keys(source[0], x_v).value),
        output=output,
    )
