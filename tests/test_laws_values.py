"""Laws 1 to 3: engines compute what the loops say, variants reduce to MHA, chains keep order."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table

import jaxattn as ja
import variants

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
    shapes = jax.eval_shape(table.attention(case).init, jax.random.key(0))
    inputs = table.draw(case)
    values = single(
        {"params": table.redraw(shapes, rng)}
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
        y, aux = table.call(
            case, attn, values["params"], merged(want.inputs, values), engine=engine
        )
        assert y.dtype == dtype, f"{y.dtype} came out of {dtype}"
        total = aux.total()
        return (y.reshape(-1) * want.cotangent.astype(dtype)).sum() + total, (y, total)

    (_, (y, total)), gradient = run(table.cast(want.values, dtype))
    slopes = [
        sum(
            jax.tree.leaves(
                jax.tree.map(lambda g, u: np.sum(np.asarray(g, float) * u), gradient, u)
            )
        )
        for u in want.directions
    ]
    return np.asarray(y, float).reshape(-1), float(total), np.array(slopes)


def assert_close(got: Any, want: Any, tolerance: float, what: str) -> None:
    """Largest difference over the largest value of what is wanted."""
    error = np.max(np.abs(np.asarray(got) - np.asarray(want)))
    size = np.max(np.abs(np.asarray(want)))
    assert error <= tolerance * size, f"{what}: off by {error / size:.1e} of the largest value"


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float64, 1e-12), (jnp.float32, 1e-5)])
@pytest.mark.parametrize("engine", table.ENGINES)
@pytest.mark.parametrize("case", table.CASES, ids=lambda case: case.name)
def test_engine_computes_what_the_loops_say(case, engine, dtype, tolerance):
    want = expected(case.name)
    y, loss, slopes = computed(case, engine, dtype)
    assert_close(y, want.y, tolerance, "output")
    assert_close(slopes, want.slopes, tolerance, "gradient along random directions")
    assert abs(loss - want.loss) <= tolerance * abs(want.loss)


def test_every_variant_and_engine_has_its_rows():
    assert set(table.TABLE) == set(variants.VARIANTS)
    assert set(table.ENGINES) == set(ja.ENGINES)
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
    assert_close(at(0).reshape(-1), want.y, 1e-12, "positions given")
    assert_close(at(9), at(0), 1e-10, "positions moved together")


LARGE = [cases[0] for cases in table.TABLE.values()]


@pytest.mark.parametrize("masked", ["causal", "window", "data"])
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.variant)
def test_blocks_and_tiles_do_not_change_the_function(case, masked, monkeypatch):
    """Many row blocks, key spans and tiles at once: what small cases never cut."""
    monkeypatch.setattr("jaxattn.engines.blocked.BLOCK_BYTES", 1)
    monkeypatch.setattr("jaxattn.engines.blocked.GROUPS", 2)
    monkeypatch.setattr("jaxattn.engines.blocked.TILE", 80)
    rng = np.random.default_rng(2)
    length = 157
    attn = table.attention(case)
    params = table.redraw(jax.eval_shape(attn.init, jax.random.key(0)), rng)
    x = rng.normal(size=(length, case.spec["model"]))
    seen = rng.random((length, length)) < 0.5
    seen[:, 70:140] = False  # a whole tile that only the data know to be empty
    mask = {
        "causal": ja.causal(),
        "window": ja.window(20),
        "data": ja.explicit(seen, axes="q k"),
    }[masked]

    def output(engine):
        def loss(params, x):
            y, aux = attn.apply(params, x, mask=mask, engine=engine)
            return jnp.square(y).sum() + aux.total(), y

        return table.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

    (_, want), want_gradient = output("dense")
    (_, got), got_gradient = output("blocked")
    assert_close(got, want, 1e-12, "output")
    for g, w in zip(*map(jax.tree.leaves, (got_gradient, want_gradient)), strict=True):
        assert_close(g, w, 1e-11, "gradient")
