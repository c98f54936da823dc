"""One call of the form, as engines receive it, and what an engine is."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxattn.axes import at_least_float32
from jaxattn.masks import Frame, Mask
from jaxattn.sides import Coupling, KeySide, Mix, QuerySide

CAPTURES = ("logits", "mixed_logits", "weights", "mixed_weights", "heads")


class Call(NamedTuple):
    """A checked call: sides with agreeing axes, one mask, positions resolved.

    Attributes:
        query, key, coupling: the form.
        mask: everything that hides pairs, invalid key rows included.
        frame: the rows that the mask is asked about.
        bias: [..., hs or 1, q or 1, k or 1] added after the pre mixes, or None.
        dropout_key: draws the attention dropout; None is evaluation.
        capture: names of intermediates to return, of `CAPTURES`.
    """

    query: QuerySide
    key: KeySide
    coupling: Coupling
    mask: Mask
    frame: Frame
    bias: Array | None
    dropout_key: Array | None
    capture: tuple[str, ...]

    @property
    def dtype(self) -> jnp.dtype:
        """The type of logits and softmax: at least float32."""
        return at_least_float32(self.query.query.dtype)

    @property
    def logit_heads(self) -> int:
        """hl: the heads that have scores, whether or not the query side holds all of them."""
        return logit_heads(self.query)

    @property
    def softmax_heads(self) -> int:
        """hs: the heads that the pre mixes leave."""
        return _heads_after(self.logit_heads, self.coupling.pre)

    @property
    def output_heads(self) -> int:
        """hv: the heads that the post mixes leave."""
        return _heads_after(self.softmax_heads, self.coupling.post)

    @property
    def symbolic(self) -> tuple[str, ...]:
        """Axes of b, q and k whose size `jax.export` leaves open: nothing can be decided by it."""
        sizes = dict(b=self.frame.batch, q=(self.frame.q_len,), k=(self.frame.k_len,))
        return tuple(axis for axis, ns in sizes.items() if not all(isinstance(n, int) for n in ns))

    @property
    def examples(self) -> int:
        """How many examples a plan may count on, at least 1; 1 where the batch is symbolic."""
        return 1 if "b" in self.symbolic else max(1, math.prod(self.frame.batch))

    @property
    def score_bytes(self) -> int:
        """Bytes of one dense tensor of an example's scores [h, q, k], at the stage with most heads."""
        heads = max(self.logit_heads, self.softmax_heads, self.output_heads)
        return heads * self.frame.q_len * self.frame.k_len * jnp.dtype(self.dtype).itemsize

    @property
    def mixes(self) -> bool:
        """Whether heads see each other anywhere."""
        sides, mixes = (self.query, self.key), (*self.coupling.pre, *self.coupling.post)
        factors = (f for side in sides for f in (*side.pre, *side.post))
        return any(f is not None for f in factors) or any(m.matrix is not None for m in mixes)

    @property
    def biases(self) -> bool:
        """Whether the form itself adds to logits or weights: by head, key or position."""
        c = self.coupling
        added = (self.key.bias, c.pair_bias, *(m.bias for m in (*c.pre, *c.post)))
        return any(bias is not None for bias in added)


class Engine(NamedTuple):
    """A way to execute the form.

    Attributes:
        name: for `engine=`.
        run: `(call) -> (heads [..., q, hv, v], captured)`.
        captures: the intermediates that it can return; asking for others raises.
        modes: derivatives that it has, of "reverse" and "forward".
        refuses: `(call)` to the reason why it cannot run it, or None.
        symbolic: axes of b, q and k whose size may be symbolic, as in `jax.export`.
        routes: whether it takes query sides that hold active heads alone (`QuerySide.head`), and no others.
        about: one line for tables and errors.
    """

    name: str
    run: Callable[[Call], tuple[Array, dict[str, Array]]]
    captures: tuple[str, ...] = CAPTURES
    modes: tuple[str, ...] = ("reverse", "forward")
    refuses: Callable[[Call], str | None] = lambda call: None
    symbolic: tuple[str, ...] = ()
    routes: bool = False
    about: str = ""

    def why_not(self, call: Call) -> str | None:
        """Why this engine cannot run a call, or None: what it never holds, what it refuses."""
        planned = [axis for axis in call.symbolic if axis not in self.symbolic]
        if planned:
            return f"it plans by the sizes, and axis {', '.join(planned)} is symbolic"
        missing = [name for name in call.capture if name not in self.captures]
        if missing:
            return f"it never holds {', '.join(missing)} as a whole"
        if self.routes and call.query.head is None:
            return "the query side holds every head; nothing routes (QuerySide.head)"
        if call.query.head is not None and not self.routes:
            return "the query side holds active heads alone (QuerySide.head)"
        return self.refuses(call)


def logit_heads(query: QuerySide) -> int:
    """hl of a query side; where it holds active heads alone, its gates are for all."""
    if query.head is None:
        return query.query.shape[-2]
    assert query.gate is not None
    return query.gate.shape[-2]


def _heads_after(heads: int, mixes: tuple[Mix, ...]) -> int:
    for mix in mixes:
        if mix.matrix is not None:
            heads = mix.groups * mix.matrix.shape[-1]
    return heads
