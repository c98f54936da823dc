"""HeadTransform: one change to multi-head attention, as a value; chain and identity."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array
from jax.typing import DTypeLike

from jaxattn.sides import Coupling, KeySide, QuerySide
from jaxattn.spec import Sizes

PyTree = Any


class Site(NamedTuple):
    """Where a transform stands: the resolved sizes and the mix stages that it claimed."""

    sizes: Sizes
    pre: int | None = None
    post: int | None = None


class Loss(NamedTuple):
    """An auxiliary loss and the weight with which it joins the training loss."""

    value: Array
    weight: float


class Upgrade(NamedTuple):
    """Exact parameters from those of plain multi-head attention.

    `params(mha, fresh) -> params`, where `fresh` is a tree that this attention initialised. None
    where no parameters of these sizes equal MHA; `why` then says so.
    """

    params: Callable[[PyTree, PyTree], PyTree] | None = None
    why: str = "it adds nothing"


class Declaration(NamedTuple):
    """What a transform states about its parameters and its heads.

    Attributes:
        axes: like the transform's own parameters, each leaf a string of axis names. A head axis is
            spelled with its kind: hl, hs, hv, or `h` where all kinds are the same heads. `h[2:]`
            holds heads from 2 on.
        core: the same for projection leaves whose axes this transform changes, by path
            ("query/kernel").
        ties: kinds of heads that this transform keeps equal one by one (an identity or diagonal path),
            for example {("hl", "hs")}; a stage without a mix ties its two kinds by itself.
        exchangeable: sets of heads that may be permuted among themselves; None is all of them.
        upgrade: how to start from the parameters of MHA.
    """

    axes: PyTree = ()
    core: dict[str, str] = {}
    ties: frozenset[tuple[str, str]] = frozenset()
    exchangeable: tuple[tuple[int, ...], ...] | None = None
    upgrade: Upgrade = Upgrade(lambda mha, fresh: mha)


def _init(rng: Array, at: Site, dtype: DTypeLike) -> PyTree:
    del rng, at, dtype
    return {}


def _query_side(params: PyTree, x_q: Array, side: QuerySide, at: Site) -> QuerySide:
    del params, x_q, at
    return side


def _key_side(params: PyTree, x_k: Array, side: KeySide, at: Site) -> KeySide:
    del params, x_k, at
    return side


def _expand(side: KeySide, at: Site) -> KeySide:
    del at
    return side


def _coupling(params: PyTree, coupling: Coupling, at: Site) -> Coupling:
    del params, at
    return coupling


def _finish(params: PyTree, heads: Array, side: QuerySide, at: Site) -> Array:
    del params, side, at
    return heads


def _aux(params: PyTree, x_q: Array, side: QuerySide, at: Site) -> PyTree | None:
    del params, x_q, side, at
    return None


def _losses(sums: PyTree, at: Site) -> dict[str, Loss]:
    del sums, at
    return {}


def _declare(at: Site) -> Declaration:
    del at
    return Declaration()


class HeadTransform(NamedTuple):
    """One change to multi-head attention: pure functions whose defaults change nothing.

    Attributes:
        name: of the transform; its parameters are `params["heads"][name]`.
        adapt: `(sizes) -> sizes`; runs first, claims mix stages, refuses what cannot be.
        init: `(rng, at, dtype) -> params`, the transform's own leaves.
        query_side: `(params, x_q, side, at) -> side`; never sees the source.
        route: `(params, x_q, at) -> (head [..., q, a], note)`: the heads whose gate may differ from 0,
            distinct and chosen by the states alone, so that others need not even be projected; `query_side`
            finds the note in `side.notes`, under the transform's name. None: all heads count.
        key_side: `(params, x_k, side, at) -> side`; never sees the target.
        expand: `(side, at) -> side`; what a key side gains when it is read, without parameters, so
            that a cache need not hold it.
        coupling: `(params, coupling, at) -> coupling`.
        finish: `(params, heads, side, at) -> heads`, with finish(0) = 0, before the gates.
        aux: `(params, x_q, side, at) -> sums` and counts over rows, which may be added across batches.
        losses: `(sums, at) -> {name: Loss}`, from those sums.
        declare: `(at) -> Declaration`.
        links: the transforms of a chain, in order; a chain has nothing else.

    Example:
        >>> double = HeadTransform("double", coupling=lambda p, c, at: c)
        >>> chain(identity, double).links[1].name
        'double'
    """

    name: str = "identity"
    adapt: Callable[[Sizes], Sizes] = lambda sizes: sizes
    init: Callable[[Array, Site, DTypeLike], PyTree] = _init
    query_side: Callable[[PyTree, Array, QuerySide, Site], QuerySide] = _query_side
    route: Callable[[PyTree, Array, Site], tuple[Array, PyTree]] | None = None
    key_side: Callable[[PyTree, Array, KeySide, Site], KeySide] = _key_side
    expand: Callable[[KeySide, Site], KeySide] = _expand
    coupling: Callable[[PyTree, Coupling, Site], Coupling] = _coupling
    finish: Callable[[PyTree, Array, QuerySide, Site], Array] = _finish
    aux: Callable[[PyTree, Array, QuerySide, Site], PyTree | None] = _aux
    losses: Callable[[PyTree, Site], dict[str, Loss]] = _losses
    declare: Callable[[Site], Declaration] = _declare
    links: tuple["HeadTransform", ...] = ()


identity = HeadTransform()


def chain(*transforms: HeadTransform) -> HeadTransform:
    """Apply transforms from left to right.

    Example:
        >>> chain(identity, identity).name
        'identity + identity'
    """
    return HeadTransform(" + ".join(t.name for t in transforms), links=transforms)


def flatten(transforms: tuple[HeadTransform, ...]) -> tuple[HeadTransform, ...]:
    """The links of all chains in order, each with a name of its own."""
    links: list[HeadTransform] = []
    for transform in transforms:
        if not isinstance(transform, HeadTransform):
            raise TypeError(
                f"attention: got a {type(transform).__name__} as transform, expected a HeadTransform. "
                "Fix: pass what a factory returns, not the factory or its name."
            )
        links += flatten(transform.links) if transform.links else [transform]
    seen: dict[str, int] = {}
    named = []
    for link in links:
        count = seen.get(link.name, 0)
        seen[link.name] = count + 1
        named.append(link._replace(name=f"{link.name}_{count}") if count else link)
    return tuple(named)


def place(stages: tuple, index: int | None, value: PyTree) -> tuple:
    """The stages of a side or coupling with `value` at the one that a transform claimed.

    Example:
        >>> place((None, None), 1, "mine")
        (None, 'mine')
    """
    assert index is not None, "a transform may fill only a stage that its adapt claimed"
    return (*stages[:index], value, *stages[index + 1 :])


def resolve(sizes: Sizes, links: tuple[HeadTransform, ...]) -> tuple[Sizes, tuple[Site, ...]]:
    """Run every adapt; each link learns the final sizes and the stages it claimed.

    Raises:
        ValueError: when the head counts of successive mix stages do not meet.
    """
    claims = []
    for link in links:
        before = sizes
        sizes = link.adapt(sizes)
        claims.append(
            tuple(
                len(old) if len(new) > len(old) else None
                for old, new in ((before.pre, sizes.pre), (before.post, sizes.post))
            )
        )
    for site, stages, start, end in (
        ("pre", sizes.pre, sizes.logit_heads, sizes.softmax_heads),
        ("post", sizes.post, sizes.softmax_heads, sizes.output_heads),
    ):
        heads = start
        for stage in stages:
            if stage.heads_in != heads:
                raise ValueError(
                    f"attention: a {site} mix expects {stage.heads_in} heads but gets {heads}. "
                    "Fix: put the transform that changes head counts first, or give equal counts."
                )
            heads = stage.heads_out
        if heads != end:
            raise ValueError(
                f"attention: the {site} mixes leave {heads} heads where {end} are expected. "
                "Fix: give the transforms of this chain equal head counts."
            )
    return sizes, tuple(Site(sizes, pre, post) for pre, post in claims)
