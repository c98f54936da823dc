"""Sublayers that are known by name: libraries' modules, with the parameters of a call placed into them.

An adapter places and turns; it adds no mathematics.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja
from jaxattn.check.subjects.attention import version_of
from jaxattn.check.subjects.layer import LAYER_FEATURES, LEAVES, Layer, LayerCall, Params, Widths, widths_of
from jaxattn.masks import from_flax


def _of_nnx(name: str, kind: Callable[[], Any], own_v: bool) -> Layer:
    nnx = importlib.import_module("flax.nnx")  # a check of Flax needs Flax

    def built(call: LayerCall) -> Any:
        w, dtype = widths_of(call.params), call.params["query"]["kernel"].dtype
        more: dict[str, Any] = {"d_v": w.v} if own_v else {}
        more |= {"num_kv_heads": w.g} if w.g != w.h else {}
        rate, dropout_key = call.dropout or (0.0, None)
        layer = kind()(
            num_heads=w.h, in_features=w.in_q, qkv_features=w.h * w.d, out_features=w.out,
            in_kv_features=w.in_k, use_bias="bias" in call.params["out"], dropout_rate=rate,
            broadcast_dropout=False, deterministic=dropout_key is None, decode=False, param_dtype=dtype,
            dtype=dtype, rngs=nnx.Rngs(0), **more,
        )  # fmt: skip
        for leaf, arrays in call.params.items():
            for part, x in arrays.items():
                setattr(getattr(layer, leaf), part, nnx.Param(x))
        return layer

    def asked_of(layer: Any, call: LayerCall, **more: bool) -> Array:
        _, dropout_key = call.dropout or (0.0, None)
        rngs = None if dropout_key is None else nnx.Rngs(dropout=dropout_key)
        more |= {"is_causal": True} if call.causal else {}
        return layer(call.x_q, call.x_k, call.x_v, mask=call.mask, rngs=rngs, **more)

    def apply(call: LayerCall) -> Array:
        return asked_of(built(call), call)

    def weights(call: LayerCall) -> tuple[Array, Array]:
        layer = built(call)
        y = asked_of(layer, call, sow_weights=True)
        return y, layer.attention_weights.get_value()[0]

    cannot = {"in_v"} | (set() if own_v else {"d_v"})
    takes = lambda function: inspect.signature(function).parameters
    cannot |= set() if "num_kv_heads" in takes(kind().__init__) else {"gqa"}  # Flax before 0.12.6
    cannot |= set() if "is_causal" in takes(kind().__call__) else {"causal"}  # and before 0.12.8
    return Layer(name, apply, weights, frozenset(LAYER_FEATURES) - cannot)


def nnx_ours() -> Layer:
    """`jaxattn.MultiHeadAttention`."""
    return _of_nnx("jaxattn", lambda: ja.MultiHeadAttention, True)._replace(version=version_of("jaxattn"))


def nnx_flax() -> Layer:
    """`flax.nnx.MultiHeadAttention`; its values are as wide as its keys, its sources of one width."""
    layer = _of_nnx("flax.nnx", lambda: importlib.import_module("flax.nnx").MultiHeadAttention, False)
    return layer._replace(version=version_of("flax"))


def functions_ours() -> Layer:
    """`jaxattn.attention`, the functions that both of our modules call."""

    def answer(call: LayerCall, capture: tuple[str, ...] = ()) -> tuple[Array, Any]:
        w = widths_of(call.params)
        spec = ja.HeadSpec(
            model=w.in_q, heads=w.h, kv_heads=w.g, d_qk=w.d, d_v=w.v, in_k=w.in_k, in_v=w.in_v, out=w.out,
            use_bias="bias" in call.params["out"],
        )  # fmt: skip
        alone = call.x_k is call.x_q and call.x_v is call.x_q
        source = None if alone else (call.x_k, call.x_v)
        params = {**call.params, "heads": {}}
        return ja.attention(spec).apply(params, call.x_q, source, _house_mask(call), capture=capture)

    def weights(call: LayerCall) -> tuple[Array, Array]:
        y, aux = answer(call, ("weights",))
        return y, aux.captured["weights"]

    supports = frozenset(LAYER_FEATURES) - {"dropout"}
    name = "jaxattn.attention"
    return Layer(name, lambda call: answer(call)[0], weights, supports, version=version_of("jaxattn"))


def _house_mask(call: LayerCall) -> ja.Mask:
    """As this library's own masks say it: rows of a source that nobody sees are padding."""
    mask = ja.causal() if call.causal else ja.everything()
    if call.mask is None:
        return mask
    real = jnp.broadcast_to(call.mask.any((1, 2)), call.x_k.shape[:2])
    return mask & from_flax(call.mask) & ja.padding(real)


