"""Laws of what is read from a checkpoint: every number arrives where it belongs."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import SINGLE, Outcome, Sizes, distance, law, noted, table
from jaxattn.check.subjects.conversion import Conversion, as_stored, store
from jaxattn.check.subjects.params import AXES, ROLES, Dims, drawn, gated, leaves, same, states, tree
from jaxattn.check.verdict import spot

KERNELS = tuple(f"{role}/kernel" for role in ROLES)


def dims_of(subject: Conversion, sizes: Sizes, square: bool = False) -> Dims:
    """Sizes that the subject supports; square makes kernels [m, m]."""
    h, d = sizes.h, sizes.d
    g = sizes.g if "gqa" in subject.supports else h
    v = d + 1 if "d_v" in subject.supports and not square else d
    return Dims(h * d + (0 if square else 3), h, g, d, v)


def _coordinate(path: str, index: tuple[int, ...]) -> dict[str, Any]:
    return {"role": path, **dict(zip(AXES[path].split(), index, strict=True))}


def strays(subject: Conversion, dims: Dims, paths: Iterable[str], axes: str) -> Outcome:
    """How many numbers of the leaves are converted to a wrong place, along the named axes.

    All stored numbers are counted through, and each is looked up where it arrives.
    """
    spots = [(path, index) for path, shape in dims.shapes().items() for index in np.ndindex(shape)]
    ids = np.split(
        np.arange(len(spots), dtype=np.float32),
        np.cumsum([np.prod(shape, dtype=int) for shape in dims.shapes().values()])[:-1],
    )
    params = tree({p: x.reshape(s) for (p, s), x in zip(dims.shapes().items(), ids, strict=True)})
    got = leaves(subject.convert(store(params, subject.layout, dims), dims))
    count, note = 0, ""
    for path in paths:
        if path not in got or got[path].shape != dims.shapes()[path]:
            shape = got[path].shape if path in got else "missing"
            return Outcome(np.inf, 0.0, f"{path}: {shape}, expected {dims.shapes()[path]}")
        for index in np.ndindex(got[path].shape):
            number = float(got[path][index])
            known = number.is_integer() and 0 <= number < len(spots)
            found = _coordinate(*spots[int(number)]) if known else {}
            want = _coordinate(path, index)
            if any(found.get(axis, "none") != want[axis] for axis in axes.split() if axis in want):
                came = spot(*spots[int(number)], AXES) if known else "a number that was not stored"
                note = note or f"{spot(path, index, AXES)} holds {came}"
                count += 1
    return Outcome(count, 0.0, note)


@law("shape", "kernels are [m, h, d], [m, g, d], [m, g, v] and [h, v, m]", about=Conversion)
def kernel_shapes(subject, sizes):
    dims = dims_of(subject, sizes)
    got = leaves(subject.convert(store(drawn(dims), subject.layout, dims), dims))
    wrong = [path for path in (*KERNELS, "out/kernel") if got[path].shape != dims.shapes()[path]]
    note = f"{wrong[0]}: {got[wrong[0]].shape}, expected {dims.shapes()[wrong[0]]}" if wrong else ""
    return Outcome(len(wrong), 0.0, note)


@law("axes", "rows of query, key and value go to query, key and value", about=Conversion)
def fused_order(subject, sizes):
    return strays(subject, dims_of(subject, sizes), KERNELS, "role")


@law("axes", "each row goes to its own head and channel", about=Conversion)
def rows_by_head(subject, sizes):
    return strays(subject, dims_of(subject, sizes), KERNELS, "h d")


@law("axes", "what is multiplied with the states is the axis m, also where kernels are square",
     about=Conversion)  # fmt: skip
def orientation(subject, sizes):
    return strays(subject, dims_of(subject, sizes, square=True), (*KERNELS, "out/kernel"), "m")


@law("axes", "each head meets its own rows of W_O", about=Conversion)
def out_rows_by_head(subject, sizes):
    return strays(subject, dims_of(subject, sizes), ("out/kernel",), "role h d m")


@law("axes", "biases that are stored arrive, that of the keys too; those that are not are zero or absent",
     about=Conversion)  # fmt: skip
def biases_kept(subject, sizes):
    dims, kept = dims_of(subject, sizes), subject.layout.biases
    got = leaves(subject.convert(store(drawn(dims), subject.layout, dims), dims))
    for role in (*ROLES, "out"):
        if role not in kept and not np.all(got.get(f"{role}/bias", np.zeros(1)) == 0):
            return Outcome(np.inf, 0.0, f"{role}/bias was not stored, and is not zero")
    return strays(subject, dims, [f"{role}/bias" for role in kept], "role h d m")


@law("numbers", "converted parameters compute what the stored ones mean, by loops", about=Conversion)
def same_function(subject, sizes):
    worst, note = 0.0, ""
    for square in (True, False):
        dims = dims_of(subject, sizes, square)
        stored, x = store(drawn(dims), subject.layout, dims), states(dims)
        want = as_stored(stored, subject.layout, dims, x)
        off = distance(gated(subject.convert(stored, dims), x), want)
        if not off <= worst:
            worst, note = off, str(dims)
    return noted(worst, SINGLE, note)


@law("behaviour", "written back, it is what was read, bit for bit", "store", about=Conversion)
def round_trip(subject, sizes):
    dims = dims_of(subject, sizes)
    stored = store(drawn(dims), subject.layout, dims)
    return same(leaves(subject.store(subject.convert(stored, dims), dims)), leaves(stored))


@law("numbers", "parameters keep the type and the bits that were stored", about=Conversion)
def dtype_kept(subject, sizes):
    dims = dims_of(subject, sizes)
    for dtype in (np.float16, jnp.bfloat16, np.float32):
        params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), drawn(dims))
        got = leaves(subject.convert(store(params, subject.layout, dims), dims))
        want = leaves(params)
        for role in {"query", "key", "value", "out"} - set(subject.layout.biases):
            got.pop(f"{role}/bias", None)
            want.pop(f"{role}/bias")
        if (off := same(got, want)).broken:
            return off
    return Outcome(0.0, 0.0)


LAWS = table(
    kernel_shapes,
    fused_order,
    rows_by_head,
    orientation,
    out_rows_by_head,
    biases_kept,
    same_function,
    round_trip,
    dtype_kept,
)
