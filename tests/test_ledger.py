"""The ledger reproduces the articles' numbers and the cost formula of every variant's paper."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import jaxpr
import pytest

import jaxattn as ja
import variants
from jaxattn.axes import contract
from jaxattn.count import Uncounted, macs, trace_named

B, Q, K, M, H, D, V = 2, 3, 7, 11, 6, 5, 13


def book(transform, batch=B, q_len=Q, k_len=K, **sizes):
    spec = ja.HeadSpec(**(dict(model=M, heads=H, d_qk=D, d_v=V) | sizes))
    return ja.ledger(ja.attention(spec, transform), batch, q_len, k_len)


def total(group):
    return sum(group.values())


def test_article_asymmetric_fixture():
    got = book(ja.identity, 2, 3, 4, model=6, heads=2, d_qk=3, d_v=2, use_bias=True)
    assert got.parameters == {"query": 42, "key": 42, "value": 28, "out": 30, "heads": 0}
    assert total(got.parameters) == 142
    assert got.parameter_bytes == 568
    assert got.macs == {
        "query projection": 216,
        "key projection": 288,
        "value projection": 192,
        "scores": 144,
        "values": 96,
        "output projection": 144,
    }
    assert total(got.macs) == 1080


def test_article_value_width_48():
    assert total(book(ja.identity, model=512, heads=8, d_qk=64, d_v=48).parameters) == 917_504
    assert total(book(ja.identity, model=512, heads=8, d_qk=64, d_v=64).parameters) == 1_048_576


def test_article_macs_at_128_rows():
    got = book(ja.identity, 1, 128, 128, model=512, heads=8, d_qk=64, d_v=64)
    projections = [n for name, n in got.macs.items() if "projection" in name]
    assert sum(projections) == 134_217_728
    assert got.macs["scores"] + got.macs["values"] == 16_777_216


def test_half_precision_parameters_take_half_the_bytes():
    attn = ja.attention(ja.HeadSpec(model=M, heads=H, d_qk=D, d_v=V))
    whole, half = ja.ledger(attn, B, Q, K), ja.ledger(attn, B, Q, K, dtype=jnp.bfloat16)
    assert half.parameter_bytes * 2 == whole.parameter_bytes


def test_fewer_key_heads_shrink_projections_and_cache_but_no_products():
    full, grouped = book(ja.identity), book(ja.identity, kv_heads=2)
    assert grouped.macs["key projection"] * 3 == full.macs["key projection"]
    assert grouped.cache_elements * 3 == full.cache_elements == H * (D + V)
    assert grouped.macs["scores"] == full.macs["scores"]


def test_talking_heads_formula():
    hk, hs, hv = 4, 3, 5
    got = book(variants.talking_heads(hk, hs, hv))
    assert got.parameters["heads"] == hk * hs + hs * hv
    qk = hk * D * (Q * M + K * M + Q * K)
    values = hv * V * (Q * M + K * M + Q * K)
    assert total(got.macs) == B * (qk + values + Q * K * hs * (hk + hv))
    assert got.score_elements == B * hk * Q * K


def test_talking_heads_dynamic_formula():
    sources = ("pre_query", "pre_key", "post_query", "post_key")
    static, dynamic = book(variants.talking_heads()), book(variants.talking_heads(dynamic=sources))
    assert dynamic.parameters["heads"] - static.parameters["heads"] == 4 * M * H * H
    assert dynamic.macs["dynamic mixes"] == 4 * B * Q * K * H * H
    assert dynamic.macs["dynamic generators"] == 2 * B * (Q + K) * M * H * H


def test_dcmha_formula():
    for rank, groups in ((2, 1), (3, 2)):
        got = book(variants.dcmha(rank=rank, groups=groups))
        wide = 2 * rank * H
        assert got.parameters["heads"] == 4 * (M * wide + wide**2 // groups + M * H)
        assert got.macs["dynamic mixes"] == B * Q * K * 8 * rank * H
        assert got.products["diagonal factors"] == B * Q * K * 4 * H
        assert got.cache_elements == H * (D + V) + 2 * (wide + H)


def test_dcmha_static_map_is_counted_as_static():
    got = book(variants.dcmha(groups=2, static=True))
    assert got.macs["static mixes"] == B * Q * K * 2 * H * H // 2


def test_moh_formula():
    got = book(variants.moh(shared=2, top_k=3))
    assert got.parameters["heads"] == M * ((H - 2) + 2 + 2)
    assert got.macs["router"] == B * Q * M * (H + 2)
    assert got.heads == {"executed": H, "active": 5}
    assert got.macs["scores"] == book(ja.identity).macs["scores"]  # gates save nothing here
    assert got.products["gates"] == B * Q * H * V


def test_collab_formula():
    width = 17
    got = book(variants.collab(width=width))
    assert got.parameters["query"] + got.parameters["key"] == 2 * M * width
    assert got.parameters["heads"] == H * width + H * M
    assert got.macs["query projection"] == B * Q * M * width
    assert got.macs["query mixing"] == B * H * Q * width
    assert got.macs["key bias"] == B * K * M * H
    assert got.macs["scores"] == B * H * Q * K * width
    assert got.cache_elements == width + H * V + H


def test_mohsa_formula():
    r = 3
    plain, wide = book(ja.identity), book(variants.mohsa(overlap=r))
    assert wide.parameters["out"] - plain.parameters["out"] == 2 * r * H * M
    assert wide.macs["scores"] - plain.macs["scores"] == B * 2 * r * H * Q * K
    assert wide.macs["values"] - plain.macs["values"] == B * 2 * r * H * Q * K
    assert wide.cache_elements == plain.cache_elements  # stored narrow


def test_parameters_are_the_leaves_sizes_for_every_variant():
    for name, factory in variants.VARIANTS.items():
        attn = ja.attention(ja.HeadSpec(model=24, heads=6, use_bias=True), factory())
        params = attn.init(jax.random.key(0))
        got = ja.ledger(attn, B, Q, K)
        assert total(got.parameters) == sum(x.size for x in jax.tree.leaves(params)), name


def test_prints_as_a_table_and_is_plain_data():
    got = book(variants.dcmha())
    text = str(got)
    for word in ("parameters", "MACs", "dynamic mixes", "cache elements a token"):
        assert word in text
    data = json.loads(json.dumps(got.as_dict()))
    assert data["total_macs"] == total(got.macs)
    assert f"{data['total_macs']:,}" in text


def shape(*axes):
    return jax.ShapeDtypeStruct(axes, jnp.float32)


def traced(attn, call, *arguments, **options):
    """The dot products of one call's whole program, counted from it alone."""
    params = jax.eval_shape(attn.init, jax.random.key(0))
    run = functools.partial(getattr(attn, call), **options)
    return jaxpr.dot_macs(jaxpr.trace(run, params, *arguments))


