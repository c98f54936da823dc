"""The table of engines, and which one `engine="auto"` takes."""

from jaxattn.engines import blocked, dense, reference
from jaxattn.engines.call import Call, Engine

ENGINES: dict[str, Engine] = {e.name: e for e in (reference.ENGINE, dense.ENGINE, blocked.ENGINE)}

DENSE_BYTES = 2**24  # a score tensor up to this size is not worth cutting


def select(engine: str, call: Call) -> Engine:
    """The engine to run a call with; `"auto"` chooses by size and by what is asked for.

    Raises:
        ValueError: for an unknown name, or when the engine cannot do what the call asks, naming those
            that can.
    """
    if engine == "auto":
        small = call.score_bytes <= DENSE_BYTES
        needs_all = any(name not in blocked.ENGINE.captures for name in call.capture)
        return ENGINES["dense" if small or needs_all else "blocked"]
    if engine not in ENGINES:
        known = ", ".join(map(repr, ("auto", *ENGINES)))
        raise ValueError(f"engine: got {engine!r}, expected one of {known}.")
    chosen = ENGINES[engine]
    missing = [name for name in call.capture if name not in chosen.captures]
    if missing:
        able = ", ".join(e.name for e in ENGINES.values() if set(call.capture) <= set(e.captures))
        raise ValueError(
            f"capture: engine {engine!r} never holds {', '.join(missing)} as a whole. "
            f"Fix: ask one of {able}, or leave capture out."
        )
    return chosen
