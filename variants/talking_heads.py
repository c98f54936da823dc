"""Talking-Heads: linear maps over heads before and after the softmax.

Changes: logits of H_k heads become those of H_s heads, weights of H_s heads those of H_v heads; the
three counts may differ. Shazeer et al., 2020, https://arxiv.org/abs/2003.02436
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

import jaxattn as ja
from jaxattn.axes import check_option, contract
from jaxattn.transform import place

DYNAMIC = ("pre_query", "pre_key", "post_query", "post_key")


def talking_heads(
    logit_heads: int | None = None,
    softmax_heads: int | None = None,
    value_heads: int | None = None,
    pre: bool = True,
    post: bool = True,
    init: Literal["identity", "paper"] = "identity",
    bias: bool = False,
    dynamic: tuple[str, ...] = (),
    dropout_over_queries: bool = False,
) -> ja.HeadTransform:
    """Talking-Heads attention.

    L[hs] = sum_hl J[hl] P_l[hl,hs];  W = softmax(L);  U[hv] = sum_hs W[hs] P_w[hs,hv];  no renormalising

    With `dynamic`, a source row z adds a whole matrix of its own, P_z = z @ W_dyn, to either map.
    Takes fewer key heads (`kv_heads`).

    Args:
        logit_heads, softmax_heads, value_heads: H_k, H_s, H_v; default the heads of the spec.
        pre, post: whether heads are mixed before and after the softmax.
        init: `"identity"` starts as MHA where head counts are equal; `"paper"` draws both maps,
            normal with standard deviation 1/sqrt(heads in).
        bias: the biases of CaiT. The one before the softmax cancels in it; the one after it reaches
            visible pairs only, since weights are masked again.
        dynamic: the paper's input-dependent projections, of "pre_query" (its x2l), "pre_key" (m2l),
            "post_query" (x2w), "post_key" (m2w); drawn with standard deviation 0.1/sqrt(m heads in).
        dropout_over_queries: one dropout draw serves all queries, as in the paper's code.

    Raises:
        ValueError: for an unknown option, or counts without a map that changes them.

    Example:
        >>> attn = ja.attention(ja.HeadSpec(model=6, heads=2), talking_heads(softmax_heads=3))
        >>> attn.init(jax.random.key(0))["heads"]["talking_heads"]["pre"]["kernel"].shape
        (2, 3)

    Departs from released code: CaiT has biases and no mask (`bias=True`); x-transformers adds its first
    map to the identity, so that its logits start doubled.

    Source: Shazeer et al., 2020, sections 3 to 5; Touvron et al., 2021 (CaiT).
    """
    check_option("talking_heads: init", init, ("identity", "paper"))
    for name in dynamic:
        check_option("talking_heads: dynamic", name, DYNAMIC)
    stages = tuple(site for site, used in (("pre", pre), ("post", post)) if used)
    for name in dynamic:
        if name.split("_")[0] not in stages:
            raise ValueError(f"talking_heads: dynamic {name!r} needs {name.split('_')[0]}=True.")

    def adapt(sizes: ja.Sizes) -> ja.Sizes:
        if logit_heads is not None and logit_heads != sizes.logit_heads:
            keys = logit_heads if sizes.key_heads == sizes.query_heads else sizes.key_heads
            sizes = sizes.redefine(
                "talking_heads with logit_heads",
                query_heads=logit_heads,
                key_heads=keys,
                logit_heads=logit_heads,
                softmax_heads=logit_heads,
                output_heads=logit_heads,
            )
        shared = sizes.value_heads != sizes.spec.heads
        if pre:
            sizes = sizes.claim(pre=softmax_heads or sizes.softmax_heads)
        elif softmax_heads not in (None, sizes.softmax_heads):
            raise ValueError(
                f"talking_heads: softmax_heads = {softmax_heads} differs from logit heads = "
                f"{sizes.softmax_heads}, but pre=False. Fix: pre=True."
            )
        if post:
            sizes = sizes.claim(post=value_heads or sizes.spec.heads)
        elif value_heads not in (None, sizes.output_heads):
            raise ValueError(
                f"talking_heads: value_heads = {value_heads} differs from softmax heads = "
                f"{sizes.output_heads}, but post=False. Fix: post=True."
            )
        return sizes if shared else sizes._replace(value_heads=sizes.output_heads)

    def stage_of(at: ja.Site, site: str) -> tuple[ja.Stage, int]:
        claimed, index = (at.sizes.pre, at.pre) if site == "pre" else (at.sizes.post, at.post)
        assert index is not None
        return claimed[index], index

    def init_params(rng, at: ja.Site, dtype):
        params = {}
        widths = {"query": at.sizes.spec.in_q, "key": at.sizes.spec.in_k}
        for site in stages:
            (i, o), _ = stage_of(at, site)
            leaves = {"kernel": jnp.eye(i, o, dtype=dtype)}
            if init == "paper":
                kernel_key = jax.random.fold_in(rng, len(params))
                leaves["kernel"] = jax.random.normal(kernel_key, (i, o), dtype) / jnp.sqrt(i).astype(dtype)
            if bias:
                leaves["bias"] = jnp.zeros(o, dtype)
            for side, width in widths.items():
                if f"{site}_{side}" in dynamic:
                    leaf_key = jax.random.fold_in(rng, 2 + DYNAMIC.index(f"{site}_{side}"))
                    leaves[side] = (
                        0.1 / (width * i) ** 0.5 * jax.random.normal(leaf_key, (width, i, o), dtype)
                    )
            params[site] = leaves
        return params

    def factors(params, x, side, at: ja.Site, which: str):
        for site in stages:
            if which in params[site]:
                kernel = params[site][which]
                dense = contract(x, kernel.astype(x.dtype), "... n m, m i o -> ... n i o")
                placed = place(getattr(side, site), stage_of(at, site)[1], ja.Factors(dense=dense))
                side = side._replace(**{site: placed})
        return side

    def coupling(params, coupling: ja.Coupling, at: ja.Site) -> ja.Coupling:
        changes = {}
        for site in stages:
            mix = ja.Mix(params[site]["kernel"], params[site].get("bias"))
            changes[site] = place(getattr(coupling, site), stage_of(at, site)[1], mix)
        if dropout_over_queries:
            changes["dropout_shared"] = (*coupling.dropout_shared, "q")
        return dataclasses.replace(coupling, **changes)

    def declare(at: ja.Site) -> ja.Declaration:
        kinds = {"pre": ("hl", "hs"), "post": ("hs", "hv")}
        axes = {}
        for site in stages:
            i, o = kinds[site]
            leaves = {"kernel": f"{i} {o}"}
            if bias:
                leaves["bias"] = o
            leaves |= {s: f"m {i} {o}" for s in ("query", "key") if f"{site}_{s}" in dynamic}
            axes[site] = leaves
        square = all(i == o for (i, o), _ in (stage_of(at, site) for site in stages))

        def upgrade(mha, fresh):
            own = {}
            for site in stages:
                leaves = jax.tree.map(jnp.zeros_like, fresh["heads"]["talking_heads"][site])
                own[site] = leaves | {
                    "kernel": jnp.eye(leaves["kernel"].shape[0], dtype=leaves["kernel"].dtype)
                }
            return mha | {"heads": mha["heads"] | {"talking_heads": own}}

        exact = ja.Upgrade(upgrade) if square else ja.Upgrade(None, "head counts differ from those of MHA")
        return ja.Declaration(axes=axes, upgrade=exact)

    return ja.HeadTransform(
        "talking_heads",
        adapt=adapt,
        init=init_params,
        query_side=lambda params, x, side, at: factors(params, x, side, at, "query"),
        key_side=lambda params, x, side, at: factors(params, x, side, at, "key"),
        coupling=coupling,
        declare=declare,
    )
