"""A small encoder-decoder with the three call sites: encoder self, causal decoder self, cross.

    memory = encode(embed(source), valid)        rows of the source; padding is seen by nobody
    logits = decode(embed(target), sides)        teacher forced: row t sees rows up to t, and all of the memory
    tokens = greedy(model, source, valid, ...)   self caches grow; a cross memory is projected once a layer

`decode` and `step` read the memory through its key sides alone, one a layer, so whoever owns their life
(`ja.CrossMemory`) decides what they see.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jaxattn as ja
import variants

Sides = tuple[ja.KeySide, ...]


class Shape(NamedTuple):
    """Sizes of a model."""

    symbols: int
    width: int = 16
    heads: int = 4
    layers: int = 2
    context: int = 32


class Layer(nnx.Module):
    """Self-attention, cross-attention where it decodes, and a small network, each added to the stream."""

    def __init__(self, shape: Shape, transform: ja.HeadTransform, decodes: bool, rngs: nnx.Rngs):
        attention = functools.partial(
            ja.MultiHeadAttention, shape.heads, shape.width, variant=transform, rngs=rngs
        )
        norm = functools.partial(nnx.RMSNorm, shape.width, rngs=rngs)
        self.own_norm, self.own = norm(), attention()
        if decodes:
            self.cross_norm, self.cross = norm(), attention()
        self.network_norm = norm()
        self.up = nnx.Linear(shape.width, 2 * shape.width, rngs=rngs)
        self.down = nnx.Linear(2 * shape.width, shape.width, rngs=rngs)

    def network(self, x: Array) -> Array:
        return x + self.down(nnx.gelu(self.up(self.network_norm(x))))


class EncoderDecoder(nnx.Module):
    """Both stacks over one table of symbols.

    Args:
        shape: sizes.
        transform: how heads are composed, in all three call sites.
    """

    def __init__(self, shape: Shape, transform: ja.HeadTransform | None = None, *, rngs: nnx.Rngs):
        transform = variants.mha() if transform is None else transform
        layer = lambda decodes: [Layer(shape, transform, decodes, rngs) for _ in range(shape.layers)]
        self.shape = nnx.static(shape)
        self.symbols = nnx.Embed(shape.symbols, shape.width, rngs=rngs)
        self.places = nnx.Embed(shape.context, shape.width, rngs=rngs)
        self.encoder, self.decoder = nnx.List(layer(False)), nnx.List(layer(True))
        self.norm = nnx.RMSNorm(shape.width, rngs=rngs)

    def embed(self, tokens: Array, first: Array | int = 0) -> Array:
        """States [b, t, m] of tokens [b, t], of which the first stands at place `first`."""
        return self.symbols(tokens) + self.places(first + jnp.arange(tokens.shape[-1]))

    def logits(self, x: Array) -> Array:
        return self.symbols.attend(self.norm(x))

    def encode(self, x: Array, valid: Array) -> Array:
        """Memory [b, k, m] of embedded source rows [b, k, m], of which `valid` are no padding."""
        for layer in self.encoder:
            x = layer.network(x + layer.own(layer.own_norm(x), mask=ja.padding(valid)))
        return x

    def sides(self, memory: Array, valid: Array) -> Sides:
        """The key side of a memory in every layer."""
        return tuple(
            layer.cross.attn.key_side(layer.cross.params(), memory, valid) for layer in self.decoder
        )

    def decode(self, x: Array, sides: Sides) -> Array:
        """Logits [b, q, symbols] of all embedded target rows [b, q, m]; row q says what follows it."""
        for layer, side in zip(self.decoder, sides, strict=True):
            x = x + layer.own(layer.own_norm(x), mask=ja.causal())
            x = layer.network(x + _cross(layer, x, side))
        return self.logits(x)

    def caches(self, batch: int) -> tuple[ja.Cache, ...]:
        """Empty self-attention caches, one a layer."""
        dtype = self.places.embedding.dtype
        return tuple(
            layer.own.attn.empty_cache(batch, self.shape.context, dtype=dtype) for layer in self.decoder
        )

    def step(self, token: Array, caches: tuple[ja.Cache, ...], sides: Sides) -> tuple[Array, Any]:
        """Logits [b, symbols] after one more token [b], and the caches with it."""
        x, after = self.embed(token[:, None], caches[0].count), []
        for layer, cache, side in zip(self.decoder, caches, sides, strict=True):
            y, _, cache = layer.own.attn.decode(layer.own.params(), cache, layer.own_norm(x))
            x = layer.network((x + y) + _cross(layer, x + y, side))
            after.append(cache)
        return self.logits(x)[:, 0], tuple(after)


def _cross(layer: Layer, x: Array, side: ja.KeySide) -> Array:
    return layer.cross.attn.attend(layer.cross.params(), layer.cross_norm(x), side)[0]
