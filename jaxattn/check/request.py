"""Subjects by name, so that another process can make them, and their reports, some at a time."""

import importlib
import inspect
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax

import jaxattn as ja
from jaxattn.check.adapters import SUBJECTS
from jaxattn.check.contracts import transform
from jaxattn.check.law import SIZES, draw
from jaxattn.check.report import Report, run, subject_from
from jaxattn.check.subjects.attention import Checked, Subject, of_attention


class Request(NamedTuple):
    """One subject, said in words, so that a process of its own can make it.

    Attributes:
        name, layout, quick, supports: as on the command line.
        part: which of the subjects of a known name; or variant, and the engine beside it; "contracts" for
            those of a transform.
    """

    name: str
    layout: str
    quick: bool
    supports: tuple[str, ...] | None = None
    part: int | str = 0
    engine: str = ""


def requests(
    name: str, layout: str = "bqhd", quick: bool = False, supports: tuple[str, ...] | None = None
) -> Iterator[Request]:
    """What a name on the command line stands for."""
    whole = Request(name, layout, quick, supports)
    if name in SUBJECTS:
        yield from (whole._replace(part=part) for part in range(len(SUBJECTS[name])))
    elif ":" in name:
        if transform_of(name) is None:
            yield whole
        else:
            yield whole._replace(part="contracts")
            yield from (whole._replace(part=name, engine=engine) for engine in ja.ENGINES)
    else:
        for variant in importlib.import_module(name).VARIANTS:
            yield from (whole._replace(part=variant, engine=engine) for engine in ja.ENGINES)


def named(name: str) -> Any:
    """What `module:attribute` names.

    Raises:
        ImportError, AttributeError, ValueError: where there is no such module or attribute.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError("expected module:name, such as my.module:attention.")
    return getattr(importlib.import_module(module), attribute)


def transform_of(name: str) -> ja.HeadTransform | None:
    """The transform that `module:attribute` names, or None.

    It may be one, a class of one, or a function without arguments that makes one.

    Raises:
        TypeError: for a class whose options have no defaults.
    """
    found = named(name)
    if isinstance(found, ja.HeadTransform):
        return found
    is_class = isinstance(found, type) and issubclass(found, ja.HeadTransform)
    needed = _needed(found) if is_class or not isinstance(found, type) else None
    if is_class and needed:
        raise TypeError(
            f"its options {', '.join(needed)} have no defaults. Fix: name an instance, or a function without "
            "arguments that makes one."
        )
    made = found() if needed == [] else None
    return made if isinstance(made, ja.HeadTransform) else None


def _needed(function: Any) -> list[str] | None:
    """The arguments without which it cannot be called; None where nobody can tell, or it takes any."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return [p.name for p in parameters if p.default is p.empty]


def _maker(request: Request) -> Callable[[], ja.HeadTransform]:
    """What makes the variant that a request with an engine speaks of."""
    if ":" in request.name:
        found = transform_of(request.name)
        assert found is not None, "requests yields engines for transforms alone"
        return lambda: found
    return importlib.import_module(request.name).VARIANTS[request.part]


def subject_of(request: Request) -> Checked:
    """The subject that a request asks for."""
    name, part = request.name, request.part
    if request.engine:
        make = _maker(request)
        attn_of = lambda spec: ja.attention(spec, make())
        title = f"{part} on {request.engine}"
        return of_attention(title, attn_of, request.engine, least_heads=4, least_width=4)
    if isinstance(part, int) and name in SUBJECTS:
        return SUBJECTS[name][part]()
    subject = subject_from(named(name), request.supports, request.layout)
    return subject._replace(name=name) if isinstance(subject, Subject) else subject


def why_not(subject: Checked, request: Request) -> str:
    """Why an engine does not run a variant, or the sizes are refused, or ""."""
    if not request.engine or not isinstance(subject, Subject):
        return ""
    largest = SIZES[-1]
    try:
        ja.attention(ja.HeadSpec(model=largest.h * largest.d, heads=largest.h), _maker(request)())
    except ValueError as error:
        return f"it refuses {largest.h} heads of width {largest.d}: {error}"
    try:
        jax.eval_shape(lambda: subject.attend(draw(largest)))
    except ValueError as error:
        if "cannot run this" in str(error):
            return str(error).split(": ", 1)[1].split(". Fix", 1)[0]
    return ""


def report_of(request: Request) -> Report | str:
    """The report on one subject, or why there is none."""
    sys.path.insert(0, "")
    if request.part == "contracts":
        given = transform_of(request.name)
        assert given is not None, "requests yields contracts for transforms alone"
        return transform(given)._replace(subject=request.name)
    subject = subject_of(request)
    return why_not(subject, request) or run(subject, quick=request.quick)


def reports(asked: list[Request], jobs: int) -> Iterator[Report | str]:
    """In order, by as many processes as are asked for; one subject alone by this one."""
    if min(jobs, len(asked)) <= 1:
        yield from map(report_of, asked)
        return
    with ProcessPoolExecutor(min(jobs, len(asked)), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(report_of, asked)
