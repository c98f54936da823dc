"""Write text with a trained run: the model of its last checkpoint, symbol by symbol.

python experiments/sample.py runs/mha-seed0 --prompt "To be" --symbols 200
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro

from experiments.lib import folder, model, options, plays
from experiments.lib.screen import printable, refusals, script

NAME = "sample.py"


@dataclass(frozen=True)
class Options:
    run: tyro.conf.Positional[Path]
    """The run folder of train_variant.py."""
    prompt: str | None = None
    """What the text begins with; left out: the first symbol that the run knows."""
    symbols: int = 200
    """How many to write after the prompt."""
    seed: int = 0
    """Of the draws."""


def main(argv: Sequence[str] | None = None) -> None:
    with script(NAME) as (screen, _):
        asked = tyro.cli(Options, description=__doc__, args=sys.argv[1:] if argv is None else argv)
        with refusals(NAME):
            screen.say(printable(sample(asked)))


def sample(asked: Options) -> str:
    """The prompt and what the run writes after it.

    Raises:
        ValueError, OSError: there is no such run, or an option cannot be followed; the message names it.
    """
    if asked.symbols < 1:
        raise ValueError(f"--symbols: got {asked.symbols}, expected a whole number of at least 1")
    options.check_seeds([asked.seed])
    loaded = folder.load_run(asked.run)
    try:
        prompt = plays.encode(loaded.symbols[:1] if asked.prompt is None else asked.prompt, loaded.symbols)
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from None
    if not len(prompt):
        raise ValueError("--prompt: got no text, expected at least one symbol; or leave it out")
    rng = jax.random.key(asked.seed)
    tokens = model.generate(loaded.model, loaded.params, prompt, asked.symbols, rng)
    return "".join(loaded.symbols[token] for token in tokens)


if __name__ == "__main__":
    main()
