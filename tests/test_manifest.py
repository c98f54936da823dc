"""The call manifest: strict in and out, derived where it can be, and refused for what shapes cannot show."""

import copy
import importlib.resources
import json
import pathlib
import pickle
import subprocess
import sys
import tomllib
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import table
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import jaxattn as ja
import variants
from jaxattn import manifest_form
from jaxattn.engines.call import CAPTURES
from jaxattn.manifest import RULES, Checkpoint, Current, Manifest, NotAdmitted, Release, admit, schema

pytestmark = pytest.mark.heavy

ROOT = pathlib.Path(__file__).parent.parent

# The article's own record (section 0x01A), shortened as it is there.
ARTICLE = """
{"manifest_id": "decoder.l3.cross.step17",
 "call": {"mode": "cross", "batch": 2, "q_len": 1, "k_len": 128,
          "q_state_id": "request-42:decoder-step-17", "k_state_id": "request-42:encoder-release-7",
          "v_state_id": "request-42:encoder-release-7", "mask_owner": "decoder_cross",
          "canonical_mask_semantics": "true_is_visible", "training": false, "dropout_p": 0.0,
          "need_weights": false},
 "heads": {"q_heads": 8, "kv_heads": 8, "d_qk": 64, "d_v": 64, "d_model": 512},
 "checkpoint": {"release_id": "model-r19", "layout": "fused_qkv", "stored_orientation": "out_in",
                "fused_order": ["q", "k", "v"]},
 "runtime": {"framework": "pytorch", "framework_version": "pinned-by-environment",
             "requested_backend": "sdpa_auto", "observed_backend": null, "parameter_dtype": "bfloat16",
             "projection_compute_dtype": "bfloat16", "score_accumulation_dtype": "float32",
             "output_dtype": "bfloat16"}}
"""
SOURCE = "request-42:encoder-release-7"


def edited(data: dict[str, Any], **edits: Any) -> dict[str, Any]:
    """A copy with other values; `call__mode` is the path call.mode."""
    data = copy.deepcopy(data)
    for path, value in edits.items():
        *groups, name = path.split("__")
        place = data
        for group in groups:
            place = place[group]
        place[name] = value
    return data


def read(data: dict[str, Any]) -> Manifest:
    return Manifest.from_json(json.dumps(data))


def own(mode: str, owner: str, **edits: Any) -> dict[str, Any]:
    """A record of this package, with sizes that are all different primes."""
    data = edited(
        json.loads(ARTICLE),
        call__mode=mode, call__mask_owner=owner, call__q_len=13, call__k_len=17,
        heads={"q_heads": 3, "kv_heads": 3, "d_qk": 5, "d_v": 7, "d_model": 11},
        runtime={"framework": "jaxattn", "framework_version": "0.1.0", "requested_backend": "auto"},
    )  # fmt: skip
    if mode == "self":
        data = edited(data, call__q_state_id=SOURCE, call__k_len=13)
    return edited(data, **edits)


VALID = {
    "article": json.loads(ARTICLE),
    "encoder self": own("self", "encoder_self"),
    "decoder causal self": own("self", "decoder_causal"),
    "self with history": own("self", "decoder_causal", call__q_len=1, call__k_len=17),
    "cross": own("cross", "decoder_cross"),
    "square cross": own("cross", "decoder_cross", call__k_len=13),
    "one row of cross decode": own("cross", "decoder_cross", call__q_len=1),
    "external mask": own("cross", "external"),
    "separate": own("self", "encoder_self", checkpoint__layout="separate", checkpoint__fused_order=None),
    "grouped": own("self", "encoder_self", heads__q_heads=6),
}


class Bundle(NamedTuple):
    """A valid record, one change that keeps every shape, the rule that it breaks, words of the reason."""

    base: str
    edits: dict[str, Any]
    code: str
    said: tuple[str, ...]
    current: Current | None = None


