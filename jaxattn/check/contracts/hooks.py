"""Contracts of the hooks, one by one: what they may read, what they must leave, what is 0 at 0."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.attention import Attention, attention
from jaxattn.check.contracts.form import BATCH, QUICK, Made, contract, far_apart, finite, same
from jaxattn.check.verdict import named_leaves
from jaxattn.params import declared_axes, expected
from jaxattn.sides import KeySide, QuerySide
from jaxattn.transform import HeadTransform, Site

PyTree = Any
VOCABULARY = ("m", "d", "v", "h", "hl", "hs", "hv", "hK", "hV", "g", "a", "r", "i", "o", "u", "c")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
SPAN = re.compile(r"h\[(\d*):(\d*)\]")


@contract("behaviour", "mixes are filled in claimed stages alone, and every hook runs")
def hooks_run(made: Made) -> Iterator[str]:
    attn = made.attn
    for trace in _asked(made).values():
        trace()
    x_q, x_k, x_v = made.x_q, *made.x_kv
    found = jax.eval_shape(lambda p: attn.apply(p, x_q, (x_k, x_v), engine="dense")[0], made.params)
    want = (*x_q.shape[:-1], made.spec.out)
    if found.shape != want:
        yield (
            f"its output has shape {found.shape}, expected {want}. Fix: hooks keep the axes of what they get"
        )


def _asked(made: Made) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """The hooks that make the form; a call traces one anew, to its program and shapes."""
    attn = made.attn
    hooks = {
        "init": lambda params, x_q, x_kv: attn.init(jax.random.key(1)),
        "query_side": lambda params, x_q, x_kv: attn.query_side(params, x_q),
        "key_side": lambda params, x_q, x_kv: attn.expand(attn.key_side(params, x_kv)),
        "coupling": lambda params, x_q, x_kv: attn.coupling(params),
    }

    def traced(hook: Callable[..., PyTree]) -> tuple[Any, Any]:
        anew = lambda *args: hook(*args)  # JAX keeps the program of a function that it has seen
        return jax.make_jaxpr(anew, return_shape=True)(made.params, made.x_q, made.x_kv)

    return {name: functools.partial(traced, hook) for name, hook in hooks.items()}


@contract("axes", "declare has a string of axis names for every leaf, one name an axis, heads by their kind")
def axes_declared(made: Made) -> Iterator[str]:
    found, named = expected(made.attn), declared_axes(made.attn)
    for path, shape in found.shapes.items():
        names = named.get(path)
        if not isinstance(names, str):
            yield (
                f"{path} has no axis names. Fix: declare returns ja.Declaration(axes=...), a tree like the "
                "leaves "
                f'with a string such as "m hs" of {len(shape)} names'
            )
        elif len(names.split()) != len(shape):
            yield f'{path} is declared "{names}", but has shape {shape}. Fix: one name for each axis'
        else:
            yield from _named_axes(made, path, names, shape)
    for path in named:
        if path.startswith("heads/") and path not in found.shapes:
            yield (
                f"axes are declared for {path}, which init does not make. Fix: leave it out of the "
                "declaration"
            )


def _named_axes(made: Made, path: str, names: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Axis names that are not known, or whose size is another."""
    s, z = made.spec, made.attn.sizes
    counts = {
        "hl": z.logit_heads, "hs": z.softmax_heads, "hv": z.output_heads,
        "hK": z.key_heads, "hV": z.value_heads,
    }  # fmt: skip
    sizes = {name: {count} for name, count in counts.items()} | {
        "h": set(counts.values()) | {s.heads},
        "m": {s.model, s.in_q, s.in_k, s.in_v, s.out},
        "d": {s.d_qk, z.qk_width},
        "v": {s.d_v, z.value_width, z.output_width},
        "one": {1},
        "two": {2},
    }
    for name, size in zip(names.split(), shape, strict=True):
        if span := SPAN.fullmatch(name):
            low, high = int(span[1] or 0), int(span[2] or z.output_heads)
            want = {high - low}
        elif len(name) < 3 and name not in VOCABULARY:
            yield (
                f'{path} is declared "{names}", where {name!r} is no axis of jaxattn/axes.py. Fix: one of '
                f"{', '.join(VOCABULARY)}, or a word of your own of three letters or more"
            )
            continue
        else:
            want = sizes.get(name, {size})
        if size not in want:
            yield (
                f'{path} is declared "{names}", but its axis {name} is {size}, expected '
                f"{' or '.join(map(str, sorted(want)))}. Fix: the name of what the axis holds"
            )


