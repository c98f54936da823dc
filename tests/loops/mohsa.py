"""Multi-overlapped-head self-attention (Zhang et al. 2024, arXiv 2410.14874), in loops.

Head i also reads the `overlap` channels that lie on either side of its own in the packed axis.
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
    overlap,
) -> np.ndarray:
    """y[b, q, m]; visible [b, q, k]. Rotary acts before heads are widened; scale of width d."""
    p, (rows_k, rows_v) = core.plain(params), core.sources(x_kv)
    bias = None if bias is None else core.plain(bias)
    visible = np.asarray(visible)
    y = []
    for b, rows_q in enumerate(core.plain(x_q)):
        at_q = core.places(positions_q, b, len(rows_q))
        at_k = core.places(positions_k, b, len(rows_k[b]))
        keys = []
        for s, row in enumerate(rows_k[b]):
            keys.append(_widen(core.key_heads(p, row, at_k[s], spec), overlap))
        values = [_widen(core.project(row, p["value"]), overlap) for row in rows_v[b]]
        y.append([])
        for t, row in enumerate(rows_q):
            query = _widen(core.query_heads(p, row, at_q[t], spec), overlap)
            seen = [s for s in range(len(keys)) if visible[b, t, s]]
            heads = []
            for h in range(len(query)):
                key_head = h * len(keys[0]) // len(query)
                value_head = h * len(values[0]) // len(query)
                logits = []
                for s in seen:
                    logit = core.scale(spec) * core.dot(query[h], keys[s][key_head])
                    logits.append(core.finite(logit, spec, bias, b, h, t, s))
                head = [0.0] * len(values[0][0])
                for weight, s in zip(core.softmax(logits), seen, strict=True):
                    for c in range(len(head)):
                        head[c] += weight * values[s][value_head][c]
                heads.append(head)
            y[b].append(core.merge(heads, p["out"]))
    return core.array(y)


def _widen(heads, overlap):
    """Channels i*d - r .. (i+1)*d + r of the packed axis for head i; zeros beyond either end."""
    d = len(heads[0])
    packed = [x for head in heads for x in head]
    wide = []
    for i in range(len(heads)):
        channels = range(i * d - overlap, (i + 1) * d + overlap)
        wide.append([packed[c] if 0 <= c < len(packed) else 0.0 for c in channels])
    return wide