PRINT = dict(call__need_weights=True)
INVALID = {
    "K and V of two sources": Bundle(
        "cross", dict(call__v_state_id="B"), "cross_source", ("v_state_id = 'B'", SOURCE, "one source")
    ),
    "swapped fused roles": Bundle(
        "encoder self", dict(checkpoint__fused_order=["k", "q", "v"]), "fused_order",
        ("['k', 'q', 'v']", "expected ['q', 'k', 'v']", "convert the checkpoint"),
    ),
    "keys and values of an old release": Bundle(
        "one row of cross decode", dict(call__kv_projected_by={"release_id": "model-r18"}), "release",
        ("'model-r18'", "'model-r19'", "project the source again"),
    ),
    "keys and values of an old adapter": Bundle(
        "one row of cross decode",
        dict(call__kv_projected_by={"release_id": "model-r19", "adapter_id": "lora-2"}), "release",
        ("adapter_id 'lora-2'", "None", "project the source again"),
    ),
    "a checkpoint that is not current": Bundle(
        "cross", {}, "release", ("'model-r19'", "'model-r20' is current"), Current(release_id="model-r20")
    ),
    "an adapter where none is current": Bundle(
        "cross", dict(checkpoint__adapter_id="lora-2"), "release", ("'lora-2'", "None is current"),
        Current(adapter_id=None),
    ),
    "observed without an observation": Bundle(
        "article", dict(runtime__observed_backend="flash"), "observation",
        ("'flash'", "without runtime.observation_id", "null where nothing was observed"),
    ),
    "stochastic and marked deterministic": Bundle(
        "cross", dict(call__training=True, call__dropout_p=0.1, call__deterministic=True), "stochastic",
        ("deterministic = true", "dropout_p = 0.1", "Fix: dropout of rate 0"),
    ),
    "head dropout and marked deterministic": Bundle(
        "cross", dict(call__head_dropout_p=0.3, call__deterministic=True), "stochastic",
        ("head_dropout_p = 0.3",),
    ),
    "weights of blocked": Bundle(
        "cross", PRINT | dict(runtime__requested_backend="blocked"), "weights",
        ("weights", "engine 'blocked' never holds it", "'reference' or 'dense'"),
    ),
    "weights of fused": Bundle(
        "cross", PRINT | dict(runtime__requested_backend="fused"), "weights", ("engine 'fused'",)
    ),
    "logits of blocked": Bundle(
        "cross", dict(call__capture=["logits"], runtime__requested_backend="blocked"), "weights", ("logits",)
    ),
    "weights of the engine that auto chose": Bundle(
        "cross", PRINT | dict(runtime__chosen_backend="blocked"), "weights", ("engine 'blocked'",)
    ),
    "weights of a backend that declares nothing": Bundle(
        "article", PRINT, "weights", ("nothing declares that 'sdpa_auto' of 'pytorch' returns it",)
    ),
    "weights in one field only": Bundle(
        "cross", dict(call__capture=["weights"]), "weights", ("need_weights = false",)
    ),
    "self, K of another state": Bundle(
        "encoder self", dict(call__k_state_id="other"), "self_origin", ("self-attention", "'other'")
    ),
    "self, V of another state": Bundle(
        "encoder self", dict(call__v_state_id="other"), "self_origin", ("self-attention", "'other'")
    ),
    "self, Q of another state": Bundle(
        "encoder self", dict(call__q_state_id="other"), "self_origin", ("self-attention", "'other'")
    ),
    "cross of one state": Bundle(
        "square cross", dict(call__q_state_id=SOURCE), "cross_target", ("target and source are one", SOURCE)
    ),
    "a source that is not current": Bundle(
        "encoder self", {}, "state", ("'old' is current",), Current(q_state_id="old")
    ),
    "a cross mask in self-attention": Bundle(
        "external mask", dict(call__mask_owner="encoder_self"), "mask_owner", ("'encoder_self'", "'cross'")
    ),
    "heads in no groups": Bundle(
        "encoder self", dict(heads__kv_heads=2, heads__v_heads=2), "heads", ("3", "divide", "2")
    ),
    "heads that only a variant has": Bundle(
        "encoder self", dict(heads__o_heads=5), "heads", ("o_heads = 5", "heads.q_heads = 3", "variant")
    ),
    "no engine": Bundle(
        "cross", dict(runtime__requested_backend="turbo"), "backend", ("'turbo'", "'blocked'", "or 'auto'")
    ),
    "another engine than the one named": Bundle(
        "cross", dict(runtime__requested_backend="dense", runtime__chosen_backend="blocked"), "backend",
        ("'dense'", "'blocked'"),
    ),
    "an engine that does not fit": Bundle(
        "cross", dict(runtime__chosen_backend="dense", runtime__eligible_backends=["blocked"]), "backend",
        ("not in runtime.eligible_backends",),
    ),
}  # fmt: skip
SAME_SHAPES = {name for name, bundle in INVALID.items() if bundle.code != "heads"}


