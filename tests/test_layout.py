"""The layout oracle: values whose digits are their coordinates survive split and merge.

Random numbers hide a permuted axis behind a plausible shape; 1000 b + 100 s + 10 h + d does not.
Each wrong path below keeps every shape, so only values can tell.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import fill

import jaxattn as ja

BATCH, HEADS = 2, 5
# Rows and head width of each role: rectangular and asymmetric, as in a cross call.
ROLES = {"query": (3, 7), "key": (6, 7), "value": (6, 4)}
D = 3  # head width of the attention below
MODEL = HEADS * D  # square kernels: a transposed one fits


def coordinates(rows, heads, width, order="bshd"):
    """1000 b + 100 s + 10 h + d over the axes named in `order`."""
    size = {"b": BATCH, "s": rows, "h": heads, "d": width}
    place = {"b": 1000, "s": 100, "h": 10, "d": 1}
    grids = np.meshgrid(*(np.arange(size[axis]) * place[axis] for axis in order), indexing="ij")
    return sum(grids)


@pytest.mark.parametrize("role", ROLES)
def test_split_gives_each_head_its_own_channels(role):
    rows, width = ROLES[role]
    packed = coordinates(rows, HEADS, width).reshape(BATCH, rows, HEADS * width)
    heads = ja.project.split_heads(jnp.asarray(packed), HEADS)
    assert heads.shape == (BATCH, rows, HEADS, width)
    for b, s, h, d in np.ndindex(heads.shape):
        assert heads[b, s, h, d] == 1000 * b + 100 * s + 10 * h + d


@pytest.mark.parametrize("role", ROLES)
def test_merge_puts_head_h_at_channels_h_times_d(role):
    rows, width = ROLES[role]
    heads = coordinates(rows, HEADS, width)
    merged = np.asarray(ja.project.merge_heads(jnp.asarray(heads)))
    assert merged.shape == (BATCH, rows, HEADS * width)
    for b, s, h, d in np.ndindex(heads.shape):
        assert merged[b, s, h * width + d] == heads[b, s, h, d]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("batch", [(), (BATCH,), (2, 3)])
def test_merge_undoes_split(role, batch):
    rows, width = ROLES[role]
    packed = jnp.arange(np.prod(batch, dtype=int) * rows * HEADS * width)
    packed = packed.reshape(*batch, rows, HEADS * width)
    again = ja.project.merge_heads(ja.project.split_heads(packed, HEADS))
    np.testing.assert_array_equal(again, packed)


@pytest.mark.parametrize("role", ROLES)
def test_relabelling_bytes_as_head_major_is_not_a_split(role):
    """[b, s, (h d)] read as [b, h, s, d] has the shape of the transposed split, not its values."""
    rows, width = ROLES[role]
    packed = coordinates(rows, HEADS, width).reshape(BATCH, rows, HEADS * width)
    right = np.asarray(ja.project.split_heads(jnp.asarray(packed), HEADS)).transpose(0, 2, 1, 3)
    wrong = packed.reshape(BATCH, HEADS, rows, width)
    assert wrong.shape == right.shape
    np.testing.assert_array_equal(right, coordinates(rows, HEADS, width, "bhsd"))
    assert np.mean(wrong != right) > 0.5


@pytest.mark.parametrize("role", ROLES)
def test_flattening_head_major_heads_is_not_a_merge(role):
    """[b, h, s, d] flattened to [b, s, (h d)] mixes query rows; the shape is right."""
    rows, width = ROLES[role]
    head_major = coordinates(rows, HEADS, width, "bhsd")
    right = np.asarray(ja.project.merge_heads(jnp.asarray(head_major.transpose(0, 2, 1, 3))))
    wrong = head_major.reshape(BATCH, rows, HEADS * width)
    assert wrong.shape == right.shape
    assert np.mean(wrong != right) > 0.5


# The same faults, seen at the output of attention.


def packed_layer():
    """Packed kernels [m, (h d)], [(h d), m], biases, and the layer's own parameters from them."""
    kernel = {name: fill((MODEL, HEADS * D), seed) for name, seed in zip("qkvo", range(4), strict=True)}
    bias = {name: fill((HEADS * D,), seed + 4) for name, seed in zip("qkvo", range(4), strict=True)}
    params = {
        name: {
            "kernel": jnp.asarray(kernel[letter].reshape(MODEL, HEADS, D)),
            "bias": jnp.asarray(bias[letter].reshape(HEADS, D)),
        }
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v"))
    }
    out = {
        "kernel": jnp.asarray(kernel["o"].reshape(HEADS, D, MODEL)),
        "bias": jnp.asarray(bias["o"]),
    }
    return kernel, bias, {**params, "out": out, "heads": {}}


def full(x, kernel, bias):
    """Project the whole row, then split."""
    return ja.project.split_heads(x @ kernel + bias, HEADS)


