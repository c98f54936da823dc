"""trace: the attention ledger. Every stage with its shape, its axes, what one number says, what must be true.

The stages follow the order in which attention is debugged: the outer contract and h * d = m (input), the
split and merge of distinct numbers (head round trip), the axes of queries and keys (Q, K, V, scores), the
scale (scores), what the mask means and that it leaves every query a key (masked scores), the softmax axis
(weights), the sum over keys (heads), the merge (merged), the layout, the reaction to rows that are hidden
and the comparison with a reference (output). The first stage that is wrong is the one to repair.
"""

import math
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxattn import project
from jaxattn.attend import attend
from jaxattn.attention import Attention
from jaxattn.check.tracing import formulas
from jaxattn.check.tracing.invariants import MEANINGS, Facts, Invariant, agree, judge, place
from jaxattn.check.tracing.stages import STAGES, Stages, axes_of, check_stages, numbers, walk
from jaxattn.check.tracing.traced import Trace, TracedStage
from jaxattn.engines.call import CAPTURES
from jaxattn.masks import Mask, as_mask

PyTree = Any


def trace(
    attn: Attention,
    params: PyTree,
    x_q: Array,
    x_kv: Array | tuple[Array, Array] | None = None,
    mask: Mask | None = None,
    *,
    bias: Array | None = None,
    positions: Array | tuple[Array | None, Array | None] | None = None,
    engine: str = "auto",
    remask: bool = False,
    dead_rows: bool = False,
    tolerance: float | None = None,
    against: Trace | None = None,
) -> Trace:
    """The ledger of one of our attentions, stage by stage, beside formulas in float64.

    The stages are run dense, outside of jit: for small sizes. Transforms add their parts to the formulas by
    their own hooks; everything else is recomputed apart. The output is also held to what `apply` returns.

    Args:
        attn: what `attention` made.
        params, x_q, x_kv, mask, bias, positions, engine, remask: as in `Attention.apply`.
        dead_rows: whether queries that see no key are meant; they must then have no weight. Rows that
            `padding` hides count as no query.
        tolerance: of comparisons, relative to the largest number and at least to 1; None is eps ** 0.6 of
            the coarsest type up to the stage (4e-10, 7e-5, 5e-2 for float64, float32, bfloat16).
        against: a trace to compare every stage with.

    Raises:
        TypeError: under jit. What `apply` itself raises.

    Example:
        >>> import jaxattn as ja
        >>> attn = ja.attention(ja.HeadSpec(model=6, heads=2))
        >>> x = jax.random.normal(jax.random.key(1), (5, 6))
        >>> found = trace(attn, attn.init(jax.random.key(0)), x, mask=ja.causal())
        >>> found.first, found.stage("weights").shape, found.stage("weights").axes
        (None, (2, 5, 5), 'hs q k')
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, x_q, x_kv))):
        raise TypeError(
            "trace: got traced arrays, expected values. Fix: call it outside of jit, grad and vmap."
        )
    mask = as_mask(mask)
    source = x_q if x_kv is None else x_kv
    x_k, x_v = source if isinstance(source, tuple) else (source, source)
    pair = positions if isinstance(positions, tuple) else (positions, positions if x_kv is None else None)

    def apply(x_q, x_k, x_v):
        kv = None if x_kv is None else (x_k, x_v)
        return attn.apply(
            params, x_q, kv, mask, bias=bias, engine=engine, positions=positions, remask=remask
        )[0]

    with jax.default_matmul_precision("highest"):
        y = apply(x_q, x_k, x_v)  # first: it explains what does not fit
        valid = mask.source_valid(x_k.shape[-2])
        query_side = attn.query_side(params, x_q, valid if x_kv is None else None, pair[0])
        key_side = attn.key_side(params, (x_k, x_v), valid, pair[1])
        whole, coupling = attn.expand(key_side), attn.coupling(params)

        def finish(heads):
            for link, site in zip(attn.links, attn.sites, strict=True):
                heads = link.finish(params["heads"].get(site.name, {}), heads, query_side, site)
            return heads

        heads, captured = attend(
            query_side, whole, coupling, mask, bias=bias, engine="dense", capture=CAPTURES, remask=remask,
            finish=finish,
        )  # fmt: skip
        out = project.unproject(params["out"], heads)
        visible = _visible(mask, x_q, x_k, pair)
        form = formulas.of_form(query_side, whole, coupling, bias, visible, finish)
        form = formulas.with_projections(form, attn, params, query_side, key_side, (x_k, x_v))
        given = Stages(
            split=project.split_heads,
            merge=project.merge_heads,
            project_q=lambda _: query_side.query,
            project_k=lambda _: whole.key,
            project_v=lambda _: whole.value,
            scores=lambda *_: captured["logits"],
            mix_scores=lambda _: captured["mixed_logits"],
            softmax=lambda _: captured["weights"],
            mix_weights=lambda _: captured["mixed_weights"],
            combine=lambda *_: captured["heads"],
            finish=lambda _: heads,
            output=lambda _: out,
        )
        z, spec = attn.sizes, attn.spec
        sizes = _sizes(x_q, x_k) | {
            "hl": z.logit_heads, "hs": z.softmax_heads, "hv": z.output_heads, "hK": whole.key.shape[-2],
            "hV": whole.value.shape[-2], "d": query_side.query.shape[-1], "v": whole.value.shape[-1],
        }  # fmt: skip
        facts = Facts(
            visible=visible,
            rows=None if query_side.valid is None else np.asarray(query_side.valid),
            scale=coupling.scale,
            sizes=sizes,
            deliberate="each head has a kernel [m, d] of its own",
            residual=spec.out == spec.in_q,
            mixes=bool(z.post),
            dead_rows=dead_rows,
            value_of=coupling.value_of,
            tolerance=0.0,
        )

        def last(found: np.ndarray, limit: float) -> list[Invariant]:
            same = agree("output", f"is what apply returns (engine {engine!r})", found, numbers(y), limit)
            return [same, _unmoved(apply, (x_q, x_k, x_v), x_kv is None, visible, numbers(y), limit)]

        return _ledger(given, form, (x_q, x_k, x_v), facts, tolerance, against, last)


def trace_of(
    stages: Stages,
    x_q: Any,
    x_kv: Any = None,
    mask: Mask | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    d: int | None = None,
    scale: float | None = None,
    residual: bool = True,
    dead_rows: bool = False,
    expected: Stages | None = None,
    tolerance: float | None = None,
    against: Trace | None = None,
) -> Trace:
    """The ledger of anyone's attention, from the callables that it is made of.

    What is not given is done by the formula of plain attention, so that one suspicious callable can be
    looked at alone.

    Args:
        stages: the callables.
        x_q: [..., q, m]; x_kv: [..., k, m], a pair (x_k, x_v), or None for self-attention. Arrays of any
            library that `np.asarray` reads.
        mask: a `ja.masks` value, what the code means by its mask; True = visible.
        heads, kv_heads: heads, and key and value heads, which serve the heads in block order.
        d: head width of queries and keys; None is m / heads.
        scale: of the scores; None is 1/sqrt(d).
        residual: whether the output is added to x_q.
        dead_rows, tolerance, against: as in `trace`.
        expected: formulas to be held to in place of the plain ones (numpy, heads [..., t, h, d]): for
            projections, mixes and the output, which have none, and for orders of channels of one's own.

    Raises:
        ValueError, TypeError: for callables that stand for the same stage, a mask that is none, sizes.

    Example:
        >>> x = np.linspace(-1, 1, 30).reshape(5, 6)
        >>> wrong = Stages(scores=lambda q, k: np.einsum("qhd,khd->hqk", q, k))
        >>> found = trace_of(wrong, x, heads=2)
        >>> found.first, found.stage("scores").broken[0].name
        ('scores', 'is scale * <query, key>')
    """
    check_stages(stages)
    source = x_q if x_kv is None else x_kv
    states = (x_q, *(source if isinstance(source, tuple) else (source, source)))
    m, kv_heads = x_q.shape[-1], heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"trace_of: heads = {heads}, kv_heads = {kv_heads}, expected kv_heads that divide heads. "
            "Fix: leave kv_heads out where every head has its own."
        )
    width = max(1, m // heads) if d is None else d
    scale = 1 / math.sqrt(width) if scale is None else scale
    visible = _visible(as_mask(mask), x_q, states[1], (None, None))
    sizes = _sizes(x_q, states[1]) | {"hl": heads, "hK": kv_heads, "hV": kv_heads, "d": width}
    mixes = stages.mix_weights is not None
    if stages.mix_scores is None:
        sizes["hs"] = heads
        if not mixes:
            sizes["hv"] = heads
    rules = {} if expected is None else expected._asdict()
    own = {name: rule for name, rule in rules.items() if callable(rule) and name != "array"}
    form = formulas.plain(scale)._replace(**own)
    facts = Facts(visible, None, scale, sizes, "" if d is None else "d was given", residual, mixes, dead_rows,
                  None, 0.0)  # fmt: skip

    def run(*states) -> np.ndarray | None:
        *_, final = walk(stages, form, states, visible, sizes)
        return final.array if final.name == "output" else None

    def last(found: np.ndarray, limit: float) -> list[Invariant]:
        return [_unmoved(run, states, x_kv is None, visible, found, limit)]

    return _ledger(stages, form, states, facts, tolerance, against, last)


def _sizes(x_q: Any, x_k: Any) -> dict[str, int]:
    batch = zip(axes_of("input", x_q.ndim), x_q.shape, strict=True)
    return {**dict(batch), "k": x_k.shape[-2]}


def _visible(mask: Mask, x_q: Any, x_k: Any, positions: tuple[Array | None, Array | None]) -> np.ndarray:
    """The mask as a table [..., h or 1, q, k] with all batch axes."""
    table = np.asarray(mask.table(x_q.shape[-2], x_k.shape[-2], *positions))
    return np.broadcast_to(table, (*x_q.shape[:-2], *table.shape[-3:]))


def _bumped(x: Any, row: int) -> Any:
    """A copy, of the same library, with one row moved."""
    if hasattr(x, "at"):
        return x.at[..., row, :].add(1)
    x = x.detach().clone() if hasattr(x, "detach") else np.array(x)
    x[..., row, :] += 1
    return x


def _unmoved(run, states, alone: bool, visible, y: np.ndarray, limit: float) -> Invariant:
    """A source row changes; the outputs of queries that do not see it must not."""
    rule = "a hidden source row moves no output"
    hidden = ~visible.any(-3)  # [..., q, k]
    counted = hidden & ~np.eye(*hidden.shape[-2:], dtype=bool) if alone else hidden
    of_row = counted.reshape(-1, counted.shape[-1]).sum(0)
    partly = np.where(visible.any(-2).reshape(-1, visible.shape[-1]).any(0), of_row, 0)
    of_row = partly if partly.any() else of_row  # a row that someone sees tells more than padding
    if not of_row.any():
        return Invariant(rule, None, "does not apply: every query sees every row")
    row = int(np.argmax(of_row))
    kept = 0 if alone else 1
    after = run(*states[:kept], *(_bumped(x, row) for x in states[kept:]))
    if after is None:
        return Invariant(rule, None, "does not apply: the changed states came to no output")
    far = np.where(counted[..., row, None], np.abs(numbers(after) - y), 0)
    worst, limit = float(np.nan_to_num(far, nan=np.inf).max()), limit * max(1.0, float(np.abs(y).max()))
    where = f"k={row}, seen in {place('output', far)}" if worst > limit else ""
    return Invariant(rule, worst <= limit, worst, limit, where)


def _ledger(
    given: Stages, form: Stages, states, facts: Facts, tolerance, against: Trace | None, last
) -> Trace:
    """Walk, judge, and mark the first stage that is wrong."""
    rows: list[TracedStage] = []
    arrays: dict[str, np.ndarray] = {}
    coarsest, diverged = 0.0, False
    with np.errstate(all="ignore"):  # a NaN is a finding, not a warning
        for found in walk(given, form, states, facts.visible, facts.sizes):
            coarsest = max(coarsest, found.eps)
            facts = facts._replace(tolerance=coarsest**0.6 if tolerance is None else tolerance)
            invariants = judge(found, arrays, facts)
            if found.array is not None:
                arrays[found.name] = found.array
                if against is not None and (other := against.stage(found.name).array) is not None:
                    rule = "is that of the other trace"
                    invariants.append(agree(found.name, rule, found.array, other, facts.tolerance))
                if found.name == "output" and not diverged and not found.problem:
                    invariants += last(found.array, facts.tolerance)
            broken = any(one.holds is False for one in invariants)
            status = "downstream" if diverged else "diverged" if broken else "ok"
            diverged = diverged or broken
            shape = None if found.array is None else found.array.shape
            rows.append(_row(found.name, shape, facts, invariants, status, found.given, found.array))
    rows += [_row(name, None, facts, [], "downstream", False, None) for name in STAGES[len(rows) :]]
    return Trace(tuple(rows), facts.sizes, facts.visible)


def _row(name: str, shape, facts: Facts, invariants, status: str, given: bool, array) -> TracedStage:
    flat = name in ("input", "head round trip", "merged", "output")
    axes = " ".join(axes_of(name, facts.visible.ndim - flat))
    return TracedStage(name, shape, axes, MEANINGS[name], tuple(invariants), status, given, array)
