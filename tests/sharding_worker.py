"""What eight devices compute and communicate, for test_sharding.py: run as a program, it prints JSON.

Devices are fixed when JAX starts, so this runs in a process of its own, with eight virtual ones.
"""

import dataclasses
import functools
import json
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import table
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxattn as ja
import jaxattn.engines.blocked as blocked
import variants
from jaxattn import sharding

BATCH, TIME, MODEL, OUT, HEADS = 8, 16, 12, 11, 8
SPEC = dict(model=MODEL, heads=HEADS, d_qk=3, d_v=5, out=OUT, use_bias=True)
GROUPS = {"heads": 2 * HEADS}  # two heads on each device, so that a group is more than a head

# name: the transform, changes to the sizes, changes to the rules of head parallelism
CASES = {
    "mha": (variants.mha(), {}, {}),
    "gqa": (variants.mha(), {"kv_heads": 2}, {"hK": None, "hV": None}),
    "talking_heads": (variants.talking_heads(), {}, {}),
    "dcmha": (variants.dcmha(), {}, {}),
    "dcmha_groups": (variants.dcmha(static=True, groups=8), GROUPS, {"g": "heads"}),
    "moh": (variants.moh(shared=2, top_k=3), {}, {}),
    "collab": (variants.collab(width=10), {}, {}),
    "mohsa": (variants.mohsa(overlap=2), {}, {}),
}
MODES = {
    "data": ({"data": 8}, {"b": "data"}),
    "heads": ({"heads": 8}, {"h": "heads"}),
    "rows": ({"rows": 8}, {"q": "rows"}),
}
ON_BLOCKED = ("mha", "talking_heads")
COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"


def mesh_of(**axes: int) -> Mesh:
    """A mesh of the first devices."""
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def collectives(compiled) -> list[tuple[str, list[list[int]]]]:
    """Each collective of a compiled program: its kind and the shapes that it makes."""
    found = re.findall(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", compiled.as_text())
    shapes = lambda text: [[int(n) for n in s.split(",") if n] for s in re.findall(r"\w+\[([\d,]*)\]", text)]
    return [(kind, shapes(text)) for text, kind in found]


def error(got, want) -> float:
    """Largest difference of any leaf, over the leaf's largest value or 1."""
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.max(np.abs(a - b)) / max(1.0, np.max(np.abs(b)))) for a, b in leaves)


def draws() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    states = {name: rng.normal(size=(BATCH, TIME, MODEL)) for name in ("x_q", "x_kv")}
    seen = rng.random((BATCH, TIME, TIME)) < 0.8
    return {**states, "seen": seen, "cotangent": rng.normal(size=(BATCH, TIME, OUT))}


DRAWN = draws()


def programs(attn: ja.Attention, engine: str, **named):
    """The forward pass and (output, gradients), both of (params, x_q, x_kv, cotangent)."""

    def forward(params, x_q, x_kv):
        mask = ja.causal() & ja.explicit(DRAWN["seen"], axes="b q k")
        return attn.apply(params, x_q, x_kv, mask, engine=engine, **named)

    def both(params, x_q, x_kv, cotangent):
        def loss(*values):
            y, aux = forward(*values)
            return (y * cotangent).sum() + aux.total(), y

        gradient, y = jax.grad(loss, (0, 1, 2), has_aux=True)(params, x_q, x_kv)
        return y, gradient

    return (lambda params, x_q, x_kv, _: forward(params, x_q, x_kv)[0]), both


def inputs(attn: ja.Attention) -> tuple:
    """Parameters drawn anew at order 1, states and the output's cotangent."""
    params = table.drawn(attn, np.random.default_rng(4))
    return params, DRAWN["x_q"], DRAWN["x_kv"], DRAWN["cotangent"]


def placed(attn: ja.Attention, rules, mesh: Mesh) -> tuple:
    """Where parameters, states and cotangent lie, by the rules alone."""
    shape = (BATCH, TIME, MODEL)
    state = lambda axes: NamedSharding(mesh, sharding.spec_of(axes, rules, mesh, shape))
    return sharding.shardings(attn, rules, mesh), state("b q m"), state("b k m"), state("b q m")


