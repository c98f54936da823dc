"""Public cases of masks: polarity, types, axes and causal alignment, with no projections."""

import inspect
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, expected

import jaxattn as ja

pytestmark = pytest.mark.heavy

each_engine = pytest.mark.parametrize("engine", cases.ENGINES)
each_variant = pytest.mark.parametrize("name", sorted(cases.ARGUMENTS))
TRIANGLE = np.asarray(CASES["PUB-01"]["input"]["mask_bool_keep"], bool)


# PUB-01


@each_engine
@pytest.mark.parametrize(
    "mask",
    [
        ja.explicit(TRIANGLE, axes="q k"),
        ja.explicit(TRIANGLE[None], axes="b q k"),
        ja.explicit(TRIANGLE[None, None], axes="b h q k"),
        ja.causal(),
        ja.causal() & ja.lengths(jnp.array([3])),
        ja.causal() & ja.padding(jnp.ones((1, 3), bool)),
        ja.causal() & ja.window(3),
        ja.window(3),
        ja.causal() & ja.segments(jnp.zeros((1, 3), int)),
        ja.causal() | ja.causal(),
        ~ja.explicit(~TRIANGLE, axes="q k"),
        ja.masks.from_torch_mha(~TRIANGLE),
    ],
    ids=repr,
)
def test_pub_01_true_means_visible_in_every_helper(mask, engine):
    got = cases.uniform(cases.units(3), 3, mask, engine=engine)[0, :, 0]
    np.testing.assert_allclose(got, expected("PUB-01", "ctx"), atol=1e-6)


@each_engine
def test_pub_01_lengths_count_visible_keys(engine):
    want = np.tile(expected("PUB-01", "lengths=[1] helper, every row"), (3, 1))
    for mask in (ja.lengths(jnp.array([1])), ja.padding(jnp.array([[True, False, False]]))):
        got = cases.uniform(cases.units(3), 3, mask, engine=engine)[0, :, 0]
        np.testing.assert_allclose(got, want, atol=1e-6)


@each_variant
def test_pub_01_one_polarity_in_every_variant(name):
    """The same masks through each variant: the helper and the array agree, the inverse does not."""
    attn, params = cases.variant(name, ja.HeadSpec(model=6, heads=2, d_qk=5, d_v=5))
    x = jnp.asarray(cases.fill((1, 3, 6), 10))
    want = cases.apply(attn, params, x, mask=ja.causal())
    got = cases.apply(attn, params, x, mask=ja.explicit(TRIANGLE, axes="q k"))
    other = cases.apply(attn, params, x, mask=ja.explicit(~TRIANGLE, axes="q k"))
    np.testing.assert_allclose(got, want, atol=1e-12)
    assert np.max(np.abs(other - want)) > 1e-3


@pytest.mark.parametrize("helper", [ja.causal, ja.window, ja.padding, ja.lengths, ja.segments, ja.explicit])
def test_pub_01_polarity_is_in_the_documentation(helper):
    assert re.search("True = (visible|real)|sees?\\b|visible where", inspect.getdoc(helper) or "")


def test_pub_01_raw_masks_are_refused_naming_the_conversion():
    with pytest.raises(TypeError, match=r"mask.*from_torch_mha"):
        cases.uniform(cases.units(3), 3, jnp.asarray(TRIANGLE))


# PUB-02

PAIR = jnp.asarray(CASES["PUB-02"]["input"]["v"])


def bias_of(name):
    numbers = [float(number) for number in CASES["PUB-02"]["input"]["biases"][name]]
    return jnp.asarray(numbers)[None, None, None]


@each_engine
def test_pub_02_boolean_mask_selects(engine):
    mask = ja.explicit(np.asarray(CASES["PUB-02"]["input"]["masks"]["bool"])[None], axes="b k")
    got = cases.uniform(PAIR, 1, mask, engine=engine)
    np.testing.assert_allclose(got, expected("PUB-02", "bool mask"), atol=1e-6)


@pytest.mark.parametrize("name", ["int32", "uint8", "int32_two", "float32", "float32_negzero"])
def test_pub_02_other_dtypes_are_refused(name):
    numbers = CASES["PUB-02"]["input"]["masks"][name]
    mask = np.asarray([numbers], name.split("_")[0])
    with pytest.raises(TypeError, match=rf"{mask.dtype}.*bool"):
        ja.explicit(mask, axes="b k")


@each_engine
@pytest.mark.parametrize("name", ["b1", "b2", "b3"])
def test_pub_02_additive_values_go_through_bias(name, engine):
    got = cases.uniform(PAIR, 1, bias=bias_of(name), engine=engine)
    np.testing.assert_allclose(got, expected("PUB-02", f"bias {name}"), atol=1e-6)


@each_engine
def test_pub_02_negative_zero_has_the_gradient_of_zero(engine):
    def loss(bias):
        return cases.uniform(PAIR, 1, bias=bias, engine=engine).sum()

    got, want = jax.grad(loss)(bias_of("b3")), jax.grad(loss)(jnp.zeros((1, 1, 1, 2)))
    np.testing.assert_array_equal(got, want)
    assert np.max(np.abs(want)) > 0.1


# PUB-03


def coordinates():
    b, j, h = np.meshgrid(*[np.arange(2)] * 3, indexing="ij")
    return jnp.asarray(1000.0 * b + 100 * h + 10 * j)[..., None]


