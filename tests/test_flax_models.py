"""Ours in the place of Flax's own layer in a model written as Flax's example lm1b is: the same numbers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxattn import linen

B, L, M, H, VOCAB = 2, 6, 12, 3, 17
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (B, L))
TOKENS[1, 4:] = 0  # padding
named = nn.with_logical_partitioning
KERNEL, BIAS = nn.initializers.xavier_uniform(), nn.initializers.normal(1e-6)


@dataclasses.dataclass(frozen=True)
class Config:
    attention: Any
    decode: bool = False
    names: tuple[str, ...] = ("embed", "kv")  # of every kernel of the attention, as lm1b writes them


class Block(nn.Module):
    """A decoder block of lm1b."""

    config: Config

    @nn.compact
    def __call__(self, x, mask=None):
        y = nn.LayerNorm(dtype=jnp.float32)(x)
        y = self.config.attention(
            num_heads=H, qkv_features=M, dtype=jnp.float32, use_bias=False, broadcast_dropout=False,
            kernel_init=named(KERNEL, self.config.names), bias_init=named(BIAS, ("embed",)),
            dropout_rate=0.1, deterministic=True, decode=self.config.decode,
        )(y, mask=mask)  # fmt: skip
        x = x + y
        y = nn.LayerNorm(dtype=jnp.float32)(x)
        y = nn.Dense(2 * M, kernel_init=named(KERNEL, ("embed", "mlp")))(y)
        return x + nn.Dense(M, kernel_init=named(KERNEL, ("mlp", "embed")))(nn.relu(y))


class Model(nn.Module):
    """Tokens to logits, in one pass or, with `decode`, token by token."""

    config: Config

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, M, embedding_init=named(nn.initializers.normal(1.0), ("vocab", "embed")))
        mask = None
        if not self.config.decode:
            real = nn.make_attention_mask(tokens > 0, tokens > 0, dtype=jnp.float32)
            mask = nn.combine_masks(real, nn.make_causal_mask(tokens, dtype=jnp.float32))
        x = embed(tokens)
        for at in range(2):
            x = Block(self.config, name=f"block_{at}")(x, mask)
        return embed.attend(nn.LayerNorm()(x))


THEIRS, OURS = (
    Config(nn.MultiHeadDotProductAttention),
    Config(linen.MultiHeadDotProductAttention),
)


def variables_of(config, tokens=TOKENS):
    if config.attention is nn.MultiHeadDotProductAttention:
        return Model(config).init(jax.random.key(0), tokens)
    with pytest.warns(UserWarning, match="fewer names than axes") as told:
        made = Model(config).init(jax.random.key(0), tokens)
    assert len({str(one.message) for one in told}) == 1
    message = str(told[0].message)
    for part in (
        "query/kernel, key/kernel, value/kernel [m, h, d]: 'embed' names m, 'kv' names h",
        "out/kernel [h, v, m]: 'embed' names h, 'kv' names v",
        "out_kernel_init",
    ):
        assert part in message
    return made


def test_lm1b_draws_trains_and_partitions_as_with_flax_s_layer():
    want, got = variables_of(THEIRS), variables_of(OURS)
    assert jax.tree.structure(got) == jax.tree.structure(want)  # boxes and their names included
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert nn.get_partition_spec(got) == nn.get_partition_spec(want)

    def loss(config, params):
        logits = Model(config).apply(params, TOKENS)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), TOKENS[:, 1:, None], axis=-1)
        return -(picked[..., 0] * (TOKENS[:, 1:] > 0)).sum()

    params, real = nn.unbox(want), TOKENS > 0  # a padded row sees no key: ours is b_O, Flax's a mean
    run = lambda config: np.asarray(Model(config).apply(params, TOKENS))[real]
    np.testing.assert_array_equal(run(OURS), run(THEIRS))
    both = lambda config: jax.jit(jax.value_and_grad(lambda p: loss(config, p)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), both(OURS), both(THEIRS))


def test_lm1b_decodes_token_by_token_as_with_flax_s_layer():
    logits = {}
    for config in (THEIRS, OURS):
        config = dataclasses.replace(config, decode=True)
        variables = variables_of(config, np.ones((B, L), int))
        step = jax.jit(functools.partial(Model(config).apply, mutable=["cache"]))
        logits[config.attention] = []
        for t in range(L):
            y, changed = step(variables, TOKENS[:, t : t + 1])
            variables = {**variables, **changed}
            logits[config.attention].append(y)
    for got, want in zip(logits[OURS.attention], logits[THEIRS.attention], strict=True):
        np.testing.assert_array_equal(got, want)


def test_more_names_than_axes_are_refused_and_names_in_full_do_not_warn():
    four = Model(dataclasses.replace(OURS, names=("a", "b", "c", "d")))
    with pytest.raises(ValueError, match=r"query/kernel: .*\('a', 'b', 'c', 'd'\).*\[m, h, d\]"):
        four.init(jax.random.key(0), TOKENS)
    Model(dataclasses.replace(OURS, names=("embed", "heads", "kv"))).init(jax.random.key(0), TOKENS)