def shapes(m: Manifest) -> tuple:
    """Every shape of the call: states, matrices and scores."""
    maps = tuple((f.in_features, f.out_features, f.stored_shape) for f in
                 (m.projection.q, m.projection.k, m.projection.v, m.projection.o))  # fmt: skip
    return m.call.batch, m.call.q_len, m.call.k_len, m.heads, maps


@pytest.mark.parametrize("name", VALID)
def test_valid_records_are_admitted_and_come_back_from_json(name):
    record = read(VALID[name])
    current = Current(release_id="model-r19", adapter_id=None, source_state_id=SOURCE)
    assert admit(record, current) == (record, tuple(RULES), current)
    text = record.to_json()
    assert Manifest.from_json(text) == record and Manifest.from_json(text).to_json() == text
    assert hash(record) == hash(Manifest.from_json(text))
    given = VALID[name]
    kept = json.loads(text)
    for group, values in given.items():
        if isinstance(values, dict):
            assert {field: kept[group][field] for field in values} == values


@pytest.mark.parametrize("name", INVALID)
def test_invalid_bundles_are_refused_for_their_reason_alone(name):
    bundle = INVALID[name]
    record = read(edited(VALID[bundle.base], **bundle.edits))
    if name in SAME_SHAPES:
        assert shapes(record) == shapes(read(VALID[bundle.base]))
    with pytest.raises(NotAdmitted) as refused:
        admit(record, bundle.current)
    assert {reason.code for reason in refused.value.reasons} == {bundle.code}
    for word in (*bundle.said, record.manifest_id, bundle.code, "Fix: "):
        assert word in str(refused.value)
    kept = pickle.loads(pickle.dumps(refused.value))
    assert kept.reasons == refused.value.reasons and str(kept) == str(refused.value)


def test_every_rule_has_a_bundle_and_every_fault_is_told():
    assert {bundle.code for bundle in INVALID.values()} == set(RULES) - {"derived"}
    faults = dict(
        call__v_state_id="B", checkpoint__fused_order=["k", "q", "v"], runtime__observed_backend="flash"
    )
    with pytest.raises(NotAdmitted) as refused:
        admit(read(edited(VALID["cross"], **faults)))
    assert [r.code for r in refused.value.reasons] == ["cross_source", "fused_order", "observation"]
    fields = {field for reason in refused.value.reasons for field in reason.fields}
    assert "checkpoint.fused_order" in fields and "runtime.observation_id" in fields


def test_what_fits_is_not_refused():
    for edits in (
        dict(runtime__observed_backend="flash", runtime__observation_id="trace-5"),
        dict(call__training=True, call__dropout_p=0.1, call__deterministic=False),
        dict(call__training=True, call__dropout_p=0.1),
        dict(call__training=True, call__deterministic=True),
        PRINT | dict(call__capture=["weights"], runtime__requested_backend="dense"),
        PRINT,
        dict(call__kv_projected_by={"release_id": "model-r19"}),
    ):
        admit(read(edited(VALID["cross"], **edits)), Current(q_state_id="request-42:decoder-step-17"))
    asks = edited(VALID["article"], **PRINT, runtime__requested_backend="math")
    admit(read(asks), Current(backends={"math": ("weights",)}))


