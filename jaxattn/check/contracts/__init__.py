"""transform: one call that tells whether a HeadTransform keeps its contracts, each failure with its fix."""

import functools
from collections.abc import Iterable

from jaxattn.attention import Attention, attention
from jaxattn.check.contracts import hooks, values, whole
from jaxattn.check.contracts.form import Contract, Made, make
from jaxattn.check.report import Report, Ruled
from jaxattn.check.subjects.attention import version_of
from jaxattn.check.verdict import enable_x64
from jaxattn.spec import HeadSpec, Rotary
from jaxattn.transform import HeadTransform, chain

CONTRACTS: tuple[Contract, ...] = (
    values.is_a_value, values.reads_back, hooks.hooks_run, hooks.axes_declared, hooks.hooks_are_pure,
    hooks.rows_are_apart, whole.zero_rows_are_finite, hooks.finish_of_zero, hooks.earlier_links_stay,
    hooks.sums_add_up, whole.types_are_kept, whole.leaves_are_alive, whole.upgrade_is_exact_and_alive,
    whole.twice_in_a_chain, whole.ledger_counts,
)  # fmt: skip
# Heads and their width: the next where a transform refuses the first.
GROWN = ((4, 6), (8, 8), (16, 16), (32, 64))


def transform(
    given: HeadTransform, spec: HeadSpec | None = None, *, laws: Iterable[str] | None = None
) -> Report:
    """Whether a transform keeps its contracts; each failure says its fix.

    As a value: equal, hashed, picklable, `repr` reads back. Its hooks: they fill claimed stages alone,
    declare axes of every leaf, are pure, make terms of each row alone, keep what earlier links put there;
    finish(0) = 0, sums of `aux` add up. The whole: leaves without a gradient are declared idle, a declared
    upgrade is exact and training can leave it, two in a chain stay apart, types are kept, the ledger counts
    what runs.

    Args:
        given: the transform, or a `chain`.
        spec: the sizes to ask with; None takes several (cross-attention, biases with rotary positions, fewer
            key heads with head norms), and leaves out those that the transform refuses with a ValueError.
        laws: some of the contracts by name; None asks all.

    Returns:
        The rulings; true where every contract holds. What the transform does wrong is a ruling, no error.

    Raises:
        TypeError: for what is no HeadTransform.
        ValueError: for a contract that is not known.

    Example:
        >>> class louder(HeadTransform):
        ...     by: float = 2.0
        ...
        ...     def finish(self, params, heads, side, at):
        ...         return heads + self.by
        >>> report = transform(louder(), laws=["finish-of-zero"])
        >>> bool(report), report.broken[0].note[:22]
        (False, 'louder: finish(0) is 2')
    """
    if not isinstance(given, HeadTransform):
        hint = " Fix: an instance, with its options." if isinstance(given, type) else ""
        raise TypeError(f"check.transform: got {given!r}, expected a HeadTransform.{hint}")
    known = {one.name: one for one in CONTRACTS}
    asked = list(known) if laws is None else list(laws)
    for name in asked:
        if name not in known:
            raise ValueError(f"laws: got {name!r}, expected some of {', '.join(known)}.")
    with enable_x64(True):
        sizes, attns = _sizes(given, spec)
        made = [make(given, attn.spec, attn) for attn in attns]
        rulings = [sizes, *(_judge(one, made) for one in map(known.__getitem__, asked))]
    name = repr(given) if isinstance(given, chain) else given.name
    return Report(name, "HeadTransform", version_of("jaxattn"), tuple(rulings))


def _families(heads: int, width: int) -> dict[str, HeadSpec]:
    """Sizes in which no two axes that could be confused are equal."""
    of = functools.partial(HeadSpec, model=9, heads=heads, d_qk=width, d_v=width - 1)
    return {
        "cross-attention": of(in_k=7, in_v=8, out=11),
        "biases and rotary positions": of(use_bias=True, rotary=Rotary(pairs="adjacent")),
        "fewer key heads and head norms": of(kv_heads=heads // 2, qk_norm="rms"),
    }


def _sizes(given: HeadTransform, spec: HeadSpec | None) -> tuple[Ruled, list[Attention]]:
    """The attentions to ask about, and whether the transform takes the sizes that it should."""
    head = ("sizes", "shape", "it takes sizes, or refuses them with a ValueError that says why")
    found, refused = [], {}
    for name in ("the given spec",) if spec is not None else _families(*GROWN[0]):
        for size in GROWN:
            try:
                found.append(attention(_families(*size)[name] if spec is None else spec, given))
                refused.pop(name, None)
                break
            except ValueError as error:
                refused.setdefault(name, str(error))
            except Exception as error:  # whatever the transform does is a ruling on it
                return Ruled(*head, "raises", note=f"{name}: {_said(error)}"), []
    note = "; ".join(f"refuses {name}: {why}" for name, why in refused.items())
    if not found:
        return Ruled(
            *head, "broken", note=f"{note}. Fix: ask with sizes that it takes, spec=ja.HeadSpec(...)"
        ), []
    return Ruled(*head, "holds", note=note), found


def _judge(one: Contract, made: list[Made]) -> Ruled:
    head = one.name, one.level, one.says
    if not made:
        return Ruled(*head, "not asked", note="there is no attention to ask about")
    broken: dict[str, HeadSpec] = {}
    for each in made[: 1 if one.once else None]:
        try:
            for failure in one.ask(each):
                broken.setdefault(failure, each.spec)
        except Exception as error:  # whatever the transform does is a ruling on it
            return Ruled(*head, "raises", note=f"{each.attn!r}: {_said(error)}")
    if broken:
        return Ruled(
            *head, "broken", note="; ".join(f"{failure} ({spec!r})" for failure, spec in broken.items())
        )
    return Ruled(*head, "holds")


def _said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


__all__ = ["CONTRACTS", "transform"]
