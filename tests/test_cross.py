"""The cross memory: it reads as a direct call does, or says whose it is and why not."""

import copy
import functools
import math
import pathlib

import cases
import jax
import jax.numpy as jnp
import jaxpr
import numpy as np
import pytest
import table
from hypothesis import given, note, settings
from hypothesis import strategies as st

import jaxattn as ja
import variants
from jaxattn import CrossMemory, Identity, Life, check_cross_mask, content_digest, expected_identity
from jaxattn.cross import TRANSITIONS

pytestmark = pytest.mark.heavy

B, Q, S, MODEL, SOURCE, G = 2, 5, 7, 11, 13, 3
SPEC = ja.HeadSpec(model=MODEL, heads=4, d_qk=6, d_v=3, in_k=SOURCE, in_v=SOURCE)
NAMED = Identity(
    request="r1", source_release="s1", memory_id="m1", checkpoint="c1", layer=2, projection_version=1,
    adapter="none", position_policy="absolute", shard="0 of 1",
)  # fmt: skip

# The transition table of the article's section 0x0AB, typed from it; "read" is its rule for consumers.
ARTICLE = """
bind | EMPTY | SOURCE_BOUND
project for training | SOURCE_BOUND | PROJECTED_EPHEMERAL
consume | PROJECTED_EPHEMERAL | BACKWARD_PENDING
project for inference | SOURCE_BOUND | PROJECTED
attach | PROJECTED | ATTACHED
share | ATTACHED | BEAM_SHARED
expand | ATTACHED | BEAM_EXPANDED
reorder | BEAM_SHARED BEAM_EXPANDED | =
rollback | ATTACHED BEAM_SHARED BEAM_EXPANDED | =
read | ATTACHED BEAM_SHARED BEAM_EXPANDED | =
drift | PROJECTED ATTACHED BEAM_SHARED BEAM_EXPANDED | INVALIDATED
release | PROJECTED_EPHEMERAL BACKWARD_PENDING PROJECTED ATTACHED BEAM_SHARED BEAM_EXPANDED | RELEASED
"""
LEGAL = {}
for line in ARTICLE.strip().splitlines():
    operation, states, result = (part.strip() for part in line.split("|"))
    for state in states.split():
        LEGAL[operation, state] = state if result == "=" else result
OPERATIONS = list(dict.fromkeys(operation for operation, _ in LEGAL))


@functools.cache
def made(name="mha", spec=SPEC):
    attn, params = cases.variant(name, spec)
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    return attn, params, draw(B * G, Q, MODEL), draw(B, S, SOURCE)


@functools.cache
def projected(name="mha", spec=SPEC, valid=None):
    """A memory that is projected, and the identity that its reader expects."""
    attn, params, _, source = made(name, spec)
    memory = CrossMemory(attn)
    memory.bind(source, NAMED, valid=None if valid is None else np.array(valid))
    memory.project(params, projection_version=1)
    return memory, expected_identity(attn, params, source, NAMED)


def attached(*arguments, **named):
    memory, expected = projected(*arguments, **named)
    memory = copy.copy(memory)
    memory.attach(expected)
    return memory, expected


def beams(way, of=G, **named):
    memory, expected = attached(**named)
    getattr(memory, way)(of)
    return memory, expected


def attending(memory, expected, *arguments, capture=(), **named):
    """`memory.attend` under jit."""
    run = functools.partial(memory.attend, expected=expected, capture=capture)
    return table.jit(run)(*arguments, **named)


def standing(state):
    """A memory in a state, by the shortest way."""
    attn, params, _, source = made()
    memory, expected = projected()
    memory = copy.copy(memory) if state in (Life.PROJECTED, Life.INVALIDATED, Life.RELEASED) else memory
    if state in (Life.EMPTY, Life.SOURCE_BOUND, Life.PROJECTED_EPHEMERAL, Life.BACKWARD_PENDING):
        memory = CrossMemory(attn)
        if state is not Life.EMPTY:
            memory.bind(source, NAMED)
        if state in (Life.PROJECTED_EPHEMERAL, Life.BACKWARD_PENDING):
            memory.project(params, projection_version=1, training=True)
        if state is Life.BACKWARD_PENDING:
            memory.consume(1)
    elif state is Life.ATTACHED:
        memory, _ = attached()
    elif state in (Life.BEAM_SHARED, Life.BEAM_EXPANDED):
        memory, _ = beams({Life.BEAM_SHARED: "share", Life.BEAM_EXPANDED: "expand"}[state])
    elif state is Life.INVALIDATED:
        memory.drift(expected._replace(adapter="lora"))
    elif state is Life.RELEASED:
        memory.release(consumers=0)
    assert memory.life is state
    return memory, expected


