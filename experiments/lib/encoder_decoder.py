"""A small encoder-decoder with the three call sites: encoder self, causal decoder self, cross.

    memory = encode(embed(source), valid)        rows of the source; padding is seen by nobody
    logits = decode(embed(target), sides)        teacher forced: row t sees rows up to t and the memory
    tokens = greedy(model, source, valid, ...)   self caches grow; a cross memory is projected once a layer

`decode` and `step` read the memory through its key sides alone, one a layer, so whoever owns their life
(`ja.CrossMemory`) decides what they see.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
        return tuple(layer.cross.attn.key_side(layer.cross.params(), memory, valid) for layer in self.decoder)

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


@functools.partial(jax.jit, static_argnums=0)
def _step(graph: Any, params: Any, token: Array, caches: Any, sides: Sides) -> tuple[Array, Any]:
    return nnx.merge(graph, params).step(token, caches, sides)


class Memories(NamedTuple):
    """The cross memories of a request, one a layer, and the identity that a reader must name."""

    each: tuple[ja.CrossMemory, ...]
    expected: tuple[ja.Identity, ...]

    def read(self) -> Sides:
        """Their key sides, where every one is still what the request expects."""
        return tuple(memory.read(now) for memory, now in zip(self.each, self.expected, strict=True))

    def release(self) -> None:
        for memory in self.each:
            memory.release(consumers=0)


def attach(model: EncoderDecoder, memory: Array, valid: Array, request: str, version: int = 0) -> Memories:
    """Project a memory [b, k, m] once for every decoder layer, and publish it for the request."""
    made, known = [], []
    for number, layer in enumerate(model.decoder):
        attn, params = layer.cross.attn, layer.cross.params()
        named = ja.Identity(
            request=request, source_release="first", checkpoint="in memory", layer=f"decoder/{number}",
            projection_version=version, adapter="none", position_policy="of the encoder", memory_id=request,
        )  # fmt: skip
        own = ja.CrossMemory(attn)
        own.bind(memory, named, valid)
        own.project(params, projection_version=version)
        expected = ja.expected_identity(attn, params, memory, named)
        own.attach(expected)
        made.append(own)
        known.append(expected)
    return Memories(tuple(made), tuple(known))


def greedy(model: EncoderDecoder, source: Array, valid: Array, *, start: int, steps: int) -> Array:
    """The likeliest next symbol, again and again: [b, steps] for source tokens [b, k]."""
    memories = attach(model, model.encode(model.embed(source), valid), valid, "greedy")
    graph, params = nnx.split(model)
    token, caches, out = jnp.full(len(source), start), model.caches(len(source)), []
    for _ in range(steps):
        logits, caches = _step(graph, params, token, caches, memories.read())
        token = logits.argmax(-1)
        out.append(token)
    memories.release()
    return jnp.stack(out, axis=1)


def beam(
    model: EncoderDecoder,
    source: Array,
    valid: Array,
    *,
    start: int,
    steps: int,
    beams: int,
    expand: bool = False,
) -> tuple[Array, Array]:
    """The likeliest sequences among `beams` hypotheses of each source, best first.

    Args:
        model, source, valid, start, steps: as in `greedy`.
        beams: hypotheses kept.
        expand: store each layer's memory once a beam, where they share it otherwise.

    Returns:
        tokens [b, beams, steps] and their log-probabilities [b, beams].
    """
    memories = attach(model, model.encode(model.embed(source), valid), valid, "beam")
    for memory in memories.each:
        (memory.expand if expand else memory.share)(beams)
    graph, params = nnx.split(model)
    batch = len(source)
    token, caches = jnp.full(batch * beams, start), model.caches(batch * beams)
    total = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf) * jnp.ones((batch, 1))
    tokens = jnp.zeros((batch, beams, 0), int)
    for _ in range(steps):
        logits, caches = _step(graph, params, token, caches, memories.read())
        more = jax.nn.log_softmax(logits).reshape(batch, beams, -1)
        total, best = jax.lax.top_k((total[..., None] + more).reshape(batch, -1), beams)
        parent, symbol = jnp.divmod(best, more.shape[-1])
        tokens = jnp.take_along_axis(tokens, parent[..., None], axis=1)
        tokens = jnp.concatenate([tokens, symbol[..., None]], axis=-1)
        index = (jnp.arange(batch)[:, None] * beams + parent).reshape(-1)
        caches = tuple(cache.reorder(index) for cache in caches)
        token = symbol.reshape(-1)
        for memory in memories.each:  # hypotheses move within their source: nothing of it does
            memory.reorder(np.asarray(index))
    memories.release()
    return tokens, total