WHOLE = {"rotary": ja.Rotary(pairs="adjacent"), "use_bias": True}
DECODED = {
    "mha": (variants.mha(), dict(kv_heads=2, qk_norm="rms")),
    "mohsa": (variants.mohsa(overlap=2), {}),
    "talking_heads": (variants.talking_heads(softmax_heads=5, dynamic=("pre_key", "post_query")), {}),
    "dcmha": (variants.dcmha(static=True), {}),
    "moh": (variants.moh(shared=1, top_k=2), {}),
    "collab": (variants.collab(width=12), {}),
}


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_law_11_a_step_of_decoding_costs_what_its_program_multiplies(name):
    """One row and a chunk against a cache, and a source that is read again: nothing is projected twice."""
    transform, sizes = DECODED[name]
    attn = ja.attention(ja.HeadSpec(model=11, heads=4, d_qk=6, d_v=6, **WHOLE, **sizes), transform)
    cache = jax.eval_shape(lambda: attn.empty_cache(B, 9))
    for rows in (1, 3):
        got = ja.ledger(attn, B, q_len=rows, k_len=9, cached=9 - rows)
        assert total(got.macs) == traced(attn, "decode", cache, shape(B, rows, 11), engine="dense") > 0
        whole = ja.ledger(attn, B, rows, 9)
        for term in ("key projection", "value projection"):
            assert got.macs[term] * 9 == whole.macs[term] * rows
        assert got.macs["scores"] == whole.macs["scores"]
    again = ja.ledger(attn, B, q_len=5, k_len=9, cached=9)
    assert total(again.macs) == traced(attn, "attend", shape(B, 5, 11), cache.side, engine="dense")
    assert "key projection" not in again.macs and "k 9 (9 cached)" in str(again)


