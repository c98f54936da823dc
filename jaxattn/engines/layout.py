"""The form as engines hold it: heads lead, a query array ends in q and one more axis, a key array in k.

Matrix products then find each head's rows and columns where they lie, every array of the query side is
cut along its axis -2 and every array of the key side along its axis -1, and what rows add to a mix
broadcasts against the scores.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.axes import at_least_float32
from jaxattn.engines.call import Call
from jaxattn.masks import as_mask
from jaxattn.sides import Coupling, Factors

PyTree = Any


class Rows(NamedTuple):
    """The query side.

    Attributes:
        query: [..., hl, q, d].
        pre, post: factors of each stage: down [..., g, i, r, q, 1], up [..., g, r, o, q, 1],
            diag [..., h, q, 1], dense [..., i, o, q, 1].
        position: [..., q, 1], or None.
    """

    query: Array
    pre: tuple[Factors | None, ...]
    post: tuple[Factors | None, ...]
    position: Array | None


class Keys(NamedTuple):
    """The key side.

    Attributes:
        key: [..., hK, d, k]; value: [..., hV, v, k].
        bias: [..., hl, 1, k], or None.
        pre, post: factors of each stage, over [..., 1, k].
        position: [..., 1, k], or None.
    """

    key: Array
    value: Array
    bias: Array | None
    pre: tuple[Factors | None, ...]
    post: tuple[Factors | None, ...]
    position: Array | None


class Origin(NamedTuple):
    """Where a block starts in its call; `row` may be [q] row numbers that do not lie together."""

    example: int | Array = 0
    head: int | Array = 0
    row: int | Array = 0
    key: int | Array = 0


ORIGIN = Origin()


class Block(NamedTuple):
    """Some query rows and some keys of a call, of all heads or of one.

    Attributes:
        rows, keys, coupling: the form of the block.
        bias: the block's part of the call's bias, or None.
        visible: bool [..., h, q, k], each axis of full size or 1.
        dropout_key: draws the attention dropout; None is evaluation.
        start: where the block starts.
    """

    rows: Rows
    keys: Keys
    coupling: Coupling
    bias: Array | None
    visible: Array
    dropout_key: Array | None
    start: Origin = ORIGIN

    @property
    def dtype(self) -> jnp.dtype:
        """The type of logits and softmax: at least float32."""
        return at_least_float32(self.rows.query.dtype)


def count_from(first: int | Array, size: int) -> Array:
    """Row numbers first, first + 1, ...; numbers that are given one by one as they are."""
    first = jnp.asarray(first)
    return first if first.ndim else first + jnp.arange(size, dtype=first.dtype)


def lay_out(call: Call) -> tuple[Rows, Keys]:
    """The sides of a call in this layout, every array with all batch axes of the call."""
    batch = call.frame.batch

    def whole(pattern: str, x: Array | None) -> Any:
        if x is None:
            return None
        x = jnp.asarray(x)
        own = x.ndim - (len(pattern.split("->")[0].split()) - 1)
        x = jnp.broadcast_to(x, (*batch, *x.shape[own:]))
        return einops.rearrange(x, pattern)

    def stage(factors: Factors | None, n: str) -> Factors | None:
        if factors is None:
            return None
        return Factors(
            down=whole(f"... n g i r -> ... g i r {n}", factors.down),
            up=whole(f"... n g r o -> ... g r o {n}", factors.up),
            diag=whole(f"... n h -> ... h {n}", factors.diag),
            dense=whole(f"... n i o -> ... i o {n}", factors.dense),
        )

    q, k = call.query, call.key
    rows = Rows(
        whole("... q hl d -> ... hl q d", q.query),
        tuple(stage(f, "n 1") for f in q.pre),
        tuple(stage(f, "n 1") for f in q.post),
        whole("... q -> ... q 1", q.position),
    )
    keys = Keys(
        whole("... k hK d -> ... hK d k", k.key),
        whole("... k hV v -> ... hV v k", k.value),
        whole("... k hl -> ... hl 1 k", k.bias),
        tuple(stage(f, "1 n") for f in k.pre),
        tuple(stage(f, "1 n") for f in k.post),
        whole("... k -> ... 1 k", k.position),
    )
    return rows, keys


def flat_batch(x: Array, core: int, batch: tuple[int, ...]) -> Array:
    """An array with one batch axis in place of the call's, of size 1 where all examples are alike."""
    x = jnp.asarray(x)
    own, rest = x.shape[: x.ndim - core], x.shape[x.ndim - core :]
    if all(size == 1 for size in own):
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(-1, *rest)


def map_examples(function: Callable[[Array, int], Array], call: Call) -> Call:
    """The call with `function(array, core)` for the arrays of its mask and frame.

    core counts the axes of an array that are not the batch's.
    """
    each = lambda x, core: None if x is None else function(x, core)
    frame = call.frame
    positions = dict(q_position=each(frame.q_position, 1), k_position=each(frame.k_position, 1))
    return call._replace(mask=call.mask.map_arrays(function), frame=frame._replace(**positions))


def without_tangent(call: Call) -> tuple[PyTree, Callable[[PyTree], Call]]:
    """The arrays of a call that have no tangent, and how the call is made of them again.

    A derivative rule of one's own receives traced arrays; it must not close over them. So of both sides, the
    coupling and the bias the new call knows shapes and types alone.
    """
    frame = call.frame
    arrays = call.mask, call.dropout_key, frame.q_position, frame.k_position
    shapes = jax.eval_shape(lambda *form: form, call.query, call.key, call.coupling, call.bias)
    query, key, coupling, bias = shapes
    frame = frame._replace(q_position=None, k_position=None)
    bare = call._replace(query=query, key=key, coupling=coupling, bias=bias)
    bare = bare._replace(mask=as_mask(None), frame=frame, dropout_key=None)

    def again(arrays: PyTree) -> Call:
        mask, dropout_key, q_position, k_position = arrays
        positions = frame._replace(q_position=q_position, k_position=k_position)
        return bare._replace(mask=mask, dropout_key=dropout_key, frame=positions)

    return arrays, again


def has_data(call: Call) -> bool:
    """Whether the mask holds data, so that only at run time it is known which keys are hidden."""
    return bool(jax.tree.leaves((call.mask, call.frame.q_position, call.frame.k_position)))


def split_floats(tree: PyTree) -> tuple[PyTree, PyTree]:
    """The floating arrays of a tree and its other arrays, each with None in place of the rest."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    floats = jax.tree.map(lambda x: x if is_float(x) else None, tree)
    return floats, jax.tree.map(lambda x: None if is_float(x) else x, tree)


def join_floats(floats: PyTree, others: PyTree) -> PyTree:
    """The inverse of `split_floats`."""
    pick = lambda a, b: b if a is None else a
    return jax.tree.map(pick, floats, others, is_leaf=lambda x: x is None)
