"""Sharding by axis name: the axes of every leaf, and PartitionSpecs that rules make of them.

    rules = {"b": "data", "h": "heads"}         # axis name -> mesh axis
    shardings(attn, rules, mesh)                # for the parameters
    spec_of("b q m", rules)                     # for states

They go to `jax.jit` or `jax.device_put`; attention itself is the same program on any number of devices.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxattn.attention import Attention

PyTree = Any
Rules = Mapping[str, str | tuple[str, ...] | None]

HEADS = ("h", "hl", "hs", "hv", "hK", "hV")  # a rule for "h" holds for each that has none of its own
NAMES = (*"btqkmdvgario", *HEADS)


def leaf_axes(attn: Attention) -> PyTree:
    """The axis names of every parameter leaf, in a tree like that of `init`.

    A head axis has the name of its kind: hl, hs, hv, hK, hV; `h` where all kinds are the same heads, and
    `h[2:]` for heads from 2 on. They come from the layout of the projections and from what each transform
    declares; `Attention.axes` gives the same as strings.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> leaf_axes(attention(HeadSpec(model=6, heads=2)))["query"]
        {'kernel': ('m', 'hl', 'd')}
    """
    return jax.tree.map(lambda axes: tuple(axes.split()), attn.axes())


def spec_of(
    axes: str,
    rules: Rules,
    mesh: Mesh | AbstractMesh | None = None,
    shape: tuple[int, ...] | None = None,
    what: str = "array",
) -> PartitionSpec:
    """The PartitionSpec of one array by its axis names: states, or a leaf.

    Where the two axes of a map from heads to heads ask for one mesh axis, the heads that come out get it, so
    that each device makes its own.

    Args:
        axes: one name for each axis, for example "b q m" for query states, "b k m" for source states.
        rules: mesh axis (or several, or None for whole) of each axis name. An axis without a rule stays
            whole. "h" holds for every kind of head that has no rule of its own.
        mesh: checked against the rules, where given; with `shape` also for sizes that it does not divide.
        shape: sizes of the axes.
        what: the array, as its caller knows it.

    Raises:
        ValueError: for a name in the rules that is no axis, a mesh axis that the mesh has not or that is not
            of type Auto, one mesh axis for two axes of an array, or a size that mesh axes do not divide.

    Example:
        >>> tuple(spec_of("b q m", {"b": "data", "h": "heads"}))
        ('data', None, None)
        >>> tuple(spec_of("m hl d", {"b": "data", "h": "heads"}))
        (None, 'heads', None)
    """
    names = axes.split()
    _check_rules(rules, names, mesh)
    return _spec(names, rules, mesh, shape, what)


def partition_specs(attn: Attention, rules: Rules, mesh: Mesh | AbstractMesh | None = None) -> PyTree:
    """The PartitionSpec of every parameter leaf, in a tree like that of `init`.

    Args:
        attn: what `attention` made.
        rules, mesh: as in `spec_of`; one set of rules may serve states and parameters.

    Raises:
        ValueError: as in `spec_of`, naming the leaf.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> specs = partition_specs(attention(HeadSpec(model=6, heads=2)), {"h": "heads"})
        >>> tuple(specs["out"]["kernel"])
        ('heads', None, None)
    """
    axes = attn.axes()
    leaves = jax.eval_shape(attn.init, jax.random.key(0))
    _check_rules(rules, {name for text in jax.tree.leaves(axes) for name in text.split()}, mesh)

    def of_leaf(path, text: str, leaf) -> PartitionSpec:
        what = "/".join(str(part.key) for part in path)
        return _spec(text.split(), rules, mesh, leaf.shape, what)

    return jax.tree_util.tree_map_with_path(of_leaf, axes, leaves)


def shardings(attn: Attention, rules: Rules, mesh: Mesh) -> PyTree:
    """`partition_specs` on a mesh: what `jax.jit(in_shardings=...)` and `jax.device_put` take.

    Raises:
        ValueError: as in `spec_of`, naming the leaf.

    Example:
        >>> from jaxattn.attention import attention
        >>> from jaxattn.spec import HeadSpec
        >>> mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Auto,))
        >>> placed = shardings(attention(HeadSpec(model=6, heads=2)), {"h": "heads"}, mesh)
        >>> tuple(placed["query"]["kernel"].spec)
        (None, 'heads', None)
    """
    specs = partition_specs(attn, rules, mesh)
    whole = lambda x: isinstance(x, PartitionSpec)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=whole)


def _rule(name: str, rules: Rules) -> tuple[str, ...]:
    """The mesh axes that share an axis."""
    found = rules[name] if name in rules else rules.get("h") if name in HEADS else None
    return () if found is None else (found,) if isinstance(found, str) else tuple(found)


def _spec(
    names: list[str],
    rules: Rules,
    mesh: Mesh | AbstractMesh | None,
    shape: tuple[int, ...] | None,
    what: str,
) -> PartitionSpec:
    if shape is not None and len(shape) != len(names):
        raise ValueError(
            f"{what}: shape {shape} has {len(shape)} axes, expected {len(names)} "
            f'(axes "{" ".join(names)}"). Fix: one name for each axis.'
        )
    asked = [_rule(name, rules) for name in names]
    entries = []
    for at, (name, found) in enumerate(zip(names, asked, strict=True)):
        for after, again in zip(names[at + 1 :], asked[at + 1 :], strict=True):
            if not set(found) & set(again):
                continue
            if name not in HEADS or after not in HEADS:
                raise ValueError(
                    f"{what}: the rules send axes {name} and {after} both to mesh axis "
                    f'{" ".join(set(found) & set(again))!r} (axes "{" ".join(names)}"). Fix: a mesh axis for '
                    "one of them only."
                )
            found = tuple(mesh_axis for mesh_axis in found if mesh_axis not in again)
        if mesh is not None and shape is not None:
            _check_divides(what, names, shape, at, found, mesh)
        entries.append(found if len(found) > 1 else found[0] if found else None)
    return PartitionSpec(*entries)


def _check_divides(what, names, shape, at, found, mesh) -> None:
    name, parts = names[at], 1
    for mesh_axis in found:
        parts *= mesh.shape[mesh_axis]
    if shape[at] % parts:
        raise ValueError(
            f'{what}: axis {name} is {shape[at]}, which {parts} devices of mesh axis "{" ".join(found)}" do '
            f'not divide (axes "{" ".join(names)}", shape {shape}). Fix: a rule {{"{name}": None}} keeps '
            "it whole on every device; or a size that divides."
        )


def _check_rules(rules: Rules, names: Iterable[str], mesh: Mesh | AbstractMesh | None) -> None:
    """Raise unless every rule is for an axis of the vocabulary or of these arrays, to an axis of the mesh."""
    known = sorted({*names, *NAMES}, key=lambda name: (name.lower(), name))
    for name in rules:
        if name not in known:
            raise ValueError(
                f"rules: {name!r} is no axis name, expected some of {', '.join(known)}. "
                'Fix: axis names on the left, mesh axes on the right, as in {"h": "heads"}.'
            )
        for mesh_axis in _rule(name, rules):
            if mesh is not None and mesh_axis not in mesh.axis_names:
                raise ValueError(
                    f"rules: {name} goes to mesh axis {mesh_axis!r}, which the mesh has not; it has "
                    f"{', '.join(map(str, mesh.axis_names))}. Fix: one of these, or None."
                )
            if mesh is not None and _type_of(mesh, mesh_axis) != AxisType.Auto:
                raise ValueError(
                    f"rules: mesh axis {mesh_axis!r} is {_type_of(mesh, mesh_axis).name}, expected Auto: JAX "
                    "then finds how all between inputs and output is sharded. Fix: jax.make_mesh(shape, "
                    "names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
                )


def _type_of(mesh: Mesh | AbstractMesh, mesh_axis: str) -> AxisType:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[mesh_axis]
