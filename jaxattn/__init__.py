"""jaxattn: attention for the head axis, in JAX and Flax."""

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxattn import axes as axes
from jaxattn import export as export
from jaxattn import masks as masks
from jaxattn import project as project
from jaxattn import sharding as sharding
from jaxattn.attend import attend as attend
from jaxattn.attention import Attention as Attention
from jaxattn.attention import Aux as Aux
from jaxattn.attention import attention as attention
from jaxattn.axes import check_option as check_option
from jaxattn.axes import contract as contract
from jaxattn.cache import Cache as Cache
from jaxattn.cross import CrossMemory as CrossMemory
from jaxattn.cross import Life as Life
from jaxattn.cross import check_cross_mask as check_cross_mask
from jaxattn.engines import ENGINES as ENGINES
from jaxattn.explain import Explanation as Explanation
from jaxattn.identity import Identity as Identity
from jaxattn.identity import content_digest as content_digest
from jaxattn.identity import expected_identity as expected_identity
from jaxattn.ledger import Ledger as Ledger
from jaxattn.ledger import ledger as ledger
from jaxattn.masks import Mask as Mask
from jaxattn.masks import causal as causal
from jaxattn.masks import everything as everything
from jaxattn.masks import explicit as explicit
from jaxattn.masks import lengths as lengths
from jaxattn.masks import padding as padding
from jaxattn.masks import segments as segments
from jaxattn.masks import window as window
from jaxattn.modules import AuxLoss as AuxLoss
from jaxattn.modules import MultiHeadAttention as MultiHeadAttention
from jaxattn.params import check_params as check_params
from jaxattn.sides import Coupling as Coupling
from jaxattn.sides import Factors as Factors
from jaxattn.sides import KeySide as KeySide
from jaxattn.sides import Mix as Mix
from jaxattn.sides import PairBias as PairBias
from jaxattn.sides import QuerySide as QuerySide
from jaxattn.spec import HeadSpec as HeadSpec
from jaxattn.spec import Rotary as Rotary
from jaxattn.spec import Sizes as Sizes
from jaxattn.spec import Stage as Stage
from jaxattn.transform import Declaration as Declaration
from jaxattn.transform import HeadTransform as HeadTransform
from jaxattn.transform import Loss as Loss
from jaxattn.transform import Site as Site
from jaxattn.transform import Upgrade as Upgrade
from jaxattn.transform import chain as chain
from jaxattn.transform import identity as identity

if TYPE_CHECKING:
    from jaxattn import check as check
    from jaxattn.manifest import Manifest as Manifest
    from jaxattn.manifest import admit as admit

__version__ = "0.1.0"

# Loaded when asked for: a manifest needs pydantic, and few programs check an attention.
LATER = {"check": "jaxattn.check", "Manifest": "jaxattn.manifest", "admit": "jaxattn.manifest"}
VARIANTS = Path(__file__).resolve().parent.parent / "variants" / "__init__.py"


def __getattr__(name: str) -> Any:
    if name == "variants":
        return _our_variants()
    if name not in LATER:
        raise AttributeError(f"module 'jaxattn' has no attribute {name!r}")
    module = importlib.import_module(LATER[name])
    return module if name == "check" else getattr(module, name)


def _shadow() -> str | None:
    """The file that `import variants` finds in the place of ours, or None."""
    loaded = sys.modules.get("variants")
    found = importlib.util.find_spec("variants") if loaded is None else loaded.__spec__
    if found is None or not found.origin:  # a folder without __init__.py, or nothing at all
        return None if found is None else str(*(found.submodule_search_locations or ["?"])[:1])
    return None if Path(found.origin).resolve() == VARIANTS else found.origin


def _our_variants() -> Any:
    """The package of variants beside this one, found by its place, whatever else is called `variants`."""
    if _shadow() is None:
        return importlib.import_module("variants")
    name = f"{__name__}.variants"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, VARIANTS, submodule_search_locations=[str(VARIANTS.parent)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


if (_found := _shadow()) is not None:
    _our_variants()  # now, so that a transform that was pickled here can be read in another process
    warnings.warn(
        f"jaxattn: `import variants` finds {_found}, not the variants of this library. Fix: rename that "
        f"file, or "
        "write `variants = ja.variants`.",
        stacklevel=2,
    )
