"""Laws of a source that is stored once: it is what it was made of, and read for nothing else."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.draws.decoder import near, rows_of
from jaxattn.check.law import SINGLE, Outcome, Sizes, distance, law, loops, noted, table
from jaxattn.check.subjects.attention import Call
from jaxattn.check.subjects.decoder import Memory, Source


def source_of(subject: Memory, sizes: Sizes, name: str, b: int | None = None) -> tuple[Array, Source]:
    """A query of q rows, and the rows of a source of that name."""
    rows = rows_of(subject, sizes, b=b, seed=sum(map(ord, name)))
    query = np.random.default_rng(0).normal(size=(len(rows.query), sizes.q, *rows.query.shape[2:]))
    return jnp.asarray(query.astype(np.float32)), Source(rows.key, rows.value, name)


def _direct(query: Array, source: Source) -> np.ndarray:
    return loops(Call(query, source.key, source.value))


@law("numbers", "a read of what was stored is attention to its source", plain=True, about=Memory)
def memory_is_the_source(subject, sizes):
    query, source = source_of(subject, sizes, "one")
    _, got = subject.read(subject.project(source, sizes.h), query, source)
    return Outcome(distance(got, _direct(query, source)), SINGLE)


@law("behaviour", "what was stored of one source is not read for another", plain=True, about=Memory)
def source_replaced(subject, sizes):
    (query, source), (_, other) = (source_of(subject, sizes, name) for name in ("one", "other"))
    memory, _ = subject.read(subject.project(source, sizes.h), query, source)
    try:
        _, got = subject.read(memory, query, other)
    except Exception:  # any error is a refusal
        return Outcome(0.0, SINGLE)
    note = "it is what the first source gives" if near(got, _direct(query, source)) else ""
    return Outcome(distance(got, _direct(query, other)), SINGLE, note)


@law("behaviour", "reads do not change what was stored", plain=True, about=Memory)
def reads_change_nothing(subject, sizes):
    query, source = source_of(subject, sizes, "one")
    memory = subject.project(source, sizes.h)
    for shift in range(3):
        asked = query + shift
        memory, got = subject.read(memory, asked, source)
        off = distance(got, _direct(asked, source))
        if not off <= SINGLE:
            return Outcome(off, SINGLE, f"read {shift + 1} of 3")
    return Outcome(0.0, SINGLE)


def _beams(subject: Any, sizes: Sizes, first: list[int], *orders: list[int]) -> Outcome:
    """Three beams that read some of three sources, and then change places."""
    query, source = source_of(subject, sizes, "one", b=3)
    memory, beams = subject.share(subject.project(source, sizes.h), np.array(first)), np.array(first)
    for index in map(np.array, orders):
        memory, beams = subject.reorder(memory, index), beams[index]
    _, got = subject.read(memory, query, source)
    want = _direct(query, Source(source.key[beams], source.value[beams], "one"))
    return noted(distance(got, want), SINGLE, f"beams of sources {beams.tolist()}")


@law("axes", "a beam reads the source that it was given", "share", plain=True, about=Memory)
def beams_share_a_source(subject, sizes):
    return _beams(subject, sizes, [0, 2, 2])


@law("behaviour", "beams that change places leave the sources", "share", "reorder", plain=True, about=Memory)
def sources_stand(subject, sizes):
    return _beams(subject, sizes, [0, 1, 2], [1, 2, 0])


LAWS = table(
    memory_is_the_source,
    source_replaced,
    reads_change_nothing,
    beams_share_a_source,
    sources_stand,
)
