"""The call manifest as a value: what one attention call is, by identity and not by shape alone.

    projection   derived: what each of Q, K, V, O reads, its logical map, its rows of a fused tensor
    heads        head counts and widths
    call         self or cross, origins of Q, K and V, visibility, dropout, requested outputs
    checkpoint   release, adapter, how the four matrices are stored
    runtime      versions, each dtype along the path, requested and observed backend

Source: the call manifest of the multi-head attention article, sections 0x01A and 0x0B0.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

try:
    from pydantic import BaseModel, ConfigDict, Field, model_validator
except ImportError as error:
    raise ImportError(
        'jaxattn.manifest needs pydantic, which is not installed. Fix: pip install "jaxattn[manifest]".'
    ) from error

Id = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]
DType = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
Role = Literal["q", "k", "v"]
Capture = Literal["logits", "mixed_logits", "weights", "mixed_weights", "heads"]
MaskOwner = Literal["encoder_self", "decoder_causal", "decoder_cross", "external"]


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default")


def _derived() -> Any:
    """A field that is filled in from others where it is left out; a schema can only say that it may be."""
    return Field(default=None, json_schema_extra=_without_default)


class Record(BaseModel):
    """Frozen; unknown fields, other types and numbers that are not finite are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Release(Record):
    """Whose weights: a checkpoint's release and the adapter on it (null: none)."""

    release_id: Id
    adapter_id: Id | None = None


class Call(Record):
    """What the call reads and what is asked of it.

    Attributes:
        mode: "self" (one state) or "cross" (a target's queries, a source's keys and values).
        batch, q_len, k_len: rows; batch is the product of all batch axes.
        q_state_id, k_state_id, v_state_id: the states that Q, K and V are projected from.
        kv_projected_by: whose weights made K and V, where they were projected before; null: the call's own.
        mask_owner: who decides visibility.
        canonical_mask_semantics: the one polarity.
        visibility_axes: logical axes of the mask; mask: what it is, in words.
        training: the mode of the model, as the caller states it.
        dropout_p, head_dropout_p: rates that this call draws with, 0 where it draws nothing.
        deterministic: whether equal inputs give equal outputs, as the caller states it; null: not stated.
        need_weights: whether attention weights are asked for; capture: every intermediate asked for.
    """

    mode: Literal["self", "cross"]
    batch: Count
    q_len: Count
    k_len: Count
    q_state_id: Id
    k_state_id: Id
    v_state_id: Id
    kv_projected_by: Release | None = None
    mask_owner: MaskOwner
    canonical_mask_semantics: Literal["true_is_visible"]
    visibility_axes: Literal["[B,1,Q,K]", "[B,H,Q,K]"] | None = None
    mask: str | None = None
    training: bool
    dropout_p: Rate
    head_dropout_p: Rate = 0.0
    deterministic: bool | None = None
    need_weights: bool
    capture: tuple[Capture, ...] = ()


class Heads(Record):
    """Head counts and widths, as the four matrices have them.

    Attributes:
        q_heads, kv_heads: heads of W_Q and W_K.
        d_qk, d_v: widths of a query/key head and of a value head.
        d_model: width of the states.
        v_heads: heads of W_V, default kv_heads.
        o_heads, d_o: heads that meet W_O and their width, default q_heads and d_v.
        in_q, in_k, in_v, out: widths of the three states read and of the output, default d_model.
        variant: transforms that work on the heads, in order, with their options; none is plain attention.
        spec: sizes and options as the framework writes them (scale, rotary positions, norms, soft cap, ...);
            null: not known.
    """

    q_heads: Size
    kv_heads: Size
    d_qk: Size
    d_v: Size
    d_model: Size
    v_heads: Size = _derived()
    o_heads: Size = _derived()
    d_o: Size = _derived()
    in_q: Size = _derived()
    in_k: Size = _derived()
    in_v: Size = _derived()
    out: Size = _derived()
    variant: tuple[Id, ...] = ()
    spec: Id | None = None

    @model_validator(mode="after")
    def _resolve(self) -> "Heads":
        _fill(self, v_heads=self.kv_heads, o_heads=self.q_heads, d_o=self.d_v)
        _fill(self, **dict.fromkeys(("in_q", "in_k", "in_v", "out"), self.d_model))
        return self


