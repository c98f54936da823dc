"""MoH: a router decides for each token which heads count, and how much.

Changes: the heads are gated; the first `shared` always count, of the others the `top_k` best.
Jin et al., 2024 (ICML 2025), https://arxiv.org/abs/2410.11842
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import jaxattn as ja
from jaxattn.axes import at_least_float32, check_option, contract


@ja.export.register
class MoHSums(NamedTuple):
    """Sums over tokens; divide by `tokens` for means, add two of them for a larger batch.

    Attributes:
        probability: [hr], sum of the router's probabilities.
        selected: [hr], how many tokens selected each routed head: its load.
        entropy: sum of the entropy of the router's distribution, in nats; near 0 is collapse to one
            head a token, near log(hr) is indifference.
        tokens: how many valid tokens were counted.
    """

    probability: Array
    selected: Array
    entropy: Array
    tokens: Array

    def telemetry(self) -> dict[str, Array]:
        """Load share of each head, mean entropy, and the largest load over its fair share."""
        tokens = jnp.maximum(self.tokens, 1)
        load = self.selected / jnp.maximum(self.selected.sum(), 1)
        collapse = load.max(initial=0.0) * load.shape[-1]
        return {"load": load, "entropy": self.entropy / tokens, "collapse": collapse}


class moh(ja.HeadTransform):
    """Mixture-of-heads attention.

    y[t] = sum_h g[t,h] heads[t,h] @ W_O[h], with, for token state x,
        [a_1, a_2] = softmax(x W_stage),  s = softmax(x W_shared),  p = softmax(x W_routed)
        paper:    g = a_1 s_i for shared heads; a_2 p_i for the top_k largest p_i; else 0
        released: g = 2 a_1 (shared s_i);  2 a_2 (top_k p_i / sum of the selected p)
    Exactly shared + top_k heads are active a token. Keys and values stay dense. Takes fewer key heads.

    Equal scores: the lowest index wins, always. A score of the routed heads that is NaN counts as the
    lowest, so that one bad score does not spread to the other heads. `top_k = 0` leaves the shared heads,
    `shared = 0` the routed ones. A softmax over a single head is 1 whatever its logit, so one shared or one
    routed head has no router of its own (no leaf without a gradient).

    Args:
        shared: heads 0 .. shared-1, always active.
        top_k: routed heads active for each token.
        gates: the paper's, or those of the released vision code: renormalised over the selected and
            times counts, so that zero routers leave each active gate at 1.
        router: `"learned"`, or `"query_norm"` of the converted LLaMA: the heads with the largest norm
            of their query, gates 0 or 1.
        straight_through: the query-norm gates' gradient passes to the probabilities, as in the paper;
            False treats the gates as constants, as the released inference code does.
        balance: S = sum_i P_i f_i (P_i mean probability, f_i share of tokens that select i), or the
            released multiple, routed heads times S. The gradient reaches the router through P.
        balance_weight: with which the loss joins; the paper's 0.01.

    Raises:
        ValueError: for counts that do not fit the heads, or an unknown option.

    Example:
        >>> attn = ja.attention(ja.HeadSpec(model=8, heads=4), moh(shared=1, top_k=2))
        >>> x = jax.random.normal(jax.random.key(1), (5, 8))
        >>> gate = attn.query_side(attn.init(jax.random.key(0)), x).gate
        >>> (gate[..., 0] != 0).sum(-1).tolist()
        [3, 3, 3, 3, 3]

    Where the paper is silent: the query-norm router's straight-through gradient takes the softmax of the
    norms over their standard deviation (with 1e-6 under the root, which released code leaves out) as the
    real-valued gate, so d gate = d softmax; its balance loss uses the same probabilities.

    Source: Jin et al., 2024, sections 3.2 (equations 4 to 8) and 4.4.
    """

    shared: int = 1
    top_k: int = 2
    gates: Literal["paper", "released"] = "paper"
    router: Literal["learned", "query_norm"] = "learned"
    straight_through: bool = True
    balance: Literal["paper", "released"] = "paper"
    balance_weight: float = 0.01

    def __post_init__(self):
        check_option("moh: gates", self.gates, ("paper", "released"))
        check_option("moh: router", self.router, ("learned", "query_norm"))
        check_option("moh: balance", self.balance, ("paper", "released"))
        if self.shared < 0 or self.top_k < 0 or self.shared + self.top_k < 1:
            raise ValueError(
                f"moh: shared = {self.shared}, top_k = {self.top_k}, expected counts of at least 0 with at "
                f"least "
                "one active head. Fix: shared >= 1 or top_k >= 1."
            )

    @property
    def _learned(self) -> bool:
        return self.router == "learned"

    def overrides(self, hook: str) -> bool:
        """A query-norm router reads the queries, so it cannot choose from the states alone."""
        return super().overrides(hook) and (hook != "route" or self._learned)

    def adapt(self, sizes: ja.Sizes) -> ja.Sizes:
        routed = sizes.output_heads - self.shared
        if self.top_k > routed:
            raise ValueError(
                f"moh: top_k = {self.top_k} is above the {routed} routed heads (heads = "
                f"{sizes.output_heads}, "
                f"shared = {self.shared}). Fix: top_k <= heads - shared."
            )
        if not self._learned and (sizes.projected_by or sizes.query_heads != sizes.output_heads):
            raise ValueError(
                "moh: router='query_norm' reads the query of each head, but the projections have "
                f"{sizes.query_heads} query heads for {sizes.output_heads} output heads. "
                "Fix: router='learned'."
            )
        return sizes.replace(active_heads=self.shared + self.top_k)

    def _outs(self, at: ja.Site) -> dict[str, int]:
        """The width of each router that is learned."""
        if not self._learned:
            return {}
        widths = {
            "routed": at.sizes.output_heads - self.shared if self.top_k else 0,
            "shared": self.shared,
            "stage": 2 if self.shared and self.top_k else 0,
        }
        return {name: width for name, width in widths.items() if width > 1}

    def init(self, rng, at: ja.Site, dtype):
        keys: dict[str, Array] = dict(
            zip(("routed", "shared", "stage"), jax.random.split(rng, 3), strict=True)
        )
        draw = jax.nn.initializers.truncated_normal(0.02)
        return {
            name: draw(keys[name], (at.sizes.spec.in_q, width), dtype)
            for name, width in self._outs(at).items()
        }

    def _probabilities(self, params, x, side: ja.QuerySide) -> Array:
        """The router's distribution over the routed heads, [..., q, hr]."""
        if self._learned:
            return _by_state(params, x)
        query = side.query[..., self.shared :, :]
        query = query.astype(at_least_float32(query.dtype))
        square = jnp.square(query).sum(-1)
        safe = jnp.where(square > 0, square, 1)  # the root has no slope at 0
        norm = jnp.where(square > 0, jnp.sqrt(safe), 0)
        spread = jnp.square(norm - norm.mean(-1, keepdims=True)).sum(-1, keepdims=True)
        spread = jnp.sqrt(spread / max(norm.shape[-1] - 1, 1) + 1e-6)
        return jax.nn.softmax(_finite(norm / spread), axis=-1)

    def route(self, params, x_q, at: ja.Site) -> tuple[Array, Any]:
        shared = jnp.arange(self.shared)
        always = jnp.broadcast_to(shared, (*x_q.shape[:-1], self.shared))
        if not self.top_k:
            return always, None
        p = _by_state(params, x_q)
        best = _best(p, self.top_k)
        return jnp.concatenate([always, self.shared + best], axis=-1), (p, _among(best, p))

    def query_side(self, params, x_q, side: ja.QuerySide, at: ja.Site) -> ja.QuerySide:
        of_shared, of_routed = self._stage_gates(params, x_q)
        parts = [of_shared * self._shared_gates(params, x_q)] if self.shared else []
        if self.top_k:
            noted = at.noted(side)
            if noted is None:
                p = self._probabilities(params, x_q, side)
                noted = p, _among(_best(p, self.top_k), p)
                side = at.note(side, noted)
            p, chosen = noted
            parts.append(of_routed * self._routed_gates(p, chosen.astype(p.dtype)))
        elif at.sizes.output_heads > self.shared:
            parts.append(jnp.zeros((*x_q.shape[:-1], at.sizes.output_heads - self.shared), parts[0].dtype))
        return at.gate(side, jnp.concatenate(parts, axis=-1)[..., None])

    def _stage_gates(self, params, x) -> tuple[Array, Array]:
        """What the shared and the routed heads are multiplied with, [..., q, 1] each."""
        if "stage" not in params:
            one = jnp.ones((*x.shape[:-1], 1), _score_type(x))
            return one, one
        a = jax.nn.softmax(_score(x, params["stage"]), axis=-1)
        a = 2 * a if self.gates == "released" else a
        return a[..., :1], a[..., 1:]

    def _shared_gates(self, params, x) -> Array:
        if "shared" not in params:
            return jnp.ones((*x.shape[:-1], self.shared), _score_type(x))
        s = jax.nn.softmax(_score(x, params["shared"]), axis=-1)
        return self.shared * s if self.gates == "released" else s

    def _routed_gates(self, p: Array, chosen: Array) -> Array:
        if not self._learned:  # straight through: forward the choice, backward the probability
            return chosen + (p - jax.lax.stop_gradient(p)) if self.straight_through else chosen
        picked = p * chosen
        if self.gates == "released":
            least = jnp.finfo(p.dtype).eps
            picked = self.top_k * picked / jnp.maximum(picked.sum(-1, keepdims=True), least)
        return picked

    def aux(self, params, x_q, side: ja.QuerySide, at: ja.Site) -> MoHSums | None:
        noted = at.noted(side)
        if noted is None:
            return None
        p, chosen = noted
        counted = jnp.ones(p.shape[:-1], bool) if side.valid is None else side.valid
        counted = jnp.broadcast_to(counted, p.shape[:-1]).astype(p.dtype)
        rows = tuple(range(p.ndim - 1))
        entropy = -(p * jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny))).sum(-1)
        weight = counted[..., None]
        return MoHSums(
            probability=(p * weight).sum(rows),
            selected=(chosen.astype(p.dtype) * weight).sum(rows),
            entropy=(entropy * counted).sum(),
            tokens=counted.sum(),
        )

    def losses(self, sums: MoHSums, at: ja.Site) -> dict[str, ja.Loss]:
        tokens = jnp.maximum(sums.tokens, 1)
        share = jax.lax.stop_gradient(sums.selected) / tokens
        value = (sums.probability / tokens * share).sum()
        multiple = at.sizes.output_heads - self.shared if self.balance == "released" else 1
        return {"balance": ja.Loss(multiple * value, self.balance_weight)}

    def declare(self, at: ja.Site) -> ja.Declaration:
        shared, heads = self.shared, at.sizes.output_heads
        axes = {"routed": f"m h[{shared}:]", "shared": f"m h[:{shared}]", "stage": "m two"}
        sets = (tuple(range(shared)), tuple(range(shared, heads)))

        def upgrade(mha, fresh):
            zeros = jax.tree.map(jnp.zeros_like, fresh["heads"].get(at.name, {}))
            return mha | {"heads": mha["heads"] | ({at.name: zeros} if zeros else {})}

        if self._learned and self.gates == "released" and shared + self.top_k == heads:
            exact = ja.Upgrade(upgrade)
        else:
            exact = ja.Upgrade(None, "only released gates with all heads active start as MHA")
        return ja.Declaration(
            {name: axes[name] for name in self._outs(at)},
            exchangeable=tuple(s for s in sets if s),
            upgrade=exact,
        )


