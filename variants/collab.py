"""CollabHead: heads share one key basis and one query basis, each weighs its channels.

Changes: queries and keys are projected once to width D~; head h multiplies the shared query by its
mixing row. Values stay per head. Cordonnier et al., 2020, https://arxiv.org/abs/2006.16362
"""

from typing import Literal

import einops
import jax
import jax.numpy as jnp

import jaxattn as ja
from jaxattn.axes import check_option, contract
from jaxattn.project import rotate


class collab(ja.HeadTransform):
    """Collaborative attention.

    logits[h,q,k] = scale * (sum_c (x_q W_Q)[c] M[h,c] (x_k W_K)[c] + (x_k W_c)[h])

    The scale is that of the source head width, 1/sqrt(d_qk), whatever D~ is: only so does an exact
    factorisation give the source's logits. Query and key have no biases of their own; the content bias
    stands for them (the terms that are constant over keys cancel in the softmax, so it is refused
    together with a mix before the softmax). With rotary positions the mixed query and the shared key turn
    in blocks of d_qk channels. One key head for all heads: `kv_heads` is refused.

    Args:
        width: D~; default half of heads * d_qk, in whole head widths.
        content_bias: whether there is W_c.
        mixing: initial rows M: `"blocks"` gives head h its own ceil(D~/h) channels (at full width this
            is MHA), `"normal"` draws with standard deviation 0.2 (the released default), `"ones"`.

    Raises:
        ValueError: for a width that rotary blocks do not divide, an unknown option, kv_heads.

    Example:
        >>> attn = ja.attention(ja.HeadSpec(model=8, heads=4), collab(width=4))
        >>> attn.init(jax.random.key(0))["key"]["kernel"].shape
        (8, 1, 4)

    Departs from released code: its package scales by 1/sqrt(D~/h), which changes with compression (give
    `HeadSpec(scale=...)` for it); its DeiT fork scales as here.

    Source: Cordonnier et al., 2020, sections 3 and 4.
    """

    width: int | None = None
    content_bias: bool = True
    mixing: Literal["blocks", "normal", "ones"] = "blocks"

    def __post_init__(self):
        check_option("collab: mixing", self.mixing, ("blocks", "normal", "ones"))
        if self.width is not None and self.width < 1:
            raise ValueError(f"collab: width = {self.width}, expected at least 1.")

    def adapt(self, sizes: ja.Sizes) -> ja.Sizes:
        spec = sizes.spec
        sizes.refuse_shared_keys("collab")
        basis = max(1, spec.heads // 2) * spec.d_qk if self.width is None else self.width
        if spec.rotary is not None and basis % spec.d_qk:
            raise ValueError(
                f"collab: width = {basis} is not whole blocks of d_qk = {spec.d_qk}, in which rotary "
                f"positions turn. Fix: a multiple of {spec.d_qk}, or no rotary."
            )
        if sizes.qk_norm is not None:
            raise ValueError(
                f"collab: qk_norm = {sizes.qk_norm!r} normalises each head's query and key, but they are "
                "one shared basis. Fix: qk_norm=None."
            )
        return sizes.redefine(
            "collab",
            query_heads=1,
            key_heads=1,
            qk_width=basis,
            bias_q=False,
            bias_k=False,
            rotary_q=None,  # the query turns after it is mixed, or positions would not be relative
            key_bias_by="collab" if self.content_bias else None,
        )

    def init(self, rng, at: ja.Site, dtype):
        spec, basis = at.sizes.spec, at.sizes.qk_width
        rows = {
            "blocks": lambda: blocks(spec.heads, basis, dtype),
            "normal": lambda: 0.2 * jax.random.normal(rng, (spec.heads, basis), dtype),
            "ones": lambda: jnp.ones((spec.heads, basis), dtype),
        }
        params = {"mixing": rows[self.mixing]()}
        if self.content_bias:
            params["content_bias"] = jnp.zeros((spec.in_k, spec.heads), dtype)
        return params

    def query_side(self, params, x_q, side: ja.QuerySide, at: ja.Site) -> ja.QuerySide:
        rows = params["mixing"].astype(side.query.dtype)
        query = einops.einsum(side.query, rows, "... q one d, hl d -> ... q hl d")
        spec = at.sizes.spec
        return side._replace(query=rotate(query, spec.rotary, side.position, spec.d_qk))

    def key_side(self, params, x_k, side: ja.KeySide, at: ja.Site) -> ja.KeySide:
        if not self.content_bias:
            return side
        kernel = params["content_bias"].astype(side.key.dtype)
        bias = contract(x_k.astype(side.key.dtype), kernel, "... k m, m hl -> ... k hl")
        return side._replace(bias=at.sizes.spec.scale * bias)

    def declare(self, at: ja.Site) -> ja.Declaration:
        axes = {"mixing": "h c"} | ({"content_bias": "m h"} if self.content_bias else {})
        core = {"query/kernel": "m one c", "key/kernel": "m one c"}
        return ja.Declaration(axes, core=core, upgrade=self._upgrade(at))

    def _upgrade(self, at: ja.Site) -> ja.Upgrade:
        sizes, spec = at.sizes, at.sizes.spec
        if sizes.qk_width != spec.heads * spec.d_qk:
            return ja.Upgrade(
                None, f"width {sizes.qk_width} is below heads * d_qk = {spec.heads * spec.d_qk}"
            )
        turned = spec.rotary is not None and (spec.bias_q or spec.bias_k)
        if turned or (spec.bias_q and not self.content_bias):
            why = "a bias of query or key needs the content bias, and no rotary positions to turn it"
            return ja.Upgrade(None, why)

        def upgrade(mha, fresh):
            def packed(name):
                return {"kernel": einops.rearrange(mha[name]["kernel"], "m h d -> m 1 (h d)")}

            kernel = mha["key"]["kernel"]
            own = {"mixing": blocks(spec.heads, sizes.qk_width, kernel.dtype)}
            if self.content_bias:
                own["content_bias"] = jnp.zeros((spec.in_k, spec.heads), kernel.dtype)
            if self.content_bias and "bias" in mha["query"]:
                own["content_bias"] = einops.einsum(kernel, mha["query"]["bias"], "m h d, h d -> m h")
            heads = mha["heads"] | {at.name: own}
            return mha | {"query": packed("query"), "key": packed("key"), "heads": heads}

        return ja.Upgrade(upgrade)


def blocks(heads: int, width: int, dtype) -> jax.Array:
    """[h, c]: head h reads channels h * n .. h * n + n of n = ceil(width / heads); the last may be fewer."""
    owner = jnp.arange(width)[None, :] // -(-width // heads)
    return (owner == jnp.arange(heads)[:, None]).astype(dtype)