def _of_linen(name: str, kind: Any, more_of: Callable[[Widths], dict[str, Any]], mask_of: Callable) -> Layer:
    def answer(call: LayerCall, sow: bool) -> tuple[Array, Any]:
        w, dtype = widths_of(call.params), call.params["query"]["kernel"].dtype
        rate, dropout_key = call.dropout or (0.0, None)
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        layer = kind(
            num_heads=w.h, qkv_features=w.h * w.d, out_features=w.out, use_bias="bias" in call.params["out"],
            dropout_rate=rate, broadcast_dropout=False, dtype=dtype, param_dtype=dtype,
            deterministic=dropout_key is None, **more_of(w),
        )  # fmt: skip
        return layer.apply(
            {"params": call.params}, call.x_q, call.x_k, call.x_v, mask=mask_of(call), sow_weights=sow,
            rngs=rngs, mutable=["intermediates"],
        )  # fmt: skip

    def weights(call: LayerCall) -> tuple[Array, Array]:
        y, kept = answer(call, True)
        return y, kept["intermediates"]["attention_weights"][0]

    return Layer(name, lambda call: answer(call, False)[0], weights)


def linen_ours() -> Layer:
    """`jaxattn.linen.MultiHeadDotProductAttention`; a causal call gives it a causal mask."""
    kind = importlib.import_module("jaxattn.linen").MultiHeadDotProductAttention
    layer = _of_linen("jaxattn.linen", kind, lambda w: {"d_v": w.v}, _house_mask)
    return layer._replace(supports=frozenset(LAYER_FEATURES) - {"gqa"}, version=version_of("jaxattn"))


def linen_flax() -> Layer:
    """`flax.linen.MultiHeadDotProductAttention`."""
    kind = importlib.import_module("flax.linen").MultiHeadDotProductAttention
    layer = _of_linen("flax.linen", kind, lambda w: {}, lambda call: call.mask)
    supports = frozenset(LAYER_FEATURES) - {"gqa", "d_v", "causal"}
    return layer._replace(supports=supports, version=version_of("flax"))


def equinox() -> Layer:
    """`equinox.nn.MultiheadAttention`, example by example."""
    import equinox as eqx  # pyright: ignore[reportMissingImports]  (only where installed)

    def apply(call: LayerCall) -> Array:
        w, dtype, biased = widths_of(call.params), call.x_q.dtype, "bias" in call.params["out"]
        layer = eqx.nn.MultiheadAttention(
            w.h, w.in_q, w.in_k, w.in_v, w.out, w.d, w.v, biased, biased, biased, biased, dtype=dtype,
            key=jax.random.key(0),
        )  # fmt: skip
        parts = lambda layer: (layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj)
        flat = _as_linear(call.params)
        layer = eqx.tree_at(
            lambda x: [p.weight for p in parts(x)], layer, [flat[n, "kernel"] for n in LEAVES]
        )
        if biased:
            layer = eqx.tree_at(
                lambda x: [p.bias for p in parts(x)], layer, [flat[n, "bias"] for n in LEAVES]
            )
        shape = (len(call.x_q), w.h, call.x_q.shape[1], call.x_k.shape[1])
        mask = jnp.ones(shape, bool) if call.mask is None else jnp.broadcast_to(call.mask, shape)
        one = lambda q, k, v, mask: layer(q, k, v, mask=mask)
        return jax.vmap(one)(call.x_q, call.x_k, call.x_v, mask)

    supports = frozenset(LAYER_FEATURES) - {"gqa", "causal", "dropout", "weights"}
    return Layer("equinox", apply, None, supports, version=version_of("equinox"))


