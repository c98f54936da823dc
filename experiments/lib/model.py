"""A small decoder-only transformer over `ja.MultiHeadAttention`, one transform a layer.

    x = embed(tokens)  [+ learned positions]
    x = x + attention(norm(x));  x = x + down(gelu(up(norm(x))))        for each layer
    logits = norm(x) @ embed^T

`create` takes it apart into pure functions over a flat dict of parameters ("block_0/up/kernel"),
which is what training, checkpoints and the comparison of variants read.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxattn as ja
from experiments.lib import batches

Params = dict[str, jax.Array]


class Shape(NamedTuple):
    """Sizes of a model; what each means is told by the options of the same names."""

    symbols: int
    layers: int
    width: int
    heads: int
    context: int
    positions: Literal["rotary", "learned"]
    norm: Literal["rms", "layer"]
    init_sd: float | None


class Block(nnx.Module):
    def __init__(self, shape: Shape, transform: ja.HeadTransform, at: Callable[[str], nnx.Rngs]):
        norm = nnx.RMSNorm if shape.norm == "rms" else partial(nnx.LayerNorm, use_bias=False)
        width = shape.width
        self.attention_norm = norm(width, rngs=at("attention_norm"))
        self.attention = ja.MultiHeadAttention(
            num_heads=shape.heads,
            in_features=width,
            variant=transform,
            use_bias=False,
            # adjacent pairs stay whole in a slice of channels that starts and ends at an even one
            rotary=ja.Rotary(pairs="adjacent") if shape.positions == "rotary" else None,
            rngs=at("attention"),
        )
        self.mlp_norm = norm(width, rngs=at("mlp_norm"))
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=at("up"))
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=at("down"))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ja.Aux]:
        y, aux = self.attention(self.attention_norm(x), mask=ja.causal(), return_aux=True)
        x = x + y
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x)))), aux


class LanguageModel(nnx.Module):
    """Logits of the next symbol, and the auxiliary results of each layer."""

    def __init__(self, shape: Shape, transforms: list[ja.HeadTransform], rng: jax.Array):
        def at(*names: str) -> nnx.Rngs:
            # by name, not in turn: the shared weights of two variants start equal
            return nnx.Rngs(params=jax.random.fold_in(rng, crc32("/".join(names).encode())))

        embed_init = nnx.initializers.normal(1 / math.sqrt(shape.width))
        self.embed = nnx.Embed(shape.symbols, shape.width, embedding_init=embed_init, rngs=at("embed"))
        if shape.positions == "learned":
            self.positions = nnx.Embed(
                shape.context, shape.width, embedding_init=embed_init, rngs=at("positions")
            )
        self.layers = shape.layers
        for i, transform in enumerate(transforms):
            setattr(self, f"block_{i}", Block(shape, transform, partial(at, f"block_{i}")))
        norm = nnx.RMSNorm if shape.norm == "rms" else partial(nnx.LayerNorm, use_bias=False)
        self.norm = norm(shape.width, rngs=at("norm"))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, list[ja.Aux]]:
        x = self.embed(tokens)
        if hasattr(self, "positions"):
            x = x + self.positions(jnp.arange(tokens.shape[-1]))
        auxes = []
        for i in range(self.layers):
            x, aux = getattr(self, f"block_{i}")(x)
            auxes.append(aux)
        return self.embed.attend(self.norm(x)), auxes


class Model(NamedTuple):
    """A model as data: its parameters and what applies them."""

    params: Params
    apply: Callable[[Params, jax.Array], tuple[jax.Array, list[ja.Aux]]]
    attention: list[ja.Attention]  # of each layer
    shape: Shape


def create(shape: Shape, transforms: list[ja.HeadTransform], rng: jax.Array) -> Model:
    module = LanguageModel(shape, transforms, rng)
    attention = [getattr(module, f"block_{i}").attention.attn for i in range(shape.layers)]
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    flat = dict(nnx.to_flat_state(state))
    names = {"/".join(map(str, path)): path for path in flat}
    params = {name: flat[path][...] for name, path in names.items()}
    if shape.init_sd is not None:
        params = redraw(params, shape.init_sd, rng)

    def apply(params: Params, tokens: jax.Array) -> tuple[jax.Array, list[ja.Aux]]:
        leaves = [(path, flat[path].replace(params[name])) for name, path in names.items()]
        return nnx.merge(graph, nnx.from_flat_state(leaves), rest)(tokens)

    return Model(params, apply, attention, shape)


def redraw(params: Params, sd: float, rng: jax.Array) -> Params:
    """Weights from N(0, sd^2); leaves of a variant keep the start that their paper gives them."""

    def draw(name: str, leaf: jax.Array) -> jax.Array:
        if "/heads/" in name or not name.endswith(("kernel", "embedding")):
            return leaf
        noise = jax.random.normal(jax.random.fold_in(rng, crc32(name.encode())), leaf.shape)
        return (sd * noise).astype(leaf.dtype)

    return {name: draw(name, leaf) for name, leaf in params.items()}


def loss_fn(model: Model) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Cross-entropy in nats a symbol, plus the balance losses, which are also reported apart.

    The balance loss is the mean over the layers that have one.
    """

    def loss(params: Params, window: jax.Array, dropout_key: jax.Array):
        del dropout_key  # under one epoch there is nothing to regularise
        logits, auxes = model.apply(params, window[..., :-1])
        nats = jnp.mean(cross_entropy(logits, window[..., 1:]))
        balances = [aux.total() for aux in auxes if aux.losses]
        if not balances:
            return nats, {"loss": nats}
        balance = sum(balances[1:], balances[0]) / len(balances)
        return nats + balance, {"loss": nats, "balance_loss": balance}

    return loss


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def make_evaluate(model: Model, batch: int) -> Callable[[Params, np.ndarray], float]:
    """Mean nats a symbol over every symbol of a text but the first, in windows side by side."""

    @jax.jit
    def sums(params: Params, windows: jax.Array, weights: jax.Array) -> jax.Array:
        def one(item: tuple[jax.Array, jax.Array]) -> jax.Array:
            window, weight = item
            logits, _ = model.apply(params, window[..., :-1])
            return jnp.sum(weight * cross_entropy(logits, window[..., 1:]))

        return jax.lax.map(one, (windows, weights))

    def evaluate(params: Params, tokens: np.ndarray) -> float:
        windows, weights = batches.whole(tokens, model.shape.context, batch)
        return float(np.sum(np.asarray(sums(params, windows, weights), np.float64)) / weights.sum())

    return evaluate


