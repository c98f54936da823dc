"""Verdict: what a check found, by name; coordinates of leaves as people write them; compare."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import enable_x64 as enable_x64

PyTree = Any
Of = TypeVar("Of")
Arguments = ParamSpec("Arguments")


class Verdict(NamedTuple):
    """What a check found. Prints as lines; is true where the check passed.

    Attributes:
        check: its name.
        passed: whether what it demands holds.
        measured: the number that was judged, and `limit`: what it may be at most (NaN where the check
            came to no number).
        where: the leaf and coordinate of the worst finding, such as `params/key/bias[h=0,d=2]`; empty
            where nothing has a place.
        reason: one line.
        numbers: what else was measured.

    Example:
        >>> print(Verdict("dot_product", False, 0.5, 1e-14, "x[q=1,m=2]", "the transpose is wrong"))
        FAIL dot_product at x[q=1,m=2]: the transpose is wrong (measured 0.5, limit 1e-14)
    """

    check: str
    passed: bool
    measured: float
    limit: float
    where: str
    reason: str
    numbers: Mapping[str, float] = {}

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        line = f"{'pass' if self.passed else 'FAIL'} {self.check}{place}: {self.reason}"
        if np.isfinite(self.limit):
            line += f" (measured {self.measured:.3g}, limit {self.limit:.3g})"
        return "\n".join([line, *(f"  {name}: {value:.9g}" for name, value in self.numbers.items())])

    def require(self) -> "Verdict":
        """Itself where it passed.

        Raises:
            AssertionError: with the printed verdict.
        """
        if not self.passed:
            raise AssertionError(str(self))
        return self


class Finding(Exception):
    """What ends a check early: a fault of the function that is checked."""

    def __init__(self, reason: str, where: str = ""):
        super().__init__(reason)
        self.reason, self.where = reason, where


def verdicts(check: Callable[Arguments, Verdict]) -> Callable[Arguments, Verdict]:
    """Run a check in 64 bits, whatever the session's setting; a Finding becomes its failed verdict."""

    @functools.wraps(check)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Verdict:
        with enable_x64(True):
            try:
                return check(*args, **options)
            except Finding as found:
                return Verdict(check.__name__, False, np.nan, np.nan, found.where, found.reason)

    return checked


def run(what: str, fn: Callable[..., Of], *args: Any) -> Of:
    """Call what is not ours: whatever it raises is a Finding."""
    try:
        return fn(*args)
    except Finding:
        raise
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        raise Finding(f"{what} raised {type(error).__name__}: {first}") from error


def float64(tree: PyTree) -> PyTree:
    """The tree with every floating leaf as a numpy float64 array, as the checks take it.

    Example:
        >>> float64({"scale": jnp.ones(2), "steps": 3})
        {'scale': array([1., 1.]), 'steps': 3}
    """
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if is_floating(x) else x, tree)


def is_floating(leaf: Any) -> bool:
    """Whether a leaf holds real floating numbers."""
    return isinstance(leaf, float) or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating))


def named_leaves(tree: PyTree, root: str = "") -> list[tuple[str, Any]]:
    """The leaves with their paths, `root/query/kernel`; None is no leaf."""
    found = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found.append(("/".join(part for part in (root, name) if part), leaf))
    return found


