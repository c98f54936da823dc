# %% [markdown]
# # Compare two variants honestly
#
# Does a mix over heads help? This notebook trains small models on a small task, and asks before it
# answers:
#
# - the **same** data, steps and shared initial values for both, so that a difference is the variant's;
# - **each** variant at its own best learning rate, from the same list: a rate that was tuned for one
#   favours it;
# - **several seeds**, and an interval for the difference between runs of equal seed;
# - two **controls**: one where the answer is known to be "yes", to see that the procedure can find
#   something, and one where it is "no".
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

SYMBOLS, PAIRS, MODEL, HEADS, LAYERS = 16, 6, 32, 4, 1
STEPS, BATCH = 200, 16
SEEDS = jnp.arange(5)
RATES = (0.003, 0.01, 0.03)

# %% [markdown]
# ## The task: recall
#
# Six pairs of a letter and a digit, each pair one row, then one of the letters again; the model must give
# its digit. Who guesses among all digits has a loss of log 16 = 2.77, who guesses among those seen, log 6
# = 1.79.

# %%


def draw(rng, count: int):
    """Letters and digits [count, PAIRS + 1] (the last digit is not given: 0), and the one to find [count]."""
    letters, digits, asked = jax.random.split(rng, 3)
    letter = jnp.argsort(jax.random.uniform(letters, (count, SYMBOLS)))[:, :PAIRS]
    digit = jax.random.randint(digits, (count, PAIRS), 1, SYMBOLS + 1)
    which = jax.random.randint(asked, (count, 1), 0, PAIRS)
    last = jnp.take_along_axis(letter, which, axis=1)
    given = jnp.concatenate([digit, jnp.zeros_like(last)], axis=1)
    return jnp.concatenate([letter, last], axis=1), given, jnp.take_along_axis(digit, which, axis=1)[:, 0] - 1


for name, numbers in zip(("letters", "digits", "to find"), draw(jax.random.key(0), 1), strict=True):
    print(f"{name:8}", numbers)

# %% [markdown]
# ## A model, trained for all seeds at once
#
# Leaves that two variants share are drawn from the same key: at one seed both start from the same values.


# %%
def model(attn: ja.Attention):
    """Initial parameters, and the logits of the digit."""

    def init(rng):
        letter, digit, out, *layers = jax.random.split(rng, 3 + LAYERS)
        return {
            "letter": jax.random.normal(letter, (SYMBOLS, MODEL)),
            "digit": jax.random.normal(digit, (SYMBOLS + 1, MODEL)),
            "layers": [attn.init(layer) for layer in layers],
            "out": jax.random.normal(out, (MODEL, SYMBOLS)) / MODEL**0.5,
        }

    def logits(params, letters, digits, scale):
        x = params["letter"][letters] + params["digit"][digits]
        for layer in params["layers"]:
            normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))
            x = x + scale * attn.apply(layer, normed, mask=ja.causal())[0]
        return x[:, -1] @ params["out"]

    return init, logits


def train(transform: ja.HeadTransform, scales: tuple[float, ...] = (1.0,)) -> np.ndarray:
    """Validation loss in nats, [scale, rate, seed]; `scale` multiplies what attention adds."""
    init, logits = model(ja.attention(ja.HeadSpec(model=MODEL, heads=HEADS), transform))
    held_out = draw(jax.random.key(999), 256)

    def loss(params, batch, scale):
        letters, digits, wanted = batch
        found = logits(params, letters, digits, scale)
        return optax.softmax_cross_entropy_with_integer_labels(found, wanted).mean()

    def run(scale, rate, seed):
        rng = jax.random.key(seed)
        params = init(jax.random.fold_in(rng, 0))
        adam = optax.scale_by_adam()

        def step(carry, number):
            params, state = carry
            batch = draw(jax.random.fold_in(rng, 1 + number), BATCH)
            updates, state = adam.update(jax.grad(loss)(params, batch, scale), state)
            return (jax.tree.map(lambda p, u: p - rate * u, params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, adam.init(params)), jnp.arange(STEPS))
        return loss(params, held_out, scale)

    over_seeds = jax.vmap(run, (None, None, 0))
    sweep = jax.vmap(jax.vmap(over_seeds, (None, 0, None)), (0, None, None))
    return np.asarray(jax.jit(sweep)(jnp.array(scales), jnp.array(RATES), SEEDS))


# %%
plain, halved, blind = train(variants.mha(), scales=(1.0, 0.5, 0.0))
results = {
    "mha": plain,
    "talking_heads": train(variants.talking_heads())[0],
    "mha, sublayer times 0.5": halved,
    "no attention (times 0)": blind,
}
print(f"{'mean loss over seeds at rate':30}", *(f"{rate:>7}" for rate in RATES))
for name, losses in results.items():
    print(f"{name:30}", *(f"{loss:7.3f}" for loss in losses.mean(1)))

# %% [markdown]
# ## The answer
#
# Each variant at its best rate; the mean of the differences at equal seeds, and its 95 % interval
# (Student's t). Choosing the best of three rates flatters all contestants alike.

# %%
T_95 = 2.776  # two-sided, 4 degrees of freedom: five seeds
assert len(SEEDS) == 5


def best(losses: np.ndarray) -> np.ndarray:
    """The losses of all seeds at the rate with the lowest mean."""
    return losses[losses.mean(1).argmin()]


def verdict(losses: np.ndarray, base: np.ndarray) -> tuple[float, float, str]:
    """Mean difference at equal seeds, half its interval, and what may be said."""
    difference = losses - base
    half = T_95 * difference.std(ddof=1) / len(difference) ** 0.5
    mean = difference.mean()
    words = "cannot tell" if abs(mean) <= half else "better" if mean < 0 else "worse"
    return float(mean), float(half), words


mha = results["mha"]
verdicts = {name: verdict(best(losses), best(mha)) for name, losses in results.items() if name != "mha"}
for name, (mean, half, words) in verdicts.items():
    print(f"{name:30} {mean:+.3f} +- {half:.3f} nats against mha: {words}")

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
# ## What a single rate would have said
#
# The same runs, at one rate for both, as many comparisons are made:

# %%
for rate, losses, base in zip(RATES, results["talking_heads"], mha, strict=True):
    mean, half, words = verdict(losses, base)
    print(f"rate {rate:<6} talking_heads {mean:+.3f} +- {half:.3f}: {words}")

# %% [markdown]
# ## What was learnt, and what not
#
# - The control without attention must come out as *worse*: it sees the last letter only. If
#   the procedure did not see that, its other answers would mean nothing.
# - The other control changes no mechanism at all, only the size of the sublayer's output at the start. If
#   it comes out as a difference, then a variant's difference of the same size says nothing about its
#   mechanism: match the scale at the start first.
# - At a fixed rate the answer depends on the rate. Give each its own, and print the whole table.
# - Five seeds, 200 steps, one task and one layer. A *cannot tell* here may become a *better* with more
#   seeds, and a *better* may not hold in a larger model.
#
# `python experiments/compare.py` does this for all variants on a text, with their cost beside the loss.

# %%
assert verdicts["no attention (times 0)"][2] == "worse"
