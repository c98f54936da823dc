"""The adjoint toolkit: right attention passes, and each planted fault is found where it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from jax.custom_derivatives import linear_call

import jaxattn as ja
import variants
from jaxattn.check import adjoint
from jaxattn.check.adjoint.differences import noise, slope

pytestmark = pytest.mark.heavy

ROWS, MODEL, HEADS, WIDTH = 5, 7, 3, 2
AXES = {"query": "m h d", "key": "m h d", "value": "m h d", "mix": "i o", "out": "h d m", "x": "t m"}


def plain_mix(logits, kernel):
    return jnp.einsum("iqk,io->oqk", logits, kernel)


def attention(params, x, mix=plain_mix, visible=None, key_states=lambda x: x):
    """A researcher's own causal attention with mixed logits, without a line of ours."""
    visible = np.tri(len(x), dtype=bool) if visible is None else visible
    query = jnp.einsum("tm,mhd->thd", x, params["query"])
    key = jnp.einsum("tm,mhd->thd", key_states(x), params["key"]) + params["key_bias"]
    value = jnp.einsum("tm,mhd->thd", x, params["value"])
    logits = mix(jnp.einsum("qhd,khd->hqk", query, key) / np.sqrt(WIDTH), params["mix"])
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd,hdm->qm", weights, value, params["out"])


@pytest.fixture
def params():
    draw = np.random.default_rng(0)
    shapes = dict.fromkeys(("query", "key", "value"), (MODEL, HEADS, WIDTH))
    shapes |= {"key_bias": (HEADS, WIDTH), "mix": (HEADS, HEADS), "out": (HEADS, WIDTH, MODEL)}
    return {name: draw.normal(size=shape) / shape[0] ** 0.5 for name, shape in shapes.items()}


@pytest.fixture
def x():
    return np.random.default_rng(1).normal(size=(ROWS, MODEL))


def backward(logits, kernel, cotangent):
    """The mix's two gradients."""
    return jnp.einsum("oqk,io->iqk", cotangent, kernel), jnp.einsum("iqk,oqk->io", logits, cotangent)


def with_backward(change):
    """The mix with a backward rule of its own, whose two gradients `change` changes."""

    @jax.custom_vjp
    def mix(logits, kernel):
        return plain_mix(logits, kernel)

    def pulled(saved, cotangent):
        logits, kernel = saved
        return change(*backward(logits, kernel, cotangent))

    mix.defvjp(lambda logits, kernel: (plain_mix(logits, kernel), (logits, kernel)), pulled)
    return mix


AT = (1, 2)  # the coordinate whose gradient is wrong alone
CHANGES = {
    "sign": lambda logits, kernel: (logits, -kernel),
    "scale left out": lambda logits, kernel: (logits * np.sqrt(WIDTH), kernel),
    "square axes transposed": lambda logits, kernel: (logits, kernel.T),
    "one coordinate": lambda logits, kernel: (logits, kernel.at[AT].mul(-1)),
}
CAUGHT_AT = {
    "sign": ("params/mix[",),
    "scale left out": ("params/query[", "params/key[", "x["),
    "square axes transposed": tuple(f"params/mix[i={i},o={o}]" for i in range(3) for o in range(3) if i != o),
    "one coordinate": ("params/mix[i=1,o=2]",),
}


