"""attention(spec, *transforms): the pure functions of one attention sublayer."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from jaxattn import project
from jaxattn.attend import checked_call, execute, form_call
from jaxattn.cache import Cache, empty_cache
from jaxattn.engines import routes
from jaxattn.engines.call import Call
from jaxattn.explain import explain
from jaxattn.inputs import read_pair, read_rows, read_states
from jaxattn.manifest_call import manifest
from jaxattn.masks import Mask, as_mask, causal, window
from jaxattn.params import check_params, declared_axes, expected
from jaxattn.sides import Coupling, KeySide, Mix, QuerySide
from jaxattn.spec import HeadSpec, Sizes
from jaxattn.transform import Declaration, HeadTransform, Loss, Site, flatten, resolve

PyTree = Any
Initializer = Callable[[Array, tuple[int, ...], Any], Array]


class Aux(NamedTuple):
    """What a call returns beside its output.

    Attributes:
        losses: auxiliary losses by name; where two links of a chain have a loss of one name, the later
            one's is preceded by the link's ("moh_1_balance").
        sums: sums and counts by link; add them across batches, then ask `Attention.losses`.
        captured: the intermediates that were asked for.
    """

    losses: dict[str, Loss]
    sums: dict[str, PyTree]
    captured: dict[str, Array]

    def total(self) -> Array:
        """The sum of weight * value over the losses; 0 where there is none."""
        return sum((loss.weight * loss.value for loss in self.losses.values()), jnp.zeros(()))


@dataclasses.dataclass(frozen=True, repr=False)
class Attention:
    """One attention sublayer: static sizes and transforms, with pure functions over parameters.

    A value: two made alike are equal and hash alike, so that one compiled program serves both; it can be
    pickled, and `repr` evaluates back.

    Parameters are a plain tree: `query`, `key`, `value`, `out`, each with a `kernel` (W_Q [m, h, d] ...
    W_O [h, v, m]) and, where used, a `bias`; `query_ln` and `key_ln` with head norms; and `heads`,
    the transforms' own leaves by link name. Every method that takes them raises where they are not the tree
    of this attention (`check_params`).

    Attributes:
        spec: the sizes that were asked for.
        links: the transforms in order.
        allow: groups or leaves, by path, that parameter trees may hold beside those of this attention.
        sizes: the sizes that the transforms made of `spec`.
        sites: the name of each link, and the mix stages that it claimed.
    """

    spec: HeadSpec
    links: tuple[HeadTransform, ...]
    allow: tuple[str, ...]
    sizes: Sizes
    sites: tuple[Site, ...]

    def __repr__(self) -> str:
        allow = [f"allow={self.allow!r}"] if self.allow else []
        return f"attention({', '.join([repr(self.spec), *map(repr, self.links), *allow])})"

    @property
    def variant(self) -> str:
        """The transforms that change something, with their options; "identity" where there are none."""
        return " + ".join(repr(link) for link in self.links if link.changes) or "identity"

    def init(
        self,
        rng: Array,
        dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ) -> PyTree:
        """Draw the parameters.

        Each leaf has a PRNG key of its own, folded from its path, so two variants with the same rng
        start with the same values wherever they have the same leaf.

        Args:
            rng: PRNG key.
            dtype: type of the parameters.
            kernel_init: `(rng, (fan_in, fan_out), dtype)`; default normal with standard deviation
                1/sqrt(fan_in), each of q, k, v with its own fan (Flax's default).
            bias_init: the same for biases; default zeros.
        """
        s, z = self.spec, self.sizes
        kernel_init = kernel_init or jax.nn.initializers.lecun_normal()
        bias_init = bias_init or jax.nn.initializers.zeros

        def linear(name: str, inward: tuple[int, ...], outward: tuple[int, ...], bias: bool):
            flat = (math.prod(inward), math.prod(outward))
            kernel = kernel_init(fold_path(rng, f"{name}/kernel"), flat, dtype)
            leaves = {"kernel": kernel.reshape(*inward, *outward)}
            if bias:
                flat_bias = bias_init(fold_path(rng, f"{name}/bias"), flat[1:], dtype)
                leaves["bias"] = flat_bias.reshape(outward)
            return leaves

        heads_out = (z.output_heads, z.output_width)
        params = {
            "query": linear("query", (s.in_q,), (z.query_heads, z.qk_width), z.bias_q),
            "key": linear("key", (s.in_k,), (z.key_heads, z.qk_width), z.bias_k),
            "value": linear("value", (s.in_v,), (z.value_heads, z.value_width), s.bias_v),
            "out": linear("out", heads_out, (s.out,), s.bias_out),
        }
        if z.qk_norm is not None:
            for name in ("query_ln", "key_ln"):
                params[name] = {"scale": jnp.ones((z.qk_width,), dtype)}
        own = {
            site.name: link.init(fold_path(rng, f"heads/{site.name}"), site, dtype)
            for link, site in self._linked()
        }
        return {**params, "heads": {name: leaves for name, leaves in own.items() if leaves}}

    check_params = check_params

    def query_side(
        self,
        params: PyTree,
        x_q: Array,
        valid: Array | None = None,
        positions: Array | None = None,
        routed: bool = False,
    ) -> QuerySide:
        """What each query row contributes.

        Args:
            params: the tree that `init` made.
            x_q: [..., q, m].
            valid: [..., q] bool; rows that are not are zeroed and count in no statistic.
            positions: [..., q]; None is 0, 1, 2, ...
            routed: project and hold only the heads that a router keeps active, as engine "routed" takes
                them.

        Raises:
            ValueError: for `routed`, where no router decides from the states alone; where params are not
                those of this attention.
        """
        self.check_params(params)
        return self._queries(
            params, read_rows(self.spec, "q", x_q, valid, positions), valid, positions, routed
        )

    def key_side(
        self,
        params: PyTree,
        x_kv: Array | tuple[Array, Array],
        valid: Array | None = None,
        positions: Array | None = None,
    ) -> KeySide:
        """What each key row contributes, as a cache would hold it.

        Args:
            params: the tree that `init` made.
            x_kv: [..., k, m], or a pair (x_k, x_v) of the same rows with their own widths.
            valid: [..., k] bool; rows that are not are zeroed before they are projected, and hidden.
            positions: [..., k]; None is 0, 1, 2, ...
        """
        self.check_params(params)
        x_k, x_v = read_pair(self.spec, x_kv, valid, positions)
        return self._keys(params, x_k, x_v, valid, positions)

    def expand(self, key_side: KeySide) -> KeySide:
        """What is read of a stored key side: with what need not be stored (neighbouring channels)."""
        for link, site in self._linked():
            key_side = link.expand(key_side, site)
        return key_side

    def coupling(self, params: PyTree) -> Coupling:
        """What is the same for every pair."""
        self.check_params(params)
        return self._coupling(params)

    def apply(
        self,
        params: PyTree,
        x_q: Array,
        x_kv: Array | tuple[Array, Array] | None = None,
        mask: Mask | None = None,
        *,
        bias: Array | None = None,
        engine: str = "auto",
        dropout_key: Array | None = None,
        positions: Array | tuple[Array | None, Array | None] | None = None,
        valid: Array | None = None,
        capture: tuple[str, ...] = (),
        remask: bool = False,
        place: Callable[[Array], Array] | None = None,
    ) -> tuple[Array, Aux]:
        """Attention from states to output: y[q] = sum_h heads[q,h] @ W_O[h] + b_O.

        Args:
            params: the tree that `init` made.
            x_q: [..., q, m], any number of batch axes.
            x_kv: the source [..., k, m_k], or a pair (x_k, x_v) of the same rows; None is
                self-attention. Source rows that `padding` in the mask denies are zeroed before
                they are projected, in self-attention as queries too. So are, as keys alone, rows that an
                array of the mask hides from every query.
            mask: a `ja.masks` value, True = visible; None is everything.
            bias, engine, dropout_key, capture, remask: see `attend`.
            positions: [..., t], or a pair for queries and keys; None counts from 0 on both sides.
            valid: [..., k] bool, source rows that are real; the same as `padding(valid)` in the mask.
            place: applied to the projected heads [..., t, h, d] of query, key and value, to constrain their
                sharding; where only active heads are projected, to key and value alone.

        Returns:
            y [..., q, m] in the promoted type of states and parameters, and `Aux`.

        Raises:
            ValueError, TypeError: naming the argument and axis, what came, what was expected, the
                fix.

        Example:
            >>> attn = attention(HeadSpec(model=6, heads=2))
            >>> y, aux = attn.apply(attn.init(jax.random.key(0)), jnp.ones((5, 6)))
            >>> y.shape, aux.losses
            ((5, 6), {})
        """
        self.check_params(params)
        x = read_states(self.spec, x_q, x_kv, mask, positions, valid, self.sizes.softmax_heads)
        query = self._queries(params, x.x_q, x.q_valid, x.q_positions, routes(engine))
        key = self._keys(params, x.x_k, x.x_v, x.k_valid, x.k_positions)
        if place is not None:
            key = key._replace(key=place(key.key), value=place(key.value))
            query = query if query.head is not None else query._replace(query=place(query.query))
        coupling = self._coupling(params)
        call = form_call(query, self.expand(key), coupling, x.mask, bias, dropout_key, capture, remask=remask)
        return self._run(params, x.x_q, query, call, engine)

    def attend(
        self,
        params: PyTree,
        x_q: Array,
        key_side: KeySide,
        mask: Mask | None = None,
        *,
        bias: Array | None = None,
        engine: str = "auto",
        dropout_key: Array | None = None,
        positions: Array | None = None,
        valid: Array | None = None,
        capture: tuple[str, ...] = (),
        remask: bool = False,
    ) -> tuple[Array, Aux]:
        """Attention against a key side that was projected before: a cache, a source that is read again.

        Args:
            params, x_q, mask, bias, engine, dropout_key, capture, remask: as in `apply`.
            key_side: what `key_side` made; its invalid rows are hidden, and have no influence even where
                they hold NaN.
            positions: [..., q] of the queries; None counts from 0.
            valid: [..., q] bool; rows that are not are zeroed and count in no statistic.

        Example:
            >>> attn = attention(HeadSpec(model=6, heads=2))
            >>> params = attn.init(jax.random.key(0))
            >>> side = attn.key_side(params, jnp.ones((7, 6)))
            >>> attn.attend(params, jnp.ones((5, 6)), side)[0].shape
            (5, 6)
        """
        self.check_params(params)
        x_q = read_rows(self.spec, "q", x_q, valid, positions)
        query = self._queries(params, x_q, valid, positions, routes(engine))
        side, coupling = self.expand(key_side), self._coupling(params)
        call = checked_call(query, side, coupling, mask, bias, dropout_key, capture, remask)
        return self._run(params, x_q, query, call, engine)

    def append(
        self,
        params: PyTree,
        cache: Cache,
        x_kv: Array | tuple[Array, Array],
        valid: Array | None = None,
        positions: Array | None = None,
    ) -> Cache:
        """The cache with more source rows.

        Args:
            params: the tree that `init` made.
            cache: what `empty_cache` or `append` returned.
            x_kv: [..., k, m], or a pair (x_k, x_v) of the same rows.
            valid: [..., k] bool, False for padding rows, left or right; they take a place and are never seen.
            positions: [..., k]; None continues to count. With padding on the left, say where real rows are.

        Raises:
            ValueError, TypeError: for another attention, batch or dtype than the cache's, and, outside of
                jit, for more rows than fit: nothing is written. Under jit see `Cache.refused`.
        """
        cache.check_owner(self)
        self.check_params(params)
        x_k, x_v = read_pair(self.spec, x_kv, valid, positions)
        return self._append(params, cache, x_k, x_v, valid, positions)

    def decode(
        self,
        params: PyTree,
        cache: Cache,
        x: Array,
        mask: Mask | None = None,
        *,
        valid: Array | None = None,
        positions: Array | None = None,
        bias: Array | None = None,
        engine: str = "auto",
        dropout_key: Array | None = None,
        capture: tuple[str, ...] = (),
    ) -> tuple[Array, Aux, Cache]:
        """Append rows and let them attend to all rows so far: a prompt, a chunk, or one step.

        Any split of a sequence gives what one causal pass over it gives.

        Args:
            params, cache, valid, positions: as in `append`.
            x: [..., t, m], rows that are queries and keys.
            mask: what more to hide, by position (`ja.window`), or by the cache's rows (axes k of its size).
                Causality always holds.
            bias, engine, dropout_key, capture: as in `apply`; k counts the cache's rows.

        Returns:
            y [..., t, m], `Aux`, and the cache with these rows. y is NaN where `Cache.refused`.

        Raises:
            ValueError, TypeError: as `append` and `attend` do.
        """
        cache.check_owner(self)
        self.check_params(params)
        x = read_rows(self.spec, "q", x, valid, positions)
        positions = cache.next_positions(x.shape[-2]) if positions is None else positions
        query = self._queries(params, x, valid, positions, routes(engine))
        after = self._append(params, cache, x, x, valid, positions)
        seen = as_mask(mask) & causal()
        if cache.window is not None:
            seen = seen & window(cache.window)
        side, coupling = self.expand(after.side), self._coupling(params)
        call = checked_call(query, side, coupling, seen, bias, dropout_key, capture, zeroed=True)
        y, aux = self._run(params, x, query, call, engine)
        return after.nan_where_refused(y), aux, after

    def losses(self, sums: dict[str, PyTree]) -> dict[str, Loss]:
        """Auxiliary losses from the sums of one or several calls; names as in `Aux.losses`."""
        losses: dict[str, Loss] = {}
        for link, site in self._linked():
            if site.name in sums:
                for name, loss in link.losses(sums[site.name], site).items():
                    losses[f"{site.name}_{name}" if name in losses else name] = loss
        return losses

    explain = explain
    manifest = manifest
    empty_cache = empty_cache

    def declare(self) -> dict[str, Declaration]:
        """What each transform states about its parameters and heads, by link name."""
        return {site.name: link.declare(site) for link, site in self._linked()}

    def axes(self) -> PyTree:
        """The axis names of every parameter leaf, in a tree like that of `init`.

        A head axis carries its kind: hl, hs, hv, hK, hV; `h` where all kinds are the same heads, and
        `h[2:]` for heads from 2 on.

        Raises:
            ValueError: where a transform declares no axes for a leaf of its own.

        Example:
            >>> attention(HeadSpec(model=6, heads=2)).axes()["out"]
            {'kernel': 'hv v m'}
        """
        declared, found = declared_axes(self), expected(self)
        missing = [path for path in found.shapes if path not in declared]
        if missing:
            raise ValueError(
                f"{self!r}: no axis names are declared for {', '.join(missing)}. Fix: in the transform, "
                'def declare(self, at): return ja.Declaration(axes={...}), a string such as "hl hs" for '
                "each leaf."
            )
        return jax.tree.unflatten(found.structure, [declared[path] for path in found.paths])

    def why_not_routed(self) -> str | None:
        """Why heads that are not active cannot be left out, or None where they can."""
        if self.sizes.pre or self.sizes.post:
            return "heads are mixed, so every head counts"
        if sum(link.overrides("route") for link in self.links) != 1:
            return "not exactly one transform routes by the states alone"
        for link, site in self._linked():
            reads = link.overrides("query_side") and not link.overrides("route")
            if reads or link.overrides("finish"):
                return f"{site.name} works on the queries or heads of all heads"
        return None

    def _linked(self) -> Iterator[tuple[HeadTransform, Site]]:
        return zip(self.links, self.sites, strict=True)

    def _own(self, params: PyTree) -> Iterator[tuple[HeadTransform, PyTree, Site]]:
        """Each transform with its own parameters and its site."""
        for link, site in self._linked():
            yield link, params["heads"].get(site.name, {}), site

    # From here on states and parameters were checked, and hidden rows of the states are zero.

    def _queries(self, params, x_q, valid, positions, routed: bool) -> QuerySide:
        z = self.sizes
        head, notes = self._route(params, x_q) if routed else (None, {})
        if head is None:
            heads = project.project(params["query"], x_q)
        else:
            heads = project.project_active(params["query"], x_q, head)
        heads = project.normalize(heads, z.qk_norm, _scale(params, "query_ln"), self.spec.qk_norm_eps)
        heads = project.rotate(heads, z.rotary_q, positions, self.spec.d_qk)
        nothing = (None,) * len(z.pre), (None,) * len(z.post)
        side = QuerySide(heads, *nothing, valid=valid, position=positions, head=head, notes=notes)
        for link, own, site in self._own(params):
            side = _only_claimed(site, side, link.query_side(own, x_q, side, site))
        return side

    def _keys(self, params, x_k, x_v, valid, positions) -> KeySide:
        z = self.sizes
        key = project.project(params["key"], x_k)
        key = project.normalize(key, z.qk_norm, _scale(params, "key_ln"), self.spec.qk_norm_eps)
        key = project.rotate(key, z.rotary_k, positions, self.spec.d_qk)
        value = project.project(params["value"], x_v)
        nothing = (None,) * len(z.pre), (None,) * len(z.post)
        side = KeySide(key, value, None, *nothing, valid=valid, position=positions)
        for link, own, site in self._own(params):
            side = _only_claimed(site, side, link.key_side(own, x_k, side, site))
        return side

    def _coupling(self, params) -> Coupling:
        s, z = self.spec, self.sizes
        coupling = Coupling(
            scale=s.scale,
            pre=(Mix(),) * len(z.pre),
            post=(Mix(),) * len(z.post),
            softcap=s.softcap,
            dropout=s.dropout,
            head_dropout=s.head_dropout,
            dropout_shared=s.dropout_shared,
        )
        for link, own, site in self._own(params):
            coupling = _only_claimed(site, coupling, link.coupling(own, coupling, site))
        return coupling

    def _append(self, params, cache: Cache, x_k, x_v, valid, positions) -> Cache:
        valid, positions = cache.of_rows(x_k, valid, positions)
        return cache.extend(self._keys(params, x_k, x_v, valid, positions))

    def _run(self, params, x_q, query_side: QuerySide, call: Call, engine: str) -> tuple[Array, Aux]:
        def finish(heads):
            for link, own, site in self._own(params):
                heads = link.finish(own, heads, query_side, site)
            return heads

        heads, captured = execute(call, engine, finish)
        if query_side.head is None:
            y = project.unproject(params["out"], heads)
        else:
            y = project.unproject_active(params["out"], heads, query_side.head)
        _refuse_overflow(x_q, y)
        sums = {site.name: link.aux(own, x_q, query_side, site) for link, own, site in self._own(params)}
        sums = {name: value for name, value in sums.items() if value is not None}
        return y, Aux(self.losses(sums), sums, captured)

    def _route(self, params: PyTree, x_q: Array) -> tuple[Array, dict[str, PyTree]]:
        """The active heads, and what the router notes for its own hooks."""
        why = self.why_not_routed()
        if why is not None:
            raise ValueError(
                f"engine 'routed' cannot run this attention: {why}. Fix: a router such as that of MoH, "
                "without mixes, or another engine."
            )
        for link, own, site in self._own(params):
            found = link.route(own, x_q, site) if link.overrides("route") else None
            if found is not None:
                head, note = found
                return head, {} if note is None else {site.name: note}
        raise ValueError(f"{self!r}: its route gave nothing. Fix: return (head [..., q, a], note).")


def attention(spec: HeadSpec, *transforms: HeadTransform, allow: tuple[str, ...] = ()) -> Attention:
    """Multi-head attention with head-composition transforms, as pure functions.

    y[q] = sum_h heads[q,h] @ W_O[h] + b_O, where heads follow the form in `jaxattn.sides`.

    Args:
        spec: static sizes.
        *transforms: applied from left to right; none is plain multi-head attention.
        allow: groups or leaves that parameter trees may hold beside those of this attention, by path, for
            example ("lora",); they are ignored. Everything else that is unknown raises.

    Raises:
        ValueError: where the sizes and transforms do not fit each other.
        TypeError: for what is no transform, or has an option that cannot be compared.

    Example:
        >>> attn = attention(HeadSpec(model=6, heads=2))
        >>> params = attn.init(jax.random.key(0))
        >>> y, aux = attn.apply(params, jnp.ones((2, 5, 6)))
        >>> y.shape, attn
        ((2, 5, 6), attention(HeadSpec(model=6, heads=2)))

    Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2.
    """
    links = flatten(transforms)
    return Attention(spec, links, tuple(allow), *resolve(Sizes.of(spec), links))


def _only_claimed(site: Site, before: Any, after: Any) -> Any:
    """`after`, once its mix stages were seen to differ from those before in the link's own stage alone."""
    for which in ("pre", "post"):
        old, new = getattr(before, which), getattr(after, which)
        if len(old) != len(new) or any(
            a is not b and at != getattr(site, which) for at, (a, b) in enumerate(zip(old, new, strict=True))
        ):
            raise ValueError(
                f"{site.name}: it changed {which} mixes that its adapt did not claim (claimed stage: "
                f"{getattr(site, which)}, stages: {len(old)}, now {len(new)}). Fix: "
                f"sizes.claim({which}=heads) in "
                f"adapt, and at.fill(..., {which}=...) in the hook."
            )
    return after


def _scale(params: PyTree, name: str) -> Array | None:
    return params.get(name, {}).get("scale")


def _refuse_overflow(x_q: Array, y: Array) -> None:
    """float16 holds 65504 at most; outside of jit an overflow is seen, and said."""
    if y.dtype != jnp.float16 or isinstance(y, Tracer):
        return
    if bool(jnp.isfinite(x_q).all()) and not bool(jnp.isfinite(y).all()):
        raise FloatingPointError(
            "attention: the output overflows float16 (largest 65504) though x_q is finite. "
            "Fix: bfloat16 or float32 states, or smaller parameters."
        )


def fold_path(rng: Array, path: str) -> Array:
    """The PRNG key of one leaf."""
    return jax.random.fold_in(rng, zlib.crc32(path.encode()))
