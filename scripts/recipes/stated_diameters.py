"""Score wrong diameters in requests on recorded stacks: `python -m scripts.recipes.stated_diameters FOLDER [--exact]`.

FOLDER contains the recorded stacks, as for `scripts.recipes.scores`. A row contains the F1 scores of a stack if the
request specifies 0.77, 1 and 1.3 times its true diameter in the plane, and without a diameter. The true diameter is

- `volume`: the mean diameter of spheres with the volumes of the objects, if voxels have the size that the file states;
- `width`: the median extent of the objects in the plane.

They differ for elongated objects and, if the voxel size is not known, for flat ones. With `--exact`, diameters are not
corrected.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from scripts.recipes.confidence import MAX_PIXEL_BYTES, SELECTIONS
from scripts.recipes.segmenters import start_segmenter
from service.core.quantities import Diameter
from service.core.types import Options, Selection, Volume
from service.formats import stack_reader
from service.inference.segment import segment
from service.training.evaluate import score
from service.training.examples import compute_mean_diameter, compute_median_extents

FACTORS = (0.77, 1.0, 1.3)
# Recorded stacks with labels, and the models that suit them.
STACKS = {
    "mouse_embryo_8cell": "nuclei",
    "arabidopsis_ovule_nuclei_1135": "nuclei",
    "synthetic_nuclei_stardist": "nuclei",
    "cellos_organoid_egfp_d0_108": "nuclei",
    "cellos_organoid_hoechst_d4_120": "nuclei",
    "cellos_organoid_mcherry_d4_1": "nuclei",
    "celegans_membrane_t046": "membranes",
}


class TrueDiameters(NamedTuple):
    """True diameters of the objects of a stack, in pixels of a plane."""

    volume: float
    width: float


def measure_true_diameters(volume: Volume, truth: NDArray[Any]) -> TrueDiameters:
    """Measure the objects in the true labels [Z, Y, X] of a volume. Raises ValueError if there are none."""
    if (extents := compute_median_extents(truth)) is None:
        raise ValueError("There are no objects.")
    anisotropy = 1.0 if volume.voxel_size is None else volume.voxel_size.anisotropy
    return TrueDiameters(compute_mean_diameter(truth) * math.cbrt(anisotropy), math.sqrt(extents[1] * extents[2]))


def report(folder: Path, *, may_correct_diameter: bool) -> Iterator[str]:
    """Yield the lines of the table."""
    columns = ("stack", "model", "diameter", "pixels", *(f"x {factor:g}" for factor in FACTORS), "none given")
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    runners = {name: start_segmenter(name) for name in sorted({*STACKS.values()})}
    for name, model in STACKS.items():
        volume = stack_reader.read(folder / name / "image.tif", SELECTIONS.get(name, Selection()), MAX_PIXEL_BYTES)
        mask = stack_reader.read(folder / name / "mask.tif", Selection(axes="ZYX"), MAX_PIXEL_BYTES)
        truth = mask.read_all()[0]
        for kind, diameter in measure_true_diameters(volume, truth)._asdict().items():
            stated = [Diameter((factor * diameter,), "px") for factor in FACTORS]
            results = (
                segment(runners[model], volume, Options(diameter=setting, may_correct_diameter=may_correct_diameter))
                for setting in (*stated, None)
            )
            scores = (f"{score(truth, result.segmentation.pixels).f1:.2f}" for result in results)
            yield f"| {name} | {model} | {kind} | {diameter:.1f} | {' | '.join(scores)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of recorded stacks")
    parser.add_argument("--exact", action="store_true", help="do not correct diameters")
    arguments = parser.parse_args()
    for line in report(arguments.folder, may_correct_diameter=not arguments.exact):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
