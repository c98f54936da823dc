"""Law 2: at the parameters named here every variant is MHA, and at others it is not."""

from typing import Any

import jax
import numpy as np
import pytest
import reduced
import table
from loops import mha

import jaxattn as ja
import variants

pytestmark = pytest.mark.heavy

# Variant with options, and the parameters at which it is MHA of 4 heads of width 6.
REDUCTIONS = {
    "mohsa": (variants.mohsa(overlap=0), lambda p, rng: p),
    "talking_heads": (variants.talking_heads(), lambda p, rng: reduced.eye_maps(p, 4)),
    "dcmha": (
        variants.dcmha(rank=1, groups=2, static=True),
        lambda p, rng: reduced.no_dynamics(p, 4, rng),
    ),
    "moh": (
        variants.moh(shared=2, top_k=2, gates="released"),
        lambda p, rng: reduced.zero_routers(p, 2, 2),
    ),
    "moh_routed_only": (
        variants.moh(shared=0, top_k=4, gates="released"),
        lambda p, rng: reduced.zero_routers(p, 0, 4),
    ),
    "collab": (variants.collab(width=24), lambda p, rng: reduced.packed_bases(p)),
}


@pytest.mark.parametrize("rotary", [None, table.HALF, table.ADJACENT], ids=["none", "half", "adj"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduces_to_mha(name, cross, rotary):
    transform, reduced = REDUCTIONS[name]
    rng = np.random.default_rng(3)
    # A rotated bias of queries or keys depends on the distance, as no content bias does.
    own = name != "collab" or rotary is None
    bias = {"use_bias": True, "bias_q": own, "bias_k": own}
    case = table.mha_case(table.sizes(4, 6, cross=cross, rotary=rotary, **bias), moved=bool(rotary))
    inputs = table.draw(case)
    plain = table.drawn(table.attention(case), rng)
    want = table.loops(case, plain, inputs)
    attn = ja.attention(ja.HeadSpec(**case.spec), transform)
    fresh = table.drawn(attn, rng)  # what an upgrade leaves of it must not matter
    params = reduced(plain, rng)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, fresh)
    run = table.jit(lambda p: table.call(case, attn, p, inputs)[0])
    table.assert_close(run(params), want, 1e-12, "reduced by hand")
    (declared,) = attn.declare().values()
    assert declared.upgrade.params is not None, declared.upgrade.why
    table.assert_close(run(declared.upgrade.params(plain, fresh)), want, 1e-12, "declared upgrade")


@pytest.mark.parametrize("bias", ["bias_q", "bias_k"])
def test_collab_declares_no_upgrade_from_rotary_mha_with_biases(bias):
    """A rotated key bias is not constant over keys: it does not cancel in the softmax."""
    spec = ja.HeadSpec(**table.sizes(4, 6, rotary=table.HALF), **{bias: True})
    (declared,) = ja.attention(spec, variants.collab(width=24)).declare().values()
    assert declared.upgrade.params is None
    assert "bias" in declared.upgrade.why


@pytest.mark.parametrize("case", table.CASES, ids=lambda case: case.name)
def test_declared_upgrade_is_exact_or_says_why_not(case):
    attn = table.attention(case)
    ((name, declared),) = attn.declare().items()
    if declared.upgrade.params is None:
        assert len(declared.upgrade.why) > 10, f"{name} gives no reason"
        return
    rng = np.random.default_rng(4)
    source = ja.attention(ja.HeadSpec(**case.spec))
    plain = table.drawn(source, rng)
    inputs = table.draw(case)
    params = declared.upgrade.params(plain, table.drawn(attn, rng))
    want = table.loops(case._replace(reference=mha.reference), plain, inputs)
    got, _ = table.jit(lambda p: table.call(case, attn, p, inputs))(params)
    table.assert_close(got, want, 1e-12, "upgraded")


def mha_leaves(case: table.Case, params: Any) -> Any:
    """The MHA that shares the case's projections, or None where no MHA has such sizes.

    A widened output map gives its middle rows; a basis as wide as all heads is cut into heads.
    """
    spec = ja.HeadSpec(**case.spec)
    leaves = {name: dict(leaf) for name, leaf in params.items() if name != "heads"}
    for name in ("query", "key"):
        width, heads, d = leaves[name]["kernel"].shape
        if heads == 1 and d == spec.heads * spec.d_qk:
            leaves[name]["kernel"] = leaves[name]["kernel"].reshape(width, spec.heads, spec.d_qk)
    over = (leaves["out"]["kernel"].shape[1] - spec.d_v) // 2
    leaves["out"]["kernel"] = leaves["out"]["kernel"][:, over : over + spec.d_v]
    shapes = jax.eval_shape(ja.attention(spec).init, jax.random.key(0))
    same = all(
        leaves[name]["kernel"].shape == shapes[name]["kernel"].shape
        for name in ("query", "key", "value", "out")
    )
    return {**leaves, "heads": {}} if same else None


@pytest.mark.parametrize("variant", [name for name in table.TABLE if name != "mha"])
def test_redrawn_variant_differs_from_mha(variant):
    compared = 0
    for case in table.TABLE[variant]:
        params, inputs = (
            table.drawn(table.attention(case), np.random.default_rng(5)),
            table.draw(case),
        )
        plain = mha_leaves(case, params)
        if plain is None or case.name == "mohsa-none":  # the second is MHA, and tested as such
            continue
        y = table.loops(case, params, inputs)
        of_mha = table.loops(case._replace(reference=mha.reference), plain, inputs)
        assert np.max(np.abs(y - of_mha)) > 0.05 * np.max(np.abs(of_mha)), f"{case.name} is MHA"
        compared += 1
    assert compared, f"no case of {variant} can be compared with MHA"