@contract("numbers", "finish(0) = 0, with finite gradients there, so that a row without keys gives b_O alone")
def finish_of_zero(made: Made) -> Iterator[str]:
    if not any(link.overrides("finish") for link in made.attn.links):
        return
    z, side = made.attn.sizes, made.attn.query_side(made.params, made.x_q)
    zero = jnp.zeros((*made.x_q.shape[:-1], z.output_heads, z.output_width))
    for link, own, site in made.links:
        finish = lambda own, heads, link=link, site=site: link.finish(own, heads, side, site)
        got, back = jax.vjp(finish, own, zero)
        if got.shape != zero.shape:
            yield f"{site.name}: finish makes {got.shape} of {zero.shape}. Fix: heads keep their shape"
        elif bool(jnp.any(got != 0)):
            worst = float(jnp.abs(got).max())
            yield (
                f"{site.name}: finish(0) is {worst:.3g}, so that hidden rows would write something. Fix: "
                "multiply heads, or map them linearly; what is added belongs to W_O (HeadSpec(bias_out=True))"
            )
        elif not finite(back(jnp.ones_like(got))):
            yield (
                f"{site.name}: the gradient of finish at heads of 0 is not finite. Fix: a root or a norm of "
                "jnp.where(square > 0, square, 1), or an epsilon inside of it"
            )


@contract(
    "behaviour", "hooks are pure: two calls give the same, nothing is kept between them or changed in params"
)
def hooks_are_pure(made: Made) -> Iterator[str]:
    asked, before = _asked(made), jax.tree.structure(made.params)
    first = {hook: trace() for hook, trace in asked.items()}
    for hook, trace in reversed(asked.items()):  # in another order, so that what one keeps reaches another
        if not _same_program(trace(), first[hook]):
            yield (
                f"{hook}: a second call gives something else. Fix: read the arguments and self alone; "
                "random numbers come from rng; PairBias.of is a function of a module or a frozen dataclass"
            )
    if attention(made.spec, made.transform) != made.attn:
        yield "adapt: a second call gives other sizes. Fix: read sizes and self alone"
    for link, _, site in made.links:
        if link.declare(site).axes != link.declare(site).axes:
            yield f"{site.name}: declare gives other axes the second time. Fix: read self and `at` alone"
    if jax.tree.structure(made.params) != before:
        yield "a hook changed the parameters that it was given. Fix: make new dicts"
    try:
        with jax.checking_leaks():
            for trace in asked.values():
                trace()
    except Exception as error:  # jax raises a bare Exception for a tracer that is kept
        if "leak" not in str(error).lower():
            raise
        yield "a hook keeps a traced array after it returns. Fix: return it; keep nothing in globals or self"


