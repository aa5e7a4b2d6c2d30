"""Synthetic tissues: labelled stacks of cells that touch, of which the membranes are stained.

Cells are the Voronoi cells of points that keep their distance, in a space that is bent a little so that faces curve.
They fill the stack, or a body in it with background around. All randomness comes from one `numpy.random.Generator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import edt
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.spatial import cKDTree

from scripts.recipes.epithelium import Layer
from scripts.recipes.optics import Floats, blur_widely, expose, log_uniform, smooth_noise
from service.core.quantities import Size

Labels = NDArray[np.uint16]


@dataclass(frozen=True)
class Tissue:
    """Parameters of a stack; lengths in voxels along y and x, intensities relative to a membrane of 1.

    diameter        mean diameter of a cell; along z it is shorter by `flatness`
    order           how evenly cells are spread: nearest points are at least so many diameters apart
    bend            how far faces are bent, in diameters
    body            size of the tissue relative to the stack; above 1 it fills the stack
    holes           part of the cells that are missing, as cavities
    thickness       standard deviation of a membrane's profile
    unevenness      how much the brightness of membranes varies from place to place
    gaps            part of the membranes that is hardly stained
    rim             brightness of the tissue's surface, where a cell touches none
    inside, grain   stain inside the cells, and depth of its texture
    nucleus         what is deeper in a cell than so many diameters is hardly stained inside; 0: none is
    coat            brightness of a shell around the body, such as that of an egg; 0: there is none
    specks          number of bright vesicles per cell
    blur            standard deviation of the point spread function in y and x; `elongation` times as much along z
    haze, floor     stray light of the membranes; even background
    shading         depth of uneven illumination; `attenuation` is what is lost from the first plane to the last
    photons, read_noise, bits, saturation   documented at `scripts.recipes.synthetic_nuclei.Scene`
    subtracted      part of the background that is exactly 0, as after a subtraction; 0: none was subtracted
    patchiness      standard deviation of the logarithm of the membranes' brightness between cells
    variety         how much wider some cells are than others, from 0; at 0.6 the widest are two to three times as wide
    egg             whether a body that does not fill the stack is always an ellipsoid
    lumen           radius of the cavity in a tube or cyst of one layer of cells, relative to the outer one; 0: none
    apart           width of the dark between cells that do not touch, in diameters; 0: all touch
    """

    diameter: float
    flatness: float
    order: float
    bend: float
    body: float
    holes: float
    thickness: float
    unevenness: float
    gaps: float
    rim: float
    inside: float
    grain: float
    nucleus: float
    coat: float
    specks: float
    blur: float
    elongation: float
    haze: float
    floor: float
    shading: float
    attenuation: float
    photons: float
    read_noise: float
    bits: int
    saturation: float
    subtracted: float
    patchiness: float = 0.0
    variety: float = 0.0
    egg: bool = False
    lumen: float = 0.0
    apart: float = 0.0

    @classmethod
    def draw(cls, rng: Generator, smallest: float = 14.0, largest: float = 48.0) -> Self:
        """Draw a tissue of cells between these diameters."""
        diameter = log_uniform(rng, smallest, largest)
        flatness = float(rng.choice(np.array([1.0, rng.uniform(1, 2), rng.uniform(2, 3)]), p=[0.3, 0.5, 0.2]))
        inside = float(rng.choice([0.0, rng.uniform(0.02, 0.5)], p=[0.25, 0.75]))
        # Nothing but stain inside the cells tells a cavity from one of them.
        holes = float(rng.choice([0.0, rng.uniform(0.02, 0.15)])) if inside > 0.1 else 0.0
        return cls(
            diameter=diameter,
            flatness=flatness,
            order=float(rng.uniform(0.45, 0.8)),
            bend=float(rng.uniform(0, 0.12)),
            body=float(rng.uniform(0.55, 0.95) if rng.random() < 0.7 else 2.0),
            holes=holes,
            thickness=log_uniform(rng, 0.5, 1.6),
            unevenness=float(rng.uniform(0, 0.5)),
            gaps=float(rng.choice([0.0, rng.uniform(0.02, 0.25)])),
            rim=float(rng.uniform(0.25, 1.3)),
            inside=inside,
            grain=float(rng.uniform(0, 0.8)),
            nucleus=float(rng.choice([0.0, rng.uniform(0.1, 0.25)])),
            coat=float(rng.choice([0.0, rng.uniform(0.1, 0.8)], p=[0.8, 0.2])),
            specks=float(rng.choice([0.0, rng.uniform(0.5, 6)])),
            blur=log_uniform(rng, 0.4, 1.5),
            elongation=float(rng.uniform(1.0, 3.5)) / flatness,
            haze=float(rng.choice([0.0, rng.uniform(0.05, 0.5)])),
            floor=log_uniform(rng, 0.005, 0.3),
            shading=float(rng.uniform(0, 0.4)),
            attenuation=float(rng.choice([0.0, rng.uniform(0.1, 0.7)])),
            photons=log_uniform(rng, 8, 300),
            read_noise=float(rng.uniform(0.2, 2.0)),
            bits=int(rng.choice([8, 16])),
            saturation=float(rng.choice([0.0, rng.uniform(0.0, 0.02)], p=[0.6, 0.4])),
            subtracted=float(rng.choice([0.0, rng.uniform(0.5, 1.0)], p=[0.6, 0.4])),
        )

    @classmethod
    def draw_walls(cls, rng: Generator) -> Self:
        """Draw a thick tissue of cells with stained walls, stained unevenly and dimmer with depth."""
        return replace(
            cls.draw(rng),
            body=float(rng.uniform(0.8, 1.0) if rng.random() < 0.4 else 2.0),
            thickness=log_uniform(rng, 0.7, 2.5),
            unevenness=float(rng.uniform(0.2, 0.9)),
            patchiness=float(rng.uniform(0.1, 0.7)),
            inside=float(rng.choice([0.0, rng.uniform(0.01, 0.15)])),
            nucleus=0.0,
            holes=0.0,
            rim=float(rng.uniform(0.7, 1.5)),
            haze=float(rng.uniform(0.1, 0.8)),
            attenuation=float(rng.uniform(0.2, 0.85)),
            photons=log_uniform(rng, 5, 100),
        )

    @classmethod
    def draw_embryo(cls, rng: Generator) -> Self:
        """Draw an egg-shaped body of few large cells of unlike widths in the dark, with thick uneven membranes."""
        flatness = float(rng.choice(np.array([1.0, rng.uniform(1.3, 3)])))
        blur = log_uniform(rng, 0.4, 1.8)
        return replace(
            cls.draw(rng),
            diameter=log_uniform(rng, 24.0, 72.0),
            flatness=flatness,
            order=float(rng.uniform(0.5, 0.8)),
            body=float(rng.uniform(0.7, 0.99)),
            egg=True,
            variety=float(rng.uniform(0.2, 0.6)),
            holes=0.0,
            thickness=log_uniform(rng, 0.7, 2.5),
            unevenness=float(rng.uniform(0.1, 0.8)),
            patchiness=float(rng.choice([0.0, rng.uniform(0.1, 0.5)])),
            inside=float(rng.choice([0.0, rng.uniform(0.01, 0.3)])),
            rim=float(rng.uniform(0.4, 1.3)),
            blur=blur,
            elongation=float(rng.uniform(1.0, 3.5)) / flatness,
            attenuation=float(rng.choice([0.0, rng.uniform(0.1, 0.8)])),
            photons=log_uniform(rng, 5, 200),
        )

    @classmethod
    def draw_epithelium(cls, rng: Generator) -> Self:
        """Draw a tube or a cyst: one layer of cells, some taller than wide, around a cavity."""
        flatness = _draw_flatness(rng)
        return replace(
            cls.draw(rng),
            flatness=flatness,
            body=float(rng.uniform(0.7, 1.6)),
            lumen=float(rng.uniform(0.15, 0.75)),
            holes=0.0,
            thickness=log_uniform(rng, 0.6, 2.0),
            unevenness=float(rng.uniform(0.1, 0.7)),
            rim=float(rng.uniform(0.4, 1.8)),
            elongation=float(rng.uniform(1.0, 3.5)) / flatness,
            coat=0.0,
        )

    @classmethod
    def draw_apart(cls, rng: Generator) -> Self:
        """Draw cells of which most do not touch, such as cultured ones that round up."""
        flatness = _draw_flatness(rng)
        return replace(
            cls.draw(rng),
            flatness=flatness,
            variety=float(rng.uniform(0.0, 0.4)),
            apart=float(rng.uniform(0.1, 0.5)),
            rim=float(rng.uniform(0.7, 1.3)),
            elongation=float(rng.uniform(1.0, 3.5)) / flatness,
            coat=0.0,
        )


def _draw_flatness(rng: Generator) -> float:
    """Draw how much farther apart planes are than pixels."""
    return float(rng.choice(np.array([1.0, rng.uniform(1, 3), rng.uniform(3, 5)]), p=[0.3, 0.5, 0.2]))


# Stained membranes of cells without nuclei, of which `dataclasses.replace` makes others.
WALLS = Tissue(
    diameter=30,
    flatness=1,
    order=0.7,
    bend=0.06,
    body=0.9,
    holes=0,
    thickness=0.9,
    unevenness=0.25,
    gaps=0,
    rim=0.7,
    inside=0.18,
    grain=0.5,
    nucleus=0,
    coat=0,
    specks=1,
    blur=0.9,
    elongation=1.8,
    haze=0.1,
    floor=0.04,
    shading=0.1,
    attenuation=0.2,
    photons=60,
    read_noise=1.0,
    bits=8,
    saturation=0.001,
    subtracted=0,
)


def synthesise_varied(rng: Generator, shape: Size) -> tuple[NDArray[Any], Labels]:
    """Make a stack of one of the kinds of tissue; returns what `synthesise_tissue` does."""
    kinds = (Tissue.draw, Tissue.draw_walls, Tissue.draw_embryo, Tissue.draw_epithelium, Tissue.draw_apart)
    return synthesise_tissue(rng, shape, kinds[int(rng.choice(5, p=(0.25, 0.2, 0.25, 0.18, 0.12)))](rng))


def synthesise_tissue(rng: Generator, shape: Size, tissue: Tissue | None = None) -> tuple[NDArray[Any], Labels]:
    """Make a stack and its truth: image [Z, Y, X] uint8 or uint16, labels [Z, Y, X] uint16 with 0 outside the cells."""
    tissue = tissue if tissue is not None else Tissue.draw(rng)
    labels = _cells(rng, shape, tissue)
    image = expose(rng, tissue, np.maximum(_light(rng, tissue, labels), 0))
    if tissue.subtracted and 0 < np.count_nonzero(labels) < labels.size:
        # Never more than half of the tissue goes with it.
        level = min(np.quantile(image[labels == 0], tissue.subtracted), np.quantile(image[labels > 0], 0.5))
        image -= np.minimum(image, image.dtype.type(level))
    return image, labels


def _cells(rng: Generator, shape: Size, tissue: Tissue) -> Labels:
    """Draw numbered cells, 0 outside the body and in cavities."""
    spacing = np.array([tissue.flatness, 1, 1], np.float32)
    extent = np.array(shape) * spacing
    layer = Layer.draw(rng, extent, tissue.body, tissue.lumen) if tissue.lumen else None
    points = _points(rng, extent, tissue) if layer is None else _points_on(layer, rng, extent, tissue)
    bend = tissue.bend * tissue.diameter
    axes = [(np.arange(edge, dtype=np.float32) + 0.5) * step for edge, step in zip(shape, spacing, strict=True)]
    places = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    if bend:
        for axis in range(3):
            places[..., axis] += np.float32(bend) * smooth_noise(rng, shape, 0.5 * tissue.diameter)
    flat = places.reshape(-1, 3)
    owner = _nearest(rng, points, flat if layer is None else layer.onto_surface(flat), tissue)
    kept = rng.random(len(points)) >= tissue.holes
    if layer is not None:
        body = layer.holds(flat)
    else:
        body = _body(rng, places, extent, tissue).ravel() if tissue.body < 1 else np.ones(len(flat), bool)
        _join_slivers(owner, body, points, flat)
    numbers = np.where(kept, np.cumsum(kept), 0).astype(np.uint16)
    labels = np.asarray(np.where(body, numbers[owner], 0).reshape(shape), np.uint16)
    return _shrink(rng, labels, tissue) if tissue.apart else labels


def _shrink(rng: Generator, labels: Labels, tissue: Tissue) -> Labels:
    """Return labels [Z, Y, X] that end before their neighbours, here more and there less; some still touch."""
    shape = (labels.shape[0], labels.shape[1], labels.shape[2])
    depth = edt.edt(labels.astype(np.uint32), anisotropy=(tissue.flatness, 1.0, 1.0), black_border=False)
    width = np.clip(0.5 + 0.7 * smooth_noise(rng, shape, 0.8 * tissue.diameter), 0, 1)
    return np.where(depth > np.float32(0.5 * tissue.apart * tissue.diameter) * width, labels, 0).astype(np.uint16)


def _nearest(rng: Generator, points: NDArray[Any], places: Floats, tissue: Tissue) -> NDArray[np.intp]:
    """Return which of the points [cells, 3] owns each of the places [voxels, 3], by their power diagram.

    Points that lie off the places' space, in a fourth dimension, have narrower cells.
    """
    if not tissue.variety:
        return np.asarray(cKDTree(points).query(places, workers=1)[1])
    height = tissue.variety * tissue.diameter * np.sqrt(rng.random(len(points)))
    lifted = np.column_stack([places, np.zeros(len(places), np.float32)])
    return np.asarray(cKDTree(np.column_stack([points, height])).query(lifted, workers=1)[1])


def _join_slivers(owner: NDArray[Any], body: NDArray[np.bool_], points: NDArray[Any], places: Floats) -> None:
    """Give voxels of cells that lie mostly outside the body to the nearest other cell; changes `owner`.

    `owner` is the index of each voxel's cell, `body` whether the voxel is in the body, [voxels]; `points` are centres.
    """
    whole, left = (np.bincount(chosen, minlength=len(points)) for chosen in (owner, owner[body]))
    stay = np.flatnonzero(2 * left >= whole)
    lost = np.flatnonzero(body & (2 * left < whole)[owner])
    if lost.size and stay.size:
        owner[lost] = stay[cKDTree(points[stay]).query(places[lost], workers=1)[1]]


def _points(rng: Generator, extent: NDArray[Any], tissue: Tissue) -> NDArray[np.float64]:
    """Draw centres [cells, 3] in and around the volume, at least `order` diameters apart where that is possible."""
    margin = 0.7 * tissue.diameter
    count = math.ceil(np.prod(extent + 2 * margin) / (math.pi / 6 * tissue.diameter**3))
    return _spread(lambda number: rng.uniform(-margin, extent + margin, (number, 3)), count, tissue)


def _points_on(layer: Layer, rng: Generator, extent: NDArray[Any], tissue: Tissue) -> NDArray[np.float64]:
    """Draw centres [cells, 3] on the middle of a layer, as far apart as `_points` does."""
    count = math.ceil(layer.area(extent) / (math.pi / 4 * tissue.diameter**2))
    return _spread(lambda number: layer.draw_points(rng, extent, number), count, tissue)


def _spread(draw: Callable[[int], NDArray[np.float64]], count: int, tissue: Tissue) -> NDArray[np.float64]:
    """Draw points [count, 3], again those that are less than `order` diameters from an earlier one."""
    points = draw(count)
    for _ in range(12):
        close = np.unique([second for _, second in cKDTree(points).query_pairs(tissue.order * tissue.diameter)])
        if not close.size:
            break
        points[close.astype(int)] = draw(close.size)
    return points


def _body(rng: Generator, places: Floats, extent: NDArray[Any], tissue: Tissue) -> NDArray[np.bool_]:
    """Draw an ellipsoid with a wavy surface, or everything on one side of a wavy plane; [z, y, x] bool."""
    shape = (places.shape[0], places.shape[1], places.shape[2])
    waves = np.float32(0.06) * smooth_noise(rng, shape, 0.8 * tissue.diameter)
    if tissue.egg or rng.random() < 0.5:
        middle = extent * rng.uniform(0.4, 0.6, 3)
        radii = tissue.body * extent / 2 * rng.uniform(0.9, 1.15, 3)
        return np.asarray(np.sqrt((((places - middle) / radii) ** 2).sum(axis=-1)) < 1 + waves)
    normal = rng.normal(size=3)
    normal /= np.linalg.norm(normal)
    height = ((places - extent * rng.uniform(0.35, 0.65)) / extent.max()) @ normal
    return np.asarray(height < waves * 0.5)


def _light(rng: Generator, tissue: Tissue, labels: Labels) -> Floats:
    """Return the light that reaches the camera, [Z, Y, X]."""
    shape = (labels.shape[0], labels.shape[1], labels.shape[2])
    light = _stain(rng, tissue, labels, shape)
    light = gaussian_filter(light, [tissue.blur * tissue.elongation, tissue.blur, tissue.blur], truncate=3)
    if tissue.haze:
        light += np.float32(tissue.haze) * blur_widely(
            light, (0.5 * tissue.diameter / tissue.flatness, 0.5 * tissue.diameter)
        )
    light += np.float32(tissue.floor)
    light *= np.clip(1 + tissue.shading * smooth_noise(rng, (1, *shape[1:]), max(shape) / 1.5), 0.2, 2)
    light *= np.linspace(1, 1 - tissue.attenuation, shape[0], dtype=np.float32)[:: rng.choice([-1, 1]), None, None]
    return np.asarray(light, np.float32)


def _stain(rng: Generator, tissue: Tissue, labels: Labels, shape: Size) -> Floats:
    """Return the emitted light: membranes, stain inside the cells, vesicles."""
    # Numbered from 1, background is an object like the others, so that surfaces are membranes on both sides.
    apart = edt.edt(labels.astype(np.uint32) + 1, anisotropy=(tissue.flatness, 1.0, 1.0), black_border=False) - 0.5
    light = np.exp(-0.5 * (np.minimum(apart, 1e3) / np.float32(tissue.thickness)) ** 2).astype(np.float32)
    light *= np.clip(1 + tissue.unevenness * smooth_noise(rng, shape, 0.6 * tissue.diameter), 0.15, 3)
    if tissue.patchiness:
        light *= rng.lognormal(0, tissue.patchiness, int(np.max(labels)) + 1).astype(np.float32)[labels]
    if tissue.gaps:
        field = smooth_noise(rng, shape, 0.3 * tissue.diameter)
        light[field > np.quantile(field[::2, ::3, ::3], 1 - tissue.gaps)] *= np.float32(0.1)
    inner = labels > 0
    surface = edt.edt(inner, anisotropy=(tissue.flatness, 1.0, 1.0), black_border=False)
    light[(surface <= 3 * tissue.thickness) | ~inner] *= np.float32(tissue.rim)
    if tissue.inside:
        each = rng.lognormal(math.log(tissue.inside), 0.3, int(np.max(labels)) + 1).astype(np.float32)
        each[0] = 0
        grain = 1 + tissue.grain * smooth_noise(rng, shape, max(1.0, tissue.diameter / 12))
        if tissue.nucleus:
            grain[apart > tissue.nucleus * tissue.diameter] *= np.float32(0.15)
        light += each[labels] * np.clip(grain, 0, 3)
    if tissue.coat and not inner.all():
        away = edt.edt(~inner, anisotropy=(tissue.flatness, 1.0, 1.0), black_border=False)
        gap = np.float32(rng.uniform(0.1, 0.5) * tissue.diameter)
        light += np.float32(tissue.coat) * np.exp(-0.5 * ((away - gap) / np.float32(tissue.thickness)) ** 2)
    places = np.flatnonzero(inner)
    count = int(tissue.specks * np.max(labels))
    if count and places.size:
        light.ravel()[rng.choice(places, count)] += rng.uniform(0.5, 3, count).astype(np.float32)
    return np.asarray(light, np.float32)
