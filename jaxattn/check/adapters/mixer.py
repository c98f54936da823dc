"""This library's own mixes of heads, by the engines that run them."""

import functools
from collections.abc import Callable

from jax import Array

import jaxattn as ja
from jaxattn.check.subjects.attention import version_of
from jaxattn.check.subjects.mixer import MixCall, Mixer


def of_form(engine: str = "dense") -> Mixer:
    """This library's own mixes, by one of its engines: two sides and a coupling made of a call.

    Example:
        >>> of_form("blocked").name
        'jaxattn.blocked'
    """

    def attend(call: MixCall) -> Array:
        pair = (ja.Mix(call.pre, call.pre_bias), ja.Mix(call.post, call.post_bias))
        rows, keys = (
            (None, None) if maps is None else tuple(ja.Factors(dense=x) for x in maps)
            for maps in (call.query_maps, call.key_maps)
        )
        heads, _ = ja.attend(
            ja.QuerySide(call.query, rows[:1], rows[1:]),
            ja.KeySide(call.key, call.value, None, keys[:1], keys[1:]),
            ja.Coupling(call.query.shape[-1] ** -0.5, pair[:1], pair[1:]),
            None if call.mask is None else ja.masks.from_flax(call.mask),
            engine=engine,
            remask=call.mask is not None and call.mask.shape[1] > 1,
        )
        return heads

    return Mixer(f"jaxattn.{engine}", attend, version=version_of("jaxattn"))


MIXERS: dict[str, Callable[[], Mixer]] = {
    f"jaxattn.{engine}": functools.partial(of_form, engine) for engine in ("reference", "dense", "blocked")
}
