"""The identity of a projected source: everything that its key side may depend on."""

import hashlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxattn.attention import Attention
from jaxattn.sides import KeySide

PyTree = Any
Source = Array | tuple[Array, Array]


class Identity(NamedTuple):
    """Everything that one projected pair may depend on. None is "not known", and equals only itself.

    Attributes:
        request, source_release: whose source, and which immutable release of it.
        memory_id: of the encoder memory; `content_digest` makes one from its bytes.
        checkpoint, layer: of the model.
        projection_version: of the parameters; it changes with each optimizer step.
        adapter: the active one; name the absence of one too ("none"), for None is not known.
        position_policy: how positions of the source are counted.
        shard: of a tensor-parallel split.
        attention: transforms in order, with their options. This field and those below are filled in from the
            attention and its arrays, whatever the caller gives.
        spec: the `HeadSpec`, with every option that is not the default.
        rotary: the rotary positions of the keys.
        key_heads, value_heads, qk_width, value_width, source_len: as stored.
        dtype, device, layout: of the stored pair; a traced one has neither device nor layout.
        mode: "training-ephemeral" or "inference-reusable".
    """

    request: Hashable = None
    source_release: Hashable = None
    memory_id: Hashable = None
    checkpoint: Hashable = None
    layer: Hashable = None
    projection_version: Hashable = None
    adapter: Hashable = None
    position_policy: Hashable = None
    shard: Hashable = None
    attention: str | None = None
    spec: str | None = None
    rotary: str | None = None
    key_heads: int | None = None
    value_heads: int | None = None
    qk_width: int | None = None
    value_width: int | None = None
    source_len: int | None = None
    dtype: str | None = None
    device: str | None = None
    layout: str | None = None
    mode: str | None = None

    def differences(self, other: "Identity") -> dict[str, tuple[Any, Any]]:
        """What differs, by field: (of this one, of the other)."""
        pairs = zip(self._fields, self, other, strict=True)
        return {name: (a, b) for name, a, b in pairs if a != b}


def expected_identity(
    attn: Attention, params: PyTree, source: Source, named: Identity, *, training: bool = False
) -> Identity:
    """The identity that a projection of `source` by `params` would have; nothing is projected.

    Args:
        attn, params, source: as in `Attention.key_side`.
        named: what the caller knows, the fields from request to shard. The other fields are replaced.
        training: whether the pair is for one training step (`CrossMemory.project`).

    Raises:
        ValueError, TypeError: as `Attention.key_side` does, where params are not those of this attention too.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> attn = attention(HeadSpec(model=6, heads=2))
        >>> params = attn.init(jax.random.key(0))
        >>> found = expected_identity(attn, params, jnp.ones((1, 7, 6)), Identity(request="r1"))
        >>> found.request, found.source_len, found.key_heads, found.qk_width
        ('r1', 7, 2, 3)
    """
    side = jax.eval_shape(attn.key_side, params, source)
    device = device_of(*jax.tree.leaves((params["key"], params["value"], jax.tree.map(jnp.asarray, source))))
    return derived(named, attn, side, device, device and "row-major", training)


def content_digest(*arrays: Any) -> str:
    """A memory id from shapes, types and bytes. It waits for the device and copies every array to the host.

    >>> content_digest(jnp.zeros(3)) == content_digest(jnp.zeros(4))
    False
    """
    found = hashlib.sha256()
    for x in jax.tree.leaves(arrays):
        if isinstance(x, Tracer):
            raise TypeError("content_digest: a traced array has no bytes. Fix: outside of jit, or a name.")
        found.update(f"{x.shape}{x.dtype}".encode() + np.asarray(x).tobytes())
    return found.hexdigest()


def derived(named: Identity, attn, side: KeySide, device, layout, training: bool) -> Identity:
    """The identity with every field that the attention and the arrays decide."""
    return named._replace(
        attention=attn.variant,
        spec=repr(attn.spec),
        rotary=repr(attn.sizes.rotary_k),
        key_heads=side.key.shape[-2],
        value_heads=side.value.shape[-2],
        qk_width=side.key.shape[-1],
        value_width=side.value.shape[-1],
        source_len=side.key.shape[-3],
        dtype=" and ".join(dict.fromkeys(str(x.dtype) for x in (side.key, side.value))),
        device=device,
        layout=layout,
        mode="training-ephemeral" if training else "inference-reusable",
    )


def device_of(*arrays: Any) -> str | None:
    """The devices that hold these arrays, or what is computed from them."""
    found = [x for x in arrays if isinstance(x, jax.Array)]
    if any(isinstance(x, Tracer) for x in found):
        return None
    found = [x for x in found if x.committed] or found
    return " ".join(sorted({str(device) for x in found for device in x.devices()})) or None


def layout_of(*arrays: Any) -> str | None:
    if any(isinstance(x, Tracer) or x.format.layout is None for x in arrays):
        return None
    orders = [tuple(x.format.layout.major_to_minor) for x in arrays]
    plain = all(order == tuple(range(x.ndim)) for order, x in zip(orders, arrays, strict=True))
    return "row-major" if plain else repr(orders)
