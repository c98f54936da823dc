"""Readers of other libraries' parameters that are known by name."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import jaxattn as ja
from jaxattn.check.subjects.attention import version_of
from jaxattn.check.subjects.conversion import Conversion, Layout
from jaxattn.check.subjects.params import Dims, Params


def flax_nnx() -> Conversion:
    """`jaxattn.MultiHeadAttention` that takes over the state of a `flax.nnx.MultiHeadAttention`."""
    nnx = importlib.import_module("flax.nnx")

    @functools.cache
    def layer(kind: Any, dims: Dims) -> Any:
        sizes = dict(
            num_heads=dims.h, num_kv_heads=dims.g, in_features=dims.m, qkv_features=dims.h * dims.d
        )  # fmt: skip
        return nnx.eval_shape(lambda: kind(**sizes, decode=False, rngs=nnx.Rngs(0)))  # numbers come later

    def moved(params: Params, dims: Dims, source: Any, target: Any) -> Params:
        first, second = layer(source, dims), layer(target, dims)
        for role, own in params.items():
            for leaf, x in own.items():
                getattr(getattr(first, role), leaf).set_value(jnp.asarray(x))
        nnx.update(second, nnx.state(first, nnx.Param))
        arrived = lambda role, leaf: getattr(getattr(second, role), leaf)[...]
        return {role: {leaf: arrived(role, leaf) for leaf in own} for role, own in params.items()}

    return Conversion(
        "flax.nnx to jaxattn",
        lambda stored, dims: moved(stored, dims, nnx.MultiHeadAttention, ja.MultiHeadAttention),
        Layout(kernels="in out", split=True),
        lambda params, dims: moved(params, dims, ja.MultiHeadAttention, nnx.MultiHeadAttention),
        frozenset({"gqa", "store"}),
        version=version_of("flax"),
    )


CONVERSIONS: dict[str, Callable[[], Conversion]] = {"flax.nnx": flax_nnx}