def perform(operation, memory, expected):
    """An operation with arguments that are right wherever it is legal."""
    _, params, _, source = made()
    return {
        "bind": lambda: memory.bind(source, NAMED),
        "project for training": lambda: memory.project(params, projection_version=1, training=True),
        "project for inference": lambda: memory.project(params, projection_version=1),
        "consume": lambda: memory.consume(1),
        "attach": lambda: memory.attach(expected),
        "share": lambda: memory.share(G),
        "expand": lambda: memory.expand(G),
        "reorder": lambda: memory.reorder(range(B * G)),
        "rollback": lambda: memory.rollback(expected),
        "read": lambda: memory.read(expected),
        "drift": lambda: memory.drift(expected._replace(source_release="s2")),
        "release": lambda: memory.release(consumers=0),
    }[operation]()


class TestTheMachine:
    @pytest.mark.parametrize("state", Life, ids=lambda state: state.name)
    def test_every_operation_in_every_state(self, state):
        """What is in the article's table happens; all else names itself, the state and the way out."""
        for operation in OPERATIONS:
            memory, expected = standing(state)
            after = LEGAL.get((operation, state.name))
            if after is not None:
                perform(operation, memory, expected)
                assert memory.life.name == after, operation
                continue
            with pytest.raises(RuntimeError) as error:
                perform(operation, memory, expected)
            assert memory.life is state
            text = str(error.value)
            assert f"{operation} in {state.name}, expected " in text and "Fix: " in text
            legal = [where for what, where in LEGAL if what == operation]
            assert f"expected {', '.join(legal)} (" in text
            assert all(what in text for what, where in LEGAL if where == state.name)

    def test_the_page_prints_the_table_that_runs(self):
        page = (pathlib.Path(__file__).parent.parent / "docs" / "state.md").read_text()
        rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
        said = {}
        for operation, states, result, _check in rows:
            for state in states.replace("`", "").replace(",", " ").split():
                to = result.strip(" `")
                said[operation.strip(" `"), state] = state if to == "the same" else to
        assert said == {(what, life.name): to.name for (what, life), to in TRANSITIONS.items()}
        assert said == LEGAL

    def test_refused_checks_change_nothing(self):
        memory, _ = attached()
        with pytest.raises(ValueError, match="release with 2 consumers outstanding, expected 0"):
            memory.release(consumers=2)
        with pytest.raises(ValueError, match="bind without source_release"):
            CrossMemory(memory.attn).bind(made()[3], Identity(request="r1"))
        bound, _ = standing(Life.SOURCE_BOUND)
        with pytest.raises(ValueError, match="project without projection_version"):
            bound.project(made()[1], projection_version=None)
        ephemeral, _ = standing(Life.PROJECTED_EPHEMERAL)
        with pytest.raises(ValueError, match="consume.*projection_version is 1, expected 2"):
            ephemeral.consume(2)
        states = [m.life for m in (memory, bound, ephemeral)]
        assert states == [Life.ATTACHED, Life.SOURCE_BOUND, Life.PROJECTED_EPHEMERAL]


