"""ledger: parameters, multiply-accumulates, elements and bytes of one sublayer, from its form's shapes."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.typing import DTypeLike

from jaxattn.attention import Attention
from jaxattn.count import trace_named
from jaxattn.engines import routed as routed_engine
from jaxattn.engines.call import logit_heads
from jaxattn.ledger_hooks import hook_macs
from jaxattn.route import block_shape
from jaxattn.sides import Coupling, Factors, KeySide, Mix, QuerySide

PyTree = Any


class Ledger(NamedTuple):
    """What one forward pass holds and does. Prints as a table; `as_dict` is plain data.

    Attributes:
        sizes: batch, q_len, k_len, how many of these rows are cached, and head counts.
        parameters: elements of each group of leaves.
        macs: multiply-accumulates of each contraction; a MAC is one multiply and one add.
        products: elementwise products (diagonal factors, gates), counted apart from MACs.
        activations: elements of each array that the form or the formula makes; of cached rows only what
            reading them makes anew.
        score_elements: elements of the first logits tensor, B * hl * q * k.
        cache_elements: elements of the stored key side for each source row.
        parameter_bytes: of the leaves in their type.
        heads: output heads that are executed for a token, and how many are active (gate not zero).
    """

    sizes: dict[str, int]
    parameters: dict[str, int]
    macs: dict[str, int]
    products: dict[str, int]
    activations: dict[str, int]
    score_elements: int
    cache_elements: int
    parameter_bytes: int
    heads: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the totals: for JSON, or to compare."""
        data: dict[str, Any] = self._asdict()
        for name in ("parameters", "macs", "products", "activations"):
            data[f"total_{name}"] = sum(data[name].values())
        return data

    def __str__(self) -> str:
        s = self.sizes
        cached = f" ({s['cached']} cached)" if s["cached"] else ""
        lines = [
            f"attention ledger of one layer: batch {s['batch']}, q {s['q_len']}, k {s['k_len']}{cached}, "
            f"heads {self.heads['executed']} executed, {self.heads['active']} active"
        ]
        for title, group in (
            ("parameters", self.parameters),
            ("MACs", self.macs),
            ("elementwise products", self.products),
            ("activation elements", self.activations),
        ):
            lines.append(f"{title:<28}{sum(group.values()):>16,}")
            lines += [f"  {name:<26}{count:>16,}" for name, count in group.items() if count]
        lines.append(f"{'score elements':<28}{self.score_elements:>16,}")
        lines.append(f"{'cache elements a token':<28}{self.cache_elements:>16,}")
        lines.append(f"{'parameter bytes':<28}{self.parameter_bytes:>16,}")
        return "\n".join(lines)


