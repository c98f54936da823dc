"""The ledger reproduces the articles' numbers and the cost formula of every variant's paper."""

import json

import jax
import jax.numpy as jnp

import jaxattn as ja
import variants

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
