"""DCMHA: every query row and every key row brings a small map over heads of its own.

Changes: logits and weights of each pair are composed over heads by low-rank and diagonal maps that the
two rows generate. Xiao et al., 2024 (ICML), https://arxiv.org/abs/2405.08553
"""

import functools
from typing import Literal

import einops
import jax
import jax.numpy as jnp

import jaxattn as ja
from jaxattn.axes import check_option, contract

EPS = 1e-6


class dcmha(ja.HeadTransform):
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
        pre: whether logits are composed over heads.
        post: whether weights are composed over heads.

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

    rank: int = 2
    groups: int = 1
    gelu: Literal["tanh", "erf"] = "tanh"
    static: bool = False
    qk_norm: Literal["rms", "layer"] | None = None
    pre: bool = True
    post: bool = True

    def __post_init__(self):
        check_option("dcmha: gelu", self.gelu, ("tanh", "erf"))
        check_option("dcmha: qk_norm", self.qk_norm, (None, "rms", "layer"))
        for name in ("rank", "groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"dcmha: {name} = {getattr(self, name)}, expected at least 1.")

    def adapt(self, sizes: ja.Sizes) -> ja.Sizes:
        if self.pre:
            sizes = sizes.claim(pre=sizes.softmax_heads)
        if self.post:
            sizes = sizes.claim(post=sizes.output_heads)
        for heads in {sizes.softmax_heads, sizes.output_heads}:
            if heads % self.groups:
                raise ValueError(
                    f"dcmha: heads = {heads} do not divide into groups = {self.groups}. "
                    "Fix: a number of groups that divides the heads."
                )
        return sizes if self.qk_norm is None else sizes.replace(qk_norm=self.qk_norm)

    def init(self, rng, at: ja.Site, dtype):
        widths = {"query": at.sizes.spec.in_q, "key": at.sizes.spec.in_k}
        params = {}
        for number, (which, (h, _)) in enumerate(at.stages.items()):
            n = h // self.groups
            u = 2 * self.rank * n
            params[which] = {}
            for side, m in widths.items():
                draw = functools.partial(
                    _normal, jax.random.fold_in(rng, 2 * number + (side == "key")), dtype
                )
                small = 0.02 / (u**0.5 * (n + self.rank))
                params[which][side] = {
                    "hidden": draw(0, (m, self.groups, u), (2 / (m + u)) ** 0.5),
                    "down": draw(1, (u, self.rank, h), small),
                    "up": draw(2, (u, self.rank, h), small),
                    "diag": draw(3, (m, h), 0.005 * (2 / (m + n)) ** 0.5),
                }
            if self.static:
                static_key = jax.random.fold_in(rng, 4 + number)
                params[which]["static"] = _normal(static_key, dtype, 0, (self.groups, n, n), 0.1 / n**0.5)
        return params

    def query_side(self, params, x_q, side: ja.QuerySide, at: ja.Site) -> ja.QuerySide:
        return at.fill(side, **{which: self._factors(own["query"], x_q) for which, own in params.items()})

    def key_side(self, params, x_k, side: ja.KeySide, at: ja.Site) -> ja.KeySide:
        return at.fill(side, **{which: self._factors(own["key"], x_k) for which, own in params.items()})

    def _factors(self, params, x) -> ja.Factors:
        """The row factors of one stage and side: x [..., n, m]."""
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(x.dtype, leaf.dtype)), params)
        hidden = contract(x.astype(params["hidden"].dtype), params["hidden"], "... n m, m g u -> ... n g u")
        hidden = jax.nn.gelu(hidden, approximate=self.gelu == "tanh")
        expand = functools.partial(einops.rearrange, pattern="u r (g i) -> g u r i", g=self.groups)
        down = contract(hidden, expand(params["down"]), "... n g u, g u r i -> ... n g i r")
        up = contract(hidden, expand(params["up"]), "... n g u, g u r o -> ... n g r o")
        down = down * jax.lax.rsqrt(jnp.square(down).mean(-2, keepdims=True) + EPS)
        diag = jnp.tanh(contract(x.astype(params["diag"].dtype), params["diag"], "... n m, m h -> ... n h"))
        return ja.Factors(down=down, up=up, diag=diag)

    def coupling(self, params, coupling: ja.Coupling, at: ja.Site) -> ja.Coupling:
        if not self.static:
            return coupling
        return at.fill(coupling, **{which: ja.Mix(own["static"], skip=True) for which, own in params.items()})

    def declare(self, at: ja.Site) -> ja.Declaration:
        leaves = {"hidden": "m g u", "down": "u r h", "up": "u r h", "diag": "m h"}
        stages, groups = at.stages, self.groups
        static = {"static": "g h h" if groups == 1 else "g i o"} if self.static else {}
        axes = {which: {"query": leaves, "key": leaves} | static for which in stages}
        ties = {"pre": ("hl", "hs"), "post": ("hs", "hv")}

        def upgrade(mha, fresh):
            """No mix at the start: `up` is zero, and opens `hidden` and `down` after one step."""
            still = ("up", "diag", "static")
            zero = lambda path, leaf: jnp.zeros_like(leaf) if path[-1].key in still else leaf
            own = jax.tree_util.tree_map_with_path(zero, fresh["heads"][at.name])
            return mha | {"heads": mha["heads"] | {at.name: own}}

        n = at.sizes.output_heads // groups
        # A static leaf of several groups has no axis of all heads by which to permute it.
        inside = tuple(tuple(range(g * n, (g + 1) * n)) for g in range(groups))
        exchangeable = None if groups == 1 else () if self.static else inside
        exact = ja.Upgrade(upgrade) if self.qk_norm is None else ja.Upgrade(None, "MHA without head norms")
        return ja.Declaration(axes, ties=frozenset(ties[which] for which in stages),
                              exchangeable=exchangeable, upgrade=exact)  # fmt: skip


def _normal(rng, dtype, number: int, shape: tuple[int, ...], std: float):
    return std * jax.random.normal(jax.random.fold_in(rng, number), shape, dtype)
