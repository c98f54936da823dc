"""Laws of the numbers: scale, types, masks, rows that see no key, what is hidden."""

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
    noted,
    of_sides,
    slopes,
    some,
    table,
)
from jaxattn.check.subjects.attention import Call
from jaxattn.check.verdict import enable_x64


@law("numbers", "softmax(q k / sqrt(d)) v, as loops in float64 compute it", "cross", plain=True)
def values(subject, sizes):
    return agrees(subject, draw(sizes))


@law("numbers", "scores are divided by sqrt(d), and by nothing else", "cross", plain=True)
def scale(subject, sizes):
    """Beside k - 1 keys of score 0, the weight w of the first says its score: log(w (k - 1) / (1 - w))."""
    call = draw(sizes, wide="d_v" in subject.supports)
    h, d, (k, _, v) = sizes.h, sizes.d, call.value.shape[1:]
    query, key = (np.array(x) for x in call[:2])
    key[:, 1:] = 0
    raw = lambda: np.einsum("bqhd,bhd->bqh", query.astype(float), key[:, 0].astype(float))[..., None]
    query *= 3 / np.abs(raw()).max()  # so that 1 - w is far from 0, though there be no scale
    products = raw()
    first = np.zeros(call.value.shape, np.float32)
    first[:, 0] = 1
    call = Call(jnp.asarray(query), jnp.asarray(key), jnp.asarray(first))
    weight = np.asarray(subject.attend(call), np.float64)
    with np.errstate(all="ignore"):
        score = np.log(weight * (k - 1) / (1 - weight))
    factor = (score * products).mean() / (products**2 + 0 * score).mean()
    known = {"no scale": 1, "1/d": 1 / d, "1/sqrt(v)": v**-0.5, "the model width": (h * d) ** -0.5}
    names = [name for name, other in known.items() if abs(factor - other) < 1e-3 * other]
    note = names[0] if names else f"they are about q k times {factor:.4g}, not {d**-0.5:.4g}"
    return noted(distance(score * d**0.5, products + 0 * weight), 1e-4, note)


@law("numbers", "float64 inputs are computed in float64, softmax included", "float64", plain=True)
def float64_throughout(subject, sizes):
    with enable_x64(True):
        query, key, value = doubles(sizes, 0)
        out = of_sides(subject)(query, key, value)
        return noted(distance(out, loops(Call(query, key, value))), DOUBLE, f"output is {out.dtype}")


MANY = Sizes(1, 2, 1024, 1024, 4, 4, 2)


@law("numbers", "bfloat16 inputs: sums of the softmax are float32", plain=True, sizes=(MANY,))
def half_precision_sums(subject, sizes):
    call = draw(MANY, square=True)
    half = lambda x: jnp.asarray(np.asarray(x), jnp.bfloat16)
    call = Call(half(0 * np.asarray(call.query)), half(call.key), half(np.ones(call.value.shape)))
    want = np.ones((*call.query.shape[:3], call.value.shape[3]))
    return agrees(subject, call, want, 2**-7, note=f"{MANY.k} keys of equal score and value 1")


@law("numbers", "scores of 1e6 overflow nothing: the largest takes all", "cross", plain=True)
def large_scores(subject, sizes):
    call = draw(sizes)
    return agrees(subject, call._replace(query=jnp.asarray(1e6 * np.asarray(call.query))))


@law("numbers", "a bias is added to the scaled scores", "bias", "cross", plain=True)
def bias_added(subject, sizes):
    call = draw(sizes)
    bias = np.random.default_rng(4).normal(size=(sizes.b, sizes.h, sizes.q, sizes.k)).astype(np.float32)
    return agrees(subject, call._replace(bias=jnp.asarray(bias)))


def _of_infinite(sizes: Sizes) -> tuple[Call, Call]:
    """A call with a bias that is -inf where a mask hides, and one with that mask and the rest of the bias."""
    call, rng = draw(sizes), np.random.default_rng(4)
    shape = (sizes.b, sizes.h, sizes.q, sizes.k)
    shown, bias = some(*shape), rng.normal(size=shape).astype(np.float32)
    hidden = np.where(shown, bias, np.float32(-np.inf))
    both = jnp.asarray(hidden), jnp.asarray(bias)
    return call._replace(bias=both[0]), call._replace(mask=jnp.asarray(shown), bias=both[1])


