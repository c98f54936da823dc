"""Mixture-of-Head attention (Jin et al. 2024, arXiv 2410.11842), in loops.

The first `shared` heads are always on, of the others each token selects `top_k`.
"""

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
    shared,
    top_k,
    gates="paper",
    router="learned",
) -> np.ndarray:
    """y[b, q, m]; visible [b, q, k]. The output bias is not gated."""
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
            gate = _gates(p, row, spec, shared, top_k, gates, router)
            heads = []
            for h in range(len(query)):
                key_head = h * len(keys[0]) // len(query)
                value_head = h * len(values[0]) // len(query)
                seen = [s for s in range(len(keys)) if visible[b, t, s]]
                logits = []
                for s in seen:
                    logit = core.scale(spec) * core.dot(query[h], keys[s][key_head])
                    logits.append(core.finite(logit, spec, bias, b, h, t, s))
                head = [0.0] * len(values[0][0])
                for weight, s in zip(core.softmax(logits), seen, strict=True):
                    for c in range(len(head)):
                        head[c] += gate[h] * weight * values[s][value_head][c]
                heads.append(head)
            y[b].append(core.merge(heads, p["out"]))
    return core.array(y)


def gate_values(params, x_q, *, spec, shared, top_k, gates="paper", router="learned") -> np.ndarray:
    """The gates [b, q, h] alone."""
    p = core.plain(params)
    return core.array(
        [
            [_gates(p, row, spec, shared, top_k, gates, router) for row in rows]
            for rows in core.plain(x_q)
        ]
    )


def balance(params, x_q, *, shared, top_k, valid=None, form="paper"):
    """Balance loss: sum_i P_i f_i over routed heads ("paper"), or times their number ("released").

    P_i is the mean probability of head i over valid tokens, f_i the share of tokens that select it.
    """
    own = core.plain(params)["heads"]["moh"]
    routed = len(own["routed"][0])
    probability, selected, tokens = [0.0] * routed, [0] * routed, 0
    for b, rows in enumerate(core.plain(x_q)):
        for t, row in enumerate(rows):
            if valid is not None and not valid[b][t]:
                continue
            p = core.softmax(core.vector(row, own["routed"]))
            tokens += 1
            for i in range(routed):
                probability[i] += p[i]
            for i in core.largest(p, top_k):
                selected[i] += 1
    loss = sum(probability[i] / tokens * selected[i] / tokens for i in range(routed))
    return loss * routed if form == "released" else loss


def _gates(p, row, spec, shared, top_k, gates, router):
    """One token's gates [h]: shared heads first, then routed ones."""
    own = p["heads"].get("moh", {})
    if router == "query_norm":
        # Heads whose query is longest are on; a 0/1 gate has no derivative of its own.
        query = core.project(row, p["query"])
        lengths = [cmath.sqrt(core.dot(query[h], query[h])) for h in range(shared, len(query))]
        on = core.largest(lengths, top_k)
        return [1.0] * shared + [1.0 if i in on else 0.0 for i in range(len(lengths))]
    released = gates == "released"
    always = [1.0] * shared
    if "shared" in own:
        always = core.softmax(core.vector(row, own["shared"]))
        if released:
            always = [shared * x for x in always]
    chosen = []
    if "routed" in own:
        probability = core.softmax(core.vector(row, own["routed"]))
        on = core.largest(probability, top_k)
        chosen = [x if i in on else 0.0 for i, x in enumerate(probability)]
        if released:
            total = sum(chosen)
            chosen = [x / total * top_k for x in chosen]
    if "stage" in own:
        stage = core.softmax(core.vector(row, own["stage"]))
        if released:
            stage = [2.0 * x for x in stage]
        always = [stage[0] * x for x in always]
        chosen = [stage[1] * x for x in chosen]
    return always + chosen