def operand_names(fn: Callable[..., Any], count: int) -> list[str]:
    """What the function calls its first arguments; their numbers where it does not say."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    names = [p.name for p in parameters if p.kind in positional][:count]
    return names + [str(i) for i in range(len(names), count)]


def lookup(table: Mapping[str, Of], path: str) -> Of | None:
    """The entry of a leaf, under its path or the last parts of it (the longest that is there)."""
    parts = path.split("/")
    for start in range(len(parts)):
        tail = "/".join(parts[start:])
        if tail in table:
            return table[tail]
    return None


def spot(path: str, index: tuple[Any, ...], axes: Mapping[str, str] | None = None) -> str:
    """A coordinate by name.

    Example:
        >>> spot("p/query/kernel", (1, 0, 2), {"query/kernel": "m h d"}), spot("x", (1, 0)), spot("c", ())
        ('p/query/kernel[m=1,h=0,d=2]', 'x[1,0]', 'c')
    """
    names = (lookup(axes or {}, path) or "").split()
    if len(names) == len(index):
        parts = [f"{name}={i}" for name, i in zip(names, index, strict=True)]
    else:
        parts = [str(int(i)) for i in index]
    return f"{path}[{','.join(parts)}]" if parts else path


@verdicts
def compare(
    got: PyTree,
    want: PyTree,
    *,
    relative: float = 1e-12,
    absolute: float = 0.0,
    dtypes: bool = True,
    axes: Mapping[str, str] | None = None,
) -> Verdict:
    """Two trees coordinate by coordinate: the worst disagreement by name, no norms.

        |got[i] - want[i]| <= absolute + relative * (largest |want| of the leaf)

    A leaf that only one tree has, another shape or type, and NaN are findings; equal infinities agree.
    Integers and booleans must be equal.

    Args:
        got, want: trees of arrays of any kind.
        relative, absolute: the tolerance.
        dtypes: whether the types of leaves must agree.
        axes: names of the axes of leaves by path, for example `{"query/kernel": "m h d"}`.

    Returns:
        The verdict; `measured` and `limit` are those of the coordinate that comes nearest to its limit, or
        farthest beyond it.

    Example:
        >>> print(compare({"w": np.array([1.0, 2.0])}, {"w": np.array([1.0, 2.5])}))
        FAIL compare at w[1]: got 2, want 2.5 (measured 0.5, limit 2.5e-12)
    """
    left, right = dict(named_leaves(got)), dict(named_leaves(want))
    for ours, theirs, what in ((left, right, "want"), (right, left, "got")):
        if missing := [path for path in ours if path not in theirs]:
            raise Finding(
                f"not in {what}: {', '.join(path or 'the tree itself' for path in missing)}", missing[0]
            )
    worst = Verdict("compare", True, 0.0, absolute, "", "no leaf to compare" if not left else "all equal")
    pressure = 0.0
    for path in right:
        found = _compare_leaf(path or "leaf", left[path], right[path], relative, absolute, dtypes, axes)
        ratio = found.measured / found.limit if found.limit else (np.inf if found.measured else 0.0)
        if ratio > pressure:
            worst, pressure = found, ratio
    return worst


def _compare_leaf(path, got, want, relative, absolute, dtypes, axes) -> Verdict:
    a, b = (run(f"{path}: numpy", np.asarray, x) for x in (got, want))
    if a.shape != b.shape:
        raise Finding(f"shape {a.shape}, want {b.shape}", path)
    if dtypes and a.dtype != b.dtype:
        raise Finding(f"dtype {a.dtype}, want {b.dtype}", path)
    exact = not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in (a, b))
    kind = np.complex128 if any(np.iscomplexobj(x) for x in (a, b)) else np.float64
    a, b = (run(f"{path}: numpy", x.astype, kind) for x in (a, b))
    for name, x in (("got", a), ("want", b)):
        if np.isnan(x).any():
            raise Finding(f"{name} is nan", spot(path, tuple(np.argwhere(np.isnan(x))[0]), axes))
    with np.errstate(invalid="ignore"):  # inf - inf, which is equal or infinitely apart
        apart = np.abs(a - b)
    apart = np.where(a == b, 0.0, np.where(np.isnan(apart), np.inf, apart))
    largest = np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
    limit = 0.0 if exact else absolute + relative * float(largest)
    if not apart.size or not apart.max():
        return Verdict("compare", True, 0.0, limit, path, "equal")
    index = np.unravel_index(np.argmax(apart), apart.shape)
    here = [np.asarray(x)[index] for x in (got, want)]
    reason = "got {:.9g}, want {:.9g}".format(*(x if kind is np.complex128 else float(x) for x in here))
    measured = float(apart[index])
    return Verdict("compare", measured <= limit, measured, limit, spot(path, index, axes), reason)
