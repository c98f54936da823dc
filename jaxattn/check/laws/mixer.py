"""Laws of attentions that mix heads, before the softmax and after it."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core

from jaxattn.check.law import SINGLE, Outcome, Sizes, distance, law, loops, noted, table
from jaxattn.check.subjects.attention import Call
from jaxattn.check.subjects.mixer import MixCall, Mixer, blocks, mixed
from jaxattn.check.verdict import enable_x64

COUNTS = {1: (1, 2, 3), 2: (2, 3, 5)}  # hl, hs, hv apart, by the heads of a size; larger ones 7, 5, 3


def _normal(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _call(sizes: Sizes, counts: tuple[int, int, int] | None = None, square: bool = False) -> MixCall:
    """Normal numbers, mixes too; every head count is that of the sizes but where `counts` are given."""
    hl, hs, hv = counts or (sizes.h,) * 3
    k = sizes.q if square else sizes.k
    query, key = _normal(1, sizes.b, sizes.q, hl, sizes.d), _normal(2, sizes.b, k, hl, sizes.d)
    value = _normal(3, sizes.b, k, hv, sizes.v)
    return MixCall(query, key, value, _normal(4, hl, hs), _normal(5, hs, hv))


def _eye(heads: int) -> Array:
    return jnp.asarray(np.eye(heads, dtype=np.float32))


def _agrees(
    subject: Mixer, call: MixCall, lookalikes: dict[str, Callable[[], np.ndarray]] | None = None
) -> Outcome:
    """Against the loops; where it differs, the note says what it looks like."""
    got = np.asarray(subject.attend(call))
    off = distance(got, mixed(call))
    known = (lookalikes or {}).items() if not off <= SINGLE else ()
    note = next((what for what, other in known if distance(got, other()) <= SINGLE), "")
    return Outcome(off, SINGLE, note)


@law("numbers", "scores are mixed before the softmax: the mix is in the denominators", about=Mixer)
def pre_mix_before_softmax(subject, sizes):
    call = _call(sizes)
    call = call._replace(post=_eye(sizes.h))
    late = lambda: mixed(call._replace(pre=call.post, post=call.pre))
    if distance(mixed(call), late()) <= SINGLE:
        return Outcome(np.inf, SINGLE, "control: these maps commute with the softmax")
    return _agrees(subject, call, {"the mix of the scores falls on the weights": late})


@law("numbers", "weights are mixed after the softmax, and no softmax follows", about=Mixer)
def post_mix_after_softmax(subject, sizes):
    call = _call(sizes)
    call = call._replace(pre=_eye(sizes.h))
    early = lambda: mixed(call._replace(pre=call.post, post=call.pre))
    if distance(mixed(call), early()) <= SINGLE:
        return Outcome(np.inf, SINGLE, "control: these maps commute with the softmax")
    return _agrees(subject, call, {"the mix of the weights falls on the scores": early})


@law("axes", "P[i, o] brings what head i has to head o, before the softmax and after it", about=Mixer)
def mix_direction(subject, sizes):
    call = _call(sizes._replace(h=max(3, sizes.h)))
    one = _eye(call.pre.shape[0])
    next_ = jnp.asarray(np.roll(np.asarray(one), 1, 1))  # head i to head i + 1
    rolled = lambda x, by: jnp.asarray(np.roll(x, by, 2))
    turn = lambda by: loops(Call(rolled(call.query, by), rolled(call.key, by), call.value))
    worst, note = 0.0, ""
    for site, maps in (("before", (next_, one)), ("after", (one, next_))):
        got = np.asarray(subject.attend(call._replace(pre=maps[0], post=maps[1])))
        if not (off := distance(got, turn(1))) <= worst:
            back = distance(got, turn(-1)) <= SINGLE
            worst, note = off, f"{site} the softmax" + (", by the transpose" if back else "")
    return Outcome(worst, SINGLE, note)


@law("shape", "as many logit, softmax and value heads as the two maps say", "counts", about=Mixer)
def mix_counts(subject, sizes):
    hl, hs, hv = counts = COUNTS.get(sizes.h, (7, 5, 3))
    off = _agrees(subject, _call(sizes, counts)).measured
    return noted(off, SINGLE, f"hl={hl} hs={hs} hv={hv}")


@law("numbers", "two identity maps leave plain attention", about=Mixer)
def identity_mixes_are_plain(subject, sizes):
    call = _call(sizes)._replace(pre=_eye(sizes.h), post=_eye(sizes.h))
    plain = Call(*call[:3])
    got, doubled = np.asarray(subject.attend(call)), plain._replace(query=2 * call.query)
    off = distance(got, loops(plain))
    twice = not off <= SINGLE and distance(got, loops(doubled)) <= SINGLE
    return Outcome(off, SINGLE, "scores count twice" if twice else "")


@law("numbers", "mixed weights are used as they come: signed, their rows of any sum", about=Mixer)
def mixed_rows_of_any_sum(subject, sizes):
    call = _call(sizes)
    call = call._replace(value=jnp.asarray(np.ones_like(call.value)))
    sums = np.asarray(call.post, np.float64).sum(0)  # of rows that summed to one, through the map
    want = np.broadcast_to(sums[:, None], (sizes.b, sizes.q, *call.value.shape[2:]))
    got = np.asarray(subject.attend(call))
    ones = distance(got, np.ones_like(want)) <= SINGLE
    return Outcome(distance(got, want), SINGLE, "rows are normalised again" if ones else "")


@law("axes", "a map from the first head to the last counts: no groups of heads are apart", about=Mixer)
def mix_across_groups(subject, sizes):
    h = max(2, sizes.h)
    call, one = _call(sizes._replace(h=h)), _eye(h)
    pre, post = (np.array(one) for _ in "ab")
    pre[0, -1], post[-1, 0] = 2.0, -1.0
    call = call._replace(pre=jnp.asarray(pre), post=jnp.asarray(post))
    apart = lambda: mixed(call._replace(pre=one, post=one))
    return _agrees(subject, call, {"heads are mixed within groups alone": apart})


@law("axes", "maps of groups are one map with zeros between blocks of heads", "groups", about=Mixer)
def groups_are_blocks(subject, sizes):
    call = _call(sizes._replace(h=2 * (h := max(2, sizes.h))))
    call = call._replace(pre=_normal(6, 2, h, h), post=_normal(7, 2, h, h))
    woven = lambda x: jnp.asarray(blocks(x).reshape(2, h, 2, h).transpose(1, 0, 3, 2).reshape(2 * h, 2 * h))
    other = lambda: mixed(call._replace(pre=woven(call.pre), post=woven(call.post)))
    return _agrees(subject, call, {"heads of a group are not side by side": other})


def _with_maps(call: MixCall) -> MixCall:
    (b, q, hl, _), k = call.query.shape, call.key.shape[1]
    hs, hv = call.post.shape
    maps = lambda n, seed: (_normal(seed, b, n, hl, hs), _normal(seed + 1, b, n, hs, hv))
    return call._replace(query_maps=maps(q, 8), key_maps=maps(k, 10))


@law("axes", "a row's own maps reach its pairs: of the query row and of the key row", "dynamic", about=Mixer)
def row_mixes(subject, sizes):
    call = _with_maps(_call(sizes._replace(q=max(3, sizes.q)), square=True))
    swapped = lambda: mixed(call._replace(query_maps=call.key_maps, key_maps=call.query_maps))
    return _agrees(subject, call, {"maps of queries and of keys are swapped": swapped})


@law("behaviour", "no map over heads is made for every pair: [q, k, i, o]", "dynamic", "tracing", about=Mixer)
def no_map_per_pair(subject, sizes):
    sizes = Sizes(1, 5, 11, 13, 2, 3, 5)  # primes: only such a value has all of them in its size
    call = _with_maps(_call(sizes))
    pair = math.prod((sizes.q, sizes.k, sizes.h, sizes.h))
    jaxpr = jax.make_jaxpr(lambda *a: subject.attend(MixCall(*a)))(*call).jaxpr
    worst = max((size for size in _made(jaxpr) if size % pair == 0), default=0)
    return noted(float(worst), 0.0, f"numbers of one value, at q={sizes.q} k={sizes.k} h={sizes.h}")


def _made(jaxpr: Any) -> Iterator[int]:
    """The size of every value that a program makes, inner bodies included."""
    for equation in jaxpr.eqns:
        yield from (math.prod(getattr(x.aval, "shape", ())) for x in equation.outvars)
        for body in jax.tree.leaves(list(equation.params.values())):
            if isinstance(body, core.ClosedJaxpr | core.Jaxpr):
                yield from _made(body.jaxpr if isinstance(body, core.ClosedJaxpr) else body)


def _masked(sizes: Sizes) -> MixCall:
    """Causal rows of as many keys; the first sees one."""
    call = _call(sizes._replace(q=max(2, sizes.q)), square=True)
    n = call.query.shape[1]
    return call._replace(mask=jnp.asarray(np.tril(np.ones((1, 1, n, n), bool))))


@law(
    "numbers", "the mask comes after the mix of the scores: all finite, hidden pairs out", "mask", about=Mixer
)
def mask_after_mix(subject, sizes):
    call = _masked(sizes)
    got = np.asarray(subject.attend(call))
    note = "" if np.isfinite(got).all() else "-inf is mixed"
    return Outcome(distance(got, mixed(call)), SINGLE, note)


@law("numbers", "a hidden pair has no weight at all, whatever the maps are", "mask", about=Mixer)
def hidden_after_mix(subject, sizes):
    call = _masked(sizes)
    key, value = np.array(call.key), np.array(call.value)
    key[:, 1:] += 3.0
    value[:, 1:] += 1e3
    far = call._replace(key=jnp.asarray(key), value=jnp.asarray(value))
    before, after = (np.asarray(subject.attend(x)) for x in (call, far))
    if distance(after[:, 1:], before[:, 1:]) == 0:
        return Outcome(np.inf, 0.0, "control: the change does nothing where it is seen")
    return noted(float(np.abs(after[:, 0] - before[:, 0]).max()), 0.0, "keys from 1 on, seen in row 0")


@law("numbers", "a bias after the softmax reaches visible pairs alone", "mask", "bias", about=Mixer)
def mix_bias_is_masked(subject, sizes):
    call = _masked(sizes)
    return _agrees(subject, call._replace(pre_bias=_normal(12, sizes.h), post_bias=_normal(13, sizes.h)))


@law("numbers", "a mask that differs by head holds for the mixed weights too", "head_mask", about=Mixer)
def head_masks_after_mix(subject, sizes):
    h = max(2, sizes.h)
    call = _call(sizes._replace(h=h))
    mask = np.ones((1, h, 1, sizes.k), bool)
    mask[0, 0, 0, -1] = False  # the last key, for the first head
    return _agrees(subject, call._replace(mask=jnp.asarray(mask)))


@law("numbers", "a row that sees no key is zero, and so is its gradient", "mask", "tracing", about=Mixer)
def mixed_row_without_keys(subject, sizes):
    call = _call(sizes)
    mask = np.ones((1, 1, sizes.q, sizes.k), bool)
    mask[:, :, 0] = False
    call = call._replace(mask=jnp.asarray(mask))
    given = lambda sides: call._replace(**dict(zip(MixCall._fields, sides, strict=False)))
    first = lambda *sides: jnp.sum(subject.attend(given(sides))[:, 0] ** 2)
    owed = jax.jit(jax.grad(first, (0, 1, 2, 3, 4)))(*call[:5])
    if not all(np.abs(np.asarray(x)).max() == 0 for x in owed):  # NaN too
        return Outcome(np.inf, 0.0, "gradient")
    return _agrees(subject, call)


@law("behaviour", "the gradient of the maps is what they do, in float64", "float64", "tracing", about=Mixer)
def mix_gradients(subject, sizes):
    with enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x), jnp.float64)
        call = _call(sizes)
        given = call._replace(query=wide(call.query), key=wide(call.key), value=wide(call.value))
        maps = [np.asarray(x, np.float64) for x in (call.pre, call.post)]
        move = [np.asarray(_normal(14 + n, *x.shape), np.float64) for n, x in enumerate(maps)]
        loss = jax.jit(lambda pre, post: jnp.sum(jnp.sin(subject.attend(given._replace(pre=pre, post=post)))))
        at = lambda t: float(loss(*(x + t * y for x, y in zip(maps, move, strict=True))))
        t = 1e-3  # the error of the five-point rule is of order t^4, of rounding eps / t
        want = (8 * (at(t) - at(-t)) - (at(2 * t) - at(-2 * t))) / (12 * t)
        owed = jax.jit(jax.grad(loss, (0, 1)))(*maps)
        got = float(sum(np.vdot(x, y) for x, y in zip(owed, move, strict=True)))
        return Outcome(abs(got - want) / max(1.0, abs(want)), 1e-8)


LAWS = table(
    pre_mix_before_softmax,
    post_mix_after_softmax,
    mix_direction,
    mix_counts,
    identity_mixes_are_plain,
    mixed_rows_of_any_sum,
    mix_across_groups,
    groups_are_blocks,
    row_mixes,
    no_map_per_pair,
    mask_after_mix,
    hidden_after_mix,
    mix_bias_is_masked,
    head_masks_after_mix,
    mixed_row_without_keys,
    mix_gradients,
)
