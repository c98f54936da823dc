"""python -m jaxattn.check SUBJECT: a verdict on an attention, and an exit status.

python -m jaxattn.check jax.nn flax.nnx             attentions that are known by name
python -m jaxattn.check my.module:attention --layout bhqd
python -m jaxattn.check variants --quick            every variant of a registry, on every engine
"""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxattn as ja
from jaxattn.check.adapters import SUBJECTS
from jaxattn.check.report import run
from jaxattn.check.subject import Subject, of_attention, of_function


def subjects(name: str, layout: str) -> Iterator[Subject]:
    """What a name on the command line stands for."""
    if name in SUBJECTS:
        yield SUBJECTS[name]()
        return
    if ":" in name:
        module, _, attribute = name.partition(":")
        yield of_function(getattr(importlib.import_module(module), attribute), layout=layout, name=name)
        return
    registry = importlib.import_module(name).VARIANTS
    for variant, make in registry.items():
        for engine in ("dense", "blocked"):
            attn_of = lambda spec, make=make: ja.attention(spec, make())
            yield of_attention(f"{variant} on {engine}", attn_of, engine, least_heads=4, least_width=4)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxattn.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subject", nargs="+", help=f"{', '.join(SUBJECTS)}, module:function, or a registry")
    parser.add_argument("--layout", default="bqhd", help="axes of a function's arguments, such as bhqd")
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes alone")
    parser.add_argument("--json", type=Path, help="a folder for one JSON file a subject")
    options = parser.parse_args(arguments)
    sys.path.insert(0, "")
    passed = True
    for name in options.subject:
        try:
            found = list(subjects(name, options.layout))
        except (ImportError, AttributeError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        for subject in found:
            report = run(subject, quick=options.quick)
            passed &= report.passed
            print(report, flush=True)
            if options.json is not None:
                options.json.mkdir(parents=True, exist_ok=True)
                (options.json / f"{report.subject.replace(' ', '_')}.json").write_text(report.as_json())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