def test_widths_and_spans_are_derived():
    """The article's numbers, and with primes what a concatenation of stored matrices gives."""
    asymmetric = read(edited(VALID["article"], heads__d_v=48)).projection
    assert [asymmetric.q.span, asymmetric.k.span, asymmetric.v.span] == [(0, 512), (512, 1024), (1024, 1408)]
    assert asymmetric.o.in_features == 384 and asymmetric.fused_rows == 1408
    p = read(own("self", "encoder_self", heads__q_heads=6)).projection
    stored = [np.full((heads * width, 11), i) for i, (heads, width) in enumerate([(6, 5), (3, 5), (3, 7)])]
    fused = np.concatenate(stored)
    for i, role in enumerate((p.q, p.k, p.v)):
        assert role.stored_shape == stored[i].shape and (fused[slice(*role.span)] == i).all()
        assert role.span[1] - role.span[0] == role.out_features
    assert p.fused_rows == len(fused) and p.o.stored_shape == (11, 6 * 7) and p.o.span is None
    turned = read(own("self", "encoder_self", checkpoint__stored_orientation="in_out")).projection
    assert turned.v.stored_shape == (11, 21)
    apart = read(VALID["separate"]).projection
    assert apart.fused_rows is None and apart.q.span is None
    swapped = read(edited(VALID["encoder self"], checkpoint__fused_order=["v", "k", "q"])).projection
    assert [swapped.v.span, swapped.k.span, swapped.q.span] == [(0, 21), (21, 36), (36, 51)]
    cross = read(VALID["cross"])
    assert cross.projection.q.state_id == cross.call.q_state_id != cross.projection.v.state_id


@pytest.mark.parametrize(
    "path, value, derived",
    [
        ("projection__q__out_features", 16, "15"),
        ("projection__o__in_features", 15, "21"),
        ("projection__k__span", [0, 15], "[15, 30]"),
        ("projection__v__stored_shape", [11, 21], "[21, 11]"),
        ("projection__fused_rows", 45, "51"),
        ("projection__k__state_id", "other", repr(SOURCE)),
    ],
)
def test_a_derived_number_is_never_trusted(path, value, derived):
    whole = json.loads(read(VALID["cross"]).to_json())
    with pytest.raises(ValidationError) as refused:
        read(edited(whole, **{path: value}))
    got = repr(value)
    assert f"{path.replace('__', '.')}: got {got}, derived {derived}" in str(refused.value)


def test_a_changed_copy_is_refused_with_the_numbers_it_kept():
    record = read(VALID["cross"])
    wider = record.model_copy(update={"heads": read(VALID["article"]).heads})
    with pytest.raises(NotAdmitted, match=r"projection.q.out_features: got 15, derived 512") as refused:
        admit(wider)
    assert [reason.code for reason in refused.value.reasons] == ["derived"]
    with pytest.raises(ValidationError, match="frozen"):
        record.call.q_state_id = "other"


@pytest.mark.parametrize(
    "path, value",
    [
        ("call.q_len", "8"),
        ("call.q_len", 8.5),
        ("call.q_len", -1),
        ("call.batch", True),
        ("call.training", 1),
        ("call.dropout_p", float("nan")),
        ("call.dropout_p", 1.0),
        ("call.dropout_p", "0.1"),
        ("call.mode", "both"),
        ("call.q_state_id", ""),
        ("call.q_state_id", 7),
        ("call.canonical_mask_semantics", "true_is_hidden"),
        ("call.head_count", 3),
        ("call.capture.0", "scores"),
        ("heads.d_qk", 0),
        ("heads.d_model", None),
        ("checkpoint.fused_order.1", "x"),
        ("checkpoint.layout", "packed"),
        ("runtime.output_dtype", "BF16!"),
        ("runtime.versions", {}),
        ("extra", 1),
    ],
)
def test_json_is_strict_and_the_path_is_named(path, value):
    data = edited(VALID["cross"], call__capture=["heads"])
    keys = [int(name) if name.isdigit() else name for name in path.split(".")]
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    with pytest.raises(ValidationError) as refused:
        read(data)
    places = [".".join(map(str, fault["loc"])) for fault in refused.value.errors()]
    assert places and all(place.startswith(path) for place in places)


def test_a_field_given_twice_is_refused():
    text = json.dumps(VALID["cross"]).replace('"batch": 2,', '"batch": 2, "batch": 3,')
    with pytest.raises(ValueError, match="batch is given twice"):
        Manifest.from_json(text)
    assert set(get_args(manifest_form.Capture)) == set(CAPTURES)


