"""Collaborative multi-head attention (Cordonnier et al. 2020, arXiv 2006.16362), in loops.

One query and one key of width D~ serve all heads; each head weighs the channels by its mixing row.
"""

import numpy as np

from loops import core


def reference(
    params,
    x_q,
    x_kv,
    visible,
    *,
    spec,
    positions_q=None,
    positions_k=None,
    bias=None,
    content_bias=True,
) -> np.ndarray:
    """y[b, q, m]; visible [b, q, k]. Scale and rotary blocks follow the source width d, not D~."""
    p, (rows_k, rows_v) = core.plain(params), core.sources(x_kv)
    own = p["heads"]["collab"]
    bias = None if bias is None else core.plain(bias)
    visible = np.asarray(visible)
    mixing = own["mixing"]
    y = []
    for b, rows_q in enumerate(core.plain(x_q)):
        at_q = core.places(positions_q, b, len(rows_q))
        at_k = core.places(positions_k, b, len(rows_k[b]))
        keys, content = [], []  # [s][c] shared by all heads, [s][h]
        for s, row in enumerate(rows_k[b]):
            keys.append(_rotate_blocks(core.project(row, p["key"])[0], at_k[s], spec))
            content.append(core.vector(row, own["content_bias"]) if content_bias else [0.0] * len(mixing))
        values = [core.project(row, p["value"]) for row in rows_v[b]]
        y.append([])
        for t, row in enumerate(rows_q):
            basis = core.project(row, p["query"])[0]
            seen = [s for s in range(len(keys)) if visible[b, t, s]]
            heads = []
            for h in range(len(mixing)):
                mixed = [basis[c] * mixing[h][c] for c in range(len(basis))]
                query = _rotate_blocks(mixed, at_q[t], spec)
                value_head = h * len(values[0]) // len(mixing)
                logits = []
                for s in seen:
                    logit = core.scale(spec) * (core.dot(query, keys[s]) + content[s][h])
                    logits.append(core.finite(logit, spec, bias, b, h, t, s))
                head = [0.0] * len(values[0][0])
                for weight, s in zip(core.softmax(logits), seen, strict=True):
                    for c in range(len(head)):
                        head[c] += weight * values[s][value_head][c]
                heads.append(head)
            y[b].append(core.merge(heads, p["out"]))
    return core.array(y)


def _rotate_blocks(wide, position, spec):
    """Rotary positions in blocks of d channels."""
    d = core.width(spec)
    if spec.get("rotary") is not None:
        for start in range(0, len(wide), d):
            wide = core.rotate(wide, position, spec["rotary"], start, d)
    return wide