def test_another_attention_s_parameters_are_refused_at_every_entry():
    """A tree that does not fit names its path, and the memory is as it was."""
    attn, params, x_q, source = made()
    _, wrong = cases.variant("talking_heads", SPEC)
    attempts = {}
    bound, _ = standing(Life.SOURCE_BOUND)
    attempts["project"] = bound, lambda: bound.project(wrong, projection_version=1)
    attempts["project for training"] = (
        bound,
        lambda: bound.project(wrong, projection_version=1, training=True),
    )
    for way in ("share", "expand"):
        memory, expected = beams(way)
        attempts[way] = memory, lambda m=memory, e=expected: m.attend(wrong, x_q, expected=e)
    memory, expected = attached()
    attempts["attached"] = memory, lambda: memory.attend(wrong, x_q[:B], expected=expected)
    attempts["expected_identity"] = memory, lambda: expected_identity(attn, wrong, source, NAMED)
    for name, (memory, attempt) in attempts.items():
        life, side = memory.life, memory._side
        with pytest.raises(
            ValueError, match=r"params: .* from the tree of attention[^$]*heads/talking_heads"
        ):
            attempt()
        assert memory.life is life and memory._side is side, name
    bound.project(params, projection_version=1)


class TestIdentity:
    @pytest.mark.parametrize("field", Identity._fields)
    def test_one_field_alone_is_enough(self, field):
        """Reads, attachment and rollback refuse and name it; drift invalidates, and later reads name it."""
        pair, expected = projected()
        assert getattr(expected, field) is not None
        for unlike in ("another", None):
            other = expected._replace(**{field: unlike})
            memory = copy.copy(pair)
            with pytest.raises(
                ValueError, match=f"attach of another identity: {field} is .*, expected"
            ) as error:
                memory.attach(other)
            assert str(error.value).count(", expected") == 1
            assert memory.life is Life.PROJECTED
            memory.attach(expected)
            for refuse in (memory.read, memory.rollback):
                with pytest.raises(
                    ValueError, match=f"of another identity: {field} is .*, expected {unlike!r}"
                ):
                    refuse(other)
            assert memory.life is Life.ATTACHED and memory.drift(expected) == ()
            assert memory.read(expected).key is pair._side.key
            assert memory.drift(other) == (field,)
            assert memory.life is Life.INVALIDATED and memory.nbytes == 0
            for reader in (expected, other):
                with pytest.raises(
                    RuntimeError, match=f"read in INVALIDATED.*{field} was .*, became {unlike!r}"
                ):
                    memory.read(reader)
            with pytest.raises(RuntimeError, match="attach in INVALIDATED.*Fix: a new CrossMemory"):
                memory.attach(expected)

    def test_arrays_and_sizes_say_it_not_the_caller(self):
        attn, params, _, source = made()
        pair, expected = projected()
        assert pair.identity == expected
        assert expected.device == str(jax.devices()[0]) and expected.layout == "row-major"
        lie = NAMED._replace(key_heads=99, source_len=99, dtype="float8", mode="x", device="y", layout="z")
        memory = CrossMemory(attn)
        memory.bind(source, lie._replace(attention="w", spec="u", rotary="v", qk_width=1, value_heads=1))
        memory.project(params, projection_version=1)
        assert memory.identity == expected

        def differing(attn, params, source, **named):
            return set(expected.differences(expected_identity(attn, params, source, NAMED, **named)))

        assert differing(attn, params, source) == set()
        assert differing(attn, params, (source, source)) == set()
        assert differing(attn, params, np.asarray(source)) == set()
        assert differing(attn, params, source[:, 1:]) == {"source_len"}
        assert differing(attn, params, source, training=True) == {"mode"}
        low = jax.tree.map(lambda x: x.astype(jnp.float32), (params, source))
        assert differing(attn, *low) == {"dtype"}
        assert differing(*cases.variant("moh", SPEC), source) == {"attention"}
        for change, fields in (
            (dict(kv_heads=2), {"spec", "key_heads", "value_heads"}),
            (dict(d_qk=4), {"spec", "qk_width"}),
            (dict(d_v=5), {"spec", "value_width"}),
            (dict(rotary=ja.Rotary()), {"spec", "rotary"}),
        ):
            spec = ja.HeadSpec(**dict(model=MODEL, heads=4, d_qk=6, d_v=3, in_k=SOURCE, in_v=SOURCE) | change)
            assert differing(*cases.variant("mha", spec), source) == fields
        traced = []
        jax.make_jaxpr(lambda x: traced.append(differing(attn, params, x)))(source)
        assert traced == [{"device", "layout"}]

    def test_a_digest_tells_contents_apart_and_needs_them(self):
        _, _, _, source = made()
        assert content_digest(source) == content_digest(np.asarray(source))
        assert content_digest(source) != content_digest(source.at[0, 0, 0].add(1e-9))
        assert content_digest(source) != content_digest(source.reshape(S, B, SOURCE))
        with pytest.raises(TypeError, match="a traced array has no bytes"):
            jax.make_jaxpr(content_digest)(source)


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_attached_shared_and_expanded_equal_the_direct_call(name):
    valid = ((True,) * 4 + (False,) * 3, (True,) * S)
    attn, params, x_q, source = made(name)
    each = np.repeat(np.arange(B), G)
    want, aux = table.jit(attn.apply)(params, x_q, source[each], mask=ja.padding(np.array(valid)[each]))
    single, expected = attached(name, SPEC, valid)
    y, _ = table.jit(attn.attend)(params, x_q[::G], single.read(expected))
    table.assert_close(y, want[::G], 1e-12, "attached")
    stored = {}
    for way in ("share", "expand"):
        memory, expected = beams(way, name=name, spec=SPEC, valid=valid)
        y, got = attending(memory, expected, params, x_q)
        table.assert_close(y, want, 1e-12, way)
        cases.tree_close(got, aux, 1e-12)
        jax.tree.map(
            np.testing.assert_array_equal,
            memory.read(expected),
            jax.tree.map(lambda x: x[each], single.read(expected)),
        )
        stored[way] = memory.nbytes - memory.map_nbytes
    assert stored == {"share": single.nbytes, "expand": G * single.nbytes}


