"""A cross memory: the projected key side of one source, its identity, and which operations are allowed now.

    memory = CrossMemory(attn)
    memory.bind(source, Identity(request="r1", source_release="s1", adapter="none"))
    memory.project(params, projection_version=7)   # projected, and not yet readable
    memory.attach(expected)                        # readable, where its identity is the expected one
    y, aux = memory.attend(params, x_q, expected=expected)

What it returns are plain key sides; its state and identity live on the host, outside of every traced program.
In training the object is made inside the loss function and read by `consume`.
"""

import enum
from collections import Counter
from collections.abc import Hashable
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxattn.attention import Attention, Aux
from jaxattn.identity import Identity, Source, derived, device_of, layout_of
from jaxattn.mask_form import And, Not, Or
from jaxattn.mask_rules import Band, Segments
from jaxattn.masks import Mask, as_mask
from jaxattn.sides import KeySide

PyTree = Any

Life = enum.Enum(
    "Life",
    "EMPTY SOURCE_BOUND PROJECTED_EPHEMERAL BACKWARD_PENDING PROJECTED ATTACHED BEAM_SHARED BEAM_EXPANDED "
    "INVALIDATED RELEASED",
)
_BEAMS = (Life.BEAM_SHARED, Life.BEAM_EXPANDED)
_READABLE = (Life.ATTACHED, *_BEAMS)
_LIVE = (Life.PROJECTED, *_READABLE)

# (operation, state) -> state; what is not here is refused.
TRANSITIONS: dict[tuple[str, Life], Life] = {
    ("bind", Life.EMPTY): Life.SOURCE_BOUND,
    ("project for training", Life.SOURCE_BOUND): Life.PROJECTED_EPHEMERAL,
    ("consume", Life.PROJECTED_EPHEMERAL): Life.BACKWARD_PENDING,
    ("project for inference", Life.SOURCE_BOUND): Life.PROJECTED,
    ("attach", Life.PROJECTED): Life.ATTACHED,
    ("share", Life.ATTACHED): Life.BEAM_SHARED,
    ("expand", Life.ATTACHED): Life.BEAM_EXPANDED,
    **{("reorder", life): life for life in _BEAMS},
    **{("rollback", life): life for life in _READABLE},
    **{("read", life): life for life in _READABLE},
    **{("drift", life): Life.INVALIDATED for life in _LIVE},
    **{
        ("release", life): Life.RELEASED for life in (Life.PROJECTED_EPHEMERAL, Life.BACKWARD_PENDING, *_LIVE)
    },
}

_ANEW = "a new CrossMemory: bind, project, attach"
_FIX = {
    Life.EMPTY: "bind a source first",
    Life.SOURCE_BOUND: "project it first; for another source, a new CrossMemory",
    Life.PROJECTED_EPHEMERAL: "consume it; for reads and beams, a new CrossMemory that is not of training",
    Life.BACKWARD_PENDING: "release it, and make a new CrossMemory in the loss function of each step",
    Life.PROJECTED: "attach it first",
    Life.ATTACHED: "share or expand it first; for another source, a new CrossMemory",
    **dict.fromkeys(_BEAMS, "read or reorder it; for another source or other beams, a new CrossMemory"),
    **dict.fromkeys((Life.INVALIDATED, Life.RELEASED), _ANEW),
}


def check_cross_mask(mask: Mask | None) -> None:
    """Raise a ValueError where a mask takes source rows and target rows for rows of one sequence."""
    mask = as_mask(mask)
    if isinstance(mask, And | Or | Not):
        for part in (mask.part,) if isinstance(mask, Not) else mask.parts:
            check_cross_mask(part)
    if isinstance(mask, Band):
        raise ValueError(
            f"mask: axis k counts source rows, {mask!r} compares target positions (axis q) with them. "
            "Fix: leave it out; source padding goes to bind(valid=...). Where both sides do run along, "
            "read() and attn.attend take any mask."
        )
    if isinstance(mask, Segments) and mask.k_ids is None:
        raise ValueError(
            f"mask: {mask!r} takes axis k for the rows of axis q, but k counts source rows. "
            "Fix: segments(q_ids, k_ids)."
        )