def leaves(data: Any, path: tuple = ()):
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        if isinstance(value, (dict, list)) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


WHOLE = {name: json.loads(read(data).to_json()) for name, data in VALID.items()}
OTHERS = st.one_of(
    st.integers(-2, 600), st.none(), st.booleans(), st.sampled_from(["A", "q", "k", "v", "self", SOURCE, ""])
)


# In a whole record, these make none of the numbers that stand beside them.
FREE = {("heads", "d_model"), ("heads", "variant"), ("heads", "spec")}


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.sampled_from(sorted(WHOLE)), OTHERS)
def test_any_other_field_is_refused_or_makes_another_record(name, value):
    record, whole = read(WHOLE[name]), WHOLE[name]
    for path, before in leaves(whole):
        if type(value) is type(before) and value == before:
            continue
        changed = copy.deepcopy(whole)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        try:
            other = read(changed)
        except ValueError:
            continue
        makes_numbers = path[0] in ("projection", "heads") or path[-1].endswith("_state_id")
        assert not makes_numbers or path in FREE, f"{path}: numbers of another record were trusted"
        assert other != record or before == value == 0, path  # 0 for 0.0


def test_the_published_schema_is_that_of_the_code_and_is_shipped():
    file = importlib.resources.files("jaxattn") / "manifest.schema.json"
    published = json.loads(file.read_text())
    assert published == schema(), "write it anew: see docs/manifest.md"
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "jaxattn" in wheel["packages"] and not {"exclude", "only-include", "include"} & set(wheel)
    jsonschema.Draft202012Validator.check_schema(published)
    check = jsonschema.Draft202012Validator(published)
    for name in VALID:
        check.validate(VALID[name])
        check.validate(WHOLE[name])
    for edits in (
        dict(extra=1),
        dict(call__extra=1),
        dict(call__q_len="8"),
        dict(call__mode="both"),
        dict(heads__v_heads=None),
        dict(call__q_state_id=""),
        dict(projection__q__span=[0]),
    ):
        with pytest.raises(jsonschema.ValidationError):
            check.validate(edited(WHOLE["cross"], **edits))


# Real calls

MODEL, ROWS, KEYS = 11, 5, 7
OPTIONS = {
    "mohsa": {"overlap": 2},
    "talking_heads": dict(logit_heads=3, softmax_heads=5, value_heads=2),
    "moh": {"shared": 1, "top_k": 2},
    "collab": {"width": 12, "content_bias": False},
}
PLAIN = ja.attention(ja.HeadSpec(model=MODEL, heads=3, d_qk=6, d_v=2, in_k=13, in_v=17, bias_v=True,
                                 dropout=0.1, head_dropout=0.2))  # fmt: skip
IDS: dict[str, Any] = dict(manifest_id="l3", q_origin="target:17", source_origin="source:7", checkpoint="r19")


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def shaped(attn, dtype="float32"):
    return jax.eval_shape(lambda: attn.init(jax.random.key(0), dtype))


PARAMS = shaped(PLAIN)
CROSS = PARAMS, struct(2, ROWS, MODEL), (struct(2, KEYS, 13), struct(2, KEYS, 17))


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_a_real_call_of_every_variant_is_admitted(name):
    attn = ja.attention(
        ja.HeadSpec(model=MODEL, heads=4, d_qk=6, d_v=3), variants.VARIANTS[name](**OPTIONS.get(name, {}))
    )
    params = shaped(attn)
    own_stream = dict(IDS, source_origin=None, mask_owner="decoder_causal")
    record = attn.manifest(params, struct(2, ROWS, MODEL), mask=ja.causal(), **own_stream)
    admit(record, Current(release_id="r19", adapter_id=None, source_state_id="target:17"))
    assert Manifest.from_json(record.to_json()) == record
    assert record.heads.variant == (() if name == "mha" else (repr(attn.links[0]),))
    roles = dict(q="query", k="key", v="value")
    for role, group in roles.items():
        width, *heads = params[group]["kernel"].shape
        linear = getattr(record.projection, role)
        assert (linear.in_features, linear.out_features) == (width, heads[0] * heads[1])
    h, v, m = params["out"]["kernel"].shape
    assert record.projection.o.stored_shape == (h * v, m)
    told = attn.explain(2, ROWS, ROWS, ja.causal())
    assert record.runtime.chosen_backend == told.chosen == "dense"
    assert list(record.runtime.eligible_backends) == told.eligible
    assert record.runtime.versions.model_dump() == told.versions and record.runtime.device == told.device
    assert record.runtime.observed_backend is None and record.runtime.observation_method is None
    crossed = attn.manifest(params, struct(2, 1, MODEL), struct(2, KEYS, MODEL), **IDS)
    assert (crossed.call.mode, crossed.call.q_len, crossed.call.k_len) == ("cross", 1, KEYS)
    admit(crossed)


