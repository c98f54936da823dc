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

DYNAMIC = ("pre_query", "pre_key", "post_query", "post_key")


class talking_heads(ja.HeadTransform):
    """Talking-Heads attention.

    L[hs] = sum_hl J[hl] P_l[hl,hs];  W = softmax(L);  U[hv] = sum_hs W[hs] P_w[hs,hv];  no renormalising

    With `dynamic`, a source row z adds a whole matrix of its own, P_z = z @ W_dyn, to either map.
    Takes fewer key heads (`kv_heads`).

    Args:
        logit_heads: H_k, heads of the logits; default the heads of the spec.
        softmax_heads: H_s, heads of the softmax, after the first map; default the logit heads.
        value_heads: H_v, heads that meet the values, after the second map; default the heads of the spec.
        pre: whether logits are mixed over heads, before the softmax.
        post: whether weights are mixed over heads, after the softmax.
        start: `"identity"` starts as MHA where head counts are equal; `"paper"` draws both maps,
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

    logit_heads: int | None = None
    softmax_heads: int | None = None
    value_heads: int | None = None
    pre: bool = True
    post: bool = True
    start: Literal["identity", "paper"] = "identity"
    bias: bool = False
    dynamic: tuple[str, ...] = ()
    dropout_over_queries: bool = False

    def __post_init__(self):
        check_option("talking_heads: start", self.start, ("identity", "paper"))
        for name in self.dynamic:
            check_option("talking_heads: dynamic", name, DYNAMIC)
            site = name.split("_")[0]
            if not getattr(self, site):
                raise ValueError(f"talking_heads: dynamic {name!r} needs {site}=True.")

    def adapt(self, sizes: ja.Sizes) -> ja.Sizes:
        logit_heads, softmax_heads, value_heads = self.logit_heads, self.softmax_heads, self.value_heads
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
        if self.pre:
            sizes = sizes.claim(pre=softmax_heads or sizes.softmax_heads)
        elif softmax_heads not in (None, sizes.softmax_heads):
            raise ValueError(
                f"talking_heads: softmax_heads = {softmax_heads} differs from logit heads = "
                f"{sizes.softmax_heads}, but pre=False. Fix: pre=True."
            )
        if self.post:
            sizes = sizes.claim(post=value_heads or sizes.spec.heads)
        elif value_heads not in (None, sizes.output_heads):
            raise ValueError(
                f"talking_heads: value_heads = {value_heads} differs from softmax heads = "
                f"{sizes.output_heads}, but post=False. Fix: post=True."
            )
        return sizes if shared else sizes.replace(value_heads=sizes.output_heads)

    def init(self, rng, at: ja.Site, dtype):
        params = {}
        widths = {"query": at.sizes.spec.in_q, "key": at.sizes.spec.in_k}
        for which, (i, o) in at.stages.items():
            leaves = {"kernel": jnp.eye(i, o, dtype=dtype)}
            if self.start == "paper":
                kernel_key = jax.random.fold_in(rng, len(params))
                leaves["kernel"] = jax.random.normal(kernel_key, (i, o), dtype) / jnp.sqrt(i).astype(dtype)
            if self.bias:
                leaves["bias"] = jnp.zeros(o, dtype)
            for side, width in widths.items():
                if f"{which}_{side}" in self.dynamic:
                    leaf_key = jax.random.fold_in(rng, 2 + DYNAMIC.index(f"{which}_{side}"))
                    leaves[side] = (
                        0.1 / (width * i) ** 0.5 * jax.random.normal(leaf_key, (width, i, o), dtype)
                    )
            params[which] = leaves
        return params

    def query_side(self, params, x_q, side: ja.QuerySide, at: ja.Site) -> ja.QuerySide:
        return at.fill(side, **_factors(params, x_q, "query"))

    def key_side(self, params, x_k, side: ja.KeySide, at: ja.Site) -> ja.KeySide:
        return at.fill(side, **_factors(params, x_k, "key"))

    def coupling(self, params, coupling: ja.Coupling, at: ja.Site) -> ja.Coupling:
        mixes = {which: ja.Mix(own["kernel"], own.get("bias")) for which, own in params.items()}
        if self.dropout_over_queries:
            shared = (*coupling.dropout_shared, "q")
            coupling = dataclasses.replace(coupling, dropout_shared=shared)
        return at.fill(coupling, **mixes)

    def declare(self, at: ja.Site) -> ja.Declaration:
        kinds = {"pre": ("hl", "hs"), "post": ("hs", "hv")}
        axes = {}
        stages = at.stages
        for which in stages:
            i, o = kinds[which]
            leaves = {"kernel": f"{i} {o}"}
            if self.bias:
                leaves["bias"] = o
            leaves |= {s: f"m {i} {o}" for s in ("query", "key") if f"{which}_{s}" in self.dynamic}
            axes[which] = leaves

        def upgrade(mha, fresh):
            own = {}
            for which, leaves in fresh["heads"][at.name].items():
                kernel = leaves["kernel"]
                zeros = jax.tree.map(jnp.zeros_like, leaves)
                own[which] = zeros | {"kernel": jnp.eye(kernel.shape[0], dtype=kernel.dtype)}
            return mha | {"heads": mha["heads"] | {at.name: own}}

        square = all(i == o for i, o in stages.values())
        exact = ja.Upgrade(upgrade) if square else ja.Upgrade(None, "head counts differ from those of MHA")
        return ja.Declaration(axes=axes, upgrade=exact, idle=self._idle(at))

    def _idle(self, at: ja.Site) -> dict[str, str]:
        plain = at.sizes.spec.softcap is None and len(at.sizes.pre) == 1
        if self.bias and self.pre and plain:
            return {"pre/bias": "it is added to every key's logit alike, so it cancels in the softmax"}
        return {}


def _factors(params, x, side: str) -> dict[str, ja.Factors]:
    """The whole matrix that each row of x [..., n, m] adds to a stage, where it has one."""
    made = {}
    for which, own in params.items():
        if side in own:
            kernel = own[side].astype(x.dtype)
            made[which] = ja.Factors(dense=contract(x, kernel, "... n m, m i o -> ... n i o"))
    return made
