"""Wrong attentions that mix heads. `right_mixer` is what they are made of; a fault replaces its steps."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja
from jaxattn.check.faults.fault import Fault
from jaxattn.check.subjects.mixer import MixCall, Mixer
from jaxattn.check.tracing import formulas
from jaxattn.check.tracing.stages import Stages
from jaxattn.check.tracing.trace import trace_of
from jaxattn.check.tracing.traced import Trace

Step = Callable[[Array, MixCall, Array], Array]


def _whole(matrix: Array) -> Array:
    """[g, i, o] as one matrix; [i, o] as it is."""
    return matrix if matrix.ndim == 2 else jax.scipy.linalg.block_diag(*matrix)


def _mix(x: Array, call: MixCall, site: int) -> Array:
    """[b, i, q, k] to [b, o, q, k] by what all pairs share, the query row and the key row bring."""
    out = jnp.einsum("biqk,io->boqk", x, _whole((call.pre, call.post)[site]))
    if call.query_maps is not None:
        out = out + jnp.einsum("biqk,bqio->boqk", x, call.query_maps[site])
    if call.key_maps is not None:
        out = out + jnp.einsum("biqk,bkio->boqk", x, call.key_maps[site])
    bias = (call.pre_bias, call.post_bias)[site]
    return out if bias is None else out + bias[:, None, None]


def before(x: Array, call: MixCall, seen: Array) -> Array:
    """Scores [b, hl, q, k] to those of the softmax heads."""
    return _mix(x, call, 0)


def softmax(x: Array, call: MixCall, seen: Array) -> Array:
    """Over the keys that are seen; a row without one is zero."""
    x = jnp.where(seen, x, 0)
    raised = jnp.where(seen, jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True))), 0)
    total = raised.sum(-1, keepdims=True)
    return raised / jnp.where(total == 0, 1, total)


def after(weights: Array, call: MixCall, seen: Array) -> Array:
    """Weights [b, hs, q, k] to those of the value heads, hidden pairs out again."""
    return jnp.where(seen, _mix(weights, call, 1), 0)


def right_mixer(
    call: MixCall, *, before: Step = before, softmax: Step = softmax, after: Step = after
) -> Array:
    """mix(softmax(mix(scores))) v; a fault replaces one of the steps."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", call.query, call.key) * call.query.shape[-1] ** -0.5
    shape = (len(scores), 1, *scores.shape[2:])
    seen = jnp.ones(shape, bool) if call.mask is None else call.mask
    weights = softmax(before(scores, call, seen), call, seen)
    return jnp.einsum("bhqk,bkhv->bqhv", after(weights, call, seen), call.value)


def _mixer(name: str, **steps: Step) -> Mixer:
    return Mixer(name, jax.jit(functools.partial(right_mixer, **steps)))


def traced_mixer(mask: np.ndarray | None = None, bias: bool = False, **steps: Step) -> Trace:
    """The trace of three mixed heads whose steps these are, beside formulas."""
    h, q, rng = 3, 5, np.random.default_rng(11)
    rule = ja.causal() if mask is None else ja.explicit(mask, axes="h q k")
    visible = np.broadcast_to(np.asarray(rule.table(q, q)), (2, *rule.table(q, q).shape[-3:]))
    x, pre, post, *biases = (rng.normal(size=s) for s in ((2, q, 4 * h), (h, h), (h, h), (h,), (h,)))
    biases = [jnp.asarray(one) if bias else None for one in biases]
    nothing, maps = jnp.zeros((2, q, h, 4)), (jnp.asarray(pre), jnp.asarray(post))
    call = MixCall(nothing, nothing, nothing, *maps, None, biases[0], biases[1])
    seen = jnp.asarray(visible)
    early, late = (ja.Mix(*pair) for pair in zip(maps, biases, strict=True))
    by = {"before": before, "after": after} | steps
    given = Stages(
        mix_scores=lambda x: by["before"](x, call, seen),
        mix_weights=lambda x: by["after"](x, call, seen),
        array=jnp.asarray,
    )
    formula = Stages(
        mix_scores=lambda x: formulas.mixed(x, early, None, None),
        mix_weights=lambda x: np.where(visible, formulas.mixed(x, late, None, None), 0),
    )
    return trace_of(given, x, mask=rule, heads=h, expected=formula)


def _mixed(
    says: str,
    source: str,
    law: str,
    stage: str,
    mask: np.ndarray | None = None,
    bias: bool = False,
    **steps: Step,
) -> Fault:
    subject = _mixer("planted", **steps)
    return Fault(says, source, law, subject, stage, functools.partial(traced_mixer, mask, bias, **steps))


def _unmixed(x: Array, call: MixCall, seen: Array) -> Array:
    return x if call.pre.shape[-1] == call.pre.shape[-2] else before(x, call, seen)


