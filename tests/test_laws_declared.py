"""Laws 10, 11 and 13 for every row of the table: what is declared, counted and refused is so.

Law 10 reads `declare` and `axes` alone, as a tool that permutes or prunes anyone's variant would.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import jaxpr
import numpy as np
import pytest
import table

import jaxattn as ja
import variants

each_row = pytest.mark.parametrize("case", table.CASES, ids=lambda case: case.name)


# Law 10: which heads may change places.


def kinds_of(attn):
    """How many heads of each kind there are."""
    z = attn.sizes
    return {
        "hl": z.logit_heads, "hs": z.softmax_heads, "hv": z.output_heads,
        "hK": z.key_heads, "hV": z.value_heads,
    }  # fmt: skip


def tied(attn):
    """Sets of kinds whose heads are the same: through a stage without a mix, or as declared."""
    z = attn.sizes
    pairs = set().union(*(d.ties for d in attn.declare().values()))
    pairs |= set() if z.pre else {("hl", "hs")}
    pairs |= set() if z.post else {("hs", "hv")}
    pairs |= {("hl", "hK"), ("hv", "hV")}  # a logit head reads its key head, a head its value head
    sets = [{kind} for kind in kinds_of(attn)]
    for a, b in pairs:
        one, other = (next(s for s in sets if kind in s) for kind in (a, b))
        if one is not other:
            sets.remove(other)
            one |= other
    return sets


def allowed(order, sources, sets):
    """Whether an order of heads keeps the declared sets, and the heads that share a source together."""
    share = len(order) // sources
    blocks = [{h // share for h in order[g * share : (g + 1) * share]} for g in range(sources)]
    kept = sets is None or all({order[h] for h in members} == set(members) for members in sets)
    fixed = sets is None or all(order[h] == h for h in range(len(order)) if h not in sum(sets, ()))
    return kept and fixed and all(len(block) == 1 for block in blocks)


def orders(attn):
    """{kind: new order} that moves as many heads as the declarations allow."""
    count = kinds_of(attn)
    declared = [d.exchangeable for d in attn.declare().values() if d.exchangeable is not None]
    assert len(declared) <= 1
    sets = declared[0] if declared else None
    chosen = {}
    for kinds in tied(attn):
        heads = max(count[kind] for kind in kinds)
        sources = min(count[kind] for kind in kinds)
        # more heads than six are softmax or value heads of their own: any order will do
        several = itertools.permutations(range(heads)) if heads <= 6 else [(*range(1, heads), 0)]
        fitting = [order for order in several if allowed(order, sources, sets)]
        order = max(fitting, key=lambda order: sum(h != i for i, h in enumerate(order)))
        for kind in kinds:
            share = heads // count[kind]
            chosen[kind] = [h // share for h in order[::share]]
    return chosen


def moved(leaf, names, order):
    """A leaf with every head axis in its new order: new head i is old head order[i]."""
    for axis, name in enumerate(names.split()):
        kind, _, span = name.partition("[")
        kind = "hv" if kind == "h" else kind
        if kind in order:
            low, _, high = span.rstrip("]").partition(":")
            held = range(int(low or 0), int(high or len(order[kind])))
            leaf = np.take(leaf, [held.index(order[kind][h]) for h in held], axis=axis)
    return leaf


def dead_leaves(case, attn):
    """Leaves that the softmax cannot see: what they add is the same for all keys of a row."""
    dead = {("pre", "bias")}
    pre_by_key = any("pre" in names and "key" in names for names in own_paths(attn))
    if not pre_by_key and case.spec.get("qk_norm") is None and not case.spec.get("rotary"):
        dead.add(("key", "bias"))
    return dead if case.spec.get("softcap") is None else set()


def own_paths(attn):
    tree = jax.eval_shape(attn.init, jax.random.key(0))["heads"]
    return [{part.key for part in path} for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.heavy
@each_row
def test_law_10_exchangeable_heads_move_together_and_no_leaf_alone(case):
    attn = table.attention(case)
    params = table.drawn(attn, np.random.default_rng(11))
    inputs = table.draw(case)._replace(bias=None)
    if case.head_mask:
        inputs = inputs._replace(visible=np.broadcast_to(inputs.visible[:, :1], inputs.visible.shape))
    order = orders(attn)

    @table.jit
    def run(params):
        return table.call(case, attn, params, inputs)[0]

    want = run(params)
    size = np.max(np.abs(want))
    axes = attn.axes()
    joint = jax.tree.map(lambda leaf, names: moved(leaf, names, order), params, axes)
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    new = jax.tree.leaves(joint)
    changed = [i for i, (_, leaf) in enumerate(paths) if not np.array_equal(leaf, new[i])]
    still = any(d.exchangeable == () for d in attn.declare().values())
    assert bool(changed) != still
    assert np.max(np.abs(run(joint) - want)) <= 1e-12 * size
    for i in changed:
        words = tuple(part.key for part in paths[i][0])
        leaves = [leaf for _, leaf in paths]
        alone = run(tree.unflatten([*leaves[:i], new[i], *leaves[i + 1 :]]))
        unseen = words[-2:] in dead_leaves(case, attn)
        assert (np.max(np.abs(alone - want)) <= 1e-12 * size) == unseen, words


# Law 11: what is counted is what the program does.


def test_the_walker_counts_bodies_as_often_as_they_run():
    a, b = jnp.ones((2, 3)), jnp.ones((3, 5))

    def product(a, b):
        return a @ b

    inverse = jax.custom_jvp(product)
    inverse.defjvp(lambda primals, tangents: (product(*primals), product(*tangents)))
    scan = lambda a, b: jax.lax.scan(lambda c, _: (c + product(a, b), None), 0.0 * (a @ b), length=7)
    for function, macs in (
        (product, 30),
        (jax.jit(product), 30),
        (jax.checkpoint(product), 30),
        (inverse, 30),
        (scan, 30 + 7 * 30),
        (lambda a, b: jax.lax.map(lambda row: row @ b, a), 2 * 15),
        (lambda a, b: jax.lax.cond(a[0, 0] > 0, product, lambda a, b: product(a, b) @ b.T @ b, a, b),
         30 + 30 + 30),
    ):  # fmt: skip
        assert jaxpr.dot_macs(jaxpr.trace(function, a, b)) == macs
    endless = lambda a, b: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ b @ b.T, a)
    with pytest.raises(AssertionError, match="unknown trips"):
        jaxpr.dot_macs(jaxpr.trace(endless, a, b))


def shapes(case, attn, dtype=jnp.float32):
    """Parameters and states as shapes, and the lengths of both sides."""
    params = jax.eval_shape(functools.partial(attn.init, dtype=dtype), jax.random.key(0))
    inputs = table.draw(case)
    states = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), (inputs.x_q, inputs.x_kv))
    k_len = jax.tree.leaves(states)[-1].shape[-2]
    return (params, *states), inputs.x_q.shape[-2], k_len


@each_row
def test_law_11_the_ledger_counts_the_program(case):
    """On both engines that multiply whole tensors; the loops multiply by pairs."""
    attn = table.attention(case)
    arguments, q_len, k_len = shapes(case, attn)
    ledger = ja.ledger(attn, table.BATCH, q_len, k_len)
    for engine in ("dense", "blocked"):
        program = jaxpr.trace(lambda *a: attn.apply(*a, engine=engine)[0], *arguments)  # noqa: B023
        assert sum(ledger.macs.values()) == jaxpr.dot_macs(program) > 0
    leaves = jax.tree.leaves(arguments[0])
    assert sum(ledger.parameters.values()) == sum(leaf.size for leaf in leaves)
    assert ledger.parameter_bytes == 4 * sum(leaf.size for leaf in leaves)


PRIMES = {"batch": 1, "q": 19, "k": 23}


@each_row
def test_law_11_no_value_has_two_head_axes_beside_both_rows(case):
    """Forward and backward. The numbers of rows are primes of their own, so that a value that holds
    q and k is known by its size, and what is left beside them cannot hold heads times heads.
    """
    attn = table.attention(case)
    (params, *_), _, _ = shapes(case, attn)
    widths = case.spec
    x_q = jax.ShapeDtypeStruct((PRIMES["q"], widths["model"]), jnp.float32)
    x_k, x_v = (
        jax.ShapeDtypeStruct((PRIMES["k"], widths.get(name, widths["model"])), jnp.float32)
        for name in ("in_k", "in_v")
    )
    count = {n for n in kinds_of(attn).values() if n > 1}

    def loss(params, x_q, x_k, x_v, engine):
        y, aux = attn.apply(params, x_q, (x_k, x_v), engine=engine)
        return y.sum() + aux.total()

    both = PRIMES["q"] * PRIMES["k"]
    for engine in ("dense", "blocked"):
        whole = functools.partial(loss, engine=engine)
        for function in (whole, jax.grad(whole, argnums=(0, 1, 2, 3))):
            largest = 0
            for value in jaxpr.values(jaxpr.trace(function, params, x_q, x_k, x_v)):
                if value.size and value.size % both == 0:
                    largest = max(largest, value.size // both)
            assert 0 < largest <= max(count, default=1), f"{largest} numbers a pair, heads {count}"


# Law 13: what is not there raises.


def test_law_13_every_engine_refuses_what_it_does_not_declare():
    attn = ja.attention(ja.HeadSpec(model=6, heads=2))
    routed = ja.attention(ja.HeadSpec(model=6, heads=2), variants.moh(shared=1, top_k=1))
    x = jnp.ones((5, 6))
    names = ja.ENGINES["reference"].captures
    assert set(names) == {"logits", "mixed_logits", "weights", "mixed_weights", "heads"}
    for engine in ja.ENGINES.values():
        assert engine.about
        if engine.name in table.KERNELS:
            continue
        made = attn if engine.name not in table.ROUTED else routed
        params = made.init(jax.random.key(0))
        for name in names:
            ask = functools.partial(made.apply, params, x, engine=engine.name, capture=(name,))
            if name in engine.captures:
                assert ask()[1].captured.keys() == {name}
            else:
                with pytest.raises(ValueError, match=rf"'{engine.name}'.*{name}.*dense"):
                    ask()


def test_law_13_auto_takes_an_engine_that_can_return_what_is_asked():
    """1024 rows are enough to be cut, unless the weights are wanted whole."""
    attn = ja.attention(ja.HeadSpec(model=2, heads=2))
    params, x = attn.init(jax.random.key(0)), jnp.ones((2048, 2), jnp.float32)
    captured = jax.eval_shape(lambda: attn.apply(params, x, capture=("weights",))[1].captured)
    assert captured["weights"].shape == (2, 2048, 2048)
    program = jaxpr.trace(lambda x: attn.apply(params, x)[0], x)
    assert max(value.size for value in jaxpr.values(program)) < 2 * 2048 * 2048