@law("numbers", "a bias of -inf hides a pair, as a mask does", "bias", "cross", plain=True)
def bias_inf(subject, sizes):
    call, masked = _of_infinite(sizes)
    return agrees(subject, call, loops(masked))


@law("numbers", "a row whose biases are all -inf returns zeros", "bias", "cross", plain=True)
def bias_inf_row(subject, sizes):
    call, masked = _of_infinite(sizes)
    bias, shown = np.array(call.bias), np.array(masked.mask)
    bias[:, :, 0], shown[:, :, 0] = -np.inf, False
    got = np.asarray(subject.attend(call._replace(bias=jnp.asarray(bias))))
    off = distance(got, loops(masked._replace(mask=jnp.asarray(shown))))
    return noted(off, SINGLE, "it is NaN" if np.isnan(got[:, 0]).any() else "")


@law("numbers", "a mask of 0 and 1 in whole numbers is that of its booleans, or refused", "mask", "cross")
def integer_mask(subject, sizes):
    call, shown = draw(sizes), some(sizes.b, 1, sizes.q, sizes.k)
    want = np.asarray(subject.attend(call._replace(mask=jnp.asarray(shown))))
    added = loops(call._replace(bias=jnp.asarray(shown, jnp.float32)))
    worst, refused = Outcome(0.0, SINGLE), []
    for kind in (jnp.int32, jnp.uint8):
        name = jnp.dtype(kind).name
        try:
            got = np.asarray(subject.attend(call._replace(mask=jnp.asarray(shown, kind))))
        except Exception:  # an error is as good as the right meaning
            refused.append(name)
            continue
        note = f"{name} is added to the scores" if distance(got, added) <= SINGLE else name
        found = Outcome(distance(got, want), SINGLE, note)
        worst = found if found.broken else worst
    return worst if worst.broken or not refused else worst._replace(note=f"refused: {', '.join(refused)}")


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
    mean = distance(got[:, 0], np.asarray(call.value).mean(1)) <= SINGLE
    return noted(distance(got, loops(call)), SINGLE, "it returns the mean of all values" if mean else "")


@law("numbers", "no keys at all: every row returns zeros, or the call is refused", "cross", plain=True)
def no_keys(subject, sizes):
    call = draw(sizes._replace(k=0))
    try:
        got = subject.attend(call)
    except Exception as error:  # whatever a library refuses with
        return Outcome(0.0, SINGLE, f"refused: {type(error).__name__}")
    return noted(distance(got, loops(call)), SINGLE, "" if np.isfinite(got).all() else "it is not finite")


@law("numbers", "a row that sees no key has zero, finite gradients", "mask", "cross", "tracing")
def empty_row_gradient(subject, sizes):
    call = _with_empty_row(sizes)
    owed = slopes(subject, call, np.arange(sizes.q) == 0)
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
    _, *owed = slopes(subject, call)
    return Outcome(max(float(np.abs(np.asarray(x)[:, last]).max()) for x in owed), 0.0)


@law("numbers", "NaN in a hidden value reaches no output", "mask", "cross")
def hidden_nan_value(subject, sizes):
    call, last = _hidden(sizes)
    value = np.array(call.value)
    value[:, last] = np.nan
    broken = call._replace(value=jnp.asarray(value))
    return Outcome(distance(subject.attend(broken), subject.attend(call)), SINGLE)


@law("numbers", "inf in a hidden key reaches no gradient", "mask", "cross", "tracing")
def hidden_inf_key(subject, sizes):
    call, last = _hidden(sizes)
    key = np.array(call.key)
    key[:, last] = np.inf
    calls = call._replace(key=jnp.asarray(key)), call
    return Outcome(distance(*(slopes(subject, one)[0] for one in calls)), SINGLE)


LAWS = table(
    values,
    scale,
    float64_throughout,
    half_precision_sums,
    large_scores,
    bias_added,
    bias_inf,
    bias_inf_row,
    integer_mask,
    empty_row_value,
    no_keys,
    empty_row_gradient,
    hidden_gradient,
    hidden_nan_value,
    hidden_inf_key,
)
