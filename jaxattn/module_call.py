"""One call of a Flax layer, the same for NNX and Linen: what is read, checked, cast, run and handed on."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from jaxattn.attention import Attention, Aux
from jaxattn.cache import Cache
from jaxattn.inputs import check_state
from jaxattn.masks import Frame, Mask, as_mask, causal
from jaxattn.module_args import (
    at_precision,
    pair_positions,
    placed,
    read_bias,
    read_mask,
    read_source,
)
from jaxattn.sides import KeySide

PyTree = Any
WEIGHTS = "mixed_weights"  # what meets the values, before dropout; without mixes the softmax itself
SOWN = "attention_weights"  # Flax's name for them


@dataclasses.dataclass(frozen=True)
class Face:
    """How a layer computes, and what its errors call its own parts.

    Attributes:
        dtype: type to compute in, or None.
        precision: of every product.
        engine: which one runs the call.
        width_q, width_k: what sets the widths of the states.
        new_cache: how to make a cache, with {shape} and {dtype} to fill in.
    """

    dtype: DTypeLike | None
    precision: Any
    engine: str
    width_q: str
    width_k: str
    new_cache: str

    def cast(self, *trees: PyTree) -> tuple[Any, ...]:
        """Arrays in the type to compute in."""
        if self.dtype is None:
            return trees
        return jax.tree.map(lambda x: jnp.asarray(x, self.dtype), trees)


class Asked(NamedTuple):
    """What one call of a layer asks for, by the names of its arguments."""

    mask: Mask | Array | None = None
    bias: Array | None = None
    dropout_key: Array | None = None
    is_causal: bool = False
    valid: Array | None = None
    positions: Any = None
    input_positions: Array | None = None
    sow_weights: bool = False
    capture: tuple[str, ...] = ()
    out_sharding: Any = None
    qkv_sharding: Any = None


class Done(NamedTuple):
    """What came of it.

    Attributes:
        y: [..., q, m].
        aux: with what was captured because the caller asked for it.
        weights: [..., h, q, k] to be sown, or None.
        cache: with the rows of this call, where there was one.
    """

    y: Array
    aux: Aux
    weights: Array | None = None
    cache: Cache | None = None

    def losses(self) -> dict[str, Array]:
        """Auxiliary losses, each times its weight, under the names by which they are sown."""
        return {name: loss.weight * loss.value for name, loss in self.aux.losses.items()}


def run(
    face: Face,
    attn: Attention,
    params: PyTree,
    inputs: tuple[Array, Array | None, Array | None],
    asked: Asked,
    cache: Cache | None = None,
) -> Done:
    """Attention of `inputs_q` to itself or to a source, or, with a cache, of its rows to all rows so far.

    Args:
        face: the layer.
        attn, params: the pure functions and their parameters.
        inputs: inputs_q, inputs_k, inputs_v.
        asked: the other arguments of the call.
        cache: rows so far, where the layer decodes.

    Raises:
        ValueError, TypeError: naming the layer's own argument.
    """
    inputs_q, inputs_k, inputs_v = inputs
    if cache is not None and inputs_k is inputs_q and (inputs_v is None or inputs_v is inputs_q):
        inputs_k = inputs_v = None  # self-attention, written out
    source = read_source(inputs_k, inputs_v)
    _check_states(inputs_q, inputs_k, attn, face)
    params, inputs_q, source = face.cast(params, inputs_q, source)
    batch, q_len = inputs_q.shape[:-2], inputs_q.shape[-2]
    k_len = q_len if inputs_k is None else inputs_k.shape[-2]
    both = pair_positions(asked.positions, asked.input_positions, inputs_k is not None, k_len)
    named = _named(face, asked, batch)
    mask = as_mask(read_mask(asked.mask, batch))
    if cache is not None:
        _check_step(asked, source is not None)
        _check_cache(face, cache, inputs_q, jnp.promote_types(inputs_q.dtype, params["key"]["kernel"].dtype))
        _check_cached_mask(mask, Frame(q_len, cache.size, batch=batch))
        with at_precision(face.precision):
            y, aux, cache = attn.decode(
                params, cache, inputs_q, mask, valid=asked.valid, positions=both[0], **named
            )
    else:
        mask = mask & causal() if asked.is_causal else mask
        place = None if asked.qkv_sharding is None else lambda x: placed(x, asked.qkv_sharding)
        with at_precision(face.precision):
            y, aux = attn.apply(
                params, inputs_q, source, mask, valid=asked.valid, positions=both, place=place, **named
            )
    return _done(placed(y, asked.out_sharding), aux, asked, cache)


def attend(face: Face, attn: Attention, params: PyTree, inputs_q: Array, side: KeySide, asked: Asked) -> Done:
    """Attention against a source that was projected before; `valid` and `positions` are of the queries."""
    _check_states(inputs_q, None, attn, face)
    params, inputs_q = face.cast(params, inputs_q)
    batch = inputs_q.shape[:-2]
    named = _named(face, asked, batch) | dict(positions=asked.positions, valid=asked.valid)
    with at_precision(face.precision):
        y, aux = attn.attend(params, inputs_q, side, read_mask(asked.mask, batch), **named)
    return _done(y, aux, asked, None)


def _named(face: Face, asked: Asked, batch: tuple[int, ...]) -> dict[str, Any]:
    """What every way to attend takes by name."""
    more = (WEIGHTS,) if asked.sow_weights and WEIGHTS not in asked.capture else ()
    return dict(
        bias=read_bias(asked.bias, batch),
        engine=face.engine,
        dropout_key=asked.dropout_key,
        capture=(*asked.capture, *more),
    )


def _done(y: Array, aux: Aux, asked: Asked, cache: Cache | None) -> Done:
    weights = aux.captured[WEIGHTS] if asked.sow_weights else None
    aux = aux._replace(captured={name: aux.captured[name] for name in asked.capture})
    return Done(y, aux, weights, cache)


def _check_states(inputs_q: Array, inputs_k: Array | None, attn: Attention, face: Face) -> None:
    for what, x, axis, width, where in (
        ("inputs_q", inputs_q, "q", attn.spec.in_q, face.width_q),
        ("inputs_k", inputs_k, "k", attn.spec.in_k, face.width_k),
    ):
        if x is not None:
            check_state(what, x, axis, width, where)


def _check_step(asked: Asked, source: bool) -> None:
    """Raise for what a call that appends to a cache cannot take."""
    if source:
        raise ValueError(
            "inputs_k: given in decode, where rows of inputs_q are appended to the cache and attend to it. "
            "Fix: leave it out for self-attention; for a source, project it once (NNX: side = "
            "layer.key_side(inputs_k), then layer.attend(inputs_q, side) at each step), or decode=False."
        )
    if asked.is_causal:
        raise ValueError(
            "is_causal: True in decode, where each row sees the cached rows up to its own position. "
            "Fix: drop the causal mask in decode: is_causal=False."
        )
    if asked.qkv_sharding is not None:
        raise ValueError(
            "qkv_sharding: given in decode, where the cache has a sharding of its own. Fix: leave it out, "
            "and place the variables of the cache."
        )


def _check_cached_mask(mask: Mask, frame: Frame) -> None:
    """Raise unless the axis k of a mask counts the rows of the cache."""
    try:
        mask.check(frame, None)
    except ValueError as error:
        raise ValueError(
            f"mask: it does not fit the {frame.k_len} rows of the cache, which are the keys in decode. Fix: "
            "drop the causal mask in decode, where each row sees rows up to its own position anyway; any "
            f"other mask there has k = {frame.k_len}. Got: {error}."
        ) from error


def _check_cache(face: Face, cache: Cache, x: Array, dtype: Any) -> None:
    """Raise where the rows of a call do not fit the cache, naming what makes the layer's cache."""
    batch, n, width = x.shape[:-2], x.shape[-2], x.shape[-1]
    kind, problem, size = ValueError, None, cache.size
    if cache.batch != batch:
        problem = f"batch axes are {cache.batch}, those of inputs_q {batch}"
    elif cache.side.key.dtype != dtype:
        kind, problem = TypeError, f"its rows are {cache.side.key.dtype}, this call computes in {dtype}"
    elif not isinstance(cache.count, Tracer) and int(cache.count) + n > size:
        problem = f"{int(cache.count)} of {size} rows are taken, {n} more do not fit"
        size = int(cache.count) + n
    if problem is not None:
        fix = face.new_cache.format(shape=(*batch, size, width), dtype=dtype)
        raise kind(f"cache: {problem}. Fix: {fix}.")
