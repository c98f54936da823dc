"""Law 3: a chain applies its links in order, each at its own stage."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reduced
import table
from loops import mohsa, talking_heads

import jaxattn as ja
import variants

pytestmark = pytest.mark.heavy


Table = tuple[tuple[float, ...], ...]


class fixed(ja.HeadTransform):
    """A mix of heads at one site, without anything learned."""

    site: str
    matrix: Table

    def adapt(self, sizes):
        return sizes.claim(**{self.site: len(self.matrix[0])})

    def coupling(self, params, coupling, at):
        return at.fill(coupling, **{self.site: ja.Mix(jnp.asarray(self.matrix))})


def fixed_mix(site: str, matrix: np.ndarray) -> fixed:
    return fixed(site, tuple(map(tuple, matrix.tolist())))


class rows_of_query(ja.HeadTransform):
    """The query's rows alone add x @ kernel [m, i, o] to the identity before the softmax."""

    kernel: tuple[Table, ...]

    def adapt(self, sizes):
        return sizes.claim(pre=len(self.kernel[0]))

    def query_side(self, params, x_q, side, at):
        return at.fill(
            side, pre=ja.Factors(dense=jnp.einsum("...tm,mio->...tio", x_q, jnp.asarray(self.kernel)))
        )


class rows_of_key(ja.HeadTransform):
    """The same of the key's rows."""

    kernel: tuple[Table, ...]

    def adapt(self, sizes):
        return sizes.claim(pre=len(self.kernel[0]))

    def key_side(self, params, x_k, side, at):
        return at.fill(
            side, pre=ja.Factors(dense=jnp.einsum("...tm,mio->...tio", x_k, jnp.asarray(self.kernel)))
        )


def nested(array: np.ndarray) -> tuple[Table, ...]:
    return tuple(tuple(map(tuple, rows)) for rows in array.tolist())


CHAINED = table.sizes(4, 6, cross=True)


def chained(engine: str, *links: ja.HeadTransform) -> tuple[np.ndarray, table.Inputs, Any, Any]:
    """Output of MHA with these links, the inputs, the parameters, and plain logits and values."""
    rng = np.random.default_rng(5)
    case = table.mha_case(CHAINED)
    inputs = table.draw(case)
    attn = ja.attention(ja.HeadSpec(**CHAINED), *links)
    params = table.drawn(attn, rng)
    y, _ = table.jit(lambda p: table.call(case, attn, p, inputs, engine=engine))(params)
    query, key, value = (
        np.einsum("btm,mhd->bthd", x, params[name]["kernel"])
        for name, x in (("query", inputs.x_q), ("key", inputs.x_kv), ("value", inputs.x_kv))
    )
    logits = np.einsum("bqhd,bkhd->bqkh", query, key) / np.sqrt(6)
    return np.asarray(y), inputs, params, (logits, value)


def finished(logits: np.ndarray, value, params, inputs, post=None) -> np.ndarray:
    """Softmax of logits [b, q, k, h] over visible keys, a map of the weights, values, output."""
    raised = np.exp(logits) * inputs.visible[..., None]
    total = raised.sum(2, keepdims=True)
    weights = raised / np.where(total == 0, 1, total)
    weights = weights if post is None else weights @ post
    heads = np.einsum("bqkh,bkhv->bqhv", weights, value)
    return np.einsum("bqhv,hvm->bqm", heads, params["out"]["kernel"])


FIRST, SECOND = np.random.default_rng(6).normal(size=(2, 4, 4))


@pytest.mark.parametrize("engine", table.ENGINES)
def test_chain_applies_left_to_right_before_the_softmax(engine):
    a, b = fixed_mix("pre", FIRST), fixed_mix("pre", SECOND)
    y, inputs, params, (logits, value) = chained(engine, ja.chain(a, b))
    table.assert_close(y, finished(logits @ FIRST @ SECOND, value, params, inputs), 1e-12, "a then b")
    swapped = finished(logits @ SECOND @ FIRST, value, params, inputs)
    assert np.max(np.abs(y - swapped)) > 0.05 * np.max(np.abs(y)), "the maps commute"


@pytest.mark.parametrize("engine", table.ENGINES)
def test_chain_applies_left_to_right_after_the_softmax(engine):
    a, b = fixed_mix("post", FIRST), fixed_mix("post", SECOND)
    y, inputs, params, (logits, value) = chained(engine, ja.chain(a, b))
    table.assert_close(y, finished(logits, value, params, inputs, FIRST @ SECOND), 1e-12, "a then b")
    swapped = finished(logits, value, params, inputs, SECOND @ FIRST)
    assert np.max(np.abs(y - swapped)) > 0.05 * np.max(np.abs(y)), "the maps commute"