class TestFiniteDifferences:
    def test_a_right_backward_rule_passes_without_forward_mode(self, params, x):
        fn = functools.partial(attention, mix=with_backward(lambda *gradients: gradients))
        fn = jax.jit(fn)
        verdict = adjoint.finite_differences(fn, params, x, axes=AXES)
        assert verdict, verdict
        assert verdict.numbers["estimated error"] < 1e-9
        forward = adjoint.dot_product(fn, params, x)
        assert not forward and forward.reason.startswith("no forward mode"), forward

    @pytest.mark.parametrize("fault", CHANGES)
    def test_a_wrong_backward_rule_is_found_where_it_is(self, params, x, fault):
        fn = jax.jit(functools.partial(attention, mix=with_backward(CHANGES[fault])))
        verdict = adjoint.finite_differences(fn, params, x, axes=AXES)
        assert not verdict
        assert verdict.where.startswith(CAUGHT_AT[fault]), verdict
        assert verdict.reason == "the gradient is not the slope of the function"
        by_difference, by_gradient = (verdict.numbers[f"by {what}"] for what in ("difference", "gradient"))
        assert abs(by_difference - by_gradient) > 1e6 * verdict.numbers["estimated error"]
        if fault in ("sign", "one coordinate"):
            np.testing.assert_allclose(by_difference, -by_gradient, rtol=1e-8)

    def test_a_norm_would_not_have_seen_the_one_coordinate(self, params, x):
        def gradient(change):
            fn = functools.partial(attention, mix=with_backward(change))
            return jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(fn(params, x)))))(params)

        right, wrong = gradient(lambda *both: both), gradient(CHANGES["one coordinate"])
        sizes = [np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(g))) for g in (right, wrong)]
        np.testing.assert_allclose(*sizes, rtol=1e-12)
        verdict = adjoint.compare(wrong, right, axes=AXES)
        assert not verdict and verdict.where == "mix[i=1,o=2]", verdict
        assert adjoint.compare(right, right)

    def test_stop_gradient_on_one_path(self, params, x):
        """The state reaches the output through queries and values as well: no gradient is zero."""
        fn = jax.jit(functools.partial(attention, key_states=jax.lax.stop_gradient))
        verdict = adjoint.finite_differences(fn, params, x, axes=AXES)
        assert not verdict and verdict.where.startswith("x[t="), verdict
        assert adjoint.dot_product(fn, params, x)  # both modes are wrong alike

    def test_a_kink_a_jump_and_noise_are_not_called_wrong_gradients(self):
        at = np.array([0.3, 0.0, 2.0])
        kink = adjoint.finite_differences(lambda x: jnp.abs(x), at)  # its gradient there is the mean slope
        assert not kink and kink.where == "x[1]" and "kink" in kink.reason, kink
        assert adjoint.finite_differences(lambda x: jnp.abs(x), at + 0.01)
        jump = adjoint.finite_differences(lambda x: x + (x > 0), np.array([0.0]))
        assert not jump and "jump" in jump.reason, jump
        rough = adjoint.finite_differences(lambda x: x + jnp.sin(1e9 * x) * 1e-3, np.array([0.0]))
        assert not rough and "do not settle" in rough.reason, rough
        coarse = adjoint.finite_differences(_in_float32, at + 0.01)
        assert coarse and 1e-9 < coarse.numbers["estimated error"] < 1e-4, coarse

    def test_steps_outside_the_domain_are_passed_over(self):
        assert adjoint.finite_differences(lambda x: jnp.log(x), np.array([0.05, 3.0]))


@jax.jit
def _in_float32(x):
    return jnp.sin(x.astype(jnp.float32)).astype(x.dtype) * x


@pytest.mark.parametrize(
    ("phi", "derivative"),
    [
        (np.exp, 1.0),
        (lambda t: np.sin(300 * t), 300.0),
        (lambda t: 1 / (t + 0.01), -1e4),
        (lambda t: 1e6 + np.tanh(t), 1.0),
        (lambda t: max(t - 1e-4, 0.0), 0.0),
        (lambda t: float(np.float32(np.cos(t + 1))), -np.sin(1)),
        (lambda t: 7.0, 0.0),
    ],
    ids=["exp", "fast", "near a pole", "cancelling", "kink nearby", "float32", "constant"],
)
def test_the_estimated_error_holds(phi, derivative):
    found = slope(phi, noise(phi))
    assert abs(found.value - derivative) <= 10 * found.error <= 1e-2 * max(1, abs(derivative))
    assert found.kink == 0


