"""explain: which engines can run a call and why the others cannot, and what is known to have run."""

import re
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.typing import DTypeLike

from jaxattn.attend import checked_call
from jaxattn.engines import ENGINES, routes, select
from jaxattn.masks import Mask, as_mask

METHOD = "custom calls in the compiled program"
_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')


class Explanation(NamedTuple):
    """One call's runtime record; prints as lines, `_asdict` is plain data.

    Attributes:
        versions: of jax, jaxlib and the backend.
        device: platform and kind of the default device.
        shapes: axes and type of query, key and value heads.
        mask: the mask as it prints; True = visible.
        need: intermediates that were asked for, and whether dropout is drawn.
        requested, chosen: the engine that you passed and the one that runs.
        eligible: engines that accept this call.
        refused: the others, each with its reason.
        observed: kernel names found in the compiled program; None where none is visible, or it was not
            compiled (`observe`).
        method: how they were found, or None.
    """

    versions: dict[str, str]
    device: str
    shapes: dict[str, str]
    mask: str
    need: dict[str, Any]
    requested: str
    chosen: str
    eligible: list[str]
    refused: dict[str, str]
    observed: list[str] | None
    method: str | None

    def __str__(self) -> str:
        lines = [f"engine {self.requested!r} runs {self.chosen!r} on {self.device}"]
        lines += [f"  {name}: {shape}" for name, shape in self.shapes.items()]
        lines += [f"  mask: {self.mask} (True = visible)", f"  eligible: {', '.join(self.eligible)}"]
        lines += [f"  not {name}: {why}" for name, why in self.refused.items()]
        found = "nothing" if self.observed is None else ", ".join(self.observed)
        lines.append(f"  observed: {found}" + (f" (by {self.method})" if self.method else ""))
        return "\n".join(lines)


def explain(
    attn: Any,
    batch: int,
    q_len: int,
    k_len: int,
    mask: Mask | None = None,
    *,
    engine: str = "auto",
    dtype: DTypeLike = jnp.float32,
    dropout: bool = False,
    capture: tuple[str, ...] = (),
    observe: bool = False,
) -> Explanation:
    """Which engine runs a call of these shapes, which could, and why the others cannot.

    `requested` is the engine you passed, `eligible` are the engines that accept this call, `observed` are
    kernel names found in the compiled program, or None if none is visible.

    Args:
        attn: what `attention` made; this is also its method.
        batch, q_len, k_len: rows.
        mask, engine, capture: as in `apply`.
        dtype: of states and parameters.
        dropout: whether a dropout key is given.
        observe: compile the call and look for kernels in it.

    Raises:
        ValueError: as the call itself would, for what cannot run.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> attn = attention(HeadSpec(model=6, heads=2))
        >>> record = attn.explain(batch=2, q_len=5, k_len=5, engine="blocked")
        >>> record.chosen, "blocked" in record.eligible, record.observed
        ('blocked', True, None)
    """
    spec, calls = attn.spec, []
    key = jax.random.key(0) if dropout else None
    params = jax.eval_shape(lambda: attn.init(jax.random.key(0), dtype))
    states = [
        ShapeDtypeStruct((batch, n, m), dtype)
        for n, m in ((q_len, spec.in_q), (k_len, spec.in_k), (k_len, spec.in_v))
    ]

    def look(params, x_q, x_k, x_v) -> Array:
        key_side, coupling = attn.expand(attn.key_side(params, (x_k, x_v))), attn.coupling(params)
        for routed in (False, True):
            if not routed or attn.why_not_routed() is None:
                query_side = attn.query_side(params, x_q, routed=routed)
                calls.append(checked_call(query_side, key_side, coupling, mask, None, key, capture))
        return x_q

    jax.eval_shape(look, params, *states)
    call = calls[-1 if routes(engine) else 0]
    chosen = select(engine, call)
    reasons = {
        name: (row.routes and attn.why_not_routed()) or row.why_not(calls[-1 if row.routes else 0])
        for name, row in ENGINES.items()
    }
    observed = None
    if observe:

        def run(params, x_q, x_k, x_v):
            options = dict(engine=engine, dropout_key=key, capture=capture)
            return attn.apply(params, x_q, (x_k, x_v), mask, **options)[0]

        text = jax.jit(run).lower(params, *states).compile().as_text() or ""
        observed = sorted(set(_CUSTOM_CALL.findall(text))) or None
    sides = {"query": call.query.query, "key": call.key.key, "value": call.key.value}
    device = jax.devices()[0]
    backend = device.client.platform_version
    return Explanation(
        versions={"jax": jax.__version__, "jaxlib": version("jaxlib"), "backend": backend},
        device=f"{device.platform} ({device.device_kind})",
        shapes={n: f"[b, t, h, d] = {list(x.shape)} {x.dtype}" for n, x in sides.items()},
        mask=repr(as_mask(mask)),
        need={"capture": list(capture), "dropout": dropout},
        requested=engine,
        chosen=chosen.name,
        eligible=[name for name, why in reasons.items() if why is None],
        refused={name: why for name, why in reasons.items() if why is not None},
        observed=observed,
        method=METHOD if observed else None,
    )
