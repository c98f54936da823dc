"""The form: what each query row brings, what each key row brings, what all pairs share.

    logits[hl,q,k] = scale * <query[q,hl], key[k,key_of(hl)]> + key_side.bias[k,hl]
    logits         = pre mixes, hl -> hs, per pair (q, k)
    logits        += pair bias; soft cap; then visibility
    weights[hs]    = softmax over keys (a row without a visible key: zeros)
    weights        = post mixes, hs -> hv; hidden pairs zero again
    heads[q,hv]    = sum_k weights[hv,q,k] * value[k,value_of(hv)];  then finish, gate

Variants compile to these values, engines execute them, everything else reads them.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxattn.axes import same_rank

PyTree = Any


class Factors(NamedTuple):
    """What one row adds to one mix stage: a linear map over heads, [i] -> [o].

    out[o] += sum_r (sum_i x[i] down[i,r]) up[r,o]  +  x[o] diag[o]  +  sum_i x[i] dense[i,o]

    Attributes:
        down: [..., n, g, i, r] and up: [..., n, g, r, o]: a low-rank map inside each group of heads;
            n is q or k.
        diag: [..., n, h], a factor for each head.
        dense: [..., n, i, o], a whole matrix for each row.
    """

    down: Array | None = None
    up: Array | None = None
    diag: Array | None = None
    dense: Array | None = None


FACTOR_AXES = (4, 4, 2, 3)  # axes of down, up, diag, dense from the row axis on


class QuerySide(NamedTuple):
    """What each query position contributes, from target states only.

    Attributes:
        query: [..., q, hl, d].
        pre, post: row factors of each mix stage (None where a stage has none from this side).
        gate: [..., q, hv, 1] or [..., q, hv, v], multiplies the heads.
        valid: [..., q] bool, False for padding rows (they count in no statistic).
        position: [..., q] integers; None is 0, 1, 2, ...
        head: [..., q, a] distinct indices, where only the active heads are held: `query` is then
            [..., q, a, d], and the gates of all others are 0.
        notes: what a transform keeps for its own `aux`, by its name; engines do not read it.
    """

    query: Array
    pre: tuple[Factors | None, ...] = ()
    post: tuple[Factors | None, ...] = ()
    gate: Array | None = None
    valid: Array | None = None
    position: Array | None = None
    head: Array | None = None
    notes: dict[str, PyTree] = {}


class KeySide(NamedTuple):
    """What each key position contributes, from source states only. A cache is one of these.

    Attributes:
        key: [..., k, hK, d].
        value: [..., k, hV, v].
        bias: [..., k, hl], added to the logits.
        pre, post: row factors of each mix stage.
        valid: [..., k] bool, False for rows that no query may see.
        position: [..., k] integers; None is 0, 1, 2, ...
    """

    key: Array
    value: Array
    bias: Array | None = None
    pre: tuple[Factors | None, ...] = ()
    post: tuple[Factors | None, ...] = ()
    valid: Array | None = None
    position: Array | None = None


def zero_rows(x: Array, kept: Array | None, core: int) -> Array:
    """`x` with the rows zero that are not kept, whatever they held: NaN times zero would stay NaN.

    Args:
        x: [..., t, ...], with `core` axes from t on.
        kept: bool [..., t]; its leading axes broadcast to those of x. None keeps all.

    Example:
        >>> zero_rows(jnp.array([[1.0], [jnp.nan]]), jnp.array([True, False]), core=2).tolist()
        [[1.0], [0.0]]
    """
    if kept is None:
        return x
    kept = jnp.asarray(kept)
    lead = (1,) * max(0, x.ndim - core - (kept.ndim - 1))
    return jnp.where(kept.reshape(*lead, *kept.shape, *(1,) * (core - 1)), x, jnp.zeros((), x.dtype))


def calm_rows(x: Array, seen: Array | None, core: int) -> Array:
    """`x` with unseen rows zero where a product with them could be infinite or NaN.

    Weights of hidden pairs are exactly zero, and zero times a number is zero: rows of ordinary size are
    left as they are. Rows with an entry that is not finite, or above a root of the type's maximum, are not:
    the eighth root, as a mixed logit is a product of a key and two factors of each mix; the second of
    float16, whose products run in float32.

    Args:
        x: [..., t, ...], with `core` axes from t on.
        seen: bool [..., t], False for rows that are hidden from every other row; None leaves all as they are.
    """
    if seen is None:
        return x
    limit = float(jnp.finfo(x.dtype).max) ** (1 / 2 if x.dtype == jnp.float16 else 1 / 8)
    ordinary = jnp.all(jnp.abs(x) <= limit, axis=tuple(range(1 - core, 0)))
    return zero_rows(x, operator.or_(*same_rank(seen, ordinary)), core)


def hide_rows(side: "KeySide", seen: Array | None) -> "KeySide":
    """The key side whose rows that are not seen, bool [..., k], cannot make a product infinite or NaN."""
    return side._replace(
        key=calm_rows(side.key, seen, 3),
        value=calm_rows(side.value, seen, 3),
        bias=None if side.bias is None else calm_rows(side.bias, seen, 2),
        pre=_calm_stages(side.pre, seen),
        post=_calm_stages(side.post, seen),
    )


def hide_queries(side: "QuerySide", valid: Array | None) -> "QuerySide":
    """The query side whose rows that are not valid, bool [..., q], cannot make a product infinite or NaN."""
    return side._replace(
        query=calm_rows(side.query, valid, 3),
        gate=None if side.gate is None else calm_rows(side.gate, valid, 3),
        pre=_calm_stages(side.pre, valid),
        post=_calm_stages(side.post, valid),
    )


def _calm_stages(stages: tuple[Factors | None, ...], seen: Array | None) -> tuple[Factors | None, ...]:
    calm = lambda x, core: None if x is None else calm_rows(x, seen, core)
    return tuple(None if f is None else Factors(*map(calm, f, FACTOR_AXES)) for f in stages)


def static_field(default: Any = dataclasses.MISSING) -> Any:
    """A field that is a fact of the program, not a leaf of the tree."""
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mix:
    """The static part of one mix stage: out = x @ matrix (+ x if skip) + bias.

    Attributes:
        matrix: [i, o], or [g, i, o] for groups that do not see each other; None is the identity.
        bias: [o]; after the softmax it reaches visible pairs only.
        skip: whether the identity is added to the matrix.
    """

    matrix: Array | None = None
    bias: Array | None = None
    skip: bool = static_field(False)

    @property
    def groups(self) -> int:
        """g: groups of heads that do not see each other."""
        return self.matrix.shape[0] if self.matrix is not None and self.matrix.ndim == 3 else 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairBias:
    """A logit bias that positions decide: `of(params, q_position, k_position) -> [..., hs, q, k]`.

    Attributes:
        params: arrays, learned or not.
        of: a function of a module, or a frozen dataclass with `__call__`: equal rules are then equal, hash
            alike and can be pickled, so that two attentions made alike share one compiled program. A lambda
            or a local function works, but equals only itself.
    """

    params: PyTree
    of: Callable[[PyTree, Array, Array], Array] = static_field()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coupling:
    """What is the same for every pair: learned constants and static facts.

    Attributes:
        scale: factor of the scores.
        pre, post: the static part of each mix stage.
        pair_bias: a bias by position, after the pre mixes.
        key_of, value_of: the key head of each logit head and the value head of each output head;
            None is block order, head i reads i // group.
        softcap: c of c * tanh(logits / c).
        dropout, head_dropout: rates; dropout_site: what the first falls on, the weights that meet
            the values or those right after the softmax.
        dropout_shared: axes among b, h, q whose rows share one draw.
    """

    scale: float = static_field()
    pre: tuple[Mix, ...] = ()
    post: tuple[Mix, ...] = ()
    pair_bias: PairBias | None = None
    key_of: tuple[int, ...] | None = static_field(None)
    value_of: tuple[int, ...] | None = static_field(None)
    softcap: float | None = static_field(None)
    dropout: float = static_field(0.0)
    head_dropout: float = static_field(0.0)
    dropout_site: Literal["values", "softmax"] = static_field("values")
    dropout_shared: tuple[Literal["b", "h", "q"], ...] = static_field(())