def head_major(x, kernel, bias):
    """Wrong on purpose: the bytes of [b, t, (h d)] relabelled [b, h, t, d]."""
    batch, rows, _ = x.shape
    return (x @ kernel + bias).reshape(batch, HEADS, rows, D).transpose(0, 2, 1, 3)


def local(x, kernel, bias):
    """Wrong on purpose: split the raw row, then project each part with its own block [d, d]."""
    blocks = jnp.stack([kernel[h * D : h * D + D, h * D : h * D + D] for h in range(HEADS)])
    raw = ja.project.split_heads(x, HEADS)
    return jnp.einsum("bthi,hid->bthd", raw, blocks) + bias.reshape(HEADS, D)


def head_major_merge(heads):
    """Wrong on purpose: [b, h, t, d] flattened without the axis move."""
    batch, rows = heads.shape[:2]
    return heads.transpose(0, 2, 1, 3).reshape(batch, rows, HEADS * D)


def by_hand(x_q, x_kv, kernel, bias, *, split=full, merge=ja.project.merge_heads):
    """The layer on packed maps, through the public split, core and merge."""
    q, k, v = (split(x, kernel[n], bias[n]) for n, x in (("q", x_q), ("k", x_kv), ("v", x_kv)))
    sides = ja.QuerySide(query=q), ja.KeySide(key=k, value=v)
    heads, _ = ja.attend(*sides, ja.Coupling(scale=1 / np.sqrt(D)))
    return merge(heads) @ kernel["o"] + bias["o"]


@pytest.fixture(params=["self", "cross"])
def call(request):
    """(x_q, x_kv, packed kernels, packed biases, right output)."""
    kernel, bias, params = packed_layer()
    x_q = jnp.asarray(fill((BATCH, 4, MODEL), 9))
    x_kv = x_q if request.param == "self" else jnp.asarray(fill((BATCH, 7, MODEL), 10))
    attn = ja.attention(ja.HeadSpec(model=MODEL, heads=HEADS, use_bias=True))
    right = attn.apply(params, x_q, None if x_kv is x_q else x_kv)[0]
    return x_q, x_kv, kernel, bias, right


def far(wrong, right):
    """The same shape and clearly other values."""
    assert wrong.shape == right.shape
    return np.max(np.abs(wrong - right)) > 0.1 * np.max(np.abs(right))


def test_packed_and_per_head_maps_are_one_layer(call):
    x_q, x_kv, kernel, bias, right = call
    np.testing.assert_allclose(by_hand(x_q, x_kv, kernel, bias), right, atol=1e-12)


def test_a_head_major_split_is_another_layer(call):
    x_q, x_kv, kernel, bias, right = call
    assert far(by_hand(x_q, x_kv, kernel, bias, split=head_major), right)


def test_a_head_major_merge_is_another_layer(call):
    x_q, x_kv, kernel, bias, right = call
    assert far(by_hand(x_q, x_kv, kernel, bias, merge=head_major_merge), right)


@pytest.mark.parametrize("name", "qkvo")
def test_a_transposed_square_kernel_is_another_layer(call, name):
    x_q, x_kv, kernel, bias, right = call
    assert kernel[name].shape == kernel[name].T.shape
    assert far(by_hand(x_q, x_kv, {**kernel, name: kernel[name].T}, bias), right)


def test_swapped_query_and_key_is_another_layer(call):
    x_q, x_kv, kernel, bias, right = call
    kernel = {**kernel, "q": kernel["k"], "k": kernel["q"]}
    bias = {**bias, "q": bias["k"], "k": bias["q"]}
    assert far(by_hand(x_q, x_kv, kernel, bias), right)


def test_splitting_the_raw_row_is_another_layer(call):
    """It is a layer of block-diagonal maps: equal when the maps are such, and only then."""
    x_q, x_kv, kernel, bias, right = call
    assert far(by_hand(x_q, x_kv, kernel, bias, split=local), right)
    blocks = np.kron(np.eye(HEADS), np.ones((D, D)))
    diagonal = {**kernel, **{name: kernel[name] * blocks for name in "qkv"}}
    got = by_hand(x_q, x_kv, diagonal, bias, split=local)
    np.testing.assert_allclose(got, by_hand(x_q, x_kv, diagonal, bias), atol=1e-12)


def test_a_jitted_split_and_merge_trace_to_reshapes_alone():
    """Splitting and merging packed rows moves no axis, so it needs no transpose."""
    packed = jnp.zeros((BATCH, 4, HEADS * D))

    def round_trip(packed):
        return ja.project.merge_heads(ja.project.split_heads(packed, HEADS))

    names = {equation.primitive.name for equation in jax.make_jaxpr(round_trip)(packed).jaxpr.eqns}
    assert names == {"reshape"}
