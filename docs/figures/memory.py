"""Temporaries of one compiled training step of every variant, as a table in Markdown.

python docs/figures/memory.py              4096 and 8192 rows, about five minutes, all of them compiling
python docs/figures/memory.py 512 1024     other numbers of rows

One example, 8 heads of 64, float32, causal, engine "blocked", the whole sublayer: gradients of its parameters
and states. XLA says what the program will allocate beside its arguments; nothing is run.
"""

import sys

import jax
import jax.numpy as jnp

import jaxattn as ja
import variants


def temporaries(name: str, rows: int) -> float:
    """MiB."""
    attn = ja.attention(ja.HeadSpec(model=512, heads=8), variants.VARIANTS[name]())
    params = jax.eval_shape(attn.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, rows, 512), jnp.float32)
    loss = lambda params, x: attn.apply(params, x, mask=ja.causal(), engine="blocked")[0].sum()
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**20


def main(lengths: list[int]) -> None:
    print("| rows |", " | ".join(variants.VARIANTS), "| one dense score tensor |")
    print("|---:" * (len(variants.VARIANTS) + 2) + "|")
    for rows in lengths:
        made = [f"{temporaries(name, rows):.0f}" for name in variants.VARIANTS]
        print(f"| {rows} |", " | ".join(made), f"| {8 * rows * rows * 4 / 2**20:.0f} |", flush=True)


if __name__ == "__main__":
    main([int(rows) for rows in sys.argv[1:]] or [4096, 8192])
