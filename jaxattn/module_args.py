"""What the arguments of a Flax module mean to the pure functions: sizes, names of axes, masks, positions."""

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding

from jaxattn.masks import Mask, from_flax

Names = tuple[str | None, ...]

# Axes of the projections' leaves as users of Flax know them.
AXES = {
    "query/kernel": "m h d", "key/kernel": "m h d", "value/kernel": "m h d", "out/kernel": "h v m",
    "query/bias": "h d", "key/bias": "h d", "value/bias": "h v", "out/bias": "m",
    "query_ln/scale": "d", "key_ln/scale": "d",
}  # fmt: skip


def head_width(layer: str, features: int, num_heads: int, given: bool) -> int:
    """Channels of each head.

    Args:
        layer: its class, for the error.
        features: heads times width; the width of the states where the caller gave none.
        num_heads: heads.
        given: whether the caller gave `features`.

    Raises:
        ValueError: for sizes that do not divide, with the nearest that do.

    Example:
        >>> head_width("MultiHeadAttention", 32, 4, given=True)
        8
    """
    if num_heads < 1:
        raise ValueError(f"{layer}: num_heads = {num_heads}, expected at least 1.")
    if features % num_heads == 0:
        return features // num_heads
    width = max(1, round(features / num_heads))
    divisors = (n for n in range(1, features + 1) if features % n == 0)
    near = min(divisors, key=lambda n: (abs(n - num_heads), -n))
    what = f"qkv_features = {features}" + ("" if given else " (the width of the states)")
    raise ValueError(
        f"{layer}: {what} does not divide by num_heads = {num_heads}. Fix: "
        f"qkv_features={width * num_heads} (width {width}), or num_heads={near}."
    )


def check_axis_names(names: Mapping[str, Names]) -> None:
    """Raise where an initialiser gives more names than a leaf has axes; warn once where it gives fewer.

    Flax takes fewer names for the leading axes. Written for a flat kernel [m, h * d], two names then say
    something else of the output kernel [h, v, m] (google/flax issue 3892).

    Args:
        names: by the path of a leaf, such as "query/kernel"; None is an axis without a name.

    Raises:
        ValueError: with the names and the axes.

    Example:
        >>> check_axis_names({"query/kernel": ("embed", "heads", None), "query/bias": ("heads", None)})
    """
    fewer: dict[str, list[str]] = {}
    for path, given in names.items():
        axes = AXES[path].split()
        if len(given) > len(axes):
            raise ValueError(
                f"{path}: the initialiser gives the names {given}, expected at most one for each of the axes "
                f"[{', '.join(axes)}]. Fix: a name or None for each; `out` takes initialisers of its own "
                "(out_kernel_init, out_bias_init)."
            )
        pairs = zip(given, axes, strict=False)
        named = [f"{name!r} names {axis}" for name, axis in pairs if name is not None]
        if len(given) < len(axes) and named:
            fewer.setdefault(f"[{', '.join(axes)}]: {', '.join(named)}", []).append(path)
    if fewer:
        found = "; ".join(f"{', '.join(paths)} {what}" for what, paths in fewer.items())
        warnings.warn(
            f"fewer names than axes, taken for the leading axes as Flax does. {found}. Fix: a name or None "
            "for each axis; `out` takes initialisers of its own (out_kernel_init, out_bias_init).",
            stacklevel=2,
        )


def read_mask(mask: Any, batch: tuple[int, ...]) -> Mask | None:
    """A mask as Flax's users give it, as a `ja.masks` value.

    Args:
        mask: a `ja.masks` value, returned as it is; or an array that broadcasts from the right to
            [..., h, q, k], boolean or of numbers, True or not 0 = visible.
        batch: the batch axes of the call.

    Raises:
        ValueError: for numbers other than 0 and 1, where values are known: an additive mask.

    Example:
        >>> read_mask(jnp.array([[1.0, 0.0], [1.0, 1.0]]), batch=())
        explicit(q k: 2x2)
    """
    if mask is None or isinstance(mask, Mask) or not hasattr(mask, "ndim"):
        return mask  # what is no mask is refused by name where it is used
    axes = 3 if mask.ndim <= 3 else 3 + len(batch)
    return from_flax(mask[(None,) * max(0, axes - mask.ndim)])