@pytest.mark.parametrize("query_first", [False, True], ids=["key_query", "query_key"])
@pytest.mark.parametrize("engine", table.ENGINES)
def test_query_only_and_key_only_transforms_keep_their_stages(engine, query_first):
    rng = np.random.default_rng(7)
    of_query = rng.normal(size=(table.MODEL, 4, 4)) / np.sqrt(table.MODEL)
    of_key = rng.normal(size=(table.SOURCE, 4, 4)) / np.sqrt(table.SOURCE)
    links = [rows_of_key(nested(of_key)), rows_of_query(nested(of_query))]
    y, inputs, params, (logits, value) = chained(engine, *(links[::-1] if query_first else links))
    by_query = np.eye(4) + np.einsum("bqm,mio->bqio", inputs.x_q, of_query)[:, :, None]
    by_key = np.eye(4) + np.einsum("bkm,mio->bkio", inputs.x_kv, of_key)[:, None]
    stages = (by_query, by_key) if query_first else (by_key, by_query)
    want, swapped = (
        finished((logits[..., None, :] @ one @ two)[..., 0, :], value, params, inputs)
        for one, two in (stages, stages[::-1])
    )
    table.assert_close(y, want, 1e-12, "in order")
    assert np.max(np.abs(y - swapped)) > 0.05 * np.max(np.abs(y)), "the maps commute"


@pytest.mark.parametrize("grouped", ["flat", "left", "right"])
def test_grouping_of_a_chain_does_not_matter(grouped):
    third = np.random.default_rng(8).normal(size=(4, 4))
    a, b = fixed_mix("pre", FIRST), fixed_mix("pre", SECOND)
    c = fixed_mix("post", third)
    chain = {
        "flat": ja.chain(a, b, c),
        "left": ja.chain(ja.chain(a, b), c),
        "right": ja.chain(a, ja.chain(b, ja.identity, c)),
    }[grouped]
    y, inputs, params, (logits, value) = chained("dense", chain)
    table.assert_close(y, finished(logits @ FIRST @ SECOND, value, params, inputs, third), 1e-12, grouped)


def test_the_same_variant_twice_has_two_sets_of_leaves():
    twice = variants.talking_heads(), variants.talking_heads()
    y, inputs, params, _ = chained("dense", *twice)
    first, second = params["heads"]["talking_heads"], params["heads"]["talking_heads_1"]
    product = {site: {"kernel": first[site]["kernel"] @ second[site]["kernel"]} for site in ("pre", "post")}
    one = table.mha_case(CHAINED)._replace(reference=talking_heads.reference)
    want = table.loops(one, reduced.with_own("talking_heads", product, params), inputs)
    table.assert_close(y, want, 1e-12, "one map after the other is their product")


NEIGHBOURS = [
    (variants.dcmha(post=False), variants.talking_heads(softmax_heads=6, value_heads=8)),
    (variants.talking_heads(softmax_heads=6, value_heads=8), variants.dcmha(groups=2)),
]


@pytest.mark.parametrize("links", NEIGHBOURS, ids=["dcmha_first", "dcmha_second"])
def test_switched_off_neighbour_changes_nothing_in_a_chain(links):
    """DCMHA without dynamics beside three head counts has leaves for the counts at its place."""
    rng = np.random.default_rng(9)
    case = table.mha_case(CHAINED)
    inputs = table.draw(case)
    attn = ja.attention(ja.HeadSpec(**CHAINED), ja.chain(*links))
    params = table.drawn(attn, rng)
    run = table.jit(lambda p: table.call(case, attn, p, inputs)[0])
    live = run(params)
    params["heads"]["dcmha"] = jax.tree.map(np.zeros_like, params["heads"]["dcmha"])
    y = run(params)
    alone = case._replace(reference=talking_heads.reference)
    table.assert_close(y, table.loops(alone, params, inputs), 1e-12, "talking heads alone")
    assert np.max(np.abs(live - y)) > 0.05 * np.max(np.abs(y)), "the dynamics do nothing"


def test_a_change_of_head_counts_after_a_claimed_post_mix_is_refused():
    links = variants.dcmha(), variants.talking_heads(softmax_heads=6, value_heads=8)
    with pytest.raises(ValueError, match=r"post mix expects 4 heads but gets 6.*Fix: put"):
        ja.attention(ja.HeadSpec(**CHAINED), *links)


def test_mohsa_talking_heads_and_moh_chain():
    """Three kinds of change at once; with the later two switched off it is MOHSA."""
    links = (
        variants.mohsa(overlap=2),
        variants.talking_heads(),
        variants.moh(shared=2, top_k=2, gates="released"),
    )
    y, inputs, params, _ = chained("dense", ja.chain(*links))
    own = {**reduced.eye_maps(params, 4)["heads"], **reduced.zero_routers(params, 2, 2)["heads"]}
    case = table.mha_case(CHAINED)
    attn = ja.attention(ja.HeadSpec(**CHAINED), *links)
    run = table.jit(lambda p: table.call(case, attn, p, inputs)[0])
    off = run({**params, "heads": own})
    alone = case._replace(reference=functools.partial(mohsa.reference, overlap=2))
    table.assert_close(off, table.loops(alone, params, inputs), 1e-12, "mohsa alone")
    assert np.max(np.abs(y - off)) > 0.05 * np.max(np.abs(off))


