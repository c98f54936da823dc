# %% [markdown]
# # Find the bug in somebody's attention
#
# A colleague's multi-head attention trains, but worse than it should. It has the right shapes everywhere.
# Three steps: ask which laws it breaks, find the first stage that is wrong, mend, and ask again.

# %%
import jax
import jax.numpy as jnp
from einops import rearrange

from jaxattn import check


def split(x, heads):  # [b, t, (h d)] -> [b, h, t, d]
    batch, rows, width = x.shape
    return x.reshape(batch, heads, rows, width // heads)


def scores(query, key):
    return query @ key.swapaxes(-1, -2) / jnp.sqrt(query.shape[-1])


def weights(scores, mask):
    return jax.nn.softmax(jnp.where(mask, scores, -1e4), axis=-1)


def theirs(query, key, value, *, mask=None):
    """Heads [b, t, h, d] come in packed, as their projections make them."""
    heads = query.shape[2]
    query, key, value = (split(rearrange(x, "b t h d -> b t (h d)"), heads) for x in (query, key, value))
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    made = weights(scores(query, key), mask) @ value
    batch, _, rows, _ = made.shape
    return rearrange(made.reshape(batch, rows, -1), "b t (h d) -> b t h d", h=heads)


x = jax.random.normal(jax.random.key(0), (1, 5, 2, 3))
print(theirs(x, x, x).shape)  # as it should be

# %% [markdown]
# ## 1. Which laws are broken?
#
# A handful of laws first; leave `laws=` out for all of them. `supports` says what the function can do:
# keys of another length, and a mask.

# %%
LAWS = [
    "output-shape",
    "heads-in-order",
    "softmax-over-keys",
    "mask-polarity",
    "scale",
    "values",
    "empty-row-value",
]
report = check.run(theirs, laws=LAWS, supports=("cross", "mask"))
print(report)
assert {"heads-in-order", "values", "empty-row-value"} <= {ruled.law for ruled in report.broken}

# %% [markdown]
# `heads-in-order` is broken: with equal scores, a head should return the mean of its own values, and it
# returns a mean of something else. If heads are not where they should be, then the laws about masks,
# scale and values must fail as well: one fault, four broken laws. `empty-row-value` breaks at sizes of
# one head and one row, where no order can be wrong, so it is another fault: a row without a visible key
# returns the mean of all values, since every score is then -1e4.
#
# ## 2. Where does it go wrong?
#
# `trace_of` takes the pieces and holds each to its own formula, given what the piece before it really
# made. So a wrong piece is marked, and the right ones after it are not.

# %%
states = jax.random.normal(jax.random.key(1), (5, 6))
pieces = check.Stages(
    split=lambda packed, heads: split(jnp.asarray(packed)[None], heads)[0],
    scores=scores,
    weights=weights,
    layout="... h t d",
)
found = check.trace_of(pieces, states, heads=2)
print(f"first divergence: {found.first}")
print(str(found).split("FIRST DIVERGENCE")[1].splitlines()[0])
assert found.first == "head round trip"

# %% [markdown]
# It is `split`: `reshape` to [b, h, t, d] does not move the head axis. It cuts the rows into chunks of
# time and calls them heads. The merge makes the same mistake backwards, so shapes agree and a round trip
# gives back what came in.
#
# ## 3. Mend it, and ask again


# %%
def mended(query, key, value, *, mask=None):
    query, key, value = (rearrange(x, "b t h d -> b h t d") for x in (query, key, value))
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    return rearrange(weights(scores(query, key), mask) @ value, "b h t d -> b t h d")


report = check.run(mended, laws=LAWS, supports=("cross", "mask"))
print(report)
assert {ruled.law for ruled in report.broken} == {"empty-row-value"}

# %% [markdown]
# One is left. A finite fill has no right value: large scores beat -1e4, in half precision -1e9 is
# infinite, and a row without a visible key becomes the mean of what it must not see. Hide by selection,
# before and after the exponential:


# %%
def weights(scores, mask):
    hidden = jnp.where(mask, scores, -jnp.inf)
    largest = jnp.max(hidden, axis=-1, keepdims=True, initial=jnp.finfo(scores.dtype).min)
    raised = jnp.where(mask, jnp.exp(jnp.where(mask, scores - largest, 0)), 0)
    total = raised.sum(-1, keepdims=True)
    return raised / jnp.where(total == 0, 1, total)


report = check.run(mended, laws=LAWS, supports=("cross", "mask"))
print(report)
assert report.passed

# %% [markdown]
# ## 4. Keep it right
#
# In a test file, one line makes each law a test:
#
#     test_mended = check.law_tests(mended)
#
# and from a shell `python -m jaxattn.check my.module:mended` answers with an exit status. [All
# laws](../laws.md) lists what is asked; [Other libraries under the laws](../peers.md) shows that such
# mistakes happen to everyone.
