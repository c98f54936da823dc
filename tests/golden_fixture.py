"""Golden fixtures as values: official arrays, the JSON's mapping to ours, masks and positions.

Everything is read from the fixture's own JSON and npz: axes, sizes, settings, mapping, tolerances.
Nothing here computes: arrays are sliced, reshaped and transposed, masks go through the converters.
"""

import functools
import json
import operator
from pathlib import Path
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxattn as ja

Numbers = dict[str, Array]

TIME = ("T", "S")
HEADS = ("H", "Hk", "Hv", "Hkv")


class Fixture(NamedTuple):
    """One fixture: its JSON and its arrays, under official names and in official orientation."""

    name: str
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def settings(self) -> dict[str, Any]:
        return self.meta["settings"]

    @property
    def sizes(self) -> dict[str, int]:
        return self.meta["sizes"]

    def official(self) -> Numbers:
        """The arrays that gradients are taken of."""
        return {
            key: jnp.asarray(array) for key, array in self.arrays.items() if key.startswith(("in.", "p."))
        }

    def axes(self, key: str) -> list[str]:
        return self.meta["arrays"][key]["axes"]

    def rows(self, official: Numbers, key: str) -> Array:
        """An input with its axes in our order."""
        return ordered(official[key], self.axes(key))

    def math(self, official: Numbers) -> Numbers:
        """The math arrays: by their mapping, or as stored where there is none."""
        mapped = {
            name: mapping_steps(official[entry["source"]], entry["steps"])
            for name, entry in self.meta["math_mapping"].items()
            if entry["source"] in official
        }
        sources = {entry["source"] for entry in self.meta["math_mapping"].values()}
        stored = {key.partition(".")[2]: official[key] for key in official if key not in sources}
        return stored | mapped

    def expected(self, key: str) -> np.ndarray:
        """A stored number; axes in our order unless it is a gradient (those stay official)."""
        if key.startswith(("g.", "gaux.")):
            return self.arrays[key]
        return np.asarray(ordered(self.arrays[key], self.axes(key)))

    def refuse(self, setting: str, why: str) -> ValueError:
        return ValueError(f"{self.name}: setting {setting} = {self.settings.get(setting)!r}: {why}")


def load(folder: Path, name: str) -> Fixture:
    """Read `<name>.json` and `<name>.npz` and check one against the other.

    Raises:
        FileNotFoundError: naming the missing file.
        ValueError: when the JSON and the arrays disagree.
    """
    for suffix in (".json", ".npz"):
        if not (folder / (name + suffix)).is_file():
            raise FileNotFoundError(f"golden fixture {name}: {name}{suffix} is missing in {folder}")
    meta = json.loads((folder / f"{name}.json").read_text())
    with np.load(folder / f"{name}.npz") as stored:
        arrays = dict(stored.items())
    said = {key: (tuple(entry["shape"]), entry["dtype"]) for key, entry in meta["arrays"].items()}
    held = {key: (array.shape, str(array.dtype)) for key, array in arrays.items()}
    if said != held or meta["name"] != name:
        raise ValueError(f"golden fixture {name}: its JSON and its arrays differ: {said} != {held}")
    return Fixture(name, meta, arrays)


def mapping_steps(array: Array, steps: list[list]) -> Array:
    """Apply a math_mapping's steps in order."""
    for word, *arguments in steps:
        if word == "slice":
            axis, start, stop = arguments
            array = jax.lax.slice_in_dim(array, start, stop, axis=axis)
        elif word == "reshape":
            array = jnp.reshape(array, arguments[0])
        elif word == "transpose":
            array = jnp.transpose(array, arguments[0])
        else:
            raise ValueError(f"unknown mapping step {word!r}")
    return array


def ordered(array: Any, axes: list[str]) -> Any:
    """The array with its named axes in our order: [b, t, h, width], or [b, h, q, k] for scores."""
    scores = sum(axis in TIME for axis in axes) == 2
    if scores and sum(axis in HEADS for axis in axes) == 2:  # [b, q, k, i, o], as everywhere
        return array

    def place(axis: str) -> int:
        if axis == "B":
            return 0
        if axis in TIME:
            return 2 if scores else 1
        if axis in HEADS:
            return 1 if scores else 2
        return 3

    if "1" in axes or sum(place(axis) == 3 for axis in axes) > 1:
        raise ValueError(f"axes {axes}: expected batch, time, heads and one width at most")
    names = [f"{'bthw'[place(axis)]}{i}" for i, axis in enumerate(axes)]
    by_place = [names[i] for i in sorted(range(len(axes)), key=lambda i: place(axes[i]))]
    return einops.rearrange(array, f"{' '.join(names)} -> {' '.join(by_place)}")