def compare(attn: ja.Attention, engine: str, rules, mesh: Mesh, values: tuple, want, **named):
    """What a sharded program communicates, and how far its numbers are from those of one device."""
    forward, both = programs(attn, engine, **named)
    where = placed(attn, rules, mesh)
    of_y = where[1]
    forward = jax.jit(forward, in_shardings=where, out_shardings=of_y).lower(*values).compile()
    both = jax.jit(both, in_shardings=where, out_shardings=(of_y, where[:3])).lower(*values).compile()
    y, gradient = both(*jax.device_put(values, where))
    return {
        "output": error(y, want[0]),
        "gradient": error(gradient, want[1]),
        "forward": collectives(forward),
        "reverse": collectives(both),
        "params": sum(np.size(leaf) for leaf in jax.tree.leaves(values[0])),
        "kernel": np.shape(values[0]["query"]["kernel"]),
        "kernel on one device": gradient[0]["query"]["kernel"].addressable_shards[0].data.shape,
    }


def every_case():
    """Each variant in each mode; the engine that makes blocks for some."""
    found = {}
    for name, (transform, sizes, changes) in CASES.items():
        attn = ja.attention(ja.HeadSpec(**SPEC | sizes), transform)
        values = inputs(attn)
        for engine in ("dense", "blocked") if name in ON_BLOCKED else ("dense",):
            want = jax.jit(programs(attn, engine)[1])(*values)
            for mode, (axes, rules) in MODES.items():
                if name == "dcmha_groups" and mode != "heads":
                    continue  # other modes do not see groups
                rules = rules | changes if mode == "heads" else rules
                got = compare(attn, engine, rules, mesh_of(**axes), values, want)
                found[f"{name} {mode} {engine}"] = got
    return found


def two_axes():
    """Examples over two, groups of heads over four devices at once."""
    attn = ja.attention(ja.HeadSpec(**SPEC), variants.dcmha(groups=4, pre=False))
    values = inputs(attn)
    want = jax.jit(programs(attn, "dense")[1])(*values)
    rules = {"b": "data", "h": "heads", "g": "heads"}
    return compare(attn, "dense", rules, mesh_of(data=2, heads=4), values, want)


def dropout():
    """Training with one PRNG key: each weight's draw is that of one device, however it is sharded."""
    attn = ja.attention(ja.HeadSpec(**SPEC, dropout=0.25, head_dropout=0.25))
    values, named = inputs(attn), {"dropout_key": jax.random.key(5)}
    want = jax.jit(programs(attn, "dense", **named)[1])(*values)
    evaluated = jax.jit(programs(attn, "dense")[0])(*values)
    found = {
        mode: compare(attn, "dense", rules, mesh_of(**axes), values, want, **named)
        for mode, (axes, rules) in MODES.items()
    }
    return found | {"moved by dropout": error(want[0], evaluated)}


def loops():
    """Large calls loop over blocks; `jax.shard_map`, with its default check, gives each device its own.

    Gradients are those of the sharded call, and those taken inside of one.
    """
    for name, value in dict(BLOCK_BYTES=(1, 1), JOINED_BYTES=1, ROWS=(8, 8), GRAIN=8).items():
        setattr(blocked, name, value)
    return {
        f"{name} {mode}": found
        for name, engine in (("talking_heads", "blocked"), ("moh", "routed"))
        for mode, found in of_devices(CASES[name][0], engine).items()
    }


