"""Laws of a whole sublayer: what projections, heads and W_O must do together, from raw states."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.draws.layer import WIDTHS, attended, changed, draw_layer, layer_loops, projected, turned
from jaxattn.check.law import SINGLE, Outcome, Sizes, Unasked, distance, law, moved, noted, table
from jaxattn.check.laws.hidden import extremes
from jaxattn.check.subjects.layer import LEAVES, Layer, LayerCall, Params
from jaxattn.check.verdict import enable_x64

WIDE = Sizes(2, 3, 5, 7, 2, 2, 3)  # the smallest at which heads, rows and channels can all be told apart


def _looks(call: LayerCall) -> Iterator[tuple[str, np.ndarray]]:
    """What a wrong answer may be, in words."""
    params = call.params
    shared = changed(changed(call, "key", **params["query"]), "value", **params["query"])
    blocks = params["out"]["kernel"][::-1]
    yield "one kernel for Q, K and V", layer_loops(shared) if _alike(params) else np.zeros(0)
    yield "the blocks of W_O in the other order", layer_loops(changed(call, "out", blocks))
    if call.x_k.shape == call.x_v.shape:
        yield "V is made of x_k", layer_loops(call._replace(x_v=call.x_k))
    if call.mask is not None:
        yield "the mask is dropped", layer_loops(call._replace(mask=None))
    if call.x_q.shape == call.x_k.shape == call.x_v.shape:
        yield "causal, though nobody asked", layer_loops(call._replace(causal=True))
        yield "x_q and x_k are swapped", layer_loops(call._replace(x_q=call.x_k, x_k=call.x_q, x_v=call.x_q))


def _alike(params: Params) -> bool:
    return len({params[name]["kernel"].shape for name in LEAVES[:3]}) == 1


def _wide(subject: Layer) -> Sizes:
    """Where a law tells heads or rows apart, whatever sizes are asked: with fewer, the fault would hide."""
    h, d = max(WIDE.h, subject.least_heads), max(WIDE.d, subject.least_width)
    return WIDE._replace(h=h, g=h, d=d, v=d)


@functools.lru_cache(maxsize=32)
def _compiled(answer: Callable[[LayerCall], Any], same: tuple[int, ...], causal: bool) -> Callable[..., Any]:
    """One program for all calls of a kind; `same` says which of the three states are one object."""

    def run(params: Params, arrays: tuple[Array, ...], mask: Array | None) -> Any:
        x_q, x_k, x_v = (arrays[i] for i in same)
        return answer(LayerCall(params, x_q, x_k, x_v, mask, causal))

    return jax.jit(run)


def _ask(subject: Layer, call: LayerCall, answer: Callable[[LayerCall], Any] | None = None) -> Any:
    """What the subject answers, compiled where it can be: a law asks many calls of the same shapes."""
    answer = subject.apply if answer is None else answer
    if "tracing" not in subject.supports:
        return answer(call)
    states = call[1:4]
    same = tuple(next(j for j, y in enumerate(states) if y is x) for x in states)
    return _compiled(answer, same, call.causal)(call.params, states, call.mask)


def _agrees(subject: Layer, call: LayerCall, note: str = "") -> Outcome:
    got = _ask(subject, call)
    off = distance(got, layer_loops(call))
    if not off <= SINGLE:
        note = next((what for what, other in _looks(call) if distance(got, other) <= SINGLE), note)
    return Outcome(off, SINGLE, note)


@law("numbers", "y = W_O of the heads of three projections of x, as loops in float64 compute it",
     plain=True, about=Layer)  # fmt: skip
def layer_values(subject, sizes):
    has = subject.supports
    return _agrees(subject, draw_layer(sizes, alone=True, bias="bias" in has, groups="gqa" in has))


@law("numbers", "three sources: Q of x_q, K of x_k, V of x_v, as many rows of x_q as of the others or not",
     "cross", plain=True, about=Layer)  # fmt: skip
def cross_values(subject, sizes):
    return _agrees(subject, draw_layer(sizes._replace(q=sizes.k + 2)))


@law("axes", "a source of as many rows as x_q is a source: all its rows are seen, its rows are keys",
     "cross", plain=True, about=Layer, sizes=(WIDE,))  # fmt: skip
def cross_square(subject, sizes):
    call = draw_layer(_wide(subject)._replace(k=WIDE.q))
    return _agrees(subject, call._replace(x_v=call.x_k))


@law(
    "axes",
    "a mask of source rows holds for a source",
    "cross",
    "mask",
    plain=True,
    about=Layer,
    sizes=(WIDE,),
)
def cross_mask(subject, sizes):
    call = draw_layer(_wide(subject))
    real = np.arange(WIDE.k) < np.array([[2], [5]])
    return _agrees(subject, call._replace(mask=jnp.asarray(real[:, None, None])))


@law("shape", "the widths x_k, x_v, h*d, v and m_out, each of its own, as far as they are declared",
     plain=True, about=Layer)  # fmt: skip
def layer_widths(subject, sizes):
    own = [name for name in WIDTHS if name in subject.supports]
    if not own:
        raise Unasked(f"needs one of {', '.join(WIDTHS)}")
    alone = "cross" not in subject.supports
    usable = [name for name in own if not alone or name not in ("in_k", "in_v")]
    whole = _agrees(subject, draw_layer(sizes, frozenset(usable), alone=alone))
    if not whole.broken:
        return whole
    for name in usable:
        if _agrees(subject, draw_layer(sizes, frozenset({name}), alone=alone)).broken:
            return whole._replace(note=f"{name} alone breaks it")
    return whole._replace(note=f"{', '.join(usable)} together")


def _unit(sizes: Sizes) -> LayerCall:
    """Self-attention over unit vectors, whose four kernels only split and merge."""
    h, d = sizes.h, sizes.d
    eye = jnp.eye(h * d, dtype=jnp.float32)
    kernel = eye.reshape(h * d, h, d)
    params: Params = {name: {"kernel": kernel} for name in LEAVES[:3]}
    x = eye[None]
    return LayerCall(params | {"out": {"kernel": kernel.transpose(1, 2, 0)}}, x, x, x)


@law("axes", "kernel [m, h, d]: m comes in, h and d go out; W_O the other way round; though all are square",
     plain=True, about=Layer, sizes=(WIDE,))  # fmt: skip
def kernel_orientation(subject, sizes):
    unit, measured = _unit(_wide(subject)), 0.0
    for name in LEAVES:
        code = np.random.default_rng(7).normal(size=unit.params[name]["kernel"].shape).astype(np.float32)
        call = changed(unit, name, jnp.asarray(code))
        got = _ask(subject, call)
        if not (off := distance(got, layer_loops(call))) <= SINGLE:
            other = layer_loops(changed(call, name, turned(call.params[name]["kernel"])))
            return Outcome(off, SINGLE, f"{name} is transposed" if distance(got, other) <= SINGLE else name)
        measured = max(measured, off)
    return Outcome(measured, SINGLE)


@law("axes", "with unit kernels, each row seeing itself, a sublayer gives back what came", "mask",
     plain=True, about=Layer, sizes=(WIDE,))  # fmt: skip
def identity_layer(subject, sizes):
    unit, (b, q) = _unit(_wide(subject)), (WIDE.b, WIDE.q)
    m = unit.x_q.shape[-1]
    x = jnp.arange(b * q * m, dtype=jnp.float32).reshape(b, q, m)
    call = LayerCall(unit.params, x, x, x, jnp.eye(q, dtype=bool)[None, None])
    return Outcome(distance(_ask(subject, call), x), 1e-6)


@law(
    "axes",
    "W_O has a block for each head, and what is not in it writes nothing",
    plain=True,
    about=Layer,
    sizes=(WIDE,),
)
def out_blocks(subject, sizes):
    call = draw_layer(_wide(subject), alone=True)
    worst = Outcome(0.0, SINGLE)
    blocks, values = (call.params[name]["kernel"] for name in ("out", "value"))
    for head in (0, blocks.shape[0] - 1):
        shown = jnp.arange(blocks.shape[0]) == head
        one = changed(call, "out", blocks * shown[:, None, None])
        whole = np.asarray(_ask(subject, one))
        own = _ask(subject, changed(one, "value", values * shown[None, :, None]))
        if not np.abs(whole).max() > SINGLE:
            return Outcome(np.inf, SINGLE, f"control: the block of head {head} writes nothing at all")
        if not (off := distance(own, whole)) <= worst.measured:
            worst = Outcome(off, SINGLE, f"the block of head {head} takes in other heads")
    return noted(*worst)


@law("behaviour", "heads permuted in all four projections change nothing, in one alone they do", plain=True,
     about=Layer, sizes=(WIDE,))  # fmt: skip
def heads_permuted_jointly(subject, sizes):
    call = draw_layer(_wide(subject), alone=True, bias="bias" in subject.supports)
    order = np.roll(np.arange(call.params["out"]["kernel"].shape[0]), 1)

    def turn(call: LayerCall, name: str) -> LayerCall:
        leaf, first = call.params[name], name == "out"
        new = {"kernel": jnp.take(leaf["kernel"], order, axis=0 if first else 1)}
        new |= {"bias": leaf["bias"][order]} if "bias" in leaf and not first else {}
        return changed(call, name, **new)

    base, whole = np.asarray(_ask(subject, call)), call
    for name in LEAVES:
        whole = turn(whole, name)
        if distance(_ask(subject, turn(call, name)), base) <= SINGLE:
            return Outcome(np.inf, SINGLE, f"control: heads of {name} alone may be permuted")
    return Outcome(distance(_ask(subject, whole), base), SINGLE)


@law(
    "behaviour",
    "each projection has a kernel of its own, and it moves the output",
    about=Layer,
    sizes=(WIDE,),
)
def own_kernels(subject, sizes):
    call, other = (draw_layer(_wide(subject), alone=True, seed=seed) for seed in (0, 1))
    base = np.asarray(_ask(subject, call))
    after = lambda name: _ask(subject, changed(call, name, other.params[name]["kernel"]))
    idle = [name for name in LEAVES if distance(after(name), base) <= SINGLE]
    return Outcome(float(len(idle)), 0.0, f"of no effect: {', '.join(idle)}" if idle else "")


@law("behaviour", "all that leaves goes through W_O: without it b_O is left", about=Layer, sizes=(WIDE,))
def out_projection_used(subject, sizes):
    wide = _wide(subject)
    # As many keys as channels: weights in the place of heads have the heads' shape.
    call = draw_layer(wide._replace(q=wide.d), alone=True, bias="bias" in subject.supports)
    none = changed(call, "out", 0 * call.params["out"]["kernel"])
    want = np.broadcast_to(np.asarray(call.params["out"].get("bias", 0.0)), np.asarray(call.x_q).shape)
    got = np.asarray(_ask(subject, none))
    residual = distance(got - want, np.asarray(call.x_q)) <= SINGLE
    return Outcome(distance(got, want), 0.0, "x itself is added" if residual else "")


@law(
    "behaviour",
    "states after row i change nothing up to i, and something after it",
    "causal",
    about=Layer,
    sizes=(WIDE,),
)
def layer_causality(subject, sizes):
    call = draw_layer(_wide(subject), alone=True)
    at = call.x_q.shape[1] // 2
    late = moved(call.x_q, slice(None), slice(at, None))
    run = lambda x, causal: np.asarray(_ask(subject, LayerCall(call.params, x, x, x, causal=causal)))
    before, after = run(call.x_q, True), run(late, True)
    if distance(after[:, at:], before[:, at:]) == 0:
        return Outcome(np.inf, 0.0, "control: the change does nothing even after it")
    if distance(run(late, False)[:, :at], run(call.x_q, False)[:, :at]) == 0:
        return Outcome(np.inf, 0.0, "control: without causality a leak would not be seen")
    return noted(float(np.abs(after[:, :at] - before[:, :at]).max()), 0.0, f"rows from {at} on were moved")


def _hidden(subject: Layer) -> tuple[LayerCall, Callable[[float], LayerCall]]:
    """A call whose last source row is hidden, and the same with a number added to that row."""
    call = draw_layer(_wide(subject))
    mask = np.ones((WIDE.b, 1, WIDE.q, WIDE.k), bool)
    mask[..., -1] = False
    call = call._replace(mask=jnp.asarray(mask))
    return call, lambda by: call._replace(x_k=call.x_k.at[:, -1].add(by), x_v=call.x_v.at[:, -1].add(by))


@law("behaviour", "a source row that is hidden changes no output, one that is shown does", "cross", "mask",
     about=Layer, sizes=(WIDE,))  # fmt: skip
def hidden_source(subject, sizes):
    call, plus = _hidden(subject)
    shown = lambda call: np.asarray(_ask(subject, call._replace(mask=None)))
    if distance(shown(plus(3.0)), shown(call)) <= SINGLE:
        return Outcome(np.inf, 0.0, "control: a row that is shown does nothing either")
    return Outcome(distance(_ask(subject, plus(3.0)), _ask(subject, call)), 0.0)


@law(
    "numbers",
    "NaN in a source row that is hidden reaches no output",
    "cross",
    "mask",
    about=Layer,
    sizes=(WIDE,),
)
def hidden_source_nan(subject, sizes):
    call, plus = _hidden(subject)
    return Outcome(distance(_ask(subject, plus(np.nan)), _ask(subject, call)), SINGLE)


@functools.lru_cache(maxsize=8)
def _answers(subject: Layer) -> Callable[..., Any]:
    """Output and gradients of parameters and states, as one program."""

    def answer(params: Params, x_q: Array, x_k: Array, x_v: Array, mask: Array) -> Array:
        return subject.apply(LayerCall(params, x_q, x_k, x_v, mask))

    def run(*operands: Any) -> Any:
        loss = lambda *operands: (answer(*operands) ** 2).sum()
        return answer(*operands), jax.grad(loss, (0, 1, 2, 3))(*operands)

    return jax.jit(run)


@law(
    "numbers",
    "NaN, inf and numbers up to the type's largest in a hidden source row reach no output and no gradient",
    "cross",
    "mask",
    "tracing",
    about=Layer,
    sizes=(WIDE,),
)
def hidden_source_holds_anything(subject, sizes):
    call, _ = _hidden(subject)

    def answers(value: float) -> list[Array]:
        x_k, x_v = (x.at[:, -1].set(value) for x in (call.x_k, call.x_v))
        return jax.tree.leaves(_answers(subject)(call.params, call.x_q, x_k, x_v, call.mask))

    want = answers(0.0)
    for name, value in extremes(jnp.float32).items():
        off = max(map(distance, answers(value), want), key=lambda x: (x != x, x))
        if not off <= SINGLE:
            return Outcome(off, SINGLE, name)
    return Outcome(0.0, SINGLE)


def _slopes(loss: Callable[..., Array], at: tuple[Array, ...]) -> tuple[list[float], list[float]]:
    """Along a direction for each argument: what the gradient says, and what the function does."""
    rng, h = np.random.default_rng(5), 1e-2
    says, does = [], []
    for i, owed in enumerate(jax.grad(loss, tuple(range(len(at))))(*at)):
        way = jnp.asarray(rng.normal(size=at[i].shape))
        way /= jnp.linalg.norm(way)
        on = lambda step, i=i, way=way: float(loss(*at[:i], at[i] + step * way, *at[i + 1 :]))
        # The error of the five-point rule is of order h^4; this h also bears the rounding of float32.
        does.append((8 * (on(h) - on(-h)) - (on(2 * h) - on(-2 * h))) / (12 * h))
        says.append(float(jnp.vdot(owed, way)))
    return says, does


SLOPE = 1e-4  # a path that is missing is an error of order one; how exact a gradient is, other laws ask


def _loss(subject: Layer, call: LayerCall) -> Callable[..., Array]:
    def loss(x_q: Array, x_k: Array, x_v: Array) -> Array:
        return jnp.sum(jnp.sin(_ask(subject, call._replace(x_q=x_q, x_k=x_k, x_v=x_v))))

    return loss


@law("behaviour", "in self-attention the gradient to x is the sum of its paths through Q, K and V",
     "float64", "tracing", about=Layer, sizes=(WIDE,))  # fmt: skip
def aliased_gradient(subject, sizes):
    with enable_x64(True):
        call = draw_layer(_wide(subject), alone=True, dtype=jnp.float64)
        loss = _loss(subject, call)
        (says,), (does,) = _slopes(lambda x: loss(x, x, x), (call.x_q,))
        return noted(abs(says - does), SLOPE, f"it says {says:.3g}, the function does {does:.3g}")


@law("behaviour", "a source has the gradient of its paths, x_k through K and x_v through V",
     "cross", "float64", "tracing", about=Layer, sizes=(WIDE,))  # fmt: skip
def source_gradient(subject, sizes):
    with enable_x64(True):
        call = draw_layer(_wide(subject), dtype=jnp.float64)
        says, does = _slopes(_loss(subject, call), call[1:4])
        off = [abs(a - b) for a, b in zip(says, does, strict=True)]
        lost = [n for n, a, b in zip(("x_q", "x_k", "x_v"), says, does, strict=True) if a == 0 != b]
        return Outcome(max(off), SLOPE, f"none reaches {' and '.join(lost)}" if lost else "")


@law("behaviour", "a key bias moves no output and has no gradient; a query bias moves it", "bias", plain=True,
     about=Layer, sizes=(WIDE,))  # fmt: skip
def key_bias_null(subject, sizes):
    call = draw_layer(_wide(subject), alone=True, bias=True)
    bias = call.params["key"]["bias"]
    run = lambda by, name="key": _ask(subject, changed(call, name, bias=call.params[name]["bias"] + by))
    base, by = np.asarray(run(0 * bias)), 5 + 0 * bias
    if distance(run(by, "query"), base) <= SINGLE:
        return Outcome(np.inf, SINGLE, "control: a query bias does nothing either")
    off = distance(run(by), base)
    if "tracing" in subject.supports:
        off = max(off, float(jnp.abs(jax.grad(lambda by: jnp.sum(run(by) ** 2))(0 * bias)).max()))
    return Outcome(off, 10 * SINGLE)  # the gradient is a sum over all outputs


@law("axes", "weights are [b, h, q, k], those of each head, and asking for them changes no output", "weights",
     plain=True, about=Layer, sizes=(WIDE,))  # fmt: skip
def layer_weights(subject, sizes):
    call = draw_layer(_wide(subject), alone=True)
    y, got = (np.asarray(x) for x in _ask(subject, call, subject.weights))
    query, key = (projected(x, call.params[n]) for x, n in ((call.x_q, "query"), (call.x_k, "key")))
    b, k, h = key.shape[:3]
    each = np.broadcast_to(np.eye(k)[None, :, None], (b, k, h, k))  # the value of key k is unit vector k
    want = np.moveaxis(attended(call, query, key, each), 2, 1)
    mean = want.mean(1, keepdims=True)
    averaged = (
        distance(got, mean[:, 0]) <= SINGLE or distance(got, np.broadcast_to(mean, want.shape)) <= SINGLE
    )
    off = max(distance(got, want), distance(y, _ask(subject, call)))
    return Outcome(off, SINGLE, "the average over heads" if averaged else "")


LAWS = table(
    layer_values,
    cross_values,
    cross_square,
    cross_mask,
    layer_widths,
    kernel_orientation,
    identity_layer,
    out_blocks,
    heads_permuted_jointly,
    own_kernels,
    out_projection_used,
    layer_causality,
    hidden_source,
    hidden_source_nan,
    hidden_source_holds_anything,
    aliased_gradient,
    source_gradient,
    key_bias_null,
    layer_weights,
)
