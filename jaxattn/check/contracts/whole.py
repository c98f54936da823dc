"""Contracts of the whole attention: gradients of leaves, upgrades, a chain with itself, types, the ledger."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.attention import Attention, attention
from jaxattn.check.contracts.form import QUICK, Made, contract, far_apart, finite, make, redrawn
from jaxattn.check.verdict import named_leaves
from jaxattn.count import macs
from jaxattn.ledger import ledger
from jaxattn.spec import HeadSpec

PyTree = Any
NONE = 1e-12  # a gradient below this part of the largest is none
UNSEEN = ("key/bias",)  # the same for all keys of a row, so softmax does not see it


@functools.lru_cache(maxsize=4)
def _slopes(attn: Attention) -> Callable[..., Any]:
    """((loss, output), gradients of params and states)."""

    def loss(params: PyTree, x_q: Any, x_kv: Any, weight: Any) -> tuple[Any, Any]:
        y, aux = attn.apply(params, x_q, x_kv, engine="dense")
        return (y * weight).sum() + aux.total(), y

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), compiler_options=QUICK)


def _run(made: Made, attn: Attention, params: PyTree, x_q: Any, x_kv: Any) -> Any:
    weight = np.random.default_rng(2).normal(size=(*made.x_q.shape[:-1], made.spec.out))
    return _slopes(attn)(params, x_q, x_kv, weight)


def _at(made: Made, attn: Attention, params: PyTree) -> tuple[Any, PyTree]:
    """The output, and the gradient of each leaf."""
    (_, y), slopes = _run(made, attn, params, made.x_q, made.x_kv)
    return y, slopes[0]


@contract("numbers", "a row of zeros, as padding leaves it, gives finite outputs and gradients")
def zero_rows_are_finite(made: Made) -> Iterator[str]:
    zero = lambda x: x.at[:, 2].set(0)
    for what, x_q, x_kv in (
        ("query", zero(made.x_q), made.x_kv),
        ("source", made.x_q, jax.tree.map(zero, made.x_kv)),
    ):
        if not finite(_run(made, made.attn, made.params, x_q, x_kv)):
            yield (
                f"a {what} state of 0 makes an output or a gradient that is not finite. Fix: divide by, or "
                "take the root of, what cannot be 0 (an epsilon inside; jnp.where before the root, not "
                "after it)"
            )


def _still(slopes: PyTree) -> set[str]:
    """Leaves without a gradient."""
    named = {path: float(jnp.abs(leaf).max(initial=0.0)) for path, leaf in named_leaves(slopes)}
    return {path for path, size in named.items() if not size > NONE * max(named.values())}


def _idle(attn: Attention) -> set[str]:
    """Leaves that are declared to have no gradient."""
    return {f"heads/{name}/{path}" for name, made in attn.declare().items() for path in made.idle}


@contract("behaviour", "every leaf has a gradient, but for those that are declared idle, and these have none")
def leaves_are_alive(made: Made) -> Iterator[str]:
    attn, idle = made.attn, _idle(made.attn)
    rng = np.random.default_rng(3)
    drawn = [made.params, redrawn(made.params, rng)]
    still = set.intersection(*(_still(_at(made, attn, params)[1]) for params in drawn))
    for path in sorted(still - idle - set(UNSEEN)):
        yield (
            f"{path} has no gradient wherever the parameters are. Fix: do not make it, or state the reason "
            f"in Declaration(idle={{...}})"
        )
    for path in sorted(idle - still):
        yield f"{path} is declared idle, but has a gradient. Fix: take it out of Declaration.idle"


@contract(
    "numbers", "a declared upgrade is plain attention on the same parameters, and every new leaf can leave it"
)
def upgrade_is_exact_and_alive(made: Made) -> Iterator[str]:
    attn = made.attn
    for name, declared in attn.declare().items():
        if declared.upgrade.params is None and not declared.upgrade.why:
            yield f"{name}: no upgrade, and no reason. Fix: Upgrade(None, why), or leave upgrade out"
    upgraded = _upgraded(made, attn)
    if upgraded is None:
        return
    base, params = upgraded
    want = _plain(made, base)
    got, slopes = _at(made, attn, params)
    if far_apart(got, want):
        off = float(jnp.abs(got - want).max())
        yield (
            f"its upgrade is off by {off:.1e} from plain attention. Fix: parameters at which the transform "
            "changes nothing, or Upgrade(None, why)"
        )
        return
    still = _still(slopes)
    after = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, params, slopes)
    closed = still & _still(_at(made, attn, after)[1])
    for path in sorted(path for path in closed - _idle(attn) if path.startswith("heads/")):
        yield (
            f"{path} has no gradient at the upgrade, nor after one step, so that training cannot leave plain "
            "attention by it. Fix: start one factor of a product at 0, not both"
        )


@functools.lru_cache(maxsize=4)
def _of_plain(spec: HeadSpec) -> Callable[..., Any]:
    run = lambda params, x_q, x_kv: attention(spec).apply(params, x_q, x_kv, engine="dense")[0]
    return jax.jit(run, compiler_options=QUICK)


def _plain(made: Made, params: PyTree) -> Any:
    """The output of plain attention."""
    return _of_plain(made.spec)(params, made.x_q, made.x_kv)


def _upgraded(made: Made, attn: Attention) -> tuple[PyTree, PyTree] | None:
    """Parameters of plain attention, and what the declared upgrades make of them; None where one has none."""
    upgrades = [declared.upgrade.params for declared in attn.declare().values()]
    if None in upgrades:
        return None
    plain = attention(made.spec)
    base = redrawn(jax.eval_shape(plain.init, jax.random.key(0)), np.random.default_rng(4))
    fresh = jax.jit(lambda key: attn.init(key, jnp.float64), compiler_options=QUICK)(jax.random.key(5))
    params = base
    for upgrade in upgrades:
        params = upgrade(params, fresh) if upgrade is not None else params
    attn.check_params(params)
    return base, params


@contract(
    "behaviour", "twice in one chain, leaves, notes, losses and upgrades of the two stay apart", once=True
)
def twice_in_a_chain(made: Made) -> Iterator[str]:
    try:
        attn = attention(made.spec, made.transform, made.transform)
    except ValueError:
        return  # it refuses to follow itself
    twice = make(made.transform, made.spec, attn)
    count = len(made.attn.sites)
    shape_of = lambda m, ask: jax.eval_shape(lambda: ask(m))
    one, two = (shape_of(m, lambda m: m.attn.query_side(m.params, m.x_q).notes) for m in (made, twice))
    if len(two) != 2 * len(one):
        yield (
            f"two of them note {sorted(two)}, one {sorted(one)}. Fix: at.note(side, note) and "
            "at.noted(side), which know the name of the link"
        )
    _, slopes = _at(twice, attn, twice.params)
    still = _still(slopes) - _idle(attn) - set(UNSEEN) - _still(_at(made, made.attn, made.params)[1])
    later = {site.name for site in attn.sites[count:]}
    for path in sorted(path for path in still if path.startswith("heads/")):
        which = "second" if path.split("/")[1] in later else "first"
        yield (
            f"{path}, of the {which} of two, has no gradient. Fix: each finds its own by `params`, at.fill, "
            "at.gate and at.noted; nothing by an index or the name of the class"
        )
    losses_of = lambda m: m.attn.apply(m.params, m.x_q, m.x_kv, engine="dense")[1].losses
    one, two = (shape_of(m, losses_of) for m in (made, twice))
    if len(two) != 2 * len(one):
        yield (
            f"one has the losses {sorted(one)}, two have {sorted(two)}. Fix: losses depend on sums and `at` "
            "alone"
        )
    upgraded = _upgraded(twice, attn)
    if upgraded is not None:
        base, params = upgraded
        if far_apart(_at(twice, attn, params)[0], _plain(made, base)):
            yield (
                "the upgrades of two in a chain are not plain attention. Fix: upgrade writes "
                'mha["heads"] | {at.name: leaves}, from fresh["heads"][at.name]'
            )


@contract("behaviour", "leaves and outputs are of the type that is asked, in float32 and bfloat16")
def types_are_kept(made: Made) -> Iterator[str]:
    attn = made.attn
    for dtype in (jnp.float32, jnp.bfloat16):
        params = jax.eval_shape(lambda dtype=dtype: attn.init(jax.random.key(0), dtype))
        for path, leaf in named_leaves(params):
            if leaf.dtype != dtype:
                yield (
                    f"init makes {path} in {leaf.dtype} where {dtype.__name__} is asked. Fix: use its "
                    "argument dtype"
                )
        cast = lambda x, dtype=dtype: jax.ShapeDtypeStruct(x.shape, dtype)
        of = jax.tree.map(cast, (params, made.x_q, made.x_kv))
        found = jax.eval_shape(lambda p, q, kv: attn.apply(p, q, kv, engine="dense")[0], *of).dtype
        if found != dtype:
            yield (
                f"the output of {dtype.__name__} states and parameters is {found}. Fix: constants and "
                "leaves in the type of what they meet (x.astype(...); Python numbers, not numpy scalars)"
            )


@contract("numbers", "the ledger counts the dot products of the program, and the sizes of all leaves")
def ledger_counts(made: Made) -> Iterator[str]:
    attn, (x_k, _) = made.attn, made.x_kv
    book = ledger(attn, made.x_q.shape[0], made.x_q.shape[1], x_k.shape[1])
    run = lambda p, q, kv: attn.apply(p, q, kv, engine="dense")[0]
    counted, traced = sum(book.macs.values()), macs(run, made.params, made.x_q, made.x_kv)
    if counted != traced:
        yield (
            f"the ledger counts {counted:,} MACs, the program has {traced:,}. Fix: products belong to the "
            "hooks, whose programs it reads"
        )
    have, want = sum(book.parameters.values()), sum(leaf.size for leaf in jax.tree.leaves(made.params))
    if have != want:
        yield (
            f"the ledger counts {have:,} parameters, the leaves have {want:,}. Fix: leaves as init makes them"
        )