class Checkpoint(Record):
    """Where the four matrices come from and how they are stored.

    Attributes:
        release_id, adapter_id: as in `Release`.
        layout: three tensors for Q, K and V, or one that holds their outputs one after another.
        stored_orientation: "out_in" as torch stores a linear map, "in_out" as x @ W reads it.
        fused_order: the roles in a fused tensor, first rows first; null where they are separate.
        biases: the roles that have a bias; null: not known.
    """

    release_id: Id
    adapter_id: Id | None = None
    layout: Literal["separate", "fused_qkv"]
    stored_orientation: Literal["out_in", "in_out"]
    fused_order: tuple[Role, Role, Role] | None = None
    biases: tuple[Literal["q", "k", "v", "o"], ...] | None = None


class Versions(Record):
    """The software below the framework."""

    jax: Id
    jaxlib: Id
    backend: Id


class Runtime(Record):
    """What runs the call, and each dtype along its path; null is not known, or not one type.

    Attributes:
        framework, framework_version: who owns the projections and the call.
        versions, device: below it.
        requested_backend: the engine or dispatch that was named.
        eligible_backends, chosen_backend: those that can run the call, and the one that was chosen.
        observed_backend: the kernels that were found in the compiled program, never a copy of the request.
        observation_id, observation_method: which observation says so, and how it was made.
        checkpoint_dtype: of the bytes that were persisted.
        parameter_dtype: of the matrices that the linear maps read.
        projection_compute_dtype: in which x and W are multiplied.
        projected_activation_dtype: of Q, K and V.
        score_accumulation_dtype: of logits and of the softmax's sums.
        probability_value_dtype: of the weights where they meet the values.
        output_dtype: of the output.
    """

    framework: Id
    framework_version: Id
    versions: Versions | None = None
    device: Id | None = None
    requested_backend: Id
    eligible_backends: tuple[Id, ...] | None = None
    chosen_backend: Id | None = None
    observed_backend: Id | None = None
    observation_id: Id | None = None
    observation_method: Id | None = None
    checkpoint_dtype: DType | None = None
    parameter_dtype: DType | None = None
    projection_compute_dtype: DType | None = None
    projected_activation_dtype: DType | None = None
    score_accumulation_dtype: DType | None = None
    probability_value_dtype: DType | None = None
    output_dtype: DType | None = None


class Linear(Record):
    """One learned map: [in_features, out_features].

    Attributes:
        state_id: the state it reads; null for W_O, which reads the heads.
        in_features, out_features: of the logical map, y = x @ W.
        bias: whether it has one; null: not known.
        stored_shape: of its tensor, or of its part of a fused one.
        span: its rows [start, stop) of a fused tensor's outputs; null where it has its own tensor.
    """

    state_id: Id | None
    in_features: Size
    out_features: Size
    bias: bool | None
    stored_shape: tuple[Size, Size]
    span: tuple[Count, Count] | None