class CrossMemory:
    """The projected key side of one source, with its identity and a state: see `TRANSITIONS`.

    A host object, not a tree: pass what `read` and `consume` return into jit and grad.

    Raises (all operations, and nothing has changed then):
        RuntimeError: for an operation that its state does not allow, naming both and what is legal.
        ValueError: for an identity that differs, naming the fields; for beams that do not fit the sources;
            for parameters that are not those of the attention, naming their paths.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> attn = attention(HeadSpec(model=6, heads=2))
        >>> from jaxattn.identity import expected_identity
        >>> params, source = attn.init(jax.random.key(0)), jnp.ones((2, 7, 6))
        >>> named = Identity(request="r1", source_release="s1", adapter="none", projection_version=1)
        >>> expected = expected_identity(attn, params, source, named)
        >>> memory = CrossMemory(attn)
        >>> memory.bind(source, named)
        >>> memory.project(params, projection_version=1)
        >>> memory.attach(expected)
        >>> memory.share(3)
        >>> y, aux = memory.attend(params, jnp.ones((6, 5, 6)), expected=expected)
        >>> y.shape, memory
        ((6, 5, 6), CrossMemory(BEAM_SHARED, request='r1', source_release='s1'))
        >>> memory.drift(expected._replace(adapter="lora"))
        ('adapter',)
    """

    def __init__(self, attn: Attention):
        self.attn = attn
        self.life = Life.EMPTY
        self.identity = Identity()
        self.beam_to_source: np.ndarray | None = None  # [beams], the source slot of each
        self._source: tuple[Source, Array | None, Array | None] | None = None
        self._side: KeySide | None = None
        self._why = ""  # which fields changed, once it is invalid

    def __repr__(self) -> str:
        own = self.identity
        return (
            f"CrossMemory({self.life.name}, request={own.request!r}, source_release={own.source_release!r})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes that are stored: the pair, repeated where it was expanded, and the beam map."""
        return self.map_nbytes + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self._side))

    @property
    def map_nbytes(self) -> int:
        """Bytes of the beam map."""
        return 0 if self.beam_to_source is None else self.beam_to_source.nbytes

    def bind(
        self, source: Source, named: Identity, valid: Array | None = None, positions: Array | None = None
    ) -> None:
        """Name the source.

        Args:
            source: [b, ..., k, m] or a pair (x_k, x_v); axis b is the source slot. numpy is copied.
            named: what the caller knows; request and source_release are needed.
            valid, positions: as in `Attention.key_side`; invalid rows are hidden from every target row.
        """
        after = self._after("bind")
        for name in ("request", "source_release"):
            if getattr(named, name) is None:
                raise ValueError(
                    f"CrossMemory: bind without {name}, expected what tells this source from any other and "
                    f"from its next release. Fix: Identity({name}=...)."
                )
        owned = lambda x: x if isinstance(x, jax.Array) else jnp.array(x)
        self._source = jax.tree.map(owned, (source, valid, positions))
        self.identity, self.life = named, after

    def project(self, params: PyTree, *, projection_version: Hashable, training: bool = False) -> None:
        """Project keys and values, for `attach`, or in training for `consume` in the same step.

        Args:
            params: the tree that `init` made; where they or the source are traced, gradients flow.
            projection_version: of these parameters.
            training: the pair is for one forward and backward pass.
        """
        after = self._after("project for training" if training else "project for inference")
        if projection_version is None:
            raise ValueError("CrossMemory: project without projection_version. Fix: a number of the step.")
        assert self._source is not None
        side = self.attn.key_side(params, *self._source)
        whole = lambda x: None if x is None else jnp.broadcast_to(x, side.key.shape[:-2])
        named, pair = self.identity._replace(projection_version=projection_version), (side.key, side.value)
        self.identity = derived(named, self.attn, side, device_of(*pair), layout_of(*pair), training)
        self._side = side._replace(valid=whole(side.valid), position=whole(side.position))
        self._source, self.life = None, after

    def consume(self, projection_version: Hashable) -> KeySide:
        """In training: the pair for `attn.attend`; gradients flow through it to source and parameters."""
        after = self._after("consume")
        now = self.identity._replace(projection_version=projection_version)
        self._same(now, "consume", "project with the parameters of this step, in its loss function")
        self.life = after
        return self._stored

    def attach(self, expected: Identity) -> None:
        """Make the pair readable, where every field of its identity is as this request and layer expect."""
        after = self._after("attach")
        self._same(expected, "attach", "the pair of this request and layer, projected from its source")
        self.life = after

    def share(self, beams: Any) -> None:
        """Let beams read the one stored pair.

        Args:
            beams: how many for each source, or the source slot of each beam: [beams] integers on the host.
        """
        after = self._after("share")
        self.beam_to_source, self.life = self._beams("share", beams), after

    def expand(self, beams: Any) -> None:
        """Store the pair once for each beam; `beams` as in `share`."""
        after = self._after("expand")
        self.beam_to_source = self._beams("expand", beams)
        self._side, self.life = _rows(self._stored, self.beam_to_source), after

    def reorder(self, index: Any) -> None:
        """Beam i continues from the hypothesis of beam index[i]; no shared source tensor is touched.

        Args:
            index: [beams] integers on the host: a permutation, or one in which a hypothesis replaces another
                of its own source.
        """
        after = self._after("reorder")
        old = self.beam_to_source
        assert old is not None
        index = _host_indices("reorder: index", index, len(old))
        if len(index) != len(old):
            raise ValueError(f"CrossMemory: reorder: index of {len(index)} entries for {len(old)} beams.")
        new = old[index]
        have, come = Counter(old.tolist()), Counter(new.tolist())
        wrong = [f"source {s} would have {come[s]} beams, not {n}" for s, n in have.items() if come[s] != n]
        if wrong:
            raise ValueError(
                f"CrossMemory: reorder: {', '.join(wrong)}: beams would go on from another source's "
                "hypotheses. Fix: choose hypotheses within each source."
            )
        if self.life is Life.BEAM_EXPANDED and (new != old).any():
            self._side = _rows(self._stored, index)
        self.beam_to_source, self.life = new, after

    def rollback(self, expected: Identity) -> None:
        """Say that the target dropped rows; the memory stays unchanged. Raises where the identity differs."""
        after = self._after("rollback")
        self._same(expected, "rollback", "after a change of source or model: drift(now), then rebuild")
        self.life = after

    def drift(self, now: Identity) -> tuple[str, ...]:
        """The fields in which `now` differs from the memory's identity; if there are any, it is dropped."""
        after = self._after("drift")
        changed = self.identity.differences(now)
        if changed:
            self._why = _listed(changed, "was {!r}, became {!r}") + "; "
            self._drop(after)
        return tuple(changed)

    def read(self, expected: Identity) -> KeySide:
        """The pair with one entry for each row of the target's batch, for `attn.attend`, under jit or not.

        Shared beams are gathered into a copy, one pair for each beam; `attend` needs no copy.

        Args:
            expected: the identity that the reader's own request and layer have now.
        """
        self._check_read(expected)
        shared = self.life is Life.BEAM_SHARED
        return _rows(self._stored, self.beam_to_source) if shared else self._stored

    def attend(
        self,
        params: PyTree,
        x_q: Array,
        mask: Mask | None = None,
        *,
        expected: Identity,
        bias: Array | None = None,
        engine: str = "auto",
        positions: Array | None = None,
        valid: Array | None = None,
        capture: tuple[str, ...] = (),
        remask: bool = False,
    ) -> tuple[Array, Aux]:
        """`read`, then `attn.attend`, for evaluation (no dropout); a mask that compares positions raises.

        Shared beams, where each source has equally many, read the stored pair without a copy.

        Args:
            params, mask, bias, engine, positions, valid, capture, remask: as in `Attention.attend`.
            x_q: [b, ..., q, m]; b counts beams, or source slots where there are none.
            expected: as in `read`.
        """
        check_cross_mask(mask)
        self._check_read(expected)
        beams = self.beam_to_source

        def run(side, x_q, mask, bias, positions, valid):
            return self.attn.attend(
                params, x_q, side, mask, bias=bias, engine=engine, positions=positions, valid=valid,
                capture=capture, remask=remask,
            )  # fmt: skip

        if self.life is Life.BEAM_SHARED and beams is not None:
            if len(set(np.bincount(beams, minlength=self._slots))) == 1:
                return self._attend_shared(run, beams, x_q, as_mask(mask), bias, positions, valid)
        return run(self.read(expected), x_q, mask, bias, positions, valid)

    def _attend_shared(self, run, beams: np.ndarray, x_q, mask: Mask, bias, positions, valid):
        """Beam g of every source in one call, under vmap over g, so that the pair needs no beam axis."""
        group, order = len(beams) // self._slots, np.argsort(beams, kind="stable")

        def split(x: Array, core: int, alike: bool = True) -> Array:
            if alike and (jnp.ndim(x) == core or x.shape[0] == 1):
                return jnp.broadcast_to(x, (group, *jnp.shape(x)))
            if x.shape[0] != len(beams):
                raise ValueError(
                    f"CrossMemory: attend: batch axis b is {x.shape[0]} (shape {x.shape}), expected "
                    f"{len(beams)} beams. Fix: one entry a beam in x_q, mask, bias, positions, valid."
                )
            return einops.rearrange(jnp.asarray(x)[order], "(b g) ... -> g b ...", g=group)

        def one(*rows):
            y, aux = run(self._stored, *rows)
            return y, aux.sums, aux.captured

        rows = [None if x is None else split(x, core) for x, core in ((bias, 3), (positions, 1), (valid, 1))]
        y, sums, captured = jax.vmap(one)(split(x_q, 2, alike=False), mask.map_arrays(split), *rows)
        join = lambda x: einops.rearrange(x, "g b ... -> (b g) ...")[np.argsort(order)]
        sums = jax.tree.map(lambda x: x.sum(0), sums)
        return join(y), Aux(self.attn.losses(sums), sums, jax.tree.map(join, captured))

    def release(self, *, consumers: int) -> None:
        """Drop the arrays, once the owner of the storage has confirmed that nothing reads them.

        Args:
            consumers: readers that may still start or still run, as the owner counts them; only 0 releases.
        """
        after = self._after("release")
        if consumers != 0:
            raise ValueError(
                f"CrossMemory: release with {consumers} consumers outstanding, expected 0. "
                "Fix: wait until the last reader is done."
            )
        self._drop(after)

    @property
    def _stored(self) -> KeySide:
        assert self._side is not None
        return self._side

    @property
    def _slots(self) -> int:
        return self._stored.key.shape[0]

    def _drop(self, after: Life) -> None:
        self._side, self.beam_to_source, self.life = None, None, after

    def _after(self, operation: str) -> Life:
        """The state after a legal operation."""
        after = TRANSITIONS.get((operation, self.life))
        if after is None:
            legal = ", ".join(state.name for name, state in TRANSITIONS if name == operation)
            here = ", ".join(name for name, state in TRANSITIONS if state is self.life) or "nothing"
            raise RuntimeError(
                f"CrossMemory: {operation} in {self.life.name}, expected {legal} ({self._why}legal here: "
                f"{here}). Fix: {_FIX[self.life]}."
            )
        return after

    def _check_read(self, expected: Identity) -> None:
        self._after("read")
        self._same(
            expected, "read", "the memory of your own request; after a change: drift(now), then rebuild"
        )

    def _same(self, expected: Identity, operation: str, fix: str) -> None:
        wrong = self.identity.differences(expected)
        if wrong:
            raise ValueError(f"CrossMemory: {operation} of another identity: {_listed(wrong)}. Fix: {fix}.")

    def _beams(self, operation: str, beams: Any) -> np.ndarray:
        if self._stored.key.ndim < 4:
            raise ValueError(
                f"CrossMemory: {operation}: the source has no batch axis. Fix: bind source[None]."
            )
        if isinstance(beams, int):
            beams = np.repeat(np.arange(self._slots), max(beams, 0))
        return _host_indices(f"{operation}: beams", beams, self._slots)


def _rows(side: KeySide, index: Any) -> KeySide:
    return jax.tree.map(lambda x: x[index], side)


def _host_indices(what: str, got: Any, size: int) -> np.ndarray:
    if isinstance(got, Tracer):
        raise TypeError(
            f"CrossMemory: {what} are traced, but a life is host state. Fix: outside of jit; within a source "
            "no row of the memory changes, so a traced search reorders the target alone."
        )
    index = np.asarray(got)
    fits = index.ndim == 1 and index.size and np.issubdtype(index.dtype, np.integer)
    if not fits or index.min() < 0 or index.max() >= size:
        raise ValueError(f"CrossMemory: {what}: got {index.tolist()}, expected a row of 0 to {size - 1}.")
    return index.astype(np.int32)


def _listed(different: dict[str, tuple[Any, Any]], words: str = "is {!r}, expected {!r}") -> str:
    return ", ".join(f"{name} {words.format(*pair)}" for name, pair in different.items())
