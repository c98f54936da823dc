"""Laws of shape, and of what each axis means."""

import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import (
    SINGLE,
    Outcome,
    Sizes,
    agrees,
    changed,
    distance,
    draw,
    law,
    loops,
    noted,
    only,
    some,
    table,
)


@law("shape", "the output is [b, q, h, v], for sizes of which no two are equal", "cross")
def output_shape(subject, sizes):
    call = draw(sizes)
    got = subject.attend(call).shape
    want = (*call.query.shape[:3], call.value.shape[3])
    return noted(float(got != want), 0.0, f"got {got}, expected {want}")


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
    query = np.zeros(call.query.shape, np.float32)
    call = call._replace(query=jnp.asarray(query), value=jnp.asarray(code, jnp.float32))
    return agrees(subject, call, note="value[b,k,h,v] = 1000 b + 100 h + 10 k + v")


@law("axes", "weights of a row add up to one over the keys", "cross", plain=True)
def softmax_over_keys(subject, sizes):
    call = draw(sizes)
    call = call._replace(value=jnp.asarray(np.ones(call.value.shape, np.float32)))
    want = np.ones((*call.query.shape[:3], call.value.shape[3]))
    return agrees(subject, call, want, note="all values are 1")


@law("axes", "True shows a key: a row that sees one key returns its value", "mask", "cross", plain=True)
def mask_polarity(subject, sizes):
    call = draw(sizes)
    b, q, k = sizes.b, sizes.q, sizes.k
    mask = only((b, 1, q, k), ((n, 0, i, (i + n) % k) for n in range(b) for i in range(q)))
    got = np.asarray(subject.attend(call._replace(mask=mask)))
    shown, hidden = (loops(call._replace(mask=m)) for m in (mask, ~np.asarray(mask)))
    return noted(distance(got, shown), SINGLE, "True hides" if distance(got, hidden) <= SINGLE else "")


@law("axes", "axes of size 1 in a mask are spread by axis, though all sizes are equal", "mask", plain=True)
def mask_broadcast(subject, sizes):
    n = max(2, sizes.h)
    rng, worst, note = np.random.default_rng(3), 0.0, ""
    call = draw(Sizes(n, n, n, n, 4, 4, n))
    shapes = ((n, 1, 1, n), (1, 1, n, n), (n, 1, n, n)) + (
        ((1, n, n, n),) if "head_mask" in subject.supports else ()
    )
    for shape in shapes:
        mask = rng.random(shape) < 0.5
        mask[..., 0] = True
        off = agrees(subject, call._replace(mask=jnp.asarray(mask))).measured
        if not off <= worst:
            worst, note = off, f"mask {shape} of b = h = q = k = {n}"
    return noted(worst, SINGLE, note)


@law("axes", "a mask holds for one example alone as for the same one twice", "mask")
def batch_of_one(subject, sizes):
    mask = some(1, 1, sizes.q, sizes.q)
    call = draw(sizes._replace(b=1), square=True)._replace(mask=jnp.asarray(mask))
    twice = lambda x: np.concatenate([np.asarray(x)] * 2)
    both = changed(call, twice)._replace(mask=jnp.asarray(twice(mask)))
    alone = np.asarray(subject.attend(call))
    open_ = subject.plain and distance(alone, loops(call._replace(mask=None))) <= SINGLE
    return noted(
        distance(twice(alone), subject.attend(both)), SINGLE, "alone, the mask is skipped" if open_ else ""
    )


@law("axes", "one key: every row returns its value, whatever the scores", "cross", plain=True)
def one_key(subject, sizes):
    call = draw(sizes._replace(k=1))
    return agrees(subject, call, np.repeat(np.asarray(call.value), sizes.q, 1))


@law("axes", "no query rows or no examples: an output as empty, with its other axes", "cross")
def no_rows(subject, sizes):
    calls = [draw(sizes._replace(**{axis: 0})) for axis in "qb"]
    got = [subject.attend(call).shape for call in calls]
    want = [(*call.query.shape[:3], call.value.shape[3]) for call in calls]
    return noted(float(got != want), 0.0, f"got {got}, expected {want}")