PER_EXAMPLE = np.stack(
    [np.asarray(rows, bool) for rows in CASES["PUB-03"]["input"]["mask_per_example"].values()]
)


@each_engine
@pytest.mark.parametrize(
    "mask",
    [
        ja.explicit(PER_EXAMPLE[:, None], axes="b h q k"),
        ja.explicit(PER_EXAMPLE, axes="b q k"),
        ja.explicit(PER_EXAMPLE[:, 0], axes="b k"),
        ja.padding(PER_EXAMPLE[:, 0]),
        ja.lengths(jnp.array([2, 1])),
    ],
    ids=repr,
)
def test_pub_03_masks_align_by_axis_name(mask, engine):
    """b = h = q = k = 2: only names can tell these axes apart."""
    got = cases.uniform(coordinates(), 2, mask, engine=engine)[..., 0]
    for b in range(2):
        for h in range(2):
            np.testing.assert_allclose(got[b, :, h], expected("PUB-03", f"ctx[b={b},h={h}]"), atol=1e-4)


@pytest.mark.parametrize(
    ("array", "axes", "message"),
    [
        (np.ones((2, 2), bool), "b q k", r"'b q k'.*3 axes.*has 2: shape \(2, 2\)"),
        (np.ones((2, 2, 2, 2, 2), bool), "b h q k", r"4 axes.*has 5: shape \(2, 2, 2, 2, 2\)"),
        (np.ones((2, 2), bool), "k b", r"'k b'.*batch axes first"),
    ],
)
def test_pub_03_axes_that_do_not_fit_the_array_are_refused(array, axes, message):
    with pytest.raises(ValueError, match=message):
        ja.explicit(array, axes=axes)


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((3, 2, 2), "b q k", r"b.*3.*2"),
        ((3, 2, 2), "h q k", r"h.*3.*2"),
        ((5, 2), "q k", r"q.*5.*2"),
        ((2, 5), "b k", r"k.*5.*2"),
    ],
)
def test_pub_03_lengths_that_do_not_fit_the_call_are_refused(shape, axes, message):
    with pytest.raises(ValueError, match=message):
        cases.uniform(coordinates(), 2, ja.explicit(np.ones(shape, bool), axes=axes))


# PUB-11


def causal_weights(q_len, k_len, align, engine):
    return cases.uniform(cases.units(k_len), q_len, ja.causal(align=align), engine=engine)[0, :, 0]


@each_engine
@pytest.mark.parametrize(
    ("name", "q_len", "k_len", "align"),
    [
        ("end-aligned 2x5", 2, 5, "end"),
        ("end-aligned 1x5", 1, 5, "end"),
        ("start-aligned 2x5", 2, 5, "start"),
    ],
)
def test_pub_11_causal_alignment(name, q_len, k_len, align, engine):
    got = causal_weights(q_len, k_len, align, engine)
    np.testing.assert_allclose(got, expected("PUB-11", name), atol=1e-6)


@each_engine
def test_pub_11_end_alignment_with_more_queries_than_keys(engine):
    got = causal_weights(5, 2, "end", engine)
    want = [[0, 0], [0, 0], [0, 0], [1, 0], [0.5, 0.5]]
    np.testing.assert_allclose(got, want, atol=1e-6)
    dead = ja.causal(align="end").dead_queries(5, 2)
    np.testing.assert_array_equal(np.asarray(dead).ravel(), [True, True, True, False, False])


@each_engine
def test_pub_11_alignments_agree_on_a_square(engine):
    start, end = (causal_weights(3, 3, align, engine) for align in ("start", "end"))
    np.testing.assert_array_equal(start, end)


@each_engine
def test_pub_11_a_continued_call_compares_positions(engine):
    """Two queries at positions 3 and 4 of five keys see what end alignment shows them."""
    query = ja.QuerySide(query=jnp.zeros((1, 2, 1, 1)), position=jnp.arange(3, 5))
    key = ja.KeySide(jnp.zeros((1, 5, 1, 1)), cases.units(5), position=jnp.arange(5))
    got, _ = ja.attend(query, key, ja.Coupling(scale=1.0), ja.causal(), engine=engine)
    np.testing.assert_allclose(got[0, :, 0], expected("PUB-11", "end-aligned 2x5"), atol=1e-6)


@each_variant
def test_pub_11_every_variant_aligns_alike(name):
    """A rectangular causal call equals the explicit mask of the same alignment."""
    attn, params = cases.variant(name, ja.HeadSpec(model=6, heads=2, d_qk=5, d_v=5))
    x_q, x_kv = jnp.asarray(cases.fill((1, 2, 6), 10)), jnp.asarray(cases.fill((1, 5, 6), 11))
    for align, offset in (("start", 0), ("end", 3)):
        visible = ja.explicit(np.tri(2, 5, offset, dtype=bool), axes="q k")
        got = cases.apply(attn, params, x_q, x_kv, ja.causal(align=align))
        np.testing.assert_allclose(got, cases.apply(attn, params, x_q, x_kv, visible), atol=1e-12)


def test_pub_11_the_alignment_is_documented():
    text = inspect.getdoc(ja.causal) or ""
    assert "count from 0 by default (top-left)" in text and 'align="end"' in text
