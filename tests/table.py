"""The table that every law is run over: what is tested of each registered variant, on each engine.

A case is a variant with its options and sizes, and the loop reference that says what it computes.
Axis sizes are distinct (batch 2, q 5, k 7, model 11, source 13, out 17, value width 3), so that a
transposed or misaligned axis cannot fit by chance.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from loops import collab, dcmha, mha, moh, mohsa, talking_heads

import jaxattn as ja
import variants

BATCH, QUERIES, KEYS, MODEL, SOURCE, OUT = 2, 5, 7, 11, 13, 17
STEP = 1e-30  # of the complex step: so small that its square is nothing

ENGINES = ("reference", "dense", "blocked")
KERNELS = ("fused",)  # engines that only some machines can run: test_engines.py
ROUTED = ("routed",)  # engines that leave heads out, of variants that route: test_routed.py

# Whether a variant takes fewer key heads than heads; it refuses them otherwise.
TAKES_GQA = {
    "mha": True,
    "talking_heads": True,
    "dcmha": True,
    "moh": True,
    "collab": False,
    "mohsa": False,
}


class Case(NamedTuple):
    """One row of the table.

    Attributes:
        name: of the test.
        variant: its key in `variants.VARIANTS`.
        transform: makes the HeadTransform.
        spec: keyword arguments of HeadSpec.
        reference: `(params, x_q, x_kv, visible, *, spec, positions_q, positions_k, bias) -> y`.
        cross: keys from a source of another length and width; else self attention.
        bias_heads: heads of an additive logit bias (the softmax heads, or 1), or None.
        head_mask: whether the mask has a head axis.
        moved: whether positions are given rather than counted from 0.
        loss: `(params, x_q) -> ` the weighted auxiliary loss, where the variant has one.
    """

    name: str
    variant: str
    transform: Callable[[], ja.HeadTransform]
    spec: dict[str, Any]
    reference: Callable[..., np.ndarray]
    cross: bool = False
    bias_heads: int | None = None
    head_mask: bool = False
    moved: bool = False
    loss: Callable[[Any, Any], complex] | None = None


class Inputs(NamedTuple):
    """States, mask, bias and positions of one call; `x_kv` None is self attention."""

    x_q: Any
    x_kv: Any
    visible: np.ndarray
    bias: Any
    positions_q: np.ndarray | None
    positions_k: np.ndarray | None


HALF, ADJACENT = ja.Rotary(), ja.Rotary(base=100.0, pairs="adjacent")


LOOPS = {
    "mha": mha,
    "talking_heads": talking_heads,
    "dcmha": dcmha,
    "moh": moh,
    "collab": collab,
    "mohsa": mohsa,
}


def sizes(heads: int, d_qk: int, *, cross: bool = False, **more: Any) -> dict[str, Any]:
    """Keyword arguments of HeadSpec, in the table's sizes."""
    source = {"in_k": SOURCE, "in_v": SOURCE} if cross else {}
    return {"model": MODEL, "heads": heads, "d_qk": d_qk, "d_v": 3, "out": OUT, **source, **more}