def test_law_11_a_routed_step_of_decoding():
    attn = ja.attention(ja.HeadSpec(model=11, heads=4, d_qk=6, d_v=6), variants.moh(shared=1, top_k=2))
    cache = jax.eval_shape(lambda: attn.empty_cache(B, 9))
    got = ja.ledger(attn, B, q_len=3, k_len=9, cached=6, routed=True)
    assert total(got.macs) == traced(attn, "decode", cache, shape(B, 3, 11), engine="routed")


def test_of_cached_rows_only_what_reading_makes_is_an_activation():
    for transform in (variants.mha(), variants.mohsa(overlap=2)):
        whole, step = (book(transform, 1, q, 8, d_qk=6, d_v=6) for q in (8, 1))
        spec = ja.HeadSpec(model=M, heads=H, d_qk=6, d_v=6)
        got = ja.ledger(ja.attention(spec, transform), 1, 1, 8, cached=7)
        for field in ("key side: key", "key side: value"):
            made_whole = transform != variants.mha()  # MOHSA widens every row each time it is read
            assert got.activations[field] * (1 if made_whole else 8) == whole.activations[field]
        assert got.activations["logits"] == step.activations["logits"]
        assert got.cache_elements == whole.cache_elements


@pytest.mark.parametrize("rows", [dict(cached=8), dict(cached=-1), dict(k_len=-1)])
def test_rows_that_cannot_be(rows):
    (name, value), attn = next(iter(rows.items())), ja.attention(ja.HeadSpec(model=12, heads=3))
    with pytest.raises(ValueError, match=f"ledger: {name} = {value}"):
        ja.ledger(attn, **{**dict(batch=B, q_len=Q, k_len=K), **rows})


def test_an_array_at_two_paths_is_counted_once():
    attn = ja.attention(ja.HeadSpec(model=12, heads=3), variants.talking_heads(), allow=("lora",))
    params = attn.init(jax.random.key(0), jnp.bfloat16)
    size = sum(x.size for x in jax.tree.leaves(params))
    apart = ja.ledger(attn, B, Q, K, params={**params, "lora": {"a": jnp.ones((12, 2), jnp.float32)}})
    assert total(apart.parameters) == size + 24 and apart.parameters["lora"] == 24
    assert apart.parameter_bytes == 2 * size + 4 * 24
    tied = ja.ledger(attn, B, Q, K, params={**params, "key": params["query"]})
    assert total(tied.parameters) == size - 12 * 12 and tied.parameters["key"] == 0
    assert tied.macs == ja.ledger(attn, B, Q, K).macs  # a product with a tied matrix is a product
    with pytest.raises(ValueError, match="params: 1 difference"):
        ja.ledger(attn, B, Q, K, params={**params, "query": {}})


