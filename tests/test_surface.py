"""Small things that people touch: representations, options of the core, one dropout key under vmap."""

import dataclasses
import pickle
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn as ja
import variants

SPECS = [
    ja.HeadSpec(model=12, heads=4),
    ja.HeadSpec(model=11, heads=4, d_qk=6, d_v=3, in_k=13, in_v=13, out=17),
    ja.HeadSpec(model=12, heads=4, kv_heads=2, use_bias=True, bias_out=False, scale=1.0),
    ja.HeadSpec(model=12, heads=4, bias_q=True, qk_norm="rms", qk_norm_eps=1e-5, softcap=2.0),
    ja.HeadSpec(model=12, heads=3, rotary=ja.Rotary(base=100.0, pairs="adjacent", width=2), dropout=0.1),
    ja.HeadSpec(model=12, heads=4, d_qk=3, in_q=12, dropout_shared=("b",), head_dropout=0.2),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_spec_prints_what_differs_from_the_defaults_and_evaluates_back(spec):
    names = {"HeadSpec": ja.HeadSpec, "Rotary": ja.Rotary}
    assert eval(repr(spec), names) == spec
    assert "None" not in repr(spec) and "in_q" not in repr(spec)
    attn = ja.attention(spec, variants.mha())
    assert eval(repr(attn), names | {"attention": ja.attention, "mha": variants.mha}) == attn


def test_a_spec_prints_no_more_than_it_was_given():
    assert repr(SPECS[0]) == "HeadSpec(model=12, heads=4)"
    assert repr(SPECS[4].rotary) == "Rotary(base=100.0, pairs='adjacent', width=2)"


def test_the_version_is_that_of_the_installed_package():
    assert ja.__version__ == version("jaxattn")


def test_one_dropout_key_under_vmap_draws_alike_and_split_keys_apart():
    attn = ja.attention(ja.HeadSpec(model=8, heads=2, dropout=0.5))
    params = attn.init(jax.random.key(0))
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (6, 8)), (3, 6, 8))
    key = jax.random.key(2)
    run = lambda x, key: attn.apply(params, x, dropout_key=key)[0]
    alike = jax.vmap(run, (0, None))(x, key)
    assert np.array_equal(alike[0], alike[1])
    apart = jax.vmap(run)(x, jax.random.split(key, 3))
    batched = run(x, key)
    for y in (apart, batched):
        assert np.abs(y[0] - y[1]).max() > 0.01


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_epsilon_of_head_norms_is_an_option(kind):
    heads = 1e-3 * jax.random.normal(jax.random.key(0), (5, 2, 6))
    scale = jax.random.normal(jax.random.key(1), (6,))
    got = [ja.project.normalize(heads, kind, scale, eps) for eps in (1e-6, 1e-5)]
    x = np.asarray(heads, np.float64)
    x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    for y, eps in zip(got, (1e-6, 1e-5), strict=True):
        want = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(scale)
        np.testing.assert_allclose(y, want, rtol=1e-5)
    attns = [ja.attention(ja.HeadSpec(model=12, heads=2, qk_norm=kind, qk_norm_eps=e)) for e in (1e-6, 1.0)]
    params = attns[0].init(jax.random.key(2))
    states = jax.random.normal(jax.random.key(3), (5, 12))
    one, other = (attn.apply(params, states)[0] for attn in attns)
    assert np.abs(one - other).max() > 1e-3
    with pytest.raises(ValueError, match=r"qk_norm_eps = -1.0, expected a finite number of at least 0"):
        ja.HeadSpec(model=12, heads=2, qk_norm_eps=-1.0)


@dataclasses.dataclass(frozen=True)
class Slope:
    """A rule of a pair bias as a value: the farther a key, the lower its logit."""

    power: float = 1.0

    def __call__(self, params, q_position, k_position):
        distance = jnp.abs(q_position[..., :, None] - k_position[..., None, :])
        return -params[:, None, None] * distance[..., None, :, :].astype(params.dtype) ** self.power


def test_a_pair_bias_made_twice_is_one_program_and_can_be_pickled():
    q, k, v = (jax.random.normal(jax.random.key(i), (5, 2, 3)) for i in range(3))
    traces = []

    @jax.jit
    def run(coupling):
        traces.append(1)
        return ja.attend(ja.QuerySide(q), ja.KeySide(k, v), coupling)[0]

    made = lambda power: ja.Coupling(scale=0.5, pair_bias=ja.PairBias(jnp.array([0.3, 0.7]), Slope(power)))
    one, two, other = run(made(1.0)), run(made(1.0)), run(made(2.0))
    assert len(traces) == 2
    assert np.array_equal(one, two) and np.abs(one - other).max() > 1e-3
    again = pickle.loads(pickle.dumps(made(2.0)))
    assert np.array_equal(run(again), other) and len(traces) == 2


class head_scale(ja.HeadTransform):
    """The README's own example."""

    start: float = 1.0

    def init(self, rng, at, dtype):
        return {"scale": jnp.full(at.sizes.output_heads, self.start, dtype)}

    def query_side(self, params, x_q, side, at):
        return at.gate(side, params["scale"][:, None])


def test_gates_multiply_what_is_there():
    spec = ja.HeadSpec(model=12, heads=4)
    x = jax.random.normal(jax.random.key(1), (5, 12))
    both = ja.attention(spec, variants.moh(), head_scale(start=0.5))
    params = both.init(jax.random.key(0))
    alone = ja.attention(spec, variants.moh())
    own = params | {"heads": {"moh": params["heads"]["moh"]}}
    want, got = alone.query_side(own, x).gate, both.query_side(params, x).gate
    np.testing.assert_allclose(got, 0.5 * want, rtol=1e-6)
    assert (np.asarray(want) == 0).any(), "moh gates some heads away"


def test_one_head_has_no_router():
    """A softmax over one head is 1 whatever its logit: such a router could never learn."""
    spec = ja.HeadSpec(model=12, heads=4)
    for transform, leaves in (
        (variants.moh(shared=1, top_k=2), {"routed", "stage"}),
        (variants.moh(shared=3, top_k=1), {"shared", "stage"}),
        (variants.moh(shared=0, top_k=2), {"routed"}),
    ):
        assert set(ja.attention(spec, transform).init(jax.random.key(0))["heads"]["moh"]) == leaves


def test_a_number_of_numpy_prints_as_the_number_that_it_equals():
    made = variants.moh(top_k=np.int64(1), balance_weight=np.float64(0.5))
    assert repr(made) == "moh(top_k=1, balance_weight=0.5)" and eval(repr(made), vars(variants)) == made
