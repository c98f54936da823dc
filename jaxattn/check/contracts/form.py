"""What a contract is, and the attention that contracts are asked of."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.attention import Attention
from jaxattn.check.law import Level
from jaxattn.spec import HeadSpec
from jaxattn.transform import HeadTransform, Site

PyTree = Any
BATCH, QUERIES, KEYS = 2, 5, 7
QUICK = {"xla_backend_optimization_level": 0}  # each program runs a few times, so that compiling is the time


class Made(NamedTuple):
    """A transform in an attention, with parameters and states of order 1 in float64.

    Attributes:
        transform: that is asked about.
        spec, attn: the sizes, and what they and the transform make.
        params: every leaf redrawn, so that no start near the identity hides anything.
        x_q: [b, q, m]; x_kv: (x_k, x_v), [b, k, m_k] and [b, k, m_v].
    """

    transform: HeadTransform
    spec: HeadSpec
    attn: Attention
    params: PyTree
    x_q: Array
    x_kv: tuple[Array, Array]

    @property
    def links(self) -> Iterator[tuple[HeadTransform, PyTree, Site]]:
        """Each link of the transform with its own leaves and its site."""
        for link, site in zip(self.attn.links, self.attn.sites, strict=True):
            yield link, self.params["heads"].get(site.name, {}), site


class Contract(NamedTuple):
    """One contract: `ask(made)` gives a sentence with its fix for each way in which it is broken.

    `once` asks it of the first sizes alone, where it is long to compile.
    """

    name: str
    level: Level
    says: str
    ask: Callable[[Made], Iterator[str]]
    once: bool = False


def contract(
    level: Level, says: str, *, once: bool = False
) -> Callable[[Callable[[Made], Iterator[str]]], Contract]:
    """Make a function that yields failures a contract, under its own name."""
    return lambda ask: Contract(ask.__name__.replace("_", "-"), level, says, ask, once)


def make(transform: HeadTransform, spec: HeadSpec, attn: Attention) -> Made:
    """Redrawn parameters and states for an attention; in 64 bits where the session has them."""
    rng = np.random.default_rng(0)
    states = lambda rows, width: jnp.asarray(rng.normal(size=(BATCH, rows, width)))
    x_q, x_k, x_v = states(QUERIES, spec.in_q), states(KEYS, spec.in_k), states(KEYS, spec.in_v)
    params = redrawn(jax.eval_shape(attn.init, jax.random.key(0)), rng)
    return Made(transform, spec, attn, params, x_q, (x_k, x_v))


def redrawn(shapes: PyTree, rng: np.random.Generator) -> PyTree:
    """Normal leaves of these shapes; a matrix is divided by the root of what it sums over."""

    def draw(leaf: Any) -> Array:
        fan = leaf.shape[0] if leaf.ndim > 1 else 1
        return jnp.asarray(rng.normal(size=leaf.shape) / max(fan, 1) ** 0.5)

    return jax.tree.map(draw, shapes)


def far_apart(got: Any, want: Any, limit: float = 1e-10) -> bool:
    """Whether two arrays differ by more than `limit` of the largest value, or in shape."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return True
    if not got.size:
        return False
    return not np.abs(got - want).max() <= limit * max(1.0, np.abs(want).max())


def finite(tree: PyTree) -> bool:
    """Whether every floating number of a tree is finite."""
    floating = (leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating))
    return all(bool(jnp.isfinite(leaf).all()) for leaf in floating)


def same(got: PyTree, want: PyTree) -> bool:
    """Whether two trees are equal: static parts, and every number (NaN as well)."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return False
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=_floats(a)) for a, b in pairs)


def _floats(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))