class TestDotProduct:
    def test_a_right_transpose_passes_and_a_wrong_one_is_found(self, params, x):
        def mix(logits, kernel, transposed):
            return linear_call(
                lambda kernel, logits: plain_mix(logits, kernel),
                lambda kernel, g: jnp.einsum("oqk,io->iqk", g, kernel.T if transposed else kernel),
                jax.lax.stop_gradient(kernel),
                logits,
            )

        fn = jax.jit(functools.partial(attention, mix=functools.partial(mix, transposed=False)))
        right = adjoint.dot_product(fn, params, x)
        assert right and right.measured < right.limit == 1e-14, right
        fn = jax.jit(functools.partial(attention, mix=functools.partial(mix, transposed=True)))
        wrong = adjoint.dot_product(fn, params, x, axes=AXES)
        assert wrong.measured > 1e-4 and not wrong.passed
        assert wrong.where.startswith(("params/query[m=", "params/key[m=", "x[t=")), wrong
        forward, reverse = wrong.numbers.values()
        assert abs(forward - reverse) > 1e-6

    def test_one_wrong_coordinate_of_many_is_named(self):
        @jax.custom_jvp
        def scaled(x):
            return 2 * x

        def transpose(_, g):
            return 2 * g.at[1, 3].mul(1 + 1e-9)

        rule = lambda primals, tangents: (
            scaled(*primals),
            linear_call(lambda _, x: 2 * x, transpose, (), *tangents),
        )
        scaled.defjvp(rule)
        verdict = adjoint.dot_product(lambda a, b: jnp.sin(scaled(b)) * a, np.ones(()), np.ones((3, 5)))
        assert not verdict and verdict.where == "b[1,3]", verdict
        assert "float32" in verdict.reason  # that small a disagreement is more often rounding

    def test_a_step_in_float32_is_called_that(self):
        def fn(x):
            return jnp.tanh(x.astype(jnp.float32) @ x.T.astype(jnp.float32)).astype(x.dtype) @ x

        verdict = adjoint.dot_product(fn, np.random.default_rng(0).normal(size=(3, 5)))
        assert not verdict and "float32" in verdict.reason, verdict


CAUSAL = np.tri(ROWS, dtype=bool)


class TestJacobianStructure:
    def test_causality_by_rows_and_a_leak(self, params, x):
        fn = functools.partial(attention, params)
        verdict = adjoint.jacobian_structure(fn, x, CAUSAL, required=CAUSAL)
        assert verdict and verdict.numbers["pairs reached"] == CAUSAL.sum(), verdict
        leaking = functools.partial(fn, visible=CAUSAL | (np.eye(ROWS, k=2) > 0))
        verdict = adjoint.jacobian_structure(leaking, x, CAUSAL, axes=AXES)
        assert not verdict and verdict.reason == "output q=0 is reached by input k=2", verdict
        assert verdict.where.startswith("x[t=2,m=")
        assert verdict.numbers["pairs reached but not allowed"] == ROWS - 2

    def test_a_mask_that_hides_too_much(self, params, x):
        hidden = CAUSAL & ~(np.eye(ROWS, k=-3) > 0)
        fn = functools.partial(attention, params, visible=hidden)
        assert adjoint.jacobian_structure(fn, x, CAUSAL)
        verdict = adjoint.jacobian_structure(fn, x, CAUSAL, required=CAUSAL)
        assert verdict.reason == "output q=3 is not reached by input k=0", verdict
        nothing = adjoint.jacobian_structure(lambda x: x * 0, x, CAUSAL)
        assert nothing.reason == "output q=0 is reached by no input that may reach it", nothing

    def test_any_pair_of_axes(self, params, x):
        """Batch rows apart in ours; a flattened softmax would couple them."""
        attn = ja.attention(ja.HeadSpec(model=MODEL, heads=HEADS, d_qk=2, d_v=2), variants.talking_heads())
        own = table.drawn(attn, np.random.default_rng(2))
        batch = np.stack([x, -x[::-1]])
        over_batch = functools.partial(adjoint.jacobian_structure, out_axis=0, in_axis=0, names=("b", "b"))
        fn = jax.jit(lambda x: attn.apply(own, x)[0])
        assert over_batch(fn, batch, np.eye(2))
        mixed = lambda x: fn(x) + x.mean(0)
        verdict = over_batch(mixed, batch, np.eye(2))
        assert verdict.reason == "output b=0 is reached by input b=1", verdict
        wrong_size = over_batch(fn, batch, np.eye(3))
        assert "(b, b) have (2, 2)" in wrong_size.reason, wrong_size


