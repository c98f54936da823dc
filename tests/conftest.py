"""float64 everywhere: a wrong formula must not hide behind rounding."""

import jax

jax.config.update("jax_enable_x64", True)
