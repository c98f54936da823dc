"""Laws of what is computed for a hidden pair and thrown away."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxattn.check.law import SINGLE, SIZES, Outcome, changed, distance, draw, law, noted, slopes, table
from jaxattn.check.subjects.attention import Call, Subject


def extremes(dtype: DTypeLike) -> dict[str, float]:
    """What a row may hold that nobody sees: by name, worst first."""
    largest = float(jnp.finfo(dtype).max)
    return {"NaN": np.nan, "inf": np.inf, "the type's largest": largest, "a root of it": 0.9 * largest**0.5}


@law("numbers", "a hidden score of 1e4 and more reaches no gradient", "mask", "cross", "tracing")
def hidden_large_score(subject, sizes):
    call = draw(sizes)
    mask = np.ones((sizes.b, 1, sizes.q, sizes.k), bool)
    mask[:, :, 0, -1] = False  # the other rows see that key, so that nothing clears it beforehand
    call = call._replace(query=jnp.abs(call.query) + 1, mask=jnp.asarray(mask))

    def owed(last):
        key = np.array(call.key)
        key[:, -1] = last
        return slopes(subject, call._replace(key=jnp.asarray(key)), np.arange(sizes.q) == 0)[0]

    return noted(distance(owed(1e4), owed(1.0)), SINGLE, "exp overflows in a branch that is not taken")


@functools.lru_cache(maxsize=8)
def _answers(subject: Subject) -> Callable[[Call], Any]:
    """Output and gradients of all three, as one program."""

    def answer(query: Array, key: Array, value: Array, mask: Array) -> Array:
        return subject.attend(Call(query, key, value, mask))

    def run(*operands: Array) -> Any:
        loss = lambda *operands: (answer(*operands).astype(jnp.float32) ** 2).sum()
        return answer(*operands), jax.grad(loss, (0, 1, 2))(*operands)

    program = jax.jit(run)
    return lambda call: jax.tree.leaves(program(*call[:3], call.mask))


@law(
    "numbers",
    "NaN, inf and numbers up to the type's largest in a row that is hidden from all reach nothing",
    "mask",
    "cross",
    "tracing",
    sizes=SIZES[-1:],
)
def hidden_row_holds_anything(subject, sizes):
    mask = np.ones((sizes.b, 1, sizes.q, sizes.k), bool)
    mask[..., -1] = False
    for dtype in (jnp.float32, jnp.float16) if subject.plain else (jnp.float32,):

        def answers(value: float, dtype=dtype) -> list[Any]:
            call = changed(draw(sizes), lambda x: x.astype(dtype))
            last = lambda x: x.at[:, -1].set(value)
            filled = call._replace(key=last(call.key), value=last(call.value), mask=jnp.asarray(mask))
            return _answers(subject)(filled)

        want = answers(0.0)
        for name, value in extremes(dtype).items():
            off = max(map(distance, answers(value), want), key=lambda x: (x != x, x))
            if not off <= SINGLE:
                return noted(off, SINGLE, f"{name} in {jnp.dtype(dtype).name}")
    return Outcome(0.0, SINGLE)


LAWS = table(hidden_large_score, hidden_row_holds_anything)
