"""dense: the formula on the whole score tensor at once; every intermediate can be returned."""

import einops
from jax import Array

from jaxattn.engines import formula
from jaxattn.engines.call import Call, Engine
from jaxattn.engines.layout import Block, lay_out


def run(call: Call) -> tuple[Array, dict[str, Array]]:
    """Heads and the asked-for intermediates of all rows: memory grows with q times k."""
    visible = call.mask.block(call.frame, 0, call.frame.q_len, 0, call.frame.k_len)
    block = Block(*lay_out(call), call.coupling, call.bias, visible, call.dropout_key)
    raw, mixed = formula.logits(block, formula.STEPS)
    weights = formula.softmax(mixed, visible)
    seen, used = formula.post(block, weights, formula.STEPS)
    heads = formula.gather(used, block.keys.value, block.coupling.value_of, block.dtype)
    heads = einops.rearrange(heads, "... hv q v -> ... q hv v").astype(call.key.value.dtype)
    captured = dict(logits=raw, mixed_logits=mixed, weights=weights, mixed_weights=seen)
    return heads, {name: captured[name] for name in call.capture if name in captured}


ENGINE = Engine(
    "dense", run, symbolic=("b", "q", "k"), about="whole score tensors; returns logits and weights"
)
