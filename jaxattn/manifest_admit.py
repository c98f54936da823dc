"""admit: whether the identities of a call fit each other and what is current, before anything runs."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxattn.engines import ENGINES
from jaxattn.manifest_form import Capture, Id, Manifest, Record, not_derived

FRAMEWORK = "jaxattn"  # the framework whose backends are the engines of this package
SELF_OWNERS, CROSS_OWNERS = ("encoder_self", "decoder_causal"), ("decoder_cross",)
WEIGHTS = ("weights", "mixed_weights")  # what counts as attention weights


class Current(Record):
    """What the caller knows to be current; what is left out is not compared.

    Attributes:
        release_id, adapter_id: of the parameters that are loaded; adapter_id=None says that there is none.
        q_state_id, source_state_id: the states that this step's queries, and its keys and values, must be of.
        backends: what backends of other frameworks can return beside the output, by name.
    """

    release_id: Id | None = None
    adapter_id: Id | None = None
    q_state_id: Id | None = None
    source_state_id: Id | None = None
    backends: dict[Id, tuple[Capture, ...]] = {}


class Reason(NamedTuple):
    """Why a manifest is refused.

    Attributes:
        code: the name of the rule.
        fields: the fields that do not fit, by their paths.
        sentence: what they are and what was expected.
        fix: what to do about it.
    """

    code: str
    fields: tuple[str, ...]
    sentence: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code}: {self.sentence}. Fix: {self.fix}."


class NotAdmitted(ValueError):
    """A manifest that `admit` refuses; `reasons` holds every one of its faults."""

    def __init__(self, manifest_id: str, reasons: tuple[Reason, ...]):
        self.manifest_id, self.reasons = manifest_id, reasons
        lines = "".join(f"\n  {reason}" for reason in reasons)
        super().__init__(f"manifest {manifest_id!r} is not admitted:{lines}")

    def __reduce__(self):
        return type(self), (self.manifest_id, self.reasons)


class Admission(NamedTuple):
    """A manifest that was admitted, the rules that it passed, and what it was compared with."""

    manifest: Manifest
    rules: tuple[str, ...]
    current: Current


def admit(manifest: Manifest, current: Current | None = None) -> Admission:
    """Admit a call by what it says it is, or refuse it with every reason.

    Only the record is read: no array, no projection. Shapes that agree prove nothing here.

    Args:
        manifest: the record of the call.
        current: releases and states that are current, to find what is stale.

    Raises:
        NotAdmitted: with a reason for each rule that is broken: the fields, what they are, the fix.

    Example:
        >>> import jax
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> attn = attention(HeadSpec(model=6, heads=2))
        >>> params = attn.init(jax.random.key(0))
        >>> x, memory = jax.numpy.ones((2, 5, 6)), jax.numpy.ones((2, 5, 6))
        >>> named = dict(manifest_id="l3.cross", checkpoint="r19", q_origin="target:17")
        >>> record = attn.manifest(params, x, memory, source_origin="source:7", **named)
        >>> admit(record, Current(release_id="r19")).manifest is record
        True
        >>> record = attn.manifest(params, x, memory, source_origin=("source:7", "source:6"), **named)
        >>> try: admit(record)
        ... except NotAdmitted as refused: print(refused.reasons[0].sentence)
        cross-attention, but call.k_state_id = 'source:7' and call.v_state_id = 'source:6'

    Source: the article's section 0x01A, mechanical admission and failure cases.
    """
    current = Current() if current is None else current
    reasons = tuple(
        Reason(code, fields, sentence, fix)
        for code, rule in RULES.items()
        for fields, sentence, fix in rule(manifest, current)
    )
    if reasons:
        raise NotAdmitted(manifest.manifest_id, reasons)
    return Admission(manifest, tuple(RULES), current)


Faults = Iterator[tuple[tuple[str, ...], str, str]]
Rule = Callable[[Manifest, Current], Faults]


def _derived(m: Manifest, current: Current) -> Faults:
    """A copy with changed fields keeps the numbers of the original."""
    wrong = list(not_derived(m))
    if wrong:
        yield ("projection",), "; ".join(wrong), "read it again with Manifest.from_json, without projection"


def _heads(m: Manifest, current: Current) -> Faults:
    h = m.heads
    if h.variant:
        return  # a transform on the heads has counts of its own
    if h.q_heads % h.kv_heads:
        yield (
            ("heads.q_heads", "heads.kv_heads"),
            f"heads.q_heads = {h.q_heads} does not divide by heads.kv_heads = {h.kv_heads}",
            "each key head must serve the same number of query heads",
        )
    for left, right in (("v_heads", "kv_heads"), ("o_heads", "q_heads"), ("d_o", "d_v")):
        got, expected = getattr(h, left), getattr(h, right)
        if got != expected:
            yield (
                (f"heads.{left}",),
                f"heads.{left} = {got}, expected heads.{right} = {expected} without a variant",
                "name the transform that changes it in heads.variant",
            )


def _self_origin(m: Manifest, current: Current) -> Faults:
    states = _states(m, "q", "k", "v")
    if m.call.mode == "self" and len(set(states.values())) > 1:
        fix = "project all three from one state, or mode 'cross' where K and V are of a source"
        yield tuple(states), f"self-attention, but {_said(states)}", fix


def _cross_source(m: Manifest, current: Current) -> Faults:
    states = _states(m, "k", "v")
    if m.call.mode == "cross" and len(set(states.values())) > 1:
        yield tuple(states), f"cross-attention, but {_said(states)}", "K and V must be of one source"


def _cross_target(m: Manifest, current: Current) -> Faults:
    states = _states(m, "q", "k")
    if m.call.mode == "cross" and len(set(states.values())) == 1:
        fix = "the source's own state, or mode 'self'"
        yield tuple(states), f"cross-attention, but target and source are one: {_said(states)}", fix


def _mask_owner(m: Manifest, current: Current) -> Faults:
    mode, owner = m.call.mode, m.call.mask_owner
    if owner in (CROSS_OWNERS if mode == "self" else SELF_OWNERS):
        fix = "the owner of this call's mask, or 'external'"
        yield ("call.mask_owner",), f"call.mask_owner = {owner!r} in call.mode = {mode!r}", fix


def _fused_order(m: Manifest, current: Current) -> Faults:
    store, h, path = m.checkpoint, m.heads, ("checkpoint.fused_order",)
    order = None if store.fused_order is None else list(store.fused_order)
    if store.layout == "separate" and order is not None:
        yield path, f"checkpoint.fused_order = {order} of separate tensors", "null, or layout 'fused_qkv'"
    if store.layout == "fused_qkv" and order != ["q", "k", "v"]:
        fix = "convert the checkpoint: its rows must lie in this order"
        yield path, f"checkpoint.fused_order = {order}, expected ['q', 'k', 'v']", fix
    if store.layout == "fused_qkv" and not h.in_q == h.in_k == h.in_v:
        widths = f"heads.in_q = {h.in_q}, heads.in_k = {h.in_k}, heads.in_v = {h.in_v}"
        yield ("checkpoint.layout",), f"one fused tensor, but {widths}", "layout 'separate'"


def _release(m: Manifest, current: Current) -> Faults:
    store, earlier = m.checkpoint, m.call.kv_projected_by
    own = {"release_id": store.release_id, "adapter_id": store.adapter_id}
    for name, mine in own.items():
        expected = getattr(current, name)
        if name in current.model_fields_set and mine != expected:
            yield (
                (f"checkpoint.{name}",),
                f"checkpoint.{name} = {mine!r}, but {expected!r} is current",
                "load what is current and write the manifest anew",
            )
        if earlier is not None and getattr(earlier, name) != mine:
            yield (
                (f"call.kv_projected_by.{name}", f"checkpoint.{name}"),
                f"K and V were projected by {name} {getattr(earlier, name)!r}, the call's is {mine!r}",
                "project the source again with the call's own parameters",
            )


def _state(m: Manifest, current: Current) -> Faults:
    known = {"q": current.q_state_id, "k": current.source_state_id, "v": current.source_state_id}
    for (path, got), expected in zip(_states(m, *known).items(), known.values(), strict=True):
        if expected is not None and got != expected:
            yield (
                (path,),
                f"{path} = {got!r}, but {expected!r} is current",
                "bind the call to the current state",
            )


def _observation(m: Manifest, current: Current) -> Faults:
    r = m.runtime
    if r.observed_backend is not None and r.observation_id is None:
        yield (
            ("runtime.observed_backend", "runtime.observation_id"),
            f"runtime.observed_backend = {r.observed_backend!r} without runtime.observation_id",
            "name the trace that shows it; null where nothing was observed",
        )


def _stochastic(m: Manifest, current: Current) -> Faults:
    rates = {f"call.{name}": getattr(m.call, name) for name in ("dropout_p", "head_dropout_p")}
    drawn = {path: rate for path, rate in rates.items() if rate > 0}
    if m.call.deterministic and drawn:
        yield (
            ("call.deterministic", *drawn),
            f"call.deterministic = true, but {_said(drawn)}",
            "dropout of rate 0 (no dropout key), or call.deterministic = false",
        )


def _weights(m: Manifest, current: Current) -> Faults:
    """What is asked for must be what the backend declares that it can return."""
    asked: set[str] = set(m.call.capture)
    if not m.call.need_weights and asked & set(WEIGHTS):
        names = ", ".join(sorted(asked & set(WEIGHTS)))
        paths = ("call.need_weights", "call.capture")
        yield paths, f"call.capture asks for {names}, but call.need_weights = false", "say true"
    if m.call.need_weights and not asked & set(WEIGHTS):
        asked.add("weights")
    for path, name in _backends(m):
        if m.runtime.framework != FRAMEWORK:
            missing = asked - set(current.backends.get(name, ()))
            why = f"nothing declares that {name!r} of {m.runtime.framework!r} returns it"
        elif name in ENGINES:
            missing, why = asked - set(ENGINES[name].captures), f"engine {name!r} never holds it as a whole"
        else:
            continue  # "auto" takes an engine that can; another name breaks the rule `backend`
        if missing:
            yield (
                ("call.need_weights", path),
                f"the call asks for {', '.join(sorted(missing))}, but {why}",
                f"ask for the output alone, or engine {_giving(asked)} of {FRAMEWORK!r}",
            )


def _backend(m: Manifest, current: Current) -> Faults:
    r = m.runtime
    for path, name in _backends(m):
        if r.framework == FRAMEWORK and name not in ENGINES and (path, name) != (REQUESTED, "auto"):
            known = ", ".join(map(repr, ENGINES))
            yield (path,), f"{path} = {name!r} is no engine of {FRAMEWORK!r}", f"one of {known}, or 'auto'"
    chosen = r.chosen_backend
    if (
        r.framework == FRAMEWORK
        and r.requested_backend != "auto"
        and chosen not in (None, r.requested_backend)
    ):
        said = f"{REQUESTED} = {r.requested_backend!r}, but {CHOSEN} = {chosen!r}"
        yield (REQUESTED, CHOSEN), said, "an engine that is named runs, or the call is refused"
    if chosen is not None and r.eligible_backends is not None and chosen not in r.eligible_backends:
        said = f"{CHOSEN} = {chosen!r} is not in runtime.eligible_backends"
        yield (CHOSEN,), said, "choose one that fits the call"


RULES: dict[str, Rule] = {
    "derived": _derived,
    "heads": _heads,
    "self_origin": _self_origin,
    "cross_source": _cross_source,
    "cross_target": _cross_target,
    "mask_owner": _mask_owner,
    "fused_order": _fused_order,
    "release": _release,
    "state": _state,
    "observation": _observation,
    "stochastic": _stochastic,
    "weights": _weights,
    "backend": _backend,
}

REQUESTED, CHOSEN = "runtime.requested_backend", "runtime.chosen_backend"


def _backends(m: Manifest) -> Iterator[tuple[str, str]]:
    """The backends that are named for the call, once each."""
    yield REQUESTED, m.runtime.requested_backend
    if m.runtime.chosen_backend not in (None, m.runtime.requested_backend):
        yield CHOSEN, m.runtime.chosen_backend


def _giving(asked: set[str]) -> str:
    return " or ".join(repr(e.name) for e in ENGINES.values() if asked <= set(e.captures))


def _states(m: Manifest, *roles: str) -> dict[str, str]:
    return {f"call.{role}_state_id": getattr(m.call, f"{role}_state_id") for role in roles}


def _said(values: dict) -> str:
    return " and ".join(f"{path} = {value!r}" for path, value in values.items())
