"""Pictures of one plane of a stack, or of a stack with the outlines of its labels, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from service.core.errors import RateLimited
from service.core.types import Array, Volume
from service.serving.results.planes import PLANE_MEMORY_BUDGET, PlaneRange, PlaneSelection
from service.serving.runtime import Runtime
from service.serving.storage.threads import run_in_thread

# Maximum number of pixels along each edge of a picture. Larger planes are subsampled.
MAX_EDGE_PIXELS = 768
# Planes are enlarged by a whole factor up to this size, because small pictures hide details.
TARGET_EDGE_PIXELS = 512
# Number of bytes per pixel while a picture is drawn: pixels in float32, borders, RGB and the encoded file.
DRAWING_BYTES = 24
# Positions of the planes that are compared with the middle plane, relative to the depth of a stack.
OTHER_POSITIONS = (0.25, 0.75, 0.125, 0.875)
# Minimum standard deviation of the middle plane relative to that of another plane. Otherwise, the other one is shown.
MIN_RELATIVE_DEVIATION = 0.5

T = TypeVar("T")


class PlaneView(NamedTuple):
    """A plane and how it is shown: index, number of planes, step between the pixels, and factor of enlargement."""

    z: int
    plane_count: int
    step: int
    factor: int

    def describe(self) -> str:
        """Return a sentence that describes the plane and its scale."""
        scale = ""
        if self.step > 1:
            scale = f", every {self.step} pixels along Y and X"
        elif self.factor > 1:
            scale = f", enlarged {self.factor} times"
        return f"Plane {self.z} of planes 0 to {self.plane_count - 1} along Z{scale}."


def choose_view(volume: Volume, plane: int | None = None) -> PlaneView:
    """Choose the scale at which a plane is shown. `plane` is None for the middle plane."""
    count, height, width = volume.shape[1:]
    edge = max(height, width)
    z = count // 2 if plane is None else plane
    return PlaneView(z, count, -(-edge // MAX_EDGE_PIXELS), max(TARGET_EDGE_PIXELS // edge, 1))


async def choose_clear_view(runtime: Runtime, client: str, volume: Volume, plane: int | None = None) -> PlaneView:
    """Choose the scale at which a plane is shown. If `plane` is None, show the middle plane unless it is almost empty.

    Raises the errors of `draw_view`.
    """
    view = choose_view(volume, plane)
    if plane is not None:
        return view
    views = [view, *(view._replace(z=int(position * view.plane_count)) for position in OTHER_POSITIONS)]

    def measure() -> list[float]:
        return [float(np.std(_select(volume, other).read()[0], dtype=np.float64)) for other in views]

    deviations = await _run_with_memory(runtime, client, measure)
    best = int(np.argmax(deviations))
    return views[best] if deviations[0] < MIN_RELATIVE_DEVIATION * deviations[best] else view


async def draw_view(
    runtime: Runtime, client: str, volumes: Sequence[Volume], view: PlaneView, draw_planes: Callable[..., bytes]
) -> bytes:
    """Read a plane of each volume, and draw the planes with `draw_planes`, in a thread. Return a PNG file.

    Raises BadParameter if the plane is outside the volume, and RateLimited if other requests of the client use up its
    share of the memory.
    """
    selections = [_select(volume, view) for volume in volumes]

    def read_and_draw() -> bytes:
        return draw_planes(*(_enlarge(selection.read()[0], view.factor) for selection in selections))

    return await _run_with_memory(runtime, client, read_and_draw)


def _select(volume: Volume, view: PlaneView) -> PlaneSelection:
    return PlaneSelection.select(volume, PlaneRange(view.z, view.z + 1, (1, view.step, view.step)))


async def _run_with_memory(runtime: Runtime, client: str, function: Callable[[], T]) -> T:
    """Call a function in a thread while memory for a picture is reserved. Raises RateLimited if there is none."""
    nbytes = DRAWING_BYTES * MAX_EDGE_PIXELS**2
    if not PLANE_MEMORY_BUDGET.reserve(client, nbytes):
        raise RateLimited("Too many pictures are being drawn at the moment. Try again in a second.", 1)

    def run_and_release() -> T:
        try:
            return function()
        finally:
            PLANE_MEMORY_BUDGET.release(client, nbytes)

    return await run_in_thread(run_and_release, runtime.plane_threads.for_client(client))


def _enlarge(plane: Array, factor: int) -> Array:
    return np.repeat(np.repeat(plane, factor, axis=0), factor, axis=1)