def test_the_record_says_what_the_call_is():
    record = PLAIN.manifest(
        *CROSS, ja.padding(jnp.ones((2, KEYS), bool)), **IDS, mask_owner="decoder_cross",
        engine="blocked", checkpoint_dtype=jnp.bfloat16,
    )  # fmt: skip
    call, heads = record.call, record.heads
    assert (call.mode, call.batch, call.q_len, call.k_len) == ("cross", 2, ROWS, KEYS)
    assert (call.q_state_id, call.k_state_id, call.v_state_id) == ("target:17", "source:7", "source:7")
    assert (call.visibility_axes, call.mask) == ("[B,1,Q,K]", f"padding(b k: 2x{KEYS})")
    assert (call.training, call.deterministic, call.need_weights) == (False, True, False)
    assert (heads.in_q, heads.in_k, heads.in_v, heads.out) == (MODEL, 13, 17, MODEL)
    assert [getattr(record.projection, r).bias for r in "qkvo"] == [False, False, True, False]
    assert record.projection.k.stored_shape == (13, 18) and record.projection.v.stored_shape == (17, 6)
    assert (record.checkpoint.release_id, record.checkpoint.layout) == ("r19", "separate")
    runtime = record.runtime
    assert (runtime.requested_backend, runtime.chosen_backend) == ("blocked", "blocked")
    assert runtime.checkpoint_dtype == "bfloat16" and runtime.framework_version == ja.__version__
    by_head = ja.explicit(np.ones((3, ROWS, KEYS), bool), axes="h q k")
    assert PLAIN.manifest(*CROSS, by_head, **IDS).call.visibility_axes == "[B,H,Q,K]"


def test_dtypes_are_those_of_the_arrays_that_the_call_makes():
    for states, parameters in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float64", "float64")):
        params = jax.tree.map(lambda x, d=parameters: jnp.ones(x.shape, d), PARAMS)
        x = (
            jnp.ones((2, ROWS, MODEL), states),
            jnp.ones((2, KEYS, 13), states),
            jnp.ones((2, KEYS, 17), states),
        )
        runtime = PLAIN.manifest(params, x[0], x[1:], **IDS).runtime
        y, aux = PLAIN.apply(params, x[0], x[1:], capture=("weights", "heads"))
        assert runtime.output_dtype == y.dtype.name
        assert runtime.parameter_dtype == parameters and runtime.checkpoint_dtype is None
        assert runtime.projected_activation_dtype == PLAIN.query_side(params, x[0]).query.dtype.name
        assert runtime.score_accumulation_dtype == aux.captured["weights"].dtype.name
        assert runtime.probability_value_dtype == aux.captured["heads"].dtype.name
    mixed = {**PARAMS, "out": shaped(PLAIN, "bfloat16")["out"]}
    assert PLAIN.manifest(mixed, *CROSS[1:], **IDS).runtime.parameter_dtype is None


