"""Pages in Markdown: all laws; and reports beside each other, with the inputs that break a law."""

import platform
from collections.abc import Sequence

from jaxattn.check.law import Law
from jaxattn.check.laws import LAWS
from jaxattn.check.report import Report, Ruled


def laws_page() -> str:
    """All laws by the kind of subject that they speak of."""
    lines = [
        "# The laws",
        "",
        f"{len(LAWS)} laws, by the kind of subject. What must hold is computed by loops or formulas in",
        "numpy float64, or said by the law itself. Some need a feature that a subject declares; those marked",
        "plain speak of softmax(q k / sqrt(d)) v head by head. Written by `python -m jaxattn.check --laws`.",
    ]
    kinds: dict[type, list[Law]] = {}
    for law in LAWS.values():
        kinds.setdefault(law.about, []).append(law)
    for kind, some in kinds.items():
        lines += [
            "",
            f"## {kind.__name__}",
            "",
            "| level | law | what must hold | needs |",
            "|---|---|---|---|",
        ]
        for law in some:
            needs = ", ".join([*(["plain"] if law.plain else []), *sorted(law.needs)])
            lines.append(f"| {law.level} | {law.name} | {law.says} | {needs} |")
    return "\n".join(lines) + "\n"


def beside(reports: Sequence[Report]) -> str:
    """Markdown of some reports: laws down, subjects across, then what breaks each law.

    Example:
        >>> from jaxattn.check.report import run
        >>> from jaxattn.check.subjects.attention import of_function
        >>> nothing = of_function(lambda query, key, value: query, name="nothing")
        >>> print(beside([run(nothing, laws=["output-shape", "scale"])]).split("\\n")[4])
        | output-shape | holds |
    """
    kinds: dict[str, list[Report]] = {}
    for report in reports:
        kinds.setdefault(report.kind, []).append(report)
    return "\n\n".join(_table(kind, some) + _breaks(some) for kind, some in kinds.items()) + "\n"


def _table(kind: str, reports: list[Report]) -> str:
    names = list(dict.fromkeys(r.law for report in reports for r in report.rulings))
    found = [{r.law: r for r in report.rulings} for report in reports]
    versions = ", ".join(dict.fromkeys(report.version for report in reports if report.version))
    rows = [
        f"{kind}: {versions}; Python {platform.python_version()}, CPU.",
        "",
        f"| law | {' | '.join(report.subject for report in reports)} |",
        f"|---|{'---|' * len(reports)}",
        *(f"| {name} | {' | '.join(_cell(of.get(name)) for of in found)} |" for name in names),
    ]
    return "\n".join(rows)


def _cell(ruled: Ruled | None) -> str:
    if ruled is None or ruled.ruling == "not asked":
        return ""
    return str(ruled) if ruled.good else f"**{ruled.ruling}**"


def _breaks(reports: list[Report]) -> str:
    """One line for each law and input, with the subjects that it breaks."""
    lines: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        for r in report.broken:
            sizes = " ".join(f"{n}={s}" for n, s in r.sizes._asdict().items()) if r.sizes else "any"
            off = "" if r.measured is None else f" {r.measured:.1e} > {r.limit:.0e}"
            lines.setdefault((r.law, sizes), []).append(
                f"{report.subject}{off}" + (f" ({r.note})" if r.note else "")
            )
    if not lines:
        return ""
    said = [f"- {law}, at {sizes}: {'; '.join(who)}" for (law, sizes), who in lines.items()]
    return "\n\n" + "\n".join(said)
