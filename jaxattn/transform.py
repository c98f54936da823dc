"""HeadTransform: one change to multi-head attention, as a value; chains of them, and the site of each."""

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxattn.sides import Coupling, Factors, KeySide, Mix, QuerySide
from jaxattn.spec import Sizes, Stage, short_repr

PyTree = Any
Form = TypeVar("Form", QuerySide, KeySide, Coupling)


class Loss(NamedTuple):
    """An auxiliary loss and the weight with which it joins the training loss."""

    value: Array
    weight: float


@dataclasses.dataclass(frozen=True)
class Site:
    """Where one link of a chain is: its own name, the resolved sizes, the mix stages that it claimed.

    Attributes:
        name: of the link in its chain; its leaves are `params["heads"][name]`. The second `moh` of a chain is
            "moh_1".
        sizes: of the whole attention, after every `adapt`.
        pre, post: the index of the stage that this link claimed, or None.
    """

    name: str
    sizes: Sizes
    pre: int | None = None
    post: int | None = None

    @property
    def stages(self) -> dict[str, Stage]:
        """The claimed mixes with their head counts, of "pre" and "post"."""
        found = {"pre": self.pre, "post": self.post}
        return {which: getattr(self.sizes, which)[at] for which, at in found.items() if at is not None}

    @property
    def pre_stage(self) -> Stage:
        """Heads in and out of the claimed mix before the softmax."""
        return self.sizes.pre[self._claimed("pre")]

    @property
    def post_stage(self) -> Stage:
        """Heads in and out of the claimed mix after the softmax."""
        return self.sizes.post[self._claimed("post")]

    def fill(
        self, form: Form, *, pre: Mix | Factors | None = None, post: Mix | Factors | None = None
    ) -> Form:
        """A side or coupling with the claimed stages filled: `Mix` in a coupling, `Factors` in a side.

        Raises:
            ValueError: for a stage that the transform's `adapt` did not claim.

        Example:
            >>> from jaxattn.spec import HeadSpec, Sizes
            >>> at = Site("mine", Sizes.of(HeadSpec(model=6, heads=2)).claim(pre=2), pre=0)
            >>> at.fill(Coupling(1.0, pre=(Mix(),)), pre=Mix(jnp.eye(2))).pre[0].groups
            1
        """
        changes = {}
        for which, value in (("pre", pre), ("post", post)):
            if value is not None:
                index = self._claimed(which)
                stages = getattr(form, which)
                changes[which] = (*stages[:index], value, *stages[index + 1 :])
        if isinstance(form, Coupling):
            return dataclasses.replace(form, **changes)
        return form._replace(**changes)

    def gate(self, side: QuerySide, gate: Array) -> QuerySide:
        """The query side with its heads multiplied by `gate` as well, beside the gates that are there.

        Args:
            side: a query side.
            gate: [..., q, hv, 1] or [..., q, hv, v]; leading axes may be left out.
        """
        if side.gate is None:
            whole = (*side.query.shape[:-2], *gate.shape[-2:])
            return side._replace(gate=jnp.broadcast_to(gate, whole))
        dtype = max(side.gate.dtype, gate.dtype, key=lambda dtype: jnp.finfo(dtype).bits)
        gate = jnp.broadcast_to(gate.astype(dtype), (*side.gate.shape[:-1], gate.shape[-1]))
        return side._replace(gate=side.gate.astype(dtype) * gate)

    def note(self, side: QuerySide, note: PyTree) -> QuerySide:
        """The query side with something for the link's own `aux`; engines do not read it."""
        return side._replace(notes=side.notes | {self.name: note})

    def noted(self, side: QuerySide) -> PyTree | None:
        """What this link noted (or its `route`), or None."""
        return side.notes.get(self.name)

    def _claimed(self, which: str) -> int:
        index = getattr(self, which)
        if index is None:
            raise ValueError(
                f"{self.name}: it fills a {which} mix that its adapt did not claim. Fix: in adapt, "
                f"return sizes.claim({which}=heads)."
            )
        return index


@dataclasses.dataclass(frozen=True)
class Upgrade:
    """Exact parameters from those of plain multi-head attention.

    `params(mha, fresh) -> params`, where `fresh` is a tree that this attention initialised. None
    where no parameters of these sizes equal MHA; `why` then says so.
    """

    params: Callable[[PyTree, PyTree], PyTree] | None = None
    why: str = "it declares no upgrade"


