"""The manifest of a real call: sizes and dtypes from arrays, engines from `explain`, ids from the caller."""

import hashlib
import math
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
from jax import Array, ShapeDtypeStruct
from jax.typing import DTypeLike

from jaxattn.axes import at_least_float32
from jaxattn.explain import Explanation
from jaxattn.masks import Mask, as_mask
from jaxattn.sides import Coupling, KeySide

if TYPE_CHECKING:
    from jaxattn.manifest_form import Checkpoint, Heads, Manifest, MaskOwner, Release

PyTree = Any
States = Array | ShapeDtypeStruct
KERNELS = ("fused",)  # engines that hand the call to a kernel whose inside is its own


def manifest(
    attn: Any,
    params: PyTree,
    x_q: States,
    x_kv: States | tuple[States, States] | KeySide | None = None,
    mask: Mask | None = None,
    *,
    manifest_id: str,
    q_origin: str,
    source_origin: str | tuple[str, str] | None = None,
    checkpoint: "Checkpoint | str",
    kv_projected_by: "Release | None" = None,
    mode: Literal["self", "cross"] | None = None,
    mask_owner: "MaskOwner" = "external",
    training: bool | None = None,
    deterministic: bool | None = None,
    checkpoint_dtype: DTypeLike | None = None,
    bias: States | None = None,
    engine: str = "auto",
    dropout_key: Array | None = None,
    positions: Array | tuple[Array | None, Array | None] | None = None,
    capture: tuple[str, ...] = (),
    remask: bool = False,
    observe: bool = False,
) -> "Manifest":
    """The record of one call, for `jaxattn.manifest.admit`; nothing is computed.

    Ids come from the caller and are not verified: `admit` compares them. Sizes and dtypes are read from the
    arrays and from the traced call, engines from `explain`. `null` means: not measured. That is so for dtypes
    inside a kernel, and for the eligible engines of a call that `explain` cannot describe (bias, positions,
    `remask`, several batch axes, states of several types, or a key side with `valid`).

    Args:
        attn: what `attention` made; this is also its method.
        params, x_q, mask, bias, engine, dropout_key, positions, capture, remask: as in `apply`; states and
            parameters may be `jax.ShapeDtypeStruct`.
        x_kv: as in `apply`, or a key side that was projected before, as in `attend`.
        manifest_id: a name for the record.
        q_origin: id of the state in x_q.
        source_origin: id of the source, or a pair for keys and values; left out in self-attention.
        checkpoint: the record of the parameters' release, or its id alone: separate tensors, [in, out].
        kv_projected_by: whose weights made the key side, where x_kv is one.
        mode: "self" or "cross"; default self without x_kv. A cache of the queries' own stream is "self".
        mask_owner: "encoder_self", "decoder_causal", "decoder_cross" or "external".
        training: default whether a dropout key is given.
        deterministic: whether equal inputs give equal outputs; default whether no dropout is drawn.
        checkpoint_dtype: of the parameters as they were persisted.
        observe: compile the call twice, once by engine "dense", and record the kernels that only the chosen
            engine's program names.

    Raises:
        ValueError, TypeError: as the call itself would; for an origin that is missing.
        ImportError: without pydantic.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> attn = attention(HeadSpec(model=6, heads=2))
        >>> params = jax.eval_shape(attn.init, jax.random.key(0))
        >>> x = jax.ShapeDtypeStruct((2, 5, 6), "bfloat16")
        >>> record = attn.manifest(params, x, manifest_id="l0", q_origin="x:1", checkpoint="r19")
        >>> record.call.mode, record.projection.q.out_features, record.runtime.output_dtype
        ('self', 6, 'float32')
    """
    from jaxattn import __version__  # which is being imported when this module is
    from jaxattn import manifest_form as form  # needs pydantic, an extra

    call = _trace(attn, params, x_q, x_kv, mask, bias, engine, dropout_key, positions, capture, remask)
    origins = _origins(x_kv, q_origin, source_origin)
    if isinstance(x_kv, KeySide) and kv_projected_by is None:
        raise ValueError(
            "manifest: x_kv is a key side, projected before this call, and kv_projected_by is None. "
            "Fix: kv_projected_by=Release(release_id=...), of the parameters that made it."
        )
    drawn = dropout_key is not None
    rates = [rate if drawn else 0.0 for rate in (call.coupling.dropout, call.coupling.head_dropout)]
    asked = as_mask(mask)
    padded = isinstance(x_kv, KeySide) and x_kv.valid is not None
    untold = bias is not None or positions is not None or remask or padded or len(call.batch) > 1
    told = not untold and _one(call.heads) is not None
    return form.Manifest(
        manifest_id=manifest_id,
        call=form.Call(
            mode=mode or ("self" if x_kv is None else "cross"),
            batch=math.prod(call.batch),
            q_len=call.q_len,
            k_len=call.k_len,
            **origins,
            kv_projected_by=kv_projected_by,
            mask_owner=mask_owner,
            canonical_mask_semantics="true_is_visible",
            visibility_axes="[B,H,Q,K]" if asked.has_heads else "[B,1,Q,K]",
            mask=repr(asked),
            training=drawn if training is None else training,
            dropout_p=float(rates[0]),
            head_dropout_p=float(rates[1]),
            deterministic=not any(rates) if deterministic is None else deterministic,
            need_weights="weights" in capture or "mixed_weights" in capture,
            capture=tuple(capture),  # pyright: ignore[reportArgumentType]  (names, checked as they come in)
        ),
        heads=_heads(form, attn, params),
        checkpoint=_checkpoint(form, checkpoint, params),
        runtime=form.Runtime(
            framework="jaxattn",
            framework_version=__version__,
            requested_backend=engine,
            checkpoint_dtype=None if checkpoint_dtype is None else jax.numpy.dtype(checkpoint_dtype).name,
            **_dtypes(params, call, engine),
            **_engines(form, attn, call, mask, engine, drawn, capture, told, observe),
        ),
    )


