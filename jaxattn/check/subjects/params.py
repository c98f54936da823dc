"""What parameters of a layer mean: axes by leaf, sizes, and the function that they are, by loops.

y = sum_h heads[h] W_O[h] + b_O
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import numpy as np

from jaxattn.check.law import Outcome, loops
from jaxattn.check.subjects.attention import Call

Params = dict[str, Any]  # role -> {"kernel": ..., "bias": ...}, as in `AXES`

ROLES = ("query", "key", "value")
AXES = {
    "query/kernel": "m h d", "key/kernel": "m h d", "value/kernel": "m h d", "out/kernel": "h d m",
    "query/bias": "h d", "key/bias": "h d", "value/bias": "h d", "out/bias": "m",
}  # fmt: skip


class Dims(NamedTuple):
    """Sizes of a layer: model width, heads, key heads, width of queries and keys, width of values."""

    m: int
    h: int
    g: int
    d: int
    v: int

    def side(self, role: str) -> tuple[int, int]:
        """Heads and width of a role."""
        return self.h if role in ("query", "out") else self.g, self.v if role in ("value", "out") else self.d

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every leaf, by path."""
        shapes: dict[str, tuple[int, ...]] = {}
        for role in ROLES:
            shapes |= {f"{role}/kernel": (self.m, *self.side(role)), f"{role}/bias": self.side(role)}
        return shapes | {"out/kernel": (*self.side("out"), self.m), "out/bias": (self.m,)}


def leaves(params: Params) -> dict[str, np.ndarray]:
    """Parameters by path, as numpy arrays of their own types."""
    return {f"{role}/{leaf}": np.asarray(x) for role, own in params.items() for leaf, x in own.items()}


def tree(flat: dict[str, Any]) -> Params:
    """Leaves by path as parameters."""
    params: Params = {}
    for path, x in flat.items():
        role, leaf = path.split("/")
        params.setdefault(role, {})[leaf] = x
    return params


def drawn(dims: Dims, seed: int = 0, biases: Iterable[str] = (*ROLES, "out")) -> Params:
    """Normal parameters in float32."""
    rng = np.random.default_rng(seed)
    draw = {path: rng.normal(size=shape).astype(np.float32) for path, shape in dims.shapes().items()}
    kept = {f"{role}/bias" for role in biases}
    return tree({path: x for path, x in draw.items() if path in kept or path.endswith("kernel")})


def states(dims: Dims, b: int = 2, t: int = 3, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(b, t, dims.m))


def left(params: Params, kept: Iterable[int]) -> dict[str, np.ndarray]:
    """Leaves by path, of the heads that are kept and in their order."""
    kept = list(kept)

    def cut(path: str, x: np.ndarray) -> np.ndarray:
        axes = AXES[path].split()
        return np.take(x, kept, axes.index("h")) if "h" in axes else x

    return {path: cut(path, x) for path, x in leaves(params).items()}


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> Outcome:
    """How many leaves are not those that are wanted, bit for bit and in type."""
    wrong = [p for p in got.keys() | want.keys() if p not in got or p not in want or differ(got[p], want[p])]
    first = min(wrong, default="")
    return Outcome(len(wrong), 0.0, f"{first} is another" if wrong else "")


def differ(got: np.ndarray, want: np.ndarray) -> bool:
    return got.dtype != want.dtype or got.shape != want.shape or bool(np.any(got != want))


def attended(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Heads [b, t, h, v] by loops."""
    return loops(Call(*(cast(Any, x) for x in (query, key, value))))


def projected(params: Params, role: str, x: np.ndarray) -> np.ndarray:
    """States [..., t, m] to heads [..., t, h, d], in float64."""
    leaf = params[role]
    y = np.einsum("...tm,mhd->...thd", x, np.asarray(leaf["kernel"], np.float64))
    return y + np.asarray(leaf.get("bias", 0.0), np.float64)


def terms(params: Params, x: np.ndarray) -> np.ndarray:
    """What each head adds to the output: heads[h] W_O[h], as [b, t, h, m]."""
    heads = attended(*(projected(params, role, x) for role in ROLES))
    return np.einsum("bthv,hvm->bthm", heads, np.asarray(params["out"]["kernel"], np.float64))


def gated(params: Params, x: np.ndarray, gates: Any = 1.0) -> np.ndarray:
    """The layer [b, t, m] with each head times its gate [h]."""
    gates = np.broadcast_to(np.asarray(gates, np.float64), np.shape(params["out"]["kernel"])[:1])
    return np.einsum("bthm,h->btm", terms(params, x), gates) + params["out"].get("bias", 0.0)