@pytest.mark.parametrize("name", ["mha", "collab"])
def test_in_training_the_gradient_of_the_source_is_the_sum_of_the_key_and_the_value_path(name):
    """collab stands for sides with more than key and value: its key bias belongs to the key's path."""
    attn, params, x_q, source = made(name)
    x_q, stop = x_q[:B], jax.lax.stop_gradient

    def through(params, source, paths):
        memory = CrossMemory(attn)
        memory.bind(paths(source), NAMED)
        memory.project(params, projection_version=1, training=True)
        assert memory.identity.device is None and memory.identity.mode == "training-ephemeral"
        y, _ = attn.attend(params, x_q, memory.consume(1))
        memory.release(consumers=0)
        return jnp.sin(y).sum()

    def grads(params, source):
        ways = (lambda x: x, lambda x: (x, stop(x)), lambda x: (stop(x), x))
        direct = jax.grad(lambda p, x: jnp.sin(attn.apply(p, x_q, x)[0]).sum(), (0, 1))(params, source)
        return direct, [jax.grad(through, (0, 1))(params, source, way) for way in ways]

    (want_params, want), ((got_params, both), (_, keys), (_, values)) = table.jit(grads)(params, source)
    table.assert_close(both, want, 1e-12, "source")
    table.assert_close(keys + values, want, 1e-12, "sum of paths")
    assert min(np.abs(keys).max(), np.abs(values).max()) > 1e-3
    cases.tree_close(got_params, want_params, 1e-12)