def generate(model: Model, params: Params, prompt: np.ndarray, count: int, rng: jax.Array) -> np.ndarray:
    """`count` symbols drawn one by one after `prompt`, each from the last `context` symbols.

    Without a cache: at these sizes a full pass a symbol costs milliseconds.
    """
    context = model.shape.context

    @jax.jit
    def draw(params: Params, window: jax.Array, last: jax.Array, rng: jax.Array) -> jax.Array:
        logits, _ = model.apply(params, window[None])
        return jax.random.categorical(rng, logits[0, last])

    tokens = [int(token) for token in prompt]
    for i in range(count):
        recent = tokens[-context:]
        window = np.array(recent + [0] * (context - len(recent)), np.int32)
        token = draw(params, window, np.int32(len(recent) - 1), jax.random.fold_in(rng, i))
        tokens.append(int(token))
    return np.array(tokens, np.int32)


def described(params: Mapping[str, Any]) -> dict[str, str]:
    """Type and shape of each leaf, to compare two trees.

    >>> described({"norm/scale": jnp.ones(3, jnp.bfloat16)})
    {'norm/scale': 'bfloat16[3]'}
    """
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in params.items()}


def count(params: Params) -> dict[str, Any]:
    """Parameters of the whole model and of its attention."""
    sizes = {name: leaf.size for name, leaf in params.items()}
    return {
        "model": sum(sizes.values()),
        "attention": sum(size for name, size in sizes.items() if "/attention/" in name),
    }
