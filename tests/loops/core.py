"""What the loop references share: numbers, one projection, norms, rotary angles, softmax, GELU.

The attention formula itself is written out in each variant's own file.
"""

import cmath
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import erf


def plain(tree):
    """Arrays (in nested dicts or pairs) as nested lists of Python numbers."""
    if isinstance(tree, Mapping):
        return {name: plain(leaf) for name, leaf in tree.items()}
    return np.asarray(tree).tolist()


def sources(x_kv) -> tuple[list, list]:
    """Key rows and value rows: one array serves as both, a pair gives each its own."""
    x_k, x_v = x_kv if isinstance(x_kv, tuple) else (x_kv, x_kv)
    return plain(x_k), plain(x_v)


def array(y) -> np.ndarray:
    """The output as float64, or complex128 where a complex step shows in it."""
    y = np.array(y, dtype=complex)
    return y if y.imag.any() else y.real.copy()


def places(positions, b: int, length: int) -> list:
    """Positions of row b of the batch: given as [t] or [b, t], else counted from 0."""
    if positions is None:
        return list(range(length))
    positions = np.asarray(positions)
    return (positions if positions.ndim == 1 else positions[b]).tolist()


def dot(left: Sequence, right: Sequence):
    return sum((x * y for x, y in zip(left, right, strict=True)), 0.0)


def vector(row, matrix):
    """row [i] times matrix [i][o]."""
    return [sum(row[i] * matrix[i][o] for i in range(len(row))) for o in range(len(matrix[0]))]


def project(row, side) -> list[list]:
    """row [m] times kernel [m][h][d] plus bias [h][d]."""
    kernel, bias = side["kernel"], side.get("bias")
    heads = []
    for h in range(len(kernel[0])):
        head = []
        for c in range(len(kernel[0][0])):
            value = sum(row[m] * kernel[m][h][c] for m in range(len(row)))
            head.append(value + (bias[h][c] if bias is not None else 0.0))
        heads.append(head)
    return heads


def merge(heads, out) -> list:
    """sum_h heads[h] [v] times kernel [h][v][m], plus bias [m]."""
    kernel, bias = out["kernel"], out.get("bias")
    y = []
    for m in range(len(kernel[0][0])):
        value = sum(heads[h][c] * kernel[h][c][m] for h in range(len(heads)) for c in range(len(heads[h])))
        y.append(value + (bias[m] if bias is not None else 0.0))
    return y


def norm(head, scale, kind):
    """Root mean square ("rms") or layer ("layer") norm over channels; learnt scale, eps 1e-6."""
    if kind is None:
        return head
    if kind == "layer":
        mean = sum(head) / len(head)
        head = [x - mean for x in head]
    root = cmath.sqrt(sum(x * x for x in head) / len(head) + 1e-6)
    return [x / root * s for x, s in zip(head, scale, strict=True)]


def rotate(head, position, rotary, start=0, block=None):
    """Rotary positions on the block of channels that begins at `start`: its first `rotary.width`.

    Pair j turns by position * base^(-2j/width); "half" pairs channel j with j + width/2,
    "adjacent" pairs 2j with 2j + 1.
    """
    if rotary is None:
        return head
    width = rotary.width or block or len(head)
    turned = list(head)
    for j in range(width // 2):
        first, second = (j, j + width // 2) if rotary.pairs == "half" else (2 * j, 2 * j + 1)
        angle = position * rotary.base ** (-2.0 * j / width)
        x, y = head[start + first], head[start + second]
        turned[start + first] = x * math.cos(angle) - y * math.sin(angle)
        turned[start + second] = x * math.sin(angle) + y * math.cos(angle)
    return turned


def query_heads(params, row, position, spec) -> list[list]:
    """Projection, then norm, then rotary positions of one query row."""
    return _heads(params, "query", row, position, spec)


def key_heads(params, row, position, spec) -> list[list]:
    """Projection, then norm, then rotary positions of one key row."""
    return _heads(params, "key", row, position, spec)


def _heads(params, side, row, position, spec):
    kind, rotary = spec.get("qk_norm"), spec.get("rotary")
    scale = params[f"{side}_ln"]["scale"] if kind else None
    return [rotate(norm(head, scale, kind), position, rotary) for head in project(row, params[side])]


def width(spec) -> int:
    """Source head width d."""
    return spec.get("d_qk") or spec["model"] // spec["heads"]


def scale(spec) -> float:
    """Logit scale: the one asked for, else 1/sqrt(d)."""
    given = spec.get("scale")
    return 1.0 / math.sqrt(width(spec)) if given is None else given


def finite(logit, spec, bias, b, h, t, s):
    """The pair's additive bias, then the soft cap."""
    if bias is not None:
        row = bias[b] if np.ndim(bias) == 4 else bias
        logit = logit + (row[0] if len(row) == 1 else row[h])[t][s]
    cap = spec.get("softcap")
    return cap * cmath.tanh(logit / cap) if cap else logit


def softmax(logits: Sequence) -> list:
    """exp(l - max) / sum, the maximum taken by real part; no logits, no weights."""
    if not logits:
        return []
    top = max(complex(x).real for x in logits)
    raised = [cmath.exp(x - top) for x in logits]
    total = sum(raised)
    return [x / total for x in raised]


def largest(scores: Sequence, k: int) -> set[int]:
    """Indices of the k largest real parts; of equal ones the first."""
    order = sorted(range(len(scores)), key=lambda i: (-complex(scores[i]).real, i))
    return set(order[:k])


def gelu(x, flavour):
    """x Phi(x), exact ("erf") or by the tanh approximation ("tanh")."""
    if flavour == "erf":
        return 0.5 * x * (1.0 + complex(erf(complex(x) / math.sqrt(2.0))))
    return 0.5 * x * (1.0 + cmath.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
