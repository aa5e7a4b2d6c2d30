"""Synthetic fluorescent nuclei: labelled stacks that look like what a microscope records.

A stack is made in the order in which light makes it: shapes, chromatin, stray light, the point spread function, uneven
illumination and attenuation with depth, photons, the camera. All randomness comes from one `numpy.random.Generator`.
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

from scripts.recipes.optics import Floats, blur_widely, expose, log_uniform, smooth_noise
from service.core.quantities import Size

Labels = NDArray[np.uint16]

# Annotators stretch the contrast, and so see a nucleus further than to half of its brightness.
RIM_LEVELS = (0.15, 0.35)


@dataclass(frozen=True)
class Scene:
    """Parameters of a stack; lengths in voxels along y and x, intensities relative to a nucleus of 1.

    diameter        mean diameter of a nucleus; along z it is shorter by `anisotropy`
    fill            part of the volume that nuclei try to cover
    clustering      probability that a nucleus is put against another one
    contact         how close two nuclei may come: distance of centres over the sum of their radii
    spread          standard deviation of the logarithm of the brightness between nuclei
    texture         depth of the chromatin texture
    margin          outline over visible radius: annotators draw outside of the half maximum
    blur            standard deviation of the point spread function in y and x; `elongation` times as much along z
    haze, floor     stray light of the nuclei; even background
    glow            part of the light that is spread along the optical axis, above and below each nucleus
    ghosts          number of dim patches that are not in focus and that nobody would outline
    shading         depth of uneven illumination; `attenuation` is what is lost from the first plane to the last
    photons         expected photons of a nucleus of brightness 1
    read_noise      standard deviation of the camera's noise, in photons
    bits            8 or 16; `saturation` is the part of the brightest voxels that clip
    debris          number of bright specks
    rim_level       brightness at the outline along z over that of the nucleus, as annotators follow the blur between
                    planes; 0: outlines are where the nucleus ends
    dividing        share of nuclei in division, as bright plates
    bleed           light of another channel, a grained body around each nucleus
    walls           number of thin bright shells, as of autofluorescent cell walls
    envelope        thickness of a stained nuclear envelope over the radius (a standard deviation); 0: filled nuclei
    tissue          brightness of the tissue around, which varies over the stack and is grained
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
    dividing: float = 0.0
    bleed: float = 0.0
    walls: int = 0
    envelope: float = 0.0
    tissue: float = 0.0

    @classmethod
    def draw(cls, rng: Generator) -> Self:
        """Draw a scene from the range of stacks that the model is meant for."""
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
            dividing=float(rng.choice([0.0, rng.uniform(0.02, 0.15)])),
            bleed=float(rng.choice([0.0, rng.uniform(0.02, 0.25)], p=[0.7, 0.3])),
            walls=int(rng.integers(1, 4) if rng.random() < 0.2 else 0),
        )

    @classmethod
    def draw_blurred(cls, rng: Generator) -> Self:
        """Draw a scene of sparse nuclei that a microscope of low aperture blurs along z by up to a third of them."""
        scene = cls.draw(rng)
        anisotropy = float(rng.uniform(1, 2))
        diameter = log_uniform(rng, 10.0 * anisotropy, 36.0)
        blur = log_uniform(rng, 0.4, 1.5)
        along = float(rng.uniform(0.1, 0.33)) * diameter / anisotropy
        return replace(
            scene,
            diameter=diameter,
            anisotropy=anisotropy,
            fill=log_uniform(rng, 0.02, 0.25),
            clustering=float(rng.choice([0.2, 0.6])),
            contact=float(rng.uniform(0.9, 1.1)),
            blur=blur,
            elongation=along / blur,
            rim_level=float(rng.uniform(*RIM_LEVELS)),
        )

    @classmethod
    def draw_hard(cls, rng: Generator) -> Self:
        """Draw a scene of one of the kinds that a model of usual nuclei misses, each as often as the others.

        These are spots 3 to 8 voxels wide, stained envelopes, uneven tissue, and faint nuclei in noise.
        """
        scene = cls.draw(rng)
        match int(rng.integers(4)):
            case 0:
                return scene._as_spots(rng)
            case 1:
                return scene._as_envelopes(rng)
            case 2:
                return replace(scene, tissue=log_uniform(rng, 0.05, 0.8), shading=float(rng.uniform(0.2, 0.6)))
            case _:
                return scene._in_noise(rng)

    @classmethod
    def draw_empty(cls, rng: Generator) -> Self:
        """Draw a scene of noise and, every second time, uneven tissue, without any nucleus."""
        tissue = log_uniform(rng, 0.05, 0.8) if rng.random() < 0.5 else 0.0
        return replace(cls.draw(rng), fill=0.0, ghosts=0, floor=float(rng.uniform(0.1, 0.6)), tissue=tissue)

    def _as_spots(self, rng: Generator) -> Self:
        """Return the scene with nuclei that are as small as those of a light sheet's whole brain."""
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

    def _as_envelopes(self, rng: Generator) -> Self:
        """Return the scene with nuclei whose envelope is stained, and little inside."""
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
            dividing=0.0,
        )

    def _in_noise(self, rng: Generator) -> Self:
        """Return the scene so dim that its noise is a third to all of what a nucleus stands out by."""
        photons = log_uniform(rng, 4.0, 20.0)
        return replace(self, photons=photons, floor=float(rng.uniform(0.1, 0.6)), read_noise=float(rng.uniform(0.5, 2)))


