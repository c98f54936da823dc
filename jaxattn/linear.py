"""A linear map that brings its own transpose and still works in every mode of JAX.

`jax.custom_vjp` would give a reverse pass of its own, at the price of forward mode; this keeps both: in a
`custom_jvp` rule the tangent is a linear map, and only its transposition is replaced.

Inside `jax.shard_map` an array is the same on all devices or varies along mesh axes, and so is its cotangent.
Before the rule all operands are therefore marked as varying along the axes of any of them: JAX transposes
that mark to a sum over devices, for operands that are the same on all, as it does for its own operations.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

PyTree = Any

linear_map_p = Primitive("linear_map")
linear_map_p.multiple_results = True
linear_map_p.is_high = lambda *avals, **params: (
    False
)  # jax 0.12 asks: its program is evaluated, so it holds what it likes


def varying(tree: PyTree) -> frozenset[str]:
    """The mesh axes of a `jax.shard_map` along which some array of the tree differs between devices."""
    types = (x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in jax.tree.leaves(tree))
    return frozenset().union(*map(_axes, types))


def _axes(kind: Any) -> frozenset[str]:
    """Of an array's type: jax 0.8 keeps them in `vma`, later versions in `manual_axis_type`."""
    if hasattr(kind, "vma"):
        return frozenset(kind.vma)
    return frozenset(kind.manual_axis_type.varying) if hasattr(kind, "manual_axis_type") else frozenset()


def vary(tree: PyTree, axes: frozenset[str]) -> PyTree:
    """The tree with every array marked as varying along these mesh axes; no number changes.

    Example:
        >>> x = jax.numpy.ones(2)
        >>> vary(x, varying(x)) is x
        True
    """

    def mark(x):
        missing = tuple(sorted(axes - _axes(jax.typeof(x))))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # pyright: ignore[reportAttributeAccessIssue]  (its name up to 0.8)

    return jax.tree.map(mark, tree) if axes else tree


def linear_map(
    forward: Callable[[PyTree, PyTree], PyTree],
    transpose: Callable[[PyTree, PyTree], PyTree],
    residuals: PyTree,
    operands: PyTree,
) -> PyTree:
    """`forward(residuals, operands)`, linear in the operands, transposed by `transpose`.

    <forward(r, x), y> = <x, transpose(r, y)>

    Args:
        forward: linear in its second argument.
        transpose: from residuals and cotangents of the result to cotangents of the operands.
        residuals: what both depend on; further derivatives pass through `forward` and `transpose`.
        operands: what `forward` is linear in.

    Example:
        >>> import jax.numpy as jnp
        >>> scale = lambda r, x: r * x
        >>> f = lambda x: linear_map(scale, scale, jnp.array(3.0), x)
        >>> float(jax.grad(f)(2.0)), float(jax.jvp(f, (2.0,), (1.0,))[1])
        (3.0, 3.0)
    """
    residuals, operands = vary((residuals, operands), varying((residuals, operands)))
    flat_residuals, residual_tree = jax.tree.flatten(residuals)
    flat_operands, operand_tree = jax.tree.flatten(operands)
    n = len(flat_residuals)
    forward = jax.jit(forward)
    out_tree = jax.tree.structure(jax.eval_shape(forward, residuals, operands))

    # Of the call, though it is transposed after it.
    precision: Any = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009  (no attribute to pyright)

    def flat(function: Callable, tree) -> Callable[..., list[Array]]:
        def call(*arrays):
            with jax.default_matmul_precision(precision):
                out = function(residual_tree.unflatten(arrays[:n]), tree.unflatten(arrays[n:]))
            return jax.tree.leaves(out)

        return jax.jit(call)  # traced once, however often JAX asks for shapes, rules and code

    arrays = (*flat_residuals, *flat_operands)
    return out_tree.unflatten(_bind(flat(forward, operand_tree), flat(transpose, out_tree), n, arrays))