def ledger(
    attn: Attention,
    batch: int,
    q_len: int,
    k_len: int,
    *,
    cached: int = 0,
    dtype: DTypeLike = jnp.float32,
    routed: bool = False,
    params: PyTree | None = None,
) -> Ledger:
    """Count one forward pass of an attention sublayer.

    Every number comes from shapes: of the parameters, of the two sides, of the coupling. What the hooks of
    transforms multiply is read from their traced programs, and named by the field that it changes
    ("dynamic generators", "router", "gate generators", "key bias", "query mixing", ...) or, where that is not
    one field, by link and hook ("mine: finish"). A mask takes nothing away: these are the counts of the whole
    score rectangle.

    Args:
        attn: what `attention` made.
        batch, q_len, k_len: rows; self-attention where both lengths are those of one state.
        cached: how many of the k_len rows are in a cache (or another key side) already and are not projected
            again. One step of decoding is q_len=1, k_len=4096, cached=4095; a source that is read again is
            cached=k_len. A cache is read as a whole, so k_len is its size.
        dtype: of states, and of parameters where `params` are not given.
        routed: count the engine "routed": queries, scores, values and output of active heads alone, in
            blocks whose empty slots are counted too (`jaxattn.route`); keys and values stay dense.
        params: the parameters to count, instead of those that `init` makes. An array that you put at two
            paths (tied) is counted once, where it comes first; leaves of your own (`allow`) are counted too.

    Raises:
        ValueError: for a negative number of rows, or more cached rows than there are; for `routed`, where
            nothing routes; where params are not those of this attention; for a hook whose products cannot be
            counted (a while loop of unknown length, a Pallas kernel), by its name.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> spec = HeadSpec(model=6, heads=2, d_qk=3, d_v=2, use_bias=True)
        >>> book = ledger(attention(spec), batch=2, q_len=3, k_len=4)
        >>> sum(book.parameters.values()), book.parameter_bytes, sum(book.macs.values())
        (142, 568, 1080)
        >>> step = ledger(attention(spec), batch=2, q_len=1, k_len=4, cached=3)
        >>> step.macs["key projection"], step.macs["scores"], book.macs["key projection"]
        (72, 48, 288)

    Source: the accounting of Q, K, V and O by contracted dimensions; DESIGN's law 11 checks it against the
    dot products of the traced program.
    """
    spec = attn.spec
    for name, rows in (("batch", batch), ("q_len", q_len), ("k_len", k_len), ("cached", cached)):
        if rows < 0:
            raise ValueError(f"ledger: {name} = {rows}, expected at least 0.")
    if cached > k_len:
        raise ValueError(
            f"ledger: cached = {cached} of k_len = {k_len} rows. Fix: k_len counts old and new rows together."
        )
    if params is None:
        tree = jax.eval_shape(lambda: attn.init(jax.random.key(0), dtype))
    else:
        tree = params
        attn.check_params(tree)
    x_q = ShapeDtypeStruct((batch, q_len, spec.in_q), dtype)
    state = lambda rows, m: ShapeDtypeStruct((*rows, m), dtype)
    source = lambda *rows: (state(rows, spec.in_k), state(rows, spec.in_v))
    query = jax.eval_shape(lambda p, x: attn.query_side(p, x, routed=routed), tree, x_q)
    stored = jax.eval_shape(attn.key_side, tree, source(batch, k_len))
    key = jax.eval_shape(attn.expand, stored)
    coupling = jax.eval_shape(attn.coupling, tree)
    out_kernel, new = tree["out"]["kernel"], batch * (k_len - cached)
    stages = _stages(query, key, coupling, batch * q_len * k_len)
    if routed:
        active, heads = query.query.shape[-2], logit_heads(query)
        rows = _slots(batch * q_len, active, heads)
        pairs = k_len * batch * _slots(q_len, active, heads, routed_engine.SLOTS)
        work = _Work(rows, pairs, pairs, rows)
        stages = stages._replace(heads=active, activations={"logits": pairs, "weights": pairs})
    else:
        rows, heads = batch * q_len, query.query.shape[-2]
        pairs = rows * k_len
        work = _Work(rows * attn.sizes.query_heads, pairs * heads, pairs * stages.heads, rows * stages.heads)

    terms = Counter({
        "query projection": work.query * spec.in_q * attn.sizes.qk_width,
        "key projection": new * math.prod(tree["key"]["kernel"].shape),
        "value projection": new * math.prod(tree["value"]["kernel"].shape),
    })  # fmt: skip
    terms += hook_macs(attn, tree, x_q, source(batch, k_len - cached), query, stored, cached > 0)
    terms += Counter(stages.macs) + Counter({
        "scores": work.scores * query.query.shape[-1],
        "values": work.weights * key.value.shape[-1],
        "output projection": work.out * math.prod(out_kernel.shape[1:]),
    })  # fmt: skip
    products = dict(stages.products)
    if query.gate is not None:
        products["gates"] = batch * q_len * stages.heads * key.value.shape[-1]
    changed = trace_named(lambda side: attn.expand(side)._asdict(), stored).changed
    made = jax.eval_shape(attn.key_side, tree, source(batch, k_len - cached))
    made = made._replace(**{name: getattr(key, name) for name in changed})  # whole, whenever it is read
    activations = {
        **_elements("query side", query._replace(notes={})),
        **_elements("key side", made),
        **stages.activations,
        "heads": batch * q_len * stages.heads * key.value.shape[-1],
        "output": batch * q_len * out_kernel.shape[-1],
    }
    kept = _once(tree)
    return Ledger(
        sizes=dict(batch=batch, q_len=q_len, k_len=k_len, cached=cached, logit_heads=heads),
        parameters={name: _size(leaves) for name, leaves in kept.items()},
        macs=dict(terms),
        products=products,
        activations=activations,
        score_elements=work.scores,
        cache_elements=_size(jax.eval_shape(attn.key_side, tree, source(1))),
        parameter_bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kept)),
        heads=dict(executed=stages.heads, active=attn.sizes.active_heads or stages.heads),
    )


