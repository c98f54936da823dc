"""dense: the formula on the whole score tensor at once; every intermediate can be returned."""

from jax import Array

from jaxattn.engines import formula
from jaxattn.engines.call import Call, Engine


def run(call: Call) -> tuple[Array, dict[str, Array]]:
    """Heads and the asked-for intermediates of all rows: memory grows with q times k."""
    heads, captured = rows(call, 0, 0)
    return heads, {name: captured[name] for name in call.capture if name in captured}


def rows(call: Call, q_start: int | Array, k_start: int) -> tuple[Array, dict[str, Array]]:
    """The formula for the call's own query rows and keys, which lie at the given starts."""
    raw, mixed = formula.logits(call, q_start, k_start)
    q_size, k_size = mixed.shape[-2:]
    visible = call.mask.block(call.frame, q_start, q_size, k_start, k_size)
    weights = formula.softmax(mixed, visible)
    seen, used = formula.post(call, weights, visible, q_start, k_start)
    heads = formula.gather(used, call.key.value, call.coupling.value_of, call.dtype)
    captured = dict(logits=raw, mixed_logits=mixed, weights=weights, mixed_weights=seen)
    return heads.astype(call.key.value.dtype), captured


ENGINE = Engine("dense", run, about="whole score tensors; returns logits and weights")
