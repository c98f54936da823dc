"""Docstrings as Markdown, for the reference pages; loaded by mkdocs.yml.

Docstrings are read from the source and nothing is imported, so a build takes seconds.
"""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(Example:\n)?^( *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
SEVERAL = re.compile(r"^( +)(\w+(?:,\s+\w+)+):(?= )", re.MULTILINE)


def as_markdown(text: str) -> str:
    """The text with a fence around each doctest, and "<" before a word escaped: it is a product, not a tag.

    "d_qk, d_v: widths" is one entry of a list, so its names are joined by spaces that do not break.
    """

    def fenced(match: re.Match[str]) -> str:
        before, indent = match.group(1) or "\n", match.group(2)
        body = match.group(0).removeprefix(match.group(1) or "").replace("<BLANKLINE>", "").rstrip()
        return f"{before}{indent}```pycon\n{body.replace('&lt;', '<')}\n{indent}```"

    def joined(match: re.Match[str]) -> str:
        return match.group(1) + ",\u00a0".join(re.split(r",\s+", match.group(2))) + ":"

    text = SEVERAL.sub(joined, text)
    return DOCTEST.sub(fenced, re.sub(r"<(?=\w)(?!BLANKLINE>)", "&lt;", text))


class Docstrings(griffe.Extension):
    """Prepares docstrings, and gives each transform the signature that its options make."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if not any(str(base).endswith("HeadTransform") for base in cls.bases) or "__init__" in cls.members:
            return
        kind = griffe.ParameterKind.positional_or_keyword
        options = [griffe.Parameter("self", kind=kind)]
        for name, member in cls.members.items():
            if (
                isinstance(member, griffe.Attribute)
                and member.annotation
                and not member.labels & {"property"}
            ):
                if "ClassVar" not in str(member.annotation):
                    options.append(
                        griffe.Parameter(name, annotation=member.annotation, default=member.value, kind=kind)
                    )
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*options)))
