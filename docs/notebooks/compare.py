# %% [markdown]
# # Compare two variants honestly
#
# Does a mix over heads help? This notebook trains small models on a small task, and asks before it answers:
#
# - the **same** data, steps and shared initial values for both, so that a difference is the variant's;
# - **each** variant at its own best learning rate, from the same list: a rate that was tuned for one favours it;
# - **several seeds**, and an interval for the difference between runs of equal seed;
# - two **controls**: one where the answer is known to be "yes", to see that the procedure can find something, and one
#   where it is "no".
#
# If the interval contains zero, the answer is *cannot tell*. It is not "equal".

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import jaxattn as ja
import variants

SYMBOLS, PAIRS, MODEL, HEADS, LAYERS = 12, 5, 32, 4, 2
STEPS, BATCH = 150, 32
SEEDS = jnp.arange(5)
RATES = (0.003, 0.01, 0.03)

# %% [markdown]
# ## The task: recall
#
# A row is a list of pairs, a letter and a digit, then one of the letters again; the model must give its digit.

# %%


def draw(rng, count: int):
    """Tokens [count, 2 * PAIRS + 1], and the digit that must come next [count]."""
    letters, digits, asked = jax.random.split(rng, 3)
    order = jnp.argsort(jax.random.uniform(letters, (count, SYMBOLS)))[:, :PAIRS]
    values = jax.random.randint(digits, (count, PAIRS), 0, SYMBOLS)
    which = jax.random.randint(asked, (count, 1), 0, PAIRS)
    pairs = jnp.stack([order, SYMBOLS + values], axis=-1).reshape(count, -1)
    tokens = jnp.concatenate([pairs, jnp.take_along_axis(order, which, axis=1)], axis=1)
    return tokens, jnp.take_along_axis(values, which, axis=1)[:, 0]


print(draw(jax.random.key(0), 2)[0])

# %% [markdown]
# ## A model, trained for all seeds at once
#
# Leaves that two variants share are drawn from the same key: at one seed both start from the same values.


# %%
def model(attn: ja.Attention, scale: float = 1.0):
    """Initial parameters, and the logits of the next digit."""

    def init(rng):
        embed, out, *layers = jax.random.split(rng, 2 + LAYERS)
        return {
            "embed": jax.random.normal(embed, (2 * SYMBOLS, MODEL)),
            "layers": [attn.init(layer) for layer in layers],
            "out": jax.random.normal(out, (MODEL, SYMBOLS)) / MODEL**0.5,
        }

    def logits(params, tokens):
        x = params["embed"][tokens]
        for layer in params["layers"]:
            y, _ = attn.apply(layer, x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)), mask=ja.causal())
            x = x + scale * y
        return x[:, -1] @ params["out"]

    return init, logits


def train(attn: ja.Attention, scale: float = 1.0) -> np.ndarray:
    """Validation loss in nats, [rate, seed]: one compiled program for all of them."""
    init, logits = model(attn, scale)
    held_out = draw(jax.random.key(999), 512)

    def loss(params, batch):
        tokens, digit = batch
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens), digit).mean()

    def run(rate, seed):
        rng = jax.random.key(seed)
        params = init(jax.random.fold_in(rng, 0))
        adam = optax.scale_by_adam()

        def step(carry, number):
            params, state = carry
            batch = draw(jax.random.fold_in(rng, 1 + number), BATCH)
            updates, state = adam.update(jax.grad(loss)(params, batch), state)
            return (jax.tree.map(lambda p, u: p - rate * u, params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, adam.init(params)), jnp.arange(STEPS))
        return loss(params, held_out)

    sweep = jax.vmap(jax.vmap(run, (None, 0)), (0, None))
    return np.asarray(jax.jit(sweep)(jnp.array(RATES), SEEDS))


# %%
rotary = ja.HeadSpec(model=MODEL, heads=HEADS, rotary=ja.Rotary())
unordered = ja.HeadSpec(model=MODEL, heads=HEADS)
results = {
    "mha": train(ja.attention(rotary, variants.mha())),
    "talking_heads": train(ja.attention(rotary, variants.talking_heads())),
    "mha without positions": train(ja.attention(unordered, variants.mha())),
    "mha, sublayer times 0.5": train(ja.attention(rotary, variants.mha()), scale=0.5),
}
print(f"{'mean loss over seeds at rate':28}", *(f"{rate:>7}" for rate in RATES))
for name, losses in results.items():
    print(f"{name:28}", *(f"{loss:7.3f}" for loss in losses.mean(1)))

# %% [markdown]
# ## The answer
#
# Each variant at its best rate; the mean of the differences at equal seeds, and its 95 % interval (Student's t). Choosing the
# best of three rates flatters all contestants alike.

# %%
T_95 = 2.776  # two-sided, 4 degrees of freedom: five seeds
assert len(SEEDS) == 5


def best(losses: np.ndarray) -> np.ndarray:
    """The losses of all seeds at the rate with the lowest mean."""
    return losses[losses.mean(1).argmin()]


def verdict(name: str, base: str = "mha") -> tuple[float, float, str]:
    """Mean difference to the base, half its interval, and what may be said."""
    difference = best(results[name]) - best(results[base])
    half = T_95 * difference.std(ddof=1) / len(difference) ** 0.5
    mean = difference.mean()
    words = "cannot tell" if abs(mean) <= half else "better" if mean < 0 else "worse"
    return float(mean), float(half), words


verdicts = {name: verdict(name) for name in results if name != "mha"}
for name, (mean, half, words) in verdicts.items():
    print(f"{name:24} {mean:+.3f} +- {half:.3f} nats against mha: {words}")

# %%


def intervals() -> Figure:
    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    part = figure.subplots()
    for row, (mean, half, _) in enumerate(verdicts.values()):
        part.errorbar(mean, row, xerr=half, fmt="o", capsize=4, color="#3f51b5")
    part.axvline(0, color="#20242c", lw=0.8)
    part.set_yticks(range(len(verdicts)), [f"{name}: {v[2]}" for name, v in verdicts.items()])
    part.set(xlabel="nats against mha, 95 % interval", ylim=(len(verdicts) - 0.5, -0.5))
    return figure


intervals()

# %% [markdown]
# ## What was learnt, and what not
#
# - The control without positions must come out as *worse*: a model that does not know which digit follows which letter cannot
#   solve the task. If the procedure did not see that, its other answers would mean nothing.
# - The other control changes no mechanism at all, only the size of the sublayer's output at the start. If it comes out as
#   a difference, then a variant's difference of the same size says nothing about its mechanism: match the scale at
#   the start first.
# - Five seeds, 150 steps, one task and two layers. A *cannot tell* here may become a *better* with more seeds, and a *better*
#   may not hold in a larger model.
#
# `python experiments/compare.py` does this for all variants on a text, with their cost beside the loss.

# %%
assert verdicts["mha without positions"][2] == "worse"
