"""What a Flax module holds: parameters as its initialisers draw them, and a cache by Flax's names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from jaxattn.attention import Attention, Initializer, fold_path
from jaxattn.cache import Cache

PyTree = Any


def draw(
    attn: Attention,
    rng: Array,
    dtype: DTypeLike,
    kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    out_kernel_init: Initializer | None = None,
    out_bias_init: Initializer | None = None,
) -> tuple[PyTree, dict[str, Any]]:
    """Parameters, and the boxes that initialisers put them in, as `nnx.with_partitioning` does.

    Args:
        attn, rng, dtype, kernel_init, bias_init: as in `Attention.init`.
        out_kernel_init, out_bias_init: those of `out`; None is the first two.

    Returns:
        The tree of arrays; and boxes by leaf: "kernel" and "bias" of every projection, "out/kernel" and
        "out/bias" where `out` has initialisers of its own (None where these make no box).
    """
    boxes: dict[str, Any] = {}

    def opened(init: Initializer | None, what: str) -> Initializer | None:
        def unboxed(rng, shape, dtype):
            assert init is not None
            made: Any = init(rng, shape, dtype)
            boxed = hasattr(made, "raw_value")
            boxes[what] = made if boxed else None
            return made.raw_value if boxed else made

        return None if init is None else unboxed

    params = attn.init(rng, dtype, opened(kernel_init, "kernel"), opened(bias_init, "bias"))
    out = params["out"]
    for name, init in (("kernel", out_kernel_init), ("bias", out_bias_init)):
        own = opened(init, f"out/{name}")
        if own is not None and name in out:
            old = out[name]
            flat = (old.size // old.shape[-1], old.shape[-1]) if name == "kernel" else old.shape
            out[name] = own(fold_path(rng, f"out/{name}"), flat, dtype).reshape(old.shape)
    return params, boxes


def of_path(table: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """What a table says of a leaf: of "out/kernel", else of every "kernel" of a projection.

    Example:
        >>> table = {"kernel": 1, "out/kernel": 2}
        >>> of_path(table, ("out", "kernel")), of_path(table, ("key", "kernel"))
        (2, 1)
    """
    if path[0] == "heads":
        return None
    return table.get("/".join(path), table.get(path[-1]))


def split_cache(cache: Cache) -> dict[str, Any]:
    """A cache by Flax's names, and under `cached_rows` what else belongs to its rows."""
    rest = dataclasses.replace(cache, side=cache.side._replace(key=None, value=None), count=None)
    return {
        "cached_key": cache.side.key,
        "cached_value": cache.side.value,
        "cache_index": cache.count,
        "cached_rows": rest,
    }


def join_cache(cached_key: Array, cached_value: Array, cache_index: Array, cached_rows: Cache) -> Cache:
    """The cache that `split_cache` took apart."""
    side = cached_rows.side._replace(key=cached_key, value=cached_value)
    return dataclasses.replace(cached_rows, side=side, count=cache_index)