def test_a_drawn_call_cannot_be_marked_deterministic():
    key = jax.random.key(0)
    record = PLAIN.manifest(*CROSS, **IDS, dropout_key=key)
    assert (record.call.training, record.call.dropout_p, record.call.head_dropout_p) == (True, 0.1, 0.2)
    assert record.call.deterministic is False
    admit(record)
    with pytest.raises(NotAdmitted, match=r"stochastic: .*dropout_p = 0.1 and call.head_dropout_p = 0.2"):
        admit(PLAIN.manifest(*CROSS, **IDS, dropout_key=key, deterministic=True))
    quiet = ja.attention(ja.HeadSpec(model=MODEL, heads=1))
    alone = dict(IDS, source_origin=None)
    marked = quiet.manifest(shaped(quiet), struct(ROWS, MODEL), **alone, dropout_key=key, deterministic=True)
    assert admit(marked).manifest.call.batch == 1 and marked.call.dropout_p == 0


@pytest.mark.parametrize("engine", [name for name, e in ja.ENGINES.items() if "weights" not in e.captures])
def test_weights_are_refused_by_what_engines_declare(engine):
    data = edited(VALID["cross"], **PRINT, runtime__requested_backend=engine)
    with pytest.raises(NotAdmitted, match=f"weights: .*engine '{engine}' never holds it"):
        admit(read(data))
    if engine == "blocked":  # the others cannot run here at all
        with pytest.raises(ValueError, match="never holds weights"):
            PLAIN.manifest(*CROSS, **IDS, engine=engine, capture=("weights",))
    shown = PLAIN.manifest(*CROSS, **IDS, capture=("weights", "heads"))
    assert shown.call.need_weights and shown.call.capture == ("weights", "heads")
    assert admit(shown).manifest.runtime.chosen_backend == "dense"


def test_what_explain_cannot_be_told_stays_null():
    bias = struct(3, ROWS, KEYS)
    for options in (dict(bias=bias), dict(positions=(jnp.arange(ROWS), jnp.arange(KEYS)))):
        runtime = PLAIN.manifest(*CROSS, **IDS, **options).runtime
        assert runtime.eligible_backends is None and runtime.chosen_backend is None
    runtime = PLAIN.manifest(*CROSS, **IDS, bias=bias, engine="dense").runtime
    assert runtime.chosen_backend == "dense" and runtime.versions is not None
    many = PLAIN.manifest(PARAMS, struct(2, 3, ROWS, MODEL), (struct(2, 3, KEYS, 13), struct(2, 3, KEYS, 17)),
                          ja.padding(jnp.ones((2, 3, KEYS), bool)), **IDS)  # fmt: skip
    assert many.call.batch == 6 and many.runtime.eligible_backends is None
    with pytest.raises(ValueError, match="x_k: axis m is 12, expected 13"):
        PLAIN.manifest(PARAMS, struct(2, ROWS, MODEL), (struct(2, KEYS, 12), struct(2, KEYS, 17)), **IDS)


def test_a_kernel_is_observed_only_where_the_program_names_it(monkeypatch):
    routed = ja.attention(ja.HeadSpec(model=MODEL, heads=4, d_qk=6, d_v=3), variants.moh(shared=1, top_k=2))
    call = shaped(routed), struct(2, ROWS, MODEL), struct(2, KEYS, MODEL)
    record = routed.manifest(*call, **IDS, engine="blocked", observe=True)  # whose router has a kernel
    assert record.runtime.observed_backend is None and record.runtime.observation_id is None
    real = ja.Attention.explain

    def seen(attn, *rows, observe=False, engine="auto", **named):
        kernels = ["gemm"] if engine == "dense" else ["gemm", "flash"]
        told = real(attn, *rows, engine=engine, **named)
        return told._replace(observed=kernels, method="a trace") if observe else told

    monkeypatch.setattr(ja.Attention, "explain", seen)
    runtime = routed.manifest(*call, **IDS, engine="blocked", observe=True).runtime
    assert runtime.observed_backend == "flash"
    assert runtime.observation_method == "a trace, less those of engine 'dense'"
    assert runtime.observation_id.startswith("explain:sha256:")
    admit(record.model_copy(update={"runtime": runtime}))
    assert routed.manifest(*call, **IDS, engine="blocked").runtime.observed_backend is None