KEY_BIAS = adjoint.Null("softmax does not see what all keys share", at={"key_bias": ...})


class TestReach:
    def test_a_null_direction_must_be_declared_and_be_one(self, params, x):
        fn = jax.jit(lambda params: attention(params, x))
        verdict = adjoint.reach(fn, params, null=[KEY_BIAS])
        assert verdict and verdict.numbers["declared null"] == HEADS * WIDTH, verdict
        undeclared = adjoint.reach(fn, params)
        assert undeclared.where == "params/key_bias[0,0]" and undeclared.numbers["lost"] == 6, undeclared
        for head in range(HEADS):
            live = adjoint.Null("a wrong belief", at={"value": np.s_[:, head, :]})
            verdict = adjoint.reach(fn, params, null=[KEY_BIAS, live], axes=AXES)
            assert not verdict and "a wrong belief" in verdict.reason
            assert verdict.where.startswith("params/value[m=") and f",h={head}," in verdict.where, verdict

    def test_one_direction_over_two_leaves(self, params, x):
        """Each head's query may grow as its key shrinks; no coordinate of either is null."""
        fn = lambda params: attention({**params, "key_bias": jnp.zeros((HEADS, WIDTH))}, x)
        params.pop("key_bias")
        one_head = np.arange(HEADS)[:, None] == 1
        along = {"query": params["query"] * one_head, "key": -params["key"] * one_head}
        assert adjoint.reach(fn, params, null=[adjoint.Null("scales of q and k cancel", along=along)])
        same_way = adjoint.Null("they do not", along={**along, "key": -along["key"]})
        verdict = adjoint.reach(fn, params, null=[same_way])
        assert not verdict and verdict.where == "query + key", verdict

    def test_stop_gradient_loses_a_leaf(self, params, x):
        fn = lambda params: attention({**params, "out": jax.lax.stop_gradient(params["out"])}, x)
        verdict = adjoint.reach(fn, params, null=[KEY_BIAS], axes=AXES)
        assert not verdict and verdict.where == "params/out[h=0,d=0,m=0]", verdict
        assert "42 of 42 in params/out" in verdict.reason

    def test_a_null_of_no_leaf_is_the_callers_mistake(self, params, x):
        with pytest.raises(ValueError, match="0 leaves are called 'key/bias'.*Fix: one of params/key,"):
            adjoint.reach(lambda params: attention(params, x), params,
                          null=[adjoint.Null("no such", at={"key/bias": ...})])  # fmt: skip


# What the form of our own attention says is null; `reach` shows by gradients that it is, and is all.

BIAS, MIX_BIAS, DEAD = "key/bias", "heads/talking_heads/pre/bias", "out/kernel"
NULLS = {
    "plain": ({}, (), [BIAS]),
    "rotary": ({"rotary": ja.Rotary()}, (), []),
    "softcap": ({"softcap": 1.5}, (), []),
    "head norms": ({"qk_norm": "rms"}, (), []),
    "static mix": ({}, (variants.talking_heads(bias=True),), [MIX_BIAS, BIAS]),
    "mix by query": ({}, (variants.talking_heads(dynamic=("pre_query", "post_key")),), [BIAS]),
    "mix by key, then a bias": (
        {}, (variants.talking_heads(dynamic=("pre_key",)), variants.talking_heads(bias=True)),
        ["heads/talking_heads_1/pre/bias"],
    ),
    "a bias, then mix by key": (
        {}, (variants.talking_heads(bias=True), variants.talking_heads(dynamic=("pre_key",))), [],
    ),
    "dcmha": ({}, (variants.dcmha(rank=1),), []),
    "one shared head": ({}, (variants.moh(shared=1, top_k=2),), [BIAS]),
    "shared basis": ({}, (variants.collab(width=6),), []),
    "overlap": ({}, (variants.mohsa(overlap=2),), [BIAS, DEAD]),
}  # fmt: skip
ONE_A_VARIANT = ("plain", "static mix", "dcmha", "one shared head", "shared basis", "overlap")


