"""Talking-Heads attention (Shazeer et al. 2020, arXiv 2003.02436), in loops.

Three head counts: hl heads make logits, hs heads take the softmax, hv heads read values.
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
    pre=True,
    post=True,
    dynamic=(),
) -> np.ndarray:
    """y[b, q, m]; visible [b, q, k]. The second mix, bias included, never reaches a hidden pair.

    dynamic names among "pre_query", "pre_key", "post_query", "post_key" add a whole
    per-row matrix x[q] @ W or x[k] @ W to that stage's kernel.
    """
    p, (rows_k, rows_v) = core.plain(params), core.sources(x_kv)
    own = p["heads"]["talking_heads"]
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
            seen = [s for s in range(len(keys)) if visible[b, t, s]]
            mixed = []  # [seen][hs]
            for s in seen:
                logits = []  # [hl]
                for h in range(len(query)):
                    key_head = h * len(keys[0]) // len(query)
                    logits.append(core.scale(spec) * core.dot(query[h], keys[s][key_head]))
                if pre:
                    logits = _mix(logits, own["pre"], "pre", dynamic, row, rows_k[b][s])
                mixed.append([core.finite(x, spec, bias, b, h, t, s) for h, x in enumerate(logits)])
            softmax_heads = len(mixed[0]) if seen else 0
            columns = [core.softmax([pair[h] for pair in mixed]) for h in range(softmax_heads)]
            head_count = len(p["out"]["kernel"])
            heads = [[0.0] * len(values[0][0]) for _ in range(head_count)]
            for n, s in enumerate(seen):
                weights = [column[n] for column in columns]  # [hs] of this pair
                if post:
                    weights = _mix(weights, own["post"], "post", dynamic, row, rows_k[b][s])
                for h in range(head_count):
                    value_head = h * len(values[0]) // head_count
                    for c in range(len(heads[h])):
                        heads[h][c] += weights[h] * values[s][value_head][c]
            y[b].append(core.merge(heads, p["out"]))
    return core.array(y)


def _mix(given, stage, name, dynamic, row_q, row_k):
    """given [i] times (kernel + x_q W_q + x_k W_k) [i][o], plus the stage's bias [o]."""
    kernel = stage["kernel"]
    out = []
    for o in range(len(kernel[0])):
        total = stage["bias"][o] if "bias" in stage else 0.0
        for i in range(len(given)):
            entry = kernel[i][o]
            if f"{name}_query" in dynamic:
                entry += sum(row_q[m] * stage["query"][m][i][o] for m in range(len(row_q)))
            if f"{name}_key" in dynamic:
                entry += sum(row_k[m] * stage["key"][m][i][o] for m in range(len(row_k)))
            total += given[i] * entry
        out.append(total)
    return out