@dataclasses.dataclass(frozen=True)
class Declaration:
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
        upgrade: how to start from the parameters of MHA; the default says that nothing is declared.
        idle: leaves whose gradient is always zero, by path below the transform's leaves ("pre/bias"), each
            with the reason.
    """

    axes: PyTree = dataclasses.field(default_factory=dict)
    core: dict[str, str] = dataclasses.field(default_factory=dict)
    ties: frozenset[tuple[str, str]] = frozenset()
    exchangeable: tuple[tuple[int, ...], ...] | None = None
    upgrade: Upgrade = Upgrade()
    idle: dict[str, str] = dataclasses.field(default_factory=dict)


HOOKS = tuple("adapt init query_side route key_side expand coupling finish aux losses declare".split())


def _check_members(cls: "type[HeadTransform]") -> None:
    """Raise where an option hides a hook, or a method looks like a misspelt one."""
    for option in inspect.get_annotations(cls):
        if option in (*HOOKS, "overrides"):
            raise TypeError(
                f"{cls.__name__}: its option {option!r} has the name of a hook. Fix: another name."
            )
    for member, value in cls.__dict__.items():
        if member.startswith("_") or not callable(value) or hasattr(HeadTransform, member):
            continue
        alike = difflib.get_close_matches(member, HOOKS, n=1, cutoff=0.8)
        if alike:
            raise TypeError(
                f"{cls.__name__}: its method {member!r} is no hook and would never be called; the hooks are "
                f"{', '.join(HOOKS)}. Fix: {alike[0]!r}, or a leading underscore for a method of your own."
            )


@dataclass_transform(frozen_default=True)
class HeadTransform:
    """One change to multi-head attention: a frozen dataclass of options, whose methods are pure hooks.

    A subclass states its options as annotated fields and gives the hooks that it needs; the others change
    nothing. Equal options make equal transforms, with equal hashes, that can be pickled; `repr` shows what
    differs from the defaults and evaluates back. Options must be hashable (tuples, not lists or arrays).
    Every hook finds its own parameters in `params` and its place in `at`, a `Site`.

    Attributes:
        name: of the transform; default the name of the class.

    Example:
        >>> class double_heads(HeadTransform):
        ...     times: float = 2.0
        ...
        ...     def finish(self, params, heads, side, at):
        ...         return self.times * heads
        >>> double_heads(), double_heads(3.0) == double_heads(times=3.0)
        (double_heads(), True)
    """

    name: ClassVar[str] = "identity"

    def __init_subclass__(cls, **named: Any):
        super().__init_subclass__(**named)
        if HeadTransform not in cls.__bases__:
            raise TypeError(
                f"{cls.__name__}: it extends {cls.__bases__[0].__name__}, a transform. Fix: extend "
                f"HeadTransform "
                "itself, and call shared functions; or chain the two."
            )
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        _check_members(cls)
        dataclasses.dataclass(frozen=True, repr=False)(cls)

    def __repr__(self) -> str:
        return "HeadTransform()" if type(self) is HeadTransform else short_repr(self)

    def __eq__(self, other: object) -> bool:  # of HeadTransform itself; a subclass compares its fields
        return type(self) is type(other) is HeadTransform

    def __hash__(self) -> int:
        return hash(HeadTransform)

    def overrides(self, hook: str) -> bool:
        """Whether this transform gives a hook of its own, for example `overrides("finish")`."""
        return getattr(type(self), hook) is not getattr(HeadTransform, hook)

    @property
    def changes(self) -> bool:
        """Whether it gives any hook; plain multi-head attention gives none."""
        return any(self.overrides(hook) for hook in HOOKS)

    def adapt(self, sizes: Sizes) -> Sizes:
        """Runs first: new sizes, claimed mix stages; raises for what cannot be."""
        return sizes

    def init(self, rng: Array, at: Site, dtype: DTypeLike) -> PyTree:
        """The transform's own leaves, a dict of arrays or of dicts."""
        return {}

    def query_side(self, params: PyTree, x_q: Array, side: QuerySide, at: Site) -> QuerySide:
        """What each query row adds; it never sees the source. x_q is [..., q, m]."""
        return side

    def route(self, params: PyTree, x_q: Array, at: Site) -> tuple[Array, PyTree] | None:
        """The heads whose gate may differ from 0, [..., q, a], and a note (or None) for `query_side`.

        They are distinct and chosen from the states alone, so that the others need not be projected.
        `query_side` finds the note by `at.noted(side)`. A transform that gives this hook only for some
        options says so in `overrides`.
        """
        return None

    def key_side(self, params: PyTree, x_k: Array, side: KeySide, at: Site) -> KeySide:
        """What each key row adds; it never sees the target. x_k is [..., k, m]."""
        return side

    def expand(self, side: KeySide, at: Site) -> KeySide:
        """What a key side gains when it is read, without parameters, so that a cache need not hold it."""
        return side

    def coupling(self, params: PyTree, coupling: Coupling, at: Site) -> Coupling:
        """What is the same for every pair."""
        return coupling

    def finish(self, params: PyTree, heads: Array, side: QuerySide, at: Site) -> Array:
        """A change of the heads [..., q, hv, v] before the gates, with finish(0) = 0."""
        return heads

    def aux(self, params: PyTree, x_q: Array, side: QuerySide, at: Site) -> PyTree | None:
        """Sums and counts over rows, which may be added across batches; None where there are none."""
        return None

    def losses(self, sums: PyTree, at: Site) -> dict[str, Loss]:
        """Auxiliary losses by name, from the sums of `aux`."""
        return {}

    def declare(self, at: Site) -> Declaration:
        """Axis names of every leaf, exchangeable heads, the exact upgrade from MHA."""
        return Declaration() if self.changes else Declaration(upgrade=Upgrade(lambda mha, fresh: mha))