class TestBeams:
    @pytest.mark.parametrize("way", ["share", "expand"])
    def test_any_map_reads_each_beam_s_own_source(self, way):
        attn, params, x_q, source = made()
        run = table.jit(attn.apply)
        for beam_map in ([1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 1, 0], [1] * 6):
            want, _ = run(params, x_q, source[np.array(beam_map)])
            memory, expected = beams(way, beam_map)
            y, _ = attending(memory, expected, params, x_q)
            table.assert_close(y, want, 1e-12, f"{way} {beam_map}")

    def test_what_comes_with_the_rows_goes_with_the_beams(self):
        """Masks, biases and positions with a beam axis, of size 1, or without; captured arrays."""
        attn, params, x_q, _ = made(
            spec=ja.HeadSpec(
                model=MODEL, heads=4, d_qk=6, d_v=3, in_k=SOURCE, in_v=SOURCE, rotary=ja.Rotary()
            )
        )
        rng = np.random.default_rng(2)
        beam_map, n = [1, 0, 0, 1, 1, 0], B * G
        shown = lambda *shape: jnp.asarray(rng.random(shape) < 0.7)
        mask = ja.explicit(shown(n, Q, S), axes="b q k") & ~ja.explicit(shown(1, S), axes="b k")
        named = dict(
            mask=mask | ja.explicit(shown(Q, S), axes="q k"),
            bias=jnp.asarray(rng.normal(size=(n, 1, Q, S))),
            positions=jnp.asarray(rng.integers(0, 50, (n, Q))),
            valid=shown(n, Q),
            capture=("weights", "heads"),
        )
        plain = dict(positions=jnp.arange(Q) + 3, bias=named["bias"][0], valid=named["valid"][0])
        for some in (named, plain):
            results = []
            for way in ("share", "expand"):
                memory, expected = beams(way, beam_map, name="mha", spec=attn.spec)
                results.append(attending(memory, expected, params, x_q, **some))
            (got, aux), (want, want_aux) = results
            table.assert_close(got, want, 1e-12, "output")
            cases.tree_close(aux, want_aux, 1e-12)

    def test_a_shared_pair_is_not_copied_and_its_bytes_are_those_of_one(self):
        attn, params, x_q, _ = made()
        memory, expected = beams("share")
        size = B * S * 4 * (6 + 3) * 8  # B S H (d_qk + d_v), eight bytes each
        assert (memory.nbytes, memory.map_nbytes) == (size + 4 * B * G, 4 * B * G)
        run = lambda x_q: memory.attend(params, x_q, expected=expected)[0]
        gathered = lambda x_q: attn.attend(params, x_q, memory.read(expected))[0]
        sizes = [largest_of_source(f, x_q) for f in (run, gathered)]
        assert sizes[0] <= B * S * 4 * 6 < sizes[1] == G * B * S * 4 * 6

    def test_reordering(self):
        memory, expected = beams("share", [0, 0, 1, 1])
        pair = memory._side
        memory.reorder([1, 1, 3, 2])  # a hypothesis goes on twice
        assert memory.beam_to_source.tolist() == [0, 0, 1, 1]
        memory.reorder([2, 0, 3, 1])  # hypotheses of both sources change places, and the map with them
        assert memory.beam_to_source.tolist() == [1, 0, 1, 0]
        assert memory._side is pair
        expanded, _ = beams("expand", [0, 0, 1, 1])
        whole = expanded._side
        expanded.reorder([1, 1, 3, 2])
        assert expanded._side is whole  # equal rows change places
        expanded.reorder([2, 0, 3, 1])
        jax.tree.map(np.testing.assert_array_equal, expanded.read(expected), memory.read(expected))
        for one in (memory, expanded):
            rows = one.read(expected)
            with pytest.raises(ValueError, match="source 1 would have 3 beams, not 2, source 0 would have 1"):
                one.reorder([0, 2, 2, 1])
            for wrong in ([0, 1, 2, 4], [-1, 0, 1, 2], [0.0, 1.0, 2.0, 3.0], [[0, 1, 2, 3]]):
                with pytest.raises(ValueError, match="reorder: index: got .*, expected a row of 0 to 3"):
                    one.reorder(wrong)
            with pytest.raises(ValueError, match="index of 3 entries for 4 beams"):
                one.reorder([0, 1, 2])
            jax.tree.map(np.testing.assert_array_equal, one.read(expected), rows)
            one.rollback(expected)
            jax.tree.map(np.testing.assert_array_equal, one.read(expected), rows)

    def test_beams_that_cannot_be(self):
        memory, expected = attached()
        for wrong in ([0, 2], [], 0, [0.5]):
            with pytest.raises(ValueError, match="share: beams: got .*, expected a row of 0 to 1"):
                memory.share(wrong)
        with pytest.raises(TypeError, match="expand: beams are traced, but a life is host state"):
            jax.make_jaxpr(memory.expand)(jnp.array([0, 1]))
        assert memory.life is Life.ATTACHED and memory.beam_to_source is None
        memory.share(G)
        x_q = made()[2]
        for wrong in (x_q[:4], x_q[:1]):
            with pytest.raises(ValueError, match=f"batch axis b is {len(wrong)} .*expected 6 beams"):
                memory.attend(made()[1], wrong, expected=expected)
        single = CrossMemory(memory.attn)
        single.bind(made()[3][0], NAMED)
        single.project(made()[1], projection_version=1)
        single.attach(single.identity)
        with pytest.raises(ValueError, match="share: the source has no batch axis"):
            single.share(G)


