"""Parameters that a gradient must reach, and the null directions that it cannot."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.attention import Attention
from jaxattn.check.adjoint.point import Point, generator
from jaxattn.check.verdict import Verdict, enable_x64, lookup, named_leaves, verdicts


class Null(NamedTuple):
    """Directions of the parameters along which nothing changes, and why.

    Attributes:
        reason: why.
        at: coordinates that are null one by one: an index or a boolean mask of each leaf, by path; `...` is
            the whole leaf.
        along: one direction over several leaves, by path: the change of each.

    A path may leave out its first parts: "key/bias" is `params/key/bias`.

    Example:
        >>> Null("softmax does not see what all keys share", at={"key/bias": ...}).along
        {}
    """

    reason: str
    at: Mapping[str, Any] = {}
    along: Mapping[str, Any] = {}


@verdicts
def reach(
    fn: Callable[..., Any],
    *operands: Any,
    null: Sequence[Null] = (),
    rng: Array | None = None,
    rounding: float = 1e-13,
    axes: Mapping[str, str] | None = None,
) -> Verdict:
    """Every coordinate of the operands has a gradient, but for the null directions that are named.

        |dL/dp[i]| > rounding * max |dL/dp|  unless named;   <dL/dp, n> = 0 to the same rounding where named

    L is a random functional of the output. Rows of the data decide as well: a head that no token selects, an
    embedding that no token uses, a gate that is saturated has no gradient; give operands that use all.

    Args:
        fn: `(*operands) -> ` a tree of arrays; close over what is no parameter.
        null: what is known to have none: `nulls_of(attn)` for attention of ours.
        rounding: what counts as zero, as a part of the largest gradient.
        operands, rng, axes: as in `dot_product`.

    Returns:
        The verdict, with the largest gradient that was declared null, or the first coordinate that has none.

    Raises:
        TypeError: for operands that are not float64.
        ValueError: for a null direction of a leaf that is not there.

    Example:
        >>> verdict = reach(lambda params: params["a"] * 2, {"a": np.ones(3), "b": np.ones(2)})
        >>> verdict.where, verdict.reason
        ('params/b[0]', 'no gradient, and not declared null: 2 of 2 in params/b')
    """
    point = Point.of(fn, operands, axes)
    gradient = point.puller()(generator(rng).normal(size=point.value.size))
    size = np.abs(gradient)
    limit = rounding * float(size.max(initial=0.0))
    declared = np.zeros(size.shape, bool)
    for one in null:
        here = _coordinates(point, one)
        declared |= here
        if size.max(initial=0.0, where=here) > limit:
            entry = int(np.argmax(size * here))
            reason = f"declared null ({one.reason}) but it has a gradient"
            return Verdict("reach", False, float(size[entry]), limit, point.inputs.spot(entry, axes), reason)
        terms = gradient * _direction(point, one)
        total, most = abs(float(terms.sum())), max(limit, rounding * float(np.abs(terms).sum()))
        if total > most:
            reason = f"declared null ({one.reason}) but the gradient along it is not zero"
            return Verdict("reach", False, total, most, " + ".join(one.along), reason)
    lost = (size <= limit) & ~declared
    numbers = {"coordinates": size.size, "declared null": declared.sum(), "lost": lost.sum()}
    numbers = {name: float(count) for name, count in numbers.items()}
    if not lost.any():
        largest = float(size.max(initial=0.0, where=declared))
        reason = "every coordinate that is not declared null has a gradient"
        return Verdict("reach", True, largest, limit, "", reason, numbers)
    leaves = zip(point.inputs.paths, point.inputs.parts, strict=True)
    counts = [f"{lost[part].sum()} of {part.size} in {path}" for path, part in leaves if lost[part].any()]
    entry = int(np.argmax(lost))
    reason = f"no gradient, and not declared null: {', '.join(counts)}"
    return Verdict(
        "reach", False, float(size[entry]), np.nan, point.inputs.spot(entry, axes), reason, numbers
    )


def _coordinates(point: Point, one: Null) -> np.ndarray:
    """Which entries of the operands are declared null one by one."""
    here = np.zeros(point.x.size, bool)
    for path, index in one.at.items():
        part, shape = _leaf(point, path, one)
        mask = np.zeros(shape, bool)
        mask[index] = True
        here[part] = mask.ravel()
    return here


def _direction(point: Point, one: Null) -> np.ndarray:
    """The declared direction over all operands; zeros where there is none."""
    along = np.zeros(point.x.size)
    for path, change in one.along.items():
        part, shape = _leaf(point, path, one)
        along[part] = np.broadcast_to(np.asarray(change, float), shape).ravel()
    return along


def _leaf(point: Point, path: str, one: Null) -> tuple[np.ndarray, tuple[int, ...]]:
    """Entries and shape of the one leaf that is meant."""
    leaves = zip(*point.inputs, point.inputs.parts, strict=True)
    found = [(part, shape) for full, shape, part in leaves if lookup({path: True}, full)]
    if len(found) != 1:
        raise ValueError(
            f"null {one.reason!r}: {len(found)} leaves are called {path!r}, expected one. "
            f"Fix: one of {', '.join(point.inputs.paths)}."
        )
    return found[0]


def axes_of(attn: Attention) -> dict[str, str]:
    """Axis names of every parameter leaf by path, from what the transforms declare.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> axes_of(attention(HeadSpec(model=6, heads=2)))["key/kernel"]
        'm h d'
    """
    named = {"out/kernel": "h v m", "out/bias": "m", "query_ln/scale": "d", "key_ln/scale": "d"}
    for name, width in (("query", "d"), ("key", "d"), ("value", "v")):
        named |= {f"{name}/kernel": f"m h {width}", f"{name}/bias": f"h {width}"}
    for link, site in zip(attn.links, attn.sites, strict=True):
        declared = link.declare(site)
        named |= declared.core | dict(named_leaves(declared.axes, f"heads/{site.name}"))
    return named


def nulls_of(attn: Attention) -> tuple[Null, ...]:
    """The null directions of an attention's parameters that its form shows, by reason.

    - A leaf that moves every key by the same vector adds the same number to a whole row of logits, and
      softmax does not see it: a plain key bias, also under mixes before the softmax that are static or come
      from the query row. Rotary positions, head norms, a soft cap, and factors of a key row break it.
    - A bias of a mix before the softmax, likewise.
    - Rows of the output map whose value channel is padding (0 for any value).
    - A leaf that changes nothing on either side, such as a softmax over a single gate.

    Sides and coupling are computed at random parameters and compared; softmax, engine and gradients, which
    `reach` checks, are not run.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> [list(null.at) for null in nulls_of(attention(HeadSpec(model=6, heads=2, use_bias=True)))]
        [['key/bias']]
    """
    draw, spec = np.random.default_rng(0), attn.spec
    with enable_x64(True):
        shapes = jax.eval_shape(attn.init, jax.random.key(0))
        params = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape) / _fan(leaf.shape) ** 0.5, shapes)
        x_q, x_k, x_v = (draw.normal(size=(5, width)) for width in (spec.in_q, spec.in_k, spec.in_v))

        def form(params):
            query = attn.query_side(params, jnp.asarray(x_q))._replace(notes={})
            key = attn.expand(attn.key_side(params, (jnp.asarray(x_k), jnp.asarray(x_v))))
            return {"query": query, "key": key, "coupling": attn.coupling(params)}

        form = jax.jit(form)
        before = form(params)
        linked = zip(attn.links, attn.sites, strict=True)
        own_finish = [site.name for link, site in linked if link.overrides("finish")]
        leaves, tree = jax.tree.flatten(params)
        found: dict[str, dict[str, Any]] = {}
        for i, (path, leaf) in enumerate(named_leaves(params)):
            if path.startswith(("out/", *(f"heads/{name}/" for name in own_finish))):
                continue
            moved = [*leaves[:i], leaf + 0.1 * draw.normal(size=leaf.shape), *leaves[i + 1 :]]
            if why := _unseen(before, form(tree.unflatten(moved)), spec.softcap is not None):
                found.setdefault(why, {})[path] = ...
        dead = np.all(np.asarray(before["key"].value) == 0, axis=0)  # [hV, v]
        if dead.any() and not own_finish:
            of, heads = before["coupling"].value_of, attn.sizes.output_heads
            rows = np.repeat(dead, heads // len(dead), 0) if of is None else dead[list(of)]
            found["value channels that are padding"] = {"out/kernel": rows}
    return tuple(Null(reason, at) for reason, at in found.items())


def _fan(shape: tuple[int, ...]) -> int:
    """About what a leaf sums over, so that nothing it leads to saturates."""
    return shape[0] if len(shape) > 1 else 1


def _unseen(before: dict[str, Any], after: dict[str, Any], softcap: bool) -> str | None:
    """Why what one leaf changed in the form cannot be seen in the heads, or None."""
    old, new = (dict(named_leaves(form)) for form in (before, after))
    change = {path: np.asarray(new[path]) - np.asarray(old[path]) for path in old}
    changed = {path for path, by in change.items() if np.abs(by).max(initial=0) > 1e-12}
    if not changed:
        return "it changes neither side"
    last_key_stage = max(
        (i for i, factors in enumerate(before["key"].pre) if factors is not None), default=-1
    )
    if softcap:
        return None
    if changed == {"key/key"} and last_key_stage < 0:
        shift = change["key/key"]
        if np.abs(shift - shift[:1]).max() <= 1e-12:
            return "softmax does not see what all keys share"
    biases = {f"coupling/pre/{i}/bias" for i in range(last_key_stage, len(before["key"].pre))}
    return "softmax does not see a constant" if changed <= biases else None
