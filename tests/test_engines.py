"""What engines declare: who can run a call, who refuses and why, what was seen to run."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from jax import export

import jaxattn as ja
import variants
from jaxattn.attend import checked_call
from jaxattn.engines import blocked, dense, fused

B, Q, K, HEADS, WIDTH = 2, 13, 17, 4, 8
PLAIN = ja.Coupling(scale=0.3)
XLA = functools.partial(jax.nn.dot_product_attention, implementation="xla")
MASKS = {
    "none": None,
    "causal": ja.causal(),
    "rows without a key": ja.window(3) & ja.explicit(np.arange(Q) > 4, axes="q"),
    "data": ja.explicit(np.random.default_rng(0).random((B, Q, K)) < 0.5, axes="b q k"),
}


def sides(dtype=jnp.float32, heads=HEADS, kv_heads=HEADS, width=WIDTH, d_v=WIDTH, **key):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    query = ja.QuerySide(draw(B, Q, heads, width))
    return query, ja.KeySide(draw(B, K, kv_heads, width), draw(B, K, kv_heads, d_v), **key)


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_fused_hands_over_the_same_function(mask, kv_heads):
    """Layout, mask and rows without a key, by the implementation that runs here, values and gradients."""
    query, key = sides(jnp.float64, kv_heads=kv_heads)

    def handed(query, key):
        call = checked_call(query, key, PLAIN, MASKS[mask])
        return jnp.sin(fused.heads_by(call, XLA)).sum()

    def whole(query, key):
        return jnp.sin(ja.attend(query, key, PLAIN, MASKS[mask], engine="dense")[0]).sum()

    got, want = (table.jit(jax.value_and_grad(f, (0, 1)))(query, key) for f in (handed, whole))
    jax.tree.map(lambda a, b: table.assert_close(a, b, 1e-5, mask), got, want)


@pytest.fixture
def single_precision():
    """Kernels for TPUs know no 64-bit numbers."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


def splash_call(mask, heads=4, kv_heads=4, dtype=jnp.float32, q=128, k=256, **coupling):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    query, key = (
        ja.QuerySide(draw(2, q, heads, 8)),
        ja.KeySide(draw(2, k, kv_heads, 8), draw(2, k, kv_heads, 16)),
    )
    return checked_call(query, key, ja.Coupling(scale=0.3, **coupling), mask)


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize(
    "mask, kv_heads, softcap",
    [(ja.causal(), 4, None), (ja.causal(align="end") & ja.window(90, align="end"), 2, None), (None, 4, 1.5)],
)
def test_splash_attention_gets_the_same_function(mask, kv_heads, softcap):
    """Its own program, interpreted: layout, scale, mask, shared keys, soft cap; values and gradients."""
    call = splash_call(mask, kv_heads=kv_heads, softcap=softcap)
    assert fused.unfit_splash(call) is None

    def loss(run, query, key, value):
        given = call._replace(query=ja.QuerySide(query), key=ja.KeySide(key, value))
        return jnp.sin(run(given)).sum()

    arguments = call.query.query, call.key.key, call.key.value
    handed = functools.partial(fused.heads_by_splash, interpret=True)
    whole = lambda call: dense.run(call)[0]
    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, run), (0, 1, 2)))(*arguments)
        for run in (handed, whole)
    )
    jax.tree.map(lambda a, b: table.assert_close(a, b, 1e-5, str(mask)), got, want)


@pytest.mark.usefixtures("single_precision")
def test_splash_attention_lowers_for_a_tpu():
    call = splash_call(ja.causal(), dtype=jnp.bfloat16)
    run = lambda query: fused.heads_by_splash(call._replace(query=ja.QuerySide(query)))
    text = export.export(jax.jit(run), platforms=["tpu"])(call.query.query).mlir_module()
    assert "tpu_custom_call" in text


def test_tokamax_is_taken_where_it_is_installed_and_nothing_of_jax_fits(monkeypatch):
    """Its call is that of jax.nn and a soft cap; a stand-in says what it was given."""
    call = checked_call(*sides(d_v=16), ja.Coupling(scale=0.3, softcap=2.0), ja.causal())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert fused.refuses(call) == "cuDNN has no soft cap; tokamax is not installed"
    given = {}

    def attention(query, key, value, logits_soft_cap, **named):
        given.update(named, softcap=logits_soft_cap)
        return jnp.zeros((*query.shape[:-1], value.shape[-1]))

    monkeypatch.setattr(fused, "find_spec", lambda name: name == "tokamax")
    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(dot_product_attention=attention))
    assert fused.refuses(call) is None
    heads, _ = fused.run(call)
    assert heads.shape == (B, Q, HEADS, 16)
    assert given["softcap"] == 2.0 and given["scale"] == 0.3 and given["mask"].shape == (1, 1, Q, K)


NOT_SPLASH = {
    "known without data": splash_call(ja.lengths([3, 5])),
    "whole 128s": splash_call(None, q=100),
    "without a visible key": splash_call(ja.causal(align="end"), q=256, k=128),
    "float32 or bfloat16": splash_call(None, dtype=jnp.float16),
    "mixed": splash_call(None, pre=(ja.Mix(jnp.eye(4)),)),
}


@pytest.mark.parametrize("reason", NOT_SPLASH)
def test_splash_attention_is_not_handed_what_it_cannot(reason):
    assert reason in (fused.unfit_splash(NOT_SPLASH[reason]) or "")


