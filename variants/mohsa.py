"""MOHSA: neighbouring heads overlap in their channels.

Changes: query, key and value of each head also hold r channels of the head before and of the head after
it. Zhang et al., 2024, https://arxiv.org/abs/2410.14874
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

import jaxattn as ja
from jaxattn.axes import check_option


class mohsa(ja.HeadTransform):
    """Multi-overlapped-head self-attention.

    head i holds packed channels [i d - r, (i+1) d + r), zeros beyond both ends, in query, key and value;
    heads[i] = softmax(scale * Q'[i] K'[i]^T) V'[i],  scale = 1/sqrt(d), not of the widened width

    The output map has d_v + 2 r rows a head; its first r and last r rows are dead (their inputs are
    padding). Keys and values are cached narrow and widened when read. One key head a head: `kv_heads` is
    refused. The head order has a meaning, so no heads are exchangeable.

    Args:
        overlap: r, channels from each neighbour; 0 is MHA. See `overlap_schedule` for a depth's worth.
        beyond_neighbours: allow r above the head width, where second neighbours come in.

    Raises:
        ValueError: for a negative overlap, one above the head width unless asked for, or one that would
            split a rotary pair.

    Example:
        >>> attn = ja.attention(ja.HeadSpec(model=8, heads=2), mohsa(overlap=1))
        >>> attn.init(jax.random.key(0))["out"]["kernel"].shape
        (2, 6, 8)

    Source: Zhang et al., 2024, section 3.2; the released code (its paper speaks of adjacent heads only,
    its code takes any r).
    """

    overlap: int = 4
    beyond_neighbours: bool = False

    def __post_init__(self):
        if self.overlap < 0:
            raise ValueError(f"mohsa: overlap = {self.overlap}, expected at least 0. Fix: 0 is plain MHA.")

    def adapt(self, sizes: ja.Sizes) -> ja.Sizes:
        spec, overlap = sizes.spec, self.overlap
        sizes.refuse_shared_keys("mohsa")
        if overlap > min(spec.d_qk, spec.d_v) and not self.beyond_neighbours:
            raise ValueError(
                f"mohsa: overlap = {overlap} is above the head width (d_qk = {spec.d_qk}, d_v = {spec.d_v}), "
                "so heads would read second neighbours. Fix: a smaller overlap, or beyond_neighbours=True."
            )
        if spec.rotary is not None:
            whole = spec.d_qk if spec.rotary.pairs == "half" else 2
            if overlap % whole or spec.d_qk % 2:
                raise ValueError(
                    f"mohsa: overlap = {overlap} splits rotary pairs ({spec.rotary.pairs!r}, d_qk = "
                    f"{spec.d_qk}), so positions would not be relative. Fix: a multiple of {whole}, or "
                    'Rotary(pairs="adjacent") with an even overlap.'
                )
        return sizes.redefine("mohsa", output_width=spec.d_v + 2 * overlap)

    def query_side(self, params, x_q, side: ja.QuerySide, at: ja.Site) -> ja.QuerySide:
        return side._replace(query=widen(side.query, self.overlap))

    def expand(self, side: ja.KeySide, at: ja.Site) -> ja.KeySide:
        return side._replace(key=widen(side.key, self.overlap), value=widen(side.value, self.overlap))

    def declare(self, at: ja.Site) -> ja.Declaration:
        same = ja.Upgrade(lambda mha, fresh: mha)
        wider = ja.Upgrade(None, "neighbours' channels enter the scores")
        return ja.Declaration(exchangeable=(), upgrade=wider if self.overlap else same)


def widen(heads: Array, overlap: int) -> Array:
    """Each head with `overlap` channels of what lies before and after it: [..., t, h, d] to d + 2r.

    Example:
        >>> widen(jnp.arange(4.0).reshape(1, 2, 2), 1).tolist()
        [[[0.0, 0.0, 1.0, 2.0], [1.0, 2.0, 3.0, 0.0]]]
    """
    width = heads.shape[-1]
    reach = math.ceil(overlap / width)
    outer = overlap - (reach - 1) * width  # channels of the farthest neighbours
    zero = jnp.zeros((), heads.dtype)
    same = [(0, 0, 0)] * heads.ndim
    wide = jax.lax.pad(heads, zero, [*same[:-1], (overlap, overlap, 0)])
    for distance in (n for n in range(-reach, reach + 1) if n):
        first = width - outer if distance == -reach else 0
        last = outer if distance == reach else width
        moved = [*same[:-2], (-distance, distance, 0), same[-1]]
        neighbour = jax.lax.pad(heads[..., first:last], zero, moved)
        start = overlap + distance * width + first
        wide = jax.lax.dynamic_update_slice_in_dim(wide, neighbour, start, axis=-1)
    return wide


def overlap_schedule(
    kind: Literal["fixed", "inc", "dec"],
    depth: int,
    *,
    overlap: int = 4,
    start: Literal[0, 1] = 0,
    every: int = 1,
) -> tuple[int, ...]:
    """The overlap r of each layer of a stack.

    fixed: r = overlap;  inc: r = l // every + start;  dec: r = (depth - 1 - l) // every + start

    Args:
        kind: how r goes with the layer l = 0, 1, ...
        depth: number of layers.
        overlap: r of `"fixed"`; the other kinds do not read it.
        start: whether counting starts from 0 (the first, or last, layer is plain MHA) or 1.
        every: layers that share one r.

    Raises:
        ValueError: for an unknown kind or start, or every < 1.

    Example:
        >>> overlap_schedule("inc", 6, start=1, every=2)
        (1, 1, 2, 2, 3, 3)

    Source: Zhang et al., 2024, section 3.3; the released code's inc-0, inc-1 and their halves.
    """
    check_option("overlap_schedule: kind", kind, ("fixed", "inc", "dec"))
    check_option("overlap_schedule: start", start, (0, 1))
    if every < 1:
        raise ValueError(f"overlap_schedule: every = {every}, expected at least 1.")
    if kind == "fixed":
        return (overlap,) * depth
    layers = range(depth) if kind == "inc" else reversed(range(depth))
    return tuple(layer // every + start for layer in layers)
