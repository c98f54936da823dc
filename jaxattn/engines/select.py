"""The table of engines, and which one `engine="auto"` takes."""

from jaxattn.engines import blocked, dense, fused, reference, routed
from jaxattn.engines.call import Call, Engine

ENGINES: dict[str, Engine] = {e.ENGINE.name: e.ENGINE for e in (reference, dense, blocked, fused, routed)}

DENSE_BYTES = 2**24  # a score tensor up to this size is not worth cutting


def routes(engine: str) -> bool:
    """Whether the engine of this name takes active heads alone."""
    return engine in ENGINES and ENGINES[engine].routes


def select(engine: str, call: Call) -> Engine:
    """The engine to run a call with; `"auto"` chooses by size and by what is asked for.

    Of a symbolic batch it asks how large the scores of one example are; with symbolic rows it takes "dense".

    Raises:
        ValueError: for an unknown name, or when the engine cannot do what the call asks, naming those
            that can.
    """
    if engine == "auto" and call.query.head is not None:
        engine = routed.ENGINE.name
    if engine == "auto":
        blocks = blocked.ENGINE.why_not(call) is None and call.examples * call.score_bytes > DENSE_BYTES
        return ENGINES["blocked" if blocks else "dense"]
    if engine not in ENGINES:
        known = ", ".join(map(repr, ("auto", *ENGINES)))
        raise ValueError(f"engine: got {engine!r}, expected one of {known}.")
    chosen = ENGINES[engine]
    why = chosen.why_not(call)
    if why is not None:
        whole = call._replace(query=call.query._replace(head=None))
        able, wholly = ([e.name for e in ENGINES.values() if e.why_not(c) is None] for c in (call, whole))
        fix = (
            f"one of {', '.join(able)}, or auto"
            if able
            else f"with every head held, one of {', '.join(wholly)}"
        )
        raise ValueError(f"engine {engine!r} cannot run this call: {why}. Fix: {fix}.")
    return chosen
