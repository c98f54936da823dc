"""jaxattn: attention for the head axis, in JAX and Flax."""

import importlib
from typing import TYPE_CHECKING, Any

from jaxattn import axes as axes
from jaxattn import masks as masks
from jaxattn import project as project
from jaxattn import sharding as sharding
from jaxattn.attend import attend as attend
from jaxattn.attention import Attention as Attention
from jaxattn.attention import Aux as Aux
from jaxattn.attention import attention as attention
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
from jaxattn.modules import MultiHeadAttention as MultiHeadAttention
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

# Loaded when asked for: a manifest needs pydantic, and few programs check an attention.
LATER = {"check": "jaxattn.check", "Manifest": "jaxattn.manifest", "admit": "jaxattn.manifest"}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module 'jaxattn' has no attribute {name!r}")
    module = importlib.import_module(LATER[name])
    return module if name == "check" else getattr(module, name)
