"""DCMHA: every query row and every key row brings a small map over heads of its own.

Changes: logits and weights of each pair are composed over heads by low-rank and diagonal maps that the
two rows generate. Xiao et al., 2024 (ICML), https://arxiv.org/abs/2405.08553
"""

import dataclasses
import functools
from typing import Literal

import einops
import jax
import jax.numpy as jnp

import jaxattn as ja
from jaxattn.axes import check_option, contract
from jaxattn.transform import place

EPS = 1e-6


def dcmha(
    rank: int = 2,
    groups: int = 1,
    gelu: Literal["tanh", "erf"] = "tanh",
    static: bool = False,
    qk_norm: Literal["rms", "layer"] | None = None,
    pre: bool = True,
    post: bool = True,
) -> ja.HeadTransform:
    """Dynamically composable multi-head attention.

    out[n] = A[n] + (sum_m A[m] W[m,n])
             + sum_r (sum_m A[m] w1_q[r,m]) w2_q[r,n] + A[n] d_q[n]   from the query row
             + sum_r (sum_m A[m] w1_k[r,m]) w2_k[r,n] + A[n] d_k[n]   from the key row

    where, for each stage and side, h = gelu(x @ hidden); w1 = rms(h @ down) over the heads of a group
    (eps 1e-6); w2 = h @ up, not normalised; d = tanh(x @ diag). Stages: before the mask and after the
    softmax; the second is masked again. In cross-attention the key row's map comes from the source.
    Takes fewer key heads (`kv_heads`): the maps are over query heads.

    Args:
        rank: of the low-rank maps.
        groups: heads g * n .. form a group; maps stay inside it.
        gelu: `"tanh"` as in the released JAX code, `"erf"` as in the released PyTorch code.
        static: the learned map W [n, n] of each group on top of the identity (drawn with standard
            deviation 0.1/sqrt(n)); the paper has it, the released language models leave it out.
        qk_norm: head norms of the released `qk_norm=True` ("rms"), before rotary positions.
        pre, post: whether logits and weights are composed.

    Raises:
        ValueError: for an unknown option, or heads that do not divide into groups.

    Example:
        >>> attn = ja.attention(ja.HeadSpec(model=8, heads=4), dcmha(rank=2))
        >>> own = attn.init(jax.random.key(0))["heads"]["dcmha"]
        >>> own["pre"]["query"]["down"].shape
        (16, 2, 4)

    Departs from released code: initial values are those of the JAX code (its `diag` is ten times smaller
    than that of the PyTorch code); nothing is cast to bfloat16.

    Source: Xiao et al., 2024, sections 3.1 to 3.3.
    """
    check_option("dcmha: gelu", gelu, ("tanh", "erf"))
    check_option("dcmha: qk_norm", qk_norm, (None, "rms", "layer"))
    for name, size in (("rank", rank), ("groups", groups)):
        if size < 1:
            raise ValueError(f"dcmha: {name} = {size}, expected at least 1.")
    stages = tuple(site for site, used in (("pre", pre), ("post", post)) if used)

    def adapt(sizes: ja.Sizes) -> ja.Sizes:
        if pre:
            sizes = sizes.claim(pre=sizes.softmax_heads)
        if post:
            sizes = sizes.claim(post=sizes.output_heads)
        for heads in {sizes.softmax_heads, sizes.output_heads}:
            if heads % groups:
                raise ValueError(
                    f"dcmha: heads = {heads} do not divide into groups = {groups}. "
                    "Fix: a number of groups that divides the heads."
                )
        return sizes if qk_norm is None else sizes._replace(qk_norm=qk_norm)

    def stage_of(at: ja.Site, site: str) -> tuple[int, int]:
        """Which stage of the site was claimed, and its number of heads."""
        claimed, index = (at.sizes.pre, at.pre) if site == "pre" else (at.sizes.post, at.post)
        assert index is not None
        return index, claimed[index].heads_in

    def init(rng, at: ja.Site, dtype):
        widths = {"query": at.sizes.spec.in_q, "key": at.sizes.spec.in_k}
        params = {}
        for number, site in enumerate(stages):
            _, h = stage_of(at, site)
            n = h // groups
            u = 2 * rank * n
            params[site] = {}
            for side, m in widths.items():
                draw = functools.partial(
                    _normal, jax.random.fold_in(rng, 2 * number + (side == "key")), dtype
                )
                small = 0.02 / (u**0.5 * (n + rank))
                params[site][side] = {
                    "hidden": draw(0, (m, groups, u), (2 / (m + u)) ** 0.5),
                    "down": draw(1, (u, rank, h), small),
                    "up": draw(2, (u, rank, h), small),
                    "diag": draw(3, (m, h), 0.005 * (2 / (m + n)) ** 0.5),
                }
            if static:
                static_key = jax.random.fold_in(rng, 4 + number)
                params[site]["static"] = _normal(static_key, dtype, 0, (groups, n, n), 0.1 / n**0.5)
        return params

    def generate(params, x, side, at: ja.Site, which: str):
        for site in stages:
            placed = place(getattr(side, site), stage_of(at, site)[0], factors(params[site][which], x))
            side = side._replace(**{site: placed})
        return side

    def factors(params, x) -> ja.Factors:
        """The row factors of one stage and side: x [..., n, m]."""
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(x.dtype, leaf.dtype)), params)
        hidden = contract(x, params["hidden"], "... n m, m g u -> ... n g u")
        hidden = jax.nn.gelu(hidden, approximate=gelu == "tanh")
        expand = functools.partial(einops.rearrange, pattern="u r (g i) -> g u r i", g=groups)
        down = contract(hidden, expand(params["down"]), "... n g u, g u r i -> ... n g i r")
        up = contract(hidden, expand(params["up"]), "... n g u, g u r o -> ... n g r o")
        down = down * jax.lax.rsqrt(jnp.square(down).mean(-2, keepdims=True) + EPS)
        diag = jnp.tanh(contract(x, params["diag"], "... n m, m h -> ... n h"))
        return ja.Factors(down=down, up=up, diag=diag)

    def coupling(params, coupling: ja.Coupling, at: ja.Site) -> ja.Coupling:
        if not static:
            return coupling
        changes = {}
        for site in stages:
            mix = ja.Mix(params[site]["static"], skip=True)
            changes[site] = place(getattr(coupling, site), stage_of(at, site)[0], mix)
        return dataclasses.replace(coupling, **changes)

    def declare(at: ja.Site) -> ja.Declaration:
        leaves = {"hidden": "m g u", "down": "u r h", "up": "u r h", "diag": "m h"}
        axes = {
            site: {"query": leaves, "key": leaves}
            | ({"static": "g h h" if groups == 1 else "g i o"} if static else {})
            for site in stages
        }
        ties = {"pre": ("hl", "hs"), "post": ("hs", "hv")}

        def upgrade(mha, fresh):
            own = jax.tree.map(jnp.zeros_like, fresh["heads"]["dcmha"])
            return mha | {"heads": mha["heads"] | {"dcmha": own}}

        n = at.sizes.output_heads // groups
        # A static leaf of several groups has no axis of all heads by which to permute it.
        inside = tuple(tuple(range(g * n, (g + 1) * n)) for g in range(groups))
        exchangeable = None if groups == 1 else () if static else inside
        exact = ja.Upgrade(upgrade) if qk_norm is None else ja.Upgrade(None, "MHA without head norms")
        return ja.Declaration(axes, ties=frozenset(ties[s] for s in stages),
                              exchangeable=exchangeable, upgrade=exact)  # fmt: skip

    return ja.HeadTransform(
        "dcmha",
        adapt=adapt,
        init=init,
        query_side=lambda params, x, side, at: generate(params, x, side, at, "query"),
        key_side=lambda params, x, side, at: generate(params, x, side, at, "key"),
        coupling=coupling,
        declare=declare,
    )


def _normal(rng, dtype, number: int, shape: tuple[int, ...], std: float):
    return std * jax.random.normal(jax.random.fold_in(rng, number), shape, dtype)