@functools.cache
def our_attention(name):
    """(attention, parameters, jitted function of parameters and states, states) of a row."""
    more, transforms, _ = NULLS[name]
    spec = ja.HeadSpec(model=11, heads=4, d_qk=6, d_v=3, use_bias=True, **more)
    attn = ja.attention(spec, *transforms)
    fn = jax.jit(lambda params, x: attn.apply(params, x)[0])
    states = np.random.default_rng(3).normal(size=(2, 7, 11))
    return attn, table.drawn(attn, np.random.default_rng(1)), fn, states


@pytest.mark.parametrize("name", NULLS)
def test_ours_passes_and_its_nulls_are_the_named_ones(name):
    attn, params, fn, x = our_attention(name)
    nulls, axes = adjoint.nulls_of(attn), adjoint.axes_of(attn)
    assert sorted(path for one in nulls for path in one.at) == sorted(NULLS[name][2])
    adjoint.reach(fn, params, x, null=nulls, axes=axes).require()
    if name in ONE_A_VARIANT:
        adjoint.dot_product(fn, params, x, draws=1, axes=axes).require()
    if name in ("static mix", "overlap"):
        adjoint.finite_differences(fn, params, x, draws=1, axes=axes).require()


def test_dead_rows_are_the_first_and_last_of_the_output_map():
    attn, *_ = our_attention("overlap")
    (dead,) = (one.at[DEAD] for one in adjoint.nulls_of(attn) if DEAD in one.at)
    assert np.argwhere(dead).tolist() == [[0, 0], [0, 1], [3, 5], [3, 6]]


@pytest.mark.parametrize("name", NULLS)
def test_axis_names_fit_every_leaf(name):
    attn, params, *_ = our_attention(name)
    axes = adjoint.axes_of(attn)
    for path, leaf in jax.tree.leaves_with_path(params):
        assert len(axes[jax.tree_util.keystr(path, simple=True, separator="/")].split()) == leaf.ndim


# What a function may do wrong is a verdict; what a caller does wrong is an error.


def raises(x):
    raise RuntimeError("out of luck\nand more")


