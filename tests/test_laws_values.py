"""Law 1: every engine computes what the loops of every variant say, outputs and gradients."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table

import jaxattn as ja
import variants

pytestmark = pytest.mark.heavy

DIRECTIONS = 3


class Expected(NamedTuple):
    """What the loops give for a case, on numbers that float32 holds exactly."""

    inputs: table.Inputs
    values: dict[str, Any]
    cotangent: np.ndarray
    directions: list[Any]
    y: np.ndarray
    loss: float
    slopes: np.ndarray


def single(tree: Any) -> Any:
    """Values rounded to float32, kept in float64: both precisions start from the same numbers."""
    return jax.tree.map(lambda x: np.asarray(x, np.float32).astype(float), tree)


def merged(inputs: table.Inputs, values: dict[str, Any]) -> table.Inputs:
    """The inputs with their states and bias taken from `values`."""
    return inputs._replace(**{k: v for k, v in values.items() if k != "params"})


@functools.cache
def expected(name: str) -> Expected:
    """Output, loss and directional derivatives of a case, from the loops alone."""
    case = table.BY_NAME[name]
    rng = np.random.default_rng(1)
    inputs = table.draw(case)
    values = single(
        {"params": table.drawn(table.attention(case), rng)}
        | {name: getattr(inputs, name) for name in ("x_q", "x_kv", "bias")}
    )

    def outcome(values):
        y = table.loops(case, values["params"], merged(inputs, values))
        loss = case.loss(values["params"], values["x_q"]) if case.loss else 0.0
        return np.append(y, loss)

    *y, loss = outcome(values).real
    cotangent = single(rng.normal(size=len(y)))
    directions = [table.like(values, rng) for _ in range(DIRECTIONS)]
    slopes = [table.directional(outcome, values, u) @ [*cotangent, 1] for u in directions]
    return Expected(inputs, values, cotangent, directions, np.array(y), loss, np.array(slopes))


def computed(case: table.Case, engine: str, dtype: Any) -> tuple[np.ndarray, float, np.ndarray]:
    """Output, weighted loss and directional derivatives by the library, from `jax.grad`."""
    want = expected(case.name)
    attn = table.attention(case)

    @table.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(values):
        y, aux = table.call(case, attn, values["params"], merged(want.inputs, values), engine=engine)
        assert y.dtype == dtype, f"{y.dtype} came out of {dtype}"
        total = aux.total()
        return (y.reshape(-1) * want.cotangent.astype(dtype)).sum() + total, (y, total)

    (_, (y, total)), gradient = run(table.cast(want.values, dtype))
    slopes = [
        sum(jax.tree.leaves(jax.tree.map(lambda g, u: np.sum(np.asarray(g, float) * u), gradient, u)))
        for u in want.directions
    ]
    return np.asarray(y, float).reshape(-1), float(total), np.array(slopes)


TOLERANCE = {jnp.float64: 1e-12, jnp.float32: 1e-5}
FIRST = [cases[0] for cases in table.TABLE.values()]
# Compiling takes the time: in float32 every case runs densely, one of each variant on every engine.
RUNS = [
    pytest.param(case, engine, dtype, id=f"{case.name}-{engine}-{dtype.__name__}")
    for case in table.CASES
    for engine in table.ENGINES
    for dtype in TOLERANCE
    if dtype == jnp.float64 or engine == "dense" or case in FIRST
]


@pytest.mark.parametrize("case, engine, dtype", RUNS)
def test_engine_computes_what_the_loops_say(case, engine, dtype):
    tolerance = TOLERANCE[dtype]
    want = expected(case.name)
    y, loss, slopes = computed(case, engine, dtype)
    table.assert_close(y, want.y, tolerance, "output")
    table.assert_close(slopes, want.slopes, tolerance, "gradient along random directions")
    assert abs(loss - want.loss) <= tolerance * abs(want.loss)


@pytest.mark.parametrize("closed", ["states", "params"])
def test_numpy_arrays_work_under_jit(closed):
    """A numpy array beside a traced one is an ordinary constant of the program."""
    case = table.CASES[0]
    want = expected(case.name)
    attn = table.attention(case)
    x, params = want.values["x_q"], want.values["params"]
    mask = table.mask_of(case, want.inputs)
    if closed == "states":
        y = table.jit(lambda params: attn.apply(params, x, mask=mask)[0])(params)
    else:
        y = table.jit(lambda x: attn.apply(params, x, mask=mask)[0])(x)
    table.assert_close(np.asarray(y).reshape(-1), want.y, 1e-12, "output")


def test_every_variant_and_engine_has_its_rows():
    assert set(table.TABLE) == set(variants.VARIANTS)
    assert {*table.ENGINES, *table.KERNELS, *table.ROUTED} == set(ja.ENGINES)
    for name, cases in table.TABLE.items():
        assert cases, f"{name} has no case"
        assert all(case.variant == name for case in cases)
    assert len(table.BY_NAME) == len(table.CASES), "two cases have one name"


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_variant_takes_or_refuses_fewer_key_heads(name):
    takes = [case for case in table.TABLE[name] if case.spec.get("kv_heads")]
    if table.TAKES_GQA[name]:
        assert takes, f"{name} takes kv_heads, but no case checks it"
    else:
        spec = ja.HeadSpec(model=24, heads=4, kv_heads=2)
        with pytest.raises(ValueError, match=r"kv_heads = 2 .*heads = 4"):
            ja.attention(spec, variants.VARIANTS[name]())


ROTARY = [case for case in table.CASES if case.spec.get("rotary")]


@pytest.mark.parametrize("case", ROTARY, ids=lambda case: case.name)
def test_rotary_positions_are_relative(case):
    want = expected(case.name)
    attn = table.attention(case)

    @table.jit
    def at(start):
        inputs = want.inputs
        if inputs.positions_q is None:
            count = np.arange(inputs.x_q.shape[-2])
            inputs = inputs._replace(positions_q=count, positions_k=count)
        inputs = inputs._replace(
            positions_q=inputs.positions_q + start, positions_k=inputs.positions_k + start
        )
        y, _ = table.call(case, attn, want.values["params"], merged(inputs, want.values))
        return y

    assert not case.cross or case.moved, "positions of a cross case must be given"
    table.assert_close(at(0).reshape(-1), want.y, 1e-12, "positions given")
    table.assert_close(at(9), at(0), 1e-10, "positions moved together")


CUTS = [(case, "data") for case in FIRST]


@pytest.mark.parametrize(
    "case, masked",
    [(table.CASES[0], "causal"), (table.TABLE["talking_heads"][0], "window"), *CUTS],
    ids=lambda x: x if isinstance(x, str) else x.variant,
)
def test_blocks_and_tiles_do_not_change_the_function(case, masked, monkeypatch):
    """Many row blocks, key spans and tiles at once: what small cases never cut."""
    monkeypatch.setattr("jaxattn.engines.blocked.BLOCK_BYTES", (1, 1))
    monkeypatch.setattr("jaxattn.engines.blocked.JOINED_BYTES", 1)
    monkeypatch.setattr("jaxattn.engines.blocked.ROWS", (8, 8))
    monkeypatch.setattr("jaxattn.engines.blocked.GROUPS", (2, 2))
    monkeypatch.setattr("jaxattn.engines.blocked.GRAIN", 32)
    monkeypatch.setattr("jaxattn.engines.blocked.TILE", 80)
    rng = np.random.default_rng(2)
    length = 157
    attn = table.attention(case)
    params = table.drawn(attn, rng)
    x = rng.normal(size=(length, case.spec["model"]))
    seen = rng.random((length, length)) < 0.5
    seen[:, 70:] = False  # a whole tile that only the data know to be empty
    mask = {
        "causal": ja.causal(),
        "window": ja.window(20),
        "data": ja.explicit(seen, axes="q k"),
    }[masked]
    bias = rng.normal(size=(1, 1 if masked == "data" else length, length))

    def output(engine):
        def loss(params, x, bias):
            y, aux = attn.apply(params, x, mask=mask, bias=bias, engine=engine)
            return jnp.square(y).sum() + aux.total(), y

        return table.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(params, x, bias)

    (_, want), want_gradient = output("dense")
    (_, got), got_gradient = output("blocked")
    table.assert_close(got, want, 1e-12, "output")
    for g, w in zip(*map(jax.tree.leaves, (got_gradient, want_gradient)), strict=True):
        table.assert_close(g, w, 1e-11, "gradient")
