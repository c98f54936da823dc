"""A step of decoding is shipped: trees of this package go through the bytes that `jax.export` writes."""

import dataclasses
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn as ja
import variants

ROOT = Path(__file__).parent.parent
SIZES = dict(model=16, heads=4)


def made(transform, **sizes):
    """An attention, parameters, an empty cache of 6 rows and 2 rows of states, alike in any process."""
    attn = ja.attention(ja.HeadSpec(**SIZES, **sizes), transform)
    params = attn.init(jax.random.key(0), jnp.float32)
    x = jax.random.normal(jax.random.key(1), (1, 2, 16), jnp.float32)
    return attn, params, attn.empty_cache(1, 6), x


def through_bytes(function, *arguments, **options):
    """The function as a program that was written and read again."""
    program = jax.export.export(jax.jit(function))(*arguments)
    return jax.export.deserialize(program.serialize(**options))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


CHILD = """
import pathlib, sys
import jax, numpy as np
import jaxattn as ja, variants
sys.path.insert(0, "tests")
from test_state_export import made

folder = pathlib.Path(sys.argv[1])
for name, variant in variants.VARIANTS.items():
    _, params, cache, x = made(variant())
    step = jax.export.deserialize((folder / name).read_bytes())
    want = np.load(folder / f"{name}.npz")
    for number in range(4):  # the fourth does not fit
        y, aux, cache = step.call(params, cache, x)
        for at, leaf in enumerate(jax.tree.leaves((y, aux, cache))):
            np.testing.assert_array_equal(leaf, want[f"{number} {at}"], f"{name} {number}")
    assert isinstance(cache, ja.Cache) and bool(cache.refused) and np.isnan(y).all()
    y, _, _ = step.call(params, cache.trim(2), x)
    assert np.isfinite(y).all()
print("shipped", len(variants.VARIANTS))
"""


@pytest.mark.heavy
def test_a_step_of_decoding_of_every_variant_runs_in_another_process(tmp_path):
    for name, variant in variants.VARIANTS.items():
        attn, params, cache, x = made(variant())
        decode = jax.jit(attn.decode)
        program = jax.export.export(decode)(params, cache, x).serialize()
        step, results = jax.export.deserialize(program), {}
        for number in range(4):
            want = decode(params, cache, x)
            assert_same(step.call(params, cache, x), want)
            results |= {f"{number} {at}": leaf for at, leaf in enumerate(jax.tree.leaves(want))}
            cache = want[2]
        (tmp_path / name).write_bytes(program)
        np.savez(tmp_path / f"{name}.npz", **results)
    named = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=ROOT, env=os.environ | named, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0 and "shipped 6" in ran.stdout, ran.stderr[-3000:]


def by_distance(slope, q, k):
    return -slope[:, None, None] * jnp.abs(q[..., None, :, None] - k[..., None, None, :])


@dataclasses.dataclass(frozen=True)
class Clipped:
    """A rule with options."""

    most: int = 3
    between: tuple[float, ...] = (0.5, float("inf"))

    def __call__(self, slope, q, k):
        return jnp.maximum(by_distance(slope, q, k), -self.most)


@pytest.mark.parametrize("rule", [by_distance, Clipped(2)])
def test_every_tree_of_a_call_comes_back_with_its_facts(rule):
    attn, params, _, x = made(variants.dcmha(static=True), softcap=2.0, dropout=0.1)
    trees = (
        attn.query_side(params, x, jnp.ones((1, 2), bool)),
        attn.key_side(params, x),
        dataclasses.replace(
            attn.coupling(params),
            pair_bias=ja.PairBias(jnp.ones(4), rule),
            key_of=(0, 1, 2, 3),
            softcap=float("inf"),
        ),
        ja.Mix(jnp.eye(4), jnp.ones(4), skip=True),
        ja.Factors(diag=jnp.ones((2, 4))),
        attn.empty_cache(1, 6, window=3),
        attn.apply(params, x, capture=("weights",))[1],
        ja.Loss(jnp.ones(()), jnp.ones(())),
        (ja.causal() & ja.padding(jnp.ones((1, 2), bool))) | ~ja.window(3, ahead=1),
        ja.lengths(jnp.array([2])) & ja.segments(jnp.array([0, 1])) & ja.everything(),
        ja.explicit(jnp.ones((2, 2), bool), axes="q k"),
    )
    assert_same(through_bytes(lambda trees: trees, trees).call(trees), trees)


def test_masks_and_rules_are_arguments_of_a_shipped_attention():
    attn, params, _, x = made(variants.talking_heads())
    mask = ja.causal() & ja.padding(jnp.array([[True, False]]))
    run = lambda params, x, mask: attn.apply(params, x, mask=mask)
    assert_same(through_bytes(run, params, x, mask).call(params, x, mask), jax.jit(run)(params, x, mask))


