"""`ja.check.transform`: a right transform holds all contracts, each planted fault is found, with its fix."""

import dataclasses
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn as ja
import variants
from jaxattn.check import __main__ as command
from jaxattn.check.contracts import CONTRACTS, transform
from jaxattn.check.contracts.hooks import finish_of_zero
from jaxattn.check.laws import LAWS

KEPT: list[Any] = []


class Wrong(NamedTuple):
    """A transform, the contract that finds it, and words of what is said."""

    given: ja.HeadTransform
    law: str
    words: str


class mixed(ja.HeadTransform):
    """A right transform: a learned mix, a gate, a key bias, sums, all declared."""

    start: float = 0.0

    def adapt(self, sizes):
        return sizes.claim(pre=sizes.softmax_heads)

    def init(self, rng, at, dtype):
        i, o = at.pre_stage
        gate = self.start * jax.random.normal(rng, (at.sizes.spec.in_q, at.sizes.output_heads), dtype)
        return {"kernel": jnp.eye(i, o, dtype=dtype), "gate": gate}

    def query_side(self, params, x_q, side, at):
        gate = 1 + jnp.tanh(jnp.einsum("...qm,mh->...qh", x_q, params["gate"].astype(x_q.dtype)))
        return at.gate(at.note(side, gate), gate[..., None])

    def coupling(self, params, coupling, at):
        return at.fill(coupling, pre=ja.Mix(params["kernel"]))

    def finish(self, params, heads, side, at):
        return jnp.tanh(heads) + heads

    def aux(self, params, x_q, side, at):
        gate = at.noted(side)
        counted = jnp.ones(gate.shape[:-1]) if side.valid is None else side.valid.astype(gate.dtype)
        return {"gate": (gate.mean(-1) * counted).sum(), "rows": counted.sum()}

    def losses(self, sums, at):
        return {"open": ja.Loss(sums["gate"] / jnp.maximum(sums["rows"], 1), 0.1)}

    def declare(self, at):
        return ja.Declaration(axes={"kernel": "hl hs", "gate": "m hv"})


class mutable(ja.HeadTransform):
    size: Any = None


class printed(ja.HeadTransform):
    by: float = 1.0

    def __repr__(self):
        return "<printed>"


class by_address(ja.HeadTransform):
    of: Any = None


class Identity:
    """An option that compares by address."""


class unclaimed(ja.HeadTransform):
    def coupling(self, params, coupling, at):
        return dataclasses.replace(coupling, pre=(ja.Mix(jnp.eye(at.sizes.softmax_heads)),))


class leaf(ja.HeadTransform):
    """A leaf that multiplies the heads; declared as the options say."""

    names: str | None = "hv"
    idle: bool = False
    used: bool = True

    def init(self, rng, at, dtype):
        return {"by": jnp.ones((at.sizes.output_heads,), dtype)}

    def finish(self, params, heads, side, at):
        return heads * params["by"].astype(heads.dtype)[:, None] if self.used else heads

    def declare(self, at):
        axes = {} if self.names is None else {"by": self.names}
        return ja.Declaration(axes=axes, idle={"by": "because"} if self.idle else {})


class counted(ja.HeadTransform):
    """Each trace differs from the one before."""

    def query_side(self, params, x_q, side, at):
        KEPT.append(None)
        return side._replace(query=side.query * len(KEPT))


class leaking(ja.HeadTransform):
    def query_side(self, params, x_q, side, at):
        KEPT[:] = [x_q]
        return side


class keeps_source(ja.HeadTransform):
    """The query side reads what the key side left."""

    def key_side(self, params, x_k, side, at):
        KEPT[:] = [np.float64(x_k.shape[-1])]
        return side

    def query_side(self, params, x_q, side, at):
        scale = KEPT[0] if KEPT and isinstance(KEPT[0], np.float64) else 1.0
        return side._replace(query=side.query * scale)


class centred(ja.HeadTransform):
    """The mean over rows, and over what is beside them."""

    side: str = "key"

    def key_side(self, params, x_k, side, at):
        return side._replace(key=side.key - side.key.mean(-3, keepdims=True)) if self.side == "key" else side

    def query_side(self, params, x_q, side, at):
        return (
            side._replace(query=side.query - side.query.mean(-3, keepdims=True))
            if self.side == "query"
            else side
        )


class batched(ja.HeadTransform):
    def query_side(self, params, x_q, side, at):
        return side._replace(
            query=jnp.einsum("bqhd,bq->bqhd", side.query, jnp.ones(x_q.shape[:2], x_q.dtype))
        )


