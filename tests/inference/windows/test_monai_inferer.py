import numpy as np
import pytest
import torch
from monai.inferers.utils import sliding_window_inference
from segmenters import make_settings, start_runner
from torch import nn

from service.core.errors import BadParameter, Cancelled
from service.core.sections.computing import Windows
from service.core.types import Options, Volume
from service.inference.runner.callbacks import Callbacks
from service.inference.segment import segment
from service.inference.windows.batching.batcher import open_batcher
from service.inference.windows.blending import Blending
from service.inference.windows.monai_inferer import MonaiInferer
from service.inference.windows.sliding_window import SlidingWindow

SIZE, ROI = (9, 17, 12), (8, 8, 16)
NEVER = {"cancelled": lambda: False, "progress": lambda _done, _total: None}


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3, padding=1)).eval()


def make_window(network, batch_size=3):
    return SlidingWindow(network, 2, ROI, batch_size, blending=Blending("constant"), device=torch.device("cpu"))


def monai_settings(**windows):
    return make_settings().model_copy(update={"windows": Windows(inferer="monai", sw_batch_size=2, **windows)})


@pytest.mark.parametrize(
    "options",
    [{}, {"blending": "constant"}, {"sigma": 0.3}, {"padding_mode": "replicate"}, {"cval": 3.0}, {"device": "cpu"}],
    ids=str,
)
@torch.inference_mode()
def test_scores_equal_those_of_monai(network, options):
    image, settings = torch.randn(1, 2, *SIZE), Windows(inferer="monai", **options)
    arguments = {"mode": settings.blending, "sigma_scale": settings.sigma, **options}
    arguments = {name: value for name, value in arguments.items() if name not in {"blending", "sigma"}}
    expected = sliding_window_inference(image, ROI, 3, network, 0.25, **arguments)
    (slab,) = MonaiInferer(settings, SlidingWindow.run)(make_window(network), image, 0.25, **NEVER)
    assert (slab.z0, slab.y0) == (0, 0)
    torch.testing.assert_close(slab.scores, expected, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_progress_counts_windows_and_cancellation_stops_the_request(network):
    image, seen = torch.randn(1, 2, *SIZE), []
    infer = MonaiInferer(Windows(inferer="monai"), SlidingWindow.run)
    list(infer(make_window(network), image, 0.25, cancelled=lambda: False, progress=lambda *done: seen.append(done)))
    assert seen == [(3, 6), (6, 6)]
    with pytest.raises(Cancelled):
        list(infer(make_window(network), image, 0.25, cancelled=lambda: True, progress=lambda *_: None))


@pytest.mark.parametrize("size", [(16, 32, 32), (20, 70, 50), (9, 20, 40)])
def test_labels_equal_those_of_the_builtin_inferer(random_nuclei, bands, phantom, size):
    z, y, x = size
    volume = Volume.from_array(np.resize(phantom.image, size)[None, :z, :y, :x])
    for spec in (random_nuclei, bands):
        builtin, monai = (start_runner(spec, settings) for settings in (make_settings(), monai_settings()))
        expected = segment(builtin, volume, Options()).segmentation.pixels
        with open_batcher(monai_settings()) as batcher:
            found = segment(monai, volume, Options(), callbacks=Callbacks(run=batcher.run))
        assert np.array_equal(found.segmentation.pixels, expected)


def test_skip_below_is_rejected(bands, phantom):
    runner = start_runner(bands, monai_settings())
    with pytest.raises(BadParameter, match="skip_below"):
        segment(runner, Volume.from_array(phantom.image[None]), Options(skip_below="auto"))


def test_memory_of_the_whole_score_volume_is_counted(bands, phantom):
    volume = Volume.from_array(phantom.image[None])
    builtin, monai = (
        start_runner(bands, settings).estimator.estimate(volume, Options())
        for settings in (make_settings(), monai_settings())
    )
    assert monai.host_bytes - builtin.host_bytes == 4 * (1 + 3 + 1) * phantom.image.size
