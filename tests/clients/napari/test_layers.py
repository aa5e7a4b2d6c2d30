"""Conversion of layers to stacks and of labels to layers, without napari."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from napari_stackseg import messages
from napari_stackseg.layers import get_voxel_size, make_labels_layer, take_volume


def make_image(axes: str, **options: Any) -> Any:
    count = len(axes)
    attributes: dict[str, Any] = {
        "translate": np.arange(count) * 10.0,
        "scale": np.arange(1.0, count + 1),
        "rotate": np.eye(count),
        "shear": np.zeros(count * (count - 1) // 2),
        "affine": SimpleNamespace(affine_matrix=np.eye(count + 1)),
        "units": [f"unit of {axis}" for axis in axes],
        "axis_labels": list(axes.lower()),
    }
    return SimpleNamespace(**(attributes | options))


@pytest.mark.parametrize(
    ("axes", "labels_axes"),
    [("ZYX", "ZYX"), ("CZYX", "ZYX"), ("ZCYX", "ZYX"), ("TZYX", "ZYX"), ("TCZYX", "TZYX"), ("ZTYX", "TZYX")],
)
def test_labels_are_aligned_with_the_last_dimensions_of_their_image(axes: str, labels_axes: str) -> None:
    lengths = {"T": 2, "Z": 3, "Y": 4, "X": 5}
    shape = [lengths[axis] for axis in labels_axes]
    labels = np.arange(np.prod(shape)).reshape(shape)
    image = make_image(axes)
    placed, arguments = make_labels_layer(labels, image, axes, {"C": 1, "T": 1})
    for position in range(1, placed.ndim + 1):
        axis = axes[-position]
        assert placed.shape[-position] == (lengths[axis] if axis in labels_axes else 1)
        offset = 0 if axis in labels_axes else image.scale[-position]
        assert arguments["translate"][-position] == image.translate[-position] + offset
        assert arguments["scale"][-position] == image.scale[-position]
        assert arguments["units"][-position] == f"unit of {axis}"
    for time in range(2 if "T" in labels_axes else 1):
        expected = labels[time] if "T" in labels_axes else labels
        np.testing.assert_array_equal(take_volume(placed, axes, time), expected)


class Unit:
    """A unit like those of pint: a length, if `micrometers` is not None."""

    def __init__(self, name: str, micrometers: float | None) -> None:
        self.name, self.micrometers = name, micrometers

    def __str__(self) -> str:
        return self.name

    def is_compatible_with(self, _name: str) -> bool:
        return self.micrometers is not None

    def __rmul__(self, _number: int) -> Any:
        return SimpleNamespace(to=lambda _name: SimpleNamespace(magnitude=self.micrometers))


PIXEL, NM, UM, SECOND = Unit("pixel", None), Unit("nanometer", 0.001), Unit("micrometer", 1.0), Unit("second", None)


def turn(degrees: float) -> Any:
    cosine, sine = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    return np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])


@pytest.mark.parametrize(
    ("scale", "units", "options", "expected"),
    [
        ((0.5, 0.2, 0.2), [UM] * 3, {}, (0.5, 0.2, 0.2)),
        ((500, 200, 0.2), [NM, NM, UM], {}, (0.5, 0.2, 0.2)),
        ((-0.5, 0.2, 0.2), [UM] * 3, {"rotate": turn(30)}, (0.5, 0.2, 0.2)),
        ((1, 1, 1), [UM] * 3, {"affine": np.diag([0.5, 0.2, 0.2, 1])}, (0.5, 0.2, 0.2)),
        ((500, 100, 100), [NM] * 3, {"affine": np.diag([1, 2, 2, 1])}, (0.5, 0.2, 0.2)),
        ((1, 1, 1), [PIXEL] * 3, {"affine": np.diag([0.5, 0.2, 0.2, 1])}, (0.5, 0.2, 0.2)),
        ((0.5, 0.2, 0.2), [PIXEL] * 3, {}, (0.5, 0.2, 0.2)),
        ((1, 1, 1), [PIXEL] * 3, {}, None),
        # 200 nm are not 200 µm, as without any unit.
        ((1, 200, 200), [PIXEL, NM, NM], {}, None),
    ],
)
def test_voxel_sizes_are_those_of_the_displayed_layer(
    scale: tuple[float, ...], units: list[Unit], options: dict[str, Any], expected: tuple[float, ...] | None
) -> None:
    if "affine" in options:
        options = options | {"affine": SimpleNamespace(affine_matrix=options["affine"])}
    image = make_image("ZYX", scale=scale, units=units, **options)
    size, note = get_voxel_size(image, "ZYX")
    assert size == expected if expected is None else size == pytest.approx(expected, rel=1e-9)
    assert ("Enter the voxel size" in note) == (units[0] is PIXEL and units[1] is NM)
    series = make_image("TZYX", scale=(30, *scale), units=[SECOND, *units])
    if not options:
        assert get_voxel_size(series, "TZYX") == (size, note)


@pytest.mark.parametrize(
    ("axes", "scale", "units", "expected", "note"),
    [
        ("YX", (0.2, 0.2), [UM] * 2, (0.2, 0.2, 0.2), "from the layer. The plane is taken as one pixel deep."),
        ("YX", (200, 800), [NM] * 2, (0.4, 0.2, 0.8), "one pixel deep"),
        ("YX", (0.2, 0.2), [PIXEL] * 2, (0.2, 0.2, 0.2), "no unit; taken as µm. The plane"),
        ("TYX", (30, 0.2, 0.2), [SECOND, UM, UM], (0.2, 0.2, 0.2), "from the layer"),
        ("YXS", (0.2, 0.2), [UM] * 2, (0.2, 0.2, 0.2), "from the layer"),
        ("YX", (1, 1), [PIXEL] * 2, None, "no voxel size"),
        ("YX", (200, 1), [NM, PIXEL], None, "y nanometer, x pixel. Enter the voxel size"),
    ],
)
def test_planes_have_the_depth_of_a_pixel(
    axes: str, scale: tuple[float, ...], units: list[Unit], expected: tuple[float, ...] | None, note: str
) -> None:
    size, found_note = get_voxel_size(make_image(axes.rstrip("S"), scale=scale, units=units), axes)
    assert size == (None if expected is None else pytest.approx(expected))
    assert note in found_note


@pytest.mark.parametrize(("axes", "labels_axes"), [("YX", "ZYX"), ("YXS", "ZYX"), ("TYX", "ZYX"), ("TYX", "TZYX")])
def test_labels_of_planes_are_at_the_place_of_their_image(axes: str, labels_axes: str) -> None:
    lengths = {"T": 2, "Z": 1, "Y": 4, "X": 5}
    shape = [lengths[axis] for axis in labels_axes]
    image = make_image(axes.rstrip("S"))
    placed, arguments = make_labels_layer(np.arange(np.prod(shape)).reshape(shape), image, axes, {"T": 1})
    assert placed.shape == tuple(length for axis, length in zip(labels_axes, shape, strict=True) if axis != "Z")
    for name in ("scale", "translate", "units"):
        assert list(arguments[name]) == list(getattr(image, name)[-placed.ndim :])


def test_sheared_images_with_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="Split its channels"):
        make_labels_layer(np.zeros((2, 2, 2)), make_image("CZYX", shear=np.ones(6)), "CZYX", {})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("If this is wrong, set diameter=.", "If this is wrong, choose another object diameter."),
        ("or set diameter=none to use", "or choose Object diameter: original resolution to use"),
        ("set diameter= to the diameter of the objects", "enter the diameter of the objects"),
        ("Try diameter=7.97,9,9px.", "Try the object diameter 7.97,9,9 px."),
        ("Try another diameter=, channel= or model=.", "Try another diameter, channel or model."),
        ("Try model=membranes.", "Try the model membranes."),
        ("Add voxel_size=Z,Y,X", "Add voxel size Z,Y,X"),
        (
            "It requires a key. Send your key as `X`, or `Y: Z`.",
            "It requires a key. Enter it in Segment, and press Connect.",
        ),
        ("4um wide. Train a model (docs/training.md).", "4 µm wide. Train a model (Correct and train)."),
    ],
)
def test_messages_name_what_the_widget_shows(message: str, expected: str) -> None:
    assert messages.rephrase(message) == expected
