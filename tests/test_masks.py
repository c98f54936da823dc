"""Masks against Python loops: what they show, what they claim, what they refuse."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn import masks
from jaxattn.masks import Fill, Frame

pytestmark = pytest.mark.heavy
drawn_few = settings(deadline=None, max_examples=20, derandomize=True)


class Call(NamedTuple):
    """The sizes of a call; b, h and the rest may agree, which must change nothing."""

    b: int
    h: int
    q: int
    k: int

    def frame(self) -> Frame:
        return Frame(self.q, self.k, batch=(self.b,))

    def loops(self, sees: Callable[[int, int, int, int], bool]) -> np.ndarray:
        table = np.zeros(self, bool)
        for b, h, q, k in itertools.product(*map(range, self)):
            table[b, h, q, k] = sees(b, h, q, k)
        return table

    def whole(self, mask: masks.Mask) -> np.ndarray:
        """The mask by one block that covers everything."""
        frame = self.frame()
        mask.check(frame, self.h)
        return np.broadcast_to(np.asarray(mask.block(frame, 0, self.q, 0, self.k)), self)


calls = st.builds(
    Call,
    b=st.sampled_from([2, 1, 3, 0]),
    h=st.sampled_from([1, 2, 3]),
    q=st.sampled_from([0, 1, 3, 5]),
    k=st.sampled_from([0, 1, 3, 4]),
)


def draw_rule(draw: st.DrawFn, call: Call) -> tuple[masks.Mask, Callable[..., bool]]:
    """A mask of one kind and, in plain Python, the rule it stands for."""

    def bits(*sizes: int) -> np.ndarray:
        n = int(np.prod(sizes))
        return np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool).reshape(sizes)

    def numbers(*sizes: int) -> np.ndarray:
        n = int(np.prod(sizes))
        return np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), np.int32).reshape(sizes)

    align = draw(st.sampled_from(["start", "end"]))
    shift = call.k - call.q if align == "end" else 0
    batch = draw(st.sampled_from([1, call.b]))
    kind = draw(st.sampled_from(["causal", "window", "padding", "lengths", "segments", "explicit"]))
    match kind:
        case "causal":
            return masks.causal(align), lambda b, h, q, k: k <= q + shift
        case "window":
            n, ahead = draw(st.integers(0, 4)), draw(st.integers(0, 2))
            return (
                masks.window(n, ahead, align),
                lambda b, h, q, k: q + shift - n < k <= q + shift + ahead,
            )
        case "padding":
            valid = bits(batch, call.k)
            return masks.padding(valid), lambda b, h, q, k: bool(valid[b % batch, k])
        case "lengths":
            n = numbers(batch)
            return masks.lengths(n), lambda b, h, q, k: k < n[b % batch]
        case "segments":
            q_ids, k_ids = numbers(batch, call.q), numbers(batch, call.k)
            return (
                masks.segments(q_ids, k_ids),
                lambda b, h, q, k: q_ids[b % batch, q] == k_ids[b % batch, k],
            )
    axes = draw(st.sampled_from(["b h q k", "b q k", "h q k", "b k", "q k", "h k", "b k q", "h"]))
    names = axes.split()
    array = bits(*({"b": batch}.get(name, call._asdict()[name]) for name in names))

    def table(b: int, h: int, q: int, k: int) -> bool:
        at = {"b": b % batch, "h": h, "q": q, "k": k}
        return bool(array[tuple(at[name] for name in names)])

    return masks.explicit(array, axes), table


@st.composite
def masks_of_calls(draw: st.DrawFn) -> tuple[Call, masks.Mask, np.ndarray]:
    """A call, a mask of up to three kinds under & | ~, and its table by loops."""
    call = draw(calls)
    mask, sees = draw_rule(draw, call)
    table = call.loops(sees)
    for _ in range(draw(st.integers(0, 2))):
        other, sees = draw_rule(draw, call)
        if draw(st.booleans()):
            mask, table = mask & other, table & call.loops(sees)
        else:
            mask, table = mask | other, table | call.loops(sees)
        if draw(st.booleans()):
            mask, table = ~mask, ~table
    return call, mask, table


@drawn_few
@given(masks_of_calls())
def test_mask_is_its_rule(drawn):
    call, mask, table = drawn
    np.testing.assert_array_equal(call.whole(mask), table)


@drawn_few
@given(masks_of_calls(), st.data())
def test_block_is_a_slice_of_the_whole(drawn, data):
    call, mask, table = drawn
    q_size = data.draw(st.integers(0, call.q))
    k_size = data.draw(st.integers(0, call.k))
    q_start = data.draw(st.integers(0, call.q - q_size))
    k_start = data.draw(st.integers(0, call.k - k_size))
    expected = table[..., q_start : q_start + q_size, k_start : k_start + k_size]
    for q_at, k_at in ((q_start, k_start), (jnp.int32(q_start), jnp.int32(k_start))):
        block = mask.block(call.frame(), q_at, q_size, k_at, k_size)
        assert block.dtype == bool
        assert all(n in (1, size) for n, size in zip(block.shape[-2:], (q_size, k_size), strict=True))
        np.testing.assert_array_equal(np.broadcast_to(block, expected.shape), expected)


@drawn_few
@given(masks_of_calls(), st.integers(1, 3), st.integers(1, 3))
def test_fill_never_lies(drawn, q_size, k_size):
    call, mask, table = drawn
    for q, k in itertools.product(range(0, call.q, q_size), range(0, call.k, k_size)):
        rows, columns = min(q_size, call.q - q), min(k_size, call.k - k)
        part = table[..., q : q + rows, k : k + columns]
        match mask.fill(call.frame(), q, rows, k, columns):
            case Fill.EMPTY:
                assert not part.any()
            case Fill.FULL:
                assert part.all()


@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize(("n", "ahead"), [(None, 0), (1, 0), (3, 0), (2, 2), (0, 0), (0, 2)])
@pytest.mark.parametrize(("q_len", "k_len"), [(11, 11), (7, 13), (13, 7)])
def test_fill_of_positions_is_exact(align, n, ahead, q_len, k_len):
    mask = masks.causal(align) if n is None else masks.window(n, ahead, align)
    table = np.asarray(mask.table(q_len, k_len))[0]
    frame = Frame(q_len, k_len)
    found = set()
    for q, k, size in itertools.product(range(0, q_len - 3), range(0, k_len - 3), (1, 2, 3)):
        fill, part = mask.fill(frame, q, size, k, 2), table[q : q + size, k : k + 2]
        assert (fill is Fill.EMPTY) == (not part.any())
        assert (fill is Fill.FULL) == part.all()
        found.add(fill)
    assert Fill.EMPTY in found


def test_fill_combines():
    frame = Frame(8, 8, batch=(2,))
    unknown = masks.padding(np.ones((2, 8), bool))
    block = (0, 4, 4, 4)  # above the diagonal
    below = (4, 4, 0, 4)
    assert unknown.fill(frame, *block) is Fill.PARTIAL
    assert (unknown & masks.causal()).fill(frame, *block) is Fill.EMPTY
    assert (masks.causal() & unknown).fill(frame, *below) is Fill.PARTIAL
    assert (unknown | masks.causal()).fill(frame, *block) is Fill.PARTIAL
    assert (unknown | masks.causal()).fill(frame, *below) is Fill.FULL
    assert (~masks.causal()).fill(frame, *block) is Fill.FULL
    assert (~masks.causal()).fill(frame, *below) is Fill.EMPTY
    assert masks.everything().fill(frame, *block) is Fill.FULL
    assert (~masks.everything()).fill(frame, *block) is Fill.EMPTY


@drawn_few
@given(calls, st.data())
def test_algebra(call, data):
    (a, _), (b, _), (c, _) = (data.draw(st.composite(draw_rule)(call)) for _ in range(3))
    pairs = [
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (a & (b | c), (a & b) | (a & c)),
        (a | (b & c), (a | b) & (a | c)),
        (a & b & c, a & (b & c)),
        (~~a, a),
        (a & b, b & a),
        (a & ~a, ~masks.everything()),
        (a | ~a, masks.everything()),
        (a & None, a),
        (a | None, masks.everything()),
    ]
    for left, right in pairs:
        np.testing.assert_array_equal(call.whole(left), call.whole(right))


def test_causal_alignments():
    np.testing.assert_array_equal(masks.causal().table(2, 5)[0], np.tri(2, 5, 0, bool))
    np.testing.assert_array_equal(masks.causal("end").table(2, 5)[0], np.tri(2, 5, 3, bool))
    np.testing.assert_array_equal(masks.causal("end").table(1, 5)[0], np.ones((1, 5), bool))
    np.testing.assert_array_equal(masks.causal("end").table(5, 2)[0], np.tri(5, 2, -3, bool))
    np.testing.assert_array_equal(masks.causal("end").table(3, 3), masks.causal().table(3, 3))


def test_window_is_the_latest_keys_itself_included():
    table = np.asarray((masks.window(3) & masks.causal()).table(7, 7)[0])
    assert [list(np.flatnonzero(row)) for row in table] == [
        list(range(max(0, q - 2), q + 1)) for q in range(7)
    ]
    assert not masks.window(0).table(5, 7).any()


@pytest.mark.parametrize("align", ["start", "end"])
def test_given_positions_are_compared_as_they_are(align):
    q_position = jnp.array([[7, 2, 5], [0, 9, 4]])
    k_position = jnp.array([[4, 5, 6, 7, 0], [9, 1, 2, 3, 4]])
    mask = masks.causal(align) & masks.window(3, align=align)
    frame = Frame(3, 5, q_position, k_position, batch=(2,))
    mask.check(frame, 2)
    distance = np.asarray(q_position)[:, None, :, None] - np.asarray(k_position)[:, None, None, :]
    expected = (distance >= 0) & (distance < 3)
    np.testing.assert_array_equal(mask.block(frame, 0, 3, 0, 5), expected)
    for start in (1, jnp.int32(1)):
        np.testing.assert_array_equal(mask.block(frame, start, 2, start, 3), expected[..., 1:, 1:4])
    assert mask.fill(frame, 0, 1, 4, 1) is Fill.PARTIAL
    dead = mask.dead_queries(3, 5, q_position, k_position)
    np.testing.assert_array_equal(dead, ~expected.any(-1))


@pytest.mark.parametrize("align", ["start", "end"])
def test_positions_of_one_side_leave_the_other_counting_from_0(align):
    table = masks.causal(align).table(2, 5, q_position=jnp.array([3, 4]))
    np.testing.assert_array_equal(table[0], np.tri(2, 5, 3, bool))
    table = masks.causal(align).table(2, 3, k_position=jnp.array([2, 1, 0]))
    np.testing.assert_array_equal(table[0], [[False, False, True], [False, True, True]])


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int8", "float32"])
def test_positions_of_any_number_type(dtype):
    position = jnp.array([0, 100, 120], dtype)
    table = masks.window(200, ahead=110).table(3, 3, position, position)
    distance = np.subtract.outer([0, 100, 120], [0, 100, 120])
    np.testing.assert_array_equal(table[0], (distance >= -110) & (distance < 200))


def test_end_alignment_shifts_blocks_too():
    mask = masks.causal("end")
    frame = Frame(3, 7)
    np.testing.assert_array_equal(mask.block(frame, 1, 2, 5, 2)[0], [[True, False], [True, True]])


def test_axes_are_taken_by_name_where_sizes_agree():
    # b = h = q = k = 3, so that nothing but the names can tell the axes apart
    call = Call(3, 3, 3, 3)
    array = np.array([[0, 0, 1], [1, 0, 0], [1, 1, 0]], bool)
    for axes in ("b k", "h k", "q k", "b h", "b q", "k q", "h q"):
        first, second = ("bhqk".index(name) for name in axes.split())
        expected = call.loops(lambda *at, i=first, j=second: array[at[i], at[j]])
        np.testing.assert_array_equal(call.whole(masks.explicit(array, axes)), expected)
    expected = call.loops(lambda b, h, q, k: array[b, k])
    np.testing.assert_array_equal(call.whole(masks.padding(array)), expected)
    expected = call.loops(lambda b, h, q, k: array[b, q] == array[b, k])
    np.testing.assert_array_equal(call.whole(masks.segments(array.astype(int))), expected)


def test_several_batch_axes_and_none():
    array = np.random.default_rng(0).random((2, 3, 5, 7)) < 0.5
    frame = Frame(5, 7, batch=(2, 3))
    mask = masks.explicit(array, "b1 b2 q k") & masks.lengths(np.full((1, 3), 4))
    mask.check(frame, 11)
    expected = array[:, :, None] & (np.arange(7) < 4)
    np.testing.assert_array_equal(mask.block(frame, 0, 5, 0, 7), expected)
    mask = masks.padding(np.array([True, False])) & masks.lengths(1)
    mask.check(Frame(3, 2), 11)
    mask.check(Frame(3, 2, batch=(4, 5)), 11)
    assert mask.block(Frame(3, 2), 0, 3, 0, 2).tolist() == [[[True, False]]]


def test_dead_queries():
    mask = masks.causal() & masks.padding([[False, True, True], [True, True, True]])
    np.testing.assert_array_equal(
        mask.dead_queries(3, 3)[:, 0], [[True, False, False], [False, False, False]]
    )
    assert masks.everything().dead_queries(3, 0).all()
    assert masks.everything().dead_queries(3, 2).shape == (1, 3)
    assert masks.causal().dead_queries(0, 2).shape == (1, 0)
    by_head = masks.explicit([[True, True], [False, False]], "h k")
    np.testing.assert_array_equal(by_head.dead_queries(1, 2), [[False], [True]])


def test_source_rows_declared_real():
    a = np.array([[True, True, False, False], [True, True, True, True]])
    b = np.array([[True, False, True, False]])
    pad = masks.padding(a)
    np.testing.assert_array_equal(pad.source_valid(4), a)
    np.testing.assert_array_equal(masks.lengths([2, 4]).source_valid(4), a)
    for mask in (masks.causal(), masks.everything(), masks.explicit(a, "b k"), ~pad):
        assert mask.source_valid(4) is None
    np.testing.assert_array_equal((masks.causal() & pad).source_valid(4), a)
    np.testing.assert_array_equal((pad & masks.padding(b)).source_valid(4), a & b)
    np.testing.assert_array_equal((pad | masks.padding(b)).source_valid(4), a | b)
    assert (pad | masks.causal()).source_valid(4) is None
    np.testing.assert_array_equal((~~pad).source_valid(4), a)


@drawn_few
@given(masks_of_calls())
def test_rows_declared_invalid_are_hidden_from_all(drawn):
    call, mask, table = drawn
    valid = mask.source_valid(call.k)
    if valid is not None:
        assert not (table & ~np.asarray(valid)[..., None, None, :]).any()


def test_has_heads():
    by_head = masks.explicit(np.ones((2, 5), bool), "h k")
    assert by_head.has_heads
    assert (masks.causal() & ~(by_head | masks.window(2))).has_heads
    assert not masks.explicit(np.ones((2, 1, 3, 5), bool), "b h q k").has_heads
    assert not (masks.causal() & masks.padding(np.ones((2, 5), bool))).has_heads


def bools(*shape: int) -> np.ndarray:
    return np.ones(shape, bool)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masks.padding(bools(2, 5)), r"padding\(valid\).*'k' has size 5, expected 7.*each source"),
        (masks.padding(bools(3, 7)), r"padding\(valid\).*'b' has size 3, expected 2.*or 1"),
        (masks.padding(bools(2, 3, 7)), r"has 2 batch axes \(2, 3\).*the call has 1: \(2,\)"),
        (masks.lengths([1, 2, 3]), r"lengths\(n\).*'b' has size 3, expected 2"),
        (masks.segments([[1, 2, 3]]), r"used for the keys too.*'k' has size 3, expected 7"),
        (masks.segments([[1, 2]], [[1] * 7]), r"segments\(q_ids\).*'q' has size 2, expected 3"),
        (masks.explicit(bools(5, 3, 7), "h q k"), r"'h' has size 5, expected 11.*or 1 for all"),
        (masks.explicit(bools(2, 1, 7), "b q k"), r"'q' has size 1, expected 3.*leave q out"),
        (masks.explicit(bools(2, 3, 1), "b q k"), r"'k' has size 1, expected 7"),
        (masks.explicit(bools(7, 3), "q k"), r"'q' has size 7, expected 3, the number of queries"),
    ],
)
def test_size_that_disagrees_is_named(mask, message):
    frame = Frame(3, 7, batch=(2,))
    for whole in (mask, ~mask, masks.causal() & mask, masks.causal() | mask):
        with pytest.raises(ValueError, match=message):
            whole.check(frame, 11)


def test_positions_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"positions of the queries.*'q' has size 4, expected 3"):
        masks.causal().check(Frame(3, 7, q_position=jnp.arange(4)), 1)
    with pytest.raises(ValueError, match=r"positions of the keys.*'b' has size 5, expected 2"):
        masks.causal().check(Frame(3, 7, None, jnp.zeros((5, 7)), (2,)), 1)
    with pytest.raises(TypeError, match=r"positions of the keys.*bool.*expected numbers"):
        masks.causal().check(Frame(3, 7, None, jnp.zeros(7, bool)), 1)


def test_sizes_are_checked_where_no_call_says_them():
    with pytest.raises(ValueError, match="'k' has size 5, expected 7"):
        masks.padding(bools(2, 5)).dead_queries(3, 7)
    with pytest.raises(ValueError, match="'b' has size"):
        (masks.padding(bools(2, 5)) & masks.lengths([1, 2, 3])).show(3, 5)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: masks.causal("left"), ValueError, "align.*'left'"),
        (lambda: masks.window(-1), ValueError, r"window\(n=-1\) must be 0 or more"),
        (lambda: masks.window(2, ahead=-3), ValueError, r"ahead=-3"),
        (lambda: masks.window(2.0), TypeError, r"window\(n\) must be an integer, got 2.0"),
        (lambda: masks.window(True), TypeError, "must be an integer"),
        (lambda: masks.padding(np.ones((2, 3), np.int32)), TypeError, "int32.*from_flax"),
        (lambda: masks.padding(np.ones((2, 3))), TypeError, r"float64.*\(2, 3\).*from_additive"),
        (lambda: masks.explicit(np.ones(3, np.uint8), "k"), TypeError, "uint8.*array != 0"),
        (lambda: masks.explicit(np.ones(3), "k"), TypeError, "from_additive.*bias="),
        (lambda: masks.padding(True), ValueError, "scalar"),
        (lambda: masks.lengths([2.0]), TypeError, "expected integers"),
        (lambda: masks.lengths([2, -1]), ValueError, "got -1"),
        (lambda: masks.segments([[0.0]]), TypeError, r"segments\(q_ids\).*expected integers"),
        (lambda: masks.segments([0], [True]), TypeError, r"segments\(k_ids\).*expected integers"),
        (lambda: masks.segments(3), ValueError, "scalar"),
        (lambda: masks.explicit(bools(2, 3), "b q k"), ValueError, r"names 3 axes.*has 2"),
        (lambda: masks.explicit(bools(2, 3), "q q"), ValueError, "each name once"),
        (lambda: masks.explicit(bools(2, 3), "k b"), ValueError, "batch axes first"),
        (lambda: masks.explicit(bools(2, 3), "b t"), ValueError, r"\['t'\] cannot be batch"),
        (lambda: masks.explicit(bools(2, 3), "b (h"), ValueError, "cannot be batch axes"),
    ],
)
def test_bad_input_says_what_to_do(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    "array",
    [np.ones((2, 3), bool), jnp.ones((2, 3), jnp.int32), np.zeros((2, 3), np.float16)],
    ids=["bool", "int", "float"],
)
def test_raw_arrays_are_refused_naming_the_converters(array):
    refusals = (masks.as_mask, lambda x: masks.causal() & x, lambda x: x & masks.causal())
    refusals += (lambda x: masks.causal() | x, lambda x: x | masks.causal())
    for refuse in refusals:
        with pytest.raises(TypeError, match=rf"{array.dtype} array of shape \(2, 3\)") as caught:
            refuse(array)
        for name in ("from_torch_mha", "from_torch_sdpa", "from_additive", "from_flax", "bias="):
            assert name in str(caught.value)
    with pytest.raises(TypeError, match=r"got 'causal' \(str\)"):
        masks.as_mask("causal")


def test_as_mask():
    mask = masks.causal()
    assert masks.as_mask(mask) is mask
    assert masks.as_mask(None).table(2, 3).all()


def test_readable_repr():
    valid = bools(3, 7)
    mask = masks.causal() & masks.window(128) & masks.padding(valid)
    assert repr(mask) == "causal() & window(128) & padding(b k: 3x7)"
    mask = (masks.causal("end") | masks.window(4, ahead=2)) & ~masks.explicit(bools(2, 3, 5, 5), "b h q k")
    assert repr(mask) == '(causal(align="end") | window(4, ahead=2)) & ~explicit(b h q k: 2x3x5x5)'
    mask = ~(masks.segments([[0, 1]], [[1, 0, 0]]) & masks.lengths([[1], [2]]) & masks.lengths(3))
    assert repr(mask) == "~(segments(b q: 1x2, b k: 1x3) & lengths(b1 b2: 2x1) & lengths(scalar))"
    assert repr(masks.causal() & masks.causal() | masks.everything()) == (
        "causal() & causal() | everything()"
    )
    assert repr(jax.tree.map(lambda leaf: object(), masks.padding(valid))) == "padding(?)"


def test_repr_is_python_of_the_same_mask():
    names = {name: getattr(masks, name) for name in ("causal", "window", "everything")}
    a, b, c = masks.causal("end"), masks.window(3, 1), masks.window(2, align="end")
    for mask in (
        a & b | c,
        a & (b | c),
        ~(a | b) & c,
        ~a & ~(b & c),
        ~(~a & c),
        ~masks.everything(),
    ):
        again = eval(repr(mask), names)
        np.testing.assert_array_equal(again.table(5, 7), mask.table(5, 7))


def test_show_and_picture():
    array = np.random.default_rng(3).random((2, 3, 4, 5)) < 0.5
    mask = masks.explicit(array, "b h q k")
    shown = mask.show(4, 5, batch=1, head=2)
    assert [[int(c) for c in line.split()] for line in shown.splitlines()] == array[1, 2].tolist()
    assert masks.lengths([2]).show(1, 3, head=4) == "1 1 0"
    figure = mask.picture(4, 5, batch=(1,), head=2)
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), array[1, 2])
    with pytest.raises(ValueError, match=r"batch axes \(2,\) and 3 head rows.*batch=2"):
        mask.show(4, 5, batch=2)
    with pytest.raises(ValueError, match="head=3"):
        mask.show(4, 5, head=3)
    assert masks.causal().show(0, 3) == ""


def test_masks_pass_through_jit_as_arguments():
    mask = ~(masks.causal() & masks.padding(bools(2, 5))) | masks.segments([[0, 0, 1]], [[0] * 5])
    mask &= masks.explicit(bools(3), "q") & masks.lengths([2, 4])
    traces = []

    @jax.jit
    def table(mask, q_start):
        traces.append(repr(mask))
        frame = Frame(3, 5, batch=(2,))
        mask.check(frame, 7)
        return mask.block(frame, q_start, 2, 1, 3), mask.source_valid(5), mask.has_heads

    for start in (0, 1):
        block, valid, _ = table(mask, start)
        np.testing.assert_array_equal(block, mask.table(3, 5)[..., start : start + 2, 1:4])
    np.testing.assert_array_equal(valid, mask.source_valid(5))
    other = jax.tree.map(lambda leaf: leaf[::-1], mask)
    np.testing.assert_array_equal(table(other, 0)[0], other.table(3, 5)[..., :2, 1:4])
    assert traces == [repr(mask)]  # one trace: what a mask holds is data, what it is is structure
    assert jax.jit(lambda m: m)(mask).table(3, 5).tolist() == mask.table(3, 5).tolist()


def test_factories_work_on_traced_values():
    def build(valid, n, ids):
        return (
            masks.padding(valid)
            & masks.lengths(n)
            & masks.segments(ids)
            & masks.from_flax(valid[:, None, None].astype(jnp.float32))
        )

    arguments = jnp.array([[True, True, False]]), jnp.array([2]), jnp.array([[1, 1, 2]])
    np.testing.assert_array_equal(jax.jit(build)(*arguments).table(3, 3), build(*arguments).table(3, 3))


def test_vmap_takes_the_batch_axis_of_every_array():
    rng = np.random.default_rng(5)
    mask = masks.causal() & (
        masks.explicit(rng.random((2, 3, 5, 7)) < 0.7, "b h q k") | ~masks.padding(rng.random((2, 7)) < 0.5)
    )
    mask &= masks.lengths([4, 6]) | masks.segments(rng.integers(0, 2, (2, 5)), rng.integers(0, 2, (2, 7)))
    frame = Frame(5, 7)

    def one(mask):
        mask.check(frame, 3)
        return mask.block(frame, 1, 3, 2, 4)

    np.testing.assert_array_equal(jax.vmap(one)(mask), mask.table(5, 7)[..., 1:4, 2:6])
    _, scanned = jax.lax.scan(lambda carry, mask: (carry, one(mask)), None, mask)
    np.testing.assert_array_equal(scanned, mask.table(5, 7)[..., 1:4, 2:6])
    dead = jax.vmap(lambda mask: mask.dead_queries(5, 7))(mask)
    np.testing.assert_array_equal(dead, mask.dead_queries(5, 7))


def test_vmap_over_an_axis_that_is_no_batch_axis_is_refused():
    with pytest.raises(ValueError, match=r"lacks an axis of.*leading batch axes of a mask"):
        jax.vmap(lambda mask: mask.table(3, 7))(masks.explicit(bools(3, 7), "q k"))


def test_vmap_makes_a_batch_of_masks():
    built = jax.vmap(masks.lengths)(jnp.array([1, 3]))
    np.testing.assert_array_equal(built.table(2, 4), masks.lengths([1, 3]).table(2, 4))


# Converters: polarity by one hidden pair, then round trips.


def test_torch_mha_true_is_blocked():
    blocked = np.array([[0, 1, 1], [0, 0, 1]], bool)
    np.testing.assert_array_equal(masks.from_torch_mha(blocked).table(2, 3)[0], ~blocked)
    keys = np.array([[0, 0, 1], [1, 0, 0]], bool)
    both = masks.from_torch_mha(blocked, keys)
    np.testing.assert_array_equal(both.table(2, 3)[:, 0], ~blocked & ~keys[:, None])
    assert both.source_valid(3) is None  # torch hides such keys and does not zero rows
    np.testing.assert_array_equal(masks.from_torch_mha(key_padding_mask=keys[0]).table(1, 3)[0], ~keys[:1])
    assert masks.from_torch_mha().table(2, 2).all()


def test_torch_mha_packs_batch_outside_heads():
    blocked = np.random.default_rng(7).random((2 * 3, 5, 7)) < 0.5
    table = masks.from_torch_mha(blocked, heads=3).table(5, 7)
    assert table.shape == (2, 3, 5, 7)
    for b, h in itertools.product(range(2), range(3)):
        np.testing.assert_array_equal(table[b, h], ~blocked[b * 3 + h])
    back = masks.to_torch_mha(masks.from_torch_mha(blocked, heads=3), 5, 7)
    np.testing.assert_array_equal(back, blocked)
    # one batch row is unbatched in torch, [h, q, k]
    masks.from_torch_mha(blocked[:3], heads=3).check(Frame(5, 7), 3)


def test_to_torch_mha():
    blocked = ~np.tri(3, 5, 0, bool)
    np.testing.assert_array_equal(masks.to_torch_mha(masks.causal(), 3, 5), blocked)
    pad = masks.padding([[True, False], [True, True]])
    packed = masks.to_torch_mha(pad, 1, 2, heads=3)
    assert packed.shape == (6, 1, 2)
    np.testing.assert_array_equal(packed[:, 0, 1], [True] * 3 + [False] * 3)
    by_head = masks.explicit([[True, False], [True, True]], "h k")
    packed = masks.to_torch_mha(by_head, 1, 2, batch=3)
    np.testing.assert_array_equal(packed[:, 0, 1], [True, False] * 3)
    with pytest.raises(ValueError, match="give batch= and heads=, got batch=None, heads=None"):
        masks.to_torch_mha(pad, 1, 2)
    with pytest.raises(ValueError, match="has batch 2, but batch=5 is asked"):
        masks.to_torch_mha(pad, 1, 2, heads=3, batch=5)
    with pytest.raises(ValueError, match="has 2 batch axes, torch has one"):
        masks.to_torch_mha(masks.lengths([[1]]), 1, 2)


@pytest.mark.parametrize("convert", [masks.from_torch_sdpa, masks.from_flax])
def test_sdpa_and_flax_true_is_visible(convert):
    visible = np.random.default_rng(11).random((2, 3, 5, 7)) < 0.5
    np.testing.assert_array_equal(convert(visible).table(5, 7), visible)
    np.testing.assert_array_equal(convert(visible[0]).table(5, 7), visible[0])
    for shape in itertools.product((1, 2), (1, 3), (1, 5), (1, 7)):
        part = visible[tuple(slice(n) for n in shape)]
        mask = convert(part)
        mask.check(Frame(5, 7, batch=(2,)), 3)
        np.testing.assert_array_equal(
            np.broadcast_to(mask.table(5, 7), (2, 3, 5, 7)), np.broadcast_to(part, (2, 3, 5, 7))
        )


@drawn_few
@given(masks_of_calls())
def test_converters_round_trip(drawn):
    call, mask, table = drawn
    size = call.q, call.k
    packed = masks.to_torch_mha(mask, *size, heads=call.h, batch=call.b)
    again = [
        masks.from_torch_mha(packed, heads=call.h if packed.ndim == 3 else None),
        masks.from_torch_sdpa(masks.to_torch_sdpa(mask, *size)),
        masks.from_flax(masks.to_flax(mask, *size)),
        masks.from_flax(masks.to_flax(mask, *size).astype(jnp.float32)),
    ]
    names = ("b h q k", "h q k")
    for dtype in (jnp.float16, jnp.float32, jnp.float64, jnp.bfloat16):
        added = masks.to_additive(mask, *size, dtype=dtype)
        assert added.dtype == dtype
        axes = names[added.ndim == 3]
        again.append(masks.from_additive(added, axes))
        again.append(masks.from_additive(jnp.maximum(added, jnp.finfo(dtype).min), axes))
    for other in again:
        np.testing.assert_array_equal(call.whole(other), table)


def test_additive_takes_only_what_hides():
    array = np.array([0.0, -0.0, -np.inf, np.finfo(np.float32).min * 0.75], np.float32)
    assert masks.from_additive(array, "k").show(1, 4) == "1 1 0 0"
    for bad in (1.0, -1e9, np.nan, np.inf, -1e-3):
        with pytest.raises(ValueError, match=r"got (?!0).*bias=.*hidden_at="):
            masks.from_additive(np.array([0.0, bad], np.float32), "k")
    old = np.array([[0.0, -1e4, -2e4]], np.float32)
    assert masks.from_additive(old, "b k", hidden_at=-1e4).show(1, 3) == "1 0 0"
    with pytest.raises(ValueError, match="must be below 0"):
        masks.from_additive(old, "b k", hidden_at=0.0)
    with pytest.raises(TypeError, match=r"int64.*expected a floating array.*explicit"):
        masks.from_additive(np.array([0, 1]), "k")
    with pytest.raises(TypeError, match=r"traced.*outside jit.*bias="):
        jax.jit(lambda x: masks.from_additive(x, "k").table(1, 2))(jnp.zeros(2))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: masks.from_torch_mha(np.zeros((2, 3))), TypeError, "float64.*from_additive"),
        (lambda: masks.from_torch_mha(bools(4, 2, 3)), ValueError, "heads=None"),
        (lambda: masks.from_torch_mha(bools(4, 2, 3), heads=3), ValueError, "must divide.*4"),
        (lambda: masks.from_torch_mha(bools(4)), ValueError, r"expected \[q, k\] or"),
        (lambda: masks.from_torch_mha(None, bools(1, 2, 3)), ValueError, r"expected \[b, k\]"),
        (
            lambda: masks.from_torch_mha(None, np.zeros((2, 3))),
            TypeError,
            "key_padding_mask.*float",
        ),
        (lambda: masks.from_torch_sdpa(np.zeros((2, 3))), TypeError, "from_additive.*bias="),
        (lambda: masks.from_torch_sdpa(bools(3)), ValueError, r"shape \(3,\).*padding"),
        (lambda: masks.from_flax(bools(2, 3)), ValueError, r"shape \(2, 3\).*h or 1, q, k"),
        (lambda: masks.from_flax(np.full((1, 2, 2), -1e9)), ValueError, "0 and 1.*from_additive"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