def _same_program(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Equal as text, in their constants, and in the static parts of what they return."""
    (a, shape_a), (b, shape_b) = one, other
    text = [ADDRESS.sub("", str(program.jaxpr)) for program in (a, b)]
    statics = jax.tree.structure(shape_a) == jax.tree.structure(shape_b)
    return text[0] == text[1] and statics and same(a.consts, b.consts)


class _Probed(NamedTuple):
    """Both sides; and by link, gates and key biases: alone, and where a link before it had put some there."""

    query: QuerySide
    key: KeySide
    gates: dict[str, tuple[Array | None, Array | None]]
    biases: dict[str, tuple[Array | None, Array | None]]


@functools.lru_cache(maxsize=4)
def _probe(attn: Attention) -> Callable[..., _Probed]:
    """One program of all that is asked about the values of sides."""

    def probe(params: PyTree, x_q: Array, x_kv: PyTree, gate: Array, bias: Array) -> _Probed:
        plain = dataclasses.replace(attn, links=(), sites=())  # the same resolved sizes, projected alone
        core, gates, biases = params | {"heads": {}}, {}, {}
        query, key = plain.query_side(core, x_q), plain.key_side(core, x_kv)
        for link, site in zip(attn.links, attn.sites, strict=True):
            own = params["heads"].get(site.name, {})
            gated = query._replace(gate=gate if query.gate is None else query.gate * gate)
            biased = key._replace(bias=bias if key.bias is None else key.bias + bias)
            after, found = link.query_side(own, x_q, gated, site), link.key_side(own, x_kv[0], biased, site)
            query, key = link.query_side(own, x_q, query, site), link.key_side(own, x_kv[0], key, site)
            gates[site.name], biases[site.name] = (query.gate, after.gate), (key.bias, found.bias)
        whole = attn.query_side(params, x_q)._replace(notes={}), attn.expand(attn.key_side(params, x_kv))
        return _Probed(*whole, gates, biases)

    return jax.jit(probe, compiler_options=QUICK)


def _probed(made: Made, x_q: Array, x_kv: PyTree) -> _Probed:
    z = made.attn.sizes
    gate = 1 + jnp.arange(z.output_heads) + jnp.zeros((*made.x_q.shape[:-1], z.output_heads))
    bias = jnp.cos(jnp.arange(z.logit_heads)) + jnp.zeros((*made.x_kv[0].shape[:-1], z.logit_heads))
    return _probe(made.attn)(made.params, x_q, x_kv, gate[..., None], bias)


@contract("behaviour", "what a row contributes depends on that row alone, with batch axes or without")
def rows_are_apart(made: Made) -> Iterator[str]:
    def others(x: Array) -> Array:
        """Other values in all rows but row 2 of example 0."""
        moved = x[::-1, ::-1] + 1
        return moved.at[0, 2].set(x[0, 2])

    before, after = (
        _probed(made, change(made.x_q), jax.tree.map(change, made.x_kv)) for change in (lambda x: x, others)
    )
    fix = "Fix: a row's own state alone: no mean, no convolution, nothing along the batch"
    for hook, old, new in (("query_side", before.query, after.query), ("key_side", before.key, after.key)):
        for (path, a), (_, b) in zip(named_leaves(old), named_leaves(new), strict=True):
            if far_apart(b[0, 2], a[0, 2]):
                yield (
                    f"{hook}: {path} of a row is another where other rows are, so that steps of a cache "
                    f"would not be the full pass. {fix}"
                )
    attn, params = made.attn, made.params
    for hook, side_of, x in (
        ("query_side", attn.query_side, made.x_q),
        ("key_side", attn.key_side, made.x_kv),
    ):
        batched, one = (
            [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(side_of, params, states))]
            for states in (x, jax.tree.map(lambda x: x[0], x))
        )
        if [(BATCH, *shape) for shape in one] != batched:
            yield (
                f"{hook}: without a batch axis it makes other shapes. Fix: name the last axes only, with "
                "`...` "
                'before them ("... q m, m h -> ... q h")'
            )


@contract("behaviour", "what earlier links put there stays: gates multiply, key biases add, notes are kept")
def earlier_links_stay(made: Made) -> Iterator[str]:
    found, z = _probed(made, made.x_q, made.x_kv), made.attn.sizes
    gate, bias = 1 + jnp.arange(z.output_heads)[:, None], jnp.cos(jnp.arange(z.logit_heads))
    for link, own, site in made.links:
        alone, after = found.gates[site.name]
        if after is None or far_apart(after, gate + jnp.zeros_like(after) if alone is None else alone * gate):
            yield (
                f"{site.name}: query_side drops the gate of a link before it. Fix: at.gate(side, gate), "
                "which multiplies what is there"
            )
        alone, after = found.biases[site.name]
        first = link.name in z.projected_by  # nothing can come before it
        want = bias if alone is None else alone + bias
        if not first and (after is None or far_apart(after, want + jnp.zeros_like(after))):
            yield f"{site.name}: key_side drops the key bias of a link before it. Fix: add to side.bias"
        yield from _kept(made, link, own, site)


def _kept(made: Made, link: HeadTransform, own: PyTree, site: Site) -> Iterator[str]:
    """Fields that a hook must hand on as they are."""
    plain = dataclasses.replace(made.attn, links=(), sites=())
    core, changed = made.params | {"heads": {}}, []

    def look(at: Array, valid: Array, at_k: Array, valid_k: Array) -> None:
        query = plain.query_side(core, made.x_q, valid, at)._replace(notes={"another link": at})
        key = plain.key_side(core, made.x_kv, valid_k, at_k)
        after = link.query_side(own, made.x_q, query, site), link.key_side(own, made.x_kv[0], key, site)
        for hook, old, new in (("query_side", query, after[0]), ("key_side", key, after[1])):
            changed.extend((hook, f) for f in ("valid", "position") if getattr(old, f) is not getattr(new, f))
        if "another link" not in after[0].notes:
            changed.append(("query_side", "the notes of another link"))

    q, k = made.x_q.shape[:-1], made.x_kv[0].shape[:-1]
    jax.eval_shape(look, jnp.zeros(q, int), jnp.ones(q, bool), jnp.zeros(k, int), jnp.ones(k, bool))
    for hook, field in changed:
        yield (
            f"{site.name}: {hook} changes {field}. Fix: side._replace(...) with what it makes alone; "
            "at.note for notes"
        )


@contract(
    "numbers",
    "aux gives sums that add up over examples, padding counts nothing, losses are finite without rows",
)
def sums_add_up(made: Made) -> Iterator[str]:
    for link, own, site in made.links:
        if not link.overrides("aux"):
            continue

        def sums(x: Array, valid: Array, link=link, own=own, site=site) -> PyTree:
            x = jnp.where(valid[..., None], x, 0)
            return link.aux(own, x, made.attn.query_side(made.params, x, valid), site)

        x, run = made.x_q, jax.jit(sums, compiler_options=QUICK)
        real = jnp.broadcast_to(jnp.arange(x.shape[1]) < x.shape[1] - 2, x.shape[:-1])
        every = jnp.ones_like(real)
        whole, parts = run(x, every), [run(x[i : i + 1], every[i : i + 1]) for i in range(len(x))]
        if any(map(far_apart, jax.tree.leaves(_added(parts)), jax.tree.leaves(whole))):
            yield (
                f"{site.name}: aux of a batch is not the sum over its examples. Fix: sums and counts; means "
                "and products belong to losses(sums, at)"
            )
        few, rest = run(x, real), run(x, ~real)
        if any(map(far_apart, jax.tree.leaves(_added([few, rest])), jax.tree.leaves(whole))):
            yield (
                f"{site.name}: aux counts rows that are not valid. Fix: multiply by side.valid where it is "
                "there"
            )
        for rows in (whole, jax.tree.map(jnp.zeros_like, whole)):
            losses = link.losses(rows, site) if rows is not None else {}
            if not finite([loss.value for loss in losses.values()]):
                yield (
                    f"{site.name}: its losses are not finite where no row counts. Fix: jnp.maximum(count, 1)"
                )


def _added(sums: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: sum(leaves), *sums)
