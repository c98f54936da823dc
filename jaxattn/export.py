"""Trees of this package in programs that `jax.export` writes to bytes; `register` adds your own.

exported = jax.export.export(jax.jit(attn.decode))(params, cache, x)
data = exported.serialize()  # needs the package flatbuffers
y, aux, cache = jax.export.deserialize(data).call(params, cache, x)  # in any process that imports jaxattn
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from jax import export

from jaxattn.attention import Aux
from jaxattn.cache import Cache
from jaxattn.mask_form import And, Not, Or
from jaxattn.mask_rules import Band, Explicit, Lengths, Padding, Segments
from jaxattn.sides import Coupling, Factors, KeySide, Mix, PairBias, QuerySide
from jaxattn.transform import Loss

Node = TypeVar("Node", bound=type)


def register(node: Node, name: str | None = None) -> Node:
    """Let trees that hold this type be arguments and results of a program that `jax.export` writes to bytes.

    jax knows tuples, lists and dicts. Every other type must be registered, in the process that writes and in
    the one that reads; importing jaxattn registers its own types, importing variants those of the variants.
    What a transform's `aux` returns is part of the result of `apply` and `decode`: a NamedTuple of your own
    there, or in `at.note`, needs this.

    Args:
        node: a NamedTuple, or a dataclass registered with `jax.tree_util.register_dataclass` whose static
            fields hold numbers, strings, None, functions of a module, frozen dataclasses, tuples of these.
        name: under which the bytes refer to the type; default its module and name. Give one to a type of a
            script (`__main__`), whose module has another name in the process that reads.

    Returns:
        The type itself, so that this is a decorator.

    Raises:
        TypeError: for a type that is neither.
        ValueError: for a `name` that is taken.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from typing import NamedTuple
        >>> @register
        ... class MySums(NamedTuple):
        ...     total: jax.Array
        >>> program = jax.export.export(jax.jit(lambda x: MySums(x.sum())))(jnp.ones(3))
        >>> jax.export.deserialize(program.serialize()).call(jnp.ones(3)).total.item()
        3.0
    """
    default = f"{node.__module__}.{node.__qualname__}"
    if not _register(node, name or default) and name is not None:
        raise ValueError(
            f"export.register: {node.__qualname__} as {name!r}: the type is registered already, or another "
            "type has this name. Fix: register each type once, by a name of its own."
        )
    return node


def _register(node: type, name: str) -> bool:
    """Register a type; False where it is registered already, or the name is.

    A type that was defined again (a reloaded module, a notebook's cell) meets its own name: jax gives a name
    to one type alone, so the new one gets another name, which only this process can read.
    """
    named = issubclass(node, tuple) and hasattr(node, "_fields")
    if not named and not dataclasses.is_dataclass(node):
        raise TypeError(
            f"export.register: got {node.__qualname__}, expected a NamedTuple or a dataclass. "
            "Fix: one of these; for other nodes jax.export.register_pytree_node_serialization."
        )
    write = _write_namedtuple if named else _write_dataclass
    try:
        write(node, name)
    except ValueError:
        with contextlib.suppress(ValueError):
            write(node, f"{name}@{id(node):x}")
        return False
    return True


def _write_namedtuple(node: type, name: str) -> None:
    export.register_namedtuple_serialization(node, serialized_name=name)


def _write_dataclass(node: type, name: str) -> None:
    fields = dataclasses.fields(node)
    static = [field.name for field in fields if field.metadata.get("static")]
    arrays = [field.name for field in fields if not field.metadata.get("static")]

    def write(facts: Sequence[Any]) -> bytes:
        return json.dumps({n: _plain(f"{name}.{n}", v) for n, v in zip(static, facts, strict=True)}).encode()

    def read(data: bytes) -> dict[str, Any]:
        return {n: _value(v) for n, v in json.loads(data).items()}

    def build(aux_data: Any, children: Sequence[Any]) -> Any:
        return node(**aux_data, **dict(zip(arrays, children, strict=True)))

    export.register_pytree_node_serialization(
        node, serialized_name=name, serialize_auxdata=write, deserialize_auxdata=read, from_children=build
    )


def _plain(what: str, value: Any) -> Any:
    """A static field as JSON. A function or dataclass is a reference by name, never code."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_plain(what, one) for one in value]
    kind = value if hasattr(value, "__qualname__") else type(value)
    where = f"{kind.__module__}:{kind.__qualname__}"
    if _named(where) is not kind:
        raise ValueError(
            f"jax.export: {what} is {value!r}, which another process cannot find by its name. "
            "Fix: a function of a module, or a frozen dataclass of a module."
        )
    if kind is value:
        return {"is": where}
    if not dataclasses.is_dataclass(value):
        raise ValueError(
            f"jax.export: {what} is {value!r}, expected a number, string, tuple, module function or frozen "
            "dataclass. Fix: one of these."
        )
    return {"made": where, "of": {n: _plain(f"{what}.{n}", getattr(value, n)) for n in _names(value)}}


def _value(plain: Any) -> Any:
    """The static field that `_plain` wrote."""
    if isinstance(plain, list):
        return tuple(map(_value, plain))
    if not isinstance(plain, dict):
        return plain
    where: str = plain.get("is") or plain["made"]
    found: Any = _named(where)
    if found is None:
        raise ValueError(
            f"jax.export: the program needs {where}, which is not there. Fix: import its module before "
            "jax.export.deserialize."
        )
    if "is" in plain:
        return found
    options = {n: _value(v) for n, v in plain["of"].items()}
    # Only a dataclass with these very fields is called: bytes must not call anything else.
    known = _names(found) if isinstance(found, type) and dataclasses.is_dataclass(found) else None
    if known is None or sorted(known) != sorted(options):
        raise ValueError(
            f"jax.export: the program needs {where} with the fields {', '.join(plain['of'])}; it has "
            "changed. Fix: export the program again."
        )
    return found(**options)


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _named(where: str) -> Any:
    """What a module that is imported already has by this name; reading bytes imports nothing."""
    module, _, path = where.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


for _node in (
    Aux, Cache, Coupling, Factors, KeySide, Loss, Mix, PairBias, QuerySide,
    And, Band, Explicit, Lengths, Not, Or, Padding, Segments,
):  # fmt: skip
    _register(_node, f"jaxattn.{_node.__name__}")
