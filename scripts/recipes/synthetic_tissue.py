"""Synthetic stacks of tissue with labels: adjacent cells with stained membranes.

Cells are the Voronoi cells of points with a minimum spacing. The space is slightly deformed, which makes the faces of
the cells curved. The cells fill the stack, or a body that is surrounded by background. All random numbers come from one
`numpy.random.Generator`.
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
from scripts.recipes.optics import Floats, apply_wide_blur, expose, log_uniform, smooth_noise
from service.core.quantities import Size

Labels = NDArray[np.uint16]


@dataclass(frozen=True)
class Tissue:
    """Parameters of a stack of cells with stained membranes.

    Lengths are in pixels of the xy plane. Intensities are relative to a membrane of average brightness, which is 1.

    diameter           mean diameter of a cell
    flatness           plane spacing relative to the pixel size; in voxels, cells are shorter along z by this factor
    min_spacing        minimum distance between the centers of cells, in diameters; higher values make cells more equal
    bend               standard deviation of the displacement that curves the faces, in diameters
    body_size          size of the tissue relative to the stack; the tissue fills the stack if it is at least 1
    holes              fraction of the cells that are missing, which leaves cavities
    thickness          standard deviation of the profile of a membrane
    unevenness         local variation of the brightness of membranes
    gaps               fraction of the membranes that is very weakly stained
    rim                brightness factor of membranes at the surface of the tissue, where a cell has no neighbor
    cytoplasm          brightness inside the cells
    grain              contrast of the texture inside the cells
    nucleus            depth in a cell, in diameters, at which the weakly stained nucleus begins; 0 for no nuclei
    coat               brightness of a shell around the body, such as an eggshell; 0 for no shell
    specks             number of bright vesicles per cell
    blur               standard deviation of the point spread function in y and x
    elongation         standard deviation of the point spread function along z, in voxels, relative to `blur`
    haze               intensity of the stray light of membranes
    floor              intensity of the uniform background
    shading            strength of uneven illumination
    attenuation        fraction of the light that is lost with depth, from the first plane to the last or vice versa
    photons, read_noise, bits, saturation   see `scripts.recipes.synthetic_nuclei.Scene`
    zeroed_background  fraction of the background that is exactly 0, as after background subtraction; 0 for no
                       subtraction
    patchiness         variation of the membrane brightness between cells (standard deviation of its logarithm)
    size_variation     variation of the cell size; at 0.6, the largest cells are two to three times as wide as the
                       smallest ones
    is_ellipsoid       whether a body that does not fill the stack is always an ellipsoid
    lumen              inner radius of an epithelial tube or cyst relative to the outer one; 0 for other tissue
    separation         maximum width of the gaps between neighboring cells, in diameters; 0 if all cells touch
    """

    diameter: float
    flatness: float
    min_spacing: float
    bend: float
    body_size: float
    holes: float
    thickness: float
    unevenness: float
    gaps: float
    rim: float
    cytoplasm: float
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
    zeroed_background: float
    patchiness: float = 0.0
    size_variation: float = 0.0
    is_ellipsoid: bool = False
    lumen: float = 0.0
    separation: float = 0.0

    @classmethod
    def draw(cls, rng: Generator, min_diameter: float = 14.0, max_diameter: float = 48.0) -> Self:
        """Draw a tissue of cells with a diameter in this range."""
        diameter = log_uniform(rng, min_diameter, max_diameter)
        flatness = float(rng.choice(np.array([1.0, rng.uniform(1, 2), rng.uniform(2, 3)]), p=[0.3, 0.5, 0.2]))
        cytoplasm = float(rng.choice([0.0, rng.uniform(0.02, 0.5)], p=[0.25, 0.75]))
        # Cavities can be distinguished from cells only if the cytoplasm is stained.
        holes = float(rng.choice([0.0, rng.uniform(0.02, 0.15)])) if cytoplasm > 0.1 else 0.0
        return cls(
            diameter=diameter,
            flatness=flatness,
            min_spacing=float(rng.uniform(0.45, 0.8)),
            bend=float(rng.uniform(0, 0.12)),
            body_size=float(rng.uniform(0.55, 0.95) if rng.random() < 0.7 else 2.0),
            holes=holes,
            thickness=log_uniform(rng, 0.5, 1.6),
            unevenness=float(rng.uniform(0, 0.5)),
            gaps=float(rng.choice([0.0, rng.uniform(0.02, 0.25)])),
            rim=float(rng.uniform(0.25, 1.3)),
            cytoplasm=cytoplasm,
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
            zeroed_background=float(rng.choice([0.0, rng.uniform(0.5, 1.0)], p=[0.6, 0.4])),
        )

    @classmethod
    def draw_walls(cls, rng: Generator) -> Self:
        """Draw a thick tissue with unevenly stained cell walls and strong attenuation with depth."""
        return replace(
            cls.draw(rng),
            body_size=float(rng.uniform(0.8, 1.0) if rng.random() < 0.4 else 2.0),
            thickness=log_uniform(rng, 0.7, 2.5),
            unevenness=float(rng.uniform(0.2, 0.9)),
            patchiness=float(rng.uniform(0.1, 0.7)),
            cytoplasm=float(rng.choice([0.0, rng.uniform(0.01, 0.15)])),
            nucleus=0.0,
            holes=0.0,
            rim=float(rng.uniform(0.7, 1.5)),
            haze=float(rng.uniform(0.1, 0.8)),
            attenuation=float(rng.uniform(0.2, 0.85)),
            photons=log_uniform(rng, 5, 100),
        )

    @classmethod
    def draw_embryo(cls, rng: Generator) -> Self:
        """Draw an egg-shaped embryo on a dark background: few large cells of different sizes with uneven membranes."""
        flatness = float(rng.choice(np.array([1.0, rng.uniform(1.3, 3)])))
        blur = log_uniform(rng, 0.4, 1.8)
        return replace(
            cls.draw(rng),
            diameter=log_uniform(rng, 24.0, 72.0),
            flatness=flatness,
            min_spacing=float(rng.uniform(0.5, 0.8)),
            body_size=float(rng.uniform(0.7, 0.99)),
            is_ellipsoid=True,
            size_variation=float(rng.uniform(0.2, 0.6)),
            holes=0.0,
            thickness=log_uniform(rng, 0.7, 2.5),
            unevenness=float(rng.uniform(0.1, 0.8)),
            patchiness=float(rng.choice([0.0, rng.uniform(0.1, 0.5)])),
            cytoplasm=float(rng.choice([0.0, rng.uniform(0.01, 0.3)])),
            rim=float(rng.uniform(0.4, 1.3)),
            blur=blur,
            elongation=float(rng.uniform(1.0, 3.5)) / flatness,
            attenuation=float(rng.choice([0.0, rng.uniform(0.1, 0.8)])),
            photons=log_uniform(rng, 5, 200),
        )

    @classmethod
    def draw_epithelium(cls, rng: Generator) -> Self:
        """Draw a tube or a cyst: one layer of cells around a cavity."""
        flatness = _draw_flatness(rng)
        return replace(
            cls.draw(rng),
            flatness=flatness,
            body_size=float(rng.uniform(0.7, 1.6)),
            lumen=float(rng.uniform(0.15, 0.75)),
            holes=0.0,
            thickness=log_uniform(rng, 0.6, 2.0),
            unevenness=float(rng.uniform(0.1, 0.7)),
            rim=float(rng.uniform(0.4, 1.8)),
            elongation=float(rng.uniform(1.0, 3.5)) / flatness,
            coat=0.0,
        )

    @classmethod
    def draw_separate_cells(cls, rng: Generator) -> Self:
        """Draw cells that mostly do not touch, such as rounded cells in culture."""
        flatness = _draw_flatness(rng)
        return replace(
            cls.draw(rng),
            flatness=flatness,
            size_variation=float(rng.uniform(0.0, 0.4)),
            separation=float(rng.uniform(0.1, 0.5)),
            rim=float(rng.uniform(0.7, 1.3)),
            elongation=float(rng.uniform(1.0, 3.5)) / flatness,
            coat=0.0,
        )


def _draw_flatness(rng: Generator) -> float:
    """Draw the plane spacing relative to the pixel size."""
    return float(rng.choice(np.array([1.0, rng.uniform(1, 3), rng.uniform(3, 5)]), p=[0.3, 0.5, 0.2]))


# Typical tissue with stained membranes and without nuclei. Use `dataclasses.replace` to derive others.
TYPICAL_TISSUE = Tissue(
    diameter=30,
    flatness=1,
    min_spacing=0.7,
    bend=0.06,
    body_size=0.9,
    holes=0,
    thickness=0.9,
    unevenness=0.25,
    gaps=0,
    rim=0.7,
    cytoplasm=0.18,
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
    zeroed_background=0,
)


def synthesize_varied(rng: Generator, shape: Size) -> tuple[NDArray[Any], Labels]:
    """Generate a stack with a random kind of tissue; returns the image and the labels."""
    kinds = (Tissue.draw, Tissue.draw_walls, Tissue.draw_embryo, Tissue.draw_epithelium, Tissue.draw_separate_cells)
    return synthesize_tissue(rng, shape, kinds[int(rng.choice(5, p=(0.25, 0.2, 0.25, 0.18, 0.12)))](rng))


def synthesize_tissue(rng: Generator, shape: Size, tissue: Tissue | None = None) -> tuple[NDArray[Any], Labels]:
    """Generate a stack of cells with stained membranes.

    Returns the image as uint8 or uint16 and the labels as uint16, both [Z, Y, X]. Label 0 is outside the cells.
    """
    tissue = tissue if tissue is not None else Tissue.draw(rng)
    labels = _draw_cells(rng, shape, tissue)
    image = expose(rng, tissue, np.maximum(_compute_light(rng, tissue, labels), 0))
    if tissue.zeroed_background and 0 < np.count_nonzero(labels) < labels.size:
        # Limit the level so that at least half of the tissue remains.
        level = min(np.quantile(image[labels == 0], tissue.zeroed_background), np.quantile(image[labels > 0], 0.5))
        image -= np.minimum(image, image.dtype.type(level))
    return image, labels


def _draw_cells(rng: Generator, shape: Size, tissue: Tissue) -> Labels:
    """Draw the labels of cells [Z, Y, X]. Label 0 is outside the body and in cavities."""
    spacing = np.array([tissue.flatness, 1, 1], np.float32)
    extent = np.array(shape) * spacing
    layer = Layer.draw(rng, extent, tissue.body_size, tissue.lumen) if tissue.lumen else None
    points = _draw_points(rng, extent, tissue) if layer is None else _draw_layer_points(layer, rng, extent, tissue)
    bend = tissue.bend * tissue.diameter
    axes = [(np.arange(edge, dtype=np.float32) + 0.5) * step for edge, step in zip(shape, spacing, strict=True)]
    positions = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    if bend:
        for axis in range(3):
            positions[..., axis] += np.float32(bend) * smooth_noise(rng, shape, 0.5 * tissue.diameter)
    flat = positions.reshape(-1, 3)
    owner = _find_owners(rng, points, flat if layer is None else layer.project(flat), tissue)
    is_cell = rng.random(len(points)) >= tissue.holes
    if layer is not None:
        body = layer.contains(flat)
    else:
        body = _draw_body(rng, positions, extent, tissue).ravel() if tissue.body_size < 1 else np.ones(len(flat), bool)
        _merge_slivers(owner, body, points, flat)
    numbers = np.where(is_cell, np.cumsum(is_cell), 0).astype(np.uint16)
    labels = np.asarray(np.where(body, numbers[owner], 0).reshape(shape), np.uint16)
    return _separate_cells(rng, labels, tissue) if tissue.separation else labels


def _separate_cells(rng: Generator, labels: Labels, tissue: Tissue) -> Labels:
    """Shrink labels [Z, Y, X] by a locally varying amount, so that most cells no longer touch."""
    shape = (labels.shape[0], labels.shape[1], labels.shape[2])
    depth = edt.edt(labels.astype(np.uint32), anisotropy=(tissue.flatness, 1.0, 1.0), black_border=False)
    width = np.clip(0.5 + 0.7 * smooth_noise(rng, shape, 0.8 * tissue.diameter), 0, 1)
    return np.where(depth > np.float32(0.5 * tissue.separation * tissue.diameter) * width, labels, 0).astype(np.uint16)


def _find_owners(rng: Generator, points: NDArray[Any], positions: Floats, tissue: Tissue) -> NDArray[np.intp]:
    """Return the index of the point [cells, 3] that owns each voxel at `positions` [voxels, 3].

    The cells form a power diagram: an offset of a point along a fourth dimension makes its cell smaller.
    """
    if not tissue.size_variation:
        return np.asarray(cKDTree(points).query(positions, workers=1)[1])
    height = tissue.size_variation * tissue.diameter * np.sqrt(rng.random(len(points)))
    lifted = np.column_stack([positions, np.zeros(len(positions), np.float32)])
    return np.asarray(cKDTree(np.column_stack([points, height])).query(lifted, workers=1)[1])


def _merge_slivers(owner: NDArray[Any], body: NDArray[np.bool_], points: NDArray[Any], positions: Floats) -> None:
    """Assign the voxels of cells that lie mostly outside the body to the nearest other cell, in place.

    owner       index of the cell that owns each voxel, [voxels]; modified
    body        whether each voxel is in the body, [voxels]
    points      centers of the cells, [cells, 3]
    positions   positions of the voxels, [voxels, 3]
    """
    total, in_body = (np.bincount(owners, minlength=len(points)) for owners in (owner, owner[body]))
    large = np.flatnonzero(2 * in_body >= total)
    slivers = np.flatnonzero(body & (2 * in_body < total)[owner])
    if slivers.size and large.size:
        owner[slivers] = large[cKDTree(points[large]).query(positions[slivers], workers=1)[1]]


def _draw_points(rng: Generator, extent: NDArray[Any], tissue: Tissue) -> NDArray[np.float64]:
    """Draw the centers of cells [cells, 3] in and around the volume, with the minimum spacing if possible."""
    margin = 0.7 * tissue.diameter
    count = math.ceil(np.prod(extent + 2 * margin) / (math.pi / 6 * tissue.diameter**3))
    return _draw_spaced(lambda number: rng.uniform(-margin, extent + margin, (number, 3)), count, tissue)


def _draw_layer_points(layer: Layer, rng: Generator, extent: NDArray[Any], tissue: Tissue) -> NDArray[np.float64]:
    """Draw the centers of cells [cells, 3] on the midsurface of a layer, with the minimum spacing if possible."""
    count = math.ceil(layer.area(extent) / (math.pi / 4 * tissue.diameter**2))
    return _draw_spaced(lambda number: layer.draw_points(rng, extent, number), count, tissue)


def _draw_spaced(draw: Callable[[int], NDArray[np.float64]], count: int, tissue: Tissue) -> NDArray[np.float64]:
    """Draw points [count, 3], and redraw points that are too close to an earlier one, at most twelve times."""
    points = draw(count)
    for _ in range(12):
        close = np.unique([second for _, second in cKDTree(points).query_pairs(tissue.min_spacing * tissue.diameter)])
        if not close.size:
            break
        points[close.astype(int)] = draw(close.size)
    return points


def _draw_body(rng: Generator, positions: Floats, extent: NDArray[Any], tissue: Tissue) -> NDArray[np.bool_]:
    """Draw a mask [Z, Y, X] of the body: an ellipsoid with a wavy surface, or one side of a wavy plane."""
    shape = (positions.shape[0], positions.shape[1], positions.shape[2])
    waves = np.float32(0.06) * smooth_noise(rng, shape, 0.8 * tissue.diameter)
    if tissue.is_ellipsoid or rng.random() < 0.5:
        center = extent * rng.uniform(0.4, 0.6, 3)
        radii = tissue.body_size * extent / 2 * rng.uniform(0.9, 1.15, 3)
        return np.asarray(np.sqrt((((positions - center) / radii) ** 2).sum(axis=-1)) < 1 + waves)
    normal = rng.normal(size=3)
    normal /= np.linalg.norm(normal)
    height = ((positions - extent * rng.uniform(0.35, 0.65)) / extent.max()) @ normal
    return np.asarray(height < waves * 0.5)


def _compute_light(rng: Generator, tissue: Tissue, labels: Labels) -> Floats:
    """Return the light [Z, Y, X] that reaches the camera."""
    shape = (labels.shape[0], labels.shape[1], labels.shape[2])
    light = _compute_emission(rng, tissue, labels, shape)
    light = gaussian_filter(light, [tissue.blur * tissue.elongation, tissue.blur, tissue.blur], truncate=3)
    if tissue.haze:
        light += np.float32(tissue.haze) * apply_wide_blur(
            light, (0.5 * tissue.diameter / tissue.flatness, 0.5 * tissue.diameter)
        )
    light += np.float32(tissue.floor)
    light *= np.clip(1 + tissue.shading * smooth_noise(rng, (1, *shape[1:]), max(shape) / 1.5), 0.2, 2)
    light *= np.linspace(1, 1 - tissue.attenuation, shape[0], dtype=np.float32)[:: rng.choice([-1, 1]), None, None]
    return np.asarray(light, np.float32)


def _compute_emission(rng: Generator, tissue: Tissue, labels: Labels, shape: Size) -> Floats:
    """Return the light [Z, Y, X] that membranes, cytoplasm and vesicles emit."""
    # Adding 1 turns the background into an object, so that the surface of the tissue has a membrane on both sides.
    depth = edt.edt(labels.astype(np.uint32) + 1, anisotropy=(tissue.flatness, 1.0, 1.0), black_border=False) - 0.5
    light = np.exp(-0.5 * (np.minimum(depth, 1e3) / np.float32(tissue.thickness)) ** 2).astype(np.float32)
    light *= np.clip(1 + tissue.unevenness * smooth_noise(rng, shape, 0.6 * tissue.diameter), 0.15, 3)
    if tissue.patchiness:
        light *= rng.lognormal(0, tissue.patchiness, int(np.max(labels)) + 1).astype(np.float32)[labels]
    if tissue.gaps:
        field = smooth_noise(rng, shape, 0.3 * tissue.diameter)
        light[field > np.quantile(field[::2, ::3, ::3], 1 - tissue.gaps)] *= np.float32(0.1)
    inner = labels > 0
    surface = edt.edt(inner, anisotropy=(tissue.flatness, 1.0, 1.0), black_border=False)
    light[(surface <= 3 * tissue.thickness) | ~inner] *= np.float32(tissue.rim)
    if tissue.cytoplasm:
        brightness = rng.lognormal(math.log(tissue.cytoplasm), 0.3, int(np.max(labels)) + 1).astype(np.float32)
        brightness[0] = 0
        grain = 1 + tissue.grain * smooth_noise(rng, shape, max(1.0, tissue.diameter / 12))
        if tissue.nucleus:
            grain[depth > tissue.nucleus * tissue.diameter] *= np.float32(0.15)
        light += brightness[labels] * np.clip(grain, 0, 3)
    if tissue.coat and not inner.all():
        distance = edt.edt(~inner, anisotropy=(tissue.flatness, 1.0, 1.0), black_border=False)
        gap = np.float32(rng.uniform(0.1, 0.5) * tissue.diameter)
        light += np.float32(tissue.coat) * np.exp(-0.5 * ((distance - gap) / np.float32(tissue.thickness)) ** 2)
    indices = np.flatnonzero(inner)
    count = int(tissue.specks * np.max(labels))
    if count and indices.size:
        light.ravel()[rng.choice(indices, count)] += rng.uniform(0.5, 3, count).astype(np.float32)
    return np.asarray(light, np.float32)
