"""Decoders and memories that are known by name: ours and Flax's behind one signature.

They add no mathematics: the rows of query, key and value stand side by side in one state, and the library
gets projections that take them apart again.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja
from jaxattn.check.subjects.attention import drawn, states, version_of
from jaxattn.check.subjects.decoder import DECODES, Decoder, Memory, PyTree, Room, Rows, Source


def side_by_side(rows: Rows) -> Array:
    """States [b, n, m] that hold the heads of query, key and value in a row."""
    return jnp.concatenate([states(x) for x in rows[:3]], -1)


def _taking(room: Room) -> dict[str, Array]:
    """Kernels [m, h, d] that take each of the three out of such states, and one that merges heads."""
    widths = room.heads * room.d, room.key_heads * room.d, room.key_heads * room.v
    heads = room.heads, room.key_heads, room.key_heads
    parts = np.split(np.eye(sum(widths)), np.cumsum(widths)[:-1], 1)
    three = {
        name: jnp.asarray(part.reshape(len(part), count, -1), room.dtype)
        for name, part, count in zip(("query", "key", "value"), parts, heads, strict=True)
    }
    out = np.eye(room.heads * room.v).reshape(room.heads, room.v, -1)
    return three | {"out": jnp.asarray(out, room.dtype)}


def _room_of(rows: Rows) -> Room:
    (b, _, h, d), (g, v) = rows.query.shape, rows.value.shape[2:]
    return Room(b, h, g, d, v, 0, None, rows.query.dtype.name)


def _apart(y: Array, rows: Rows) -> Array:
    return einops.rearrange(y, "b n (h v) -> b n h v", h=rows.query.shape[2])


def _refuse_padding(rows: Rows) -> None:
    if rows.valid is not None:
        raise NotImplementedError("padding: the module has no way to say which rows are.")


def of_attention(
    name: str,
    attn_of: Callable[[ja.HeadSpec], ja.Attention] = ja.attention,
    plain: bool = False,
    engine: str = "auto",
    least_heads: int = 1,
    least_width: int = 1,
) -> Decoder:
    """`empty_cache` and `decode` of an attention of this library.

    Args:
        name, engine, least_heads, least_width: as in the `of_attention` of calls.
        attn_of: a spec to the attention.
        plain: give it the kernels that only take heads apart; otherwise it has random parameters, and its
            steps are held to its own `apply`.
    """

    @functools.cache
    def built(room: Room) -> tuple[ja.Attention, PyTree]:
        m = room.heads * room.d + room.key_heads * (room.d + room.v)
        spec = ja.HeadSpec(
            model=m, heads=room.heads, kv_heads=room.key_heads, d_qk=room.d, d_v=room.v,
            out=room.heads * room.v, use_bias=False,
        )  # fmt: skip
        with jax.ensure_compile_time_eval():  # kept, so it must not belong to a trace
            attn = attn_of(spec)
            params = drawn(attn, room.dtype)
            if plain:
                params = {**params, **{n: {"kernel": x} for n, x in _taking(room).items()}}
        return attn, params

    @functools.cache
    def start(room: Room) -> ja.Cache:
        attn, _ = built(room._replace(batch=0, capacity=0, window=None))
        return attn.empty_cache(room.batch, room.capacity, window=room.window, dtype=jnp.dtype(room.dtype))

    def step(cache: ja.Cache, rows: Rows) -> tuple[ja.Cache, Array]:
        attn, params = built(_room_of(rows)._replace(batch=0))
        y, _, cache = attn.decode(params, cache, side_by_side(rows), valid=rows.valid, engine=engine)
        return cache, _apart(y, rows)

    def placed(cache: ja.Cache, key: Array, value: Array) -> ja.Cache:
        return dataclasses.replace(cache, side=cache.side._replace(key=key, value=value))

    def whole(rows: Rows, window: int | None) -> Array:
        attn, params = built(_room_of(rows)._replace(batch=0))
        mask = ja.causal() if window is None else ja.causal() & ja.window(window)
        if rows.valid is not None:
            mask = mask & ja.padding(rows.valid)
        return _apart(attn.apply(params, side_by_side(rows), mask=mask, engine="dense")[0], rows)

    return Decoder(
        name, start, step, frozenset(DECODES), ja.Cache.reset, ja.Cache.reorder, ja.Cache.trim,
        stored=lambda cache: (cache.side.key, cache.side.value), placed=placed,
        whole=None if plain else whole, plain=plain, version=version_of("jaxattn"),
        least_heads=least_heads, least_width=least_width,
    )  # fmt: skip


def _of_nnx(name: str, kind: Callable[[], Any], cannot: set[str], package: str) -> Decoder:
    """A module of Flax's form with `init_cache` and decode=True; its state is split off it."""
    from flax import nnx  # only where a module is checked

    @functools.cache
    def start(room: Room) -> PyTree:
        if room.window is not None or ("d_v" in cannot and room.v != room.d):
            raise NotImplementedError("window, d_v: the module has neither.")
        m, inner = room.heads * room.d + room.key_heads * (room.d + room.v), room.heads * room.d
        more = {} if "d_v" in cannot else {"d_v": room.v}
        more |= {"num_kv_heads": room.key_heads} if room.key_heads != room.heads else {}
        layer = kind()(
            num_heads=room.heads, in_features=m, qkv_features=inner, out_features=room.heads * room.v,
            in_kv_features=m, use_bias=False, decode=True, deterministic=True,
            param_dtype=jnp.dtype(room.dtype), dtype=jnp.dtype(room.dtype), rngs=nnx.Rngs(0), **more,
        )  # fmt: skip
        for part, kernel in _taking(room).items():
            getattr(layer, part).kernel = nnx.Param(kernel)
        layer.init_cache((room.batch, room.capacity, m), dtype=jnp.dtype(room.dtype))
        return nnx.split(layer)

    def step(state: PyTree, rows: Rows) -> tuple[PyTree, Array]:
        layer, more = nnx.merge(*state, copy=True), {} if rows.valid is None else {"valid": rows.valid}
        if "padding" in cannot:
            _refuse_padding(rows)
        y = layer(side_by_side(rows), **more)
        return nnx.split(layer), _apart(y, rows)

    def reset(state: PyTree) -> PyTree:
        layer = nnx.merge(*state, copy=True)
        key = layer.cached_key
        layer.init_cache((*key.shape[:2], layer.in_features), dtype=key.dtype)
        return nnx.split(layer)

    def stored(state: PyTree) -> tuple[Array, Array]:
        layer = nnx.merge(*state, copy=True)
        return layer.cached_key[...], layer.cached_value[...]

    def placed(state: PyTree, key: Array, value: Array) -> PyTree:
        layer = nnx.merge(*state, copy=True)
        layer.cached_key[...], layer.cached_value[...] = key, value
        return nnx.split(layer)

    supports = frozenset(DECODES) - cannot - {"window", "reorder", "rollback"}
    return Decoder(
        name, start, step, supports, reset, stored=stored, placed=placed, version=version_of(package)
    )


