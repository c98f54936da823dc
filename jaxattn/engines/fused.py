"""fused: plain attention handed to a kernel that exists: cuDNN, on a CUDA GPU.

It is reached by `jax.nn.dot_product_attention`. No such kernel lets heads see each other, so a program with
a mix is refused, by name.
"""

from typing import Literal

import einops
import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.engines.call import Call, Engine
from jaxattn.engines.layout import flat_batch

TYPES = (jnp.float16, jnp.bfloat16)
WIDTH = 128  # of a head, at most, in whole eights
CAPTURES = ("heads",)


def refuses(call: Call) -> str | None:
    """Why cuDNN cannot run this call, or None."""
    if jax.default_backend() != "gpu":
        return f"it needs a CUDA GPU, and the default backend is {jax.default_backend()}"
    return unfit(call)


def unfit(call: Call) -> str | None:
    """What of the call no fused kernel can express, or None."""
    c, query, key = call.coupling, call.query, call.key
    width = query.query.shape[-1]
    if call.mixes:
        return "heads are mixed, and it works on one head at a time"
    if call.biases:
        return "it has no biases by head or key"
    if c.softcap is not None:
        return "it has no soft cap"
    if call.dropout_key is not None and c.dropout > 0:
        return "its dropout would draw other weights than the other engines"
    if c.key_of is not None or c.value_of is not None or key.key.shape[-2] != key.value.shape[-2]:
        return "heads must share keys and values in blocks"
    if key.value.shape[-1] != width or width % 8 or width > WIDTH:
        return f"head widths must be equal, at most {WIDTH} and in whole eights (d = {width})"
    if query.query.dtype not in TYPES or not query.query.dtype == key.key.dtype == key.value.dtype:
        return f"states must be float16 or bfloat16 ({query.query.dtype})"
    return None


def run(call: Call) -> tuple[Array, dict[str, Array]]:
    """Heads, by cuDNN."""
    return heads_by(call, "cudnn"), {}


def heads_by(call: Call, implementation: Literal["cudnn", "xla"]) -> Array:
    """Heads [..., q, hv, v] by one of JAX's implementations; rows without a key are zero."""
    batch, frame = call.frame.batch, call.frame
    flat = lambda x, core: flat_batch(x, core, batch)
    visible = call.mask.block(frame, 0, frame.q_len, 0, frame.k_len)
    visible = jnp.broadcast_to(visible, (*visible.shape[:-2], frame.q_len, frame.k_len))
    bias = None if call.bias is None else flat(call.bias, 3)
    query, key, value = (flat(x, 3) for x in (call.query.query, call.key.key, call.key.value))
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=flat(visible, 3),
        scale=call.coupling.scale,
        implementation=implementation,
    )
    out = out.reshape(*batch, *out.shape[1:])
    seen = einops.rearrange(visible.any(-1), "... h q -> ... q h 1")
    return jnp.where(seen, out, jnp.zeros((), out.dtype))


ENGINE = Engine("fused", run, CAPTURES, refuses=refuses, about="cuDNN, for plain attention on a CUDA GPU")
