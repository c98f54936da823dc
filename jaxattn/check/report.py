"""run: every law asked of one attention, and a report that says which are broken, and by what input."""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, cast, get_args

import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import SIZES, Law, Outcome, Sizes, Unasked, draw
from jaxattn.check.laws import LAWS
from jaxattn.check.subjects.attention import Call, Checked, Subject, of_function

Ruling = Literal["holds", "broken", "raises", "refused", "taken silently", "not asked"]
GOOD = ("holds", "refused", "not asked")


class Ruled(NamedTuple):
    """What became of one law.

    Attributes:
        law, level, says: of the law.
        ruling: "holds"; "broken" at `sizes`, the smallest that break it; "raises", where the attention
            raised though it declares what the law needs; "not asked", where it declares it cannot; for
            what it declares it cannot: "refused" (it raises, as it should) or "taken silently".
        measured, limit: of the outcome.
        note: what the wrong answer looks like, or the error.
        sizes: of the call; its numbers are `draw(sizes)` of jaxattn/check/law.py.
    """

    law: str
    level: str
    says: str
    ruling: Ruling
    measured: float | None = None
    limit: float | None = None
    note: str = ""
    sizes: Sizes | None = None

    @property
    def good(self) -> bool:
        return self.ruling in GOOD

    def __str__(self) -> str:
        if self.good:
            return self.ruling + (f": {self.note}" if self.ruling == "holds" and self.note else "")
        number = "" if self.measured is None else f" {self.measured:.1e} > {self.limit:.0e}"
        named = {} if self.sizes is None else self.sizes._asdict()
        at = " at " + " ".join(f"{n}={s}" for n, s in named.items()) if named else ""
        return f"{self.ruling}{number}{at}: {self.says}" + (f" ({self.note})" if self.note else "")


class Report(NamedTuple):
    """The rulings on one attention, and the kind of subject that it is. True where it passed."""

    subject: str
    kind: str
    version: str
    rulings: tuple[Ruled, ...]

    @property
    def passed(self) -> bool:
        """Whether all that was asked is as it should be, and something was asked."""
        asked = [ruled for ruled in self.rulings if ruled.ruling != "not asked"]
        return bool(asked) and all(ruled.good for ruled in asked)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def broken(self) -> tuple[Ruled, ...]:
        """What is not as it should be."""
        return tuple(ruled for ruled in self.rulings if not ruled.good)

    @property
    def counts(self) -> str:
        """How many laws came to each ruling, as words."""
        found = Counter(ruled.ruling for ruled in self.rulings)
        return ", ".join(f"{found[ruling]} {ruling}" for ruling in get_args(Ruling) if found[ruling])

    def __str__(self) -> str:
        width = max((len(ruled.law) for ruled in self.rulings), default=0)
        head = f"{self.subject} ({self.kind}) {self.version}".strip()
        lines = [f"  {ruled.level:9} {ruled.law:{width}}  {ruled}" for ruled in self.rulings]
        return "\n".join([f"{head}: {self.counts}", *lines])

    def as_json(self) -> str:
        """The same as strict JSON; what is no number is null."""

        def row(ruled: Ruled) -> dict:
            number = ruled.measured
            finite = number if number is not None and np.isfinite(number) else None
            sizes = None if ruled.sizes is None else ruled.sizes._asdict()
            return ruled._replace(measured=finite)._asdict() | {"sizes": sizes}

        rows = [row(ruled) for ruled in self.rulings]
        whole = {
            "subject": self.subject,
            "kind": self.kind,
            "version": self.version,
            "passed": self.passed,
            "laws": rows,
        }
        return json.dumps(whole, indent=1, allow_nan=False)


def subject_from(
    attention: Checked | Callable[..., Any], supports: Iterable[str] | None = None, layout: str = "bqhd"
) -> Checked:
    """A subject as it is, and a function of heads as a subject."""
    if isinstance(attention, tuple(law.about for law in LAWS.values())):
        if supports is not None or layout != "bqhd":
            raise ValueError(
                f"supports, layout: got them for a {type(attention).__name__}, expected a function. "
                "Fix: leave them out, the subject has its own."
            )
        return cast(Checked, attention)
    if not callable(attention):
        raise TypeError(
            f"attention: got {type(attention).__name__}, expected a function of heads or a subject. "
            "Fix: the function itself, or what `of_layer` and the other adapters make."
        )
    return of_function(attention, supports=None if supports is None else tuple(supports), layout=layout)


def names_of(subject: Checked) -> list[str]:
    """The laws that can be asked of a subject, and "F-refused" for what it declares impossible.

    Example:
        >>> from jaxattn.check.subjects.attention import of_function
        >>> def mine(query, key, value): ...
        >>> names_of(of_function(mine, supports=("cross",)))[-1]
        'gqa-refused'
    """
    laws = [name for name, law in LAWS.items() if not _unasked(law, subject)]
    refusals = [_refused(feature) for feature in ASKING if feature not in subject.supports]
    return laws + (refusals if isinstance(subject, Subject) else [])