REFUSED = {
    "mixed": (sides(jnp.bfloat16), ja.Coupling(scale=1.0, pre=(ja.Mix(jnp.eye(HEADS)),))),
    "soft cap": (sides(jnp.bfloat16), ja.Coupling(scale=1.0, softcap=3.0)),
    "float16 or bfloat16": (sides(), PLAIN),
    "widths": (sides(jnp.bfloat16, d_v=16), PLAIN),
    "in blocks": (sides(jnp.bfloat16), ja.Coupling(scale=1.0, key_of=(1, 0, 2, 3))),
    "biases": (sides(jnp.bfloat16, bias=jnp.ones((B, K, HEADS))), PLAIN),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_fused_refuses_what_no_kernel_can(reason):
    (query, key), coupling = REFUSED[reason]
    assert reason in (fused.unfit_cudnn(checked_call(query, key, coupling, None)) or "")


def test_fused_takes_what_the_kernel_can():
    assert fused.unfit_cudnn(checked_call(*sides(jnp.bfloat16), PLAIN, ja.causal())) is None


def test_fused_without_a_gpu_names_the_engines_that_can():
    with pytest.raises(ValueError, match="'fused' cannot.*CUDA GPU.*cpu.*reference, dense, blocked"):
        ja.attend(*sides(jnp.bfloat16), PLAIN, engine="fused")


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_explain_names_the_engine_that_runs(name):
    attn = ja.attention(ja.HeadSpec(model=24, heads=4), variants.VARIANTS[name]())
    record = attn.explain(batch=2, q_len=Q, k_len=K, mask=ja.causal(), observe=True)
    assert record.chosen in record.eligible and record.requested == "auto"
    assert set(record.eligible) | set(record.refused) == set(ja.ENGINES)
    assert record.refused.keys() == ({"fused"} if name == "moh" else {"fused", "routed"})
    assert "CUDA" in record.refused["fused"]
    assert record.mask == "causal()" and "float32" in record.shapes["query"]
    assert (record.observed is None) == (record.method is None)
    assert record.chosen in str(record)


def test_explain_knows_what_was_asked_for():
    attn = ja.attention(ja.HeadSpec(model=24, heads=4))
    record = attn.explain(2, Q, K, capture=("weights",))
    assert record.chosen == "dense" and "weights" in record.refused["blocked"]
    with pytest.raises(ValueError, match="weights"):
        attn.explain(2, Q, K, engine="blocked", capture=("weights",))


@pytest.mark.parametrize("name", ["mha", "talking_heads", "dcmha"])  # no mix, a static one, one of rows
def test_memory_grows_with_the_rows_and_not_with_their_square(name, monkeypatch):
    """Compiled temporary memory of forward and backward at four times the rows; dense would take 16 times."""
    monkeypatch.setattr(blocked, "BLOCK_BYTES", (2**16, 2**18))
    monkeypatch.setattr(blocked, "GROUPS", (2, 2))  # less to compile
    attn = ja.attention(ja.HeadSpec(model=64, heads=8), variants.VARIANTS[name]())
    params = jax.eval_shape(attn.init, jax.random.key(0))

    def bytes_of(rows: int) -> int:
        def loss(params, x):
            return attn.apply(params, x, mask=ja.causal(), engine="blocked")[0].sum()

        x = jax.ShapeDtypeStruct((1, rows, 64), jnp.float32)
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_of(4096) < 6 * bytes_of(1024)


def test_the_program_does_not_grow_with_the_rows():
    """Compile time is bounded: the program of forward and backward is as long for any number of rows."""
    attn = ja.attention(ja.HeadSpec(model=64, heads=8), variants.dcmha())
    params = jax.eval_shape(attn.init, jax.random.key(0))

    def size(rows: int) -> int:
        def loss(params, x):
            return attn.apply(params, x, mask=ja.causal(), engine="blocked")[0].sum()

        x = jax.ShapeDtypeStruct((1, rows, 64), jnp.float32)
        return len(jax.jit(jax.grad(loss, (0, 1))).lower(params, x).as_text().splitlines())

    assert size(16384) <= 1.05 * size(4096)


@pytest.mark.parametrize("engine", ["dense", "blocked", "reference"])
def test_a_mask_of_heads_hides_from_the_mixed_weights_too(engine):
    heads, rows, width = 3, 5, 7
    rng = np.random.default_rng(3)
    query, key, value = rng.normal(size=(3, rows, heads, width))
    matrix, visible = rng.normal(size=(heads, heads)), rng.random((heads, rows, rows)) < 0.6
    post = ja.Coupling(scale=1.0, post=(ja.Mix(matrix),))
    sides = ja.QuerySide(query), ja.KeySide(key, value)
    mask = ja.explicit(visible, axes="h q k")
    got, _ = ja.attend(*sides, post, mask=mask, engine=engine, remask=True)

    weights = np.zeros((heads, rows, rows))
    for h, q in np.ndindex(heads, rows):
        seen = np.flatnonzero(visible[h, q])
        raised = [np.exp(query[q, h] @ key[k, h]) for k in seen]
        weights[h, q, seen] = np.array(raised) / sum(raised)
    want = np.zeros((rows, heads, width))
    for q, o, k in np.ndindex(rows, heads, rows):
        mixed = sum(weights[i, q, k] * matrix[i, o] for i in range(heads))
        want[q, o] += visible[o, q, k] * mixed * value[k, o]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