def _as_linear(params: Params) -> dict[tuple[str, str], Array]:
    """Kernels as [out, in], heads packed, as `Linear` stores them; biases in one row."""
    flat = {}
    for name in LEAVES:
        order = "h v m -> m (h v)" if name == "out" else "m h d -> (h d) m"
        flat[name, "kernel"] = einops.rearrange(params[name]["kernel"], order)
        if "bias" in params[name]:
            flat[name, "bias"] = params[name]["bias"].reshape(-1)
    return flat


def torch_tensor(x: Any) -> Any:
    """An array as torch has it; numpy knows no bfloat16, so it goes by way of float32."""
    import torch  # pyright: ignore[reportMissingImports]  (only where installed)

    half = jnp.asarray(x).dtype == jnp.bfloat16
    out = torch.from_numpy(np.array(x, np.float32 if half else None))
    return out.to(torch.bfloat16) if half else out


def from_torch(x: Any) -> Array:
    """And back."""
    import torch  # pyright: ignore[reportMissingImports]  (only where installed)

    return jnp.asarray((x.float() if x.dtype == torch.bfloat16 else x).numpy())


def torch_mha() -> Layer:
    """`torch.nn.MultiheadAttention`, whose True hides; asked for weights, it gives those of every head."""
    import torch  # pyright: ignore[reportMissingImports]  (only where installed)

    def answer(call: LayerCall, weights: bool) -> tuple[Array, Array | None]:
        w, flat = widths_of(call.params), {k: torch_tensor(x) for k, x in _as_linear(call.params).items()}
        biased = "bias" in call.params["out"]
        layer = torch.nn.MultiheadAttention(
            w.in_q, w.h, bias=biased, kdim=w.in_k, vdim=w.in_v, batch_first=True,
            dtype=flat["out", "kernel"].dtype,
        ).eval()  # fmt: skip
        packed = [flat[n, "kernel"] for n in LEAVES[:3]]
        if layer.in_proj_weight is not None:
            placed: dict[str, Any] = {"in_proj_weight": torch.cat(packed)}
        else:
            placed = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), packed, strict=True))
        placed["out_proj.weight"] = flat["out", "kernel"]
        if biased:
            placed["in_proj_bias"] = torch.cat([flat[n, "bias"] for n in LEAVES[:3]])
            placed["out_proj.bias"] = flat["out", "bias"]
        layer.load_state_dict(placed)
        x_q = torch_tensor(call.x_q)
        x_k, x_v = (x_q if x is call.x_q else torch_tensor(x) for x in (call.x_k, call.x_v))
        with torch.no_grad():
            y, found = layer(
                x_q, x_k, x_v, attn_mask=hidden(call, w.h), is_causal=call.causal and call.mask is None,
                need_weights=weights, average_attn_weights=False,
            )  # fmt: skip
        return from_torch(y), None if found is None else from_torch(found)

    def hidden(call: LayerCall, heads: int) -> Any:
        b, q, k = *call.x_q.shape[:2], call.x_k.shape[1]
        seen = np.ones((q, k), bool) if not call.causal else np.tril(np.ones((q, k), bool))
        if call.mask is None:
            return torch_tensor(~seen) if call.causal else None
        whole = np.broadcast_to(np.asarray(call.mask), (b, heads, q, k)) & seen
        return torch_tensor(~whole.reshape(b * heads, q, k))

    supports = frozenset(LAYER_FEATURES) - {"gqa", "d", "d_v", "out", "dropout", "tracing"}
    ask: Any = lambda call: answer(call, True)
    return Layer(
        "torch.mha", lambda call: answer(call, False)[0], ask, supports, version=f"torch {torch.__version__}"
    )


LAYERS: dict[str, Callable[[], Layer]] = {
    "jaxattn": nnx_ours,
    "jaxattn.linen": linen_ours,
    "jaxattn.attention": functions_ours,
    "flax.nnx": nnx_flax,
    "flax.linen": linen_flax,
    "equinox": equinox,
    "torch.mha": torch_mha,
}
"""Sublayers that are known by name: each makes one, where its library is installed."""
