"""Which examples a step sees: a pure function of seed and step, so that a run can stop anywhere.

Nothing here has a state that a checkpoint could forget: step 1000 of a resumed run asks the same
question as step 1000 of an unbroken one.
"""

from functools import lru_cache

import numpy as np

from experiments.lib.plays import Text


@lru_cache(maxsize=8)
def order(seed: int, epoch: int, count: int) -> np.ndarray:
    """A fresh order of `count` examples for each epoch.

    >>> sorted(order(seed=0, epoch=3, count=5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.random.default_rng([seed, epoch]).permutation(count)


def indices(seed: int, step: int, count: int, batch: int) -> np.ndarray:
    """The examples of the batch of `step` (from 0): epochs without replacement, the rest dropped.

    >>> [indices(0, step, count=6, batch=3).tolist() for step in (0, 1)]
    [[3, 2, 5], [4, 0, 1]]
    """
    epoch, place = divmod(step, count // batch)
    return order(seed, epoch, count)[place * batch : (place + 1) * batch]


def window_starts(seed: int, step: int, length: int, context: int, batch: int) -> np.ndarray:
    """First positions of the windows of `step` in a text of `length` symbols.

    An epoch reads the text once, in windows that do not overlap; each epoch shifts their grid.
    A window takes context + 1 symbols: each is the target of the one before it.
    """
    count = windows_an_epoch(length, context)
    epoch = step // (count // batch)
    shift = np.random.default_rng([seed, epoch, 1]).integers(context)
    return shift + context * indices(seed, step, count, batch)


def windows_an_epoch(length: int, context: int) -> int:
    return (length - 1) // context - 1  # one less than fit, which leaves room for the shift


def check(text: Text, context: int, batch: int) -> None:
    """Raises ValueError when a part of the text is too short for these windows."""
    if windows_an_epoch(len(text.train), context) < batch:
        raise ValueError(
            f"{text.name}: got {len(text.train)} symbols to train on, expected at least "
            f"{context * (batch + 1) + 1} for --batch {batch} windows of --context {context}; "
            "give a longer text, or ask for less"
        )
    if len(text.valid) < 2:
        raise ValueError(f"{text.name}: got {len(text.valid)} symbols to validate on, expected 2")


def windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """The windows that begin at `starts` [...]: [..., context + 1].

    >>> windows(np.arange(10), np.array([0, 5]), context=3)
    array([[0, 1, 2, 3],
           [5, 6, 7, 8]])
    """
    return tokens[starts[..., None] + np.arange(context + 1)]


def whole(tokens: np.ndarray, context: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """All of `tokens` in order, as batches of windows [n, batch, context + 1], and weights.

    Every symbol but the first is a target exactly once: the last window and the last batch are
    filled up with targets of weight 0.

    >>> tokens, weights = whole(np.arange(6), context=2, batch=2)
    >>> tokens.tolist()
    [[[0, 1, 2], [2, 3, 4]], [[4, 5, 0], [0, 0, 0]]]
    >>> weights.sum()
    np.float32(5.0)
    """
    targets = len(tokens) - 1
    rows = -(-targets // (context * batch)) * batch
    padded = np.zeros(rows * context + 1, tokens.dtype)
    padded[: len(tokens)] = tokens
    weights = (np.arange(rows * context) < targets).astype(np.float32)
    split = windows(padded, context * np.arange(rows), context)
    return (
        split.reshape(-1, batch, context + 1),
        weights.reshape(-1, batch, context),
    )