def largest_of_source(function, *arguments):
    """Elements of the largest value with the source's rows, heads and key width that a program makes."""
    shapes = [value.shape for value in jaxpr.values(jaxpr.trace(function, *arguments))]
    return max((math.prod(shape) for shape in shapes if {S, 4, 6} <= set(shape)), default=0)


class TestMasks:
    def test_positions_of_a_target_are_not_compared_with_source_rows(self):
        memory, expected = attached()
        _, params, x_q, _ = made()
        ids = np.zeros(S, int)
        rows = ja.explicit(np.ones((Q, S), bool), axes="q k")
        for mask in (
            ja.causal(),
            rows & ja.window(3),
            rows | ~ja.causal(align="end"),
            ~(rows & ja.window(2, 1)),
        ):
            with pytest.raises(ValueError, match="axis k counts source rows, .* compares target positions"):
                memory.attend(params, x_q[:B], mask, expected=expected)
        with pytest.raises(ValueError, match=r"axis k for the rows of axis q.*segments\(q_ids, k_ids\)"):
            check_cross_mask(ja.segments(ids))
        others = ja.padding(np.ones((B, S), bool)) & ja.lengths(3) | ja.segments(ids[:Q], ids)
        want, _ = table.jit(memory.attn.attend)(params, x_q[:B], memory.read(expected), rows & others)
        y, _ = attending(memory, expected, params, x_q[:B], rows & others)
        table.assert_close(y, want, 1e-12, "other masks")

    def test_padding_of_the_source_hides_its_columns_and_reaches_nothing(self):
        attn, params, x_q, source = made()
        valid = np.arange(S) < 4  # one row for all examples
        memory = CrossMemory(attn)
        held = np.where(valid[:, None], source, np.nan)
        memory.bind(held, NAMED, valid=valid)
        held[:] = 1e3  # what was bound is a release: later writes are not seen
        memory.project(params, projection_version=1)
        memory.attach(memory.identity)
        memory.share([1, 0, 1])
        y, aux = attending(memory, memory.identity, params, x_q[:3], capture=("weights",))
        want, _ = table.jit(attn.apply)(params, x_q[:3], source[np.array([1, 0, 1]), :4])
        table.assert_close(y, want, 1e-12, "padding")
        assert not np.any(aux.captured["weights"][..., 4:])
        assert memory.read(memory.identity).valid.shape == (3, S)


MAPS = ([0, 0, 1, 1], [1, 0, 1, 1], [0, 2, 1, 1])
INDICES = ([0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0], [0, 0, 0, 2], [4, 0, 1, 2])