def _by_state(params, x: Array) -> Array:
    """Probabilities of the routed heads from the states; a single one has no router."""
    if "routed" not in params:
        return jnp.ones((*x.shape[:-1], 1), _score_type(x))
    return jax.nn.softmax(_finite(_score(x, params["routed"])), axis=-1)


def _score_type(x: Array):
    return at_least_float32(x.dtype)


def _score(x: Array, kernel: Array) -> Array:
    """Router scores, in at least float32: a choice should not hang on half precision."""
    dtype = jnp.promote_types(_score_type(x), kernel.dtype)
    return contract(x.astype(dtype), kernel.astype(dtype), "... q m, m h -> ... q h")


def _finite(scores: Array) -> Array:
    """Scores with NaN as the lowest, so that one bad score does not spread."""
    return jnp.where(jnp.isnan(scores), jnp.finfo(scores.dtype).min, scores)


def _among(best: Array, p: Array) -> Array:
    """Which entries of the last axis are among the best, bool like p."""
    return jax.nn.one_hot(best, p.shape[-1], dtype=bool).any(-2)


def _best(p: Array, k: int) -> Array:
    """The indices of the k largest of the last axis, [..., k]; the lowest index wins a tie."""
    return jax.lax.top_k(jax.lax.stop_gradient(p), k)[1]