class Projection(Record):
    """The four maps, and the outputs that a fused tensor holds in all (null where none is fused)."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    fused_rows: Size | None


class Manifest(Record):
    """An immutable record of one call.

    `projection` follows from the other fields: it may be left out, and where it is given it must equal what
    is derived. Read with `from_json`, ask `admit` before the call.

    Raises:
        ValueError: (pydantic's ValidationError) with the path of each field that does not fit; for derived
            numbers with what came and what is derived.

    Example:
        >>> call = dict(
        ...     mode="self", batch=2, q_len=5, k_len=5, q_state_id="x", k_state_id="x", v_state_id="x",
        ...     mask_owner="encoder_self", canonical_mask_semantics="true_is_visible",
        ...     training=False, dropout_p=0.0, need_weights=False)
        >>> store = dict(
        ...     release_id="r1", layout="fused_qkv", stored_orientation="out_in", fused_order=("q", "k", "v"))
        >>> record = Manifest(
        ...     manifest_id="encoder.l0", call=Call(**call), checkpoint=Checkpoint(**store),
        ...     heads=Heads(q_heads=2, kv_heads=2, d_qk=4, d_v=3, d_model=8),
        ...     runtime=Runtime(framework="jaxattn", framework_version="0.1.0", requested_backend="auto"))
        >>> record.projection.v.span, record.projection.fused_rows, record.projection.o.stored_shape
        ((16, 22), 22, (8, 6))
        >>> Manifest.from_json(record.to_json()) == record
        True
    """

    manifest_id: Id
    call: Call
    heads: Heads
    checkpoint: Checkpoint
    runtime: Runtime
    projection: Projection = _derived()

    @model_validator(mode="after")
    def _derive(self) -> "Manifest":
        _fill(self, projection=derive(self))
        wrong = list(not_derived(self))
        if wrong:
            raise ValueError("; ".join(wrong) + ". Fix: leave projection out; it is derived.")
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Read a record; a field that is given twice is refused too."""
        record = cls.model_validate_json(text)
        json.loads(text, object_pairs_hook=_no_twins)
        return record

    def to_json(self) -> str:
        """The record as JSON; `from_json` gives an equal one back."""
        return self.model_dump_json(indent=2)


def derive(m: Manifest) -> Projection:
    """The projections that heads, origins and storage make."""
    h, c, store = m.heads, m.call, m.checkpoint
    widths = {"q": h.q_heads * h.d_qk, "k": h.kv_heads * h.d_qk, "v": h.v_heads * h.d_v}
    spans: dict[str, tuple[int, int]] = {}
    rows = 0
    if store.layout == "fused_qkv":
        for role in store.fused_order or ():
            spans[role] = (rows, rows + widths[role])
            rows += widths[role]

    def linear(role: str, state: str | None, inward: int, outward: int) -> Linear:
        stored = (outward, inward) if store.stored_orientation == "out_in" else (inward, outward)
        bias = None if store.biases is None else role in store.biases
        return Linear(
            state_id=state, in_features=inward, out_features=outward, bias=bias,
            stored_shape=stored, span=spans.get(role),
        )  # fmt: skip

    return Projection(
        q=linear("q", c.q_state_id, h.in_q, widths["q"]),
        k=linear("k", c.k_state_id, h.in_k, widths["k"]),
        v=linear("v", c.v_state_id, h.in_v, widths["v"]),
        o=linear("o", None, h.o_heads * h.d_o, h.out),
        fused_rows=rows or None,
    )


def not_derived(m: Manifest) -> Iterator[str]:
    """Each field of `projection` that differs from what is derived, with both."""
    given, derived = m.projection.model_dump(), derive(m).model_dump()
    for role, expected in derived.items():
        pairs = expected if isinstance(expected, dict) else {None: expected}
        for name, value in pairs.items():
            got = given[role] if name is None else given[role][name]
            if got != value:
                path = ".".join(filter(None, ("projection", role, name)))
                yield f"{path}: got {_plain(got)}, derived {_plain(value)}"


def schema() -> dict[str, Any]:
    """The JSON Schema of a manifest; the package ships it as `manifest.schema.json`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def _fill(record: Record, **derived: object) -> None:
    """Set what was left out, before anybody sees the record."""
    for name, value in derived.items():
        if getattr(record, name) is None:
            object.__setattr__(record, name, value)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twins = {name for name in names if names.count(name) > 1}
    if twins:
        raise ValueError(
            f"manifest: {', '.join(sorted(twins))} is given twice. Fix: one value for each field."
        )
    return dict(pairs)
