"""Wrong masks and wrong numbers: what a row sees, what hides the rest, and the types it is computed in."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.check.faults.fault import Fault
from jaxattn.check.faults.right import (
    Example,
    kept,
    planted,
    softmax,
    tril,
    visible,
)

Seen = Callable[[tuple[int, ...], Array | None, bool], Array]

BATCH, PAIRS, HEADS = Example(mask="b k"), Example(mask="b q k"), Example(mask="b h q k")
EMPTY = Example(mask="b q k", dead=True)
LARGE, SQUARE = Example(mask="b q k", reach=1e6), Example(k=5, causal=True)


def _mask(change: Callable[[Array], Array | None]) -> Seen:
    """What is visible where a mask is changed first."""
    return lambda shape, mask, causal: visible(shape, None if mask is None else change(mask), causal)


def _causal(triangle: Callable[[int, int], Array]) -> Seen:
    """What is visible where another triangle is causal."""
    return lambda shape, mask, causal: (
        visible(shape, mask, False) & (triangle(*shape[-2:]) if causal else True)
    )


def _examples_as_heads(shape: tuple[int, ...], mask: Array | None, causal: bool) -> Array:
    """A mask [b, q, k] without its head axis, spread from the right."""
    if mask is not None and mask.shape[1] == 1 and mask.shape[0] == shape[1]:
        mask = mask[None, :, 0]
    return visible(shape, mask, causal)


def _examples_as_rows(shape: tuple[int, ...], mask: Array | None, causal: bool) -> Array:
    """A mask [b, 1, 1, k] whose examples were taken for rows."""
    if mask is not None and mask.shape[1:3] == (1, 1) and mask.shape[0] == shape[-2]:
        mask = mask[None, None, :, 0, 0]
    return visible(shape, mask, causal)


def _naive(x: Array, seen: Array) -> Array:
    return jax.nn.softmax(x, -1)


def _no_shift(x: Array, seen: Array) -> Array:
    raised = jnp.where(seen, jnp.exp(x), 0)
    total = raised.sum(-1, keepdims=True)
    return raised / jnp.where(total == 0, 1, total)


def _in_its_type(x: Array, seen: Array) -> Array:
    x = jnp.where(seen, x, 0)
    narrow = jnp.where(seen, jnp.exp(x - x.max(-1, keepdims=True)), 0).astype(jnp.bfloat16)
    start = jnp.zeros(narrow.shape[:-1], narrow.dtype)
    total, _ = jax.lax.scan(lambda sum, one: (sum + one, None), start, jnp.moveaxis(narrow, -1, 0))
    return (narrow / jnp.where(total == 0, 1, total)[..., None]).astype(x.dtype)


def _unsafe(x: Array, seen: Array) -> Array:
    """exp of every score, of which a selection drops the hidden."""
    top = jnp.max(x, -1, keepdims=True, initial=-jnp.inf, where=seen)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    raised = jnp.where(seen, jnp.exp(x - top), 0)
    total = raised.sum(-1, keepdims=True)
    return raised / jnp.where(total == 0, 1, total)


def _half(query: Array, key: Array) -> Array:
    return jnp.einsum("bhqd,bhkd->bhqk", query.astype(jnp.float16), key.astype(jnp.float16))


FAULTS: dict[str, Fault] = {
    "True hides": planted(
        "the mask's other polarity",
        "PUB-01; second article",
        "mask-polarity",
        "masked scores",
        PAIRS,
        visible=_mask(lambda mask: ~mask),
    ),
    "mask ignored": planted(
        "the mask is dropped on the way",
        "PUB-01",
        "mask-polarity",
        "masked scores",
        PAIRS,
        visible=_mask(lambda mask: None),
    ),
    "mask of the first head": planted(
        "a mask of heads is cut to its first",
        "PUB-03",
        "mask-broadcast",
        "masked scores",
        HEADS,
        visible=_mask(lambda mask: mask[:, :1]),
    ),
    "examples taken for heads": planted(
        "a mask [b, q, k] without its head axis, where there are as many heads as examples",
        "M3.2 0x0E; PUB-03",
        "mask-broadcast",
        "masked scores",
        PAIRS._replace(b=3),
        visible=_examples_as_heads,
    ),
    "examples taken for rows": planted(
        "a padding mask spread over the wrong axis",
        "M3.2 0x0E; PUB-03",
        "mask-broadcast",
        "masked scores",
        BATCH._replace(q=2),
        visible=_examples_as_rows,
    ),
    "mask turned": planted(
        "rows and keys of the mask are swapped where it is square",
        "M3.2 0x0E",
        "mask-broadcast",
        "masked scores",
        PAIRS._replace(k=5),
        visible=_mask(lambda mask: mask.swapaxes(2, 3) if mask.shape[2] == mask.shape[3] else mask),
    ),
    "weights times mask": planted(
        "hidden weights are zeroed and the rest not made one again",
        "second article",
        "mask-polarity",
        "weights",
        PAIRS,
        hide=kept,
        softmax=lambda x, seen: jax.nn.softmax(x, -1) * seen,
    ),
    "mask adds -1e4": planted(
        "hidden scores are lowered by a number that large scores beat",
        "PUB-06",
        "empty-row-value",
        "masked scores",
        LARGE,
        hide=lambda x, seen: x + jnp.where(seen, 0, -1e4).astype(x.dtype),
        softmax=_naive,
    ),
    "fill by the least number": planted(
        "a row without keys becomes the mean of all values",
        "PUB-04",
        "empty-row-value",
        "weights",
        EMPTY,
        hide=lambda x, seen: jnp.where(seen, x, jnp.finfo(x.dtype).min),
        softmax=_naive,
    ),
    "fill by -inf": planted(
        "a row without keys is 0/0", "PUB-04", "empty-row-value", "weights", EMPTY, softmax=_naive
    ),
    "fill of -1e9 in half precision": planted(
        "a fill that float16 turns to -inf, so that a row without keys is 0/0",
        "PUB-06",
        "empty-row-value",
        "weights",
        EMPTY,
        scores=_half,
        hide=lambda x, seen: jnp.where(seen, x.astype(jnp.float32), -1e9).astype(x.dtype),
        softmax=_naive,
    ),
    "a triangle that blocks": planted(
        "a triangle of what is blocked is read as what is seen: row i sees the keys after it",
        "second article",
        "causal-square",
        "masked scores",
        SQUARE,
        visible=_causal(lambda q, k: ~tril(q, k)),
    ),
    "causal and one more": planted(
        "row i sees key i + 1",
        "PUB-11",
        "causality",
        "masked scores",
        SQUARE,
        visible=_causal(lambda q, k: jnp.tril(jnp.ones((q, k), bool), 1)),
    ),
    "causal ignored": planted(
        "a causal call sees every key",
        "PUB-11",
        "causality",
        "masked scores",
        SQUARE,
        visible=lambda shape, mask, causal: visible(shape, mask, False),
    ),
    "no maximum": planted(
        "exp without the row's maximum",
        "PUB-06",
        "large-scores",
        "weights",
        LARGE,
        softmax=_no_shift,
    ),
    "scores in half precision": planted(
        "scores overflow in float16", "PUB-06", "large-scores", "scores", LARGE, scores=_half
    ),
    "sums of half precision": planted(
        "the sum of a row in bfloat16", "PUB-07", "half-precision-sums", "weights", softmax=_in_its_type
    ),
    "float32 within float64": planted(
        "the softmax in float32 whatever comes in",
        "PUB-07",
        "float64-throughout",
        "weights",
        softmax=lambda x, seen: softmax(x.astype(jnp.float32), seen).astype(x.dtype),
    ),
    "exp of what is hidden": planted(
        "exp overflows for a hidden score, in a branch that is thrown away: its derivative is 0 times inf",
        "PUB-05",
        "hidden-large-score",
        "",
        why="derivatives are no stage",
        hide=kept,
        softmax=_unsafe,
    ),
    "hidden NaN": planted(
        "0 times NaN in a hidden value",
        "PUB-05",
        "hidden-nan-value",
        "heads",
        BATCH._replace(poison=True),
        clean=kept,
    ),
    "hidden rows cleaned of NaN alone": planted(
        "0 times inf in a gradient, from a hidden value at the type's largest",
        "PUB-05",
        "hidden-row-holds-anything",
        "",
        why="derivatives are no stage",
        clean=lambda x, seen: jnp.where(jnp.isfinite(x), x, 0),
    ),
}
