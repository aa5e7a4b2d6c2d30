import itertools

import numpy as np
import pytest

from service.training.stacks.blocks import BlockDataset, has_isotropic_objects
from service.training.stacks.parts import StackPart
from service.training.targets.boundaries import compute_label_targets

# Cubes of 4 x 4 x 4 voxels that fill the stack.
CUBES = np.kron(np.arange(1, 65).reshape(4, 4, 4), np.ones((4, 4, 4))).astype(np.uint16)


@pytest.mark.parametrize(("step", "expected"), [(1, True), (2, False)])
def test_objects_in_distant_planes_are_not_isotropic(step: int, expected: bool) -> None:
    assert has_isotropic_objects(CUBES[::step]) == expected


def test_axes_of_isotropic_stacks_are_permuted_together_with_their_targets() -> None:
    # The image shows from which axis its brightness increases.
    image = np.indices(CUBES.shape).astype(np.float32)[0]
    part = StackPart("a", image, CUBES, CUBES)
    axes = {True: set[int](), False: set[int]()}
    for permutes_axes, number in itertools.product(axes, range(12)):
        dataset = BlockDataset([part], 16, 1, compute_label_targets, permutes_axes=permutes_axes)
        block = dataset[number]
        assert block.targets.shape[1:] == block.image.shape
        brightest = int(np.argmax([np.abs(np.diff(block.image, axis=axis)).mean() for axis in range(3)]))
        axes[permutes_axes].add(brightest)
        # Labels increase along the same axis as the image, in steps of 16.
        labels = np.moveaxis(block.targets[0], brightest, 0)
        assert (labels[-1] - labels[0]).min() >= 32
    assert axes == {True: {0, 1, 2}, False: {0}}
