"""Laws of what is computed for a hidden pair and thrown away."""

import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import SINGLE, distance, draw, law, noted, slopes, table


@law("numbers", "a hidden score of 1e4 and more reaches no gradient", "mask", "cross", "tracing")
def hidden_large_score(subject, sizes):
    call = draw(sizes)
    mask = np.ones((sizes.b, 1, sizes.q, sizes.k), bool)
    mask[:, :, 0, -1] = False  # the other rows see that key, so that nothing clears it beforehand
    call = call._replace(query=jnp.abs(call.query) + 1, mask=jnp.asarray(mask))

    def owed(last):
        key = np.array(call.key)
        key[:, -1] = last
        return slopes(subject, call._replace(key=jnp.asarray(key)), np.arange(sizes.q) == 0)[0]

    return noted(distance(owed(1e4), owed(1.0)), SINGLE, "exp overflows in a branch that is not taken")


LAWS = table(hidden_large_score)
