"""Calls of a sublayer as its laws draw them, and what must come out, by loops over numpy."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.law import Sizes, loops
from jaxattn.check.subjects.attention import Call
from jaxattn.check.subjects.layer import LEAVES, LayerCall, Params

WIDTHS = ("in_k", "in_v", "d", "d_v", "out")


def draw_layer(
    sizes: Sizes, own: frozenset[str] = frozenset(), *, alone: bool = False, groups: bool = False,
    bias: bool = False, seed: int = 0, dtype: Any = jnp.float32,
) -> LayerCall:  # fmt: skip
    """A call of normal numbers, rounded to float32 first; every width is m = h * d but for those of `own`.

    Args:
        sizes: of the call; v is that of `own` or d.
        own: of `WIDTHS`.
        alone: self-attention: one array stands for all three states.
        groups: sizes.g key heads.
        bias: with biases.
    """
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape)
    array = lambda x: jnp.asarray(x.astype(np.float32), dtype)
    b, h, q, k, width = sizes[:5]
    g, m = (sizes.g if groups else h), h * width
    in_k = m + 1 if "in_k" in own else m
    in_v = m + 2 if "in_v" in own else in_k
    d = width + 1 if "d" in own else width
    v = d + 2 if "d_v" in own else d
    out = m + 3 if "out" in own else m
    shapes = (m, h, d), (in_k, g, d), (in_v, g, v), (h, v, out)
    fans = m, in_k, in_v, h * v
    params: Params = {
        name: {"kernel": array(draw(*shape) / fan**0.5)}
        for name, shape, fan in zip(LEAVES, shapes, fans, strict=True)
    }
    for name, shape in zip(LEAVES, shapes, strict=True):
        params[name] |= {"bias": array(draw(*(shape[2:] if name == "out" else shape[1:])))} if bias else {}
    x_q = array(draw(b, q, m))
    x_k, x_v = (x_q, x_q) if alone else (array(draw(b, k, in_k)), array(draw(b, k, in_v)))
    return LayerCall(params, x_q, x_k, x_v)


def layer_loops(call: LayerCall) -> np.ndarray:
    """The sublayer, number by number in float64: [b, q, m_out]; a row without a key is b_O."""
    sides = (projected(x, call.params[n]) for x, n in zip(call[1:4], LEAVES[:3], strict=True))
    return _written(attended(call, *sides), call.params["out"])


def attended(call: LayerCall, query: Any, key: Any, value: Any) -> np.ndarray:
    """The heads [b, q, h, v] of a call whose projections are these, pair by pair."""
    return loops(Call(query, key, value, call.mask, call.causal))


def _double(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def projected(x: Any, leaf: dict[str, Array]) -> np.ndarray:
    """States [b, t, m] as heads [b, t, h, d], row by row."""
    x, kernel = _double(x), _double(leaf["kernel"])
    (b, t, _), (_, h, d) = x.shape, kernel.shape
    out = np.zeros((b, t, h, d))
    for n, row, head in np.ndindex(b, t, h):
        out[n, row, head] = x[n, row] @ kernel[:, head]
    return out + (_double(leaf["bias"]) if "bias" in leaf else 0)


def _written(heads: np.ndarray, leaf: dict[str, Array]) -> np.ndarray:
    kernel = _double(leaf["kernel"])
    b, q, h, _ = heads.shape
    out = np.zeros((b, q, kernel.shape[-1]))
    for n, row, head in np.ndindex(b, q, h):
        out[n, row] += heads[n, row, head] @ kernel[head]
    return out + (_double(leaf["bias"]) if "bias" in leaf else 0)


def changed(call: LayerCall, name: str, kernel: Any = None, **leaves: Any) -> LayerCall:
    """The call with another kernel, or bias, of one projection."""
    given = leaves if kernel is None else {"kernel": kernel, **leaves}
    return call._replace(params={**call.params, name: {**call.params[name], **given}})


def turned(kernel: Array) -> Array:
    """The transpose of a packed kernel where it is square; else the kernel."""
    inward = math.isqrt(kernel.size)
    square = inward in (kernel.shape[0], kernel.shape[-1]) and inward**2 == kernel.size
    return kernel.reshape(inward, inward).T.reshape(kernel.shape) if square else kernel
