"""Laws of an attention that is spread over devices."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxattn.check.law import SINGLE, Unasked, distance, draw, law, noted, of_sides, table

ONE_DEVICE = "one device: XLA_FLAGS=--xla_force_host_platform_device_count=2 gives two on a CPU"
SPLITS = {"examples": PartitionSpec("two"), "heads": PartitionSpec(None, None, "two")}  # of [b, t, h, d]


@law("behaviour", "examples, or heads, split over two devices give what one device gives", "tracing")
def sharding(subject, sizes):
    if jax.device_count() < 2:
        raise Unasked(ONE_DEVICE)
    call = draw(sizes._replace(b=2, h=sizes.h + sizes.h % 2), square=True)
    run = of_sides(subject)
    want, mesh = np.asarray(run(*call[:3])), Mesh(np.array(jax.devices()[:2]), ("two",))
    off = {}
    for name, spec in SPLITS.items():
        off[name] = distance(run(*jax.device_put(call[:3], NamedSharding(mesh, spec))), want)
    return noted(float(np.max(list(off.values()))), SINGLE, f"{max(off, key=lambda n: off[n])} were split")


LAWS = table(sharding)