def test_a_key_side_that_stands_says_whose_it_is():
    side = jax.eval_shape(PLAIN.key_side, PARAMS, CROSS[2])
    row = struct(2, 1, MODEL)
    with pytest.raises(ValueError, match="kv_projected_by is None"):
        PLAIN.manifest(PARAMS, row, side, **IDS)
    record = PLAIN.manifest(PARAMS, row, side, **IDS, kv_projected_by=Release(release_id="r19"))
    assert (record.call.q_len, record.call.k_len, record.runtime.chosen_backend) == (1, KEYS, "dense")
    admit(record)
    stale = PLAIN.manifest(PARAMS, row, side, **IDS, kv_projected_by=Release(release_id="r18"))
    assert shapes(stale) == shapes(record)
    with pytest.raises(NotAdmitted, match="release: .*'r18'.*'r19'"):
        admit(stale)
    attn = ja.attention(ja.HeadSpec(model=MODEL, heads=1))
    cache = attn.empty_cache(2, KEYS)
    stream = dict(IDS, source_origin="target:17", mode="self", kv_projected_by=Release(release_id="r19"))
    record = attn.manifest(shaped(attn), struct(2, 1, MODEL), cache.side, **stream)
    assert (record.call.q_len, record.call.k_len) == (1, KEYS)
    admit(record)


def test_identities_that_are_missing_or_false_are_refused():
    with pytest.raises(ValueError, match="x_kv is given without source_origin"):
        PLAIN.manifest(*CROSS, **dict(IDS, source_origin=None))
    with pytest.raises(NotAdmitted, match="cross_source: .*'source:7'.*'source:6'"):
        admit(PLAIN.manifest(*CROSS, **dict(IDS, source_origin=("source:7", "source:6"))))
    with pytest.raises(NotAdmitted, match="cross_target: .*one: .*'target:17'"):
        admit(PLAIN.manifest(*CROSS, **dict(IDS, source_origin="target:17")))
    whole = Checkpoint(release_id="r19", layout="separate", stored_orientation="in_out", biases=("q",))
    with pytest.raises(ValueError, match=r"biases = \['q'\], but params has biases for \['v'\]"):
        PLAIN.manifest(*CROSS, **dict(IDS, checkpoint=whole))
    with pytest.raises(ValidationError, match="mode"):
        PLAIN.manifest(*CROSS, **IDS, mode="both")


def test_a_wrong_origin_of_the_same_shape_is_refused_before_any_projection(monkeypatch):
    """The same arrays, the same shapes: without the gate the wrong call runs and looks right."""
    spec = ja.HeadSpec(model=MODEL, heads=1)
    attn = ja.attention(spec)
    params = attn.init(jax.random.key(0))
    x, source = jnp.ones((2, ROWS, MODEL)), jnp.full((2, ROWS, MODEL), 2.0)
    right = attn.manifest(params, x, source, **IDS)
    wrong = attn.manifest(params, x, source, **dict(IDS, source_origin=("source:7", "source:6")))
    assert shapes(wrong) == shapes(right) and wrong != right
    projected = []
    real = ja.project.project
    monkeypatch.setattr(ja.project, "project", lambda *a: projected.append(a) or real(*a))

    def gated(record):
        admit(record, Current(release_id="r19", source_state_id="source:7"))
        return attn.apply(params, x, source)[0]

    with pytest.raises(NotAdmitted) as refused:
        gated(wrong)
    assert not projected and {r.code for r in refused.value.reasons} == {"cross_source", "state"}
    assert gated(right).shape == x.shape and len(projected) == 3
    table.assert_close(gated(right), attn.apply(params, x, source)[0], 1e-15, "the gate changes nothing")


def test_without_pydantic_the_package_works_and_the_error_names_the_extra():
    program = """if True:
        import sys
        sys.modules["pydantic"] = None
        import jax, jaxattn as ja
        attn = ja.attention(ja.HeadSpec(model=4, heads=2))
        x = jax.ShapeDtypeStruct((3, 4), "float32")
        params = jax.eval_shape(attn.init, jax.random.key(0))
        try:
            attn.manifest(params, x, manifest_id="l0", q_origin="x", checkpoint="r1")
        except ImportError as error:
            print(error)
        try:
            import jaxattn.manifest
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    fix = 'jaxattn.manifest needs pydantic, which is not installed. Fix: pip install "jaxattn[manifest]".'
    assert done.stdout.splitlines() == [fix, fix]
