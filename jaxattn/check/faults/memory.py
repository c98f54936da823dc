"""Wrong memories of a source. `right_memory` is what they are made of; a fault replaces one of its steps."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxattn.check.faults.decoder import B, T, example, held
from jaxattn.check.faults.fault import Fault
from jaxattn.check.faults.right import right
from jaxattn.check.subjects.decoder import Memory, Source
from jaxattn.check.tracing.traced import Trace
from jaxattn.check.verdict import enable_x64


class Stored(NamedTuple):
    """Projected rows, whose they are, and the source row of each beam (None without beams)."""

    key: Array
    value: Array
    name: Any
    beams: np.ndarray | None = None


def meant(stored: Stored, source: Source) -> Stored:
    """What is read for a source: another one is projected anew."""
    return stored if source.name == stored.name else Stored(*source)


def kept(stored: Stored) -> Stored:
    """What stays after a read."""
    return stored


def moved(stored: Stored, index: np.ndarray) -> Stored:
    assert stored.beams is not None
    return stored._replace(beams=stored.beams[index])


STEPS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (meant, kept, moved)}


def rows_for(stored: Stored) -> tuple[Array, Array]:
    """The rows that each entry of a query's batch reads."""
    pair = stored.key, stored.value
    return pair if stored.beams is None else (pair[0][stored.beams], pair[1][stored.beams])


def right_memory(name: str = "right", /, **steps: Callable[..., Any]) -> Memory:
    """A stored pair with its source's name; `steps` replaces `STEPS`."""
    s = {**STEPS, **steps}

    def read(stored: Stored, query: Array, source: Source) -> tuple[Stored, Array]:
        stored = s["meant"](stored, source)
        return s["kept"](stored), right(query, *rows_for(stored))

    return Memory(
        name, lambda source, heads: Stored(*source), read, frozenset({"gqa", "d_v", "share", "reorder"}),
        share=lambda stored, beams: stored._replace(beams=beams), reorder=s["moved"],
    )  # fmt: skip


def traced(**steps: Callable[..., Any]) -> Trace:
    """Two reads, one after beams changed places, one of another source: the first wrong one, or the last."""
    with enable_x64(True):
        s, found = {**STEPS, **steps}, None
        one, other = (Source(*example(seed)[1:3], seed) for seed in (0, 1))
        query = example(2).query
        stored, index = Stored(*one), np.array([1, 0])
        for source, order in ((one, None), (one, None), (one, index), (other, None)):
            if order is not None:
                stored = s["moved"](stored._replace(beams=np.arange(B)), order)
            stored = s["meant"](stored, source)
            turn = slice(None) if stored.beams is None else np.asarray(index)
            want = source.key[turn], source.value[turn]
            got = rows_for(stored)
            shown = np.ones((B, 1, T, T), bool)
            found = held(query, got, want, np.ones((B, 1, T, got[0].shape[1]), bool), shown)
            if not found:
                return found
            stored = s["kept"](stored)
        assert found is not None
        return found


def _planted(says: str, source: str, law: str, **steps: Callable[..., Any]) -> Fault:
    subject = right_memory("planted", **steps)
    return Fault(says, source, law, subject, "K", functools.partial(traced, **steps))


def _grown(stored: Stored) -> Stored:
    again = lambda x: jnp.concatenate([x, x[:, -1:]], 1)
    return stored._replace(key=again(stored.key), value=again(stored.value))


FAULTS: dict[str, Fault] = {
    "memory of another source": _planted(
        "stored K and V are read whatever source the call brings",
        "PUB-14; M3.2 0x0AB",
        "source-replaced",
        meant=lambda stored, source: stored,
    ),
    "memory grown by steps": _planted(
        "each target step appends to the projected source as to a cache of its own rows",
        "M3.2 0x0AB",
        "reads-change-nothing",
        kept=_grown,
    ),
    "source moved with its beams": _planted(
        "a reorder permutes the shared source and the beam map",
        "M3.2 0x0AB",
        "sources-stand",
        moved=lambda stored, index: moved(
            stored._replace(key=stored.key[index], value=stored.value[index]), index
        ),
    ),
}
