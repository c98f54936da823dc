"""The kind of subject that reads a checkpoint: stored tensors to parameters.

It can be wrong while every shape is right, so numbers are followed one by one: each says where it belongs.
What a stored layout means is written out here row by row, apart from any converter.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from jaxattn.check.subjects.params import ROLES, Dims, Params, attended


class Layout(NamedTuple):
    """How a checkpoint holds the four projections.

    Attributes:
        rows: "apart", a tensor for each role with rows (h d); "role", one tensor "qkv" with all rows of a
            role, then all of the next (torch's `in_proj_weight`, GPT-2's `c_attn`); "group", one tensor
            "qkv" with, for each key head, the queries that it serves, its key and its value (GPT-NeoX).
        order: of the roles in "qkv".
        kernels: "out in", as `torch.nn.Linear` stores them, or "in out", as GPT-2's `Conv1D`; also where
            they are square, where no shape tells.
        split: whether heads are an axis of their own, [m, h, d] and [h, v, m], as in Flax; for rows "apart"
            and kernels "in out".
        biases: the roles that have one.
    """

    rows: Literal["apart", "role", "group"] = "apart"
    order: tuple[str, ...] = ROLES
    kernels: Literal["out in", "in out"] = "out in"
    split: bool = False
    biases: tuple[str, ...] = (*ROLES, "out")


class Conversion(NamedTuple):
    """A reader of a checkpoint.

    Attributes:
        name: as a verdict calls it.
        convert: from the stored tensors and the sizes to parameters: `query`, `key`, `value` with kernel
            [m, h, d] and bias [h, d], `out` with kernel [h, v, m] and bias [m]. Stored are "qkv" and "out",
            or "query", "key", "value" and "out", each with "kernel" [rows, m] or turned and "bias" [rows].
        layout: of the stored tensors.
        store: the way back; asked where `supports` has "store".
        supports: some of "gqa", "d_v" (values of another width than keys) and "store".
        plain, version, least_heads, least_width: as in `Subject`.
    """

    name: str
    convert: Callable[[Params, Dims], Params]
    layout: Layout = Layout()
    store: Callable[[Params, Dims], Params] | None = None
    supports: frozenset[str] = frozenset({"gqa", "d_v"})
    plain: bool = True
    version: str = ""
    least_heads: int = 1
    least_width: int = 1


# What a layout means


def owners(layout: Layout, dims: Dims) -> dict[str, list[tuple[str, int, int]]]:
    """For each stored tensor but `out`: the role, the head and the channel of each of its rows.

    Example:
        >>> by_head = owners(Layout("group"), Dims(m=4, h=2, g=2, d=1, v=1))
        >>> [(role[0], head) for role, head, _ in by_head["qkv"]]
        [('q', 0), ('k', 0), ('v', 0), ('q', 1), ('k', 1), ('v', 1)]
    """
    heads = {role: range(dims.side(role)[0]) for role in ROLES}

    def rows(role: str, some: range) -> list[tuple[str, int, int]]:
        return [(role, head, c) for head in some for c in range(dims.side(role)[1])]

    if layout.rows == "apart":
        return {role: rows(role, heads[role]) for role in ROLES}
    if layout.rows == "role":
        return {"qkv": [row for role in layout.order for row in rows(role, heads[role])]}
    n = dims.h // dims.g
    own = lambda role, group: range(group * n, group * n + n) if role == "query" else range(group, group + 1)
    return {"qkv": [row for g in range(dims.g) for role in layout.order for row in rows(role, own(role, g))]}


def store(params: Params, layout: Layout, dims: Dims) -> Params:
    """Parameters as a checkpoint of this layout holds them.

    Raises:
        ValueError: for biases of some of the roles of one fused tensor.

    Example:
        >>> dims = Dims(m=3, h=1, g=1, d=2, v=2)
        >>> full = {role: {"kernel": np.ones(dims.shapes()[f"{role}/kernel"])} for role in (*ROLES, "out")}
        >>> store(full, Layout("role", biases=()), dims)["qkv"]["kernel"].shape
        (6, 3)
    """
    stored: Params = {}
    for name, rows in owners(layout, dims).items():
        kernel = np.stack([params[role]["kernel"][:, head, c] for role, head, c in rows])
        stored[name] = {"kernel": _turned(kernel, layout)}
        with_bias = {role in layout.biases for role, _, _ in rows}
        if len(with_bias) == 2:
            raise ValueError(
                f"Layout: got biases {layout.biases} for one tensor of {layout.order}, expected all or none. "
                "Fix: rows='apart'."
            )
        if with_bias == {True}:
            stored[name]["bias"] = np.stack([params[role]["bias"][head, c] for role, head, c in rows])
    heads, width = dims.side("out")
    columns = [params["out"]["kernel"][head, c] for head in range(heads) for c in range(width)]
    stored["out"] = {"kernel": _turned(np.stack(columns, 1), layout)}
    if "out" in layout.biases:
        stored["out"]["bias"] = params["out"]["bias"]
    if layout.split:
        for role in (*ROLES, "out"):
            for leaf, x in stored[role].items():
                stored[role][leaf] = x.reshape(dims.shapes()[f"{role}/{leaf}"])
    return stored


def _turned(kernel: np.ndarray, layout: Layout) -> np.ndarray:
    """Between [out, in] and how the layout has it; its own inverse."""
    return kernel if layout.kernels == "out in" else kernel.T


def as_stored(stored: Params, layout: Layout, dims: Dims, x: np.ndarray) -> np.ndarray:
    """The layer that a checkpoint means, row by row: states x [b, t, m] to [b, t, m]."""
    sides = {role: np.zeros((*x.shape[:2], *dims.side(role))) for role in ROLES}
    for name, rows in owners(layout, dims).items():
        bias = stored[name].get("bias")
        flat = np.asarray(stored[name]["kernel"], np.float64)
        flat = _turned(flat.reshape(len(flat), -1), layout)
        for row, (role, head, c) in enumerate(rows):
            sides[role][:, :, head, c] = x @ flat[row]
            if bias is not None:
                sides[role][:, :, head, c] += np.asarray(bias, np.float64).ravel()[row]
    heads = attended(sides["query"], sides["key"], sides["value"])
    flat = np.asarray(stored["out"]["kernel"], np.float64).reshape(
        (dims.m, -1) if layout.kernels == "out in" else (-1, dims.m)
    )
    return heads.reshape(*x.shape[:2], -1) @ _turned(flat, layout).T + stored["out"].get("bias", 0.0)
