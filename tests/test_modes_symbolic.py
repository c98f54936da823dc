"""Programs of symbolic sizes, as `jax.export` makes them: a table of variants x engines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from jax import ShapeDtypeStruct, export
from modes import MASKS, MODEL, T, assert_near, cells, drawn, each_variant, made, steps, whole

import jaxattn as ja


def of_sizes(batch, rows, dtype=jnp.float32):
    return ShapeDtypeStruct((batch, rows, MODEL), dtype), ShapeDtypeStruct((batch,), jnp.int32)


@pytest.mark.heavy
@each_variant
def test_r2_03_an_exported_program_serves_any_batch_and_rows(name):
    attn, params, _ = made(name)
    function = table.jit(whole(attn, "auto"))
    b, t = export.symbolic_shape("b, t")
    program = export.export(function)(params, *of_sizes(b, t))
    for batch, rows in ((2, 5), (3, 7)):
        x, n = drawn(batch=batch, rows=rows)
        assert_near(program.call(params, x, n), function(params, x, n))


@cells
def test_r2_03_engines_take_symbolic_sizes_or_say_which_does(name, engine):
    attn, params, cache = made(name)
    both, decode = jax.jit(whole(attn, engine)), jax.jit(steps(attn, engine))
    b, t = export.symbolic_shape("b, t")
    if engine in ("blocked", "routed"):
        with pytest.raises(ValueError, match="symbolic.*Fix: .*auto"):
            export.export(both)(params, *of_sizes(b, t))
    else:
        export.export(both)(params, *of_sizes(b, t))
    if engine != "routed":
        export.export(both)(params, *of_sizes(b, T))
        of_batch = lambda x: ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) if x.ndim else x
        export.export(decode)(params, jax.tree.map(of_batch, cache), of_sizes(b, T)[0])


def test_r2_03_as_it_was_reported():
    attn = ja.attention(ja.HeadSpec(model=16, heads=4))
    params, x = attn.init(jax.random.key(0)), jnp.ones((3, 8, 16), jnp.float32)
    call = table.jit(lambda x: attn.apply(params, x, mask=ja.causal())[0])
    program = export.export(call)(ShapeDtypeStruct(export.symbolic_shape("b, 8, 16"), jnp.float32))
    np.testing.assert_allclose(program.call(x), call(x), atol=1e-6)


def test_r2_03_auto_judges_a_symbolic_batch_by_one_example():
    attn = ja.attention(ja.HeadSpec(model=16, heads=4))
    params = jax.eval_shape(attn.init, jax.random.key(0))
    found = []

    def names(rows):
        call = jax.jit(lambda params, x: attn.apply(params, x, mask=ja.causal())[0])
        shape = export.symbolic_shape(f"b, {rows}, 16")
        text = export.export(call)(params, ShapeDtypeStruct(shape, jnp.float32)).mlir_module()
        return "while" in text  # blocked is a loop

    found = [names(256), names(2048), names("t")]
    assert found == [False, True, False]


@pytest.mark.heavy
def test_r2_03_blocks_of_a_symbolic_batch_are_those_of_any_other():
    attn, params, _ = made("talking_heads")
    rows = 300  # several blocks
    function = table.jit(whole(attn, "blocked"))
    program = export.export(function)(params, *of_sizes(export.symbolic_shape("b")[0], rows))
    x, n = drawn(batch=3, rows=rows)
    assert_near(program.call(params, x, n), table.jit(whole(attn, "dense"))(params, x, n))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_r2_03_masks_take_symbolic_sizes(mask):
    if mask is MASKS["explicit h q"]:
        mask = lambda n, ids: ja.explicit(jnp.ones((4, 1), bool) & (ids[0] > 0), axes="h q")
    attn = ja.attention(ja.HeadSpec(model=16, heads=4))
    params = jax.eval_shape(attn.init, jax.random.key(0))
    call = lambda params, x, n, ids: attn.apply(params, x, mask=mask(n, ids))[0]
    b, t = export.symbolic_shape("b, t")
    args = [((b, t, 16), jnp.float32), ((b,), jnp.int32), ((b, t), jnp.int32)]
    export.export(jax.jit(call))(params, *(ShapeDtypeStruct(*a) for a in args))
