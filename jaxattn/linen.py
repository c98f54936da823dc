"""The Flax Linen face: `import jaxattn.linen`, in the place of flax.linen.MultiHeadDotProductAttention."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from jaxattn import module_call
from jaxattn.attention import Attention, attention
from jaxattn.cache import Cache
from jaxattn.masks import Mask
from jaxattn.module_args import AXES, check_axis_names, head_width
from jaxattn.module_call import SOWN, Asked, Face
from jaxattn.module_state import cache_arrays, cache_of, cache_shape
from jaxattn.params import expected
from jaxattn.spec import HeadSpec, Rotary
from jaxattn.transform import HeadTransform, identity

PyTree = Any
Initializer = Callable[..., Any]
PROJECTIONS = ("query", "key", "value", "out")
NEW_CACHE = "an empty cache for states of shape {shape} in {dtype}, as init makes it, then the prompt again"


def lecun_normal(rng: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
    """Flax's default for kernels, as a function with a name, so that a layer can be pickled."""
    return nn.initializers.lecun_normal()(rng, shape, dtype)


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
            (`nn.with_logical_partitioning`) names the axes of the kernel as it is stored; fewer names than
            axes are for the leading ones, with a warning.
        out_kernel_init, out_bias_init: of the output map; default the other two.
        use_bias: biases of the four projections.
        attention_fn: None, or Flax's default, in whose place `engine` runs. Others are refused.
        decode: keep keys and values in the collection `cache`.
        normalize_qk: Flax's head norm on query and key; `qk_norm` chooses one by name.
        force_fp32_for_softmax: changes nothing, see above.
        variant: a HeadTransform, for example `variants.moh(shared=2, top_k=4)`.
        d_v: value head width; default that of query and key.
        engine: which engine runs the call; none changes the function.
        head_dropout_rate: dropout on whole heads.
        num_kv_heads: fewer key and value heads (GQA, MQA).
        qk_norm, qk_norm_eps, rotary, scale, softcap: as in `HeadSpec`.

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
    kernel_init: Initializer = lecun_normal
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
    num_kv_heads: int | None = None
    qk_norm: Literal["rms", "layer"] | None = None
    qk_norm_eps: float = 1e-6
    rotary: Rotary | None = None
    scale: float | None = None
    softcap: float | None = None

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        inputs_kv: Array | None = None,
        mask: Mask | Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
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
            inputs_kv: both at once, deprecated as in Flax.
            mask: a `ja.masks` value, or a Flax mask that broadcasts to [..., h, q, k]; True = visible. With
                `decode`, k counts the rows of the cache, and causality always holds.
            deterministic: evaluation; needed only where there is dropout.
            dropout_rng: PRNG key; default that of the stream `dropout`.
            sow_weights: put the weights that meet the values, before dropout, [..., h, q, k], into
                `intermediates`, as `attention_weights`.
            is_causal: hide keys at later positions than the query's, beside `mask`; not in decode.
            out_sharding: of the output; qkv_sharding: of projected queries, keys and values [..., t, h, d].
            input_positions: [..., t], positions of queries and keys.
            bias: [..., h, q, k], added to the logits.
            valid: [..., k] bool, source rows that are real; the others are zeroed, and hidden.
            positions, capture: as in `Attention.apply`.
            return_aux: also return `Aux`, with auxiliary losses and captured arrays.

        A variant's auxiliary losses, weighted, go into the collection `losses` where it is mutable, unless
        `return_aux` gives them to the caller.

        Returns:
            [..., q, m_out], and `Aux` where it was asked for.
        """
        inputs_k, inputs_v = _read_inputs_kv(inputs_k, inputs_v, inputs_kv)
        attn = self._attention(inputs_q, inputs_k, inputs_v)
        params = self._params(attn)
        asked = Asked(
            mask=mask, bias=bias, dropout_key=self._dropout_key(deterministic, dropout_rng),
            is_causal=is_causal, valid=valid, positions=positions, input_positions=input_positions,
            sow_weights=sow_weights, capture=capture, out_sharding=out_sharding, qkv_sharding=qkv_sharding,
        )  # fmt: skip
        face = Face(self.dtype, self.precision, self.engine, "", "", NEW_CACHE)
        steps = self.decode and self.has_variable("cache", "cached_key")
        cache = self._cache(attn) if steps else None
        done = module_call.run(face, attn, params, (inputs_q, inputs_k, inputs_v), asked, cache)
        if self.decode and not steps:  # an empty one, for the steps to come
            dtype = self.dtype
            if dtype is None:
                dtype = jnp.promote_types(inputs_q.dtype, params["key"]["kernel"].dtype)
            empty = attn.empty_cache(inputs_q.shape[:-2], inputs_q.shape[-2], dtype=dtype)
            for name, value in cache_arrays(empty).items():
                self.variable("cache", name, lambda value=value: value)
        if done.cache is not None:
            for name, value in cache_arrays(done.cache).items():
                self.put_variable("cache", name, value)
        if done.weights is not None:
            self.sow("intermediates", SOWN, done.weights)
        if return_aux:
            return done.y, done.aux
        if not self.is_initializing():
            for name, loss in done.losses().items():
                self.sow("losses", name, loss)
        return done.y

    def _attention(self, inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None) -> Attention:
        """The pure functions, of sizes that the inputs tell."""
        model = inputs_q.shape[-1]
        in_k = model if inputs_k is None else inputs_k.shape[-1]
        features = model if self.qkv_features is None else self.qkv_features
        width = head_width(type(self).__name__, features, self.num_heads, self.qkv_features is not None)
        if self.attention_fn not in (None, nn.dot_product_attention):
            raise ValueError(
                f"attention_fn: got {self.attention_fn!r}, which would not see the variant. "
                "Fix: None, and engine= for another engine."
            )
        spec = HeadSpec(
            model=model,
            heads=self.num_heads,
            kv_heads=cast(Any, self.num_kv_heads),
            d_qk=width,
            d_v=width if self.d_v is None else self.d_v,
            in_k=in_k,
            in_v=in_k if inputs_v is None else inputs_v.shape[-1],
            out=model if self.out_features is None else self.out_features,
            scale=cast(Any, self.scale),
            rotary=self.rotary,
            softcap=self.softcap,
            use_bias=self.use_bias,
            qk_norm="layer" if self.normalize_qk and self.qk_norm is None else self.qk_norm,
            qk_norm_eps=self.qk_norm_eps,
            dropout=self.dropout_rate,
            head_dropout=self.head_dropout_rate,
            dropout_shared=("b", "h") if self.broadcast_dropout else (),
        )
        return attention(spec, self.variant)

    def _params(self, attn: Attention) -> PyTree:
        """The tree that `attn` takes, each leaf drawn where Flax draws it."""
        dtype = self.param_dtype
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for path, shape in expected(attn).shapes.items():
            group, leaf = path.split("/", 1)
            shapes.setdefault(group, {})[leaf] = shape
        params = {}
        for name in PROJECTIONS:
            at_out = name == "out"
            kernel_init = self.out_kernel_init if at_out and self.out_kernel_init else self.kernel_init
            bias_init = self.out_bias_init if at_out and self.out_bias_init else self.bias_init
            inward = 2 if at_out else 1
            params[name] = _Linear(shapes[name], inward, kernel_init, bias_init, dtype, name=name)()
        for name in [name for name in ("query_ln", "key_ln") if name in shapes]:
            params[name] = _Norm(shapes[name]["scale"], dtype, name=name)()
        if self.is_initializing():
            check_axis_names(self._axis_names())
        own = {}
        if "heads" in shapes:
            own = self.param("heads", lambda rng: attn.init(rng, dtype)["heads"])
        return {**params, "heads": own}

    def _dropout_key(self, deterministic: bool | None, dropout_rng: Array | None) -> Array | None:
        if self.dropout_rate == 0 and self.head_dropout_rate == 0:
            return None
        if nn.merge_param("deterministic", self.deterministic, deterministic):
            return None
        return self.make_rng("dropout") if dropout_rng is None else dropout_rng

    def _axis_names(self) -> dict[str, tuple[str | None, ...]]:
        """The names that boxes give to the axes of the projections' leaves."""
        found = {}
        for path in AXES:
            group, leaf = path.split("/")
            names = getattr((self.get_variable("params", group) or {}).get(leaf), "names", None)
            if names is not None:
                found[path] = tuple(names)
        return found

    def _cache(self, attn: Attention) -> Cache:
        """What the collection `cache` holds."""
        key = self.get_variable("cache", "cached_key")
        *batch, size, _, _ = key.shape
        shape = cache_shape(attn, tuple(batch), size, key.dtype)
        return cache_of(shape, {name: self.get_variable("cache", name) for name in cache_arrays(shape)})


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
        """Drawn values in their stored shape; a box around them stays."""
        return jax.tree.map(lambda x: x.reshape(shape), init(rng, flat, self.dtype))


class _Norm(nn.Module):
    """The scale of one head norm."""

    shape: tuple[int, ...]
    dtype: DTypeLike

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        return {"scale": self.param("scale", nn.initializers.ones, self.shape, self.dtype)}


def _read_inputs_kv(
    inputs_k: Array | None, inputs_v: Array | None, inputs_kv: Array | None
) -> tuple[Array | None, Array | None]:
    """Keys' and values' states; `inputs_kv` is both, with Flax's own warning."""
    if inputs_kv is None:
        return inputs_k, inputs_v
    if inputs_k is not None or inputs_v is not None:
        raise ValueError(
            "inputs_kv: given beside inputs_k or inputs_v, expected one of the two ways. Fix: inputs_k, and "
            "inputs_v where it differs; inputs_kv is deprecated."
        )
    warnings.warn(
        "The inputs_kv arg will be deprecated soon. Use inputs_k and inputs_v instead. See "
        "https://github.com/google/flax/discussions/3389 for more information.",
        DeprecationWarning,
        stacklevel=2,
    )
    return inputs_kv, None
