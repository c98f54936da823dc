"""Parameters at which each variant is MHA, written out by hand from its equations."""

from typing import Any

import numpy as np


def with_own(name: str, own: Any, params: Any) -> Any:
    return {**params, "heads": {name: own}}


def eye_maps(params: Any, heads: int) -> Any:
    own = {site: {"kernel": np.eye(heads)} for site in ("pre", "post")}
    return with_own("talking_heads", own, params)


def no_dynamics(params: Any, heads: int, rng: np.random.Generator) -> Any:
    """Only what ends a path is zero: the other leaves are as they come."""

    def side(width):
        return {
            "hidden": rng.normal(size=(width, 2, heads)),
            "down": rng.normal(size=(heads, 1, heads)),
            "up": np.zeros((heads, 1, heads)),
            "diag": np.zeros((width, heads)),
        }

    widths = {s: params[s]["kernel"].shape[0] for s in ("query", "key")}
    stage = {**{s: side(width) for s, width in widths.items()}, "static": np.zeros((2, 2, 2))}
    return with_own("dcmha", {"pre": stage, "post": stage}, params)


def zero_routers(params: Any, shared: int, routed: int) -> Any:
    width = params["query"]["kernel"].shape[0]
    sizes = {"routed": routed, "shared": shared, "stage": 2}
    own = {name: np.zeros((width, size)) for name, size in sizes.items() if size > 1}
    return with_own("moh", own if shared and routed else {"routed": own["routed"]}, params)


def packed_bases(params: Any) -> Any:
    """Heads side by side in one basis, a mixing row picks its own block, W_K b_q is the content."""
    query, key = params["query"]["kernel"], params["key"]["kernel"]
    _, heads, d = query.shape
    own = {
        "mixing": np.kron(np.eye(heads), np.ones((1, d))),
        "content_bias": np.zeros((len(key), heads)),
    }
    if "bias" in params["query"]:
        own["content_bias"] = (key * params["query"]["bias"]).sum(-1)
    changed = {
        "query": {"kernel": query.reshape(len(query), 1, heads * d)},
        "key": {"kernel": key.reshape(len(key), 1, heads * d)},
    }
    return with_own("collab", own, {**params, **changed})