def read_source(inputs_k: Array | None, inputs_v: Array | None) -> Array | tuple[Array, Array] | None:
    """What keys and values come from; None is the query states."""
    if inputs_v is None:
        return inputs_k
    if inputs_k is None:
        raise ValueError("inputs_v: given without inputs_k. Fix: give inputs_k too, or neither.")
    return inputs_k, inputs_v


def read_bias(bias: Any, batch: tuple[int, ...]) -> Any:
    """A bias that broadcasts from the right to [..., h, q, k], with the batch axes of the call or none.

    Example:
        >>> read_bias(jnp.zeros((1, 3, 5, 5)), batch=(2,)).shape
        (3, 5, 5)
    """
    if bias is None or not hasattr(bias, "ndim"):
        return bias
    bias = bias[(None,) * max(0, 3 - bias.ndim)]
    lead = bias.shape[:-3]
    if set(lead) <= {1}:
        return bias.reshape(bias.shape[-3:])
    fits = len(lead) <= len(batch) and all(
        n in (1, size) for n, size in zip(lead[::-1], batch[::-1], strict=False)
    )
    return jnp.broadcast_to(bias, (*batch, *bias.shape[-3:])) if fits else bias  # else refused with its axes


def precision_name(precision: Any) -> str | None:
    """The name of a matrix precision, as `jax.default_matmul_precision` knows it.

    Raises:
        ValueError: for a pair whose two sides differ.

    Example:
        >>> precision_name(jax.lax.Precision.HIGHEST), precision_name(("high", "high"))
        ('highest', 'high')
    """
    if isinstance(precision, (tuple, list)):
        names = {precision_name(one) for one in precision}
        if len(names) == 1:
            return names.pop()
        raise ValueError(
            f"precision: got the pair {precision!r}, expected one precision for both sides of every product. "
            "Fix: precision='high', or another name of jax.lax.Precision."
        )
    if precision is None or isinstance(precision, str):
        return precision
    name = str(precision.name)
    return name.lower() if isinstance(precision, jax.lax.Precision) else name


def at_precision(precision: Any) -> contextlib.AbstractContextManager:
    """A context in which every matrix product has this precision; None leaves the caller's."""
    name = precision_name(precision)
    return contextlib.nullcontext() if name is None else jax.default_matmul_precision(name)


def pair_positions(positions: Any, input_positions: Array | None, cross: bool, k_len: int) -> tuple[Any, Any]:
    """Positions of queries and keys, from ours or from Flax's `input_positions`, which holds for both.

    Args:
        positions: [..., t], or a pair for queries and keys; the first alone is also that of the keys in
            self-attention.
        input_positions: [..., t] of both sides.
        cross: whether the source is another than the queries.
        k_len: source rows.
    """
    if input_positions is None:
        if isinstance(positions, tuple):
            return positions
        return positions, None if cross else positions
    if positions is not None:
        raise ValueError("positions: given beside input_positions, expected one of them. Fix: leave one out.")
    given = np.shape(input_positions)[-1]
    if cross and given != k_len:
        raise ValueError(
            f"input_positions: {given} of them for {k_len} keys, expected one for each query and the same "
            "for the keys. Fix: positions=(of_queries, of_keys)."
        )
    return input_positions, input_positions


def placed(x: Array, sharding: Any) -> Array:
    """`x` with a sharding: moved where mesh axes are explicit, else constrained; None asks for nothing."""
    if sharding is None:
        return x
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in tuple(mesh.axis_types):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)