def counts(x):
    return jax.lax.while_loop(lambda c: c[0] < x.size, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


CHECKS = {
    "dot_product": adjoint.dot_product,
    "finite_differences": adjoint.finite_differences,
    "jacobian_structure": functools.partial(adjoint.jacobian_structure, allowed=np.eye(3)),
    "reach": adjoint.reach,
}
BAD = {
    "raises": (raises, "", "the function raised RuntimeError: out of luck"),
    "signature": (lambda x, y: x, "", "the function raised TypeError: "),
    "nan": (lambda x: jnp.log(x - 1), "output[0,0]", "the function's value is -inf"),
    "nan gradient": (lambda x: jnp.sqrt((x - 1) * (x > 0)) * 1.0, "x[0,0]", "the gradient is "),
    "float32": (lambda x: x.astype(jnp.float32), "output", "it is float32"),
    "no array": (lambda x: None, "", "the function returned no floating array"),
    "text": (lambda x: "abc", "", "the function raised TypeError: "),
    "no reverse mode": (counts, "", "no reverse mode"),
    "numpy inside": (lambda x: np.sin(np.asarray(x)), "", "no reverse mode"),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("fault", BAD)
def test_what_the_function_does_wrong_is_a_verdict(check, fault):
    fn, where, reason = BAD[fault]
    verdict = CHECKS[check](fn, np.ones((3, 5)))
    assert verdict.check == check and not verdict
    assert verdict.where == where and verdict.reason.startswith(reason), verdict


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_operands_must_be_float64(check):
    with pytest.raises(
        TypeError, match=r"x: dtype is float32, expected float64.*Fix: ja.check.adjoint.float64"
    ):
        check(lambda x: x, np.ones((3, 5), np.float32))
    with pytest.raises(TypeError, match="no floating array"):
        check(lambda x: x, np.ones((3, 5), int))


def test_what_does_not_move_is_held_fixed():
    """Integers, booleans and PRNG keys pass through; outputs that are no floats are no outputs."""

    def fn(state, index, *, unused=None):
        noise = jax.random.normal(state["rng"], state["table"].shape)
        return {"rows": (state["table"] * noise)[index], "index": index}

    state = {"rng": jax.random.key(3), "table": np.ones((4, 3)), "flag": True}
    index = np.array([2, 0])
    assert adjoint.dot_product(fn, state, index) and adjoint.finite_differences(fn, state, index)
    lost = adjoint.reach(fn, state, index)
    assert lost.where == "state/table[1,0]" and "6 of 12" in lost.reason, lost


def test_checks_bring_their_own_64_bits():
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", False)
    try:
        verdict = adjoint.dot_product(lambda x: jnp.tanh(x @ x.T), *adjoint.float64((jnp.ones((3, 5)),)))
        assert verdict and jnp.ones(1).dtype == jnp.float32
    finally:
        jax.config.update("jax_enable_x64", before)


class TestCompare:
    WANT = {"query": {"kernel": np.arange(24.0).reshape(2, 3, 4)}, "step": np.array(3)}

    def changed(self, at=(1, 0, 2), by=1e-9, **more):
        kernel = self.WANT["query"]["kernel"].copy()
        kernel[at] += by
        return {"query": {"kernel": kernel}, "step": np.array(3), **more}

    def test_the_worst_coordinate_with_both_values(self):
        got = self.changed()
        got["query"]["kernel"][0, 2, 1] += 2e-9
        verdict = adjoint.compare(got, self.WANT, axes={"query/kernel": "m h d"})
        assert not verdict and verdict.where == "query/kernel[m=0,h=2,d=1]"
        assert verdict.reason == "got 9, want 9" or "got 9.000000002, want 9" in verdict.reason, verdict
        np.testing.assert_allclose((verdict.measured, verdict.limit), (2e-9, 23e-12), rtol=1e-6)
        assert adjoint.compare(got, self.WANT, absolute=1e-8)

    @pytest.mark.parametrize(
        ("got", "where", "reason"),
        [
            ({"query": {"kernel": WANT["query"]["kernel"]}}, "step", "not in got: step"),
            ({**WANT, "extra": 1.0}, "extra", "not in want: extra"),
            ({**WANT, "step": np.ones(2, int)}, "step", "shape (2,), want ()"),
            ({**WANT, "step": np.array(3.0)}, "step", "dtype float64, want int"),
            ({**WANT, "step": np.array(4)}, "step", "got 4, want 3"),
            ({**WANT, "step": object()}, "step", ""),
        ],
        ids=["missing", "extra", "shape", "dtype", "integer", "no number"],
    )
    def test_leaves_by_name(self, got, where, reason):
        verdict = adjoint.compare(got, self.WANT)
        assert not verdict and verdict.where.startswith(where) and reason in verdict.reason, verdict

    def test_nan_and_infinity(self):
        for at, value, reason in (
            ((0, 1, 2), np.nan, "got is nan"),
            ((1, 2, 3), -np.inf, "got -inf, want 23"),
        ):
            verdict = adjoint.compare(self.changed(at, value), self.WANT)
            assert not verdict and verdict.where == f"query/kernel[{','.join(map(str, at))}]", verdict
            assert verdict.reason == reason
        hidden = {"logits": np.array([0.0, -np.inf])}
        assert adjoint.compare(hidden, hidden)
        assert not adjoint.compare(hidden, {"logits": np.array([0.0, np.inf])})
        assert not adjoint.compare({"a": np.array(np.nan)}, {"a": np.array(np.nan)})


def test_a_verdict_is_true_only_where_it_passed(params, x):
    passed = adjoint.compare(params, params)
    assert passed.require() is passed
    failed = adjoint.compare({"w": np.ones(2)}, {"w": np.zeros(2)})
    assert bool(passed) and not failed
    with pytest.raises(
        AssertionError, match=r"FAIL compare at w\[0\]: got 1, want 0 \(measured 1, limit 0\)"
    ):
        failed.require()