class adding(ja.HeadTransform):
    """Products in every hook, of which none changes a shape or a type."""

    jitted: bool = False

    def init(self, rng, at, dtype):
        sizes, m = at.sizes, at.sizes.spec.in_q
        return {
            "query": jnp.ones((m, sizes.query_heads, sizes.qk_width), dtype),
            "gate": jnp.ones((m, sizes.output_heads), dtype),
            "turn": jnp.ones((sizes.output_width, sizes.output_width), dtype),
        }

    def query_side(self, params, x_q, side, at):
        def more(params, x, query):
            return query + contract(x, params["query"], "... q m, m h d -> ... q h d")

        side = side._replace(query=(jax.jit(more) if self.jitted else more)(params, x_q, side.query))
        return at.gate(side, contract(x_q, params["gate"], "... q m, m h -> ... q h")[..., None])

    def key_side(self, params, x_k, side, at):
        more = contract(x_k, params["query"], "... k m, m h d -> ... k h d")
        return side._replace(key=side.key + more, value=side.value + more)

    def expand(self, side, at):
        return side._replace(value=side.value @ jnp.eye(side.value.shape[-1], dtype=side.value.dtype))

    def coupling(self, params, coupling, at):
        rule = ja.PairBias(params["turn"] @ params["turn"], by_distance)
        return dataclasses.replace(coupling, pair_bias=rule)

    def finish(self, params, heads, side, at):
        return heads @ params["turn"]

    def aux(self, params, x_q, side, at):
        return x_q.sum((0, 1)) @ params["gate"]

    def losses(self, sums, at):
        return {"square": ja.Loss(sums @ sums, 0.1)}


def by_distance(params, q, k):
    apart = (q[..., :, None] - k[..., None, :]).astype(params.dtype)
    return jnp.moveaxis(apart[..., None] * params.sum() @ jnp.ones((1, 4), params.dtype), -1, -3)


@pytest.mark.parametrize("jitted", [False, True])
def test_what_hooks_multiply_is_counted_though_no_shape_changes(jitted):
    attn = ja.attention(ja.HeadSpec(model=12, heads=4), adding(jitted), variants.moh(), adding(jitted))
    got = ja.ledger(attn, 2, 5, 7)
    assert total(got.macs) == traced(attn, "apply", shape(2, 5, 12), shape(2, 7, 12), engine="dense")
    assert {name: got.macs[name] for name in got.macs if "projection" not in name} == {
        "query mixing": 2 * 2 * 5 * 12 * 12,
        "gate generators": 2 * 2 * 5 * 12 * 4,
        "router": 2 * 5 * 12 * (3 + 2),
        "adding: key_side": 2 * 7 * 12 * 12,  # it changes key and value
        "adding_1: key_side": 2 * 7 * 12 * 12,
        "value mixing": 2 * 2 * 7 * 12 * 3,
        "adding: coupling": 27,
        "adding_1: coupling": 27,
        "pair bias": 5 * 7 * 4,
        "adding: finish": 2 * 5 * 12 * 3,
        "adding_1: finish": 2 * 5 * 12 * 3,
        "adding: aux": 12 * 4,
        "adding_1: aux": 12 * 4,
        "adding: losses": 4,
        "adding_1: losses": 4,
        "scores": 2 * 5 * 7 * 12,
        "values": 2 * 5 * 7 * 12,
    }
    cache = jax.eval_shape(lambda: attn.empty_cache(2, 7))
    step = ja.ledger(attn, 2, 5, 7, cached=2)
    assert total(step.macs) == traced(attn, "decode", cache, shape(2, 5, 12), engine="dense")


class searching(ja.HeadTransform):
    def finish(self, params, heads, side, at):
        turn = jnp.eye(heads.shape[-1], dtype=heads.dtype)
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ turn, heads)


def test_what_cannot_be_counted_is_said_by_name():
    with pytest.raises(
        ValueError, match=r"ledger: the products of searching.finish cannot be counted: a while loop"
    ):
        book(searching())
    ragged = lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([2, 1]))
    with pytest.raises(Uncounted, match="ragged_dot"):
        macs(ragged, shape(3, 4), shape(2, 4, 5))
    kernel = lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=2)
    assert macs(kernel, shape(1, 4, 9), shape(6, 2, 3)) == 6 * 7 * 2 * 3


def test_results_are_changed_where_they_are_another_value_whatever_their_shape():
    def step(a, b, w):
        y = a @ w
        return {
            "same": a,
            "swapped": b,
            "moved": a + 1,
            "both": (y, y @ w),
            "none": None,
            "last": y,
            "one": 1.0,
        }

    found = trace_named(step, shape(2, 3), shape(2, 3), shape(3, 3))
    assert found.changed == {"moved", "both", "last", "one"}
    assert found.macs == {frozenset({"both", "last"}): 18, frozenset({"both"}): 18}