def flax_linen() -> Decoder:
    """`flax.linen.MultiHeadDotProductAttention` with decode=True; its state is the cache collection."""
    import flax.linen as nn

    def layer_of(room: Room) -> Any:
        if room.window is not None or room.key_heads != room.heads or room.v != room.d:
            raise NotImplementedError("window, gqa, d_v: the module has none of them.")
        inner = room.heads * room.d
        return nn.MultiHeadDotProductAttention(
            num_heads=room.heads, qkv_features=inner, out_features=inner, use_bias=False,
            decode=True, dtype=jnp.dtype(room.dtype),
        )  # fmt: skip

    @functools.cache
    def start(room: Room) -> PyTree:
        x = jnp.zeros((room.batch, room.capacity, 3 * room.heads * room.d), room.dtype)
        return layer_of(room).init(jax.random.key(0), x)["cache"]

    def step(cache: PyTree, rows: Rows) -> tuple[PyTree, Array]:
        _refuse_padding(rows)
        room = _room_of(rows)
        params = {part: {"kernel": kernel} for part, kernel in _taking(room).items()}
        variables = {"params": params, "cache": cache}
        found: Any = layer_of(room).apply(variables, side_by_side(rows), mutable=["cache"])
        return found[1]["cache"], _apart(found[0], rows)

    def placed(cache: PyTree, key: Array, value: Array) -> PyTree:
        return {**cache, "cached_key": key, "cached_value": value}

    return Decoder(
        "flax.linen", start, step, frozenset({"buffers", "float64", "tracing"}),
        stored=lambda cache: (cache["cached_key"], cache["cached_value"]), placed=placed,
        version=version_of("flax"),
    )  # fmt: skip


