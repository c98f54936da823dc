"""python -m jaxattn.check SUBJECT: a verdict on an attention, and an exit status.

python -m jaxattn.check jax.nn flax.nnx             attentions that are known by name
python -m jaxattn.check my.module:attention --layout bhqd
python -m jaxattn.check my.module:transform --quick its contracts, and the laws of variants on every engine
python -m jaxattn.check variants --quick            every variant of a registry, on every engine that takes it

Exit status: 0 where every law that was asked holds, 1 where one does not, 2 where a subject cannot be had.
"""

import argparse
import os
import sys
from pathlib import Path

import jaxlib.version

from jaxattn.check.adapters import SUBJECTS
from jaxattn.check.beside import beside, laws_page
from jaxattn.check.request import reports, requests

DEVICES = "--xla_force_host_platform_device_count=2"  # a law splits heads over two
# Each program runs once, so that compiling is the time. XLA stops at a flag that it does not know.
UNOPTIMISED = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if jaxlib.version.__version__.startswith("0.10."):
    UNOPTIMISED.append("--xla_cpu_use_fusion_emitters=false")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxattn.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subject", nargs="*", help=f"{', '.join(SUBJECTS)}, module:name, or a registry")
    parser.add_argument("--layout", default="bqhd", help="axes of a function's arguments, such as bhqd")
    parser.add_argument("--supports", nargs="*", help="what a function can; other laws are not asked of it")
    parser.add_argument(
        "--quick", action="store_true", help="the two smallest sizes alone, compiled without optimisation"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes beside each other")
    parser.add_argument("--json", type=Path, help="a folder for one JSON file a subject")
    parser.add_argument("--page", type=Path, help="a Markdown file of all of them beside each other")
    parser.add_argument("--laws", action="store_true", help="print all laws as a Markdown page, and stop")
    options = parser.parse_args(arguments)
    if options.laws:
        print(laws_page(), end="")
        return 0
    if not options.subject:
        parser.error("no subject. Fix: one or more of those below --help")
    flags = [os.environ.get("XLA_FLAGS", ""), DEVICES, *(UNOPTIMISED if options.quick else [])]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))  # read when the first array is made
    sys.path.insert(0, "")
    can = None if options.supports is None else tuple(options.supports)
    try:
        asked = [r for name in options.subject for r in requests(name, options.layout, options.quick, can)]
        found = []
        for request, report in zip(asked, reports(asked, options.jobs), strict=True):
            if isinstance(report, str):
                print(f"{request.part} on {request.engine}: not run, {report}", flush=True)
                continue
            found.append(report)
            print(report, flush=True)
            if options.json is not None:
                options.json.mkdir(parents=True, exist_ok=True)
                file = f"{report.subject} {report.kind}.json".replace(" ", "_")
                (options.json / file).write_text(report.as_json())
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        print(f"{', '.join(options.subject)}: {error}", file=sys.stderr)
        return 2
    if options.page is not None:
        options.page.write_text(beside(found))
    return 0 if all(report.passed for report in found) else 1


if __name__ == "__main__":
    sys.exit(main())
