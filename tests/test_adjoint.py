"""Gradients: the wrapper's adjoint by hand, derivative checks of every variant, null directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from cases import fill, redraw, tree_close
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

import jaxattn as ja
import variants

pytestmark = pytest.mark.heavy

ENGINES = tuple(table.ENGINES)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def redrawn(attn, seed):
    return redraw(attn.init(jax.random.key(0)), seed)


# The wrapper's analytic adjoint, in numpy.


def affine(x, leaf):
    return np.einsum("btm,mhd->bthd", x, leaf["kernel"]) + leaf["bias"]


def group(heads, size):
    """Sum the heads that read one key head: head i reads i // size."""
    batch, rows, count, width = heads.shape
    return heads.reshape(batch, rows, count // size, size, width).sum(3)


def local_backward(g_o, q, k, v, p, scale):
    """One softmax attention: dO -> dQ, dK, dV, every head at once."""
    g_v = np.einsum("bhqk,bqhv->bkhv", p, g_o)
    g_p = np.einsum("bqhv,bkhv->bhqk", g_o, v)
    g_s = scale * p * (g_p - np.sum(p * g_p, -1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", g_s, k), np.einsum("bhqk,bqhd->bkhd", g_s, q), g_v


def analytic_adjoint(params, target, source_k, source_v, visible, g_y):
    """(gradients of the parameters, of the target, of the K source, of the V source), and Y.

    Output fusion: O_cat's block h owns rows W_O[h]:  G_O[h] = G_Y W_O[h]^T,  G_W_O[h] = O[h]^T G_Y.
    Packed maps:   G_W = X^T G_packed,  G_b = sum of rows,  G_X = G_packed W^T.
    The caller adds G_X over all roles in which one array served.
    """
    maps = {"query": target, "key": source_k, "value": source_v}
    q, k, v = (affine(x, params[name]) for name, x in maps.items())
    share = q.shape[2] // k.shape[2]
    k_heads, v_heads = np.repeat(k, share, 2), np.repeat(v, share, 2)
    scale = 1 / np.sqrt(q.shape[-1])
    logits = scale * np.einsum("bqhd,bkhd->bhqk", q, k_heads)
    logits = np.where(visible, logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.einsum("bhqk,bkhv->bqhv", p, v_heads)
    w_o = params["out"]["kernel"]
    y = sum(o[:, :, h] @ w_o[h] for h in range(len(w_o))) + params["out"]["bias"]

    g_w_o = np.stack([np.einsum("bqv,bqm->vm", o[:, :, h], g_y) for h in range(len(w_o))])
    g_o = np.stack([g_y @ w_o[h].T for h in range(len(w_o))], axis=2)
    g_q, g_k, g_v = local_backward(g_o, q, k_heads, v_heads, p, scale)
    packed = {"query": g_q, "key": group(g_k, share), "value": group(g_v, share)}
    leaves = {"out": {"kernel": g_w_o, "bias": g_y.sum((0, 1))}, "heads": {}}
    inputs = {}
    for name, x in maps.items():
        leaves[name] = {
            "kernel": np.einsum("btm,bthd->mhd", x, packed[name]),
            "bias": packed[name].sum((0, 1)),
        }
        inputs[name] = np.einsum("bthd,mhd->btm", packed[name], params[name]["kernel"])
    return leaves, inputs, y


# The article's sizes, and one with a batch, grouped key heads and every axis apart.
SIZES = {
    "article": dict(batch=1, q=2, k=3, model=4, heads=2, kv_heads=2, d_qk=2, d_v=1),
    "grouped": dict(batch=2, q=5, k=7, model=11, heads=6, kv_heads=2, d_qk=3, d_v=4),
}


def wrapper(size, self_attention=False):
    """(attention, parameters, target, source, visible [q, k], G_Y)."""
    n = SIZES[size]
    sizes = {name: n[name] for name in ("model", "heads", "kv_heads", "d_qk", "d_v")}
    attn = ja.attention(ja.HeadSpec(**sizes, use_bias=True))
    k_len = n["q"] if self_attention else n["k"]
    target = fill((n["batch"], n["q"], n["model"]), 61)
    source = target if self_attention else fill((n["batch"], k_len, n["model"]), 62)
    visible = np.arange(k_len) <= np.arange(n["q"])[:, None] + 1
    visible[0, 0] = False  # rectangular and not a triangle
    return attn, redrawn(attn, 63), target, source, visible, fill(target.shape, 64)


def loss_of(attn, visible, g_y, engine):
    mask = ja.explicit(visible, axes="q k")

    def loss(params, target, source):
        return jnp.sum(attn.apply(params, target, source, mask, engine=engine)[0] * g_y)

    return loss


@each_engine
@pytest.mark.parametrize("size", SIZES)
class TestWrapperAdjoint:
    def test_output_is_a_sum_of_head_blocks(self, size, engine):
        attn, params, target, source, visible, g_y = wrapper(size)
        numpy = jax.tree.map(np.asarray, params)
        _, _, want = analytic_adjoint(numpy, target, source, source, visible, g_y)
        mask = ja.explicit(visible, axes="q k")
        got = attn.apply(params, target, source, mask, engine=engine)[0]
        np.testing.assert_allclose(got, want, atol=1e-12)

    def test_parameters_target_and_source(self, size, engine):
        """The one source array served K and V, so it gets both paths."""
        attn, params, target, source, visible, g_y = wrapper(size)
        numpy = jax.tree.map(np.asarray, params)
        leaves, inputs, _ = analytic_adjoint(numpy, target, source, source, visible, g_y)
        loss = loss_of(attn, visible, g_y, engine)
        got = jax.grad(loss, (0, 1, 2))(params, target, source)
        tree_close(got, (leaves, inputs["query"], inputs["key"] + inputs["value"]), 1e-12)
        assert np.max(np.abs(inputs["key"])) > 0.01 < np.max(np.abs(inputs["value"]))

    def test_a_pair_of_sources_gets_each_path_alone(self, size, engine):
        attn, params, target, source, visible, g_y = wrapper(size)
        other = fill(source.shape, 65)
        numpy = jax.tree.map(np.asarray, params)
        _, inputs, _ = analytic_adjoint(numpy, target, source, other, visible, g_y)
        loss = loss_of(attn, visible, g_y, engine)
        got = jax.grad(loss, 2)(params, target, (source, other))
        tree_close(got, (inputs["key"], inputs["value"]), 1e-12)

    def test_an_aliased_caller_gets_the_sum(self, size, engine):
        """Self-attention: one array is target and source, so Q, K and V paths add up in it."""
        attn, params, x, _, visible, g_y = wrapper(size, self_attention=True)
        numpy = jax.tree.map(np.asarray, params)
        _, inputs, _ = analytic_adjoint(numpy, x, x, x, visible, g_y)
        loss = loss_of(attn, visible, g_y, engine)
        want = inputs["query"] + inputs["key"] + inputs["value"]
        default = jax.grad(lambda x: loss(params, x, None))(x)
        named = jax.grad(lambda x: loss(params, x, x))(x)
        for got in (default, named):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.max(np.abs(want)))

    def test_central_differences(self, size, engine):
        """Every coordinate by name: a transposed gradient of a square kernel would not pass."""
        attn, params, target, source, visible, g_y = wrapper(size)
        loss = jax.jit(loss_of(attn, visible, g_y, engine))
        arguments = (params, target, source)
        leaves, tree = jax.tree.flatten(jax.tree.map(np.asarray, arguments))
        gradient = jax.tree.leaves(jax.grad(loss, (0, 1, 2))(*arguments))
        step = 1e-5
        generator = np.random.default_rng(0)
        for i, leaf in enumerate(leaves):
            chosen = generator.permutation(leaf.size)[:8]
            for flat in chosen:
                move = np.zeros(leaf.size)
                move[flat] = step
                sides = [
                    float(loss(*tree.unflatten([*leaves[:i], leaf + s * move.reshape(leaf.shape),
                                                *leaves[i + 1 :]])))
                    for s in (1, -1)
                ]  # fmt: skip
                slope = (sides[0] - sides[1]) / (2 * step)
                np.testing.assert_allclose(gradient[i].ravel()[flat], slope, atol=1e-8)


# Every variant and engine, as users check derivatives.

# One row of the table a variant, for finite differences.
FIRST_ROWS = [rows[0] for rows in table.TABLE.values()]
# Every engine for the row with both mixes, dense for the others.
ON_ENGINES = [(case, "dense") for case in FIRST_ROWS]
ON_ENGINES += [(table.TABLE["talking_heads"][0], engine) for engine in ("reference", "blocked")]
STEP = 1e-5  # of the differences: their error is about its square, times a third derivative


def name_of(value):
    return getattr(value, "name", None)


by_engine = pytest.mark.parametrize(("case", "engine"), ON_ENGINES, ids=name_of)


def problem(case, engine, dropout_key=None):
    """(function of parameters and states, those arguments) of one row of the table."""
    attn = table.attention(case)
    params = table.drawn(attn, np.random.default_rng(1))
    inputs = table.draw(case)

    def out(params, x_q, x_kv):
        moved = inputs._replace(x_q=x_q, x_kv=x_kv)
        return table.call(case, attn, params, moved, engine=engine, dropout_key=dropout_key)[0]

    states = jax.tree.map(jnp.asarray, (inputs.x_q, inputs.x_kv))
    return jax.jit(out), (jax.tree.map(jnp.asarray, params), *states)


def flat(out, arguments):
    """The same function of one vector, so that the check does few things one by one."""
    vector, unravel = ravel_pytree(arguments)
    return jax.jit(lambda v: out(*unravel(v)).reshape(-1)), (vector,)


@by_engine
def test_first_and_second_derivatives_agree_with_differences(case, engine):
    """In forward and reverse mode and each of one on the other; the loops in first order alone."""
    out, arguments = problem(case, engine)
    order = 1 if engine == "reference" else 2
    check_grads(*flat(out, arguments), order, eps=STEP, atol=1e-5, rtol=1e-5)


@by_engine
def test_gradients_under_a_fixed_dropout_rng(case, engine):
    case = case._replace(spec={**case.spec, "dropout": 0.3, "head_dropout": 0.2})
    dropped, arguments = problem(case, engine, jax.random.key(3))
    plain, _ = problem(case, engine)
    assert np.max(np.abs(dropped(*arguments) - plain(*arguments))) > 1e-3
    check_grads(*flat(dropped, arguments), 1, eps=STEP, atol=1e-6, rtol=1e-6)


def inner(a, b):
    return sum(float(jnp.vdot(x, y)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


# Two rows of each variant on the dense engine, one on the others.
LAW_9 = [(rows[i], "dense") for rows in table.TABLE.values() for i in (0, -1)]
LAW_9 += [(case, engine) for case in FIRST_ROWS for engine in ("reference", "blocked")]


@pytest.mark.parametrize(("case", "engine"), LAW_9, ids=name_of)
def test_law_9_forward_and_reverse_mode_are_adjoint(case, engine):
    """|<Jv,u> - <v,J'u>| <= 1e-14 |Jv| |u|."""
    out, arguments = problem(case, engine)
    generator = np.random.default_rng(2)
    v = table.like(arguments, generator)
    u = generator.normal(size=jax.eval_shape(out, *arguments).shape)

    @table.jit
    def both_ways(arguments, v, u):
        return jax.jvp(out, arguments, v)[1], jax.vjp(out, *arguments)[1](u)

    pushed, pulled = both_ways(arguments, v, u)
    size = np.sqrt(inner(pushed, pushed) * inner(u, u))
    assert size > 1
    assert abs(inner(pushed, u) - inner(v, pulled)) <= 1e-14 * size


@pytest.mark.parametrize("case", FIRST_ROWS, ids=name_of)
def test_law_9_jvp_grad_and_hessian_work_on_the_default_call(case):
    out, arguments = problem(case, "auto")
    params, x_q, x_kv = arguments

    def loss(x):
        return jnp.sum(jnp.sin(out(params, x, x_kv)))

    u, v = (np.random.default_rng(s).normal(size=x_q.shape) for s in (3, 4))

    @table.jit
    def derivatives(x):
        return jax.jvp(loss, (x,), (u,))[1], jax.grad(loss)(x), jax.hessian(loss)(x)

    slope, gradient, hessian = derivatives(x_q)
    np.testing.assert_allclose(slope, np.vdot(gradient, u), rtol=1e-12)
    curved = np.einsum("bqm,bqmcrn,crn->", u, hessian, v)
    np.testing.assert_allclose(np.einsum("bqm,bqmcrn,crn->", v, hessian, u), curved, rtol=1e-9)
    step = 1e-5
    ahead, behind = (np.vdot(derivatives(x_q + s * step * v)[1], u) for s in (1, -1))
    np.testing.assert_allclose(curved, (ahead - behind) / (2 * step), rtol=1e-6)


# Null directions.


def key_bias_gradient(transform, change=lambda params: params, mask=None):
    """Norm of the key bias's gradient over that of the query bias's, a live one."""
    attn = ja.attention(ja.HeadSpec(model=11, heads=4, d_qk=3, d_v=5, use_bias=True), *transform)
    params = change(redrawn(attn, 5))
    x = jnp.asarray(fill((2, 7, 11), 6))

    def loss(params):
        return jnp.sum(attn.apply(params, x, mask=mask)[0] ** 2)

    gradient = table.jit(jax.grad(loss))(params)
    null, live = (jnp.linalg.norm(gradient[name]["bias"]) for name in ("key", "query"))
    assert live > 1
    return float(null / live)


@pytest.mark.parametrize("mask", [None, ja.causal()], ids=repr)
@pytest.mark.parametrize(
    "transform",
    [
        (),
        (variants.talking_heads(),),
        (variants.talking_heads(dynamic=("pre_query", "post_query", "post_key")),),
        (variants.dcmha(pre=False),),
        (variants.moh(shared=1, top_k=2),),
    ],
    ids=["mha", "talking", "talking, query side", "dcmha, post only", "moh"],
)
def test_a_plain_key_bias_has_no_gradient(transform, mask):
    """A bias shared by all keys adds the same number to a whole row of logits, mixed or not."""
    assert key_bias_gradient(transform, mask=mask) <= 1e-13


@pytest.mark.parametrize(
    "transform",
    [(variants.talking_heads(dynamic=("pre_key",)),), (variants.dcmha(rank=1),)],
    ids=["talking, key side", "dcmha"],
)
def test_mixing_by_key_gives_the_key_bias_a_gradient(transform):
    """The row's constant meets another map at each key, so that it no longer cancels."""
    assert key_bias_gradient(transform) > 1e-2


def test_dcmha_without_its_key_factors_has_the_null_direction_again():
    def silence(params):
        pre = params["heads"]["dcmha"]["pre"]
        return {
            **params,
            "heads": {
                "dcmha": {
                    **params["heads"]["dcmha"],
                    "pre": {**pre, "key": jax.tree.map(jnp.zeros_like, pre["key"])},
                }
            },
        }

    assert key_bias_gradient((variants.dcmha(rank=1),), silence) <= 1e-13
