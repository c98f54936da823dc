"""From a golden fixture's official arrays to public names: slice, reshape, transpose, nothing else.

An adapter is `adapter(fixture, official, ask) -> numbers`: it builds our parameter tree from the
official `in.*` and `p.*` arrays by the steps that the fixture's JSON states, calls jaxattn, and
returns what came out under the fixture's own keys (`out.y`, `mid.weights`, ...). The arrays may be
traced, so a gradient taken through an adapter is one in the official orientation. Every size and
setting is read from the JSON; what an adapter cannot express raises and names the setting.

Where a fixture stores a function of what we have (an average over heads, a norm, explicit matrices
of each pair), that function is taken of our number and says so.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
from golden_fixture import Fixture, Numbers, rotary, visibility
from jax import Array

import jaxattn as ja
import variants


class Ask(NamedTuple):
    """What a test wants: which engine, which intermediates at most, the `alt.*` numbers or not."""

    engine: str
    captures: tuple[str, ...] = ()
    alternatives: bool = False

    def wanted(self, fixture: Fixture, captures: dict[str, str]) -> dict[str, str]:
        """Of the intermediates that an adapter knows: those stored, and asked for at all."""
        return {
            key: name for key, name in captures.items() if key in fixture.arrays and name in self.captures
        }


def projections(math: Numbers) -> dict[str, Any]:
    """Our parameter tree from math arrays Wq bq Wk bk Wv bv Wo bo (Wy in the paper's letters)."""
    tree: dict[str, Any] = {"heads": {}}
    for role, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
        kernel = "Wy" if role == "out" and "Wy" in math else "W" + letter
        tree[role] = {"kernel": math[kernel]}
        if "b" + letter in math:
            tree[role]["bias"] = math["b" + letter]
    return tree


def spec_of(fixture: Fixture, tree: dict[str, Any], **changes: Any) -> ja.HeadSpec:
    """The spec whose sizes are those of the kernels; `changes` wins."""
    model, heads, d_qk = tree["query"]["kernel"].shape
    in_k, kv_heads, _ = tree["key"]["kernel"].shape
    in_v, _, d_v = tree["value"]["kernel"].shape
    found = dict(
        model=model, heads=heads, kv_heads=kv_heads, d_qk=d_qk, d_v=d_v, in_k=in_k, in_v=in_v,
        out=tree["out"]["kernel"].shape[-1], bias_q="bias" in tree["query"],
        bias_k="bias" in tree["key"], bias_v="bias" in tree["value"],
        bias_out="bias" in tree["out"], scale=fixture.settings.get("scale"),
    )  # fmt: skip
    return ja.HeadSpec(**(found | changes))


def sublayer(
    fixture: Fixture,
    official: Numbers,
    ask: Ask,
    transform: ja.HeadTransform,
    tree: dict[str, Any],
    spec: ja.HeadSpec,
    captures: dict[str, str],
) -> tuple[Numbers, ja.Aux]:
    """Run one attention sublayer; `captures` says which intermediate is which `mid.*`."""
    attn = ja.attention(spec, transform)
    if "in.x" in official:
        x_q = fixture.rows(official, "in.x")
        x_kv = fixture.rows(official, "in.m") if "in.m" in official else None
    else:
        x_q = fixture.rows(official, "in.q")
        x_kv = (fixture.rows(official, "in.k"), fixture.rows(official, "in.v"))
    mask, bias = visibility(fixture, official)
    wanted = ask.wanted(fixture, captures)
    y, aux = attn.apply(
        tree, x_q, x_kv, mask, bias=bias, engine=ask.engine, capture=tuple(set(wanted.values()))
    )
    return {"out.y": y} | {key: aux.captured[name] for key, name in wanted.items()}, aux


def mha(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """torch.nn.MultiheadAttention."""
    tree = projections(fixture.math(official))
    spec = spec_of(fixture, tree)
    captures = {"mid.weights": "weights"}
    numbers, _ = sublayer(fixture, official, ask, variants.mha(), tree, spec, captures)
    if fixture.settings.get("average_attn_weights", False) and "mid.weights" in numbers:
        numbers["mid.weights"] = numbers["mid.weights"].mean(-3)  # what torch stored is the average
    return numbers


def sdpa(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """torch's scaled_dot_product_attention: the core alone, block order of key heads."""
    return core(fixture, official, ask, ja.Coupling(scale=fixture.settings["scale"]), {})


def x_transformers(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """x-transformers' Attend: a residual mix before the mask, a plain one after the softmax."""
    if fixture.settings["pre_scale_post"]:
        raise fixture.refuse("pre_scale_post", "weights times logits are outside the form")
    math = fixture.math(official)
    heads, key_heads = fixture.sizes["H"], fixture.sizes.get("Hkv", fixture.sizes["H"])
    order = fixture.settings["gqa_order"]
    if order is not None and not order.startswith(("tile", "block")):
        raise fixture.refuse("gqa_order", "expected tile or block")
    tiled = order is not None and order.startswith("tile")
    key_of = tuple(i % key_heads for i in range(heads)) if tiled else None
    coupling = ja.Coupling(
        scale=fixture.settings["scale"],
        pre=(ja.Mix(math["Cpre"], skip=True),) if fixture.settings["pre"] else (),
        post=(ja.Mix(math["Cpost"]),) if fixture.settings["post"] else (),
        key_of=key_of,
        value_of=key_of,
    )
    return core(fixture, official, ask, coupling, {"mid.J": "logits", "mid.W": "weights"})


def core(
    fixture: Fixture, official: Numbers, ask: Ask, coupling: ja.Coupling, captures: dict[str, str]
) -> Numbers:
    """`ja.attend` on projected heads in.q, in.k, in.v."""
    query, key, value = (fixture.rows(official, f"in.{name}") for name in "qkv")
    wanted = ask.wanted(fixture, captures)
    mask, bias = visibility(fixture, official)
    y, captured = ja.attend(
        ja.QuerySide(query), ja.KeySide(key, value), coupling, mask,
        bias=bias, engine=ask.engine, capture=tuple(set(wanted.values())),
    )  # fmt: skip
    return {"out.y": y} | {key: captured[name] for key, name in wanted.items()}


def cait(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """Talking-Heads as CaiT and timm have it: equal head counts, biases on both mixes."""
    math = fixture.math(official)
    tree = projections(math)
    tree["heads"]["talking_heads"] = {
        site: {leaf: math[name] for leaf, name in leaves.items() if name in math}
        for site, leaves in (
            ("pre", {"kernel": "Pl", "bias": "bl"}),
            ("post", {"kernel": "Pw", "bias": "bw"}),
        )
    }
    transform = variants.talking_heads(bias="bl" in math or "bw" in math)
    return talking(fixture, official, ask, transform, tree, spec_of(fixture, tree))


def paper_talking_heads(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """Talking-Heads with three head counts."""
    math = fixture.math(official)
    tree = projections(math)
    tree["heads"]["talking_heads"] = {"pre": {"kernel": math["Pl"]}, "post": {"kernel": math["Pw"]}}
    (logit_heads, softmax_heads), value_heads = math["Pl"].shape, math["Pw"].shape[-1]
    transform = variants.talking_heads(
        logit_heads=logit_heads, softmax_heads=softmax_heads, value_heads=value_heads
    )
    spec = spec_of(fixture, tree, heads=softmax_heads, kv_heads=None)
    return talking(fixture, official, ask, transform, tree, spec)


def talking(fixture, official, ask, transform, tree, spec) -> Numbers:
    captures = {
        "mid.J": "logits", "mid.L": "mixed_logits", "mid.W": "weights", "mid.U": "mixed_weights",
    }  # fmt: skip
    return sublayer(fixture, official, ask, transform, tree, spec, captures)[0]


def dcmha_layer(fixture: Fixture, official: Numbers) -> tuple[ja.HeadSpec, ja.HeadTransform, dict[str, Any]]:
    """DCMHA: a generator of (pre, post) slots on each side; self-attention packs both in four."""
    settings, math = fixture.settings, fixture.math(official)
    if settings.get("eps", 1e-6) != 1e-6:
        raise fixture.refuse("eps", "ours is 1e-6, as in both released versions")
    rank, static = settings["R"], bool(settings.get("static_w", False))
    tree = projections(math)
    own: dict[str, Any] = {"pre": {}, "post": {}}
    for slot, site in enumerate(own):
        for number, side in enumerate(("query", "key")):
            packed = "dw1" in math  # pre_q, pre_k, post_q, post_k
            suffix, at = ("", 2 * slot + number) if packed else (f"_{side[0]}", slot)
            factors = math[f"qkw{suffix}"][:, at]
            own[site][side] = {
                "hidden": math[f"dw1{suffix}"][:, :, at],
                "down": einops.rearrange(factors[:, :, :rank], "g u r n -> u r (g n)"),
                "up": einops.rearrange(factors[:, :, rank:], "g u r n -> u r (g n)"),
                "diag": einops.rearrange(math[f"dd{suffix}"][:, :, at], "m g n -> m (g n)"),
            }
        if static:
            own[site]["static"] = only(fixture, official, "static_w", site, "w")
    tree["heads"]["dcmha"] = own
    norm = "rms" if settings.get("qk_norm", False) else None
    if norm:
        for letter, role in (("q", "query_ln"), ("k", "key_ln")):
            tree[role] = {"scale": only(fixture, official, "qk_norm", f"{letter}_norm")}
    transform = variants.dcmha(
        rank=rank, groups=settings["groups"], gelu=settings["gelu"], static=static, qk_norm=norm
    )
    return spec_of(fixture, tree, rotary=rotary(fixture), qk_norm=norm), transform, tree


def dcmha(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """One pass of DCMHA, with the matrices that its mixes amount to."""
    spec, transform, tree = dcmha_layer(fixture, official)
    captures = {
        "mid.logits": "logits", "mid.logits_composed": "mixed_logits",
        "mid.probs": "weights", "mid.probs_composed": "mixed_weights",
    }  # fmt: skip
    numbers, _ = sublayer(fixture, official, ask, transform, tree, spec, captures)
    if ask.wanted(fixture, {"mid.pair_pre": "mixed_logits"}):
        attn = ja.attention(spec, transform)
        frozen = jax.lax.stop_gradient(official)
        x_q = fixture.rows(frozen, "in.x")
        x_kv = fixture.rows(frozen, "in.m") if "in.m" in official else x_q
        sides = attn.query_side(tree, x_q), attn.key_side(tree, x_kv)
        coupling = attn.coupling(tree)
        for site in ("pre", "post"):
            numbers[f"mid.pair_{site}"] = pair_matrices(site, *sides, coupling, ask.engine)
    return numbers


def pair_matrices(
    site: str, query_side: ja.QuerySide, key_side: ja.KeySide, coupling: ja.Coupling, engine: str
) -> Array:
    """The matrix [b, q, k, i, o] that a mix stage amounts to for each pair of rows.

    Read off by attending to logits that are one in head i and zero in the others: a row of heads
    that are one-hot meets keys that are one, and the mix under test stands before the softmax.
    """
    heads = query_side.query.shape[-2]
    one = jnp.ones_like(key_side.key[..., :1])
    key = ja.KeySide(one, one, pre=getattr(key_side, site))
    mix = ja.Coupling(scale=1.0, pre=getattr(coupling, site))

    def mixed(head: Array) -> Array:
        query = jnp.zeros_like(query_side.query[..., :1]).at[..., head, :].set(1)
        side = ja.QuerySide(query, pre=getattr(query_side, site))
        return ja.attend(side, key, mix, engine=engine, capture=("mixed_logits",))[1]["mixed_logits"]

    return einops.rearrange(jax.vmap(mixed)(jnp.arange(heads)), "i b o q k -> b q k i o")


def only(fixture: Fixture, official: Numbers, setting: str, *words: str) -> Array:
    """The one parameter that a setting brings: its official name holds all words."""
    found = [key for key in official if key[:2] == "p." and all(word in key for word in words)]
    if len(found) != 1:
        raise fixture.refuse(setting, f"expected one parameter named like {words}, found {found}")
    entries = fixture.meta["math_mapping"].items()
    names = [name for name, entry in entries if entry["source"] == found[0]] or [found[0][2:]]
    return fixture.math(official)[names[0]]


def moh(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """MoH with learned routers (DiT): released gates; the paper's form as `alt.paper_*`."""
    if fixture.settings.get("qk_norm", False):
        raise fixture.refuse("qk_norm", "expected no norm of queries and keys")
    numbers = routed(fixture, official, ask, "released")
    if ask.alternatives:
        frozen = jax.lax.stop_gradient(official)
        paper = routed(fixture, frozen, ask._replace(captures=()), "paper")
        numbers |= {
            f"alt.paper_{name}": paper[key]
            for name, key in (("y", "out.y"), ("gates", "mid.gates"), ("aux", "out.aux_code"))
            if key in paper
        }
    return numbers


def moh_gates(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """MoH over TransNeXt's cosine attention (ViT): only the gates and the balance loss."""
    numbers = moh(fixture, official, ask)
    return {key: x for key, x in numbers.items() if key.endswith(("gates", "aux", "aux_code"))}


def routed(fixture: Fixture, official: Numbers, ask: Ask, form: str) -> Numbers:
    """Output, gates and balance loss of MoH in one of its forms."""
    settings, math = fixture.settings, fixture.math(official)
    tree = projections(math)
    leaves = {"routed": "Wr", "shared": "Ws", "stage": "Wa"}
    tree["heads"]["moh"] = {leaf: math[name] for leaf, name in leaves.items() if name in math}
    transform = variants.moh(
        shared=settings["shared"], top_k=settings["routed_topk"], gates=form, balance=form
    )
    spec = spec_of(fixture, tree)
    captures = {"mid.head_out": "heads"}
    numbers, aux = sublayer(fixture, official, ask, transform, tree, spec, captures)
    if "balance" in aux.losses:
        numbers["out.aux_code"] = aux.losses["balance"].value
    return numbers | gates(fixture, official, ja.attention(spec, transform), tree)


def gates(fixture: Fixture, official: Numbers, attn: ja.Attention, tree: dict) -> Numbers:
    """The gate of each head."""
    gate = attn.query_side(tree, fixture.rows(official, "in.x")).gate
    return {"mid.gates": gate[..., 0]}


def moh_by_norm(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """MoH of the converted LLaMA: binary gates by the norms of the queries."""
    settings = fixture.settings
    shared, top_k = settings["shared"], settings["routed_topk"]
    if not settings["gate_rule"].startswith("l2 norm of q per head, binary"):
        raise fixture.refuse("gate_rule", "expected binary gates by the l2 norm of q per head")
    tree = projections(fixture.math(official))
    # The released LLaMA code and the loops have no straight-through gradient: gates are constants.
    transform = variants.moh(shared, top_k, router="query_norm", straight_through=False)
    tree["heads"]["moh"] = {}
    spec = spec_of(fixture, tree, rotary=rotary(fixture))
    captures = {"mid.weights": "weights"}
    numbers, _ = sublayer(fixture, official, ask, transform, tree, spec, captures)
    attn = ja.attention(spec, transform)
    numbers |= gates(fixture, official, attn, tree)
    if "mid.q_norm" in fixture.arrays:
        # The form holds the query, not its norm; the norm is how the fixture stored it.
        query = attn.query_side(tree, fixture.rows(official, "in.x")).query
        numbers["mid.q_norm"] = jnp.linalg.norm(query, axis=-1)
    return numbers


def collab(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """CollabHead: one shared query and key basis of width Dt, a mixing row for each head."""
    math = fixture.math(official)
    if fixture.settings.get("use_layer_norm", False):
        raise fixture.refuse("use_layer_norm", "a norm of the output is outside the form")
    heads, d_v = math["Mx"].shape[0], math["Wv"].shape[-1]
    if "Wo" not in math:  # no dense layer: the output is the heads side by side
        packed = jnp.eye(heads * d_v, dtype=math["Wv"].dtype)
        math["Wo"] = einops.rearrange(packed, "(h v) m -> h v m", h=heads)
    for name in ("Wq", "Wk"):
        math[name] = einops.rearrange(math[name], "m c -> m 1 c")
    tree = projections(math)
    leaves = {"mixing": "Mx", "content_bias": "Wcb"}
    tree["heads"]["collab"] = {leaf: math[name] for leaf, name in leaves.items() if name in math}
    width = math["Mx"].shape[-1]
    sizes = dict(heads=heads, kv_heads=heads, d_qk=d_v)
    transform = variants.collab(width=width, content_bias="Wcb" in math)

    def run(captures: dict[str, str], **changes: Any) -> Numbers:
        spec = spec_of(fixture, tree, **sizes, **changes)
        return sublayer(fixture, official, ask, transform, tree, spec, captures)[0]

    numbers = run({"mid.weights": "weights"})
    if ask.alternatives and "alt.package_scale_y" in fixture.arrays:
        # The package's own rule of the scale, which the JSON states in words only.
        numbers["alt.package_scale_y"] = run({}, scale=(width / heads) ** -0.5)["out.y"]
    if ask.alternatives and "alt.mha_y" in fixture.arrays:
        numbers["alt.mha_y"] = source_of_collab(fixture, official, ask)
    return numbers


def source_of_collab(fixture: Fixture, official: Numbers, ask: Ask) -> Array:
    """The multi-head attention `mha.*` that a collaborative one was made from."""
    heads, arrays = fixture.sizes["H"], fixture.arrays
    mha = {key[4:]: jnp.asarray(arrays[key]) for key in arrays if key.startswith("mha.")}
    kernels = einops.rearrange(mha["in_proj_weight"], "(qkv h d) m -> qkv m h d", qkv=3, h=heads)
    biases = einops.rearrange(mha["in_proj_bias"], "(qkv h d) -> qkv h d", qkv=3, h=heads)
    tree: dict[str, Any] = {"heads": {}}
    for role, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True):
        tree[role] = {"kernel": kernel, "bias": bias}
    out = einops.rearrange(mha["out_proj.weight"], "m (h d) -> h d m", h=heads)
    tree["out"] = {"kernel": out, "bias": mha["out_proj.bias"]}
    return sublayer(fixture, official, ask, variants.mha(), tree, spec_of(fixture, tree), {})[0]["out.y"]


def mohsa(fixture: Fixture, official: Numbers, ask: Ask) -> Numbers:
    """MOHSA: every head reads r channels of each neighbour."""
    tree = projections(fixture.math(official))
    overlap, d_v = fixture.settings["r"], tree["value"]["kernel"].shape[-1]
    transform = variants.mohsa(overlap=overlap, beyond_neighbours=overlap > d_v)
    captures = {"mid.logits": "logits", "mid.weights": "weights"}
    spec = spec_of(fixture, tree)
    return sublayer(fixture, official, ask, transform, tree, spec, captures)[0]


ADAPTERS: dict[str, Callable[[Fixture, Numbers, Ask], Numbers]] = {
    "mha": mha,
    "sdpa": sdpa,
    "xt": x_transformers,
    "th_cait": cait,
    "th_paper": paper_talking_heads,
    "dcmha": dcmha,
    "dcmha_loops": dcmha,
    "moh_dit": moh,
    "moh_vit": moh_gates,
    "moh_llama": moh_by_norm,
    "moh_l2_loops": moh_by_norm,
    "collab": collab,
    "mohsa": mohsa,
}
