"""Multi-head attention (Vaswani et al. 2017), grouped key heads (Ainslie et al. 2023), in loops."""

import numpy as np

from loops import core


def reference(
    params, x_q, x_kv, visible, *, spec, positions_q=None, positions_k=None, bias=None
) -> np.ndarray:
    """y[b, q, m] from states [b, q, m] and [b, k, m_k]; visible [b, q, k] or [b, h, q, k]."""
    p, (rows_k, rows_v) = core.plain(params), core.sources(x_kv)
    bias = None if bias is None else core.plain(bias)
    visible = np.asarray(visible)
    y = []
    for b, rows_q in enumerate(core.plain(x_q)):
        at_q = core.places(positions_q, b, len(rows_q))
        at_k = core.places(positions_k, b, len(rows_k[b]))
        keys = [core.key_heads(p, rows_k[b][s], at_k[s], spec) for s in range(len(rows_k[b]))]
        values = [core.project(row, p["value"]) for row in rows_v[b]]
        y.append([])
        for t, row in enumerate(rows_q):
            query = core.query_heads(p, row, at_q[t], spec)
            heads = []
            for h in range(len(query)):
                key_head = h * len(keys[0]) // len(query)
                value_head = h * len(values[0]) // len(query)
                seen = [
                    s
                    for s in range(len(keys))
                    if (visible[b, h, t, s] if visible.ndim == 4 else visible[b, t, s])
                ]
                logits = []
                for s in seen:
                    logit = core.scale(spec) * core.dot(query[h], keys[s][key_head])
                    logits.append(core.finite(logit, spec, bias, b, h, t, s))
                weights = core.softmax(logits)
                head = [0.0] * len(values[0][0])
                for weight, s in zip(weights, seen, strict=True):
                    for c in range(len(head)):
                        head[c] += weight * values[s][value_head][c]
                heads.append(head)
            y[b].append(core.merge(heads, p["out"]))
    return core.array(y)
