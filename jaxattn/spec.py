"""HeadSpec: the static sizes of one attention sublayer; Sizes: the same after transforms."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from jaxattn.axes import check_option

DERIVED: Any = None  # a size left out; HeadSpec resolves it


def short_repr(value: Any, **derived: Any) -> str:
    """A frozen dataclass as the call that makes it, without what is default or equals `derived`.

    Example:
        >>> short_repr(Rotary(base=100.0))
        'Rotary(base=100.0)'
    """
    shown = []
    for field in dataclasses.fields(value):
        got = getattr(value, field.name)
        got = got.item() if isinstance(got, np.generic) else got  # a number of numpy says the same
        made = field.default_factory
        usual = field.default if made is dataclasses.MISSING else made()
        usual = derived.get(field.name, usual)
        if not (type(got) is type(usual) and got == usual):
            shown.append(f"{field.name}={got!r}")
    return f"{type(value).__name__}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Rotary:
    """Rotary positions: channel pairs turned by an angle that grows with the position.

    (x_a, x_b) -> (x_a cos - x_b sin, x_a sin + x_b cos), angle = position * base^(-2 j / width)

    Args:
        base: the base of the frequencies.
        pairs: `"half"` pairs channel j with j + width/2 (Llama, GPT-NeoX); `"adjacent"` pairs 2j with
            2j + 1 (the paper). They are the same map up to a fixed order of the channels.
        width: channels of each head that turn, from the first; None is all of them.

    Source: Su et al., RoFormer, 2021, section 3.4.2.
    """

    base: float = 10000.0
    pairs: Literal["half", "adjacent"] = "half"
    width: int | None = None

    def __repr__(self) -> str:
        return short_repr(self)


@dataclasses.dataclass(frozen=True, repr=False)
class HeadSpec:
    """Static sizes of one attention sublayer.

    Attributes:
        model: width m of the states.
        heads: query heads h.
        kv_heads: key and value heads; fewer than `heads` is GQA, one is MQA. Head i reads i // group.
        d_qk, d_v: head widths of query/key and of value; default model // heads.
        in_q, in_k, in_v: widths of the query, key and value states; default model.
        out: width of the output; default model.
        use_bias: whether the four projections have biases; `bias_q`, ... override it one by one.
        scale: factor of the scores; default 1/sqrt(d_qk).
        rotary: rotary positions, or None.
        qk_norm: `"rms"` or `"layer"` normalises each projected query and key head (with a learned scale),
            before rotary positions. qk_norm_eps: what is added to the mean square.
        dropout: rate on the attention weights; `head_dropout`: rate on whole heads. Both act only
            when a dropout key is given. dropout_shared: axes among "b", "h", "q" along which one draw
            of the first serves all rows.
        softcap: c of c * tanh(logits / c), or None.

    Raises:
        ValueError: when sizes do not fit, with the numbers.

    Example:
        >>> HeadSpec(model=512, heads=8, kv_heads=2), HeadSpec(model=512, heads=8).d_qk
        (HeadSpec(model=512, heads=8, kv_heads=2), 64)
    """

    model: int
    heads: int
    kv_heads: int = DERIVED
    d_qk: int = DERIVED
    d_v: int = DERIVED
    in_q: int = DERIVED
    in_k: int = DERIVED
    in_v: int = DERIVED
    out: int = DERIVED
    use_bias: bool = False
    bias_q: bool = DERIVED
    bias_k: bool = DERIVED
    bias_v: bool = DERIVED
    bias_out: bool = DERIVED
    scale: float = DERIVED
    rotary: Rotary | None = None
    qk_norm: Literal["rms", "layer"] | None = None
    qk_norm_eps: float = 1e-6
    dropout: float = 0.0
    head_dropout: float = 0.0
    dropout_shared: tuple[Literal["b", "h", "q"], ...] = ()
    softcap: float | None = None

    def __post_init__(self):
        fill = object.__setattr__
        for name in ("model", "heads"):
            _check_size(name, getattr(self, name))
        if None in (self.d_qk, self.d_v) and self.model % self.heads:
            raise ValueError(
                f"HeadSpec: model = {self.model} does not divide by heads = {self.heads}. "
                "Fix: give d_qk and d_v, or sizes that divide."
            )
        for name, size in self._derived().items():
            if getattr(self, name) is None and name != "scale":
                fill(self, name, size)
        for name in ("kv_heads", "d_qk", "d_v", "in_q", "in_k", "in_v", "out"):
            _check_size(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"HeadSpec: heads = {self.heads} does not divide by kv_heads = {self.kv_heads}. "
                "Fix: each key head must serve the same number of query heads."
            )
        if self.scale is None:
            fill(self, "scale", self._derived()["scale"])
        if not math.isfinite(self.scale):
            raise ValueError(f"HeadSpec: scale = {self.scale}, expected a finite number.")
        for name in ("dropout", "head_dropout"):
            check_rate(f"HeadSpec: {name}", getattr(self, name))
        check_option("HeadSpec: qk_norm", self.qk_norm, (None, "rms", "layer"))
        if not 0 <= self.qk_norm_eps < math.inf:
            raise ValueError(
                f"HeadSpec: qk_norm_eps = {self.qk_norm_eps}, expected a finite number of at least 0."
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"HeadSpec: softcap = {self.softcap}, expected a positive number or None.")
        if self.rotary is not None:
            _check_rotary(self.rotary, self.d_qk)

    def __repr__(self) -> str:
        return short_repr(self, **self._derived())

    def _derived(self) -> dict[str, Any]:
        """What a field is when it is left out."""
        head = None if self.model % self.heads else self.model // self.heads
        width = self.d_qk
        return {
            "kv_heads": self.heads,
            "d_qk": head,
            "d_v": head,
            **dict.fromkeys(("in_q", "in_k", "in_v", "out"), self.model),
            **dict.fromkeys(("bias_q", "bias_k", "bias_v", "bias_out"), self.use_bias),
            "scale": 1 / math.sqrt(width) if isinstance(width, int) and width > 0 else None,
        }


@dataclasses.dataclass(frozen=True)
class Stage:
    """One mix over heads: how many come in and how many go out; `heads_in, heads_out = stage`."""

    heads_in: int
    heads_out: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.heads_in, self.heads_out))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Resolved sizes: what the projections make and what attention sees, apart.

    Transforms edit these in `adapt`; afterwards nothing about sizes is decided anywhere else.
    """

    spec: HeadSpec
    # Projected: the learned kernels [m, heads, width].
    query_heads: int
    key_heads: int
    value_heads: int
    qk_width: int
    value_width: int
    bias_q: bool
    bias_k: bool
    qk_norm: str | None
    rotary_q: Rotary | None
    rotary_k: Rotary | None
    # Attended: logit heads hl -> pre -> softmax heads hs -> post -> output heads hv.
    logit_heads: int
    softmax_heads: int
    output_heads: int
    output_width: int
    pre: tuple[Stage, ...] = ()
    post: tuple[Stage, ...] = ()
    # Output heads with a gate that is not 0 for a token; None is all.
    active_heads: int | None = None
    # Names of transforms that redefined the projections; a second one has nothing to stand on.
    projected_by: tuple[str, ...] = ()
    # A transform whose key bias left out what is constant over keys; no pre mix may follow it.
    key_bias_by: str | None = None

    @classmethod
    def of(cls, spec: HeadSpec) -> "Sizes":
        """The sizes of plain multi-head attention."""
        s = spec
        return cls(
            spec=s, query_heads=s.heads, key_heads=s.kv_heads, value_heads=s.kv_heads,
            qk_width=s.d_qk, value_width=s.d_v, bias_q=s.bias_q, bias_k=s.bias_k,
            qk_norm=s.qk_norm, rotary_q=s.rotary, rotary_k=s.rotary,
            logit_heads=s.heads, softmax_heads=s.heads, output_heads=s.heads, output_width=s.d_v,
        )  # fmt: skip

    def claim(self, pre: int | None = None, post: int | None = None) -> "Sizes":
        """Sizes with a new mix stage to `pre` softmax heads and/or to `post` output heads.

        A stage starts from the heads that the stages before it leave.
        """
        sizes = self
        if pre is not None:
            if sizes.key_bias_by is not None:
                raise ValueError(
                    f"{sizes.key_bias_by}: its content bias stands for terms that are constant over keys, "
                    "which a mix before the softmax would not cancel. Fix: content_bias=False, or no pre mix."
                )
            stage = Stage(sizes.softmax_heads, pre)
            grown = dict(pre=(*sizes.pre, stage), softmax_heads=pre)
            if not sizes.post:
                grown["output_heads"] = pre
            sizes = sizes.replace(**grown)
        if post is not None:
            stage = Stage(sizes.output_heads, post)
            sizes = sizes.replace(post=(*sizes.post, stage), output_heads=post)
        return sizes

    def replace(self, **changes: Any) -> "Sizes":
        """The same sizes but for some fields."""
        return dataclasses.replace(self, **changes)

    def redefine(self, name: str, **changes: Any) -> "Sizes":
        """Sizes whose projections transform `name` replaces; it must come first in its chain."""
        if self.projected_by or self.pre or self.post or self.output_heads != self.spec.heads:
            before = ", ".join(self.projected_by) or "a transform that mixes heads"
            raise ValueError(
                f"{name} redefines the projections but comes after {before}. "
                f"Fix: put {name} first in the chain, and only one such transform."
            )
        return self.replace(projected_by=(name,), **changes)

    def refuse_shared_keys(self, name: str) -> None:
        """Raise unless every head has its own key and value head."""
        if self.spec.kv_heads != self.spec.heads:
            raise ValueError(
                f"{name}: got kv_heads = {self.spec.kv_heads} for heads = {self.spec.heads}; "
                f"{name} is defined for one key head per head. Fix: leave kv_heads out."
            )


def check_rate(what: str, rate: float) -> None:
    """Raise a ValueError unless 0 <= rate < 1."""
    if not 0 <= rate < 1:
        raise ValueError(f"{what} = {rate}, expected a rate in [0, 1). Fix: 0 turns it off.")


def _check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"HeadSpec: {name} = {size!r}, expected a whole number of at least 1.")


def _check_rotary(rotary: Rotary, d_qk: int) -> None:
    check_option("Rotary: pairs", rotary.pairs, ("half", "adjacent"))
    width = rotary.width if rotary.width is not None else d_qk
    if width % 2 or not 0 < width <= d_qk:
        raise ValueError(
            f"Rotary: width = {width} of head width d_qk = {d_qk}, expected an even number up to it. "
            "Fix: an even d_qk, or Rotary(width=...)."
        )