def cross_memory() -> Memory:
    """`jaxattn.CrossMemory`, whose reads bring the identity that they expect."""

    @functools.cache
    def built(h: int, g: int, d: int, v: int, dtype: str) -> tuple[ja.Attention, PyTree]:
        attn = ja.attention(
            ja.HeadSpec(
                model=h * d, heads=h, kv_heads=g, d_qk=d, d_v=v, in_k=g * d, in_v=g * v, out=h * v,
                use_bias=False,
            )
        )  # fmt: skip
        eye = lambda heads, width: np.eye(heads * width).reshape(-1, heads, width)
        kernels = {"query": eye(h, d), "key": eye(g, d), "value": eye(g, v), "out": eye(h, v)}
        kernels["out"] = np.moveaxis(kernels["out"], 0, 2)
        given = {name: {"kernel": jnp.asarray(kernel, dtype)} for name, kernel in kernels.items()}
        return attn, {**drawn(attn, dtype), **given}

    def parts(source: Source, h: int) -> tuple[ja.Attention, PyTree, tuple[Array, Array], ja.Identity]:
        (_, _, g, d), v = source.key.shape, source.value.shape[3]
        attn, params = built(h, g, d, v, source.key.dtype.name)
        named = ja.Identity("request", source.name, adapter="none", projection_version=0)
        return attn, params, (states(source.key), states(source.value)), named

    def project(source: Source, heads: int) -> ja.CrossMemory:
        attn, params, pair, named = parts(source, heads)
        memory = ja.CrossMemory(attn)
        memory.bind(pair, named)
        memory.project(params, projection_version=0)
        memory.attach(ja.expected_identity(attn, params, pair, named))
        return memory

    def read(memory: ja.CrossMemory, query: Array, source: Source) -> tuple[ja.CrossMemory, Array]:
        attn, params, pair, named = parts(source, query.shape[2])
        expected = ja.expected_identity(attn, params, pair, named)
        y, _ = memory.attend(params, states(query), expected=expected)
        return memory, einops.rearrange(y, "b q (h v) -> b q h v", h=query.shape[2])

    def share(memory: ja.CrossMemory, beams: np.ndarray) -> ja.CrossMemory:
        memory.share(beams)
        return memory

    def reorder(memory: ja.CrossMemory, index: np.ndarray) -> ja.CrossMemory:
        memory.reorder(index)
        return memory

    supports = frozenset({"gqa", "d_v", "share", "reorder"})
    return Memory("jaxattn", project, read, supports, share, reorder, version=version_of("jaxattn"))


def _module(path: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(path), name)


DECODERS: dict[str, Callable[[], Decoder]] = {
    "jaxattn": lambda: of_attention("jaxattn", plain=True),
    "jaxattn.nnx": lambda: _of_nnx(
        "jaxattn.nnx", _module("jaxattn.modules", "MultiHeadAttention"), set(), "jaxattn"
    ),
    "flax.nnx": lambda: _of_nnx(
        "flax.nnx", _module("flax.nnx", "MultiHeadAttention"), {"chunks", "d_v", "padding"}, "flax"
    ),
    "flax.linen": flax_linen,
}
MEMORIES: dict[str, Callable[[], Memory]] = {"jaxattn": cross_memory}
