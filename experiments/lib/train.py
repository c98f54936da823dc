"""Training as a pure function: a State and a batch in, a State and a record of the step out.

Numbers that are not finite: a step whose loss, gradient or updated state holds one is left out.
Parameters, moments and the optimizer's count stay bit-identical, so the next step is what it would
have been without that batch; only `State.step`, the place in the data, moves on. The record names
the first culprit. After LIMIT such steps in a row the run ends with `NonFinite`.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.lib.options import Training

LIMIT = 3

Tree = Any
LossFn = Callable[[Tree, Tree, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
Advance = Any  # a jitted StepFn over many steps: callable, and it can be lowered
StepFn = Callable[["State", Tree], tuple["State", dict[str, jax.Array]]]


class NonFinite(ArithmeticError):
    """Training met numbers that are not finite and cannot go on."""


class State(NamedTuple):
    """All that a run must remember; everything else follows from its options."""

    params: Tree
    optimizer: optax.OptState
    step: jax.Array  # batches seen, the ones left out included
    bad: jax.Array  # how many steps in a row were left out
    rng: jax.Array  # the dropout key of a step is fold_in(rng, step)


def init(params: Tree, optimizer: optax.GradientTransformation, rng: jax.Array) -> State:
    zero = jnp.zeros((), jnp.int32)
    return State(params, optimizer.init(params), step=zero, bad=zero, rng=rng)


def warmup_cosine(peak: float, final: float, warmup: int, steps: int) -> optax.Schedule:
    """Linear from peak / (w + 1) up to peak in w = min(warmup, steps // 10) steps, then a cosine.

    The cosine ends at final * peak.

    >>> schedule = warmup_cosine(peak=1.0, final=0.1, warmup=4, steps=40)
    >>> [round(float(schedule(step)), 3) for step in (0, 3, 4, 22, 40)]
    [0.2, 0.8, 1.0, 0.55, 0.1]
    """
    rise = max(1, min(warmup, steps // 10))
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (rise + 1),
        peak_value=peak,
        warmup_steps=rise,
        decay_steps=max(steps, rise + 1),
        end_value=final * peak,
    )


def adamw(*, b2: float, weight_decay: float, clip: float) -> optax.GradientTransformation:
    """AdamW as optax defines it, without its last factor: `make_step` applies -schedule(count).

    Weights decay, scales and biases do not.
    """

    def decays(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf.ndim > 1 and "bias" not in jax.tree_util.keystr(path), params
        )

    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b2=b2),
        optax.add_decayed_weights(weight_decay, mask=decays),
    )


def make_step(loss_fn: LossFn, optimizer: optax.GradientTransformation, schedule: optax.Schedule) -> StepFn:
    """One step: `loss_fn(params, batch, dropout_key) -> (what to minimise, {"loss": ..., ...})`.

    The rate is read off the optimizer's own count, the only one there is.
    """

    def step(state: State, batch: Tree) -> tuple[State, dict[str, jax.Array]]:
        dropout_key = jax.random.fold_in(state.rng, state.step)
        (total, parts), gradient = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch, dropout_key)
        rate = schedule(optax.tree_utils.tree_get(state.optimizer, "count"))
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = jax.tree.map(
            lambda leaf, update: (leaf - rate * update).astype(leaf.dtype), state.params, updates
        )

        finite = jnp.stack(
            [jnp.all(jnp.isfinite(leaf)) for leaf in _inexact((total, gradient, params, optimizer_state))]
        )
        ended = state.bad >= LIMIT  # the rest of a scanned chunk after the last straw changes nothing
        take = finite.all() & ~ended

        def choose(new: Tree, old: Tree) -> Tree:
            return jax.tree.map(lambda n, o: jnp.where(take, n, o), new, old)

        new = State(
            choose(params, state.params),
            choose(optimizer_state, state.optimizer),
            step=state.step + jnp.where(ended, 0, 1).astype(state.step.dtype),
            bad=jnp.where(ended, state.bad, jnp.where(take, 0, state.bad + 1)),
            rng=state.rng,
        )
        record = {
            "step": state.step + 1,
            **parts,
            "rate": jnp.asarray(rate),
            "gradient_norm": optax.tree_utils.tree_norm(gradient),
            "dropout_key": jax.random.key_data(dropout_key),
            "culprit": jnp.where(finite.all(), -1, jnp.argmin(finite)),
            "bad": new.bad,
            "ended": ended,
        }
        return new, record

    return step


def build(loss_fn: LossFn, training: Training) -> tuple[optax.GradientTransformation, Advance]:
    """The optimizer that the options ask for, and the compiled steps under it."""
    optimizer = adamw(b2=training.b2, weight_decay=training.weight_decay, clip=training.clip)
    schedule = warmup_cosine(training.learning_rate, training.final_rate, training.warmup, training.steps)
    return optimizer, make_advance(make_step(loss_fn, optimizer, schedule))


def make_advance(step: StepFn) -> Advance:
    """Many steps in one call: batches with a leading step axis, records likewise."""
    return jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))


class Programs:
    """Compiles calls before they are made, so that a time of steps holds no compiling."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.seconds = 0.0  # of compiling, so far
        self.made: dict[int, Any] = {}

    def ready(self, advance: Advance, state: State, batches: Tree) -> Any:
        """What to call in the place of `advance` on as many steps as these."""
        steps = len(jax.tree.leaves(batches)[0])
        if steps not in self.made:
            self.say(f"compiling {steps} training steps ...")
            began = time.monotonic()
            self.made[steps] = advance.lower(state, batches).compile()
            self.seconds += (took := time.monotonic() - began)
            self.say(f"compiled, took {took:.1f} s")
        return self.made[steps]


def rows(records: dict[str, jax.Array], state: State, examples: np.ndarray) -> list[dict[str, Any]]:
    """The records of `make_advance` as lines of the log; `examples[step]` says what a step saw."""
    host = {name: np.asarray(values) for name, values in records.items()}
    names = _suspects(state)
    lines = []
    for i, culprit in enumerate(host.pop("culprit")):
        if host["ended"][i]:
            break
        line: dict[str, Any] = {"step": host["step"][i].item()}
        for name in (
            "loss",
            *sorted(host.keys() - {"loss", "step", "dropout_key", "ended", "bad"}),
        ):
            line[name] = finite_or_none(host[name][i].item())
        line["dropout_key"] = host["dropout_key"][i].tolist()
        line["examples"] = examples[i].tolist()
        if culprit >= 0:
            line["skipped"] = names[culprit]
        lines.append(line)
    return lines


def refuse_if_ended(state: State, lines: list[dict[str, Any]], who: str = "training") -> None:
    """Raises NonFinite after LIMIT steps in a row that were left out."""
    if int(state.bad) >= LIMIT:
        raise NonFinite(
            f"{who}: {LIMIT} steps in a row, the last of them step {lines[-1]['step']}, were left "
            f"out because of numbers that are not finite, first of all in {lines[-1]['skipped']}; "
            "no checkpoint holds such numbers; try a lower --learning-rate"
        )


def is_finite(tree: Tree) -> bool:
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in _inexact(tree))


def finite_or_none(value: float) -> float | None:
    """JSON has no inf and no nan."""
    return value if np.isfinite(value) else None


def _inexact(tree: Tree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _suspects(state: State) -> list[str]:
    """A name for each leaf that `make_step` looks at, in its order."""

    def names(what: str, tree: Tree) -> list[str]:
        return [
            f"{what} {jax.tree_util.keystr(path, simple=True, separator='/')}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]

    return [
        "the loss",
        *names("the gradient of", state.params),
        *names("the updated", state.params),
        *names("the optimizer's", state.optimizer),
    ]
