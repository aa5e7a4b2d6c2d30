"""Stacks and requests for calibrating the confidence of a model, and for checking the advice of its warnings.

The weights of the models were not trained on these stacks. The synthetic ones have other seeds than the training data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from scripts.recipes.confidence import MAX_PIXEL_BYTES, SELECTIONS, make_membranes, make_nuclei
from scripts.recipes.held_out import find_embryos
from scripts.recipes.synthetic_nuclei import Scene, synthesize
from scripts.recipes.synthetic_tissue import Tissue, synthesize_tissue
from scripts.recipes.tissues import TISSUES
from scripts.recipes.trials import make_nuclei_stacks, make_tissue_stacks
from service.core.quantities import Diameter, VoxelSize
from service.core.types import Selection, Volume
from service.formats import stack_reader
from service.training.examples import compute_mean_diameter

# Recorded stacks with labels of all nuclei or cells.
NUCLEI_STACKS = ("mouse_embryo_8cell", "arabidopsis_ovule_nuclei_1135", "synthetic_nuclei_stardist")
MEMBRANE_STACKS = ("celegans_membrane_t046", *TISSUES)
# Every N-th embryo of each kind is used.
EMBRYO_STEPS = {"late": 2, "early": 4}
# Plane spacing of organoids relative to their pixel size, which the files do not contain.
ORGANOID_ANISOTROPY = 9.0
# Numbers of synthetic stacks of each kind.
NUM_NUCLEI_STACKS = 24
NUM_FLAT_STACKS = 14
NUM_TISSUE_STACKS = 10
NUM_VARIED_TISSUE_STACKS = 8
NUM_FOREIGN_STACKS = 6
# Every N-th stack of noise is used.
NOISE_STEP = 5
# Factors between the diameter in a request and the true diameter: one for each synthetic stack, all for recorded ones.
WRONG_FACTORS = (0.6, 0.77, 1.3, 1.7)
RECORDED_FACTORS = {"nuclei": (0.77, 1.0, 1.3), "cells": (1.0, 1.3)}
# Minimum diameter in these requests. Smaller diameters would enlarge the stack so much that segmentation is slow.
MIN_VOXELS = {"nuclei": 5.0, "cells": 16.0}
# Kinds of tissues in addition to those of `make_tissue_stacks`.
VARIED_TISSUES: dict[str, Callable[[Generator], Tissue]] = {
    "walls": Tissue.draw_walls,
    "epithelium": Tissue.draw_epithelium,
    "separate cells": Tissue.draw_separate_cells,
}

SyntheticStacks = Iterable[tuple[str, Volume, NDArray[Any]]]


class Case(NamedTuple):
    """A request: a stack [1, Z, Y, X] with its true labels [Z, Y, X], or None without objects, and a diameter."""

    group: str
    stack: str
    condition: str
    volume: Volume
    truth: NDArray[Any] | None
    diameter: Diameter | None = None


class Folders(NamedTuple):
    """Folders of recorded stacks, None for none: various ones, those of BBBC050, and those of `tissues`."""

    various: Path | None = None
    embryos: Path | None = None
    tissues: Path | None = None


def make_cases(model: str, folders: Folders) -> Iterator[Case]:
    """Yield the synthetic cases for a model, and the recorded ones if their folders are known."""
    return make_membrane_cases(folders) if model == "membranes" else make_nuclei_cases(folders)


def make_nuclei_cases(folders: Folders) -> Iterator[Case]:
    """Yield the cases for models of nuclei."""
    yield from make_synthetic_cases(make_nuclei_stacks(NUM_NUCLEI_STACKS), "usual", "nuclei")
    for seed in range(NUM_FLAT_STACKS):
        yield make_flat_case(seed)
    for seed in range(NUM_FOREIGN_STACKS):
        volume, cells = make_membranes(seed)[0][2:4]
        yield Case("foreign", f"foreign {seed}", "default", volume, np.asarray(cells))
    if folders.various is not None:
        yield from read_recorded_cases(folders.various, NUCLEI_STACKS)
    if folders.embryos is not None:
        yield from read_embryo_cases(folders.embryos)


def make_membrane_cases(folders: Folders) -> Iterator[Case]:
    """Yield the cases for models of membranes."""
    yield from make_synthetic_cases(make_tissue_stacks(NUM_TISSUE_STACKS), "tissue", "cells")
    for kind, draw in VARIED_TISSUES.items():
        for seed in range(NUM_VARIED_TISSUE_STACKS):
            yield make_tissue_case(kind, draw, seed)
    for seed in range(NUM_FOREIGN_STACKS):
        volume, nuclei = make_nuclei(seed)[0][2:4]
        yield Case("foreign", f"foreign {seed}", "default", volume, np.asarray(nuclei))
    for folder, names in ((folders.various, MEMBRANE_STACKS[:1]), (folders.tissues, TISSUES)):
        if folder is not None:
            yield from read_recorded_cases(folder, names, "cells")


def make_synthetic_cases(stacks: SyntheticStacks, usual_kind: str, objects: str) -> Iterator[Case]:
    """Yield a case for each stack, another with a wrong diameter for the usual kind, and few for noise."""
    seeds = dict[str, int]()
    for kind, volume, truth in stacks:
        seed = seeds[kind] = seeds.get(kind, -1) + 1
        case = Case(kind, f"{kind} {seed}", "default", volume, truth if kind != "noise" else None)
        if kind != "noise" or seed % NOISE_STEP == 0:
            yield case
        if kind == usual_kind:
            yield with_factor(case, WRONG_FACTORS[seed % len(WRONG_FACTORS)], objects)


def read_recorded_cases(folder: Path, names: Iterable[str], objects: str = "nuclei") -> Iterator[Case]:
    """Yield the cases of recorded stacks of nuclei or cells."""
    for name in names:
        volume = stack_reader.read(folder / name / "image.tif", SELECTIONS.get(name, Selection()), MAX_PIXEL_BYTES)
        mask = stack_reader.read(folder / name / "mask.tif", Selection(axes="ZYX"), MAX_PIXEL_BYTES)
        yield from make_recorded_cases(Case("recorded", name, "default", volume, mask.read_all()[0]), objects)


def make_recorded_cases(case: Case, objects: str) -> Iterator[Case]:
    """Yield a recorded case with several diameters, or with and without the voxel size if it is not in the file."""
    yield case
    if case.stack.startswith("cellos"):
        voxel_size = VoxelSize(ORGANOID_ANISOTROPY, 1, 1)
        yield case._replace(condition="voxel size", volume=Volume.from_array(case.volume.read_all(), voxel_size))
    else:
        yield from (with_factor(case, factor, objects) for factor in RECORDED_FACTORS[objects])


def read_embryo_cases(folder: Path) -> Iterator[Case]:
    """Yield a case for some stacks in the test set of BBBC050. All stacks of an embryo have the same name."""
    stacks = list(find_embryos(folder))
    for kind, step in EMBRYO_STEPS.items():
        for stack in itertools.islice((stack for stack in stacks if stack.kind == kind), 0, None, step):
            embryo, _, time = stack.name.partition("_")
            yield Case("recorded", embryo, f"{kind} {time}", stack.volume, stack.truth)


def make_flat_case(seed: int) -> Case:
    """Return a stack of nuclei that are few planes deep. The voxel size of every other stack is known."""
    rng = default_rng([4400, seed])
    scene = Scene.draw_flat(rng)
    edge = int(np.clip(6 * scene.diameter, 96, 144))
    image, truth = synthesize(rng, (int(rng.integers(14, 26)), edge, edge), scene)
    volume = Volume.from_array(image[None], VoxelSize(scene.anisotropy, 1, 1) if seed % 2 else None)
    return Case("flat", f"flat {seed}", "default", volume, truth)


def make_tissue_case(kind: str, draw: Callable[[Generator], Tissue], seed: int) -> Case:
    """Return a stack of cells. The voxel size of every other stack is known."""
    rng = default_rng([4500, *kind.encode(), seed])
    tissue = draw(rng)
    edge = int(np.clip(3.5 * tissue.diameter, 80, 128))
    image, truth = synthesize_tissue(rng, (max(int(0.6 * edge / tissue.flatness), 32), edge, edge), tissue)
    volume = Volume.from_array(image[None], VoxelSize(tissue.flatness, 1, 1) if seed % 2 else None)
    return Case(kind, f"{kind} {seed}", "default", volume, truth)


def with_factor(case: Case, factor: float, objects: str) -> Case:
    """Return a case whose diameter is the true mean diameter in the plane times a factor, but not too small."""
    if case.truth is None:
        raise ValueError("A stack without objects has no diameter.")
    anisotropy = 1.0 if case.volume.voxel_size is None else case.volume.voxel_size.anisotropy
    width = factor * compute_mean_diameter(case.truth) * anisotropy ** (1 / 3)
    return case._replace(condition=f"x{factor:g}", diameter=Diameter((max(width, MIN_VOXELS[objects]),), "px"))
