"""Dynamically composable attention (Xiao et al. 2024, arXiv 2405.08553), in loops."""

import cmath

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
    groups=1,
    gelu="tanh",
    qk_norm=None,
    pre=True,
    post=True,
) -> np.ndarray:
    """y[b, q, m]; visible [b, q, k]. Logits are composed before the mask, weights after softmax."""
    p, (rows_k, rows_v) = core.plain(params), core.sources(x_kv)
    own = p["heads"]["dcmha"]
    spec = {**spec, "qk_norm": qk_norm or spec.get("qk_norm")}
    bias = None if bias is None else core.plain(bias)
    visible = np.asarray(visible)
    stages = [name for name, wanted in (("pre", pre), ("post", post)) if wanted]
    y = []
    for b, rows_q in enumerate(core.plain(x_q)):
        at_q = core.places(positions_q, b, len(rows_q))
        at_k = core.places(positions_k, b, len(rows_k[b]))
        keys = [core.key_heads(p, rows_k[b][s], at_k[s], spec) for s in range(len(rows_k[b]))]
        values = [core.project(row, p["value"]) for row in rows_v[b]]
        by_key = {
            name: [_weights(row, own[name]["key"], groups, gelu) for row in rows_k[b]] for name in stages
        }
        y.append([])
        for t, row in enumerate(rows_q):
            query = core.query_heads(p, row, at_q[t], spec)
            by_query = {name: _weights(row, own[name]["query"], groups, gelu) for name in stages}
            seen = [s for s in range(len(keys)) if visible[b, t, s]]
            composed = []  # [seen][h]
            for s in seen:
                logits = []
                for h in range(len(query)):
                    key_head = h * len(keys[0]) // len(query)
                    logits.append(core.scale(spec) * core.dot(query[h], keys[s][key_head]))
                if pre:
                    static = own["pre"].get("static")
                    logits = _compose(logits, by_query["pre"], by_key["pre"][s], static, groups)
                composed.append([core.finite(x, spec, bias, b, h, t, s) for h, x in enumerate(logits)])
            columns = [core.softmax([pair[h] for pair in composed]) for h in range(len(query))]
            heads = [[0.0] * len(values[0][0]) for _ in query]
            for n, s in enumerate(seen):
                weights = [column[n] for column in columns]
                if post:
                    static = own["post"].get("static")
                    weights = _compose(weights, by_query["post"], by_key["post"][s], static, groups)
                for h in range(len(heads)):
                    value_head = h * len(values[0]) // len(heads)
                    for c in range(len(heads[h])):
                        heads[h][c] += weights[h] * values[s][value_head][c]
            y[b].append(core.merge(heads, p["out"]))
    return core.array(y)


def _weights(row, generator, groups, flavour):
    """One row's w1 [r][h] (contracts; RMS over the heads of a group), w2 [r][h] and gate [h]."""
    hidden_kernel, down, up = generator["hidden"], generator["down"], generator["up"]
    units, ranks, heads = len(down), len(down[0]), len(down[0][0])
    members = heads // groups
    hidden = []  # [g][u]
    for g in range(groups):
        hidden.append([])
        for u in range(units):
            before = sum(row[m] * hidden_kernel[m][g][u] for m in range(len(row)))
            hidden[g].append(core.gelu(before, flavour))
    w1 = [[0.0] * heads for _ in range(ranks)]
    w2 = [[0.0] * heads for _ in range(ranks)]
    for r in range(ranks):
        for h in range(heads):
            for u in range(units):
                w1[r][h] += hidden[h // members][u] * down[u][r][h]
                w2[r][h] += hidden[h // members][u] * up[u][r][h]
        for g in range(groups):
            group = range(g * members, (g + 1) * members)
            root = cmath.sqrt(sum(w1[r][h] * w1[r][h] for h in group) / members + 1e-6)
            for h in group:
                w1[r][h] /= root
    gate = [cmath.tanh(x) for x in core.vector(row, generator["diag"])]
    return w1, w2, gate


def _compose(given, by_query, by_key, static, groups):
    """given[n] + static + rank terms and gates of query row and key row; all read `given`."""
    members = len(given) // groups
    out = []
    for h in range(len(given)):
        g = h // members
        group = range(g * members, (g + 1) * members)
        total = given[h]
        if static is not None:
            total += sum(given[i] * static[g][i - g * members][h - g * members] for i in group)
        for w1, w2, gate in (by_query, by_key):
            for r in range(len(w1)):
                total += sum(given[i] * w1[r][i] for i in group) * w2[r][h]
            total += given[h] * gate[h]
        out.append(total)
    return out