class unit_rows(ja.HeadTransform):
    def key_side(self, params, x_k, side, at):
        return side._replace(key=side.key / jnp.sqrt(jnp.square(side.key).sum(-1, keepdims=True)))


class biased(ja.HeadTransform):
    def finish(self, params, heads, side, at):
        return heads + 1


class unit_heads(ja.HeadTransform):
    def finish(self, params, heads, side, at):
        square = jnp.square(heads).sum(-1, keepdims=True)
        return jnp.where(square > 0, heads / jnp.sqrt(square), 0)


class narrow(ja.HeadTransform):
    def finish(self, params, heads, side, at):
        return heads[..., 1:]


class gate_alone(ja.HeadTransform):
    """The README's own scale, before `at.gate` was there: the gate of an earlier link is gone."""

    def query_side(self, params, x_q, side, at):
        gate = jnp.full((*x_q.shape[:-1], at.sizes.output_heads, 1), 2.0, x_q.dtype)
        return side._replace(gate=gate)


class bias_alone(ja.HeadTransform):
    def key_side(self, params, x_k, side, at):
        return side._replace(bias=jnp.cos(x_k[..., :1]) + jnp.zeros(at.sizes.logit_heads, x_k.dtype))


class forgets(ja.HeadTransform):
    field: str = "notes"

    def query_side(self, params, x_q, side, at):
        return side._replace(**{self.field: {} if self.field == "notes" else None})


class means(ja.HeadTransform):
    """Means in the place of sums, or all rows counted."""

    mean: bool = True

    def aux(self, params, x_q, side, at):
        square = jnp.square(x_q).sum(-1) + 1
        return {"size": square.mean() if self.mean else square.sum()}


class over_zero(ja.HeadTransform):
    def aux(self, params, x_q, side, at):
        return {"rows": jnp.ones(x_q.shape[:-1]).sum() if side.valid is None else side.valid.sum() * 1.0}

    def losses(self, sums, at):
        return {"mean": ja.Loss(sums["rows"] / sums["rows"], 1.0)}


class wide_types(ja.HeadTransform):
    def query_side(self, params, x_q, side, at):
        return side._replace(query=side.query * jnp.ones((), jnp.float32))

    def key_side(self, params, x_k, side, at):
        return side._replace(value=side.value * jnp.ones((), jnp.float32))


class own_type(ja.HeadTransform):
    def init(self, rng, at, dtype):
        return {"by": jnp.ones(at.sizes.output_heads)}

    def finish(self, params, heads, side, at):
        return heads * params["by"].astype(heads.dtype)[:, None]

    def declare(self, at):
        return ja.Declaration(axes={"by": "hv"})


class upgraded(ja.HeadTransform):
    """A product of two leaves beside the identity; the upgrade sets `zero` of them to 0, and adds `off`."""

    zero: tuple[str, ...] = ("up",)
    off: float = 0.0
    right_name: bool = True

    def adapt(self, sizes):
        return sizes.claim(post=sizes.output_heads)

    def init(self, rng, at, dtype):
        i, o = at.post_stage
        return {"down": jax.random.normal(rng, (i, 2), dtype), "up": jnp.ones((2, o), dtype)}

    def coupling(self, params, coupling, at):
        return at.fill(coupling, post=ja.Mix(params["down"] @ params["up"], skip=True))

    def declare(self, at):
        def upgrade(mha, fresh):
            own = {
                k: jnp.zeros_like(v) + self.off if k in self.zero else v
                for k, v in fresh["heads"][at.name].items()
            }
            name = at.name if self.right_name else self.name
            return mha | {"heads": mha["heads"] | {name: own}}

        return ja.Declaration(axes={"down": "hs r", "up": "r hv"}, upgrade=ja.Upgrade(upgrade))


class by_class_name(ja.HeadTransform):
    """It finds what it noted under the name of its class, so that a second one reads the first's."""

    def init(self, rng, at, dtype):
        return {"gate": jax.random.normal(rng, (at.sizes.spec.in_q, at.sizes.output_heads), dtype)}

    def query_side(self, params, x_q, side, at):
        if "by_class_name" not in side.notes:
            gate = jnp.einsum("...qm,mh->...qh", x_q, params["gate"].astype(x_q.dtype))
            side = side._replace(notes=side.notes | {"by_class_name": jnp.tanh(gate)})
        return at.gate(side, side.notes["by_class_name"][..., None])

    def declare(self, at):
        return ja.Declaration(axes={"gate": "m hv"})


class uncounted(ja.HeadTransform):
    """How often it multiplies, only the numbers say."""

    def finish(self, params, heads, side, at):
        twice = lambda x: jnp.einsum("...v,vw->...w", x, 2 * jnp.eye(x.shape[-1], dtype=x.dtype))
        return jax.lax.while_loop(lambda x: jnp.square(x).sum() < 1, twice, heads)


