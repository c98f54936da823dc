"""Laws of what is computed for a hidden pair and thrown away."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.check.law import SINGLE, Outcome, distance, draw, law, table


@law("numbers", "a hidden score of 1e4 and more reaches no gradient", "mask", "cross", "tracing")
def hidden_large_score(subject, sizes):
    call = draw(sizes)
    mask = np.ones((sizes.b, 1, sizes.q, sizes.k), bool)
    mask[:, :, 0, -1] = False  # the other rows see that key, so that nothing clears it beforehand
    call = call._replace(query=jnp.abs(call.query) + 1, mask=jnp.asarray(mask))

    def owed(last):
        key = call.key.at[:, -1].set(last)
        loss = lambda query: jnp.sum(subject.attend(call._replace(query=query, key=key))[:, 0] ** 2)
        return jax.jit(jax.grad(loss))(call.query)

    return Outcome(distance(owed(1e4), owed(1.0)), SINGLE, "exp overflows in a branch that is not taken")


LAWS = table(hidden_large_score)
