"""The public cases: inputs and expected values from cases.json, and the layers they describe."""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

import jaxattn as ja
import variants

CASES = {
    case["id"]: case for case in json.loads(pathlib.Path(__file__).with_name("cases.json").read_text("utf-8"))
}

ENGINES = ("reference", "dense", "blocked")

# The arguments with which a case that holds "for every variant" builds each registered variant.
ARGUMENTS = {
    "mha": {},
    "mohsa": {"overlap": 1},
    "talking_heads": {},
    "dcmha": {"rank": 1},
    "moh": {"shared": 1, "top_k": 1},
    "collab": {"width": 5},
}


def fill(shape, seed):
    """2 (((37+2s) t t + (101+7s) t + 17s) mod 997)/997 - 1 of the row-major flat index t = 1..n."""
    t = np.arange(1, np.prod(shape, dtype=int) + 1)
    whole = ((37 + 2 * seed) * t * t + (101 + 7 * seed) * t + 17 * seed) % 997
    return (2 * whole / 997 - 1).reshape(shape)


def expected(case_id, name):
    """One of a case's expected values, as float64."""
    return np.asarray(CASES[case_id]["expect"]["values"][name], float)


def filled(text):
    """The array that a case writes as fill((1,3,4),10)."""
    match = re.search(r"fill\(\(([\d,]+)\),(\d+)\)", text)
    assert match, text
    return fill(tuple(int(n) for n in match[1].split(",") if n), int(match[2]))


def layer(case):
    """(spec, parameters) of a case's "params" line: D=4,H=2,...; Wq=fill((D,H,dk),1), ..."""
    sizes_text, weights_text = case["params"].split(";")
    size = {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", sizes_text)}
    leaf = {}
    for name, axes, seed in re.findall(r"(\w+)=fill\(\(([\w,]+)\),(\d+)\)", weights_text):
        leaf[name] = fill(tuple(size[axis] for axis in axes.split(",") if axis), int(seed))
    spec = ja.HeadSpec(
        model=size["D"], heads=size["H"], kv_heads=size["Hkv"], d_qk=size["dk"], d_v=size["dv"],
        out=size["Do"], use_bias=True,
    )  # fmt: skip
    params = {
        name: {"kernel": jnp.asarray(leaf["W" + letter]), "bias": jnp.asarray(leaf["b" + letter])}
        for name, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))
    }
    return spec, {**params, "heads": {}}


def in_chunks(decode, params, cache, x, split):
    """The outputs of all chunks of x, one after another, and the cache after them."""
    outs, start = [], 0
    for n in split:
        y, _, cache = decode(params, cache, x[:, start : start + n])
        outs.append(y)
        start += n
    return jnp.concatenate(outs, 1), cache


def redraw(tree, seed):
    """Every leaf drawn anew at O(1), so that no near-identity start hides a fault."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape)), tree)


def variant(name, spec, seed=0):
    """(Attention, parameters redrawn at O(1)) of a registered variant."""
    attn = ja.attention(spec, variants.VARIANTS[name](**ARGUMENTS[name]))
    return attn, redraw(attn.init(jax.random.key(seed)), seed)


@functools.cache
def compiled(attn):
    """`attn.apply` as one program in place of many small ones, shared by all who ask."""
    return jax.jit(attn.apply, static_argnames=("engine", "capture", "remask"))


def apply(attn, params, x_q, x_kv=None, mask=None, **options):
    """The output of `attn.apply`, compiled."""
    return compiled(attn)(params, x_q, x_kv, mask, **options)[0]


ATTEND = jax.jit(ja.attend, static_argnames=("engine", "capture"))


def attend(query, key, value, mask=None, *, scale=1.0, coupling=None, **options):
    """Heads [..., q, h, v] of plain attention on projected rows [..., t, h, d]."""
    coupling = ja.Coupling(scale=scale) if coupling is None else coupling
    sides = ja.QuerySide(query=jnp.asarray(query)), ja.KeySide(jnp.asarray(key), jnp.asarray(value))
    return ATTEND(*sides, coupling, mask, **options)[0]


def uniform(value, q_len, mask=None, **options):
    """Attention with all scores equal: each row is the mean of the values it may see."""
    value = jnp.asarray(value)
    batch, k_len, heads = value.shape[:3]
    query, key = jnp.zeros((batch, q_len, heads, 1)), jnp.zeros((batch, k_len, heads, 1))
    return attend(query.astype(value.dtype), key.astype(value.dtype), value, mask, **options)


def units(length, dtype=jnp.float32):
    """Value rows [1, k, 1, k]: row j is the unit vector e_j, so that heads show the weights."""
    return jnp.eye(length, dtype=dtype)[None, :, None, :]


def tree_close(got, want, tolerance):
    """The same tree, each leaf within `tolerance` of the largest value of its `want` (or of 1)."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        largest = max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest, err_msg=jax.tree_util.keystr(path))
