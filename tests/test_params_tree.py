"""Laws 15 and 16: a tree that is not its attention's raises, with every path; every leaf has a gradient."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from flax import nnx
from flax.core import freeze
from flax.errors import ScopeParamShapeError

import jaxattn as ja
import variants
from jaxattn.attention import Attention
from jaxattn.linen import MultiHeadDotProductAttention
from jaxattn.params import declared_axes, expected

each_case = pytest.mark.parametrize("case", table.CASES, ids=lambda case: case.name)


def shapes_of(attn):
    return jax.eval_shape(attn.init, jax.random.key(0))


@functools.cache
def every_tree():
    return {case.name: (table.attention(case), shapes_of(table.attention(case))) for case in table.CASES}


@each_case
def test_law_15_each_tree_against_every_other_spec(case):
    attn, tree = every_tree()[case.name]
    attn.check_params(tree)
    refused = 0
    for name, (other, _) in every_tree().items():
        try:
            other.check_params(tree)
        except ValueError as error:
            refused += 1
            assert re.match(r"params: \d+ differences? from the tree of attention\(", str(error)), name
            assert "Fix: " in str(error) and len(str(error).splitlines()) >= 3
        else:
            assert expected(other).shapes == expected(attn).shapes, name
            mine, theirs = declared_axes(attn), declared_axes(other)
            assert all(mine[path] == theirs[path] for path in expected(attn).shapes), name
    assert refused >= len(table.CASES) // 2


# One tree after another that people have


SPEC = dict(model=8, heads=4)


def made(*transforms, allow=(), **sizes):
    attn = ja.attention(ja.HeadSpec(**SPEC | sizes), *transforms, allow=allow)
    return attn, attn.init(jax.random.key(0), jnp.float32)


PLAIN, TREE = made()
GQA, _ = made(kv_heads=2)
BIASED, WITH_BIASES = made(use_bias=True)
NORMED, WITH_NORMS = made(qk_norm="rms")
TALKING, WITH_MIXES = made(variants.talking_heads())
ROUTED, _ = made(variants.moh(shared=2, top_k=1))
ALLOWING, _ = made(allow=("lora", "query/scale"))


def tree(**groups):
    return TREE | groups


def without(path, of=None):
    group, _, leaf = path.partition("/")
    of = TREE if of is None else of
    if not leaf:
        return {name: leaves for name, leaves in of.items() if name != group}
    return of | {group: {name: x for name, x in of[group].items() if name != leaf}}


zeros = jnp.zeros
HF = {f"{name}_proj": {"weight": zeros((8, 8))} for name in "qkvo"}
TORCH = {"in_proj_weight": zeros((24, 8)), "in_proj_bias": zeros(24), "out_proj": {"weight": zeros((8, 8))}}
BAD = {
    "a missing group": (
        PLAIN,
        without("value"),
        ["1 difference", r"value/kernel: missing, expected shape \(8, 4, 2\)"],
    ),
    "a missing leaf": (PLAIN, tree(out={}), [r'out/kernel: missing, expected shape .* \(axes "hv v m"\)']),
    "a misspelt group": (
        PLAIN,
        without("query") | {"querry": TREE["query"]},
        [
            "2 differences",
            "query/kernel: missing",
            "querry/kernel: unknown, .*did you mean query/kernel",
        ],
    ),
    "a misspelt leaf": (
        PLAIN,
        tree(key={"kernle": TREE["key"]["kernel"]}),
        [
            "key/kernel: missing",
            "key/kernle: unknown, got shape .*did you mean key/kernel",
        ],
    ),
    "an extra group": (PLAIN, tree(lora={"a": zeros((8, 2))}), [r"lora/a: unknown, got shape \(8, 2\)"]),
    "an extra leaf": (PLAIN, tree(key=TREE["key"] | {"scale": zeros(2)}), ["key/scale: unknown"]),
    "trees of 3 heads": (
        PLAIN,
        made(model=6, heads=3)[1],
        [
            "query/kernel: axis m is 6, expected 8; axis hl is 3, expected 4",
            "out/kernel: axis hv is 3, expected 4",
        ],
    ),
    "trees of 2 wide heads": (
        PLAIN,
        made(heads=2)[1],
        [
            "4 differences",
            "query/kernel: axis hl is 2, expected 4; axis d is 4, expected 2",
            "Likely: the tree has 2 heads of width 4 for states of width 8",
        ],
    ),
    "as many key heads as heads": (
        GQA,
        TREE,
        [
            "2 differences",
            "key/kernel: axis hK is 4, expected 2",
            "value/kernel: axis hV is 4, expected 2",
            r"Likely: the tree has 4 key heads, as HeadSpec\(kv_heads=4\) makes",
        ],
    ),
    "no biases": (
        BIASED,
        TREE,
        ["4 differences", "out/bias: missing", r"Likely: .*made without biases.*use_bias"],
    ),
    "biases": (
        PLAIN,
        WITH_BIASES,
        ["4 differences", "query/bias: unknown", r"Likely: .*made with biases.*use_bias"],
    ),
    "no norms": (NORMED, TREE, ["query_ln/scale: missing", "Likely: .*made without head norms.*qk_norm"]),
    "norms": (PLAIN, WITH_NORMS, ["key_ln/scale: unknown", "Likely: .*made with head norms.*qk_norm"]),
    "a variant's leaves": (
        PLAIN,
        WITH_MIXES,
        [
            "heads/talking_heads/pre/kernel: unknown",
            r"Likely: .*another transform \(talking_heads\)",
        ],
    ),
    "another variant's leaves": (
        ROUTED,
        WITH_MIXES,
        [
            "heads/moh/shared: missing",
            "heads/talking_heads/post/kernel: unknown",
            "another transform",
        ],
    ),
    "plain attention's for a variant": (
        TALKING,
        TREE,
        [
            'heads/talking_heads/pre/kernel: missing.*"h[ls]* h[ls]*"',
            "Likely: the tree holds no leaves of talking_heads: parameters of plain multi-head attention",
        ],
    ),
    "another option's leaves": (
        made(variants.talking_heads(softmax_heads=6))[0],
        WITH_MIXES,
        [
            r"heads/talking_heads/pre/kernel: axis \w+ is 4, expected 6",
        ],
    ),
    "a flat kernel": (
        PLAIN,
        tree(query={"kernel": zeros((8, 8))}),
        [
            r"query/kernel: has 2 axes, shape \(8, 8\), expected 3",
            "Likely: a kernel is flat.*rearrange",
        ],
    ),
    "a transposed kernel": (
        PLAIN,
        tree(out={"kernel": zeros((8, 4, 2))}),
        ["out/kernel: axis hv is 8, expected 4"],
    ),
    "Hugging Face's names": (PLAIN, HF, ["q_proj/weight: unknown", "Likely: .*another library.*q_proj"]),
    "names of torch": (
        PLAIN,
        TORCH,
        ["in_proj_weight: unknown", "Likely: .*another library.*in_proj_weight"],
    ),
    "variables of Flax": (
        PLAIN,
        {"params": TREE},
        ["params/query/kernel: unknown", r"variables\['params'\]"],
    ),
    "None for a leaf": (PLAIN, tree(key={"kernel": None}), ["key/kernel: missing"]),
    "None for a leaf of a transform": (
        TALKING,
        WITH_MIXES | {"heads": {"talking_heads": WITH_MIXES["heads"]["talking_heads"] | {"more": None}}},
        ["heads/talking_heads/more: unknown, got a NoneType"],
    ),
    "integers": (
        PLAIN,
        tree(key={"kernel": zeros((8, 4, 2), int)}),
        ["key/kernel: dtype is int64, expected a floating"],
    ),
    "booleans": (PLAIN, tree(key={"kernel": zeros((8, 4, 2), bool)}), ["key/kernel: dtype is bool"]),
    "no array": (PLAIN, tree(key={"kernel": "w"}), ["key/kernel: got a str, expected an array"]),
    "a list for a group": (
        PLAIN,
        tree(key=[TREE["key"]["kernel"]]),
        ["key/kernel: missing", "key: unknown, got a list"],
    ),
    "an array for a group": (PLAIN, tree(key=TREE["key"]["kernel"]), ["key/kernel: missing", "key: unknown"]),
    "no group of transforms": (PLAIN, without("heads"), ["heads: got the groups query, key, value, out"]),
    "None for the group of transforms": (
        PLAIN,
        tree(heads=None),
        ["heads: got the groups .*expected `heads`"],
    ),
    "an empty tree": (PLAIN, {}, ["query/kernel: missing", "out/kernel: missing"]),
    "what is not allowed": (ALLOWING, tree(lora2={"a": zeros(1)}), ["1 difference", "lora2/a: unknown"]),
    "an allowed name elsewhere": (
        ALLOWING,
        tree(key=TREE["key"] | {"scale": zeros(1)}),
        ["key/scale: unknown"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tree_raises_with_every_path_and_the_likely_cause(name):
    attn, params, words = BAD[name]
    with pytest.raises(ValueError) as error:
        attn.apply(params, jnp.ones((2, 3, 8), jnp.float32))
    text = str(error.value)
    assert "Fix: " in text and repr(attn) in text
    for word in words:
        assert re.search(word, text), f"{word!r} is not in:\n{text}"


@pytest.mark.parametrize(
    "params", [None, [TREE], (TREE,), 3, nnx.State({"query": {"kernel": zeros(2)}})], ids=str
)
def test_what_is_no_mapping_or_has_no_leaves_of_ours_is_refused(params):
    words = "params: (.|\n)*(expected nested dicts|query/kernel: has 1 axes)(.|\n)*Fix: "
    with pytest.raises((TypeError, ValueError), match=words):
        PLAIN.apply(params, jnp.ones((3, 8), jnp.float32))


def test_all_kinds_of_mappings_and_arrays_are_taken():
    x = jnp.ones((2, 3, 8), jnp.float32)
    want, _ = PLAIN.apply(TREE, x)
    none = {"bias": None}
    nothing = tree(key=TREE["key"] | none, out=TREE["out"] | none, query_ln={"scale": None})
    for same in (freeze(TREE), jax.tree.map(np.asarray, TREE), nothing):
        assert np.allclose(PLAIN.apply(same, x)[0], want, atol=1e-6)
    module = nnx.MultiHeadAttention(
        num_heads=4, in_features=8, use_bias=False, decode=False, rngs=nnx.Rngs(0)
    )
    state = nnx.to_pure_dict(nnx.state(module, nnx.Param)) | {"heads": {}}
    assert PLAIN.apply(state, x)[0].shape == x.shape


def test_leaves_of_ones_own_are_allowed_by_name():
    x, extra = jnp.ones((2, 3, 8), jnp.float32), {"lora": {"a": zeros(3), "b": {"c": zeros(2)}}}
    own = tree(**extra, query=TREE["query"] | {"scale": zeros(1)})
    assert np.array_equal(ALLOWING.apply(own, x)[0], PLAIN.apply(TREE, x)[0])
    PLAIN.check_params(tree(**extra), allow=("lora",))
    with pytest.raises(ValueError, match="lora/b/c: unknown"):
        PLAIN.check_params(tree(**extra), allow=("lora/a",))
    with pytest.raises(ValueError, match="query/kernel: missing"):
        ALLOWING.check_params(without("query", own))


# Every entry


NAMED = ja.Identity(
    request="r", source_release="s", memory_id="m", checkpoint="c", layer=0, projection_version=1,
    adapter="none", position_policy="absolute", shard="0 of 1",
)  # fmt: skip


def _memory(params):
    memory = ja.CrossMemory(PLAIN)
    memory.bind(jnp.ones((2, 3, 8)), NAMED)
    memory.project(params, projection_version=1)


X = jnp.ones((2, 3, 8), jnp.float32)
ENTRIES = {
    "apply": lambda p: PLAIN.apply(p, X),
    "query_side": lambda p: PLAIN.query_side(p, X),
    "key_side": lambda p: PLAIN.key_side(p, X),
    "coupling": lambda p: PLAIN.coupling(p),
    "attend": lambda p: PLAIN.attend(p, X, PLAIN.key_side(TREE, X)),
    "append": lambda p: PLAIN.append(p, PLAIN.empty_cache(2, 4), X),
    "decode": lambda p: PLAIN.decode(p, PLAIN.empty_cache(2, 4), X),
    "jit": lambda p: jax.jit(PLAIN.apply)(p, X),
    "grad": lambda p: jax.grad(lambda p: PLAIN.apply(p, X)[0].sum())(p),
    "expected_identity": lambda p: ja.expected_identity(PLAIN, p, np.ones((2, 3, 8)), NAMED),
    "a cross memory": _memory,
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_asks(entry):
    with pytest.raises(ValueError, match="params: 1 difference .*\n  out/kernel: missing"):
        ENTRIES[entry](without("out"))


def test_modules_of_flax_ask_too():
    layer = ja.MultiHeadAttention(num_heads=4, in_features=8, use_bias=False, rngs=nnx.Rngs(0))
    layer.value.kernel = nnx.Param(zeros((8, 2, 4)))
    with pytest.raises(ValueError, match=r"value/kernel: axis hV is 2, expected 4; axis v is 4, expected 2"):
        layer(X)
    face = MultiHeadDotProductAttention(num_heads=4, use_bias=False)
    variables = face.init(jax.random.key(0), X)
    wrong = {"params": variables["params"] | {"value": {"kernel": zeros((8, 2, 4))}}}
    with pytest.raises((ValueError, ScopeParamShapeError), match="value|kernel"):
        face.apply(wrong, X)


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_the_check_is_free_under_jit(name, monkeypatch):
    """The program is the same to the letter with the check and without it."""
    case = table.TABLE[name][0]
    attn, params = table.attention(case), shapes_of(table.attention(case))
    inputs = table.draw(case)

    def program():
        return re.sub(
            r"0x[0-9a-f]+", "", str(jax.make_jaxpr(lambda p: table.call(case, attn, p, inputs)[0])(params))
        )

    checked = program()
    asked = []
    monkeypatch.setattr(Attention, "check_params", lambda *_: asked.append(0))
    assert program() == checked and asked and "dot_general" in checked


# Law 16


UNSEEN = {"key/bias"}  # the same for every key of a row: softmax does not see it


@pytest.mark.heavy
@each_case
def test_law_16_every_leaf_has_a_gradient_or_is_declared_idle(case):
    attn, inputs = table.attention(case), table.draw(case)

    @table.jit
    @jax.grad
    def slopes(params, weight):
        y, aux = table.call(case, attn, params, inputs, engine="dense")
        return (y * weight).sum() + aux.total()

    rng = np.random.default_rng(12)
    weight = rng.normal(size=(*inputs.x_q.shape[:-1], case.spec["out"]))
    found = [slopes(table.drawn(attn, rng), weight) for _ in range(2)]
    size = {
        "/".join(part.key for part in path): max(np.abs(leaf).max(), np.abs(other).max())
        for (path, leaf), other in zip(
            jax.tree.leaves_with_path(found[0]), jax.tree.leaves(found[1]), strict=True
        )
    }
    still = {path for path, one in size.items() if not one > 1e-12 * max(size.values())}
    idle = {f"heads/{name}/{path}" for name, d in attn.declare().items() for path in d.idle}
    assert idle <= still and still - idle <= UNSEEN, (still, idle)
    assert all(len(why) > 10 for d in attn.declare().values() for why in d.idle.values())
