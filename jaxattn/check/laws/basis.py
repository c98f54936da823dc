"""Laws of heads that are widened by their neighbours' channels, and of heads on one shared basis."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.law import SINGLE, Outcome, Sizes, distance, draw, law, loops, table
from jaxattn.check.subjects.attention import Call
from jaxattn.check.subjects.mixer import Basis, BasisCall, Overlap, widened


def _normal(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _reach(sizes: Sizes) -> int:
    return max(1, sizes.d // 2)


def _of_one_key(subject: Overlap, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """With one key, each head is its widened value: what came, what should."""
    call, r = draw(sizes._replace(k=1)), _reach(sizes)
    got = np.asarray(subject.attend(*call[:3], r))
    return got, np.broadcast_to(widened(call.value, r), (sizes.b, sizes.q, sizes.h, sizes.d + 2 * r))


@law("axes", "a head holds r channels of the head before, its own, r of the head after", about=Overlap)
def overlap_order(subject, sizes):
    got, want = _of_one_key(subject, sizes._replace(h=max(3, sizes.h)))
    off = distance(got[:, :, 1:-1], want[:, :, 1:-1])
    r = _reach(sizes)
    turned = np.concatenate([want[..., -r:], want[..., r:-r], want[..., :r]], -1)
    swapped = not off <= SINGLE and distance(got[:, :, 1:-1], turned[:, :, 1:-1]) <= SINGLE
    return Outcome(off, SINGLE, "the two sides are swapped" if swapped else "")


@law("axes", "the first and the last head have zeros for the neighbour that is missing", about=Overlap)
def overlap_ends(subject, sizes):
    got, want = _of_one_key(subject, sizes._replace(h=max(3, sizes.h)))
    ends = (slice(None), slice(None), [0, -1])
    return Outcome(distance(got[ends], want[ends]) if got.shape == want.shape else np.inf, SINGLE)


@law("numbers", "an overlap of 0 is plain attention", about=Overlap)
def overlap_of_zero(subject, sizes):
    call = draw(sizes)
    return Outcome(distance(subject.attend(*call[:3], 0), loops(call)), SINGLE)


@law("numbers", "scores of widened heads are scaled by the width d, not by d + 2 r", about=Overlap)
def overlap_scale(subject, sizes):
    call, r = draw(sizes), _reach(sizes)
    query, key, value = (jnp.asarray(widened(x, r)) for x in call[:3])
    want = lambda width: loops(Call(query * ((sizes.d + 2 * r) / width) ** 0.5, key, value))
    got = np.asarray(subject.attend(*call[:3], r))
    wide = distance(got, want(sizes.d)) > SINGLE >= distance(got, want(sizes.d + 2 * r))
    return Outcome(distance(got, want(sizes.d)), SINGLE, "the widened width" if wide else "")


def _on_basis(sizes: Sizes) -> tuple[BasisCall, Callable[[float], np.ndarray]]:
    """A call whose basis has a width of its own, and what it should come to, by the width of the scale."""
    c = sizes.h * sizes.d + 3
    query, key = _normal(1, sizes.b, sizes.q, c), _normal(2, sizes.b, sizes.k, c)
    value, mixing = _normal(3, sizes.b, sizes.k, sizes.h, sizes.v), _normal(4, sizes.h, c)
    own, shared = np.asarray(query)[:, :, None] * np.asarray(mixing), np.asarray(key)[:, :, None]
    shared = jnp.asarray(np.repeat(shared, sizes.h, 2))
    want = lambda width: loops(Call(jnp.asarray(own * (c / width) ** 0.5), shared, value))
    return BasisCall(query, key, value, mixing, sizes.d), want


@law(
    "numbers", "scores on a shared basis keep the scale of the head width d, however wide it is", about=Basis
)
def basis_scale(subject, sizes):
    call, want = _on_basis(sizes)
    got, c = np.asarray(subject.attend(call)), call.mixing.shape[1]
    off = distance(got, want(sizes.d))
    known = (
        (("the width of the basis by the heads", c / sizes.h), ("the width of the basis", c))
        if off > SINGLE
        else ()
    )
    note = next((what for what, width in known if distance(got, want(width)) <= SINGLE), "")
    return Outcome(off, SINGLE, note)


@law("numbers", "an exact factorisation, of any width, gives the attention that it is made of", about=Basis)
def basis_factors(subject, sizes):
    call = draw(sizes)
    more = ((0, 0), (0, 0), (0, 3))  # three channels of no head
    packed = lambda x: np.pad(np.asarray(x).reshape(*x.shape[:2], -1), more, constant_values=1.0)
    rows = np.pad(np.repeat(np.eye(sizes.h, dtype=np.float32), sizes.d, 1), more[1:])
    query, key, mixing = (jnp.asarray(x) for x in (packed(call.query), packed(call.key), rows))
    made = BasisCall(query, key, call.value, mixing, sizes.d)
    return Outcome(distance(subject.attend(made), loops(call)), SINGLE)


@law("numbers", "a key's content bias is scaled as the scores are", "bias", about=Basis)
def basis_content_bias(subject, sizes):
    call, _ = _on_basis(sizes)
    bias = _normal(5, sizes.b, sizes.k, sizes.h)
    c = call.mixing.shape[1]
    own = jnp.asarray(np.asarray(call.query)[:, :, None] * np.asarray(call.mixing) * (c / sizes.d) ** 0.5)
    plain = Call(own, jnp.asarray(np.repeat(np.asarray(call.key)[:, :, None], sizes.h, 2)), call.value)
    spread = np.asarray(bias).transpose(0, 2, 1)[:, :, None] / sizes.d**0.5
    want = loops(plain._replace(bias=spread))
    return Outcome(distance(subject.attend(call._replace(bias=bias)), want), SINGLE)


LAWS = table(
    overlap_order,
    overlap_ends,
    overlap_of_zero,
    overlap_scale,
    basis_scale,
    basis_factors,
    basis_content_bias,
)