def _row(
    variant: str,
    name: str,
    spec: dict[str, Any],
    flags: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """A case of a variant's options; the loops get those that change the function they compute."""
    module = LOOPS[variant]
    # `bias` of talking_heads says whether leaves exist; the loops' `bias` is the logit bias array.
    known = set(inspect.signature(module.reference).parameters) - {"bias"}
    shared = {k: v for k, v in options.items() if k in known}
    return Case(
        name=f"{variant}-{name}",
        variant=variant,
        transform=functools.partial(variants.VARIANTS[variant], **options),
        spec=spec,
        reference=functools.partial(module.reference, **shared),
        cross="in_k" in spec,
        **(flags or {}),
    )


def _mha() -> list[Case]:
    row = functools.partial(_row, "mha")
    pair = sizes(4, 6, cross=True, use_bias=True) | {"in_v": 19}
    grouped = sizes(6, 4, cross=True, kv_heads=2, rotary=ADJACENT, qk_norm="layer")
    part = sizes(4, 6, rotary=ja.Rotary(width=4), scale=0.7)
    return [
        row("self", sizes(4, 6)),
        row("self_rotary_norm", sizes(4, 6, rotary=HALF, qk_norm="rms", use_bias=True)),
        row("cross_pair", pair, {"bias_heads": 4}),
        row("gqa", grouped, {"moved": True}),
        row("mqa_softcap", sizes(4, 6, kv_heads=1, softcap=1.5), {"bias_heads": 1}),
        row("part_rotary", part, {"moved": True}),
        row("head_mask", sizes(4, 6, cross=True), {"head_mask": True}),
    ]


def _talking_heads() -> list[Case]:
    row = functools.partial(_row, "talking_heads")
    counts = {"softmax_heads": 6, "value_heads": 8}
    every = ("pre_query", "pre_key", "post_query", "post_key")
    three = sizes(4, 10, cross=True, use_bias=True)
    return [
        row("self_rotary", sizes(4, 6, rotary=HALF)),
        row("three_counts", three, {"bias_heads": 6}, bias=True, **counts),
        row("pre_only", sizes(4, 6, softcap=1.5), post=False),
        row("post_only", sizes(4, 6, cross=True), pre=False),
        row("dynamic", sizes(4, 6, cross=True), dynamic=every, **counts),
        row("gqa", sizes(6, 4, cross=True, kv_heads=2)),
        row("dynamic_two", sizes(4, 6), dynamic=("pre_key", "post_query"), bias=True),
    ]


def _dcmha() -> list[Case]:
    row = functools.partial(_row, "dcmha")
    grouped = sizes(6, 4, cross=True, use_bias=True)
    normed = sizes(4, 6, rotary=ADJACENT, softcap=1.5)
    return [
        row("self_rotary", sizes(4, 6, rotary=HALF)),
        row("groups_static", grouped, groups=2, static=True, gelu="erf", rank=1),
        row("norm", normed, {"bias_heads": 4, "moved": True}, qk_norm="rms"),
        row("pre_only", sizes(4, 6, cross=True), post=False, rank=3),
        row("post_only", sizes(4, 6), pre=False, static=True),
        row("gqa", sizes(6, 4, cross=True, kv_heads=3)),
    ]


def _moh() -> list[Case]:
    def row(name, spec, shared, top_k, flags=None, balance="paper", weight=0.01, **options):
        flags = dict(flags or {})
        options |= {"shared": shared, "top_k": top_k}
        if top_k:
            router = options.get("router", "learned")
            known = {"spec": spec, "shared": shared, "top_k": top_k, "router": router}
            loss = functools.partial(moh.balance, **known, form=balance)
            flags["loss"] = lambda params, x_q: weight * loss(params, x_q)
        return _row("moh", name, spec, flags, **options, balance=balance, balance_weight=weight)

    released = {"gates": "released"}
    grouped = sizes(6, 4, cross=True, use_bias=True, kv_heads=2)
    norms = sizes(6, 4, cross=True, rotary=ADJACENT, kv_heads=3, use_bias=True)
    return [
        row("self_rotary", sizes(6, 4, rotary=HALF), 2, 3),
        row("released_gqa", grouped, 2, 3, balance="released", weight=0.7, **released),
        row("routed_only", sizes(6, 4), 0, 2, weight=0.3),
        row("released_routed_only", sizes(6, 4), 0, 2, **released),
        row("one_shared", sizes(4, 6, cross=True), 1, 2),
        row("released_one_shared", sizes(4, 6), 1, 2, balance="released", **released),
        row("shared_only", sizes(4, 6), 3, 0),
        row("released_shared_only", sizes(4, 6, cross=True), 4, 0, **released),
        row("query_norm", norms, 1, 2, {"moved": True}, router="query_norm"),
        row("inference", sizes(4, 6), 1, 1, router="query_norm", straight_through=False),
    ]


def _collab() -> list[Case]:
    row = functools.partial(_row, "collab")
    blocks = sizes(4, 6, rotary=ADJACENT, softcap=1.5)
    return [
        row("self", sizes(4, 6, use_bias=True), width=10),
        row("cross_scale", sizes(4, 6, cross=True, scale=0.9), {"bias_heads": 4}, width=19),
        row("rotary_blocks", blocks, {"moved": True}, width=18, content_bias=False),
        row("full_width", sizes(4, 6, rotary=HALF), width=24, content_bias=False),
    ]


def _mohsa() -> list[Case]:
    row = functools.partial(_row, "mohsa")
    beyond = sizes(4, 6, cross=True, rotary=ADJACENT, use_bias=True, scale=0.2)
    whole = sizes(4, 6, rotary=HALF, softcap=1.5) | {"d_v": 8}
    return [
        row("self_rotary", sizes(4, 6, rotary=ADJACENT), overlap=2),
        row("none", sizes(4, 6, cross=True, use_bias=True), overlap=0),
        row("narrow", sizes(4, 6), overlap=3),
        row("whole", whole, {"bias_heads": 1}, overlap=6),
        row("beyond", beyond, {"moved": True}, overlap=8, beyond_neighbours=True),
    ]


TABLE: dict[str, list[Case]] = {
    "mha": _mha(),
    "talking_heads": _talking_heads(),
    "dcmha": _dcmha(),
    "moh": _moh(),
    "collab": _collab(),
    "mohsa": _mohsa(),
}
CASES = [case for cases in TABLE.values() for case in cases]
BY_NAME = {case.name: case for case in CASES}


def mha_case(spec: dict[str, Any], *, moved: bool = False) -> Case:
    """Plain multi-head attention of these sizes, with its loops."""
    return Case("mha", "mha", variants.mha, spec, mha.reference, "in_k" in spec, moved=moved)


def attention(case: Case) -> ja.Attention:
    """The case's attention."""
    return ja.attention(ja.HeadSpec(**case.spec), case.transform())


def draw(case: Case, seed: int = 0) -> Inputs:
    """States of order 1, a causal or random mask with one dead query row, a bias where asked."""
    rng = np.random.default_rng(seed)
    q_len, k_len = (QUERIES, KEYS) if case.cross else (KEYS, KEYS)
    x_q = rng.normal(size=(BATCH, q_len, MODEL))
    x_kv = None
    if case.cross:
        x_kv = rng.normal(size=(BATCH, k_len, case.spec["in_k"]))
        if case.spec["in_v"] != case.spec["in_k"]:
            x_kv = (x_kv, rng.normal(size=(BATCH, k_len, case.spec["in_v"])))
    shape = (BATCH, case.spec["heads"], q_len, k_len) if case.head_mask else (BATCH, q_len, k_len)
    visible = rng.random(shape) < 0.7
    visible[..., 1, :] = False
    positions_q = positions_k = None
    if case.moved:
        positions_q = rng.integers(0, 40, size=(BATCH, q_len))
        positions_k = rng.integers(0, 40, size=(BATCH, k_len)) if case.cross else positions_q
    if not case.cross:
        at = np.broadcast_to(np.arange(q_len), (BATCH, q_len)) if positions_q is None else positions_q
        visible &= at[:, None, :] <= at[:, :, None]
    bias = None
    if case.bias_heads is not None:
        bias = rng.normal(size=(BATCH, case.bias_heads, q_len, k_len))
    return Inputs(x_q, x_kv, visible, bias, positions_q, positions_k)


def mask_of(case: Case, inputs: Inputs) -> ja.masks.Mask:
    """The same visibility as a mask; self attention names its causal part, for blocks to skip."""
    mask = ja.explicit(inputs.visible, axes="b h q k" if case.head_mask else "b q k")
    return mask if case.cross else ja.causal() & mask


def call(case: Case, attn: ja.Attention, params: Any, inputs: Inputs, **named: Any):
    """`attn.apply` on the case's inputs."""
    mask = mask_of(case, inputs)
    inputs = jax.tree.map(jnp.asarray, inputs)
    positions = inputs.positions_q
    if case.cross and positions is not None:
        positions = (inputs.positions_q, inputs.positions_k)
    return attn.apply(
        params,
        inputs.x_q,
        inputs.x_kv,
        mask,
        bias=inputs.bias,
        positions=positions,
        **named,
    )


def loops(case: Case, params: Any, inputs: Inputs) -> np.ndarray:
    """What the case's loop reference gives on the same numbers."""
    x_kv = inputs.x_q if inputs.x_kv is None else inputs.x_kv
    return case.reference(
        params,
        inputs.x_q,
        x_kv,
        inputs.visible,
        spec=case.spec,
        positions_q=inputs.positions_q,
        positions_k=inputs.positions_k,
        bias=inputs.bias,
    )


def redraw(params: Any, rng: np.random.Generator) -> Any:
    """Every leaf replaced by normal values of order 1: no near-identity start hides anything.

    A matrix is divided by the square root of what it sums over, so that the softmax does not
    saturate.
    """

    def leaf(path, old):
        shape = np.shape(old)
        names = jax.tree_util.keystr(path)
        fan = np.prod(shape[:2]) if "out" in names else shape[0]
        return rng.normal(size=shape) / (np.sqrt(fan) if len(shape) > 1 else 1.0)

    return jax.tree_util.tree_map_with_path(leaf, params)


@functools.cache
def _quick() -> dict[str, Any]:
    """Options that make XLA's CPU compiler three times as fast, of those that this jax knows.

    The laws compile hundreds of tiny programs and run each once.
    """
    wished = {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
    known = {}
    for name, value in wished.items():
        try:
            jax.jit(lambda x: x, compiler_options={name: value})(1.0)
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit`, compiled in a hurry."""
    return jax.jit(function, compiler_options=_quick())


def like(tree: Any, rng: np.random.Generator) -> Any:
    """A random direction: normal values in the shape of every leaf."""
    return jax.tree.map(lambda x: rng.normal(size=np.shape(x)), tree)


def drawn(attn: ja.Attention, rng: np.random.Generator) -> Any:
    """Redrawn parameters of an attention."""
    return redraw(jax.eval_shape(attn.init, jax.random.key(0)), rng)


def directional(reference: Callable[..., Any], values: Any, direction: Any) -> np.ndarray:
    """Exact derivative of `reference(values)` along `direction`, by one complex step.

    Args:
        reference: holomorphic in every leaf of `values`.
        values: a tree of arrays (parameters and inputs together).
        direction: a tree of the same structure.
    """
    moved = jax.tree.map(lambda x, u: x + 1j * STEP * np.asarray(u), values, direction)
    return np.imag(reference(moved)) / STEP


def cast(tree: Any, dtype: Any) -> Any:
    """Every floating leaf of a tree as a jax array of `dtype`; others as they are."""

    def leaf(x):
        floating = np.issubdtype(np.asarray(x).dtype, np.floating)
        return jnp.asarray(x, dtype) if floating else x

    return jax.tree.map(leaf, tree)


def assert_close(got: Any, want: Any, tolerance: float, what: str) -> None:
    """Largest difference over the largest value of what is wanted."""
    error = np.max(np.abs(np.asarray(got) - np.asarray(want)))
    size = np.max(np.abs(np.asarray(want)))
    assert error <= tolerance * size, f"{what}: off by {error / size:.1e} of the largest value"