class refuses(ja.HeadTransform):
    error: type = ValueError

    def adapt(self, sizes):
        raise self.error("refuses: never. Fix: none.")


FAULTS = {
    "compares by address": Wrong(by_address(Identity()), "is-a-value", "not equal to it.*Fix: options"),
    "cannot be pickled": Wrong(by_address(lambda x: x), "is-a-value", "cannot be pickled.*Fix: .*top level"),
    "a repr of its own": Wrong(printed(), "reads-back", "<printed>.*does not evaluate.*Fix: leave __repr__"),
    "an option without a repr": Wrong(by_address(Identity()), "reads-back", "does not evaluate"),
    "an unclaimed stage": Wrong(unclaimed(), "hooks-run", "did not claim.*Fix: sizes.claim"),
    "a leaf without axes": Wrong(leaf(None), "axes-declared", "heads/leaf/by has no axis names.*Fix"),
    "too many axes": Wrong(leaf("hv m"), "axes-declared", r'"hv m", but has shape \(4,\).*Fix: one name'),
    "an unknown axis": Wrong(leaf("hq"), "axes-declared", "'hq' is no axis of jaxattn/axes.py.*Fix: one of"),
    "the wrong axis": Wrong(leaf("m"), "axes-declared", "its axis m is 4, expected 7 or 8 or 9.*Fix"),
    "a wrong span of heads": Wrong(leaf("h[1:]"), "axes-declared", r"axis h\[1:\] is 4, expected 3"),
    "impure": Wrong(counted(), "hooks-are-pure", "query_side: a second call.*Fix: read the arguments"),
    "a kept tracer": Wrong(leaking(), "hooks-are-pure", "keeps a traced array.*Fix: return it"),
    "the query side reads the source": Wrong(keeps_source(), "hooks-are-pure", "query_side: a second call"),
    "a mean over keys": Wrong(centred(), "rows-are-apart", "key_side: key of a row.*Fix: a row's own"),
    "a mean over queries": Wrong(centred("query"), "rows-are-apart", "query_side: query of a row is another"),
    "one batch axis": Wrong(batched(), "rows-are-apart", "bqhd|subscript|shape|dim"),
    "a norm of zero": Wrong(unit_rows(), "zero-rows-are-finite", "source state of 0.*Fix: divide by"),
    "finish adds": Wrong(biased(), "finish-of-zero", r"finish\(0\) is 1,.*Fix: multiply heads"),
    "finish divides by a norm": Wrong(unit_heads(), "finish-of-zero", "gradient of finish at heads of 0"),
    "finish cuts heads": Wrong(narrow(), "finish-of-zero", "Fix: heads keep their shape"),
    "a gate that replaces": Wrong(gate_alone(), "earlier-links-stay", "drops the gate.*Fix: at.gate"),
    "a key bias that replaces": Wrong(bias_alone(), "earlier-links-stay", "drops the key bias.*Fix: add"),
    "notes that are dropped": Wrong(forgets(), "earlier-links-stay", "the notes of another link.*at.note"),
    "rows that become valid": Wrong(forgets("valid"), "earlier-links-stay", "changes valid.*Fix"),
    "means for sums": Wrong(means(), "sums-add-up", "not the sum over its examples.*Fix: sums and counts"),
    "padding is counted": Wrong(means(mean=False), "sums-add-up", "counts rows that are not valid.*Fix"),
    "a loss of no rows": Wrong(over_zero(), "sums-add-up", "losses are not finite.*Fix: jnp.maximum"),
    "a float32 constant": Wrong(wide_types(), "types-are-kept", "bfloat16 states.*is float32.*Fix"),
    "leaves of a type of their own": Wrong(own_type(), "types-are-kept", "heads/own_type/by in.*Fix: use"),
    "a leaf that nothing reads": Wrong(leaf(used=False), "leaves-are-alive", "no gradient.*Fix: do not make"),
    "idle that is not": Wrong(leaf(idle=True), "leaves-are-alive", "declared idle, but has a gradient.*Fix"),
    "an upgrade that is off": Wrong(upgraded(off=0.1), "upgrade-is-exact-and-alive", "off by .*Fix"),
    "a dead start": Wrong(upgraded(("up", "down")), "upgrade-is-exact-and-alive", "nor after one step.*Fix"),
    "another's notes": Wrong(by_class_name(), "twice-in-a-chain", "of the second of two, has no.*Fix"),
    "an upgrade of the first alone": Wrong(upgraded(right_name=False), "twice-in-a-chain", "unknown|missing"),
    "a product that is not counted": Wrong(uncounted(), "ledger-counts", "ledger: .*while"),
    "a refusal of everything": Wrong(refuses(), "sizes", "refuses cross-attention.*Fix: ask with sizes"),
    "an error that is no refusal": Wrong(refuses(KeyError), "sizes", "KeyError"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_its_fix_named(name):
    wrong = FAULTS[name]
    report = transform(wrong.given, laws=[] if wrong.law == "sizes" else [wrong.law])
    (ruled,) = report.broken
    assert ruled.law == wrong.law and not report and not report.passed
    assert re.search(wrong.words, ruled.note, re.DOTALL), ruled.note
    assert ruled.note in str(report)


def test_every_contract_has_a_planted_fault():
    assert {wrong.law for wrong in FAULTS.values()} == {"sizes", *(one.name for one in CONTRACTS)}


def test_a_transform_that_keeps_them_holds_all():
    report = transform(mixed(start=0.5))
    assert report and all(ruled.ruling == "holds" for ruled in report.rulings), str(report)


@pytest.mark.heavy
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_registered_variants_hold_all(name):
    report = transform(variants.VARIANTS[name]())
    assert report and len(report.rulings) == 1 + len(CONTRACTS), str(report)


def test_a_chain_and_sizes_of_ones_own_can_be_asked():
    spec = ja.HeadSpec(model=8, heads=8, d_qk=4)
    report = transform(
        ja.chain(mixed(), variants.moh(shared=4, top_k=3)), spec, laws=["earlier-links-stay", "reads-back"]
    )
    assert report and report.subject == "chain(mixed(), moh(shared=4, top_k=3))"
    assert not transform(variants.moh(shared=4, top_k=5), spec, laws=[])


@pytest.mark.parametrize("given", [variants.moh, "moh", None, lambda: None])
def test_what_is_no_transform_is_refused(given):
    with pytest.raises(TypeError, match="expected a HeadTransform"):
        transform(given)


def test_a_contract_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="laws: got 'finish', expected some of .*finish-of-zero"):
        transform(mixed(), laws=["finish"])


# From a shell


def from_the_shell(monkeypatch, *names: str) -> int:
    """The exit status for names of this module, with one law in the place of all."""
    monkeypatch.setitem(sys.modules, "somebody", sys.modules[__name__])
    monkeypatch.setattr("jaxattn.check.report.LAWS", {"output-shape": LAWS["output-shape"]})
    return command.main([f"somebody:{name}" for name in names] + ["--quick", "--jobs", "1"])


def test_a_class_an_instance_and_a_factory_are_asked_contracts_and_laws(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[__name__], "made", lambda: biased(), raising=False)
    monkeypatch.setattr(sys.modules[__name__], "CONTRACTS_ASKED", biased(), raising=False)
    monkeypatch.setattr("jaxattn.check.contracts.CONTRACTS", (finish_of_zero,))
    assert from_the_shell(monkeypatch, "mixed") == 0
    said = capsys.readouterr().out
    assert "somebody:mixed (HeadTransform)" in said and "finish-of-zero  holds" in said
    assert all(f"somebody:mixed on {name} (Subject)" in said for name in ("reference", "dense", "blocked"))
    assert "somebody:mixed on routed: not run, heads are mixed" in said
    for name in ("biased", "made", "CONTRACTS_ASKED"):
        assert from_the_shell(monkeypatch, name) == 1
        assert "Fix: multiply heads" in capsys.readouterr().out
    assert from_the_shell(monkeypatch, "many_heads") == 0
    assert "not run, it refuses 6 heads of width 4: " in capsys.readouterr().out


class many_heads(ja.HeadTransform):
    def adapt(self, sizes):
        if sizes.spec.heads < 8:
            raise ValueError(f"many_heads: heads = {sizes.spec.heads}, expected at least 8. Fix: more heads.")
        return sizes


class optioned(ja.HeadTransform):
    by: float


@pytest.mark.parametrize(
    "name, words",
    [
        ("somebody:optioned", "its options by have no defaults. Fix: name an instance"),
        ("somebody:nothing", "has no attribute 'nothing'"),
        ("nobody.knows:it", "No module named 'nobody'"),
        ("somebody:", "expected module:name"),
        (":mixed", "expected module:name"),
        ("somebody", "has no attribute 'VARIANTS'"),
    ],
)
def test_a_bad_name_gives_one_line(monkeypatch, capsys, name, words):
    monkeypatch.setitem(sys.modules, "somebody", sys.modules[__name__])
    status, said = command.main([name, "--jobs", "1"]), capsys.readouterr()
    assert status == 2 and len(said.err.splitlines()) == 1 and re.search(words, said.err), said.err
