"""The Flax Linen face: `import jaxattn.linen`, in the place of flax.linen.MultiHeadDotProductAttention."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from jaxattn.attention import Attention, attention
from jaxattn.cache import Cache
from jaxattn.masks import Mask, from_flax
from jaxattn.module_args import read_source
from jaxattn.spec import HeadSpec
from jaxattn.transform import HeadTransform, identity

PyTree = Any
Initializer = Callable[..., Any]
PROJECTIONS = {"query": "m h d", "key": "m h d", "value": "m h d", "out": "h v m"}


class MultiHeadDotProductAttention(nn.Module):
    """Multi-head attention whose heads may see each other, as a Flax Linen module.

    y = sum_h heads[h] @ W_O[h] + b_O, with heads composed by `variant`

    Fields, call, parameter names and layout are those of Flax's module, so parameters load both ways:
    `query`, `key`, `value` with kernel [m, h, d] and bias [h, d], `out` with kernel [h, v, m] and bias [m],
    `query_ln` and `key_ln`. One seed draws the same values. The variant's own leaves lie under `heads`.

    What differs: a query row without a visible key gives b_O (Flax: the mean of all values); the softmax
    always runs in at least float32; the dropout draw is another; a decode step may be of several rows.

    Args:
        num_heads: heads h.
        dtype: type to compute in; default that of states and parameters. param_dtype: of the parameters.
        qkv_features: heads times head width; default the width of the query states.
        out_features: width of the output; default that of the query states.
        broadcast_dropout: one dropout draw for all examples and heads. dropout_rate: on attention weights.
        deterministic: evaluation, without dropout; here or in the call, not both.
        precision: of all products, as `jax.default_matmul_precision` takes it.
        kernel_init, bias_init: initialisers; kernels are drawn as [fan_in, fan_out]. One with metadata
            (`nn.with_partitioning`) gives a name to each axis of the kernel as it is stored: three names.
        out_kernel_init, out_bias_init: of the output map; default the other two.
        use_bias: biases of the four projections.
        attention_fn: None, or Flax's default, in whose place `engine` runs. Others are refused.
        decode: keep keys and values in the collection `cache`.
        normalize_qk: Flax's head norm on query and key.
        force_fp32_for_softmax: changes nothing, see above.
        variant: a HeadTransform, for example `variants.moh(shared=2, top_k=4)`.
        d_v: value head width; default that of query and key.
        engine: which engine runs the call; none changes the function.
        head_dropout_rate: dropout on whole heads.

    Raises:
        ValueError: where sizes or options do not fit, naming them and the fix.

    Example:
        >>> layer = MultiHeadDotProductAttention(num_heads=2)
        >>> y, params = layer.init_with_output(jax.random.key(0), jnp.ones((4, 5, 6)))
        >>> y.shape, params["params"]["query"]["kernel"].shape
        ((4, 5, 6), (6, 2, 3))
    """

    num_heads: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: Any = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    attention_fn: Callable[..., Array] | None = None
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    variant: HeadTransform = identity
    d_v: int | None = None
    engine: str = "auto"
    head_dropout_rate: float = 0.0

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
    ) -> Array:
        """Attention of `inputs_q` to itself, or to the rows of `inputs_k` and `inputs_v`.

        Args:
            inputs_q: [..., q, m]; inputs_k, inputs_v: [..., k, m_k]; the second defaults to the first.
            mask: a `ja.masks` value, or a Flax mask [..., h or 1, q, k] or [q, k]; True = visible. With
                `decode`, k counts the rows of the cache, and causality always holds.
            bias: [..., h, q, k], added to the logits.
            deterministic: evaluation; needed only where there is dropout.
            dropout_rng: PRNG key; default that of the stream `dropout`.
            sow_weights: put the softmax's weights, before dropout, into `intermediates`, as
                `attention_weights`.

        A variant's auxiliary losses, weighted, go into the collection `losses` where it is mutable.

        Returns:
            [..., q, m_out].
        """
        itself = all(x is None or x is inputs_q for x in (inputs_k, inputs_v))
        source = read_source(inputs_k, inputs_v)
        attn = self._attention(inputs_q, source)
        params = self._params(attn)
        if self.dtype is not None:
            cast = lambda x: x.astype(self.dtype)
            params, inputs_q, source = jax.tree.map(cast, (params, inputs_q, source))
        engine, capture = self.engine, ("weights",) if sow_weights else ()
        dropout_key = self._dropout_key(deterministic, dropout_rng)
        mask = _as_mask(mask)
        with self._precision():
            if self.decode and self.has_variable("cache", "cached_key"):
                _check_step(itself, bias, dropout_key)
                cache = self._cache(attn, inputs_q, params)
                y, aux, after = attn.decode(params, cache, inputs_q, mask, engine=engine, capture=capture)
                self._keep(after)
            else:
                y, aux = attn.apply(
                    params, inputs_q, source, mask, bias=bias, engine=engine, dropout_key=dropout_key,
                    capture=capture,
                )  # fmt: skip
                if self.decode:
                    self._cache(attn, inputs_q, params)  # an empty one, for the steps to come
        if sow_weights:
            self.sow("intermediates", "attention_weights", aux.captured["weights"])
        if not self.is_initializing():
            for name, loss in aux.losses.items():
                self.sow("losses", name, loss.weight * loss.value)
        return y

    def _attention(self, inputs_q: Array, source: Array | tuple[Array, Array] | None) -> Attention:
        """The pure functions, of sizes that the inputs tell."""
        x_k, x_v = source if isinstance(source, tuple) else (source, source)
        width = lambda x: inputs_q.shape[-1] if x is None else x.shape[-1]
        features = inputs_q.shape[-1] if self.qkv_features is None else self.qkv_features
        if self.num_heads < 1 or features % self.num_heads:
            raise ValueError(
                f"MultiHeadDotProductAttention: qkv_features = {features} does not divide by num_heads = "
                f"{self.num_heads}. Fix: widths that divide."
            )
        if self.attention_fn not in (None, nn.dot_product_attention):
            raise ValueError(
                f"attention_fn: got {self.attention_fn!r}, which would not see the variant. "
                "Fix: None, and engine= for another engine."
            )
        spec = HeadSpec(
            model=inputs_q.shape[-1],
            heads=self.num_heads,
            d_qk=features // self.num_heads,
            d_v=features // self.num_heads if self.d_v is None else self.d_v,
            in_k=width(x_k),
            in_v=width(x_v),
            out=inputs_q.shape[-1] if self.out_features is None else self.out_features,
            use_bias=self.use_bias,
            qk_norm="layer" if self.normalize_qk else None,
            dropout=self.dropout_rate,
            head_dropout=self.head_dropout_rate,
            dropout_shared=("b", "h") if self.broadcast_dropout else (),
        )
        return attention(spec, self.variant)

    def _params(self, attn: Attention) -> PyTree:
        """The tree that `attn` takes, each leaf drawn where Flax draws it."""
        dtype = self.param_dtype
        shapes = jax.eval_shape(attn.init, jax.random.key(0))
        params = {}
        for name in PROJECTIONS:
            at_out = name == "out"
            kernel_init = self.out_kernel_init if at_out and self.out_kernel_init else self.kernel_init
            bias_init = self.out_bias_init if at_out and self.out_bias_init else self.bias_init
            leaves = {leaf: shapes[name][leaf].shape for leaf in shapes[name]}
            params[name] = _Linear(leaves, 2 if at_out else 1, kernel_init, bias_init, dtype, name=name)()
        for name in {"query_ln", "key_ln"} & set(shapes):
            params[name] = _Norm(shapes[name]["scale"].shape, dtype, name=name)()
        own = {}
        if shapes["heads"]:
            own = self.param("heads", lambda rng: attn.init(rng, dtype)["heads"])
        return {**params, "heads": own}

    def _dropout_key(self, deterministic: bool | None, dropout_rng: Array | None) -> Array | None:
        if self.dropout_rate == 0 and self.head_dropout_rate == 0:
            return None
        if nn.merge_param("deterministic", self.deterministic, deterministic):
            return None
        return self.make_rng("dropout") if dropout_rng is None else dropout_rng

    def _precision(self):
        """What sets the precision of the products inside."""
        if self.precision is None:
            return contextlib.nullcontext()
        name = (
            self.precision.name.lower() if isinstance(self.precision, jax.lax.Precision) else self.precision
        )
        if not isinstance(name, str):
            raise TypeError(f"precision: got {name!r}, expected one. Fix: jax.lax.Precision, or its name.")
        return jax.default_matmul_precision(name)

    def _cache(self, attn: Attention, x: Array, params: PyTree) -> Cache:
        """What the collection `cache` holds; while it holds nothing, a cache for as many rows as `x` has."""
        batch, dtype = x.shape[:-2], jnp.promote_types(x.dtype, params["key"]["kernel"].dtype)
        size = x.shape[-2]
        if self.has_variable("cache", "cached_key"):
            size = self.get_variable("cache", "cached_key").shape[-3]
        empty = jax.eval_shape(lambda: attn.empty_cache(batch, size, dtype=dtype))
        rows, tree = jax.tree_util.tree_flatten_with_path(empty.side)
        held = {_name(path): leaf for path, leaf in rows}
        held |= {"cache_index": empty.count, "cache_refused": empty.refused}
        for name, leaf in held.items():
            held[name] = self.variable("cache", name, jnp.zeros, leaf.shape, leaf.dtype).value
        *side, count, refused = held.values()
        return dataclasses.replace(empty, side=jax.tree.unflatten(tree, side), count=count, refused=refused)

    def _keep(self, cache: Cache) -> None:
        """Put a cache into the collection `cache`; keys, values and index have Flax's names."""
        rows, _ = jax.tree_util.tree_flatten_with_path(cache.side)
        for path, leaf in rows:
            self.put_variable("cache", _name(path), leaf)
        self.put_variable("cache", "cache_index", cache.count)
        self.put_variable("cache", "cache_refused", cache.refused)


