"""The Flax NNX face: parameters live in a module, all mathematics in `jaxattn.attention`."""

from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxattn.attention import Initializer, attention
from jaxattn.masks import Mask, from_flax
from jaxattn.spec import HeadSpec, Rotary
from jaxattn.transform import HeadTransform, identity

PyTree = Any
LEAVES = ("query", "key", "value", "out", "query_ln", "key_ln", "heads")


class MultiHeadAttention(nnx.Module):
    """Multi-head attention whose heads may see each other, as a Flax NNX module.

    y = sum_h heads[h] @ W_O[h] + b_O, with heads composed by `variant`

    Parameters have Flax's names and layout: `query`, `key`, `value` with kernel [m, h, d] and bias [h, d],
    `out` with kernel [h, v, m] and bias [m]; the variant's own leaves lie under `heads`.

    Args:
        num_heads: query heads h.
        in_features: width m of the query states.
        qkv_features: heads times head width of query, key and value; default in_features.
        out_features: width of the output; default in_features.
        num_kv_heads: fewer key and value heads (GQA, MQA).
        in_kv_features: width of the key and value states; default in_features.
        variant: a HeadTransform, for example `variants.moh(shared=2, top_k=4)`.
        d_v: value head width; default that of query and key.
        dtype: type to compute in; default that of states and parameters. param_dtype: of the parameters.
        broadcast_dropout: one dropout draw for all examples and heads, as in Flax.
        dropout_rate: on attention weights; head_dropout_rate: on whole heads.
        deterministic: evaluation, without dropout; the call may override it.
        kernel_init, bias_init: initialisers; kernels are drawn as [fan_in, fan_out].
        use_bias: biases of the four projections.
        normalize_qk: Flax's head norm on query and key; `qk_norm` chooses one by name.
        rotary, scale, softcap: as in `HeadSpec`.
        engine: which engine runs the call; none changes the function.
        rngs: `nnx.Rngs`: `params` draws the parameters; `dropout`, kept, the dropout.

    Raises:
        ValueError: where sizes do not fit, naming both numbers and the fix.

    Example:
        >>> layer = MultiHeadAttention(num_heads=2, in_features=6, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((4, 5, 6))).shape
        (4, 5, 6)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        variant: HeadTransform = identity,
        d_v: int | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        head_dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        use_bias: bool = True,
        normalize_qk: bool = False,
        qk_norm: Literal["rms", "layer"] | None = None,
        rotary: Rotary | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        engine: str = "auto",
        rngs: nnx.Rngs,
    ):
        qkv_features = in_features if qkv_features is None else qkv_features
        if num_heads < 1 or qkv_features % num_heads:
            raise ValueError(
                f"MultiHeadAttention: qkv_features = {qkv_features} does not divide by num_heads = "
                f"{num_heads}. Fix: widths that divide."
            )
        kv_features = in_features if in_kv_features is None else in_kv_features
        spec = HeadSpec(
            model=in_features,
            heads=num_heads,
            kv_heads=cast(Any, num_kv_heads),
            d_qk=qkv_features // num_heads,
            d_v=qkv_features // num_heads if d_v is None else d_v,
            in_k=kv_features,
            in_v=kv_features,
            out=cast(Any, out_features),
            use_bias=use_bias,
            scale=cast(Any, scale),
            rotary=rotary,
            qk_norm="layer" if normalize_qk and qk_norm is None else qk_norm,
            dropout=dropout_rate,
            head_dropout=head_dropout_rate,
            dropout_shared=("b", "h") if broadcast_dropout else (),
            softcap=softcap,
        )
        self.attn = nnx.static(attention(spec, variant))
        params = self.attn.init(rngs.params(), param_dtype, kernel_init, bias_init)
        for name, leaves in params.items():
            setattr(self, name, _as_node(leaves))
        self.dtype = dtype
        self.deterministic = deterministic
        self.engine = engine
        uses_dropout = dropout_rate > 0 or head_dropout_rate > 0
        if uses_dropout and not ("dropout" in rngs or "default" in rngs):
            raise ValueError(
                f"rngs: no stream for dropout, got {', '.join(rngs)}. Fix: nnx.Rngs(params=..., dropout=...)."
            )
        self.rngs = rngs.dropout.fork() if uses_dropout else None

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Array | None = None,
        positions: Array | tuple[Array | None, Array | None] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        capture: tuple[str, ...] = (),
        return_aux: bool = False,
    ) -> Any:
        """Attention of `inputs_q` to itself, or to the rows of `inputs_k` and `inputs_v`.

        Args:
            inputs_q: [..., q, m]; inputs_k, inputs_v: [..., k, m_k]; the second defaults to the first.
            mask: a `ja.masks` value, or a boolean Flax mask [..., h or 1, q, k]; True = visible.
            bias, positions, capture: as in `Attention.apply`.
            deterministic, rngs: override what the module holds.
            return_aux: also return `Aux`, with auxiliary losses and captured arrays.

        Raises:
            ValueError: when dropout is on and there is no key to draw it with.
        """
        source = None
        if inputs_k is not None:
            source = inputs_k if inputs_v is None else (inputs_k, inputs_v)
        elif inputs_v is not None:
            raise ValueError("inputs_v: given without inputs_k. Fix: give inputs_k too, or neither.")
        params, (inputs_q, source) = self.params(), (inputs_q, source)
        if self.dtype is not None:
            params, inputs_q, source = _cast((params, inputs_q, source), self.dtype)
        y, aux = self.attn.apply(
            params,
            inputs_q,
            source,
            _as_mask(mask),
            bias=bias,
            engine=self.engine,
            dropout_key=self._dropout_key(deterministic, rngs),
            positions=positions,
            capture=capture,
        )
        return (y, aux) if return_aux else y

    def params(self) -> PyTree:
        """The parameters as the plain tree that `self.attn` takes."""
        return {name: _as_dict(getattr(self, name)) for name in LEAVES if hasattr(self, name)}

    def _dropout_key(self, deterministic: bool | None, rngs: Any) -> Array | None:
        spec = self.attn.spec
        if spec.dropout == 0 and spec.head_dropout == 0:
            return None
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic is None:
            raise ValueError(
                f"deterministic: got None with dropout_rate = {spec.dropout}, head_dropout_rate = "
                f"{spec.head_dropout}. Fix: say deterministic=True (evaluation) or False (training), "
                "here or in the constructor."
            )
        if deterministic:
            return None
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError("rngs: training with dropout needs a PRNG key. Fix: rngs=nnx.Rngs(...).")
        return rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs()


def _as_node(leaves: PyTree) -> Any:
    """A tree of arrays as a module's attribute: dicts of parameters."""
    if isinstance(leaves, dict):
        return nnx.Dict({name: _as_node(leaf) for name, leaf in leaves.items()})
    return nnx.Param(leaves)


def _as_dict(node: Any) -> PyTree:
    if isinstance(node, nnx.Dict):
        return {name: _as_dict(leaf) for name, leaf in node.items()}
    return node[...]


def _cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _as_mask(mask: Mask | Array | None) -> Mask | None:
    if mask is None or isinstance(mask, Mask) or getattr(mask, "dtype", None) != jnp.bool_:
        return mask  # pyright: ignore[reportReturnType]  (what is no mask is refused by name in apply)
    return from_flax(mask)
