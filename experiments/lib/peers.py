"""What other libraries do, for `bench.py` only: torch where it is installed, Flax, JAX."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

HAS_TORCH = importlib.util.find_spec("torch") is not None
Work = Callable[[], None]


def torch_work(name: str, batch: int, length: int, heads: int, width: int, backward: bool) -> Work:
    """A causal attention of torch on its own random heads: `sdpa`, `talking_heads` or `dcmha` (dense).

    The last two are plain formulas: what a torch user can write today, as no kernel mixes heads.
    """
    import torch  # pyright: ignore[reportMissingImports]  (not a dependency)

    draw = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Any:
        return torch.randn(*shape, generator=draw).requires_grad_(backward)

    query, key, value = (leaf(batch, heads, length, width) for _ in range(3))
    hidden = torch.ones(length, length, dtype=torch.bool).tril().logical_not()
    rank = 2
    leaves = [query, key, value]
    if name == "talking_heads":
        leaves += [leaf(heads, heads), leaf(heads, heads)]
    if name == "dcmha":
        for _ in range(4):  # pre and post, from query and from key
            leaves += [leaf(batch, length, heads, rank), leaf(batch, length, rank, heads)]
            leaves.append(leaf(batch, length, heads))

    def dynamic(x: Any, stage: int) -> Any:
        out = x
        for side, n in enumerate("qk"):
            first = 3 + 6 * stage + 3 * side
            down, up, diag = leaves[first : first + 3]
            low = torch.einsum(f"bhqk,b{n}hr->brqk", x, down)
            out = out + torch.einsum(f"brqk,b{n}rh->bhqk", low, up)
            out = out + torch.einsum(f"bhqk,b{n}h->bhqk", x, diag)
        return out

    def mixed(x: Any, stage: int) -> Any:
        if name == "dcmha":
            return dynamic(x, stage)
        return torch.einsum("bhqk,hg->bgqk", x, leaves[3 + stage])

    def forward() -> Any:
        if name == "sdpa":
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = mixed(query @ key.transpose(-1, -2) / width**0.5, 0)
        weights = mixed(logits.masked_fill(hidden, -torch.inf).softmax(-1), 1)
        return weights.masked_fill(hidden, 0.0) @ value

    def work() -> None:
        out = forward()
        if backward:
            torch.autograd.grad(out.square().sum(), leaves)

    return work


def flax_layer(heads: int, width: int) -> Any:
    """Flax's own NNX attention sublayer without biases."""
    from flax import nnx

    return nnx.MultiHeadAttention(
        num_heads=heads,
        in_features=heads * width,
        use_bias=False,
        decode=False,
        rngs=nnx.Rngs(0),
    )


def causal_mask(length: int) -> np.ndarray:
    """[1, 1, q, k] bool, as Flax takes it."""
    return np.tril(np.ones((1, 1, length, length), bool))
