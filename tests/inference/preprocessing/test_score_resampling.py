from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Volume
from service.inference.preprocessing.interpolation import Resampling
from service.inference.preprocessing.resample import ResampledImage
from service.inference.preprocessing.score_resampling import DecoderFactory, ScoreResampler

SIZES = st.tuples(*[st.integers(1, 9)] * 3)


class RecordingDecoder:
    """Decoder that records the scores, which must arrive in order and without gaps."""

    def __init__(self):
        self.slabs = []

    def add(self, z0, y0, scores):
        assert (z0, y0) == (sum(slab.shape[1] for slab in self.slabs), 0)
        self.slabs.append(scores[0].numpy())

    def finish(self):
        return Segmentation(np.concatenate(self.slabs, 1), "probabilities")


@given(source_size=SIZES, target_size=SIZES, kind=st.sampled_from(["linear", "nearest"]), data=st.data())
def test_scores_that_arrive_in_slabs_are_interpolated_like_the_whole_volume(source_size, target_size, kind, data):
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 2, *source_size)).astype(np.float32))
    resampling = Resampling(source_size, target_size, (kind, "linear", "linear"))
    resampler = ScoreResampler(RecordingDecoder(), resampling)
    depth, height, _ = source_size
    for z0, z1 in pairwise(sorted({0, depth, *data.draw(st.lists(st.integers(0, depth), max_size=4))})):
        for y0, y1 in pairwise(sorted({0, height, *data.draw(st.lists(st.integers(0, height), max_size=2))})):
            resampler.add(z0, y0, scores[:, :, z0:z1, y0:y1])
    expected = ResampledImage(scores, resampling).to_tensor()[0].numpy()
    assert np.array_equal(resampler.finish().pixels, expected)


def test_only_models_that_require_it_resample_scores(bands):
    def decode(spec):
        volume = Volume.from_array(np.zeros((1, 2, 2, 8), np.uint8), VoxelSize(1, 1, 1))
        decoder = DecoderFactory(volume, spec, (2, 2, 4), "classes")()
        scores = torch.zeros(1, 3, 2, 2, 4)
        scores[:, 0] = torch.tensor([1.0, 1.0, -0.4, 1.0])
        decoder.add(0, 0, scores)
        return decoder.finish().pixels

    spec = bands.model_copy(
        update={"input": bands.input.model_copy(update={"resampling": "nnunet", "voxel_size": (1.0, 1.0, 2.0)})}
    )
    assert decode(bands).shape == (2, 2, 4)
    # Linear interpolation of the score of class 0, which exceeds the other scores, 0, except next to its minimum.
    assert (decode(spec)[0, 0] > 0).tolist() == [False] * 4 + [True, True] + [False] * 2
