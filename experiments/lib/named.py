"""Variants by name: those of the registry, and `my.module:factory` from the current directory.

A factory is a class of `HeadTransform`, a function without required arguments that makes one, or one that is
made already.
"""

import importlib
import inspect
import os
import sys
from typing import Any

import jaxattn as ja
import variants

KNOWN = ",".join(variants.VARIANTS)


def usual(name: str) -> ja.HeadTransform:
    """The variant of this name with its default options.

    Raises:
        ValueError: there is none; the message says what was looked for and where.

    >>> usual("moh") == variants.moh()
    True
    """
    if name in variants.VARIANTS:
        return variants.VARIANTS[name]()
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        known = ", ".join(variants.VARIANTS)
        raise ValueError(f"invalid choice {name!r}; expected one of {known}, or my.module:factory")
    found: Any = _module(module, name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name!r}: the module {module} ({_file(found)}) has no {attribute}")
        found = getattr(found, part)
    if not isinstance(found, ja.HeadTransform):
        if not callable(found):
            raise ValueError(
                f"{name!r} is a {type(found).__name__}, expected a ja.HeadTransform or what makes one"
            )
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ValueError(f"{name!r}: {error}; every option needs a default here") from None
        found = found()
    if not isinstance(found, ja.HeadTransform):
        raise ValueError(f"{name!r} makes a {type(found).__name__}, expected a ja.HeadTransform")
    return found


def _module(module: str, name: str) -> Any:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ValueError(
            f"{name!r}: there is no module {error.name}; looked in {here} and in sys.path"
        ) from None


def _file(found: Any) -> str:
    return getattr(found, "__file__", None) or type(found).__name__
