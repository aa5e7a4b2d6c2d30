"""Child process that selects and renders star-convex polyhedra with the compiled functions of the package `stardist`.

The compiled functions hold Python's global interpreter lock. In the service itself, no other request would be answered
while they run, and they could not be canceled.

Standard input is a file with the candidates, float32 [N, 4 + R]: probability, origin (z, y, x) and the distances along
R rays. Standard output is a file that receives the objects in the order of their labels, float32 [M, 2] (probability
and longest distance), followed by the labels, int32 [Z, Y, X]. The arguments are a `Task` in JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Lower bound of distances in voxels, as in `StarDist3D.predict`. Flat polyhedra have no convex hull.
MIN_DISTANCE = 1e-3
# Mode of `c_polyhedron_to_label` that fills the polyhedra.
FULL_POLYHEDRA = 0


class Task(NamedTuple):
    """Arguments of the child process.

    size            size of the volume, (Z, Y, X)
    num_candidates  number of candidates, N
    num_rays        number of rays, R
    anisotropy      see `Rays`
    nms_threshold   see `StarConvex`
    """

    size: tuple[int, int, int]
    num_candidates: int
    num_rays: int
    anisotropy: tuple[float, float, float] | None
    nms_threshold: float


class _Polyhedra(NamedTuple):
    """Candidates in descending order of their probability.

    probability  float32 [N]
    origin       float32 [N, 3], (z, y, x)
    distance     float32 [N, R]
    """

    probability: NDArray[np.float32]
    origin: NDArray[np.float32]
    distance: NDArray[np.float32]

    def select(self, rows: NDArray[Any]) -> _Polyhedra:
        return _Polyhedra(*(np.ascontiguousarray(column[rows]) for column in self))


def load_stardist_module(name: str, suffixes: list[str]) -> ModuleType:
    """Load a module of `stardist` from its file.

    Importing the package itself would also import numba, matplotlib and scikit-image, which takes longer than many
    stacks need.
    """
    package = find_spec("stardist")
    folders = [] if package is None else package.submodule_search_locations or []
    paths = [Path(folder, f"{name}{suffix}") for folder in folders for suffix in suffixes]
    path = next((path for path in paths if path.is_file()), None)
    spec = None if path is None else spec_from_file_location(name.rpartition("/")[2], path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the installed package stardist has no module {name}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(task: Task, candidates: NDArray[np.float32], write: Callable[[NDArray[Any]], object]) -> None:
    """Write the objects and labels of `candidates` [N, 4 + R], as the module describes."""
    compiled = load_stardist_module("lib/stardist3d", EXTENSION_SUFFIXES)
    rays = load_stardist_module("rays3d", [".py"]).Rays_GoldenSpiral(task.num_rays, task.anisotropy)
    directions, faces = rays.vertices.astype(np.float32), rays.faces.astype(np.int32)
    # Longer rays leave the volume in any case. Without a limit, they could exceed the range of integers.
    max_distance = float(np.linalg.norm(task.size))
    order = np.argsort(-candidates[:, 0], kind="stable")
    polyhedra = _Polyhedra(candidates[:, 0], candidates[:, 1:4], candidates[:, 4:]).select(order)
    np.clip(polyhedra.distance, MIN_DISTANCE, max_distance, out=polyhedra.distance)
    is_selected = compiled.c_non_max_suppression_inds(
        polyhedra.distance,
        polyhedra.origin,
        directions,
        faces,
        polyhedra.probability,
        1,  # compare bounding boxes first
        1,  # find neighbors with a k-d tree
        0,  # print nothing
        np.float32(task.nms_threshold),
    )
    objects = polyhedra.select(np.asarray(is_selected, bool))
    labels = compiled.c_polyhedron_to_label(
        objects.distance,
        objects.origin,
        directions,
        faces,
        np.arange(1, len(objects.origin) + 1, dtype=np.int32),
        np.int32(FULL_POLYHEDRA),
        np.int32(0),  # print nothing
        np.int32(0),  # do not mark overlaps
        np.int32(0),
        task.size,
    )
    write(np.stack((objects.probability, objects.distance.max(1)), 1))
    write(labels)


def main() -> None:
    """Run the task that the parent has specified."""
    size, *parameters = json.loads(sys.argv[1])
    task = Task(tuple(size), *parameters)
    shape = (task.num_candidates, 4 + task.num_rays)
    candidates = np.memmap(sys.stdin.buffer, np.float32, "r", shape=shape)
    # Libraries must not print to the file for the result.
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        run(task, candidates, lambda array: array.tofile(output))


if __name__ == "__main__":
    main()
