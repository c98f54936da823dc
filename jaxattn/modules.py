"""The Flax NNX face: parameters live in a module, all mathematics in `jaxattn.attention`.

It stands where `flax.nnx.MultiHeadAttention` stood: the same arguments, parameter names and layout.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxattn import module_call
from jaxattn.attention import Initializer, attention
from jaxattn.cache import Cache
from jaxattn.masks import Mask
from jaxattn.module_args import at_precision, head_width, precision_name, read_source
from jaxattn.module_call import SOWN, Asked, Done, Face
from jaxattn.module_state import (
    GROUPS,
    cache_arrays,
    check_functions,
    held_cache,
    new_cache,
    new_params,
    params_of,
)
from jaxattn.module_state import AuxLoss as AuxLoss
from jaxattn.sides import KeySide
from jaxattn.spec import HeadSpec, Rotary
from jaxattn.transform import HeadTransform, identity

PyTree = Any
Metadata = Mapping[str, Any]


class MultiHeadAttention(nnx.Module):
    """Multi-head attention whose heads may see each other, in the place of `flax.nnx.MultiHeadAttention`.

    y = sum_h heads[h] @ W_O[h] + b_O, with heads composed by `variant`

    Parameters have Flax's names and layout: `query`, `key`, `value` with kernel [m, h, d] and bias [h, d],
    `out` with kernel [h, v, m] and bias [m], `query_ln`, `key_ln` with scale [d]; the variant's own leaves
    lie under `heads`. A query without a visible key gives b_O.

    Args:
        num_heads: query heads h.
        in_features: width m of the query states.
        qkv_features: heads times head width of query, key and value; default in_features.
        out_features: width of the output; default in_features.
        num_kv_heads: fewer key and value heads (GQA, MQA).
        in_kv_features: width of the key and value states; default in_features.
        dtype: type to compute in; default that of states and parameters. param_dtype: of the parameters.
        broadcast_dropout: one dropout draw for all examples and heads, as in Flax.
        dropout_rate: on attention weights; head_dropout_rate: on whole heads.
        deterministic: evaluation, without dropout; the call may override it.
        precision: of every matrix product, a name or `jax.lax.Precision`.
        kernel_init, bias_init: initialisers; kernels are drawn as [fan_in, fan_out]. out_kernel_init,
            out_bias_init: those of `out`, where they differ.
        use_bias: biases of the four projections.
        attention_fn: None or `nnx.dot_product_attention`, which both mean the form of this library.
        decode: whether calls append to the cache and attend to it; the call may override it.
        normalize_qk: Flax's head norm on query and key; `qk_norm` chooses one by name.
        qkv_promote_dtype, out_promote_dtype, ln_promote_dtype: None or Flax's own, which `dtype` steers.
        rngs: `nnx.Rngs`: `params` draws the parameters; `dropout`, kept where keep_rngs, the dropout.
        kernel_metadata, bias_metadata, out_kernel_metadata, out_bias_metadata, query_ln_scale_metadata,
            key_ln_scale_metadata: metadata of each `nnx.Param`; those of `out` default to the first two.
        variant: a HeadTransform, for example `variants.moh(shared=2, top_k=4)`.
        d_v: value head width; default that of query and key.
        qk_norm, qk_norm_eps, rotary, scale, softcap: as in `HeadSpec`.
        engine: which engine runs the call; none changes the function.
        name_axes: every `nnx.Param` also carries the names of its axes as metadata, `axes=("m", "hl", "d")`.
            Off by default: trees of `nnx.Param` map together only where their metadata are equal.

    Raises:
        ValueError: where sizes do not fit, naming both numbers and the fix; for an `attention_fn`, a
            promotion or a precision that this form cannot honour.

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
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Any = None,
        kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., Array] | None = None,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: Callable[..., Any] | None = None,
        out_promote_dtype: Callable[..., Any] | None = None,
        ln_promote_dtype: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata | None = None,
        out_kernel_metadata: Metadata | None = None,
        bias_metadata: Metadata | None = None,
        out_bias_metadata: Metadata | None = None,
        query_ln_scale_metadata: Metadata | None = None,
        key_ln_scale_metadata: Metadata | None = None,
        variant: HeadTransform = identity,
        d_v: int | None = None,
        head_dropout_rate: float = 0.0,
        qk_norm: Literal["rms", "layer"] | None = None,
        qk_norm_eps: float = 1e-6,
        rotary: Rotary | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        engine: str = "auto",
        name_axes: bool = False,
    ):
        check_functions(attention_fn, qkv=qkv_promote_dtype, out=out_promote_dtype, ln=ln_promote_dtype)
        precision_name(precision)
        features = in_features if qkv_features is None else qkv_features
        width = head_width("MultiHeadAttention", features, num_heads, qkv_features is not None)
        kv_features = in_features if in_kv_features is None else in_kv_features
        spec = HeadSpec(
            model=in_features,
            heads=num_heads,
            kv_heads=cast(Any, num_kv_heads),
            d_qk=width,
            d_v=width if d_v is None else d_v,
            in_k=kv_features,
            in_v=kv_features,
            out=cast(Any, out_features),
            use_bias=use_bias,
            scale=cast(Any, scale),
            rotary=rotary,
            qk_norm="layer" if normalize_qk and qk_norm is None else qk_norm,
            qk_norm_eps=qk_norm_eps,
            dropout=dropout_rate,
            head_dropout=head_dropout_rate,
            dropout_shared=("b", "h") if broadcast_dropout else (),
            softcap=softcap,
        )
        self.attn = nnx.static(attention(spec, variant))
        inits = kernel_init, bias_init, out_kernel_init, out_bias_init
        metadata = {
            "kernel": kernel_metadata,
            "bias": bias_metadata,
            "out/kernel": out_kernel_metadata or kernel_metadata,
            "out/bias": out_bias_metadata or bias_metadata,
            "query_ln/scale": query_ln_scale_metadata,
            "key_ln/scale": key_ln_scale_metadata,
        }
        nodes = new_params(self.attn, rngs.params(), param_dtype, inits, metadata, name_axes)
        for name in GROUPS:
            setattr(self, name, nodes.get(name, nnx.data(None)))
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.deterministic = deterministic
        self.precision = precision
        self.decode = decode
        self.engine = engine
        uses_dropout = dropout_rate > 0 or head_dropout_rate > 0
        if uses_dropout and keep_rngs and not ("dropout" in rngs or "default" in rngs):
            raise ValueError(
                f"rngs: no stream for dropout, got {', '.join(rngs)}. Fix: nnx.Rngs(params=..., dropout=...)."
            )
        self.rngs = rngs.dropout.fork() if uses_dropout and keep_rngs else None
        self.cached_key: nnx.Cache[Any] | None = nnx.data(None)
        self.cached_value: nnx.Cache[Any] | None = nnx.data(None)
        self.cache_index: nnx.Cache[Any] | None = nnx.data(None)

    # Facts of the built layer; a property, so that nobody sets one and believes that it has an effect.
    num_heads = property(lambda self: self.attn.spec.heads)
    num_kv_heads = property(lambda self: self.attn.spec.kv_heads)
    in_features = property(lambda self: self.attn.spec.in_q)
    in_kv_features = property(lambda self: self.attn.spec.in_k)
    out_features = property(lambda self: self.attn.spec.out)
    head_dim = property(lambda self: self.attn.spec.d_qk)
    qkv_features = property(lambda self: self.attn.spec.heads * self.attn.spec.d_qk)
    use_bias = property(lambda self: self.attn.spec.use_bias)
    normalize_qk = property(lambda self: self.attn.spec.qk_norm is not None)
    dropout_rate = property(lambda self: self.attn.spec.dropout)
    broadcast_dropout = property(lambda self: bool(self.attn.spec.dropout_shared))

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Array | None = None,
        bias: Array | None = None,
        valid: Array | None = None,
        positions: Array | tuple[Array | None, Array | None] | None = None,
        capture: tuple[str, ...] = (),
        return_aux: bool = False,
    ) -> Any:
        """Attention of `inputs_q` to itself, or to the rows of `inputs_k` and `inputs_v`.

        Args:
            inputs_q: [..., q, m]; inputs_k, inputs_v: [..., k, m_k]; the second defaults to the first.
            mask: a `ja.masks` value, or a Flax mask that broadcasts to [..., h, q, k]; True = visible.
            deterministic, rngs, decode: override what the module holds.
            sow_weights: sow the weights that meet the values, before dropout, [..., h, q, k], as
                `attention_weights` of `nnx.Intermediate`.
            is_causal: hide keys at later positions than the query's, beside `mask`; refused in decode,
                which is always causal.
            out_sharding: of the output; qkv_sharding: of projected queries, keys and values [..., t, h, d].
            input_positions: [..., t], positions of queries and keys, as Flax names them.
            bias: [..., h, q, k] added to the logits.
            valid: [..., k] bool, source rows that are real; the others are zeroed, and hidden.
            positions, capture: as in `Attention.apply`.
            return_aux: also return `Aux`, with auxiliary losses and captured arrays. Without it, weighted
                losses are sown for `nnx.capture(model, AuxLoss)`.

        Raises:
            ValueError: when dropout is on and there is no key to draw it with; in decode without a cache,
                with `inputs_k`, or, outside of jit, with more rows than fit.
        """
        decode = self.decode if decode is None else decode
        asked = Asked(
            mask=mask, bias=bias, dropout_key=self._dropout_key(deterministic, rngs), is_causal=is_causal,
            valid=valid, positions=positions, input_positions=input_positions, sow_weights=sow_weights,
            capture=capture, out_sharding=out_sharding, qkv_sharding=qkv_sharding,
        )  # fmt: skip
        inputs = (inputs_q, inputs_k, inputs_v)
        cache = self._cache() if decode else None
        done = module_call.run(self._face(), self.attn, self._params(), inputs, asked, cache)
        if done.cache is not None:
            for name, value in cache_arrays(done.cache).items():
                getattr(self, name).set_value(value)
        return self._finish(done, return_aux)

    def key_side(
        self,
        inputs_k: Array,
        inputs_v: Array | None = None,
        valid: Array | None = None,
        positions: Array | None = None,
    ) -> KeySide:
        """A source, projected once, for any number of `attend`.

        Args:
            inputs_k, inputs_v: [..., k, m_k]; the second defaults to the first.
            valid: [..., k] bool; rows that are not are zeroed before they are projected, and hidden.
            positions: [..., k]; None is 0, 1, 2, ...

        Example:
            >>> layer = MultiHeadAttention(num_heads=2, in_features=6, in_kv_features=3, rngs=nnx.Rngs(0))
            >>> side = layer.key_side(jnp.ones((4, 7, 3)))
            >>> layer.attend(jnp.ones((4, 5, 6)), side).shape
            (4, 5, 6)
        """
        params, source = self._face().cast(self._params(), read_source(inputs_k, inputs_v))
        with at_precision(self.precision):
            return self.attn.key_side(params, source, valid, positions)

    def attend(
        self,
        inputs_q: Array,
        side: KeySide,
        mask: Mask | Array | None = None,
        bias: Array | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        positions: Array | None = None,
        valid: Array | None = None,
        capture: tuple[str, ...] = (),
        return_aux: bool = False,
    ) -> Any:
        """Attention of `inputs_q` against a source that `key_side` projected.

        Args:
            inputs_q: [..., q, m].
            side: what `key_side` returned; its invalid rows are hidden.
            valid: [..., q] bool; query rows that are not are zeroed and count in no statistic.
            positions: [..., q]; None counts from 0.
            mask, bias, deterministic, rngs, sow_weights, capture, return_aux: as in the call.
        """
        asked = Asked(
            mask=mask, bias=bias, dropout_key=self._dropout_key(deterministic, rngs), valid=valid,
            positions=positions, sow_weights=sow_weights, capture=capture,
        )  # fmt: skip
        done = module_call.attend(self._face(), self.attn, self._params(), inputs_q, side, asked)
        return self._finish(done, return_aux)

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike | None = None) -> None:
        """Put an empty cache into the module, for calls with decode=True.

        Args:
            input_shape: [..., size, m]: batch axes, rows that fit, width of the states.
            dtype: of the rows; default that of the module, else that of its parameters.

        Example:
            >>> layer = MultiHeadAttention(num_heads=2, in_features=6, decode=True, rngs=nnx.Rngs(0))
            >>> layer.init_cache((4, 8, 6))
            >>> layer(jnp.ones((4, 3, 6), jnp.float32)).shape, int(layer.cache_index[...])
            ((4, 3, 6), 3)
        """
        if len(input_shape) < 2 or input_shape[-1] != self.in_features:
            raise ValueError(
                f"init_cache: input_shape = {tuple(input_shape)}, expected [..., size, m] with width m = "
                f"{self.in_features}. Fix: the shape of the whole input, batch axes first."
            )
        *batch, size, _ = input_shape
        self._new_cache(tuple(batch), size, dtype)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """What `nnx.view` sets.

        Args:
            deterministic: evaluation, without dropout.
            decode: whether calls append to the cache and attend to it.
            batch_size: batch axes of the cache.
            max_length: rows that fit into the cache; with another size than it has, a new one, empty.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is None:
            return
        self.decode = decode
        if not decode or (self.cached_key is not None and batch_size is None and max_length is None):
            return
        if batch_size is None or max_length is None:
            what = "batch_size" if batch_size is None else "max_length"
            raise TypeError(
                f"set_view: decode=True makes a cache, and {what} is None. "
                "Fix: nnx.view(model, decode=True, batch_size=..., max_length=...)."
            )
        batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        if self.cached_key is not None and self.cached_key.shape[:-2] == (*batch, max_length):
            return
        self._new_cache(batch, max_length, None)

    def params(self) -> PyTree:
        """The parameters as the plain tree that `self.attn` takes."""
        return self._params()

    def _params(self) -> PyTree:
        return params_of({name: getattr(self, name) for name in GROUPS})

    def _face(self) -> Face:
        widths = "in_features=...", "in_kv_features=..."
        new_cache = "layer.init_cache({shape}, dtype={dtype}), then the prompt again"
        return Face(self.dtype, self.precision, self.engine, *widths, new_cache)

    def _new_cache(self, batch: tuple[int, ...], size: int, dtype: DTypeLike | None) -> None:
        if dtype is None:
            dtype = self.param_dtype if self.dtype is None else self.dtype
        for name, variable in new_cache(self.attn, batch, size, dtype).items():
            setattr(self, name, variable)

    def _cache(self) -> Cache:
        if self.cached_key is None or self.cache_index is None:
            raise ValueError(
                "decode: the module has no cache. Fix: layer.init_cache(input_shape), or nnx.view(model, "
                "decode=True, batch_size=..., max_length=...)."
            )
        return held_cache(self.attn, vars(self))

    def _finish(self, done: Done, return_aux: bool) -> Any:
        if done.weights is not None:
            self.sow(nnx.Intermediate, SOWN, done.weights)
        if return_aux:
            return done.y, done.aux
        kinds = {type(variable) for variable in getattr(self, "__captures__", ())}
        kind = AuxLoss if AuxLoss in kinds else nnx.Intermediate
        if kind in kinds:  # outside of `nnx.capture`, sowing would change the module
            for name, loss in done.losses().items():
                self.sow(kind, name, loss)
        return done.y

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