def test_a_shipped_loss_has_its_gradient():
    attn, params, _, x = made(variants.moh())

    def loss(params, x):
        y, aux = attn.apply(params, x, mask=ja.causal())
        return jnp.square(y).sum() + aux.total()

    shipped = through_bytes(loss, params, x, vjp_order=1)
    got, want = jax.grad(shipped.call)(params, x), jax.grad(jax.jit(loss))(params, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_a_shipped_step_refuses_the_cache_of_another_attention():
    attn, params, cache, x = made(variants.moh())
    step = through_bytes(attn.decode, params, cache, x)
    other, _, another, _ = made(variants.moh(top_k=1))
    assert cache.side.key.shape == another.side.key.shape and attn != other
    with pytest.raises(ValueError, match=r"moh\(top_k=1\)"):
        step.call(params, another, x)


class OwnSums(NamedTuple):
    total: jax.Array


class summing(ja.HeadTransform):
    def aux(self, params, x_q, side, at):
        return OwnSums(x_q.sum())


def test_sums_of_a_transform_of_one_s_own_are_registered_once():
    attn, params, cache, x = made(summing())
    program = jax.export.export(jax.jit(attn.decode))(params, cache, x)
    with pytest.raises(ValueError, match="unregistered type.*OwnSums"):
        program.serialize()
    assert ja.export.register(OwnSums) is OwnSums and ja.export.register(OwnSums) is OwnSums
    _, aux, _ = jax.export.deserialize(program.serialize()).call(params, cache, x)
    assert isinstance(aux.sums["summing"], OwnSums)


def test_types_defined_again_names_that_are_taken_and_what_is_no_tree():
    def define(name=None):
        class Again(NamedTuple):
            x: jax.Array

        return ja.export.register(Again, name)

    for kind in (define(), define()):  # as a notebook's cell that runs twice
        program = jax.export.export(jax.jit(lambda x: kind(x)))(1.0)  # noqa: B023
        assert isinstance(jax.export.deserialize(program.serialize()).call(1.0), kind)
    define("of one name")
    with pytest.raises(
        ValueError, match="Again as 'of one name': the type is registered already, or another"
    ):
        define("of one name")
    with pytest.raises(TypeError, match="got dict, expected a NamedTuple or a dataclass"):
        ja.export.register(dict)
    importlib.reload(ja.export)
    test_every_tree_of_a_call_comes_back_with_its_facts(by_distance)


def test_rules_that_another_process_cannot_find_are_refused_by_field():
    write = lambda rule: through_bytes(lambda x: x, ja.PairBias(jnp.ones(4), rule))
    with pytest.raises(ValueError, match=r"jaxattn.PairBias.of is <function .*cannot find by its name.*Fix"):
        write(lambda slope, q, k: by_distance(slope, q, k))
    with pytest.raises(ValueError, match=r"jaxattn.PairBias.of is functools.partial.*expected a number"):
        write(functools.partial(by_distance))
    program = jax.export.export(jax.jit(lambda x: x))(ja.PairBias(jnp.ones(4), Clipped())).serialize()
    where = f"{Clipped.__module__}:Clipped".encode()
    with pytest.raises(ValueError, match="the program needs .*, which is not there. Fix: import its module"):
        jax.export.deserialize(bytearray(bytes(program).replace(where, where[:-1] + b"X")))
    with pytest.raises(ValueError, match="with the fields more, between; it has changed"):
        jax.export.deserialize(bytearray(bytes(program).replace(b'"most"', b'"more"')))


def test_bytes_call_nothing_but_a_dataclass_of_these_fields():
    """What a module has by a name that the bytes give could be any function."""
    read = ja.export._value
    assert read({"made": f"{Clipped.__module__}:Clipped", "of": {"most": 2, "between": [1.0]}}) == Clipped(
        2, (1.0,)
    )
    for where in ("os:getcwd", "os:abort", "subprocess:Popen"):
        with pytest.raises(ValueError, match=f"needs {where} with the fields"):
            read({"made": where, "of": {}})


def test_a_step_is_shipped_for_any_batch():
    attn, params, cache, x = made(variants.dcmha())
    (batch,) = jax.export.symbolic_shape("b")
    of_any = lambda leaf: jax.ShapeDtypeStruct((batch, *leaf.shape[1:]) if leaf.ndim else (), leaf.dtype)
    decode = functools.partial(attn.decode, engine="dense")
    step = through_bytes(decode, params, jax.tree.map(of_any, cache), of_any(x))
    two, rows = attn.empty_cache(2, 6), jnp.concatenate([x, -x])
    cache = step.call(params, two, rows)[2]
    y, _, after = step.call(params, cache, rows)
    np.testing.assert_allclose(y, decode(params, cache, rows)[0], atol=1e-5)
    assert int(after.count) == 4 and after.batch == (2,)
