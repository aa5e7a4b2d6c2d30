"""Synthetic stacks of fluorescent nuclei with labels, similar to microscope images.

The simulation follows the formation of a real image: shapes, chromatin, stray light, the point spread function, uneven
illumination and attenuation with depth, photon noise, and the camera. All random numbers come from one
`numpy.random.Generator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.spatial.transform import Rotation

from scripts.recipes.optics import Floats, apply_wide_blur, expose, log_uniform, smooth_noise
from service.core.quantities import Size

Labels = NDArray[np.uint16]

# Range of brightness at the outline along z, relative to the nucleus. It is below 0.5, because annotators stretch the
# contrast and therefore draw outlines outside of the half maximum.
RIM_LEVELS = (0.15, 0.35)


@dataclass(frozen=True)
class Scene:
    """Parameters of a stack of nuclei.

    Lengths are in pixels of the xy plane. Intensities are relative to a nucleus of average brightness, which is 1.

    diameter          mean diameter of a nucleus
    anisotropy        plane spacing relative to the pixel size; in voxels, nuclei are shorter along z by this factor
    fill              target fraction of the volume that nuclei cover
    clustering        probability that a nucleus is placed next to another one
    contact           minimum distance between the centers of two nuclei, relative to the sum of their radii
    spread            standard deviation of the logarithm of the brightness of nuclei
    texture           contrast of the chromatin texture
    margin            radius of the outline relative to the visible radius; above 1, because annotators draw outside of
                      the half maximum
    blur              standard deviation of the point spread function in y and x
    elongation        standard deviation of the point spread function along z, in voxels, relative to `blur`
    haze              intensity of the stray light of nuclei
    floor             intensity of the uniform background
    glow              intensity of out-of-focus light above and below each nucleus
    ghosts            number of dim out-of-focus patches, which are not labeled
    shading           strength of uneven illumination
    attenuation       fraction of the light that is lost with depth, from the first plane to the last or vice versa
    photons           expected number of photons of a nucleus of brightness 1
    read_noise        standard deviation of the camera noise, in photons
    bits              bit depth of the camera, 8 or 16
    saturation        fraction of the voxels that are clipped
    debris            number of bright specks
    rim_level         brightness at the outline along z relative to the nucleus, because annotators follow the blur
                      between planes; 0 ends labels at the true surface
    mitotic_fraction  fraction of nuclei in mitosis, drawn as bright plates
    bleed             intensity of bleed-through from another channel, which stains the cell around each nucleus
    walls             number of thin bright shells that resemble autofluorescent cell walls
    envelope          thickness (a standard deviation) of a stained nuclear envelope, relative to the radius; 0 for
                      filled nuclei
    tissue            brightness of the surrounding tissue, which is uneven and textured
    fragments         number of dead cells, drawn as groups of bright fragments that are not labeled
    subplanes         planes that are simulated per plane of the stack; the others are discarded. Above 1, nuclei of few
                      planes have realistic cross sections
    mask_level        if not 0, voxels are set to 0 where the smoothed light is below this fraction of a typical nucleus
    """

    diameter: float
    anisotropy: float
    fill: float
    clustering: float
    contact: float
    spread: float
    texture: float
    margin: float
    blur: float
    elongation: float
    haze: float
    floor: float
    glow: float
    ghosts: int
    shading: float
    attenuation: float
    photons: float
    read_noise: float
    bits: int
    saturation: float
    debris: int
    rim_level: float = 0.0
    mitotic_fraction: float = 0.0
    bleed: float = 0.0
    walls: int = 0
    envelope: float = 0.0
    tissue: float = 0.0
    fragments: int = 0
    subplanes: int = 1
    mask_level: float = 0.0

    @classmethod
    def draw(cls, rng: Generator) -> Self:
        """Draw a scene from the range of stacks that the model `nuclei` is designed for."""
        anisotropy = float(rng.choice(np.array([1.0, rng.uniform(1, 2.5), rng.uniform(2, 6)]), p=[0.3, 0.5, 0.2]))
        dense = rng.random() < 0.55
        elongation = float(rng.uniform(1.0, 4.5))
        return cls(
            diameter=log_uniform(rng, max(8.0, 4.0 * anisotropy), 40.0),
            anisotropy=anisotropy,
            fill=float(rng.uniform(0.2, 0.65) if dense else log_uniform(rng, 0.01, 0.2)),
            clustering=float(rng.choice([0.2, 0.6, 0.9])),
            contact=float(rng.uniform(0.72, 1.0)),
            spread=float(rng.choice([0.15, 0.35, 0.8], p=[0.4, 0.35, 0.25])),
            texture=float(rng.uniform(0.0, 0.6)),
            margin=float(rng.uniform(1.0, 1.06 if dense else 1.15)),
            blur=log_uniform(rng, 0.4, 1.8),
            elongation=elongation / anisotropy,
            haze=float(rng.choice([0.0, rng.uniform(0.05, 0.5)])),
            floor=log_uniform(rng, 0.01, 0.6),
            glow=float(rng.choice([0.0, rng.uniform(0.02, 0.4)])),
            ghosts=int(rng.integers(1, 16) if rng.random() < 0.5 else 0),
            shading=float(rng.uniform(0, 0.5)),
            attenuation=float(rng.choice([0.0, rng.uniform(0.1, 0.8)])),
            photons=log_uniform(rng, 2.5, 400),
            read_noise=float(rng.uniform(0.2, 3.0)),
            bits=int(rng.choice([8, 16])),
            saturation=float(rng.choice([0.0, rng.uniform(0.0, 0.02)], p=[0.6, 0.4])),
            debris=int(rng.integers(1, 12) if rng.random() < 0.5 else 0),
            rim_level=0.0 if dense else float(rng.uniform(*RIM_LEVELS)),
            mitotic_fraction=float(rng.choice([0.0, rng.uniform(0.02, 0.15)])),
            bleed=float(rng.choice([0.0, rng.uniform(0.02, 0.25)], p=[0.7, 0.3])),
            walls=int(rng.integers(1, 4) if rng.random() < 0.2 else 0),
        )

    @classmethod
    def draw_blurred(cls, rng: Generator) -> Self:
        """Draw a scene of sparse nuclei that are strongly blurred along z, as with a low numerical aperture.

        The standard deviation of the blur along z is 10 to 33 % of the diameter of a nucleus.
        """
        scene = cls.draw(rng)
        anisotropy = float(rng.uniform(1, 2))
        diameter = log_uniform(rng, 10.0 * anisotropy, 36.0)
        blur = log_uniform(rng, 0.4, 1.5)
        blur_z = float(rng.uniform(0.1, 0.33)) * diameter / anisotropy
        return replace(
            scene,
            diameter=diameter,
            anisotropy=anisotropy,
            fill=log_uniform(rng, 0.02, 0.25),
            clustering=float(rng.choice([0.2, 0.6])),
            contact=float(rng.uniform(0.9, 1.1)),
            blur=blur,
            elongation=blur_z / blur,
            rim_level=float(rng.uniform(*RIM_LEVELS)),
        )

    @classmethod
    def draw_hard(cls, rng: Generator) -> Self:
        """Draw a scene that is difficult for a model trained only on typical nuclei.

        There are four kinds with equal probability: spots 3 to 8 voxels wide, stained nuclear envelopes, uneven tissue,
        and faint nuclei in noise.
        """
        scene = cls.draw(rng)
        match int(rng.integers(4)):
            case 0:
                return scene._with_spots(rng)
            case 1:
                return scene._with_envelopes(rng)
            case 2:
                return replace(scene, tissue=log_uniform(rng, 0.05, 0.8), shading=float(rng.uniform(0.2, 0.6)))
            case _:
                return scene._with_noise(rng)

    @classmethod
    def draw_spots(cls, rng: Generator) -> Self:
        """Draw a scene of spots 3 to 8 voxels wide."""
        return cls.draw(rng)._with_spots(rng)

    @classmethod
    def draw_flat(cls, rng: Generator) -> Self:
        """Draw a scene of nuclei that are 1 to 5 planes deep, as in screens, where planes are far apart.

        Nuclei are crowded and appear in adjacent planes, too, because of out-of-focus light. Dead cells lie between
        them. In a third of the stacks, the background is set to zero, as by programs that crop organoids.
        """
        scene = cls.draw(rng)
        diameter = log_uniform(rng, 11.0, 42.0)
        blur = log_uniform(rng, 0.4, 2.5)
        return replace(
            scene,
            diameter=diameter,
            anisotropy=float(np.clip(diameter / log_uniform(rng, 1.0, 5.0), 2.5, 14.0)),
            fill=log_uniform(rng, 0.03, 0.5),
            clustering=float(rng.choice([0.2, 0.6, 0.95], p=[0.2, 0.3, 0.5])),
            contact=float(rng.uniform(0.85, 1.05)),
            spread=float(rng.choice([0.2, 0.4, 0.6])),
            margin=float(rng.uniform(1.0, 1.06)),
            blur=blur,
            elongation=log_uniform(rng, 0.3, 1.5) / blur,
            glow=float(rng.choice([0.0, rng.uniform(0.05, 0.6)], p=[0.25, 0.75])),
            floor=log_uniform(rng, 0.003, 0.4),
            photons=log_uniform(rng, 4.0, 2000),
            rim_level=float(rng.choice([0.0, rng.uniform(0.4, 0.7)], p=[0.8, 0.2])),
            fragments=int(rng.integers(1, 12) if rng.random() < 0.5 else 0),
            subplanes=int(rng.integers(2, 5)),
            mask_level=log_uniform(rng, 0.03, 0.25) if rng.random() < 0.35 else 0.0,
        )

    @classmethod
    def draw_empty(cls, rng: Generator) -> Self:
        """Draw a scene without nuclei: only noise and, with probability 0.5, uneven tissue."""
        tissue = log_uniform(rng, 0.05, 0.8) if rng.random() < 0.5 else 0.0
        return replace(cls.draw(rng), fill=0.0, ghosts=0, floor=float(rng.uniform(0.1, 0.6)), tissue=tissue)

    def _with_spots(self, rng: Generator) -> Self:
        """Return a copy with very small nuclei, as in light-sheet images of a whole brain."""
        anisotropy = float(rng.uniform(1, 1.5))
        return replace(
            self,
            diameter=log_uniform(rng, 3.0 * anisotropy, 8.0),
            anisotropy=anisotropy,
            fill=log_uniform(rng, 0.005, 0.12),
            clustering=0.3,
            texture=0.0,
            blur=log_uniform(rng, 0.4, 1.0),
            elongation=float(rng.uniform(1, 2)) / anisotropy,
            haze=0.0,
            glow=0.0,
            ghosts=0,
            spread=float(rng.uniform(0.2, 0.8)),
            photons=log_uniform(rng, 8, 200),
            tissue=float(rng.choice([0.0, log_uniform(rng, 0.03, 0.4)])),
            debris=0,
            rim_level=0.0,
            walls=0,
        )

    def _with_envelopes(self, rng: Generator) -> Self:
        """Return a copy with nuclei that have a stained envelope and a dim interior."""
        anisotropy = min(self.anisotropy, 3.0)
        return replace(
            self,
            diameter=log_uniform(rng, max(14.0, 6.0 * anisotropy), 44.0),
            anisotropy=anisotropy,
            fill=float(rng.uniform(0.1, 0.5)),
            envelope=log_uniform(rng, 0.06, 0.16),
            margin=1.0,
            rim_level=0.0,
            blur=log_uniform(rng, 0.4, 1.2),
            photons=log_uniform(rng, 5, 200),
            mitotic_fraction=0.0,
        )

    def _with_noise(self, rng: Generator) -> Self:
        """Return a copy with few photons: the noise is between a third and all of the contrast of a nucleus."""
        photons = log_uniform(rng, 4.0, 20.0)
        return replace(self, photons=photons, floor=float(rng.uniform(0.1, 0.6)), read_noise=float(rng.uniform(0.5, 2)))


# Typical nuclei. Use `dataclasses.replace` to derive other scenes.
TYPICAL_NUCLEI = Scene(
    diameter=20,
    anisotropy=1,
    fill=0.12,
    clustering=0.6,
    contact=0.9,
    spread=0.3,
    texture=0.4,
    margin=1.05,
    blur=0.9,
    elongation=1.5,
    haze=0.1,
    floor=0.1,
    glow=0.0,
    ghosts=0,
    shading=0.1,
    attenuation=0.1,
    photons=80,
    read_noise=1.5,
    bits=16,
    saturation=0.0,
    debris=0,
)

# Nuclei of an early embryo: few photons, blurred along z, with different brightness.
EMBRYO = replace(
    TYPICAL_NUCLEI,
    diameter=18,
    fill=0.05,
    contact=1.0,
    spread=0.5,
    elongation=2.5,
    photons=12,
    floor=0.15,
    rim_level=0.2,
)


class _Canvas:
    """Volumes that nuclei are drawn into, all [Z, Y, X], and the positions of the nuclei.

    labels            label of each voxel; 0 is the background
    relative_radius   position of each voxel in its nucleus: 0 at the center, 1 at the outline
    light             emitted light
    centers, radii    positions and radii of the nuclei in voxels, [capacity, 3]; the first `count` rows are in use
    """

    def __init__(self, shape: Size, capacity: int) -> None:
        self.labels: Labels = np.zeros(shape, np.uint16)
        self.relative_radius: Floats = np.ones(shape, np.float32)
        self.light: Floats = np.zeros(shape, np.float32)
        self.centers: Floats = np.zeros((capacity, 3), np.float32)
        self.radii: Floats = np.ones((capacity, 3), np.float32)
        self.count = 0


def synthesize(rng: Generator, shape: Size, scene: Scene | None = None) -> tuple[NDArray[Any], Labels]:
    """Generate a stack of nuclei.

    Returns the image as uint8 or uint16 and the labels as uint16, both [Z, Y, X]. Label 0 is the background.
    """
    scene = scene if scene is not None else Scene.draw(rng)
    if scene.subplanes > 1:
        return _synthesize_flat(rng, shape, scene)
    canvas = _place_nuclei(rng, shape, scene)
    light = _form_image(rng, scene, canvas)
    return _expose(rng, scene, canvas.labels, light), canvas.labels


def _synthesize_flat(rng: Generator, shape: Size, scene: Scene) -> tuple[NDArray[Any], Labels]:
    """Generate a stack of flat nuclei. Emitted light is blurred at a finer plane spacing than that of the stack."""
    step = scene.subplanes
    fine = replace(scene, anisotropy=scene.anisotropy / step, elongation=scene.elongation * step, rim_level=0.0)
    canvas = _place_nuclei(rng, (shape[0] * step, *shape[1:]), fine)
    light = _form_image(rng, fine, canvas)[step // 2 :: step]
    labels = np.ascontiguousarray(canvas.labels[step // 2 :: step])
    if scene.rim_level:
        _extend_outlines(scene, labels, light)
    return _expose(rng, scene, labels, np.ascontiguousarray(light)), labels


def _place_nuclei(rng: Generator, shape: Size, scene: Scene) -> _Canvas:
    """Draw the nuclei of a scene."""
    target_voxels = scene.fill * math.prod(shape)
    nucleus_voxels = math.pi / 6 * scene.diameter**3 / scene.anisotropy
    max_nuclei = 2 * math.ceil(target_voxels / nucleus_voxels) + 2 if target_voxels else 0
    canvas = _Canvas(shape, max_nuclei)
    for _ in range(max_nuclei):
        if canvas.count and np.count_nonzero(canvas.labels) >= target_voxels:
            break
        _place_nucleus(rng, scene, canvas)
    return canvas


def synthesize_flat(rng: Generator, shape: Size) -> tuple[NDArray[Any], Labels]:
    """Generate a stack of nuclei that are only a few planes deep; returns the image and the labels."""
    return synthesize(rng, shape, Scene.draw_flat(rng))


def synthesize_spots(rng: Generator, shape: Size) -> tuple[NDArray[Any], Labels]:
    """Generate a stack of spots 3 to 8 voxels wide; returns the image and the labels."""
    return synthesize(rng, shape, Scene.draw_spots(rng))


def synthesize_varied(rng: Generator, shape: Size) -> tuple[NDArray[Any], Labels]:
    """Generate a stack with typical, blurred, difficult or no nuclei; returns the image and the labels."""
    kind = int(rng.choice(4, p=(0.43, 0.17, 0.3, 0.1)))
    return synthesize(rng, shape, (Scene.draw, Scene.draw_blurred, Scene.draw_hard, Scene.draw_empty)[kind](rng))


def _place_nucleus(rng: Generator, scene: Scene, canvas: _Canvas) -> None:
    """Place one nucleus at a free position. Gives up after four attempts."""
    squash = np.array([1 / scene.anisotropy, 1, 1], np.float32)
    radii = np.float32(scene.diameter / 2 * rng.lognormal(0, 0.12)) * squash
    for _ in range(4):
        center = _propose_center(rng, scene, canvas, radii)
        if _is_free(scene, canvas, center, radii):
            _draw_nucleus(rng, scene, canvas, center, radii)
            return


def _propose_center(rng: Generator, scene: Scene, canvas: _Canvas, radii: Floats) -> Floats:
    """Draw a position for a nucleus, next to another one with probability `clustering`."""
    shape = np.array(canvas.labels.shape)
    if canvas.count and rng.random() < scene.clustering:
        other = int(rng.integers(canvas.count))
        direction = rng.normal(size=3)
        direction /= np.linalg.norm(direction)
        reach = scene.contact * rng.uniform(1.0, 1.15)
        center = canvas.centers[other] + direction * reach * (canvas.radii[other] + radii)
        if np.all((center > -radii) & (center < shape + radii)):
            return np.asarray(center, np.float32)
    return np.asarray(rng.uniform(-0.4 * radii, shape + 0.4 * radii), np.float32)


def _is_free(scene: Scene, canvas: _Canvas, center: Floats, radii: Floats) -> bool:
    """Return whether a nucleus at this position keeps the minimum distance from all others."""
    distances = (canvas.centers[: canvas.count] - center) / (canvas.radii[: canvas.count] + radii)
    return not np.any(np.einsum("nd,nd->n", distances, distances) < scene.contact**2)


def _draw_nucleus(rng: Generator, scene: Scene, canvas: _Canvas, center: Floats, radii: Floats) -> None:
    """Draw one nucleus. Voxels that two nuclei cover are assigned to the one with the smaller relative radius."""
    shape = canvas.labels.shape
    low = np.maximum(np.floor(center - 1.7 * radii), 0).astype(int)
    high = np.minimum(np.ceil(center + 1.7 * radii) + 1, shape).astype(int)
    if np.any(high <= low):
        return
    box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    axes = [np.arange(a, b) for a, b in zip(low, high, strict=True)]
    surface = _Surface.draw(rng)
    is_mitotic = scene.mitotic_fraction > 0 and rng.random() < scene.mitotic_fraction
    if is_mitotic:
        surface = surface.flatten(rng)
    relative_radius = surface.relative_radius(axes, center, radii)
    is_nearest = relative_radius < canvas.relative_radius[box]
    if not is_nearest.any():
        return
    canvas.centers[canvas.count] = center
    canvas.radii[canvas.count] = radii
    canvas.count += 1
    canvas.labels[box][is_nearest] = canvas.count
    canvas.relative_radius[box][is_nearest] = relative_radius[is_nearest]
    light = _compute_emission(rng, scene, relative_radius)
    if is_mitotic:
        light *= np.float32(rng.uniform(1.2, 2.5))
    canvas.light[box][is_nearest] = light[is_nearest]


@dataclass(frozen=True)
class _Surface:
    """A rotated ellipsoid with bumps and the volume of the unit ball.

    rotation   axes of the ellipsoid as rows, [3, 3]
    stretch    radii along these axes, [3]
    bumps      coefficients of the second-order and third-order terms, [6]
    """

    rotation: Floats
    stretch: Floats
    bumps: Floats

    @classmethod
    def draw(cls, rng: Generator) -> Self:
        rotation = Rotation.random(random_state=rng).as_matrix().astype(np.float32)
        stretch = np.exp(rng.normal(0, 0.18, 3)).astype(np.float32)
        stretch = np.clip(stretch / np.cbrt(np.prod(stretch)), 0.65, 1.5)
        return cls(rotation, stretch, rng.normal(0, 0.07, 6).astype(np.float32))

    def flatten(self, rng: Generator) -> Self:
        """Return a plate of about half the volume, like condensed chromosomes in metaphase."""
        plate = np.array([rng.uniform(0.35, 0.55), rng.uniform(0.9, 1.1), rng.uniform(0.9, 1.1)], np.float32)
        return replace(self, stretch=plate)

    def relative_radius(self, axes: list[NDArray[Any]], center: Floats, radii: Floats) -> Floats:
        """Return the distance of voxels [z, y, x] from the center, relative to the outline in the same direction.

        The value is below 1 inside the surface. `axes` are the voxel indices along z, y and x.
        """
        z, y, x = (
            ((axis - c) / r).astype(np.float32).reshape([-1 if i == n else 1 for i in range(3)])
            for n, (axis, c, r) in enumerate(zip(axes, center, radii, strict=True))
        )
        u, v, w = (
            (row[0] * z + row[1] * y + row[2] * x) / s for row, s in zip(self.rotation, self.stretch, strict=True)
        )
        radius = np.sqrt(u * u + v * v + w * w) + np.float32(1e-6)
        bumps = self.bumps
        surface = (bumps[0] * u * v + bumps[1] * v * w + bumps[2] * w * u) / radius**2
        surface += (bumps[3] * u * u * v + bumps[4] * v * v * w + bumps[5] * w * w * u) / radius**3
        return np.asarray(radius / (1 + 2 * surface), np.float32)


def _compute_emission(rng: Generator, scene: Scene, relative_radius: Floats) -> Floats:
    """Return the light [z, y, x] that a nucleus emits, with a radial gradient, chromatin texture and dark nucleoli."""
    brightness = rng.lognormal(0, scene.spread)
    if scene.envelope:
        profile = np.exp(-0.5 * ((relative_radius - np.float32(0.92)) / np.float32(scene.envelope)) ** 2)
        grain = np.clip(1 + scene.texture * smooth_noise(rng, relative_radius.shape, scene.diameter / 6), 0.1, 3)
        return np.asarray(
            np.where(relative_radius <= 1, brightness * (profile + rng.uniform(0, 0.25)) * grain, 0), np.float32
        )
    rim = rng.uniform(-0.45, 0.35)
    light = np.float32(brightness) * (1 + np.float32(rim) * relative_radius**2)
    light *= np.clip(1 + scene.texture * smooth_noise(rng, relative_radius.shape, scene.diameter / 9), 0.1, 3)
    if rng.random() < 0.3:
        light *= 1 - 0.6 * (smooth_noise(rng, relative_radius.shape, scene.diameter / 6) > 1.3)
    light[relative_radius * np.float32(scene.margin) > 1] = 0
    return light


def _form_image(rng: Generator, scene: Scene, canvas: _Canvas) -> Floats:
    """Simulate the light [Z, Y, X] of nuclei, debris and stray light that reaches the camera, without the background.

    Outlines are extended along z in place if the scene has a `rim_level`.
    """
    light = canvas.light
    _add_debris(rng, scene, light)
    _add_fragments(rng, scene, light)
    _add_ghosts(rng, scene, light)
    _add_walls(rng, scene, light)
    _add_bleed(rng, scene, canvas)
    sigma = np.array([scene.blur * scene.elongation, scene.blur, scene.blur])
    light = gaussian_filter(light, sigma, truncate=3)
    if scene.rim_level:
        _extend_outlines(scene, canvas.labels, light)
    if scene.glow:
        light += np.float32(scene.glow) * apply_wide_blur(
            light, (scene.diameter / scene.anisotropy, scene.diameter / 5)
        )
    if scene.haze:
        light += np.float32(scene.haze) * apply_wide_blur(
            light, (0.8 * scene.diameter / scene.anisotropy, 0.8 * scene.diameter)
        )
    return np.asarray(light)


def _expose(rng: Generator, scene: Scene, labels: Labels, light: Floats) -> NDArray[Any]:
    """Add the background to the light [Z, Y, X] and simulate the camera; returns uint8 or uint16.

    If the scene has a `mask_level`, dark voxels of the image and the labels are set to 0.
    """
    shape = light.shape
    visible = _find_visible_voxels(rng, scene, light) if scene.mask_level else None
    if scene.tissue:
        gradient = smooth_noise(rng, shape, max(shape) / 2)
        grain = smooth_noise(rng, shape, max(2.0, scene.diameter / 5))
        light += np.float32(scene.tissue) * np.clip(1 + gradient + np.float32(0.3) * grain, 0, None)
    light += np.float32(scene.floor) * (1 + np.float32(0.3) * smooth_noise(rng, shape, max(shape) / 2))
    light *= np.clip(1 + scene.shading * smooth_noise(rng, (1, *shape[1:]), max(shape) / 1.5), 0.2, 2)
    light *= np.linspace(1, 1 - scene.attenuation, shape[0], dtype=np.float32)[:: rng.choice([-1, 1]), None, None]
    image = expose(rng, scene, np.maximum(light, 0))
    if visible is not None:
        image[~visible] = 0
        labels[~visible] = 0
    return image


def _find_visible_voxels(rng: Generator, scene: Scene, light: Floats) -> NDArray[np.bool_]:
    """Return a mask of the voxels [Z, Y, X] near light. Half of the masks consist of blocks in the plane."""
    smooth = gaussian_filter(light, [0.5, scene.diameter / 5, scene.diameter / 5], truncate=2.5)
    is_visible: NDArray[np.bool_] = smooth > scene.mask_level
    if rng.random() < 0.5:
        edge = int(rng.integers(3, 13))
        rows, columns = (
            np.minimum(np.arange(length) // edge * edge + edge // 2, length - 1) for length in light.shape[1:]
        )
        is_visible = is_visible[:, rows[:, None], columns]
    return is_visible


def _extend_outlines(scene: Scene, labels: Labels, light: Floats) -> None:
    """Extend labels along z, in place, until the light is dimmer than `rim_level` times the light in the nucleus."""
    owners = labels.ravel()
    total = np.bincount(owners, light.ravel())
    level = np.float32(scene.rim_level) * np.bincount(owners, light.ravel() ** 2) / np.maximum(total, 1e-9)
    for _ in range(math.ceil(1.2 * scene.blur * scene.elongation)):
        for near, far in ((slice(None, -1), slice(1, None)), (slice(1, None), slice(None, -1))):
            inner, outer = labels[near], labels[far]
            is_bright = (outer == 0) & (inner > 0) & (light[far] > level[inner])
            outer[is_bright] = inner[is_bright]


def _add_ghosts(rng: Generator, scene: Scene, light: Floats) -> None:
    """Add smooth dim patches, such as out-of-focus nuclei, polar bodies or autofluorescence."""
    axes = [np.arange(edge, dtype=np.float32) for edge in light.shape]
    for _ in range(scene.ghosts):
        width = scene.diameter * rng.uniform(0.15, 0.5)
        z, y, x = (
            np.exp(-0.5 * ((axis - rng.uniform(0, len(axis))) / w) ** 2).astype(np.float32)
            for axis, w in zip(axes, (width * rng.uniform(1, 2) / scene.anisotropy, width, width), strict=True)
        )
        light += np.float32(log_uniform(rng, 0.02, 0.25)) * z[:, None, None] * y[:, None] * x


def _add_debris(rng: Generator, scene: Scene, light: Floats) -> None:
    """Add bright specks that are not nuclei."""
    for _ in range(scene.debris):
        z, y, x = (int(rng.integers(0, edge)) for edge in light.shape)
        size = int(rng.integers(1, 3))
        light[z : z + 1, y : y + size, x : x + size] += np.float32(rng.uniform(0.5, 6))


def _add_fragments(rng: Generator, scene: Scene, light: Floats) -> None:
    """Add dead cells: groups of bright fragments, each group about as wide as a nucleus."""
    for _ in range(scene.fragments):
        center = rng.uniform(0, light.shape)
        brightness = log_uniform(rng, 0.6, 4)
        for _ in range(int(rng.integers(2, 9))):
            radius = scene.diameter * rng.uniform(0.06, 0.2)
            radii = np.array([max(radius / scene.anisotropy, 0.6), radius, radius])
            position = center + rng.normal(0, 0.35 * scene.diameter, 3) / [scene.anisotropy, 1, 1]
            low = np.maximum(np.floor(position - radii), 0).astype(int)
            high = np.minimum(np.ceil(position + radii) + 1, light.shape).astype(int)
            if np.any(high <= low):
                continue
            z, y, x = (((np.arange(a, b) - p) / r) ** 2 for a, b, p, r in zip(low, high, position, radii, strict=True))
            box = light[low[0] : high[0], low[1] : high[1], low[2] : high[2]]
            box[z[:, None, None] + y[:, None] + x < 1] += np.float32(brightness * rng.uniform(0.6, 1.4))


def _add_walls(rng: Generator, scene: Scene, light: Floats) -> None:
    """Add parts of large bright shells that are about two voxels thick in the plane."""
    for _ in range(scene.walls):
        radius = scene.diameter * rng.uniform(1.5, 5)
        z, y, x = (
            ((np.arange(edge, dtype=np.float32) - np.float32(rng.uniform(-radius, edge + radius))) * np.float32(step))
            ** 2
            for edge, step in zip(light.shape, (scene.anisotropy, 1, 1), strict=True)
        )
        distance = np.sqrt(z[:, None, None] + y[:, None] + x) - np.float32(radius)
        light += np.float32(log_uniform(rng, 0.2, 4)) * np.exp(-(distance**2) / np.float32(rng.uniform(1, 4)))


def _add_bleed(rng: Generator, scene: Scene, canvas: _Canvas) -> None:
    """Add bleed-through of another channel, which stains the cell around each nucleus."""
    if not scene.bleed:
        return
    cells = apply_wide_blur(
        (canvas.labels > 0).astype(np.float32), (0.6 * scene.diameter / scene.anisotropy, 0.6 * scene.diameter)
    )
    grain = np.clip(1 + 0.7 * smooth_noise(rng, canvas.labels.shape, scene.diameter / 5), 0, 4)
    canvas.light += np.float32(2 * scene.bleed) * cells * grain
