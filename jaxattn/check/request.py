"""Subjects by name, so that another process can make them, and their reports, some at a time."""

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import jax

import jaxattn as ja
from jaxattn.check.adapters import SUBJECTS
from jaxattn.check.law import SIZES, draw
from jaxattn.check.report import Report, run, subject_from
from jaxattn.check.subjects.attention import Checked, Subject, of_attention


class Request(NamedTuple):
    """One subject, said in words, so that a process of its own can make it.

    Attributes:
        name, layout, quick, supports: as on the command line.
        part: which of the subjects of a known name; or variant, and the engine beside it.
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
        yield whole
    else:
        for variant in importlib.import_module(name).VARIANTS:
            yield from (whole._replace(part=variant, engine=engine) for engine in ja.ENGINES)


def subject_of(request: Request) -> Checked:
    """The subject that a request asks for."""
    name, part = request.name, request.part
    if request.engine:
        make = importlib.import_module(name).VARIANTS[part]
        attn_of = lambda spec: ja.attention(spec, make())
        title = f"{part} on {request.engine}"
        return of_attention(title, attn_of, request.engine, least_heads=4, least_width=4)
    if isinstance(part, int) and name in SUBJECTS:
        return SUBJECTS[name][part]()
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    subject = subject_from(found, request.supports, request.layout)
    return subject._replace(name=name) if isinstance(subject, Subject) else subject


def why_not(subject: Checked, request: Request) -> str:
    """Why an engine does not run a variant, or ""."""
    if not request.engine or not isinstance(subject, Subject):
        return ""
    try:
        jax.eval_shape(lambda: subject.attend(draw(SIZES[-1])))
    except ValueError as error:
        if "cannot run this" in str(error):
            return str(error).split(": ", 1)[1].split(". Fix", 1)[0]
    return ""


def report_of(request: Request) -> Report | str:
    """The report on one subject, or why there is none."""
    sys.path.insert(0, "")
    subject = subject_of(request)
    return why_not(subject, request) or run(subject, quick=request.quick)


def reports(asked: list[Request], jobs: int) -> Iterator[Report | str]:
    """In order, by as many processes as are asked for; one subject alone by this one."""
    if min(jobs, len(asked)) <= 1:
        yield from map(report_of, asked)
        return
    with ProcessPoolExecutor(min(jobs, len(asked)), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(report_of, asked)
