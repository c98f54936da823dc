"""Point: anyone's function at its operands, as a function of one float64 vector; where two forms disagree."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.verdict import Finding, is_floating, named_leaves, operand_names, run, spot

PyTree = Any


class Layout(NamedTuple):
    """Which leaf and coordinate each entry of a vector is."""

    paths: list[str]
    shapes: list[tuple[int, ...]]

    @property
    def parts(self) -> list[np.ndarray]:
        """The entries of each leaf."""
        ends = np.cumsum([0, *(np.prod(shape, dtype=int) for shape in self.shapes)])
        return [np.arange(*both) for both in itertools.pairwise(ends)]

    def split(self, vector: np.ndarray) -> list[Array]:
        """The leaves that a vector holds."""
        both = zip(self.parts, self.shapes, strict=True)
        return [jnp.asarray(vector[part].reshape(shape)) for part, shape in both]

    def spot(self, entry: int, axes: Mapping[str, str] | None = None) -> str:
        """Name of an entry's leaf and coordinate."""
        for path, shape, part in zip(self.paths, self.shapes, self.parts, strict=True):
            if entry in part:
                return spot(path, tuple(np.unravel_index(entry - part[0], shape)), axes)
        raise IndexError(entry)


class Point(NamedTuple):
    """A function at its operands: float64 leaves are one vector, everything else is held fixed.

    Attributes:
        fn: what is checked.
        x: the vector of all float64 leaves.
        inputs, outputs: what its entries are, and those of the output's vector.
        value: the output there; it is finite.
        leaves, tree, moving: all operands, and which leaves the vector fills.
        axes: names of axes by path.
    """

    fn: Callable[..., Any]
    x: np.ndarray
    inputs: Layout
    outputs: Layout
    value: np.ndarray
    leaves: list[Any]
    tree: Any
    moving: list[int]
    axes: Mapping[str, str] | None = None

    @classmethod
    def of(cls, fn: Callable[..., Any], operands: tuple, axes: Mapping[str, str] | None = None) -> "Point":
        """The function there, called once.

        Raises:
            TypeError: for operands that are not float64.
            Finding: when the function raises, returns no float64 array, or one that is not finite.
        """
        leaves, tree = jax.tree.flatten(operands)
        named = [
            leaf
            for name, operand in zip(operand_names(fn, len(operands)), operands, strict=True)
            for leaf in named_leaves(operand, name)
        ]
        moving = [i for i, (path, leaf) in enumerate(named) if _moves(path, leaf)]
        if not moving:
            raise TypeError(
                "operands: got no floating array, expected at least one. Fix: pass what is to be moved."
            )
        arrays = [np.asarray(leaves[i]) for i in moving]
        inputs = Layout([named[i][0] for i in moving], [a.shape for a in arrays])
        point = cls(fn, _join(arrays), inputs, Layout([], []), np.zeros(0), leaves, tree, moving, axes)
        out = run("the function", point._outputs, point.inputs.split(point.x))
        value = _join([leaf for _, leaf in out])
        outputs = Layout([path for path, _ in out], [np.shape(leaf) for _, leaf in out])
        point = point._replace(outputs=outputs, value=value)
        point._finite("the function's value", value, outputs)
        return point

    def _outputs(self, arrays: Sequence[Any]) -> list[tuple[str, Any]]:
        """The floating leaves of the output, with their paths."""
        filled = list(self.leaves)
        for i, array in zip(self.moving, arrays, strict=True):
            filled[i] = array
        named = named_leaves(self.fn(*self.tree.unflatten(filled)), "output")
        for path, leaf in named:
            kind = jnp.result_type(leaf)
            if jnp.issubdtype(kind, jnp.inexact) and kind != np.float64:
                raise Finding(
                    f"it is {kind} for float64 operands, so differences and derivatives end at its rounding. "
                    "Fix: let the result follow the type of the operands.",
                    path,
                )
        floating = [(path, leaf) for path, leaf in named if is_floating(leaf)]
        if not sum(np.size(leaf) for _, leaf in floating):
            raise Finding("the function returned no floating array")
        return floating

    def call(self, arrays: Sequence[Any]) -> list[Array]:
        """Floating outputs from the leaves that move."""
        return [jnp.asarray(leaf) for _, leaf in self._outputs(arrays)]

    def values(self, x: np.ndarray) -> np.ndarray:
        """The output's vector for an operands' vector."""
        return _join(run("the function", self.call, self.inputs.split(x)))

    def push(self, v: np.ndarray) -> np.ndarray:
        """J v, by forward mode."""
        primal, tangent = self.inputs.split(self.x), self.inputs.split(v)
        _, pushed = run("no forward mode: jax.jvp", jax.jvp, self.call, (primal,), (tangent,))
        return self._finite("J v", _join(pushed), self.outputs)

    def puller(self) -> Callable[[np.ndarray], np.ndarray]:
        """u -> J' u, by reverse mode."""
        _, pullback = run("no reverse mode: jax.vjp", jax.vjp, self.call, self.inputs.split(self.x))

        def pull(u: np.ndarray) -> np.ndarray:
            (gradient,) = run("no reverse mode: the pullback", pullback, self.outputs.split(u))
            return self._finite("the gradient", _join(gradient), self.inputs)

        return pull

    def _finite(self, what: str, vector: np.ndarray, layout: Layout) -> np.ndarray:
        if not np.isfinite(vector).all():
            bad = int(np.argmin(np.isfinite(vector)))
            raise Finding(f"{what} is {vector[bad]}", layout.spot(bad, self.axes))
        return vector


def _join(arrays: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(np.ravel(np.asarray(a)) for a in arrays)])


def _moves(path: str, leaf: Any) -> bool:
    """Whether the leaf is to be moved: float64 is, integers, booleans and PRNG keys are not."""
    if not isinstance(leaf, bool | int | float | complex) and not hasattr(leaf, "dtype"):
        raise TypeError(f"{path}: got {type(leaf).__name__}, expected an array. Fix: close over it.")
    kind = getattr(leaf, "dtype", np.dtype(type(leaf)))
    if jnp.issubdtype(kind, jnp.inexact) and kind != np.float64:
        raise TypeError(
            f"{path}: dtype is {kind}, expected float64: rounding in less hides what is checked. "
            "Fix: ja.check.adjoint.float64(tree)."
        )
    return kind == np.float64


def generator(rng: Array | None) -> np.random.Generator:
    """Numpy's generator from a PRNG key; None is key 0."""
    key = jax.random.key(0) if rng is None else rng
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return np.random.default_rng(np.asarray(data).ravel().tolist())


def locate(residual: Callable[[np.ndarray], float], entries: np.ndarray) -> int:
    """An entry that disagrees: halve the set, keep the half whose residual is larger, log2(n) times.

    Exact where one entry is wrong; where many are, it is one of those.

    Args:
        residual: of a random direction in these entries alone; it is linear in the direction.
        entries: where to look.

    Example:
        >>> locate(lambda part: float(5 in part), np.arange(12))
        5
    """
    while len(entries) > 1:
        left, right = np.array_split(entries, 2)
        entries = left if abs(residual(left)) >= abs(residual(right)) else right
    return int(entries[0])