def test_upgrades_of_a_chain_follow_one_another():
    links = (
        variants.talking_heads(bias=True),
        variants.dcmha(static=True),
        variants.moh(shared=1, top_k=3, gates="released"),
    )
    case = table.mha_case(CHAINED)
    inputs = table.draw(case)
    attn = ja.attention(ja.HeadSpec(**CHAINED), *links)
    rng = np.random.default_rng(10)
    fresh, plain = table.drawn(attn, rng), table.drawn(ja.attention(ja.HeadSpec(**CHAINED)), rng)
    params = plain
    for declared in attn.declare().values():
        params = declared.upgrade.params(params, fresh)
    y, _ = table.jit(lambda p: table.call(case, attn, p, inputs))(params)
    table.assert_close(y, table.loops(case, plain, inputs), 1e-12, "upgraded link by link")


# Every variant with itself


def twice(name):
    """An attention with the first case of a variant that may follow itself, twice; None where none may."""
    for case in table.TABLE[name]:
        try:
            return case, ja.attention(ja.HeadSpec(**case.spec), case.transform(), case.transform())
        except ValueError as error:
            assert re.search(r"Fix: .*(first|equal counts|head counts)", str(error)), error
    return None


FOLLOWS_ITSELF = (
    "mha",
    "talking_heads",
    "dcmha",
    "moh",
)  # the others redefine the projections, which one may


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_each_variant_twice_in_a_chain_keeps_leaves_notes_losses_and_telemetry_apart(name):
    found = twice(name)
    assert (found is not None) == (name in FOLLOWS_ITSELF)
    if found is None:
        return
    case, attn = found
    first, second = (site.name for site in attn.sites)
    assert (first, second) == (name, f"{name}_1")
    params, inputs = table.drawn(attn, np.random.default_rng(13)), table.draw(case)
    once = ja.attention(ja.HeadSpec(**case.spec), case.transform())
    own = set(params["heads"])
    assert own == ({first, second} if once.init(jax.random.key(0))["heads"] else set())

    @table.jit
    def run(params):
        def loss(params):
            y, aux = table.call(case, attn, params, inputs, engine="dense")
            return (y**2).sum() + aux.total(), (y, aux)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, (y, aux)), slopes = run(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(slopes["heads"]):
        assert np.abs(leaf).max() > 1e-9, path
    noted = jax.eval_shape(lambda p: attn.query_side(p, inputs.x_q), params).notes
    own_of_first = {**params, "heads": {site: params["heads"][site] for site in own & {first}}}
    alone = jax.eval_shape(lambda p: once.query_side(p, inputs.x_q), own_of_first).notes
    assert set(noted) == {name for one in alone for name in (one, f"{one}_1")}
    if case.loss is not None:
        assert set(aux.losses) == {"balance", f"{second}_balance"} and set(aux.sums) == {first, second}
        assert float(aux.losses["balance"].value) != float(aux.losses[f"{second}_balance"].value)
        assert np.abs(np.asarray(aux.sums[first].probability - aux.sums[second].probability)).max() > 1e-3
    for site in own:  # each moves the output by leaves of its own
        other = params["heads"] | {site: table.redraw(params["heads"][site], np.random.default_rng(14))}
        assert np.abs(np.asarray(run({**params, "heads": other})[0][1][0] - y)).max() > 1e-3 * np.abs(y).max()


EXACT = {
    "mha": variants.mha(),
    "talking_heads": variants.talking_heads(bias=True),
    "dcmha": variants.dcmha(static=True),
    "moh": variants.moh(shared=1, top_k=3, gates="released"),
}


@pytest.mark.parametrize("name", FOLLOWS_ITSELF)
def test_upgrades_of_the_same_variant_twice_are_exact(name):
    case, links = table.mha_case(CHAINED), (EXACT[name], EXACT[name])
    attn, inputs = ja.attention(ja.HeadSpec(**CHAINED), *links), table.draw(case)
    rng = np.random.default_rng(10)
    fresh, plain = table.drawn(attn, rng), table.drawn(ja.attention(ja.HeadSpec(**CHAINED)), rng)
    params = plain
    for declared in attn.declare().values():
        params = declared.upgrade.params(params, fresh)
    attn.check_params(params)
    y, _ = table.jit(lambda p: table.call(case, attn, p, inputs))(params)
    table.assert_close(y, table.loops(case, plain, inputs), 1e-12, "upgraded link by link")