class Walk:
    """A memory, beside a model that knows the article's table, what is bound, and each beam's slot."""

    def __init__(self):
        self.visited = set()
        self.renew()

    def renew(self):
        self.memory, self.state = CrossMemory(made()[0]), "EMPTY"
        self.bound = self.beams = None

    def take(self, random):
        """Any operation, or one that the state has, with arguments that often fit, so that walks come far."""
        legal = [what for what, where in LEGAL if where == self.state]
        way = random.choice(["legal", "legal", "legal", "any", "any"])
        if way == "legal" and not legal:
            return self.renew()
        world = random.choice([0, 1]), random.choice([1, 2])  # which source, which projection version
        if random.random() < 0.6 and self.bound and self.bound[1]:
            world = self.bound
        what = random.choice(legal if way == "legal" else OPERATIONS)
        arguments = world, random.choice(MAPS), random.choice(INDICES), random.choice([0, 0, 1])
        note(f"{what} {arguments} in {self.state}")
        self.step(what, *arguments)

    def step(self, what, world, beams, index, left):
        which, version = world
        memory, params = self.memory, made()[1]
        run = {
            "bind": lambda: memory.bind(*sources(which)),
            "project for training": lambda: memory.project(params, projection_version=version, training=True),
            "project for inference": lambda: memory.project(params, projection_version=version),
            "consume": lambda: memory.consume(version),
            "attach": lambda: memory.attach(identity(which, version)),
            "share": lambda: memory.share(beams),
            "expand": lambda: memory.expand(beams),
            "reorder": lambda: memory.reorder(index),
            "rollback": lambda: memory.rollback(identity(which, version)),
            "read": lambda: memory.read(identity(which, version)),
            "drift": lambda: memory.drift(identity(which, version)),
            "release": lambda: memory.release(consumers=left),
        }[what]
        if (what, self.state) not in LEGAL:
            with pytest.raises(RuntimeError, match=f"{what} in {self.state}, expected"):
                run()
            return
        refusal = self.refusal(what, world, beams, index, left)
        if refusal:
            with pytest.raises(ValueError, match=refusal):
                run()
            return
        result = run()
        if what == "drift":
            different = {"source_release", "memory_id"} if which != self.bound[0] else set()
            different |= {"projection_version"} if version != self.bound[1] else set()
            assert set(result) == different
            if not different:
                return
        self.state = LEGAL[what, self.state]
        if what == "bind":
            self.bound = (which, None)
        elif what.startswith("project"):
            self.bound = (self.bound[0], version)
        elif what in ("share", "expand"):
            self.beams = beams
        elif what == "reorder":
            self.beams = [self.beams[i] for i in index]

    def refusal(self, what, world, beams, index, left):
        """What the error must name, where the state is right and the arguments are not."""
        if what == "consume" and world[1] != self.bound[1]:
            return "projection_version"
        if what in ("attach", "rollback", "read") and world != self.bound:
            return "memory_id" if world[0] != self.bound[0] else "projection_version"
        if what in ("share", "expand") and max(beams) > 1:
            return "expected a row of 0 to 1"
        if what == "reorder" and max(index) > 3:
            return "expected a row of 0 to 3"
        if what == "reorder" and sorted(self.beams[i] for i in index) != sorted(self.beams):
            return "beams, not"
        return "outstanding" if what == "release" and left else None

    def it_stands_where_the_model_does_and_reads_its_own_source_or_nothing(self):
        self.visited.add(self.state)
        assert self.memory.life.name == self.state
        readable = self.state in ("ATTACHED", "BEAM_SHARED", "BEAM_EXPANDED")
        for world in ((0, 1), (1, 1), (0, 2), (1, 2)):
            if not readable or world != self.bound:
                with pytest.raises((ValueError, RuntimeError)):
                    self.memory.read(identity(*world))
                continue
            slots = [0, 1] if self.beams is None else self.beams
            got = looked_at(self.memory.read(identity(*world)), len(slots))
            np.testing.assert_allclose(got, direct(world[0])[np.array(slots)], atol=1e-12)


@functools.cache
def sources(which):
    named = NAMED._replace(source_release=f"s{which}", memory_id=f"m{which}", projection_version=None)
    return made()[3] + which, named


@functools.cache
def identity(which, version):
    attn, params, _, _ = made()
    source, named = sources(which)
    return expected_identity(attn, params, source, named._replace(projection_version=version))


@functools.cache
def direct(which):
    """The direct call's output of each source slot, for one and the same target rows."""
    attn, params, x_q, _ = made()
    return np.asarray(attn.apply(params, jnp.stack([x_q[0]] * B), sources(which)[0])[0])


@functools.cache
def _attend():
    return table.jit(made()[0].attend)


def looked_at(side, rows):
    _, params, x_q, _ = made()
    return _attend()(params, jnp.stack([x_q[0]] * rows), side)[0]


def test_random_walks():
    visited = set()

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(st.randoms(use_true_random=True))
    def walks(random):
        walk = Walk()
        for _ in range(40):
            walk.take(random)
            walk.it_stands_where_the_model_does_and_reads_its_own_source_or_nothing()
        visited.update(walk.visited)

    walks()
    assert visited == Life.__members__.keys()