class _Traced(NamedTuple):
    """Shapes and types of the call's traced program; nothing is run."""

    batch: tuple[int, ...]
    q_len: int
    k_len: int
    heads: list[Any]
    output: Any
    coupling: Coupling


def _trace(attn, params, x_q, x_kv, mask, bias, engine, dropout_key, positions, capture, remask) -> _Traced:
    named = dict(engine=engine, capture=capture, remask=remask)

    def run(params, x_q, x_kv, bias, dropout_key, positions):
        options = dict(named, bias=bias, dropout_key=dropout_key, positions=positions)
        if isinstance(x_kv, KeySide):
            y, _ = attn.attend(params, x_q, x_kv, mask, **options)
            side = x_kv
        else:
            y, _ = attn.apply(params, x_q, x_kv, mask, **options)
            side = attn.key_side(params, x_q if x_kv is None else x_kv)
        heads = [attn.query_side(params, x_q).query, side.key, side.value]
        return y, heads, attn.coupling(params)

    y, heads, coupling = jax.eval_shape(run, params, x_q, x_kv, bias, dropout_key, positions)
    return _Traced(x_q.shape[:-2], x_q.shape[-2], heads[1].shape[-3], heads, y, coupling)


def _origins(x_kv: Any, q_origin: str, source_origin: str | tuple[str, str] | None) -> dict[str, str]:
    if source_origin is None and x_kv is not None:
        raise ValueError("manifest: x_kv is given without source_origin. Fix: the id of the state in x_kv.")
    source = q_origin if source_origin is None else source_origin
    k_origin, v_origin = source if isinstance(source, tuple) else (source, source)
    return dict(q_state_id=q_origin, k_state_id=k_origin, v_state_id=v_origin)


