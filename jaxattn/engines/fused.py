"""fused: plain attention handed to a kernel that exists: cuDNN on a CUDA GPU, splash attention on a TPU.

They come with JAX (`jax.nn.dot_product_attention`, `jax.experimental.pallas.ops.tpu.splash_attention`);
what they cannot run goes to tokamax where that is installed. No such kernel lets heads see each other, so a
program with a mix is refused, by name.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.engines.call import Call, Engine
from jaxattn.engines.layout import flat_batch, has_data
from jaxattn.mask_rules import Band

HALF = (jnp.float16, jnp.bfloat16)
WIDTH = 128  # of a head, at most, in whole eights, for cuDNN
BLOCKS = (512, 256, 128)  # rows or keys of a splash block; one of them must divide
CAPTURES = ("heads",)


class Kernel(NamedTuple):
    """Why it cannot run a call, or None, and how it does."""

    unfit: Callable[[Call], str | None]
    heads: Callable[[Call], Array]


def refuses(call: Call) -> str | None:
    """Why no kernel of this platform can run the call, or None."""
    backend = jax.default_backend()
    if backend not in KERNELS:
        return f"it needs a CUDA GPU or a TPU, and the default backend is {backend}"
    reasons = dict.fromkeys(kernel.unfit(call) for kernel in KERNELS[backend])
    return None if None in reasons else "; ".join(map(str, reasons))


def run(call: Call) -> tuple[Array, dict[str, Array]]:
    """Heads, by the first kernel of the platform that can."""
    return next(k for k in KERNELS[jax.default_backend()] if k.unfit(call) is None).heads(call), {}


def unfit_everywhere(call: Call) -> str | None:
    """What of the call no fused kernel can express, or None."""
    c, query, key = call.coupling, call.query, call.key
    if call.mixes:
        return "heads are mixed, and it works on one head at a time"
    if call.biases:
        return "it has no biases by head or key"
    if call.dropout_key is not None and c.dropout > 0:
        return "its dropout would draw other weights than the other engines"
    if c.key_of is not None or c.value_of is not None or key.key.shape[-2] != key.value.shape[-2]:
        return "heads must share keys and values in blocks"
    if not query.query.dtype == key.key.dtype == key.value.dtype:
        return "states must be of one type"
    return None


def unfit_cudnn(call: Call) -> str | None:
    """Why cuDNN cannot run this call, or None."""
    width, dtype = call.query.query.shape[-1], call.query.query.dtype
    if call.coupling.softcap is not None:
        return "cuDNN has no soft cap"
    if call.key.value.shape[-1] != width or width % 8 or width > WIDTH:
        return f"head widths must be equal, at most {WIDTH} and in whole eights for cuDNN (d = {width})"
    if dtype not in HALF:
        return f"states must be float16 or bfloat16 for cuDNN ({dtype})"
    return unfit_everywhere(call)


def unfit_tokamax(call: Call) -> str | None:
    """Why tokamax cannot run this call, or None."""
    return unfit_everywhere(call) if find_spec("tokamax") else "tokamax is not installed"


def unfit_splash(call: Call) -> str | None:
    """Why splash attention cannot run this call, or None."""
    frame = call.frame
    if call.bias is not None:
        return "splash attention has no additive bias"
    if has_data(call):
        return "splash attention takes masks that are known without data: causal, window and their like"
    if any(size % BLOCKS[-1] for size in (frame.q_len, frame.k_len)) or 0 in (frame.q_len, frame.k_len):
        return f"splash attention takes rows in whole {BLOCKS[-1]}s (q = {frame.q_len}, k = {frame.k_len})"
    if call.query.query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"states must be float32 or bfloat16 for splash attention ({call.query.query.dtype})"
    if not _table(call).any(-1).all():
        return "splash attention has no answer for a row without a visible key"
    return unfit_everywhere(call)


def heads_by(call: Call, attention: Callable[..., Array]) -> Array:
    """Heads [..., q, hv, v] by a function like `jax.nn.dot_product_attention`; rows without a key: zeros."""
    batch, frame = call.frame.batch, call.frame
    flat = lambda x, core: flat_batch(x, core, batch)
    bias = None if call.bias is None else flat(call.bias, 3)
    sides = (flat(x, 3) for x in (call.query.query, call.key.key, call.key.value))
    run = functools.partial(attention, *sides, bias=bias, scale=call.coupling.scale)
    whole = lambda out: out.reshape(*batch, *out.shape[1:])
    if _is_causal(call):  # every row sees itself
        return whole(run(is_causal=True))
    visible = call.mask.block(frame, 0, frame.q_len, 0, frame.k_len)
    visible = jnp.broadcast_to(visible, (*visible.shape[:-2], frame.q_len, frame.k_len))
    out = whole(run(mask=flat(visible, 3)))
    seen = einops.rearrange(visible.any(-1), "... h q -> ... q h 1")
    return jnp.where(seen, out, jnp.zeros((), out.dtype))


def heads_by_tokamax(call: Call) -> Array:
    """Heads [..., q, hv, v] by the implementation that tokamax takes for the device."""
    import tokamax  # not a dependency  # pyright: ignore[reportMissingImports]

    return heads_by(
        call, functools.partial(tokamax.dot_product_attention, logits_soft_cap=call.coupling.softcap)
    )


def heads_by_splash(call: Call, interpret: bool = False) -> Array:
    """Heads [..., q, hv, v] by splash attention; `interpret` runs the kernel's program on any device."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask  # slow to import

    batch, c = call.frame.batch, call.coupling
    flat = lambda x: einops.rearrange(flat_batch(x, 3, batch), "b t h d -> b h t d")
    query, key, value = (flat(x) for x in (call.query.query, call.key.key, call.key.value))
    rows, keys = (next(n for n in BLOCKS if size % n == 0) for size in (query.shape[-2], key.shape[-2]))
    mask = splash_attention_mask.NumpyMask(_table(call))
    with jax.ensure_compile_time_eval():  # the kernel's tables are made here and now, under jit as well
        kernel = splash.make_splash_mha(
            mask=splash_attention_mask.MultiHeadMask([mask] * query.shape[1]),
            block_sizes=splash.BlockSizes(rows, keys, keys, rows, keys, keys, rows, keys),
            attn_logits_soft_cap=c.softcap,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
    scaled = (query * c.scale).astype(query.dtype)
    heads = jax.vmap(lambda *sides: jnp.asarray(kernel(*sides)))(scaled, key, value)
    return einops.rearrange(heads.reshape(*batch, *heads.shape[1:]), "... h q v -> ... q h v")


def _is_causal(call: Call) -> bool:
    """Whether the mask is causality alone: kernels skip what they know to be hidden."""
    mask, frame = call.mask, call.frame
    plain = isinstance(mask, Band) and mask.behind is None and not mask.ahead
    return plain and not has_data(call) and frame.q_len == frame.k_len


def _table(call: Call) -> np.ndarray:
    """The mask of a call whose mask holds no data, bool [q, k]."""
    frame = call.frame
    with jax.ensure_compile_time_eval():
        seen = call.mask.block(frame, 0, frame.q_len, 0, frame.k_len)
        return np.asarray(jnp.broadcast_to(seen.reshape(seen.shape[-2:]), (frame.q_len, frame.k_len)))


_cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
_tokamax = Kernel(unfit_tokamax, heads_by_tokamax)
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "gpu": (Kernel(unfit_cudnn, lambda call: heads_by(call, _cudnn)), _tokamax),
    "tpu": (Kernel(unfit_splash, heads_by_splash), _tokamax),
}
ENGINE = Engine(
    "fused", run, CAPTURES, refuses=refuses, about="cuDNN or splash attention, for plain attention"
)
