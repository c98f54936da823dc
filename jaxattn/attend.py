"""attend: the form alone, from two sides and a coupling to heads, by any engine."""

from collections.abc import Callable

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.axes import check_axes, check_batch, check_boolean, check_floating, check_option
from jaxattn.engines import dropout, select
from jaxattn.engines.call import CAPTURES, Call, logit_heads
from jaxattn.masks import Frame, Mask, as_mask, padding
from jaxattn.sides import Coupling, Factors, KeySide, Mix, QuerySide, hide_queries, hide_rows
from jaxattn.spec import check_rate

HEAD_DROPOUT_STREAM = 1  # folded into the caller's key, so that the two dropouts draw apart


def attend(
    query_side: QuerySide,
    key_side: KeySide,
    coupling: Coupling,
    mask: Mask | None = None,
    *,
    bias: Array | None = None,
    engine: str = "auto",
    dropout_key: Array | None = None,
    capture: tuple[str, ...] = (),
    remask: bool = False,
    finish: Callable[[Array], Array] | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Execute the form: heads[q,hv] = sum_k weights[hv,q,k] value[k], finished and gated.

    Args:
        query_side, key_side, coupling: the form (see `jaxattn.sides`).
        mask: who may see whom, True = visible; None is everything. Rows that `key_side.valid` denies
            are hidden too. A key row that `valid` or one array of the mask hides from every query has no
            influence, and a query row that `query_side.valid` denies none on others, whatever they hold,
            NaN included.
        bias: [..., hs, q, k], added to the logits after the pre mixes; h, q or k may be 1.
        engine: "auto" or a name of `ja.ENGINES`; none changes the function.
        dropout_key: draws the dropout that the coupling states; None is evaluation. Under `jax.vmap` one
            key that is not mapped draws the same dropout for every mapped example; map over
            `jax.random.split(key, n)` to draw each its own, as one call with a batch axis does.
        capture: intermediates to return, of "logits" (scaled, before the pre mixes), "mixed_logits"
            (before visibility), "weights" (softmax), "mixed_weights" (after the post mixes, before
            dropout): [..., h, q, k]; and "heads" (before finish and gate): [..., q, hv, v].
        remask: with post mixes, apply a mask that differs by head to the mixed weights as well.
        finish: applied to the heads before the gate, with finish(0) = 0.

    Returns:
        heads [..., q, hv, v] in the value's type ([..., q, a, v] where the query side holds active heads
        alone), and the captured arrays by name.

    Raises:
        ValueError, TypeError: naming the argument and axis, what came, what was expected, the fix.

    Example:
        >>> q, k, v = jnp.zeros((3, 2, 4)), jnp.zeros((5, 2, 4)), jnp.ones((5, 2, 7))
        >>> heads, _ = attend(QuerySide(q), KeySide(k, v), Coupling(scale=0.5))
        >>> heads.shape
        (3, 2, 7)
    """
    call = checked_call(query_side, key_side, coupling, mask, bias, dropout_key, capture, remask)
    call = call._replace(query=hide_queries(call.query, call.query.valid))
    return execute(call, engine, finish)


def execute(
    call: Call, engine: str, finish: Callable[[Array], Array] | None = None
) -> tuple[Array, dict[str, Array]]:
    """Heads of a checked call by an engine, finished, gated and dropped; and the captured arrays."""
    heads, captured = select(engine, call).run(call)
    if "heads" in call.capture:
        captured["heads"] = heads
    if finish is not None:
        heads = finish(heads)
    if call.query.gate is not None:
        heads = heads * _of_held(call, call.query.gate).astype(heads.dtype)
    return _drop_heads(call, heads), captured


def checked_call(
    query_side: QuerySide,
    key_side: KeySide,
    coupling: Coupling,
    mask: Mask | None,
    bias: Array | None = None,
    dropout_key: Array | None = None,
    capture: tuple[str, ...] = (),
    remask: bool = False,
    *,
    zeroed: bool = False,
) -> Call:
    """The call that engines receive, of sides that were made before; raises where its parts do not fit each
    other.

    Key rows that no query sees are set to zero here, once for every engine, before any product.

    Args:
        zeroed: rows that `key_side.valid` denies hold finite values already, as those of a cache do.
    """
    call = form_call(query_side, key_side, coupling, as_mask(mask), bias, dropout_key, capture, remask=remask)
    call.mask.check(call.frame, call.softmax_heads)
    valid = call.key.valid
    both = call.mask if valid is None else call.mask & padding(valid)
    seen = (call.mask if zeroed else both).seen_rows(call.frame.k_len)
    return call._replace(key=hide_rows(call.key, seen), mask=both)


def form_call(
    query_side: QuerySide,
    key_side: KeySide,
    coupling: Coupling,
    mask: Mask,
    bias: Array | None,
    dropout_key: Array | None,
    capture: tuple[str, ...],
    *,
    remask: bool,
) -> Call:
    """The call of a form whose mask is checked and holds all that hides pairs."""
    query_side, key_side = _fill_stages(query_side, key_side, coupling)
    if isinstance(capture, str):
        raise TypeError(f"capture: got {capture!r}, expected a tuple of names. Fix: capture=({capture!r},).")
    for name in capture:
        check_option("capture", name, CAPTURES)
    batch = _check_sides(query_side, key_side, coupling)
    frame = Frame(
        q_len=query_side.query.shape[-3],
        k_len=key_side.key.shape[-3],
        q_position=query_side.position,
        k_position=key_side.position,
        batch=batch,
    )
    call = Call(
        query_side._replace(notes={}),
        key_side,
        coupling,
        mask,
        frame,
        bias,
        _typed(dropout_key),
        tuple(capture),
    )
    _check_call(call, remask)
    return call


def _fill_stages(query: QuerySide, key: KeySide, coupling: Coupling) -> tuple[QuerySide, KeySide]:
    """Sides with one entry for each mix stage; a side without any has nothing to add anywhere."""
    sides = []
    for side in (query, key):
        changes = {}
        for site in ("pre", "post"):
            stages, mixes = getattr(side, site), getattr(coupling, site)
            if stages and len(stages) != len(mixes):
                raise ValueError(
                    f"{type(side).__name__}.{site}: got {len(stages)} stages, expected "
                    f"{len(mixes)} as in Coupling.{site}. Fix: None for a stage without factors."
                )
            changes[site] = stages or (None,) * len(mixes)
        sides.append(side._replace(**changes))
    return sides[0], sides[1]


def _check_sides(query: QuerySide, key: KeySide, coupling: Coupling) -> tuple[int, ...]:
    """Agreement of all axes of the form; returns the batch axes."""
    fix = "both sides must come from the same sizes"
    for name, array in (("query", query.query), ("key", key.key), ("value", key.value)):
        check_floating(name, array)
        if array.ndim < 3:
            raise ValueError(
                f"{name}: shape {array.shape} has {array.ndim} axes, expected [..., t, h, d]. "
                "Fix: give a head axis of size 1 to a single head."
            )
    q_len, _, width = query.query.shape[-3:]
    if query.head is not None:
        _check_head(query.head, query)
    heads = first_heads = logit_heads(query)
    k_len, key_heads = key.key.shape[-3:-1]
    check_axes("key", key.key, "... k hK d", fix=fix, d=width)
    check_axes("value", key.value, "... k hV v", fix="one value row for each key row", k=k_len)
    batch = check_batch(query=(query.query, 3), key=(key.key, 3), value=(key.value, 3))
    for what, array, axes in (
        ("KeySide.bias", key.bias, "... k hl"),
        ("KeySide.valid", key.valid, "... k"),
        ("QuerySide.valid", query.valid, "... q"),
    ):
        if array is not None:
            check_axes(what, array, axes, fix=fix, k=k_len, q=q_len, hl=heads)
            if what.endswith("valid"):
                check_boolean(what, array)
    for what, position, size in (("q", query.position, q_len), ("k", key.position, k_len)):
        if position is not None:
            check_axes(f"positions of {what}", position, f"... {what}", fix="one position a row",
                       **{what: size})  # fmt: skip
    for site in ("pre", "post"):
        stages = zip(*(getattr(x, site) for x in (coupling, query, key)), strict=True)
        for number, (mix, from_query, from_key) in enumerate(stages):
            what = f"{site}[{number}]"
            _check_factors(f"QuerySide.{what}", from_query, heads, q_len)
            _check_factors(f"KeySide.{what}", from_key, heads, k_len)
            heads = _check_mix(f"Coupling.{what}", mix, heads)
    _check_shared("key", first_heads, key_heads, coupling.key_of)
    _check_shared("value", heads, key.value.shape[-2], coupling.value_of)
    if query.gate is not None:
        gate_width = query.gate.shape[-1] if query.gate.shape[-1] == 1 else key.value.shape[-1]
        check_axes("QuerySide.gate", query.gate, "... q hv v", fix="a gate for each head, width 1 or v",
                   q=q_len, hv=heads, v=gate_width)  # fmt: skip
    check_rate("Coupling: dropout", coupling.dropout)
    check_rate("Coupling: head_dropout", coupling.head_dropout)
    check_option("Coupling: dropout_site", coupling.dropout_site, ("values", "softmax"))
    for axis in coupling.dropout_shared:
        check_option("Coupling: dropout_shared", axis, ("b", "h", "q"))
    return batch


def _check_head(head: Array, query: QuerySide) -> None:
    """Active heads come with a gate for every head: it says how many there are."""
    if query.gate is None:
        raise ValueError(
            "QuerySide.head: got active heads without QuerySide.gate, expected a gate for every head; those "
            "that are left out are 0. Fix: gate [..., q, hv, 1]."
        )
    q_len, active = query.query.shape[-3:-1]
    fix = "one head for each query that is held"
    check_axes("QuerySide.head", head, "... q a", fix=fix, q=q_len, a=active)
    if not jnp.issubdtype(head.dtype, jnp.integer):
        raise TypeError(f"QuerySide.head: dtype is {head.dtype}, expected integers. Fix: indices.")


def _of_held(call: Call, x: Array) -> Array:
    """[..., q, hv, x] of the heads that the query side holds; q may be 1."""
    head = call.query.head
    return x if head is None else jnp.take_along_axis(x, head[..., None], axis=-2)


def _check_mix(what: str, mix: Mix, heads: int) -> int:
    """Heads that come out of a mix."""
    if mix.matrix is None:
        out = heads
    else:
        groups = mix.groups
        if heads % groups:
            raise ValueError(
                f"{what}.matrix: {heads} heads do not divide into g = {groups} groups "
                f"(shape {mix.matrix.shape}). Fix: a number of groups that divides the heads."
            )
        axes = "g i o" if mix.matrix.ndim == 3 else "i o"
        check_axes(f"{what}.matrix", mix.matrix, axes, fix="[heads in, heads out]", i=heads // groups)
        out = groups * mix.matrix.shape[-1]
        if mix.skip and out != heads:
            raise ValueError(
                f"{what}: skip adds the identity, but {heads} heads come in and {out} go out. "
                "Fix: skip=False, or equal head counts."
            )
    if mix.bias is not None:
        check_axes(f"{what}.bias", mix.bias, "o", fix="one bias for each head out", o=out)
    return out


def _check_factors(what: str, factors: Factors | None, heads: int, rows: int) -> None:
    if factors is None:
        return
    fix = "row factors come from the same sizes as the mix"
    if (factors.down is None) != (factors.up is None):
        raise ValueError(f"{what}: down and up come together. Fix: give both, or neither.")
    if factors.down is not None and factors.up is not None:
        groups = factors.down.shape[-3]
        sizes = dict(n=rows, g=groups, r=factors.down.shape[-1])
        check_axes(f"{what}.down", factors.down, "... n g i r", fix=fix, i=heads // groups, **sizes)
        check_axes(f"{what}.up", factors.up, "... n g r o", fix=fix, **sizes)
    if factors.diag is not None:
        check_axes(f"{what}.diag", factors.diag, "... n h", fix=fix, n=rows, h=heads)
    if factors.dense is not None:
        check_axes(f"{what}.dense", factors.dense, "... n i o", fix=fix, n=rows, i=heads)


def _check_shared(what: str, heads: int, sources: int, of: tuple[int, ...] | None) -> None:
    if of is None and heads % sources:
        raise ValueError(
            f"{what}: {heads} heads do not divide by {sources} {what} heads. "
            f"Fix: a number of {what} heads that divides, or Coupling.{what}_of."
        )
    if of is not None and (len(of) != heads or not all(0 <= i < sources for i in of)):
        raise ValueError(
            f"Coupling.{what}_of: got {of}, expected {heads} indices below {sources}. "
            f"Fix: the {what} head of each head, in order."
        )


def _check_call(call: Call, remask: bool) -> None:
    """What only shows once mask, bias and sides are together."""
    if call.mask.has_heads and call.coupling.post and not remask:
        raise ValueError(
            f"mask: {call.mask!r} differs by head (axis h), but a post mix passes weights between heads, "
            "so a hidden pair would be seen through another head. Fix: a mask without axis h, or "
            "remask=True to hide its pairs from the mixed weights as well."
        )
    if call.mask.has_heads and call.output_heads != call.softmax_heads:
        raise ValueError(
            f"mask: axis h has hs = {call.softmax_heads} softmax heads, but {call.output_heads} heads "
            "meet the values. Fix: a mask without axis h."
        )
    if call.bias is not None:
        check_floating("bias", call.bias)
        want = (call.softmax_heads, call.frame.q_len, call.frame.k_len)
        got = call.bias.shape[-3:]
        fits = len(got) == 3 and all(g in (1, w) for g, w in zip(got, want, strict=True))
        batch = call.bias.shape[:-3]
        if not fits or batch not in ((), call.frame.batch):
            raise ValueError(
                f"bias: shape {call.bias.shape}, expected axes [..., hs, q, k] = "
                f"{(*call.frame.batch, *want)}; h, q and k may be 1, batch axes may be left out. "
                "Fix: name your axes and add those of size 1."
            )


def _typed(key: Array | None) -> Array | None:
    """A typed PRNG key from a typed or a raw one."""
    if key is None:
        return None
    if not hasattr(key, "dtype"):
        raise TypeError(
            f"dropout_key: got {type(key).__name__}, expected a PRNG key. Fix: jax.random.key(seed)."
        )
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if key.dtype != jnp.uint32:
        raise TypeError(f"dropout_key: dtype is {key.dtype}, expected a PRNG key. Fix: jax.random.key(seed).")
    return jax.random.wrap_key_data(key)


def _drop_heads(call: Call, heads: Array) -> Array:
    """Head dropout: a whole head of an example is dropped at once."""
    rate = call.coupling.head_dropout
    if call.dropout_key is None or rate == 0:
        return heads
    key = jax.random.fold_in(call.dropout_key, HEAD_DROPOUT_STREAM)
    kept = dropout.keep(key, rate, ("q",), (*call.frame.batch, call.output_heads, 1, 1))
    kept = _of_held(call, einops.rearrange(kept, "... h q k -> ... q h k"))
    return dropout.scaled(heads, kept, rate)