def _both_after(weights: Array, call: MixCall, seen: Array) -> Array:
    return after(before(weights, call, seen), call, seen)


def _of_transposes(step: Step) -> Step:
    turn = lambda x: x.swapaxes(-1, -2) if x.shape[-1] == x.shape[-2] else x
    return lambda x, call, seen: step(x, call._replace(pre=turn(call.pre), post=turn(call.post)), seen)


def _filled(value: float) -> Step:
    return lambda x, call, seen: before(jnp.where(seen, x, value), call, seen)


def _over_all_keys(x: Array, call: MixCall, seen: Array) -> Array:
    """Those that are hidden were lowered before the mix."""
    return jax.nn.softmax(x, -1)


def _made_one(weights: Array, call: MixCall, seen: Array) -> Array:
    mixed = after(weights, call, seen)
    total = mixed.sum(-1, keepdims=True)
    return mixed / jnp.where(total == 0, 1, total)


def _not_hidden_again(weights: Array, call: MixCall, seen: Array) -> Array:
    return _mix(weights, call, 1)


def _of_halves(step: Step) -> Step:
    """Each half of the heads by itself."""

    def apart(x):
        rows, columns = (jnp.arange(n) < n // 2 for n in x.shape[-2:])
        return jnp.where(rows[:, None] == columns, x, 0) if x.ndim == 2 else x

    return lambda x, call, seen: step(x, call._replace(pre=apart(call.pre), post=apart(call.post)), seen)


def _by_pairs(x: Array, call: MixCall, seen: Array) -> Array:
    """The same by a map [b, q, k, i, o] for every pair."""
    if call.query_maps is None or call.key_maps is None:
        return before(x, call, seen)
    maps = call.query_maps[0][:, :, None] + call.key_maps[0][:, None] + _whole(call.pre)
    out = jnp.einsum("biqk,bqkio->boqk", x, maps)
    return out if call.pre_bias is None else out + call.pre_bias[:, None, None]


RIGHT = _mixer("right")

# NumPy, as every constant here: an array of JAX would start its backend, and flags could not be set later.
OF_HEADS = ~np.eye(5, k=1, dtype=bool) | (np.arange(3) > 0)[:, None, None]  # [h, q, k]

FAULTS: dict[str, Fault] = {
    "pre mix after the softmax": _mixed(
        "the map of the scores falls on the weights", "M3.2 0x0BBA", "pre-mix-before-softmax",
        "mixed scores", before=_unmixed, after=_both_after,
    ),
    "maps of heads by their transposes": _mixed(
        "[in, out] is read as [out, in], before the softmax and after it", "PUB-26", "mix-direction",
        "mixed scores", before=_of_transposes(before), after=_of_transposes(after),
    ),
    "-inf is mixed": _mixed(
        "hidden scores are -inf before they are mixed: NaN where a map is negative",
        "PUB-26; M3.2 0x0BBA", "mask-after-mix", "mixed scores",
        before=_filled(-np.inf), softmax=_over_all_keys,
    ),
    "-1e9 is mixed": _mixed(
        "hidden scores are -1e9 before they are mixed: heads subtract it from each other", "PUB-26",
        "mask-after-mix", "mixed scores", before=_filled(-1e9), softmax=_over_all_keys,
    ),
    "mixed weights made shares again": _mixed(
        "the rows after the second map are divided by their sums", "M3.2 0x0BBA",
        "mixed-rows-of-any-sum", "mixed weights", after=_made_one,
    ),
    "a bias on hidden pairs": _mixed(
        "the bias after the softmax gives weight to what the mask hides", "PUB-26",
        "mix-bias-is-masked", "mixed weights", bias=True, after=_not_hidden_again,
    ),
    "one head's view for another": _mixed(
        "masks that differ by head hold before the second map alone", "M3.2 0x0BBA", "head-masks-after-mix",
        "mixed weights", mask=OF_HEADS, after=_not_hidden_again,
    ),
    "identity added to the first map": _mixed(
        "scores are added to their mix, which starts as the identity: they count twice",
        "M3.2 0x0BBA", "identity-mixes-are-plain", "mixed scores",
        before=lambda x, call, seen: (m := before(x, call, seen)) + (x if m.shape == x.shape else 0),
    ),
    "groups of heads taken for all": _mixed(
        "each half of the heads is mixed by itself", "M3.2 0x0BBA", "mix-across-groups",
        "mixed scores", before=_of_halves(before), after=_of_halves(after),
    ),
    "a map for every pair": Fault(
        "[q, k, i, o] is made: right values, and memory of another order", "M3.2 0x0BBA",
        "no-map-per-pair", _mixer("planted", before=_by_pairs),
        why="memory is no stage",
    ),
}  # fmt: skip