@law(
    "axes", "each key head serves a block of query heads that follow one another", "gqa", "cross", plain=True
)
def gqa_order(subject, sizes):
    call = draw(sizes, groups=True)
    got = np.asarray(subject.attend(call))
    order = np.arange(sizes.h) % sizes.g
    key, value = (jnp.asarray(np.asarray(x)[:, :, order]) for x in (call.key, call.value))
    tiled = distance(got, loops(call._replace(key=key, value=value))) <= SINGLE
    return noted(distance(got, loops(call)), SINGLE, "key heads are tiled" if tiled else "")


@law("axes", "a square call that is not causal sees every key", plain=True)
def open_square(subject, sizes):
    call = draw(sizes, square=True)
    got = np.asarray(subject.attend(call))
    causal = distance(got, loops(call._replace(causal=True))) <= SINGLE
    return noted(distance(got, loops(call)), SINGLE, "it is causal" if causal else "")


@law("axes", "causal: row i sees keys up to i", "causal", plain=True)
def causal_square(subject, sizes):
    return agrees(subject, draw(sizes, square=True)._replace(causal=True))


@law("axes", "a mask and causality hold together in one call", "mask", "causal", plain=True)
def mask_and_causal(subject, sizes):
    mask = jnp.asarray(some(sizes.b, 1, sizes.q, sizes.q))
    call = draw(sizes, square=True)._replace(mask=mask, causal=True)
    got = np.asarray(subject.attend(call))
    less = {"the mask": call._replace(mask=None), "causality": call._replace(causal=False)}
    names = [name for name, other in less.items() if distance(got, loops(other)) <= SINGLE]
    return noted(distance(got, loops(call)), SINGLE, f"without {' or '.join(names)}" if names else "")


@law(
    "axes",
    "causal of more or fewer keys than queries: row i sees keys up to i always, or up to i + k - q always",
    "causal",
    "cross",
    plain=True,
)
def causal_rectangle(subject, sizes):
    """Either is a convention, and so is an error; to have both is none."""
    far: dict[str, list[float]] = {"start": [], "end": []}
    each, refused = [], []
    shapes = dict.fromkeys(((sizes.q, sizes.k), (sizes.k, sizes.q), (1, max(2, sizes.q))))
    for q, k in shapes:
        call = draw(sizes._replace(q=q, k=k))
        try:
            got = np.asarray(subject.attend(call._replace(causal=True)))
        except Exception:  # to refuse a rectangle is a convention too
            refused.append(f"q={q} k={k}")
            continue
        for end, last in (("start", 0), ("end", k - q)):
            seen = np.tril(np.ones((q, k), bool), last)
            rows = seen.any(1)  # what a row without a key returns is another law's
            off = distance(got[:, rows], loops(call._replace(mask=jnp.asarray(seen[None, None])))[:, rows])
            far[end].append(off if np.isfinite(off) else np.inf)
        fits = [end for end in far if far[end][-1] <= SINGLE]
        each.append(f"q={q} k={k}: {' or '.join(fits) or 'neither'}")
    if not each:
        return Outcome(0.0, SINGLE, "refused")
    end = min(far, key=lambda end: max(far[end]))
    outcome = Outcome(max(far[end]), SINGLE, f"aligned at the {end}")
    said = "; ".join(each) if outcome.broken else outcome.note
    return outcome._replace(note=f"{said}; refused for {', '.join(refused)}" if refused else said)


@law("axes", "as many queries as keys or not, heads and rows keep their places", "cross", plain=True)
def cross_lengths(subject, sizes):
    return agrees(subject, draw(sizes._replace(q=sizes.k, k=sizes.q)))


LAWS = table(
    output_shape,
    value_width,
    heads_in_order,
    softmax_over_keys,
    mask_polarity,
    mask_broadcast,
    batch_of_one,
    one_key,
    no_rows,
    gqa_order,
    open_square,
    causal_square,
    mask_and_causal,
    causal_rectangle,
    cross_lengths,
)
