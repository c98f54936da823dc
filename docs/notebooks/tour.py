# %% [markdown]
# # A tour of the form
#
# One attention call, its matrices on one screen, and what each variant changes in them. The names of axes
# (`hl`, `hs`, `hv`, ...) are explained with a picture in the [glossary](../glossary.md).

# %%
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jaxattn as ja
import variants

HEADS, ROWS, MODEL = 3, 8, 12
spec = ja.HeadSpec(model=MODEL, heads=HEADS)
x = 1.5 * jax.random.normal(jax.random.key(1), (ROWS, MODEL))  # [time, model]
STAGES = ("logits", "mixed_logits", "weights", "mixed_weights")


def picture(captured: dict, title: str) -> Figure:
    """A row for each head, a column for each stage; red is positive, blue negative, grey hidden."""
    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    grid = figure.subplots(HEADS, len(STAGES))
    hidden = ~np.tril(np.ones((ROWS, ROWS), bool))
    for column, name in enumerate(STAGES):
        table = np.array(captured[name], float)
        if column:
            table[:, hidden] = np.nan
        limit = np.nanmax(np.abs(table))
        for head in range(HEADS):
            grid[head, column].imshow(table[head], cmap="RdBu_r", vmin=-limit, vmax=limit)
            grid[head, column].set(xticks=(), yticks=(), facecolor="#e9ebf0")
            grid[head, 0].set_ylabel(f"head {head}")
        grid[0, column].set_title(name)
    figure.suptitle(title)
    return figure


def look(*transforms: ja.HeadTransform, seed: int = 0) -> tuple[dict, dict]:
    """Parameters of an attention, and its matrices for a causal call."""
    attn = ja.attention(spec, *transforms)
    params = attn.init(jax.random.key(seed))
    return params, attn.apply(params, x, mask=ja.causal(), capture=STAGES)[1].captured


# %% [markdown]
# ## Plain attention
#
# Each head alone: scores, the softmax over visible keys, weights that meet the values. There is no mix,
# so the second column is the first with its hidden pairs gone, and the fourth is the third.

# %%
_, plain = look(variants.mha())
assert jnp.array_equal(plain["weights"], plain["mixed_weights"])
picture(plain, "mha")

# %% [markdown]
# ## Talking-Heads: one matrix before the softmax, one after it
#
# Same projections, same scores in the first column. Every tile of the second is a sum of all tiles of the
# first, weighted by the matrix `pre`; every tile of the fourth is a sum of those of the third, weighted
# by `post`, so weights can become negative. The mask comes after the first mix, never before: a hidden
# score of one head must not enter another.

# %%
params, talking = look(variants.talking_heads(start="paper"), seed=0)
pre = params["heads"]["talking_heads"]["pre"]["kernel"]  # [hl, hs]
post = params["heads"]["talking_heads"]["post"]["kernel"]  # [hs, hv]
mixed = jnp.einsum("hqk,hs->sqk", talking["logits"], pre)
seen = jnp.tril(jnp.ones((ROWS, ROWS), bool))
assert jnp.allclose(jnp.where(seen, mixed - talking["mixed_logits"], 0), 0, atol=1e-5)
assert jnp.allclose(jnp.einsum("sqk,sh->hqk", talking["weights"], post), talking["mixed_weights"], atol=1e-6)
print("rows of the weights add up to", np.unique(talking["weights"].sum(-1).round(4)))
print(
    "rows of the mixed weights to", np.round(talking["mixed_weights"].sum(-1)[:, 0], 2), "in the three heads"
)
picture(talking, "talking_heads")

# %% [markdown]
# ## DCMHA: a mix for each pair
#
# Here the two rows of a pair make the mix. Each side brings low-rank and diagonal factors, and the matrix
# of pair (q, k) is the identity plus what row q brings plus what row k brings. Two pairs, two matrices:

# %%
dcmha = ja.attention(spec, variants.dcmha(rank=2))
params = dcmha.init(jax.random.key(0))
params = jax.tree.map(
    lambda leaf: 1.5 * leaf, params
)  # further from its quiet start, so that something is seen
query, key = dcmha.query_side(params, x).pre[0], dcmha.key_side(params, x).pre[0]
print({name: leaf.shape for name, leaf in query._asdict().items() if leaf is not None})


def matrix(q: int, k: int) -> jax.Array:
    """The mix before the softmax at one pair, [hl, hs]."""
    mix = jnp.eye(HEADS)
    for side, row in ((query, q), (key, k)):
        mix = mix + side.down[row, 0] @ side.up[row, 0] + jnp.diag(side.diag[row])
    return mix


y, aux = dcmha.apply(params, x, mask=ja.causal(), capture=STAGES)
logits, mixed = aux.captured["logits"], aux.captured["mixed_logits"]
for q, k in ((5, 1), (5, 2)):
    assert jnp.allclose(logits[:, q, k] @ matrix(q, k), mixed[:, q, k], atol=1e-4)
    print(f"pair ({q}, {k}):", np.round(np.asarray(matrix(q, k)), 2).tolist())
picture(aux.captured, "dcmha")

# %% [markdown]
# ## MoH: a gate for each row and head
#
# The matrices are those of plain attention; the heads are multiplied afterwards. A router gives each row
# its gates; here head 0 is always on, and of the other two each row takes one.

# %%
moh = ja.attention(spec, variants.moh(shared=1, top_k=1))
gate = moh.query_side(moh.init(jax.random.key(0)), x).gate[..., 0]  # [q, hv]
print(np.round(np.asarray(gate).T, 2))
assert (jnp.sum(gate != 0, axis=-1) == 2).all()

# %% [markdown]
# ## CollabHead and MOHSA: other projections
#
# CollabHead has one narrow key for all heads: the cache holds less. MOHSA widens each head by channels of
# its neighbours, when it reads; the cache holds no more than before.

# %%
for transform in (variants.mha(), variants.collab(width=4), variants.mohsa(overlap=1)):
    attn = ja.attention(spec, transform)
    side = attn.key_side(attn.init(jax.random.key(0)), x)
    read = attn.expand(side)
    print(f"{transform!s:16} key stored {side.key.shape}, as read {read.key.shape}; value {side.value.shape}")

# %% [markdown]
# ## All of them are one function for every engine
#
# The library stores the score matrix only in `dense` and `reference`. The result is the same.

# %%
for transform in (variants.talking_heads(start="paper"), variants.dcmha(), variants.moh(shared=1, top_k=1)):
    attn = ja.attention(spec, transform)
    params = attn.init(jax.random.key(0))
    dense, blocked = (
        attn.apply(params, x, mask=ja.causal(), engine=name)[0] for name in ("dense", "blocked")
    )
    print(f"{transform!s:34} largest difference {jnp.abs(dense - blocked).max():.0e}")
    assert jnp.allclose(dense, blocked, atol=1e-5)