def run(
    attention: Checked | Callable[..., Any],
    *,
    laws: Iterable[str] | None = None,
    quick: bool = False,
    supports: Iterable[str] | None = None,
    layout: str = "bqhd",
) -> Report:
    """Ask an attention every law; whatever it does wrong is a ruling, none is an error of this function.

    Args:
        attention: a function of heads, or a subject: what an adapter made, which says more of itself.
        laws: some of `LAWS` and of `names_of(subject)`; None asks all that speak of such a subject.
        quick: ask the two smallest sizes alone.
        supports, layout: of a function, as in `of_function`.

    Raises:
        ValueError: for a law that is not known, or speaks of another kind of subject.
        TypeError: for what is neither a function nor a subject.

    Example:
        >>> import jax.numpy as jnp
        >>> def mean(query, key, value):  # no scores at all
        ...     return jnp.broadcast_to(value.mean(1, keepdims=True), (*query.shape[:3], value.shape[3]))
        >>> report = run(mean, laws=["output-shape", "values"])
        >>> [(ruled.law, ruled.ruling) for ruled in report.rulings]
        [('output-shape', 'holds'), ('values', 'broken')]
    """
    subject = subject_from(attention, supports, layout)
    about = [name for name, law in LAWS.items() if isinstance(subject, law.about)]
    known = dict.fromkeys([*about, *names_of(subject)])
    fit = tuple(s for s in SIZES if s.h >= subject.least_heads and s.d >= subject.least_width)
    sizes = fit[:2] if quick else fit
    rulings = []
    for name in known if laws is None else laws:
        if name not in known:
            raise ValueError(f"laws: got {name!r}, expected some of {', '.join(known)}.")
        if name in LAWS:
            rulings.append(_judge(LAWS[name], subject, sizes))
        elif isinstance(subject, Subject):
            rulings.append(_refusal(subject, name))
    return Report(subject.name, type(subject).__name__, subject.version, tuple(rulings))


def assert_laws(
    attention: Checked | Callable[..., Any],
    *,
    laws: Iterable[str] | None = None,
    quick: bool = False,
    supports: Iterable[str] | None = None,
    layout: str = "bqhd",
) -> None:
    """`run`, as one test of your own suite; arguments as there.

    Raises:
        AssertionError: listing every law that does not hold, each with the smallest input that breaks it; or
            where no law can be asked.
    """
    report = run(attention, laws=laws, quick=quick, supports=supports, layout=layout)
    lines = [f"  {r.law}: {r}" for r in report.broken] or [f"  nothing was asked: {_reasons(report)}"]
    assert report.passed, "\n".join([f"{report.subject}:", *lines])


def _reasons(report: Report) -> str:
    """Why laws were not asked."""
    return "; ".join(f"{r.law}, {r.note}" for r in report.rulings) or "no law"


def law_tests(
    attention: Checked | Callable[..., Any],
    *,
    laws: Iterable[str] | None = None,
    quick: bool = False,
    supports: Iterable[str] | None = None,
    layout: str = "bqhd",
) -> Any:
    """Every law as a test of your own suite, for pytest to collect under the name that you give it.

        test_my_attention = law_tests(mine)

    Args:
        attention, quick, supports, layout: as in `run`.
        laws: as in `run`; None makes a test of each of `names_of(subject)`.

    Raises:
        ModuleNotFoundError: without pytest.

    Example:
        >>> test_mine = law_tests(lambda query, key, value: value, laws=["values"])
        >>> [mark.args for mark in test_mine.pytestmark]
        [('law', ['values'])]
    """
    import pytest

    subject = subject_from(attention, supports, layout)

    @pytest.mark.parametrize("law", names_of(subject) if laws is None else list(laws))
    def test(law: str) -> None:
        report = run(subject, laws=[law], quick=quick)
        if not report.broken and not report.passed:
            pytest.skip(_reasons(report))  # only known when it is asked, such as devices that are not there
        assert report.passed, str(report)

    return test


def _unasked(law: Law, subject: Checked) -> str:
    """Why a law is not asked, or ""."""
    if not isinstance(subject, law.about):
        return f"it speaks of a {law.about.__name__}"
    if missing := law.needs - subject.supports:
        return f"needs {', '.join(sorted(missing))}"
    return "heads are mixed" if law.plain and not subject.plain else ""


def _judge(law: Law, subject: Checked, sizes: tuple[Sizes, ...]) -> Ruled:
    head = law.name, law.level, law.says
    if why := _unasked(law, subject):
        return Ruled(*head, "not asked", note=why)
    if not (law.sizes or sizes):
        return Ruled(*head, "not asked", note="no size has so many heads, or heads so wide")
    outcome = Outcome(0.0, 0.0)
    for size in law.sizes or sizes:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = law.judge(subject, size)
        except Unasked as reason:
            return Ruled(*head, "not asked", note=str(reason))
        except Exception as error:  # whatever the subject does is a ruling on it
            lines = str(error).strip().splitlines() or [""]
            return Ruled(*head, "raises", note=f"{type(error).__name__}: {lines[0]}"[:200], sizes=size)
        if outcome.broken:
            return Ruled(*head, "broken", outcome.measured, outcome.limit, outcome.note, size)
    return Ruled(*head, "holds", outcome.measured, outcome.limit, outcome.note)


def _biased(call: Call) -> Call:
    (b, q, h, _), k = call.query.shape, call.key.shape[1]
    return call._replace(bias=jnp.ones((b, h, q, k), jnp.float32))


ASKING: dict[str, Callable[[Call], Call]] = {
    "causal": lambda call: call._replace(causal=True),
    "bias": _biased,
    "d_v": lambda call: call._replace(value=jnp.concatenate([call.value, call.value], -1)),
    "gqa": lambda call: call._replace(key=call.key[:, :, :1], value=call.value[:, :, :1]),
}


def _refused(feature: str) -> str:
    return f"{feature}-refused"


def _refusal(subject: Subject, name: str) -> Ruled:
    """Whether a call that needs what the subject declares it cannot raises."""
    feature = next(feature for feature in ASKING if _refused(feature) == name)
    says = f"{feature} is declared impossible, so asking for it raises"
    head, size = (name, "behaviour", says), SIZES[-1]
    try:
        subject.attend(ASKING[feature](draw(size, square=True)))
    except Exception as error:  # any error is a refusal
        return Ruled(*head, "refused", note=type(error).__name__)
    return Ruled(*head, "taken silently", sizes=size)
