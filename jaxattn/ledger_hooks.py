"""Multiply-accumulates of the hooks of transforms, each traced by itself and named by what it changes."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from jaxattn.attention import Attention
from jaxattn.count import Traced, Uncounted, trace_named
from jaxattn.sides import Coupling, KeySide, QuerySide
from jaxattn.transform import HeadTransform, Site

PyTree = Any

# What products are called that make one field of a side alone.
NAMES = {
    "pre": "dynamic generators",
    "post": "dynamic generators",
    "gate": "gate generators",
    "bias": "key bias",
    "query": "query mixing",
    "key": "key mixing",
    "value": "value mixing",
}


def hook_macs(
    attn: Attention,
    params: PyTree,
    x_q: ShapeDtypeStruct,
    x_kv: tuple[ShapeDtypeStruct, ShapeDtypeStruct],
    query: QuerySide,
    stored: KeySide,
    placed: bool,
) -> Counter[str]:
    """What every hook multiplies in one call, by name.

    Args:
        attn, params: as in `ledger`.
        x_q: states of the queries.
        x_kv: states of the rows that are projected.
        query: the query side that comes out; with active heads alone where it is routed.
        stored: the key side that is read.
        placed: whether its rows have positions of their own, as those of a cache.
    """
    counted: Counter[str] = Counter()

    def run(link: HeadTransform, site: Site, hook: str, of_result: Callable[..., dict], *args: Any) -> Any:
        """Count one hook; its result as shapes."""
        if not link.overrides(hook):
            return None
        found = _traced(f"{site.name}.{hook}", of_result, *args)
        for names, products in found.macs.items():
            counted[_name(link, site, hook, found, names)] += products
        return found.shapes

    links = [
        (link, site, params["heads"].get(site.name, {}))
        for link, site in zip(attn.links, attn.sites, strict=True)
    ]
    plain = dataclasses.replace(attn, links=(), sites=())
    bare = params | {"heads": {}}

    side = jax.eval_shape(plain.query_side, bare, x_q)
    if query.head is not None:
        side = side._replace(query=query.query, head=query.head)
    for link, site, own in links:
        if query.head is not None:
            routed = lambda own, x, link=link, site=site: _routed(link, own, x, site)
            made = run(link, site, "route", routed, own, x_q)
            side = side if made is None else side._replace(notes=made["notes"])
        hook = lambda own, x, side, link=link, site=site: link.query_side(own, x, side, site)._asdict()
        made = run(link, site, "query_side", hook, own, x_q, side)
        side = side if made is None else QuerySide(**made)

    side = jax.eval_shape(plain.key_side, bare, x_kv)
    for link, site, own in links:
        hook = lambda own, x, side, link=link, site=site: link.key_side(own, x, side, site)._asdict()
        made = run(link, site, "key_side", hook, own, x_kv[0], side)
        side = side if made is None else KeySide(**made)
        hook = lambda side, link=link, site=site: link.expand(side, site)._asdict()
        made = run(link, site, "expand", hook, stored)
        stored = stored if made is None else KeySide(**made)

    coupling = jax.eval_shape(plain.coupling, bare)
    for link, site, own in links:
        hook = lambda own, form, link=link, site=site: {"coupling": link.coupling(own, form, site)}
        made = run(link, site, "coupling", hook, own, coupling)
        coupling = coupling if made is None else made["coupling"]
    if coupling.pair_bias is not None:
        counted["pair bias"] += _pair_bias(coupling, query.query.shape[-3], stored, placed)

    heads = ShapeDtypeStruct(
        (*query.query.shape[:-2], _output_heads(attn, query), stored.value.shape[-1]), stored.value.dtype
    )
    for link, site, own in links:
        hook = lambda own, heads, side, link=link, site=site: {"": link.finish(own, heads, side, site)}
        made = run(link, site, "finish", hook, own, heads, query)
        heads = heads if made is None else made[""]
    for link, site, own in links:
        hook = lambda own, x, side, link=link, site=site: {"": link.aux(own, x, side, site)}
        made = run(link, site, "aux", hook, own, x_q, query)
        if made is not None and made[""] is not None:
            run(link, site, "losses", lambda sums, link=link, site=site: link.losses(sums, site), made[""])
    return counted


def _routed(link: HeadTransform, own: PyTree, x: Any, site: Site) -> dict[str, Any]:
    found = link.route(own, x, site)
    head, note = (None, None) if found is None else found
    return {"head": head, "notes": {} if note is None else {site.name: note}}


def _name(link: HeadTransform, site: Site, hook: str, found: Traced, names: frozenset[str]) -> str:
    """What products are called, of which these results depend."""
    if hook == "route" or (hook == "query_side" and link.overrides("route") and names <= {"gate", "notes"}):
        return "router"
    fields = {NAMES.get(name) for name in names & found.changed - {"notes"}}
    one = fields.pop() if len(fields) == 1 and hook in ("query_side", "key_side", "expand") else None
    return one or f"{site.name}: {hook}"


def _output_heads(attn: Attention, query: QuerySide) -> int:
    return attn.sizes.output_heads if query.head is None else query.query.shape[-2]


def _pair_bias(coupling: Coupling, q_len: int, side: KeySide, placed: bool) -> int:
    """Products of a pair bias's rule, on all pairs at once."""
    rule = coupling.pair_bias
    assert rule is not None
    rows = side.key.shape[:-2] if placed else side.key.shape[-3:-2]
    q, k = ShapeDtypeStruct((q_len,), jnp.int32), ShapeDtypeStruct(rows, jnp.int32)
    run = lambda params, q, k: {"": rule.of(params, q, k)}
    return sum(_traced("the pair bias", run, rule.params, q, k).macs.values())


def _traced(what: str, function: Callable[..., dict[str, Any]], *args: Any) -> Traced:
    try:
        return trace_named(function, *args)
    except Uncounted as error:
        raise ValueError(
            f"ledger: the products of {what} cannot be counted: {error}. Fix: a scan of known length, or "
            "products of jax.numpy."
        ) from error