identity = HeadTransform()


class chain(HeadTransform):
    """Several transforms as one, applied from left to right.

    Example:
        >>> chain(identity, chain(identity)).links
        (HeadTransform(), chain(HeadTransform()))
    """

    links: tuple[HeadTransform, ...] = ()

    def __init__(self, *links: HeadTransform):
        object.__setattr__(self, "links", links)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.links))})"


def flatten(transforms: tuple[HeadTransform, ...]) -> tuple[HeadTransform, ...]:
    """The links of all chains in order.

    Raises:
        TypeError: for what is no transform, and for an option that cannot be compared or hashed.
        ValueError: for an option that is NaN.
    """
    links: list[HeadTransform] = []
    for transform in transforms:
        if not isinstance(transform, HeadTransform):
            raise TypeError(
                f"attention: got {_named(transform)} as transform, expected a HeadTransform. "
                "Fix: pass what a factory returns, not the factory or its name."
            )
        if isinstance(transform, chain):
            links += flatten(transform.links)
        else:
            _check_options(transform)
            links.append(transform)
    return tuple(links)


def site_names(links: tuple[HeadTransform, ...]) -> tuple[str, ...]:
    """A name of its own for each link.

    Example:
        >>> class shift(HeadTransform):
        ...     pass
        >>> site_names((shift(), shift(), identity))
        ('shift', 'shift_1', 'identity')
    """
    names: list[str] = []
    own = {link.name for link in links}
    for link in links:
        name, count = link.name, 0
        while name in names or (count and name in own):
            count += 1
            name = f"{link.name}_{count}"
        names.append(name)
    return tuple(names)


def resolve(sizes: Sizes, links: tuple[HeadTransform, ...]) -> tuple[Sizes, tuple[Site, ...]]:
    """Run every adapt; each link learns its name, the final sizes and the stages that it claimed.

    Raises:
        ValueError: when the head counts of successive mix stages do not meet, or a link claims two stages of
            one kind.
    """
    claims = []
    for link in links:
        before = sizes
        sizes = link.adapt(sizes)
        claims.append([_claim(link, which, before, sizes) for which in ("pre", "post")])
    for which, start, end in (
        ("pre", sizes.logit_heads, sizes.softmax_heads),
        ("post", sizes.softmax_heads, sizes.output_heads),
    ):
        heads = start
        for stage in getattr(sizes, which):
            if stage.heads_in != heads:
                raise ValueError(
                    f"attention: a {which} mix expects {stage.heads_in} heads but gets {heads}. "
                    "Fix: put the transform that changes head counts first, or give equal counts."
                )
            heads = stage.heads_out
        if heads != end:
            raise ValueError(
                f"attention: the {which} mixes leave {heads} heads where {end} are expected. "
                "Fix: give the transforms of this chain equal head counts."
            )
    named = zip(site_names(links), claims, strict=True)
    return sizes, tuple(Site(name, sizes, pre, post) for name, (pre, post) in named)


def _claim(link: HeadTransform, which: str, before: Sizes, after: Sizes) -> int | None:
    old, new = len(getattr(before, which)), len(getattr(after, which))
    if new > old + 1:
        raise ValueError(
            f"{link.name}: its adapt claims {new - old} {which} mixes, expected one at most. Fix: chain two "
            "transforms, or multiply the matrices."
        )
    return old if new > old else None


def _check_options(transform: HeadTransform) -> None:
    for field in dataclasses.fields(transform) if dataclasses.is_dataclass(transform) else ():
        value = getattr(transform, field.name)
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{transform.name}: option {field.name} is {_named(value)}, which cannot be hashed, so equal "
                "transforms could not be told. Fix: a number, a string, a tuple, a frozen dataclass; arrays "
                "that "
                "are learned belong to init."
            ) from None
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{transform.name}: option {field.name} is nan, expected a number.")


def _named(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