# Nuclei as most recordings have them, of which `dataclasses.replace` makes others.
PLAIN = Scene(
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

# As nuclei of an early embryo are recorded: few photons, blurred along z, and unlike in brightness.
EMBRYO = replace(
    PLAIN, diameter=18, fill=0.05, contact=1.0, spread=0.5, elongation=2.5, photons=12, floor=0.15, rim_level=0.2
)


class _Canvas:
    """Volumes that are drawn into: labels, gauge of the owner of each voxel (0 centre, 1 outline), emitted light.

    centres, radii   [capacity, 3], of which the first `count` rows are in use
    """

    def __init__(self, shape: Size, capacity: int) -> None:
        self.labels: Labels = np.zeros(shape, np.uint16)
        self.gauge: Floats = np.ones(shape, np.float32)
        self.light: Floats = np.zeros(shape, np.float32)
        self.centres: Floats = np.zeros((capacity, 3), np.float32)
        self.radii: Floats = np.ones((capacity, 3), np.float32)
        self.count = 0


def synthesise(rng: Generator, shape: Size, scene: Scene | None = None) -> tuple[NDArray[Any], Labels]:
    """Make a stack and its truth: image [Z, Y, X] uint8 or uint16, labels [Z, Y, X] uint16 with 0 for background."""
    scene = scene if scene is not None else Scene.draw(rng)
    goal = scene.fill * math.prod(shape)
    volume_of_one = math.pi / 6 * scene.diameter**3 / scene.anisotropy
    tries = 2 * math.ceil(goal / volume_of_one) + 2 if goal else 0
    canvas = _Canvas(shape, tries)
    for _ in range(tries):
        if canvas.count and np.count_nonzero(canvas.labels) >= goal:
            break
        _place(rng, scene, canvas)
    return _record(rng, scene, canvas), canvas.labels


def synthesise_varied(rng: Generator, shape: Size) -> tuple[NDArray[Any], Labels]:
    """Make a stack of usual nuclei, nuclei blurred along z, a hard kind or none; returns what `synthesise` returns."""
    kind = int(rng.choice(4, p=(0.43, 0.17, 0.3, 0.1)))
    return synthesise(rng, shape, (Scene.draw, Scene.draw_blurred, Scene.draw_hard, Scene.draw_empty)[kind](rng))


def _place(rng: Generator, scene: Scene, canvas: _Canvas) -> None:
    """Draw one nucleus where it fits; gives up after a few tries."""
    squash = np.array([1 / scene.anisotropy, 1, 1], np.float32)
    radii = np.float32(scene.diameter / 2 * rng.lognormal(0, 0.12)) * squash
    for _ in range(4):
        centre = _propose(rng, scene, canvas, radii)
        if _is_free(scene, canvas, centre, radii):
            _draw_nucleus(rng, scene, canvas, centre, radii)
            return


def _propose(rng: Generator, scene: Scene, canvas: _Canvas, radii: Floats) -> Floats:
    shape = np.array(canvas.labels.shape)
    if canvas.count and rng.random() < scene.clustering:
        other = int(rng.integers(canvas.count))
        direction = rng.normal(size=3)
        direction /= np.linalg.norm(direction)
        reach = scene.contact * rng.uniform(1.0, 1.15)
        centre = canvas.centres[other] + direction * reach * (canvas.radii[other] + radii)
        if np.all((centre > -radii) & (centre < shape + radii)):
            return np.asarray(centre, np.float32)
    return np.asarray(rng.uniform(-0.4 * radii, shape + 0.4 * radii), np.float32)


def _is_free(scene: Scene, canvas: _Canvas, centre: Floats, radii: Floats) -> bool:
    apart = (canvas.centres[: canvas.count] - centre) / (canvas.radii[: canvas.count] + radii)
    return not np.any(np.einsum("nd,nd->n", apart, apart) < scene.contact**2)


def _draw_nucleus(rng: Generator, scene: Scene, canvas: _Canvas, centre: Floats, radii: Floats) -> None:
    """Draw one nucleus; where two meet, each voxel goes to the nearer one."""
    shape = canvas.labels.shape
    low = np.maximum(np.floor(centre - 1.7 * radii), 0).astype(int)
    high = np.minimum(np.ceil(centre + 1.7 * radii) + 1, shape).astype(int)
    if np.any(high <= low):
        return
    box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    axes = [np.arange(a, b) for a, b in zip(low, high, strict=True)]
    surface = _Surface.draw(rng)
    splitting = scene.dividing > 0 and rng.random() < scene.dividing
    if splitting:
        surface = surface.flattened(rng)
    gauge = surface.gauge(axes, centre, radii)
    owned = gauge < canvas.gauge[box]
    if not owned.any():
        return
    canvas.centres[canvas.count] = centre
    canvas.radii[canvas.count] = radii
    canvas.count += 1
    canvas.labels[box][owned] = canvas.count
    canvas.gauge[box][owned] = gauge[owned]
    light = _emission(rng, scene, gauge)
    if splitting:
        light *= np.float32(rng.uniform(1.2, 2.5))
    canvas.light[box][owned] = light[owned]


@dataclass(frozen=True)
class _Surface:
    """A rotated ellipsoid with bumps, of the volume of the unit ball.

    rotation   [3, 3]; its rows are the axes of the ellipsoid
    stretch    [3], radii along them
    bumps      [6], weights of the second and third order
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

    def flattened(self, rng: Generator) -> Self:
        """Return the plate of condensed chromosomes in metaphase, of about half the volume."""
        plate = np.array([rng.uniform(0.35, 0.55), rng.uniform(0.9, 1.1), rng.uniform(0.9, 1.1)], np.float32)
        return replace(self, stretch=plate)

    def gauge(self, axes: list[NDArray[Any]], centre: Floats, radii: Floats) -> Floats:
        """Return the distance from the centre over that of the outline in its direction; [z, y, x], below 1 inside."""
        z, y, x = (
            ((axis - c) / r).astype(np.float32).reshape([-1 if i == n else 1 for i in range(3)])
            for n, (axis, c, r) in enumerate(zip(axes, centre, radii, strict=True))
        )
        u, v, w = (
            (row[0] * z + row[1] * y + row[2] * x) / s for row, s in zip(self.rotation, self.stretch, strict=True)
        )
        radius = np.sqrt(u * u + v * v + w * w) + np.float32(1e-6)
        bumps = self.bumps
        surface = (bumps[0] * u * v + bumps[1] * v * w + bumps[2] * w * u) / radius**2
        surface += (bumps[3] * u * u * v + bumps[4] * v * v * w + bumps[5] * w * w * u) / radius**3
        return np.asarray(radius / (1 + 2 * surface), np.float32)


def _emission(rng: Generator, scene: Scene, gauge: Floats) -> Floats:
    """Return the light of one nucleus, [z, y, x]: brightness, gradient towards the rim, chromatin, dark nucleoli."""
    brightness = rng.lognormal(0, scene.spread)
    if scene.envelope:
        profile = np.exp(-0.5 * ((gauge - np.float32(0.92)) / np.float32(scene.envelope)) ** 2)
        grain = np.clip(1 + scene.texture * smooth_noise(rng, gauge.shape, scene.diameter / 6), 0.1, 3)
        return np.asarray(np.where(gauge <= 1, brightness * (profile + rng.uniform(0, 0.25)) * grain, 0), np.float32)
    rim = rng.uniform(-0.45, 0.35)
    light = np.float32(brightness) * (1 + np.float32(rim) * gauge**2)
    light *= np.clip(1 + scene.texture * smooth_noise(rng, gauge.shape, scene.diameter / 9), 0.1, 3)
    if rng.random() < 0.3:
        light *= 1 - 0.6 * (smooth_noise(rng, gauge.shape, scene.diameter / 6) > 1.3)
    light[gauge * np.float32(scene.margin) > 1] = 0
    return light


def _record(rng: Generator, scene: Scene, canvas: _Canvas) -> NDArray[Any]:
    """Return the camera counts of the emitted light, [Z, Y, X] uint8 or uint16."""
    shape = canvas.labels.shape
    light = canvas.light
    _add_debris(rng, scene, light)
    _add_ghosts(rng, scene, light)
    _add_walls(rng, scene, light)
    _add_bleed(rng, scene, canvas)
    sigma = np.array([scene.blur * scene.elongation, scene.blur, scene.blur])
    light = gaussian_filter(light, sigma, truncate=3)
    if scene.rim_level:
        _extend_outlines(scene, canvas.labels, light)
    if scene.glow:
        light += np.float32(scene.glow) * blur_widely(light, (scene.diameter / scene.anisotropy, scene.diameter / 5))
    if scene.haze:
        light += np.float32(scene.haze) * blur_widely(
            light, (0.8 * scene.diameter / scene.anisotropy, 0.8 * scene.diameter)
        )
    if scene.tissue:
        gradient = smooth_noise(rng, shape, max(shape) / 2)
        grain = smooth_noise(rng, shape, max(2.0, scene.diameter / 5))
        light += np.float32(scene.tissue) * np.clip(1 + gradient + np.float32(0.3) * grain, 0, None)
    light += np.float32(scene.floor) * (1 + np.float32(0.3) * smooth_noise(rng, shape, max(shape) / 2))
    light *= np.clip(1 + scene.shading * smooth_noise(rng, (1, *shape[1:]), max(shape) / 1.5), 0.2, 2)
    light *= np.linspace(1, 1 - scene.attenuation, shape[0], dtype=np.float32)[:: rng.choice([-1, 1]), None, None]
    return expose(rng, scene, np.maximum(light, 0))


def _extend_outlines(scene: Scene, labels: Labels, light: Floats) -> None:
    """Extend labels along z, in place, to where blurred light is dimmer than `rim_level` of that in the nucleus."""
    owners = labels.ravel()
    total = np.bincount(owners, light.ravel())
    level = np.float32(scene.rim_level) * np.bincount(owners, light.ravel() ** 2) / np.maximum(total, 1e-9)
    for _ in range(math.ceil(1.2 * scene.blur * scene.elongation)):
        for near, far in ((slice(None, -1), slice(1, None)), (slice(1, None), slice(None, -1))):
            inner, outer = labels[near], labels[far]
            reached = (outer == 0) & (inner > 0) & (light[far] > level[inner])
            outer[reached] = inner[reached]


def _add_ghosts(rng: Generator, scene: Scene, light: Floats) -> None:
    """Add smooth dim patches: nuclei far from focus, polar bodies, autofluorescence."""
    axes = [np.arange(edge, dtype=np.float32) for edge in light.shape]
    for _ in range(scene.ghosts):
        width = scene.diameter * rng.uniform(0.15, 0.5)
        z, y, x = (
            np.exp(-0.5 * ((axis - rng.uniform(0, len(axis))) / w) ** 2).astype(np.float32)
            for axis, w in zip(axes, (width * rng.uniform(1, 2) / scene.anisotropy, width, width), strict=True)
        )
        light += np.float32(log_uniform(rng, 0.02, 0.25)) * z[:, None, None] * y[:, None] * x


def _add_debris(rng: Generator, scene: Scene, light: Floats) -> None:
    """Add bright specks that are no nuclei."""
    for _ in range(scene.debris):
        z, y, x = (int(rng.integers(0, edge)) for edge in light.shape)
        size = int(rng.integers(1, 3))
        light[z : z + 1, y : y + size, x : x + size] += np.float32(rng.uniform(0.5, 6))


def _add_walls(rng: Generator, scene: Scene, light: Floats) -> None:
    """Add pieces of large bright shells, about two voxels thick in the plane."""
    for _ in range(scene.walls):
        radius = scene.diameter * rng.uniform(1.5, 5)
        z, y, x = (
            ((np.arange(edge, dtype=np.float32) - np.float32(rng.uniform(-radius, edge + radius))) * np.float32(step))
            ** 2
            for edge, step in zip(light.shape, (scene.anisotropy, 1, 1), strict=True)
        )
        from_shell = np.sqrt(z[:, None, None] + y[:, None] + x) - np.float32(radius)
        light += np.float32(log_uniform(rng, 0.2, 4)) * np.exp(-(from_shell**2) / np.float32(rng.uniform(1, 4)))


def _add_bleed(rng: Generator, scene: Scene, canvas: _Canvas) -> None:
    """Add another channel's stain of the cell around each nucleus."""
    if not scene.bleed:
        return
    around = blur_widely(
        (canvas.labels > 0).astype(np.float32), (0.6 * scene.diameter / scene.anisotropy, 0.6 * scene.diameter)
    )
    grain = np.clip(1 + 0.7 * smooth_noise(rng, canvas.labels.shape, scene.diameter / 5), 0, 4)
    canvas.light += np.float32(2 * scene.bleed) * around * grain