class MultiHeadAttention(MultiHeadDotProductAttention):
    """The same under Flax's other name, by which Linen names its parameters: `MultiHeadAttention_0`."""


class _Linear(nn.Module):
    """The kernel and bias of one projection, drawn flat as [fan_in, fan_out].

    Attributes:
        shapes: of the leaves.
        inward: how many axes of the kernel come in.
    """

    shapes: dict[str, tuple[int, ...]]
    inward: int
    kernel_init: Initializer
    bias_init: Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        shape = self.shapes["kernel"]
        flat = math.prod(shape[: self.inward]), math.prod(shape[self.inward :])
        leaves = {"kernel": self.param("kernel", self._draw, self.kernel_init, flat, shape)}
        if "bias" in self.shapes:
            shape = self.shapes["bias"]
            leaves["bias"] = self.param("bias", self._draw, self.bias_init, (math.prod(shape),), shape)
        return leaves

    def _draw(self, rng: Array, init: Initializer, flat: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        """Drawn values in their stored shape; a box around them stays, if it names each of their axes."""
        drawn = init(rng, flat, self.dtype)
        names = getattr(drawn, "names", None)
        if names is not None and len(names) != len(shape):
            axes = PROJECTIONS[str(self.name)]
            axes = axes if len(shape) == 3 else axes.removeprefix("m ") if self.name != "out" else "m"
            raise ValueError(
                f"{self.name}: the initialiser gives the names {names}, expected one for each of the axes "
                f'"{axes}" (shape {shape}). Fix: nn.with_partitioning(init, ({", ".join(axes.split())})); '
                "the output map, kernel [h, v, m], has out_kernel_init and out_bias_init of its own."
            )
        return jax.tree.map(lambda x: x.reshape(shape), drawn)


class _Norm(nn.Module):
    """The scale of one head norm."""

    shape: tuple[int, ...]
    dtype: DTypeLike

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        return {"scale": self.param("scale", nn.initializers.ones, self.shape, self.dtype)}


def _as_mask(mask: Mask | Array | None) -> Mask | None:
    """A Flax mask may leave out axes in front, as arrays broadcast."""
    if mask is None or isinstance(mask, Mask):
        return mask
    mask = jnp.asarray(mask)
    return from_flax(mask.reshape((1,) * (3 - mask.ndim) + mask.shape))


def _check_step(itself: bool, bias: Array | None, dropout_key: Array | None) -> None:
    """Raise for what a step of decoding does not take."""
    for what, given, fix in (
        ("inputs_k", not itself, "decode=False: the keys of another sequence do not grow"),
        ("bias", bias is not None, "leave it out; masks may be given"),
        ("dropout", dropout_key is not None, "deterministic=True"),
    ):
        if given:
            raise ValueError(f"{what}: a step of decode=True is self-attention without it. Fix: {fix}.")


def _name(path: tuple[Any, ...]) -> str:
    """The variable of an array of a key side, as cached_key or cached_pre_0_down."""
    return "_".join(["cached", *(str(getattr(part, "name", getattr(part, "idx", ""))) for part in path)])
