"""Contracts of a transform as a value: equal, hashable, picklable, printed so that it can be read back."""

import copy
import pickle
import sys
from collections.abc import Iterator

from jaxattn import transform as core
from jaxattn.attention import attention
from jaxattn.check.contracts.form import Made, contract
from jaxattn.transform import HeadTransform, flatten


@contract(
    "behaviour", "equal options make equal transforms with equal hashes, also as copies and through pickle"
)
def is_a_value(made: Made) -> Iterator[str]:
    given = made.transform
    copies = {"a deep copy": copy.deepcopy(given)}
    try:
        copies["what pickle gives back"] = pickle.loads(pickle.dumps(given))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        yield (
            f"it cannot be pickled ({error}). Fix: define the class at the top level of a module; options "
            "are numbers, strings, tuples, or functions of a module, no lambdas"
        )
    for what, other in copies.items():
        if other != given or hash(other) != hash(given):
            yield (
                f"{what} is not equal to it, or hashes otherwise, so that every layer would be traced anew. "
                "Fix: options that compare by value (numbers, strings, tuples, frozen dataclasses)"
            )
        elif attention(made.spec, other) != made.attn:
            yield f"{what} makes another attention. Fix: an adapt that depends on sizes and options alone"


@contract("behaviour", "its repr, evaluated in its module, is equal to it")
def reads_back(made: Made) -> Iterator[str]:
    given = made.transform
    space = {} if made.attn.links == (given,) else {"chain": core.chain}
    for link in flatten((given,)):
        space |= vars(sys.modules[type(link).__module__])
    try:
        other = eval(repr(given), space)
    except (SyntaxError, NameError, TypeError, ValueError, AttributeError) as error:
        yield (
            f"its repr, {given!r}, does not evaluate in {type(given).__module__}: {error}. Fix: leave "
            "__repr__ to HeadTransform, define the class at the top level, and import there what its "
            "options are made of"
        )
        return
    if not isinstance(other, HeadTransform) or other != given:
        yield (
            f"its repr, {given!r}, evaluates to something else, {other!r}. Fix: leave __repr__ to "
            "HeadTransform"
        )