def rotary(fixture: Fixture) -> ja.Rotary | None:
    """Rotate-half positions 0, 1, ...; the stored table must be the one that this means."""
    settings = fixture.settings
    if not settings.get("rope", "rope_theta" in settings):
        return None
    base = settings.get("rope_theta", 10000.0)
    if "const.freqs_cis" in fixture.arrays:
        cos, sin = np.moveaxis(fixture.arrays["const.freqs_cis"], -1, 0)
    else:
        cos, sin = (np.split(fixture.arrays[f"const.{name}"], 2, -1)[0] for name in ("cos", "sin"))
    time, pairs = cos.shape
    angle = np.arange(time)[:, None] * base ** (-np.arange(pairs) / pairs)
    for table, ours in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        if not np.allclose(table, ours, rtol=0, atol=1e-6 if table.dtype == np.float32 else 1e-12):
            raise fixture.refuse("rope", f"its table is not that of base {base} from position 0")
    return ja.Rotary(base=base, pairs="half", width=2 * pairs)


def visibility(fixture: Fixture, official: Numbers) -> tuple[ja.Mask | None, Array | None]:
    """The fixture's mask and its additive bias; each mask word goes through its own converter."""
    settings = fixture.settings
    masks: list[ja.Mask] = []
    biases: list[Array] = []
    if settings.get("causal", settings.get("is_causal", False)):
        # x-transformers aligns the triangle at the end; everyone else here at the start.
        masks.append(ja.causal(align="end" if fixture.meta["family"] == "xt" else "start"))
    if "in.bias" in official:
        biases.append(as_bias(*named(fixture, "in.bias", official["in.bias"])))
    for key, stored in fixture.arrays.items():
        if not key.startswith("mask."):
            continue
        if stored.dtype == bool:
            masks.append(boolean_mask(fixture, key))
            continue
        array, axes = named(fixture, key, stored)
        hides = np.isneginf(array)
        if hides.any():  # what an additive mask does not hide, it biases
            masks.append(ja.masks.from_additive(np.where(hides, array, 0), axes))
        biases.append(as_bias(jnp.asarray(np.where(hides, 0, array)), axes))
    if len(biases) > 1:
        raise ValueError(f"{fixture.name}: more than one additive bias")
    mask = functools.reduce(operator.and_, masks) if masks else None
    return mask, biases[0] if biases else None


def boolean_mask(fixture: Fixture, key: str) -> ja.Mask:
    """A boolean mask by its name, which says whose polarity it has."""
    stored = fixture.arrays[key]
    if key == "mask.attn":
        return ja.masks.from_torch_mha(stored, heads=fixture.sizes["H"])
    if key == "mask.key_padding":
        return ja.masks.from_torch_mha(key_padding_mask=stored)
    if key == "mask.keep" and fixture.meta["family"] == "sdpa":
        return ja.masks.from_torch_sdpa(stored)
    if key in ("mask.keep", "mask.key_valid"):  # keys are hidden and not zeroed: no padding()
        return ja.explicit(*named(fixture, key, stored))
    raise ValueError(f"{fixture.name}: {key} is no mask word whose polarity is known")


def named(fixture: Fixture, key: str, array: Any) -> tuple[Any, str]:
    """A table over pairs without its axes of size 1, and our names of the others."""
    axes = fixture.axes(key)
    times = iter("qk" if sum(axis in TIME for axis in axes) == 2 else "k")
    ours = {"1": "1", "B": "b", "B*H": "(b h)"} | dict.fromkeys(HEADS, "h")
    stored = " ".join(next(times) if axis in TIME else ours[axis] for axis in axes)
    names = " ".join(stored.translate(str.maketrans("1()", "   ")).split())
    known = {"h": fixture.sizes["H"]} if "(b h)" in stored else {}
    return einops.rearrange(array, f"{stored} -> {names}", **known), names


def as_bias(array: Array, axes: str) -> Array:
    """A named table as `bias=` takes it: [..., h, q, k], those that it lacks of size 1."""
    names = axes.split()
    batch = [name for name in names if name not in "hqk"]
    core = [name if name in names else "1" for name in "hqk"]
    return einops.rearrange(array, f"{axes} -> {' '.join((*batch, *core))}")
