"""Laws of the numbers: scale, types, masks, rows that see no key, what is hidden."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import (
    DOUBLE,
    SINGLE,
    Outcome,
    Sizes,
    agrees,
    distance,
    doubles,
    draw,
    law,
    loops,
    table,
)
from jaxattn.check.subject import Call
from jaxattn.check.verdict import enable_x64


@law("numbers", "softmax(q k / sqrt(d)) v, as loops in float64 compute it", "cross", plain=True)
def values(subject, sizes):
    call = draw(sizes)
    got, d = np.asarray(subject.attend(call)), sizes.d
    for scale, name in (
        (np.sqrt(d), "no scale"),
        (1 / np.sqrt(d), "scale 1/d"),
        (np.sqrt(1 / sizes.h), "model width"),
    ):
        if d > 1 and distance(got, loops(call._replace(query=call.query * scale))) <= SINGLE:
            return Outcome(distance(got, loops(call)), SINGLE, name)
    return Outcome(distance(got, loops(call)), SINGLE)


@law("numbers", "float64 inputs are computed in float64, softmax included", "float64", plain=True)
def float64_throughout(subject, sizes):
    with enable_x64(True):
        query, key, value = doubles(sizes, 0)
        call = Call(query, key, value)
        out = subject.attend(call)
        return Outcome(distance(out, loops(call)), DOUBLE, f"output is {out.dtype}")


@law("numbers", "bfloat16 inputs: sums of the softmax are float32", plain=True)
def half_precision_sums(subject, sizes):
    k = 1024
    call = draw(sizes._replace(q=k), square=True)
    half = lambda x: x.astype(jnp.bfloat16)
    call = Call(half(jnp.zeros_like(call.query)), half(call.key), half(jnp.ones_like(call.value)))
    want = np.ones((*call.query.shape[:3], call.value.shape[3]))
    return agrees(subject, call, want, 2**-7, note=f"{k} keys of equal score and value 1")


@law("numbers", "scores of 1e6 overflow nothing: the largest takes all", "cross", plain=True)
def large_scores(subject, sizes):
    call = draw(sizes)
    call = call._replace(query=call.query * 1e6)
    return agrees(subject, call)


@law("numbers", "a bias is added to the scaled scores", "bias", "cross", plain=True)
def bias_added(subject, sizes):
    call = draw(sizes)
    bias = np.random.default_rng(4).normal(size=(sizes.b, sizes.h, sizes.q, sizes.k)).astype(np.float32)
    return agrees(subject, call._replace(bias=jnp.asarray(bias)))


def _with_empty_row(sizes: Sizes) -> Call:
    """A call whose first row sees no key, and the others all."""
    call = draw(sizes)
    mask = np.ones((sizes.b, 1, sizes.q, sizes.k), bool)
    mask[:, :, 0] = False
    return call._replace(mask=jnp.asarray(mask))


@law("numbers", "a row that sees no key returns zeros", "mask", "cross", plain=True)
def empty_row_value(subject, sizes):
    call = _with_empty_row(sizes)
    got = np.asarray(subject.attend(call))
    mean = distance(got[:, 0], loops(call._replace(query=0 * call.query, mask=None))[:, 0]) <= SINGLE
    return Outcome(distance(got, loops(call)), SINGLE, "it returns the mean of all values" if mean else "")


@law("numbers", "a row that sees no key has zero, finite gradients", "mask", "cross", "tracing")
def empty_row_gradient(subject, sizes):
    call = _with_empty_row(sizes)
    first = lambda *sides: jnp.sum(subject.attend(Call(*sides, mask=call.mask))[:, 0] ** 2)
    owed = jax.jit(jax.grad(first, (0, 1, 2)))(*call[:3])
    return Outcome(
        max(distance(x, 0 * np.asarray(x, np.float64)) if np.isfinite(x).all() else np.inf for x in owed), 0.0
    )


def _hidden(sizes: Sizes) -> tuple[Call, int]:
    """A call whose last key is hidden from all rows."""
    call = draw(sizes)
    mask = np.ones((sizes.b, 1, sizes.q, sizes.k), bool)
    mask[..., -1] = False
    return call._replace(mask=jnp.asarray(mask)), sizes.k - 1


@law("numbers", "a hidden pair has exactly zero gradient", "mask", "cross", "tracing")
def hidden_gradient(subject, sizes):
    call, last = _hidden(sizes)
    loss = lambda key, value: jnp.sum(subject.attend(call._replace(key=key, value=value)) ** 2)
    owed = jax.jit(jax.grad(loss, (0, 1)))(call.key, call.value)
    return Outcome(max(float(np.abs(np.asarray(x)[:, last]).max()) for x in owed), 0.0)


@law("numbers", "NaN in a hidden value reaches no output", "mask", "cross")
def hidden_nan_value(subject, sizes):
    call, last = _hidden(sizes)
    broken = call._replace(value=call.value.at[:, last].set(jnp.nan))
    return Outcome(distance(subject.attend(broken), subject.attend(call)), SINGLE)


@law("numbers", "inf in a hidden key reaches no gradient", "mask", "cross", "tracing")
def hidden_inf_key(subject, sizes):
    call, last = _hidden(sizes)
    key = call.key.at[:, last].set(jnp.inf)
    loss = lambda query: jnp.sum(subject.attend(call._replace(query=query, key=key)) ** 2)
    want = lambda query: jnp.sum(subject.attend(call._replace(query=query)) ** 2)
    return Outcome(distance(*(jax.jit(jax.grad(f))(call.query) for f in (loss, want))), SINGLE)


LAWS = table(
    values,
    float64_throughout,
    half_precision_sums,
    large_scores,
    bias_added,
    empty_row_value,
    empty_row_gradient,
    hidden_gradient,
    hidden_nan_value,
    hidden_inf_key,
)