def with_pull(
    function: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    pull: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree],
) -> Callable[[PyTree, PyTree], PyTree]:
    """The first result of `function`, with a reverse pass of its own, for every mode of JAX.

    Args:
        function: `(operands, others) -> (result, kept)`: operands are floating arrays, others are arrays
            without a tangent (integers, booleans, PRNG keys); kept is what the reverse pass reads.
        pull: `(operands, others, kept, cotangent) -> cotangents`, a tree like the operands.

    Example:
        >>> square = with_pull(lambda x, _: (x * x, 2 * x), lambda x, _, kept, t: kept * t)
        >>> float(jax.grad(square)(3.0, ())), float(jax.jvp(square, (3.0, ()), (1.0, ()))[1])
        (6.0, 6.0)
    """
    function = jax.jit(function)

    @jax.custom_jvp
    def whole(operands, others):  # bare, linearisation would split it and hoist masks out of its loops
        return function(operands, others)

    @whole.defjvp
    def whole_jvp(primals, tangents):
        return jax.jvp(function, primals, tangents)

    @jax.custom_jvp
    def ruled(operands, others):
        return function(operands, others)[0]

    def push(residuals, tangents):
        operands, others, _ = residuals
        return jax.jvp(lambda x: function(x, others)[0], (operands,), (tangents,))[1]

    def back(residuals, cotangent):
        operands, others, kept = residuals
        return pull(operands, others, kept, cotangent)

    @ruled.defjvp
    def ruled_jvp(primals, tangents):
        out, kept = whole(*primals)
        return out, linear_map(push, back, (*primals, kept), tangents[0])

    def alike(operands, others):
        return ruled(vary(operands, varying((operands, others))), others)

    return alike


def _bind(forward: Callable, transpose: Callable, n: int, args) -> list[Array]:
    """The primitive with `forward` as a program, so that whoever reads programs can look inside."""
    program = jax.make_jaxpr(forward)(*args)
    return linear_map_p.bind(*args, forward=program, transpose=transpose, n=n)


def _impl(*args, forward, transpose, n):
    del transpose, n
    return jaxpr_as_fun(forward)(*args)


def _abstract(*avals, forward, transpose, n):
    del avals, transpose, n
    return forward.out_avals


def _jvp(primals, tangents, *, forward, transpose, n):
    out = linear_map_p.bind(*primals, forward=forward, transpose=transpose, n=n)
    along_operands = all(isinstance(t, ad.Zero) for t in tangents[:n])
    tangents = [vary(ad.instantiate_zeros(t), varying(x)) for t, x in zip(tangents, primals, strict=True)]
    if along_operands:
        moved = (*primals[:n], *tangents[n:])
        return out, linear_map_p.bind(*moved, forward=forward, transpose=transpose, n=n)
    return out, list(jax.jvp(jaxpr_as_fun(forward), tuple(primals), tuple(tangents))[1])


def _transpose(cotangents, *args, forward, transpose, n):
    residuals, operands = args[:n], args[n:]
    cotangents = [ad.instantiate_zeros(c) for c in cotangents]
    out = _bind(transpose, jaxpr_as_fun(forward), n, (*residuals, *cotangents))
    pairs = zip(out, operands, strict=True)
    return [None] * n + [vary(o, varying(x)) if ad.is_undefined_primal(x) else None for o, x in pairs]


def _batch(args, dims, *, forward, transpose, n):
    args = [jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)

    def transpose_rows(*args):
        axes = (*dims[:n], *(0 for _ in args[n:]))
        out = jax.vmap(transpose, in_axes=axes, out_axes=0, axis_size=size)(*args)
        return [_unbatch(x, d) for x, d in zip(out, dims[n:], strict=True)]

    rows = jax.vmap(jaxpr_as_fun(forward), in_axes=tuple(dims), out_axes=0, axis_size=size)
    out = _bind(rows, jax.jit(transpose_rows), n, args)
    return out, [0] * len(out)


def _unbatch(x: Array, dim: int | None) -> Array:
    """A cotangent with its batch axis where the operand has it; summed where it has none."""
    return x.sum(0) if dim is None else jax.numpy.moveaxis(x, 0, dim)


linear_map_p.def_impl(_impl)
linear_map_p.def_abstract_eval(_abstract)
ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.primitive_batchers[linear_map_p] = _batch
mlir.register_lowering(linear_map_p, mlir.lower_fun(_impl, multiple_results=True))