def _heads(form: ModuleType, attn: Any, params: PyTree) -> "Heads":
    """Counts and widths of the kernels that are there."""
    (in_q, q_heads, d_qk), (in_k, kv_heads, _), (in_v, v_heads, d_v), (o_heads, d_o, out) = (
        params[role]["kernel"].shape for role in ("query", "key", "value", "out")
    )
    return form.Heads(
        q_heads=q_heads, kv_heads=kv_heads, v_heads=v_heads, o_heads=o_heads, d_qk=d_qk, d_v=d_v, d_o=d_o,
        d_model=attn.spec.model, in_q=in_q, in_k=in_k, in_v=in_v, out=out,
        variant=tuple(repr(link) for link in attn.links if link.changes), spec=repr(attn.spec),
    )  # fmt: skip


def _checkpoint(form: ModuleType, given: "Checkpoint | str", params: PyTree) -> "Checkpoint":
    """The checkpoint's record, with the biases that are there."""
    roles = dict(q="query", k="key", v="value", o="out")
    biases = tuple(role for role, group in roles.items() if params[group].get("bias") is not None)
    if isinstance(given, str):
        return form.Checkpoint(
            release_id=given, layout="separate", stored_orientation="in_out", biases=biases
        )
    if given.biases is not None and set(given.biases) != set(biases):
        raise ValueError(
            f"manifest: checkpoint.biases = {list(given.biases)}, but params has biases for {list(biases)}. "
            "Fix: the parameters of this checkpoint, or leave biases out."
        )
    return given.model_copy(update={"biases": biases})


def _dtypes(params: PyTree, call: _Traced, engine: str) -> dict[str, str | None]:
    """Types along the path, as the traced program has them; inside a kernel they are not known."""
    kernels = [params[role]["kernel"] for role in ("query", "key", "value", "out")]
    query, _, value = call.heads
    inside = engine not in KERNELS
    scores = at_least_float32(query.dtype)
    return dict(
        parameter_dtype=_one(kernels),
        projection_compute_dtype=_one(call.heads),  # `project` multiplies in the type that it returns
        projected_activation_dtype=_one(call.heads),
        score_accumulation_dtype=scores.name if inside else None,
        probability_value_dtype=value.dtype.name if inside else None,
        output_dtype=call.output.dtype.name,
    )


def _one(arrays: list[Any]) -> str | None:
    """The name of the type that all have, or None."""
    names = {array.dtype.name for array in arrays}
    return names.pop() if len(names) == 1 else None


def _engines(form, attn, call, mask, engine, drawn, capture, told, observe) -> dict[str, Any]:
    rows = dict(batch=math.prod(call.batch), q_len=call.q_len, k_len=call.k_len)
    if not told:  # versions and device are the same for every call
        named = None if engine == "auto" else engine
        return _host(form, attn.explain(**rows)) | dict(chosen_backend=named)
    rows |= dict(mask=mask, dtype=call.heads[0].dtype, dropout=drawn, capture=capture)
    record = attn.explain(**rows, engine=engine)
    picked = dict(eligible_backends=tuple(record.eligible), chosen_backend=record.chosen)
    seen = _observed(attn, rows, engine) if observe and record.chosen != "dense" else {}
    return _host(form, record) | picked | seen


def _observed(attn, rows: dict[str, Any], engine: str) -> dict[str, Any]:
    """The kernels that this engine's program has and that of "dense" has not: those of attention alone."""
    seen, plain = (attn.explain(**rows, engine=name, observe=True) for name in (engine, "dense"))
    kernels = [name for name in seen.observed or () if name not in (plain.observed or ())]
    if not kernels:
        return {}
    digest = hashlib.sha256(repr(seen).encode()).hexdigest()
    return dict(
        observed_backend=", ".join(kernels),
        observation_id=f"explain:sha256:{digest}",
        observation_method=f"{seen.method}, less those of engine 'dense'",
    )


def _host(form, record: Explanation) -> dict[str, Any]:
    return dict(versions=form.Versions(**record.versions), device=record.device)
