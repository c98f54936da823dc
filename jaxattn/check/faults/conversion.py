"""Wrong readers of checkpoints. `right` is what they are made of; a fault replaces one of its steps."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxattn.check.faults.fault import Fault
from jaxattn.check.subjects.conversion import Conversion, Layout, store
from jaxattn.check.subjects.params import ROLES, Dims, Params, drawn, projected, states
from jaxattn.check.tracing.stages import Stages
from jaxattn.check.tracing.trace import trace_of
from jaxattn.check.tracing.traced import Trace

Rows = dict[str, Any]  # role -> [rows, ...]


def rows_first(kernel: Any, layout: Layout) -> Any:
    """A stored kernel as [rows, m]."""
    return kernel if layout.kernels == "out in" else kernel.swapaxes(0, 1)


def spans(dims: Dims, order: tuple[str, ...]) -> dict[str, slice]:
    """Half-open spans of rows of all query, key and value heads."""
    found, start = {}, 0
    for role in order:
        heads, width = dims.side(role)
        found[role] = slice(start, start + heads * width)
        start += heads * width
    return found


def cut(fused: Any, layout: Layout, dims: Dims, spans: Callable[..., dict[str, slice]] = spans) -> Rows:
    """The rows of "qkv" by role."""
    if layout.rows == "role":
        return {role: fused[span] for role, span in spans(dims, layout.order).items()}
    one = Dims(dims.m, dims.h // dims.g, 1, dims.d, dims.v)
    groups = fused.reshape(dims.g, -1, *fused.shape[1:])
    parts = {role: groups[:, span] for role, span in spans(one, layout.order).items()}
    return {role: part.reshape(-1, *fused.shape[1:]) for role, part in parts.items()}


def cut_bias(fused: Any, layout: Layout, dims: Dims) -> Rows:
    return cut(fused, layout, dims)


def by_head(rows: Any, heads: int, width: int) -> Any:
    """[(h d), ...] to [h, d, ...]."""
    return rows.reshape(heads, width, *rows.shape[1:])


def out_blocks(kernel: Any, heads: int, width: int) -> Any:
    """[m, (h v)] to [h, v, m]."""
    return kernel.reshape(len(kernel), heads, width).transpose(1, 2, 0)


def no_bias(heads: int, width: int, kernel: Any) -> Any:
    """For a role whose bias is not stored."""
    return np.zeros((heads, width), kernel.dtype)


STEPS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (rows_first, cut, cut_bias, by_head, out_blocks, no_bias)
}


def right(stored: Params, dims: Dims, layout: Layout, **steps: Callable[..., Any]) -> Params:
    """A reader of any layout without an axis of heads; `steps` replaces `STEPS`."""
    s = {**STEPS, **steps}
    if layout.rows == "apart":
        kernels = {role: s["rows_first"](stored[role]["kernel"], layout) for role in ROLES}
        biases = {role: stored[role]["bias"] for role in ROLES if "bias" in stored[role]}
    else:
        kernels = s["cut"](s["rows_first"](stored["qkv"]["kernel"], layout), layout, dims)
        biases = s["cut_bias"](stored["qkv"]["bias"], layout, dims) if "bias" in stored["qkv"] else {}
    params: Params = {}
    for role in ROLES:
        heads, width = dims.side(role)
        kernel = s["by_head"](kernels[role], heads, width).transpose(2, 0, 1)
        known = role in biases
        bias = by_head(biases[role], heads, width) if known else s["no_bias"](heads, width, kernel)
        params[role] = {"kernel": kernel, "bias": bias}
    out = rows_first(stored["out"]["kernel"], layout)
    params["out"] = {"kernel": s["out_blocks"](out, *dims.side("out"))}
    if "bias" in stored["out"]:
        params["out"]["bias"] = stored["out"]["bias"]
    return params


def back(params: Params, dims: Dims, layout: Layout) -> Params:
    """The inverse of `right`, for one tensor by role or a tensor each."""
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    rows = {role: flat(params[role]["kernel"].transpose(1, 2, 0)) for role in ROLES}
    biases = {role: flat(params[role]["bias"]) for role in ROLES}
    stored: Params = {role: {"kernel": rows[role]} for role in ROLES}
    if layout.rows == "role":
        stored = {"qkv": {"kernel": np.concatenate([rows[role] for role in layout.order])}}
        if layout.biases:
            stored["qkv"]["bias"] = np.concatenate([biases[role] for role in layout.order])
    else:
        for role in set(ROLES) & set(layout.biases):
            stored[role]["bias"] = biases[role]
    stored["out"] = {"kernel": flat(params["out"]["kernel"]).swapaxes(0, 1)}
    for own in stored.values():
        own["kernel"] = rows_first(own["kernel"], layout)
    if "out" in layout.biases:
        stored["out"]["bias"] = params["out"]["bias"]
    return stored


def reader(layout: Layout, name: str = "right", **steps: Callable[..., Any]) -> Conversion:
    """`right` for a layout, with some of its steps replaced."""
    convert = lambda stored, dims: right(stored, dims, layout, **steps)
    if layout.rows == "group":
        return Conversion(name, convert, layout)
    written = lambda params, dims: back(params, dims, layout)
    return Conversion(name, convert, layout, written, frozenset({"gqa", "d_v", "store"}))


def stages_of(params: Params) -> Stages:
    """The projections and the output of parameters, as a trace asks for them."""
    kernel = np.asarray(params["out"]["kernel"], np.float64)
    flat, bias = kernel.reshape(-1, kernel.shape[-1]), params["out"].get("bias", 0.0)
    query, key, value = (functools.partial(projected, params, role) for role in ROLES)
    return Stages(project_q=query, project_k=key, project_v=value, output=lambda x: x @ flat + bias)


def traced(subject: Conversion, dims: Dims) -> Trace:
    """One call of the layer as it was converted, beside the layer that was stored."""
    true = drawn(dims, biases=subject.layout.biases)
    params = subject.convert(store(true, subject.layout, dims), dims)
    x = states(dims, t=5)
    return trace_of(
        stages_of(params), x, heads=dims.h, kv_heads=dims.g, d=dims.d, expected=stages_of(true)
    )  # fmt: skip


def _fault(
    says: str, source: str, law: str, stage: str, layout: Layout, dims: Dims, **steps: Callable[..., Any]
) -> Fault:
    subject = reader(layout, "planted", **steps)
    return Fault(says, source, law, subject, stage, functools.partial(traced, subject, dims))


FUSED, GROUPED, APART = Layout("role"), Layout("group"), Layout()
SIZES = Dims(m=13, h=2, g=2, d=3, v=3)
SHARED = Dims(m=13, h=4, g=2, d=3, v=5)
SQUARE = Dims(m=6, h=2, g=2, d=3, v=3)


def _early(dims: Dims, order: tuple[str, ...]) -> dict[str, slice]:
    """The span of the keys begins and ends one head early."""
    found = spans(dims, order)
    return {**found, "key": slice(found["key"].start - dims.d, found["key"].stop - dims.d)}


FAULTS: dict[str, Fault] = {
    "heads in turn read as roles in turn": _fault(
        "one tensor with q, k, v of each head is cut as all q, all k, all v",
        "PUB-18",
        "fused-order",
        "Q",
        GROUPED,
        SIZES,
        cut=lambda fused, layout, dims: cut(fused, layout._replace(rows="role"), dims),
        cut_bias=lambda fused, layout, dims: cut(fused, layout._replace(rows="role"), dims),
    ),
    "fused K before Q": _fault(
        "the spans of Q and K in a fused tensor are swapped",
        "M3.2 0x01A",
        "fused-order",
        "Q",
        FUSED,
        SIZES,
        cut=lambda fused, layout, dims: cut(fused, layout._replace(order=("key", "query", "value")), dims),
    ),
    "span one head early": _fault(
        "the half-open span of the keys starts one head too early",
        "M3.2 0x01A",
        "fused-order",
        "K",
        FUSED,
        SHARED,
        cut=lambda fused, layout, dims: cut(fused, layout, dims, _early),
    ),
    "orientation by shape": _fault(
        "a kernel is turned only where its shape asks for it, and a square one never",
        "PUB-19; M3.2 0x05",
        "orientation",
        "Q",
        Layout(kernels="in out"),
        SQUARE,
        rows_first=lambda kernel, layout: (
            kernel if kernel.shape[0] == kernel.shape[1] else rows_first(kernel, layout)
        ),
    ),
    "rows by channel, then head": _fault(
        "rows (h d) are read as (d h): heads are interleaved",
        "M3.2 0x05",
        "rows-by-head",
        "Q",
        APART,
        SHARED,
        by_head=lambda rows, heads, width: by_head(rows, width, heads).swapaxes(0, 1),
    ),
    "W_O by channel, then head": _fault(
        "rows (h v) of W_O are read as (v h)",
        "M3.2 0x09B; PUB-19",
        "out-rows-by-head",
        "output",
        FUSED,
        SHARED,
        out_blocks=lambda kernel, heads, width: out_blocks(kernel, width, heads).swapaxes(0, 1),
    ),
    "W_O by another order of heads": _fault(
        "heads of W_O are numbered from the other end than those of Q, K and V",
        "M3.2 0x05A",
        "out-rows-by-head",
        "output",
        APART,
        SIZES,
        out_blocks=lambda kernel, heads, width: out_blocks(kernel, heads, width)[::-1],
    ),
    "fused bias in another order": _fault(
        "kernels are cut head by head, their bias role by role",
        "M3.2 0x05",
        "biases-kept",
        "Q",
        GROUPED,
        SIZES,
        cut_bias=lambda fused, layout, dims: cut(fused, layout._replace(rows="role"), dims),
    ),
    "key bias from nowhere": _fault(
        "a format without a key bias leaves it at what the memory held, which changes no output",
        "PUB-20",
        "biases-kept",
        "K",
        Layout(biases=("query", "value", "out")),
        SHARED,
        no_bias=lambda heads, width, kernel: np.full((heads, width), 5.0, kernel.dtype),
    ),
}
