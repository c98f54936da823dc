"""The kind of subject that removes heads of a layer, by silence or for good, and what belongs to them.

It can be wrong while every shape is right, so numbers are followed one by one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxattn.check.subjects.params import Params

State = Any  # of an optimizer: a tree that holds trees like the parameters


class Pruned(NamedTuple):
    """A layer without some of its heads.

    Attributes:
        params: of the heads that are left, each of its old width.
        state: of the optimizer, of the same coordinates.
        new_to_old: for each head that is left, its number before.
    """

    params: Params
    state: State
    new_to_old: tuple[int, ...]


class Surgery(NamedTuple):
    """Removal of heads, by silence or for good.

    Attributes:
        name: as a verdict calls it.
        prune: `(params, heads, state or None)` to `Pruned`; heads are numbered as in these parameters.
        ablate: `(params, x [b, q, m], gates [h])` to the output with each head times its gate.
        importance: `(params, x [b, q, m], dL/dy [b, q, m])` to one number a head, up to a common factor:
            the mean over examples of |dL/dgate|.
        supports: some of "d_v", "optimizer" (states of optax), "ablation" and "importance".
        plain, version, least_heads, least_width: as in `Subject`.
    """

    name: str
    prune: Callable[[Params, tuple[int, ...], State], Pruned]
    ablate: Callable[[Params, np.ndarray, np.ndarray], Any] | None = None
    importance: Callable[[Params, np.ndarray, np.ndarray], Any] | None = None
    supports: frozenset[str] = frozenset({"d_v", "optimizer"})
    plain: bool = True
    version: str = ""
    least_heads: int = 2
    least_width: int = 1