def of_devices(transform: ja.HeadTransform, engine: str) -> dict[str, dict]:
    """What eight devices compute and communicate, over examples and over query rows."""
    attn = ja.attention(ja.HeadSpec(**SPEC), transform)
    *values, cotangent = inputs(attn)
    args = (*values, DRAWN["seen"], jnp.arange(TIME), cotangent)

    def forward(params, x_q, x_kv, seen, positions):
        mask = ja.causal() & ja.explicit(seen, axes="b q k")
        return attn.apply(params, x_q, x_kv, mask, engine=engine, positions=(positions, None))[0]

    def both(forward, params, x_q, x_kv, seen, positions, cotangent):
        def loss(*values):
            y = forward(*values, seen, positions)
            return (y * cotangent).sum(), y

        gradient, y = jax.grad(loss, (0, 1, 2), has_aux=True)(params, x_q, x_kv)
        return y, gradient

    want = jax.jit(functools.partial(both, forward))(*args)
    P, found = PartitionSpec, {}
    for mode, ins, out in (
        ("data", (P(), P("data"), P("data"), P("data"), P()), P("data")),
        ("rows", (P(), P(None, "rows"), P(), P(None, "rows"), P("rows")), P(None, "rows")),
    ):
        shard_map = functools.partial(jax.shard_map, mesh=mesh_of(**MODES[mode][0]))
        split = shard_map(forward, in_specs=ins, out_specs=out)
        within = shard_map(functools.partial(both, forward), in_specs=(*ins, out), out_specs=(out, ins[:3]))
        where = tuple(NamedSharding(mesh_of(**MODES[mode][0]), spec) for spec in (*ins, out))
        placed = jax.device_put(args, where)
        once = jax.jit(split, in_shardings=where[:-1]).lower(*placed[:-1]).compile()
        got = jax.jit(functools.partial(both, split), in_shardings=where).lower(*placed).compile()
        y, gradient = got(*placed)
        found[mode] = {
            "output": error(y, want[0]),
            "gradient": error(gradient, want[1]),
            "gradient within": error(jax.jit(within)(*placed)[1], want[1]),
            "forward": collectives(once),
            "reverse": collectives(got),
        }
    return found


def pub_30():
    """The case's layer on two devices: batch-sharded, then head-sharded; training is two scanned layers."""
    text = cases.CASES["PUB-30"]["input"]["layer of PUB-12"]
    spec, params = cases.layer(text)
    x = jnp.asarray(cases.filled(text["x"]))
    attn = ja.attention(dataclasses.replace(spec, dropout=0.25))
    layers = [params, cases.redraw(params, 7)]

    def evaluate(params, x):
        y = lambda params, x: attn.apply(params, x, mask=ja.causal())[0]
        return y(params, x), jax.grad(lambda *values: (y(*values) ** 2).sum(), (0, 1))(params, x)

    def step(x, layer, rng):
        return x + attn.apply(layer, x, mask=ja.causal(), dropout_key=rng)[0], None

    @functools.partial(jax.grad, argnums=(0, 1))
    def plain(layers, x):
        for layer in layers:
            x, _ = step(x, layer, jax.random.key(0))
        return (x**2).sum()

    @functools.partial(jax.grad, argnums=(0, 1))
    def scanned(layers, x):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        again = jax.checkpoint(lambda x, layer: step(x, layer, jax.random.PRNGKey(0)))
        return (jax.lax.scan(again, x, stacked)[0] ** 2).sum()

    mesh, found = mesh_of(two=2), {}
    for mode, rules in (("batch", {"b": "two"}), ("heads", {"h": "two"})):
        ps = sharding.shardings(attn, rules, mesh)
        xs = NamedSharding(mesh, sharding.spec_of("b q m", rules, mesh, x.shape))
        for dtype in (jnp.float64, jnp.float32):
            values = table.cast((params, x), dtype)
            got = jax.jit(evaluate, in_shardings=(ps, xs))(*values)
            found[f"{mode} {dtype.__name__}"] = error(got, jax.jit(evaluate)(*values))
        got = jax.jit(scanned, in_shardings=([ps, ps], xs))(layers, x)
        found[f"{mode} training"] = error(got, jax.jit(plain)(layers, x))
    return found


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    parts = dict(devices=lambda: jax.device_count(), cases=every_case, two_axes=two_axes, dropout=dropout)
    parts |= dict(pub_30=pub_30, loops=loops)  # loops last: it sets the blocks' sizes
    print(json.dumps({name: part() for name, part in parts.items()}))


if __name__ == "__main__":
    main()