def _once(params: PyTree) -> dict[str, list[Any]]:
    """The leaves of each group, an array that is met again left out."""
    seen: set[int] = set()
    groups: dict[str, list[Any]] = {}
    for name, group in params.items():
        groups[name] = [x for x in jax.tree.leaves(group) if id(x) not in seen]
        seen |= {id(x) for x in groups[name]}
    return groups


class _Work(NamedTuple):
    """How often each step is done: rows times heads that are projected, scored against each key, weigh
    each value, and are written."""

    query: int
    scores: int
    weights: int
    out: int


def _slots(rows: int, active: int, heads: int, most: int | None = None) -> int:
    """Slots of all blocks, empty ones included."""
    return math.prod(block_shape(rows, active, heads, most)) if rows * active else 0


class _Stages(NamedTuple):
    heads: int
    macs: dict[str, int]
    products: dict[str, int]
    activations: dict[str, int]


def _stages(query: QuerySide, key: KeySide, coupling: Coupling, pairs: int) -> _Stages:
    """What happens to each pair between scores and values."""
    heads = logit_heads(query)
    counted: dict[str, int] = {"static mixes": 0, "dynamic mixes": 0}
    diagonal = 0
    activations = {"logits": heads * pairs}
    for site, name in (("pre", "logits"), ("post", "weights")):
        if site == "post":
            activations["weights"] = heads * pairs
        stages = zip(*(getattr(x, site) for x in (coupling, query, key)), strict=True)
        for number, (mix, *both) in enumerate(stages):
            static, heads_out = _mix_macs(mix, heads)
            counted["static mixes"] += static * pairs
            for factors in both:
                dots, products = _factor_counts(factors)
                counted["dynamic mixes"] += dots * pairs
                diagonal += products * pairs
            heads = heads_out
            activations[f"mixed {name} {number}"] = heads * pairs
    return _Stages(heads, counted, {"diagonal factors": diagonal} if diagonal else {}, activations)


def _mix_macs(mix: Mix, heads: int) -> tuple[int, int]:
    """MACs of the static map for one pair, and the heads that it leaves."""
    if mix.matrix is None:
        return 0, heads
    return math.prod(mix.matrix.shape), mix.groups * mix.matrix.shape[-1]


def _factor_counts(factors: Factors | None) -> tuple[int, int]:
    """MACs and elementwise products that one row's factors cost for one pair."""
    if factors is None:
        return 0, 0
    dots = sum(math.prod(f.shape[-3:]) for f in (factors.down, factors.up) if f is not None)
    if factors.dense is not None:
        dots += math.prod(factors.dense.shape[-2:])
    return dots, 0 if factors.diag is None else factors.diag.shape[-1]


def _elements(name: str, side: QuerySide | KeySide) -> dict[str, int]:
    """Elements of each field of a side, row factors as one."""
    fields: Mapping[str, Any] = side._asdict()
    factors = _size((fields["pre"], fields["post"]))
    rest = {f: _size(v) for f, v in fields.items() if f not in ("pre", "post")}
    named = {f"{name}: {field}": size for field, size in rest.items() if size}
    return named | ({f"{name}: row factors": factors} if factors else {})


def _size(tree: PyTree) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
