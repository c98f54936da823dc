"""Law 14: a transform is a value, for every case of the table; what makes none is refused by name."""

import copy
import dataclasses
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from flax import nnx
from test_value_identity import OPTIONS

import jaxattn as ja
import variants

each_case = pytest.mark.parametrize("case", table.CASES, ids=lambda case: case.name)
TWICE = [ja.chain(case.transform(), ja.identity) for case in (cases[0] for cases in table.TABLE.values())]


def read_back(value):
    """What a repr evaluates to, with the public names alone."""
    return eval(repr(value), vars(ja) | vars(variants))


@each_case
def test_equal_options_make_one_value(case):
    one, other = case.transform(), case.transform()
    for value, twin in ((one, other), (table.attention(case), table.attention(case))):
        for same in (
            twin,
            copy.copy(value),
            copy.deepcopy(value),
            pickle.loads(pickle.dumps(value)),
            read_back(value),
        ):
            assert same == value and hash(same) == hash(value) and repr(same) == repr(value)
            assert type(same) is type(value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name_of_nothing = 1


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_each_option_changed_alone_is_another_value(name):
    """Caches, identities and manifests tell them apart as well: tests/test_value_identity.py."""
    make = variants.VARIANTS[name]
    found = [make()]
    for option, value in OPTIONS[name].items():
        found.append(make(**{option: value}))
        assert repr(found[-1]) == f"{name}({option}={value!r})" and read_back(found[-1]) == found[-1]
    attns = [ja.attention(ja.HeadSpec(model=16, heads=4), transform) for transform in found]
    for values in (found, attns):
        assert len(set(values)) == len(set(map(repr, values))) == len(values)
    assert repr(make()) == f"{name}()"


def test_chains_compare_by_their_links():
    for one in TWICE:
        assert copy.deepcopy(one) == one == read_back(one) == pickle.loads(pickle.dumps(one))
    a, b = variants.moh(), variants.dcmha()
    assert len({ja.chain(a, b), ja.chain(b, a), ja.chain(a), ja.chain(a, ja.chain(b))}) == 4
    spec = ja.HeadSpec(model=8, heads=4)
    assert ja.attention(spec, ja.chain(a, ja.chain(b))) == ja.attention(spec, a, b)


def test_every_case_is_pickled_into_a_process_started_by_spawn():
    """There and back: the other process makes the classes from their modules, and equal values of them."""
    attns = [table.attention(case) for case in table.CASES]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        back, shown = pool.submit(copy.copy, attns), pool.submit(repr, attns)
        assert back.result() == attns and shown.result() == repr(attns)


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_three_attentions_made_alike_are_traced_once(name):
    traces = []

    def run(attn, x):
        traces.append(attn)
        return attn.sizes.output_heads * x

    static = jax.jit(run, static_argnums=0)
    made = lambda: ja.attention(ja.HeadSpec(model=8, heads=4, d_qk=4, d_v=4), variants.VARIANTS[name]())
    for _ in range(3):
        static(made(), jnp.ones(2))
    assert len(traces) == 1
    layer_of = lambda seed: ja.MultiHeadAttention(
        num_heads=4, in_features=16, variant=variants.VARIANTS[name](), rngs=nnx.Rngs(seed)
    )
    graph = nnx.jit(lambda layer, x: run(layer.attn, x))
    layers = [layer_of(seed) for seed in range(3)]
    for layer in layers:
        graph(layer, jnp.ones(2))
    assert len(traces) == 2
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(nnx.state(layer, nnx.Param) for layer in layers)
    )
    assert jax.tree.leaves(stacked)[0].shape[0] == 3
    assert len({nnx.graphdef(layer) for layer in layers}) == 1


def test_a_scan_body_may_make_its_layer():
    x = jnp.ones((3, 2, 8))

    def body(carry, x):
        attn = ja.attention(ja.HeadSpec(model=8, heads=4), variants.talking_heads())
        params = attn.init(jax.random.key(0), x.dtype)
        return params, attn.apply(params, x)[0]

    attn = ja.attention(ja.HeadSpec(model=8, heads=4), variants.talking_heads())
    params = attn.init(jax.random.key(0), x.dtype)
    _, y = jax.lax.scan(body, params, x)
    table.assert_close(y, attn.apply(params, x)[0], 1e-12, "scanned")


# What makes no value


class optioned(ja.HeadTransform):
    of: object = None


NO_VALUES = {
    "a list": (lambda: optioned([1]), TypeError, r"optioned: option of is a list, .*hashed.*Fix: .*tuple"),
    "an array": (lambda: optioned(jnp.ones(2)), TypeError, r"optioned: option of is .*Fix: .*belong to init"),
    "NaN": (lambda: optioned(float("nan")), ValueError, r"optioned: option of is nan, expected a number"),
    "the class": (lambda: variants.moh, TypeError, r"the class moh.*expected a HeadTransform.*Fix"),
    "a name": (lambda: "moh", TypeError, r"a str as transform, expected a HeadTransform.*Fix"),
    "in a chain": (lambda: ja.chain(optioned([1])), TypeError, r"option of is a list"),
}


@pytest.mark.parametrize("what", NO_VALUES)
def test_what_cannot_be_compared_is_refused_when_the_attention_is_made(what):
    make, error, words = NO_VALUES[what]
    with pytest.raises(error, match=words):
        ja.attention(ja.HeadSpec(model=8, heads=4), make())


CLASSES = {
    "a variant of a variant": (
        "class other(variants.moh): pass",
        "other: it extends moh.*Fix: extend HeadTransform",
    ),
    "an option named as a hook": (
        "class other(ja.HeadTransform):\n    init: int = 0",
        "'init' has the name of a hook",
    ),
    "a misspelt hook": (
        "class other(ja.HeadTransform):\n    def query_sides(self, params, x_q, side, at): return side",
        "'query_sides' is no hook.*Fix: 'query_side'",
    ),
}


@pytest.mark.parametrize("what", CLASSES)
def test_a_class_that_would_not_do_what_it_says_is_refused(what):
    source, words = CLASSES[what]
    with pytest.raises(TypeError, match=words):
        exec(source, {"ja": ja, "variants": variants, "__name__": __name__})


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_unknown_options_are_refused_by_name(name):
    with pytest.raises(TypeError, match="unknown_option"):
        variants.VARIANTS[name](unknown_option=1)


def test_numbers_of_numpy_are_the_same_values():
    """Equal, and printed alike: caches and checkpoints go by what is printed."""
    one, other = (
        variants.moh(np.int64(1), balance_weight=np.float64(0.5)),
        variants.moh(1, balance_weight=0.5),
    )
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other) == "moh(balance_weight=0.5)"
    specs = [ja.HeadSpec(model=8, heads=4, scale=kind(0.5)) for kind in (np.float64, float)]
    assert specs[0] == specs[1] and repr(specs[0]) == repr(specs[1])
