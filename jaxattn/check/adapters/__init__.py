"""What is known by name: attentions of given heads, sublayers, decoders, memories, conversions."""

from collections.abc import Callable

import jax
import numpy as np
from jax import Array

from jaxattn.check.adapters.conversion import CONVERSIONS
from jaxattn.check.adapters.decoder import DECODERS, MEMORIES
from jaxattn.check.adapters.layer import LAYERS, from_torch, torch_tensor
from jaxattn.check.adapters.mixer import MIXERS
from jaxattn.check.adapters.rotation import ROTATIONS
from jaxattn.check.subjects.attention import FEATURES, Call, Checked, Subject, of_function
from jaxattn.check.subjects.layer import heads_of


def jax_nn() -> Subject:
    """`jax.nn.dot_product_attention`; it documents values as wide as keys."""
    supports = tuple(f for f in FEATURES if f not in ("d_v", "dropout"))
    subject = of_function(jax.nn.dot_product_attention, supports=supports)
    return subject._replace(name="jax.nn", version=f"jax {jax.__version__}")


def torch_sdpa() -> Subject:
    """`torch.nn.functional.scaled_dot_product_attention`, by values alone: JAX cannot trace it."""
    import torch  # pyright: ignore[reportMissingImports]  (only where installed)

    def attend(call: Call) -> Array:
        heads, k = call.query.shape[2], call.key.shape[1]
        query, key, value = (torch_tensor(x).transpose(1, 2) for x in call[:3])
        shape = (len(call.query), heads, call.query.shape[1], k)
        mask = None if call.mask is None else torch_tensor(np.broadcast_to(np.asarray(call.mask), shape))
        if call.bias is not None:
            mask = torch_tensor(call.bias)
        rate, dropout_key = call.dropout or (0.0, None)
        rate = 0.0 if dropout_key is None else rate  # a function has no mode, so its caller decides
        if dropout_key is not None:
            torch.manual_seed(int(jax.random.bits(dropout_key)))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=rate, is_causal=call.causal,
            enable_gqa=key.shape[1] != heads,
        )  # fmt: skip
        return from_torch(out.transpose(1, 2))

    supports = frozenset(FEATURES) - {"tracing"}
    return Subject("torch.sdpa", attend, supports, version=f"torch {torch.__version__}")


def _heads(name: str) -> Callable[[], Subject]:
    """The attention inside a known sublayer."""
    return lambda: heads_of(LAYERS[name]())


SUBJECTS: dict[str, tuple[Callable[[], Checked], ...]] = {
    "jaxattn": (
        _heads("jaxattn"), LAYERS["jaxattn"], LAYERS["jaxattn.linen"], LAYERS["jaxattn.attention"],
        DECODERS["jaxattn"], DECODERS["jaxattn.nnx"], MEMORIES["jaxattn"], *CONVERSIONS.values(),
        MIXERS["jaxattn.blocked"], ROTATIONS["jaxattn"],
    ),
    "jax.nn": (jax_nn,),
    "flax.nnx": (_heads("flax.nnx"), LAYERS["flax.nnx"], DECODERS["flax.nnx"]),
    "flax.linen": (_heads("flax.linen"), LAYERS["flax.linen"], DECODERS["flax.linen"]),
    "equinox": (_heads("equinox"), LAYERS["equinox"], ROTATIONS["equinox"]),
    "torch.sdpa": (torch_sdpa,),
    "torch.mha": (_heads("torch.mha"), LAYERS["torch.mha"]),
}  # fmt: skip
"""By the name of the command line: every kind of subject that a library has."""
