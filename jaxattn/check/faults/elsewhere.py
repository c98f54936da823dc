"""What failure labs and public cases name beside programs: what guards it, and what nothing guards."""

ELSEWHERE: dict[str, str] = {
    "heads that do not divide the width, rates that are none (PUB-09; M3.2 0x0E)": (
        "refused: tests/test_errors.py, tests/test_cases_layer.py"
    ),
    "an inferred axis, which cannot be inferred where there is no row (PUB-08)": (
        "an error and no wrong value: `no-rows`, tests/test_cases_layer.py; docs/peers.md shows one"
    ),
    "key heads that do not divide the heads (M3.2 0x0E)": "refused: tests/test_errors.py",
    "a new source under the identity of the old: adapter, release, shard (M3.2 0x0AB)": (
        "`ja.CrossMemory` names the field: tests/test_cross.py, tests/test_cases_cache.py"
    ),
    "a record of a call that its shapes cannot contradict: backend, dropout, weights (M3.2 0x01A)": (
        "`ja.admit`: tests/test_manifest.py"
    ),
    "products and gathered overlap that a ledger forgets (PUB-27; M3.2 0x0BBA)": (
        "`ja.ledger`, against what XLA counts: tests/test_ledger.py, tests/test_cases_training.py"
    ),
    "a gate of zero or a dense mask called a saving (M3.2 0x0BAA; 0x0BBA)": (
        "`ja.ledger` counts what is run; `experiments/bench.py` times routed against dense"
    ),
    "a quoted speedup (M3.2 0x0BAA)": "`experiments/bench.py` measures it: docs/speed.md",
    "head counts compared without widths, or called cost-neutral (M3.2 0x0E)": (
        "`experiments/compare.py` puts parameters and MACs beside each score"
    ),
    "a reused test set, an untuned baseline (M3.2 0x0BAA)": (
        "`experiments/compare.py` says on what the learning rate was chosen, and that others may be at a loss"
    ),
    "borrowed rows of W_O zeroed, or a narrow basis, called exact (M3.2 0x0BBA; 0x0BBB)": (
        "`Declaration.upgrade` says when one is: tests/test_laws_reductions.py"
    ),
    "resume from a part of the state, an update by NaN (PUB-28; PUB-29)": "tests/test_cases_training.py",
}
"""Claims, procedures and refusals: no program whose output could be asked, and what guards each."""

OPEN: dict[str, str] = {
    "rotary positions on values or on scores (M3.2 0x0E)": (
        "`Rotation` judges a turn alone; no law asks what a layer turns"
    ),
    "one stale ranking for many removals (M3.2 0x0BAA)": "a procedure; the library removes no heads yet",
    "an attention map called a cause, a head called a role (M3.2 0x0BAA; 0x0E)": (
        "claims; ablation (`ablated-term`) is the evidence that they lack"
    ),
    "a router trained from scratch named after a converted one (M3.2 0x0BBA)": "a claim about provenance",
    "views, strides and hidden copies (M3.2 0x08A)": "JAX has no views",
}
"""What nothing here catches, and why."""
