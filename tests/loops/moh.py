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
    straight_through=True,
) -> np.ndarray:
    """y[b, q, m]; visible [b, q, k]. The output bias is not gated.

    In a complex step a straight-through gate carries the slope of its probability, as declared.
    """
    choice = (shared, top_k, gates, router, straight_through)
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
            gate = _gates(p, row, query, *choice)
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


def gate_values(
    params, x_q, *, spec, shared, top_k, gates="paper", router="learned", straight_through=True
) -> np.ndarray:
    """The gates [b, q, h] alone."""
    p = core.plain(params)
    choice = (shared, top_k, gates, router, straight_through)
    values = []
    for rows in core.plain(x_q):
        # Turning a query by its position does not change its length: any position will do.
        values.append([_gates(p, row, core.query_heads(p, row, 0, spec), *choice) for row in rows])
    return core.array(values)


def balance(params, x_q, *, spec, shared, top_k, router="learned", valid=None, form="paper") -> complex:
    """Balance loss: sum_i P_i f_i over routed heads ("paper"), or times their number ("released").

    P_i is the mean probability of head i over valid tokens, f_i the share of tokens that select it.
    """
    p = core.plain(params)
    probability, selected, tokens = 0.0, 0.0, 0
    for b, rows in enumerate(core.plain(x_q)):
        for t, row in enumerate(rows):
            if valid is not None and not valid[b][t]:
                continue
            scores = np.array(_probability(p, row, core.query_heads(p, row, 0, spec), shared, router))
            on = core.largest(scores, top_k)
            probability = probability + scores
            selected = selected + np.array([float(i in on) for i in range(len(scores))])
            tokens += 1
    loss = sum(probability / tokens * selected / tokens)
    return loss * len(selected) if form == "released" else loss


def _probability(p, row, query, shared, router) -> list:
    """One token's distribution over its routed heads.

    "query_norm": softmax of the query lengths over their standard deviation (ddof 1, 1e-6 under
    the root).
    """
    if router == "learned":
        return core.softmax(core.vector(row, p["heads"]["moh"]["routed"]))
    lengths = [cmath.sqrt(core.dot(head, head)) for head in query[shared:]]
    mean = sum(lengths) / len(lengths)
    spread = sum((n - mean) * (n - mean) for n in lengths) / max(len(lengths) - 1, 1)
    return core.softmax([n / cmath.sqrt(spread + 1e-6) for n in lengths])


def _gates(p, row, query, shared, top_k, gates, router, straight_through) -> list:
    """One token's gates [h]: shared heads first, then routed ones."""
    own = p["heads"].get("moh", {})
    always, chosen = [1.0] * shared, [0.0] * (len(query) - shared)
    if top_k:
        probability = _probability(p, row, query, shared, router)
        on = core.largest(probability, top_k)
        if router == "query_norm":
            slope = 1j if straight_through else 0.0
            chosen = [float(i in on) + slope * x.imag for i, x in enumerate(probability)]
        else:
            chosen = [x if i in on else 0.0 for i, x in enumerate(probability)]
    if router == "query_norm":
        return always + chosen
    if "shared" in own:
        always = core.softmax(core.vector(row, own["shared"]))
    stage = core.softmax(core.vector(row, own["stage"])) if "stage" in own else [1.0, 1.0]
    if gates == "released":
        total = sum(chosen)
        chosen = [x / total * top_k for x in chosen] if top_k else chosen
        always = [x * shared for x in always] if "shared" in own else always
        stage = [2.0 * a for a in stage] if "stage" in own else stage
    return [stage[0] * x for x in always] + [stage[1] * x for x in chosen]
