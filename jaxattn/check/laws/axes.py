"""Laws of shape, and of what each axis means."""

import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import SINGLE, Outcome, Sizes, agrees, distance, draw, law, loops, only, table


@law("shape", "the output is [b, q, h, v], for sizes of which no two are equal", "cross")
def output_shape(subject, sizes):
    call = draw(sizes)
    got = subject.attend(call).shape
    want = (*call.query.shape[:3], call.value.shape[3])
    return Outcome(float(got != want), 0.0, f"got {got}, expected {want}")


@law("shape", "values may be wider than queries and keys", "cross", "d_v", plain=True)
def value_width(subject, sizes):
    return agrees(subject, draw(sizes, wide=True))


# Axes


@law(
    "axes",
    "with equal scores each head of each example returns the mean of its own values",
    "cross",
    plain=True,
)
def heads_in_order(subject, sizes):
    call = draw(sizes)
    code = np.fromfunction(lambda b, k, h, v: 1000 * b + 100 * h + 10 * k + v, call.value.shape)
    call = call._replace(query=jnp.zeros_like(call.query), value=jnp.asarray(code, jnp.float32))
    return agrees(subject, call, note="value[b,k,h,v] = 1000 b + 100 h + 10 k + v")


@law("axes", "weights of a row add up to one over the keys", "cross", plain=True)
def softmax_over_keys(subject, sizes):
    call = draw(sizes)
    call = call._replace(value=jnp.ones_like(call.value))
    return agrees(
        subject, call, np.ones((*call.query.shape[:3], call.value.shape[3])), note="all values are 1"
    )


@law("axes", "True shows a key: a row that sees one key returns its value", "mask", "cross", plain=True)
def mask_polarity(subject, sizes):
    call = draw(sizes)
    b, q, k = sizes.b, sizes.q, sizes.k
    mask = only((b, 1, q, k), ((n, 0, i, (i + n) % k) for n in range(b) for i in range(q)))
    call = call._replace(mask=mask)
    got = np.asarray(subject.attend(call))
    flipped = distance(got, loops(call._replace(mask=~mask))) <= SINGLE
    return Outcome(distance(got, loops(call)), SINGLE, "True hides" if flipped else "")


@law("axes", "axes of size 1 in a mask are spread by axis, though all sizes are equal", "mask", plain=True)
def mask_broadcast(subject, sizes):
    n = max(2, sizes.h)
    rng, worst, note = np.random.default_rng(3), 0.0, ""
    call = draw(Sizes(n, n, n, n, sizes.d, sizes.v, n))
    shapes = ((n, 1, 1, n), (1, 1, n, n), (n, 1, n, n)) + (
        ((1, n, n, n),) if "head_mask" in subject.supports else ()
    )
    for shape in shapes:
        mask = rng.random(shape) < 0.5
        mask[..., 0] = True
        off = agrees(subject, call._replace(mask=jnp.asarray(mask))).measured
        if not off <= worst:
            worst, note = off, f"mask {shape} of b = h = q = k = {n}"
    return Outcome(worst, SINGLE, note)


@law(
    "axes", "each key head serves a block of query heads that follow one another", "gqa", "cross", plain=True
)
def gqa_order(subject, sizes):
    call = draw(sizes, groups=True)
    got = np.asarray(subject.attend(call))
    order = np.arange(sizes.h) % sizes.g
    tiled = call._replace(key=call.key[:, :, order], value=call.value[:, :, order])
    note = "key heads are tiled" if distance(got, loops(tiled)) <= SINGLE else ""
    return Outcome(distance(got, loops(call)), SINGLE, note)


@law("axes", "causal: row i sees keys up to i", "causal", plain=True)
def causal_square(subject, sizes):
    return agrees(subject, draw(sizes, square=True)._replace(causal=True))


@law("axes", "as many queries as keys or not, heads and rows keep their places", "cross", plain=True)
def cross_lengths(subject, sizes):
    return agrees(subject, draw(sizes._replace(q=sizes.k + 2)))


LAWS = table(
    output_shape,
    value_width,
    heads_in_order,
    softmax_over_keys,
    mask_polarity,
    mask_broadcast,
    gqa_order,
    causal_square,
    cross_lengths,
)
