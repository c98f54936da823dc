"""attention(spec, *transforms): the pure functions of one attention sublayer."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike

from jaxattn import project
from jaxattn.attend import attend
from jaxattn.axes import check_axes, check_batch, check_boolean, check_floating
from jaxattn.cache import append, decode, empty_cache
from jaxattn.engines import routes
from jaxattn.explain import explain
from jaxattn.manifest_call import manifest
from jaxattn.masks import Frame, Mask, as_mask
from jaxattn.sides import Coupling, KeySide, Mix, QuerySide
from jaxattn.spec import HeadSpec, Sizes
from jaxattn.transform import Declaration, HeadTransform, Loss, Site, flatten, resolve

PyTree = Any
Initializer = Callable[[Array, tuple[int, ...], Any], Array]


class Aux(NamedTuple):
    """What a call returns beside its output.

    Attributes:
        losses: auxiliary losses by name.
        sums: sums and counts by transform; add them across batches, then ask `Attention.losses`.
        captured: the intermediates that were asked for.
    """

    losses: dict[str, Loss]
    sums: dict[str, PyTree]
    captured: dict[str, Array]

    def total(self) -> Array:
        """The sum of weight * value over the losses; 0 where there is none."""
        return sum((loss.weight * loss.value for loss in self.losses.values()), jnp.zeros(()))


class Attention(NamedTuple):
    """One attention sublayer: static sizes and transforms, with pure functions over parameters.

    Parameters are a plain tree: `query`, `key`, `value`, `out`, each with a `kernel` (W_Q [m, h, d] ...
    W_O [h, v, m]) and, where used, a `bias`; `query_ln` and `key_ln` with head norms; and `heads`,
    the transforms' own leaves by transform name.

    Attributes:
        spec: the sizes that were asked for.
        sizes: the sizes that the transforms made of them.
        links: the transforms in order.
        sites: where each stands.
    """

    spec: HeadSpec
    sizes: Sizes
    links: tuple[HeadTransform, ...]
    sites: tuple[Site, ...]

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
            flat = (_prod(inward), _prod(outward))
            kernel = kernel_init(_fold(rng, f"{name}/kernel"), flat, dtype)
            leaves = {"kernel": kernel.reshape(*inward, *outward)}
            if bias:
                flat_bias = bias_init(_fold(rng, f"{name}/bias"), flat[1:], dtype)
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
            link.name: link.init(_fold(rng, f"heads/{link.name}"), site, dtype)
            for link, site in zip(self.links, self.sites, strict=True)
        }
        return {**params, "heads": {name: leaves for name, leaves in own.items() if leaves}}

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
            ValueError: for `routed`, where no router decides from the states alone.
        """
        z = self.sizes
        x_q = _check_state("x_q", x_q, "q", self.spec.in_q, "HeadSpec(in_q=...)")
        _check_rows("q", x_q, valid=valid, positions=positions)
        x_q = _zero_invalid(x_q, valid)
        head, notes = self._route(params, x_q) if routed else (None, {})
        if head is None:
            heads = project.project(params["query"], x_q)
        else:
            heads = project.project_active(params["query"], x_q, head)
        heads = project.normalize(heads, z.qk_norm, _scale(params, "query_ln"))
        heads = project.rotate(heads, z.rotary_q, positions, self.spec.d_qk)
        nothing = (None,) * len(z.pre), (None,) * len(z.post)
        side = QuerySide(heads, *nothing, valid=valid, position=positions, head=head, notes=notes)
        for link, own, site in self._own(params):
            side = link.query_side(own, x_q, side, site)
        return side

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
        z = self.sizes
        x_k, x_v = x_kv if isinstance(x_kv, tuple) else (x_kv, x_kv)
        x_k = _check_state("x_k", x_k, "k", self.spec.in_k, "HeadSpec(in_k=...)")
        x_v = _check_state("x_v", x_v, "k", self.spec.in_v, "HeadSpec(in_v=...)")
        check_axes("x_v", x_v, "... k m", fix="x_k and x_v are the same rows", k=x_k.shape[-2])
        check_batch(x_k=(x_k, 2), x_v=(x_v, 2))
        _check_rows("k", x_k, valid=valid, positions=positions)
        x_k, x_v = _zero_invalid(x_k, valid), _zero_invalid(x_v, valid)
        key = project.project(params["key"], x_k)
        key = project.normalize(key, z.qk_norm, _scale(params, "key_ln"))
        key = project.rotate(key, z.rotary_k, positions, self.spec.d_qk)
        value = project.project(params["value"], x_v)
        nothing = (None,) * len(z.pre), (None,) * len(z.post)
        side = KeySide(key, value, None, *nothing, valid=valid, position=positions)
        for link, own, site in self._own(params):
            side = link.key_side(own, x_k, side, site)
        return side

    def expand(self, key_side: KeySide) -> KeySide:
        """What `attend` reads of a stored key side."""
        for link, site in zip(self.links, self.sites, strict=True):
            key_side = link.expand(key_side, site)
        return key_side

    def coupling(self, params: PyTree) -> Coupling:
        """What is the same for every pair."""
        s, z = self.spec, self.sizes
        assert s.scale is not None
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
            coupling = link.coupling(own, coupling, site)
        return coupling

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
        capture: tuple[str, ...] = (),
        remask: bool = False,
    ) -> tuple[Array, Aux]:
        """Attention from states to output: y[q] = sum_h heads[q,h] @ W_O[h] + b_O.

        Args:
            params: the tree that `init` made.
            x_q: [..., q, m], any number of batch axes.
            x_kv: the source [..., k, m_k], or a pair (x_k, x_v) of the same rows; None is
                self-attention. Source rows that `padding` in the mask denies are zeroed before
                they are projected, in self-attention as queries too.
            mask: a `ja.masks` value, True = visible; None is everything.
            bias, engine, dropout_key, capture, remask: see `attend`.
            positions: [..., t], or a pair for queries and keys; None counts from 0 on both sides.

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
        mask = as_mask(mask)
        source = x_q if x_kv is None else x_kv
        rows = source[0] if isinstance(source, tuple) else source
        q_rows = _check_state("x_q", x_q, "q", self.spec.in_q, "HeadSpec(in_q=...)")
        rows = _check_state("x_k", rows, "k", self.spec.in_k, "HeadSpec(in_k=...)")
        frame = Frame(q_rows.shape[-2], rows.shape[-2], batch=rows.shape[:-2])
        mask.check(frame, None)  # before padding zeroes rows
        valid = mask.source_valid(rows.shape[-2])
        if isinstance(positions, tuple):
            q_positions, k_positions = positions
        else:
            q_positions, k_positions = positions, positions if x_kv is None else None
        q_valid = valid if x_kv is None else None
        query_side = self.query_side(params, x_q, q_valid, q_positions, routes(engine))
        key_side = self.key_side(params, source, valid, k_positions)
        return self._attend(
            params, x_q, query_side, key_side, mask, bias, engine, dropout_key, capture, remask
        )

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
        """Attention against a key side that stands already: a cache, a projected source.

        Args:
            params, x_q, mask, bias, engine, dropout_key, capture, remask: as in `apply`.
            key_side: what `key_side` made; its invalid rows are hidden.
            positions: [..., q] of the queries; None counts from 0.
            valid: [..., q] bool; rows that are not are zeroed and count in no statistic.

        Example:
            >>> attn = attention(HeadSpec(model=6, heads=2))
            >>> params = attn.init(jax.random.key(0))
            >>> side = attn.key_side(params, jnp.ones((7, 6)))
            >>> attn.attend(params, jnp.ones((5, 6)), side)[0].shape
            (5, 6)
        """
        query_side = self.query_side(params, x_q, valid, positions, routes(engine))
        return self._attend(
            params, x_q, query_side, key_side, mask, bias, engine, dropout_key, capture, remask
        )

    def why_not_routed(self) -> str | None:
        """Why heads that are not active cannot be left out, or None where they can."""
        if self.sizes.pre or self.sizes.post:
            return "heads are mixed, so every head counts"
        if sum(link.route is not None for link in self.links) != 1:
            return "not exactly one transform routes by the states alone"
        plain = HeadTransform()
        for link in self.links:
            if link.finish is not plain.finish or (
                link.query_side is not plain.query_side and link.route is None
            ):
                return f"{link.name} works on the queries or heads of all heads"
        return None

    def _route(self, params: PyTree, x_q: Array) -> tuple[Array, dict[str, PyTree]]:
        """The active heads, and what the router notes for its own hooks."""
        why = self.why_not_routed()
        if why is not None:
            raise ValueError(
                f"engine 'routed' cannot run this attention: {why}. Fix: a router such as that of MoH, "
                "without mixes, or another engine."
            )
        found = [(link.name, link.route(own, x_q, at)) for link, own, at in self._own(params) if link.route]
        ((name, (head, note)),) = found
        return head, {} if note is None else {name: note}

    def _attend(
        self, params, x_q, query_side, key_side, mask, bias, engine, dropout_key, capture, remask
    ) -> tuple[Array, Aux]:
        x_q = _zero_invalid(x_q, query_side.valid)

        def finish(heads):
            for link, own, site in self._own(params):
                heads = link.finish(own, heads, query_side, site)
            return heads

        heads, captured = attend(
            query_side,
            self.expand(key_side),
            self.coupling(params),
            mask,
            bias=bias,
            engine=engine,
            dropout_key=dropout_key,
            capture=capture,
            remask=remask,
            finish=finish,
        )
        if query_side.head is None:
            y = project.unproject(params["out"], heads)
        else:
            y = project.unproject_active(params["out"], heads, query_side.head)
        _refuse_overflow(x_q, y)
        sums = {link.name: link.aux(own, x_q, query_side, site) for link, own, site in self._own(params)}
        sums = {name: value for name, value in sums.items() if value is not None}
        return y, Aux(self.losses(sums), sums, captured)

    def losses(self, sums: dict[str, PyTree]) -> dict[str, Loss]:
        """Auxiliary losses from the sums of one or several calls."""
        losses: dict[str, Loss] = {}
        for link, site in zip(self.links, self.sites, strict=True):
            if link.name in sums:
                losses |= link.losses(sums[link.name], site)
        return losses

    explain = explain
    manifest = manifest
    empty_cache = empty_cache
    append = append
    decode = decode

    def declare(self) -> dict[str, Declaration]:
        """What each transform states about its parameters and heads, by transform name."""
        links = zip(self.links, self.sites, strict=True)
        return {link.name: link.declare(site) for link, site in links}

    def axes(self) -> PyTree:
        """The axis names of every parameter leaf, in a tree like that of `init`.

        A head axis carries its kind: hl, hs, hv, hK, hV; `h` where all kinds are the same heads, and
        `h[2:]` for heads from 2 on.

        Example:
            >>> attention(HeadSpec(model=6, heads=2)).axes()["out"]
            {'kernel': 'hv v m'}
        """
        core = {
            "query/kernel": "m hl d",
            "query/bias": "hl d",
            "key/kernel": "m hK d",
            "key/bias": "hK d",
            "value/kernel": "m hV v",
            "value/bias": "hV v",
            "out/kernel": "hv v m",
            "out/bias": "m",
            "query_ln/scale": "d",
            "key_ln/scale": "d",
        }
        own = self.declare()
        for declaration in own.values():
            core |= declaration.core
        params = jax.eval_shape(self.init, jax.random.key(0))
        return {
            group: {name: own[name].axes for name in leaves}
            if group == "heads"
            else {name: core[f"{group}/{name}"] for name in leaves}
            for group, leaves in params.items()
        }

    def _own(self, params: PyTree):
        """Each transform with its own parameters and its site."""
        if "heads" not in params:
            raise ValueError(
                f"params: got the groups {', '.join(params)}, expected `heads` among them, the leaves of the "
                "transforms. Fix: the tree that init makes; `heads` is {} where there are none."
            )
        for link, site in zip(self.links, self.sites, strict=True):
            yield link, params["heads"].get(link.name, {}), site


def attention(spec: HeadSpec, *transforms: HeadTransform) -> Attention:
    """Multi-head attention with head-composition transforms, as pure functions.

    y[q] = sum_h heads[q,h] @ W_O[h] + b_O, where heads follow the form in `jaxattn.sides`.

    Args:
        spec: static sizes.
        *transforms: applied from left to right; none is plain multi-head attention.

    Raises:
        ValueError: where the sizes and transforms do not fit each other.

    Example:
        >>> attn = attention(HeadSpec(model=6, heads=2))
        >>> params = attn.init(jax.random.key(0))
        >>> y, aux = attn.apply(params, jnp.ones((2, 5, 6)))
        >>> y.shape
        (2, 5, 6)

    Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2.
    """
    links = flatten(transforms)
    sizes, sites = resolve(Sizes.of(spec), links)
    return Attention(spec, sizes, links, sites)


def _check_state(what: str, x: Array, axis: str, width: int, where: str) -> Array:
    check_floating(what, x)
    fix = f"states of this width, or {where}"
    check_axes(what, x, f"... {axis} m", fix=fix, m=width)
    return jnp.asarray(x)


def _check_rows(axis: str, x: Array, **per_row: Array | None) -> None:
    """Raise unless what is given per row has the rows of `x`, with its batch axes or without."""
    for what, array in per_row.items():
        if array is not None and jnp.shape(array) not in (x.shape[-2:-1], x.shape[:-1]):
            raise ValueError(
                f"{what}: shape {jnp.shape(array)}, expected axes [..., {axis}] = {x.shape[:-1]}, or "
                f"[{axis}] = {x.shape[-2:-1]} for all examples. Fix: one entry for each row."
            )
        if array is not None and what == "valid":
            check_boolean(what, array)


def _zero_invalid(x: Array, valid: Array | None) -> Array:
    """States whose invalid rows are zero, whatever they held: NaN times zero would stay NaN."""
    return x if valid is None else jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))


def _scale(params: PyTree, name: str) -> Array | None:
    return params[name]["scale"] if name in params else None


def _refuse_overflow(x_q: Array, y: Array) -> None:
    """float16 holds 65504 at most; outside of jit an overflow is seen, and said."""
    if y.dtype != jnp.float16 or isinstance(y, Tracer):
        return
    if bool(jnp.isfinite(x_q).all()) and not bool(jnp.isfinite(y).all()):
        raise FloatingPointError(
            "attention: the output overflows float16 (largest 65504) though x_q is finite. "
            "Fix: bfloat16 or float32 states, or smaller parameters."
        )


def _fold(rng: Array, path: str) -> Array:
    return jax.random.fold_in(rng, zlib.crc32(path.encode()))


def _prod(sizes: tuple[int | None, ...]) -> int:
    product = 1
    for size in sizes:
        assert size is not None
        product *= size
    return product
