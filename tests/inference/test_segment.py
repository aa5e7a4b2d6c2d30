import logging
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fakes import SeparateMemoryDriver, wait_until
from segmenters import make_runner_with_network, make_settings, start_runner

from service.core.config import Settings
from service.core.errors import BadParameter, Cancelled, ConfigError, LowConfidenceResult, OutOfMemory, TooLarge
from service.core.quantities import VoxelSize, parse_diameter
from service.core.sections.computing import Device, Windows
from service.core.sections.serving import Limits
from service.core.types import Options, Volume
from service.engine.compile.torch_compile import count_graphs
from service.inference.cuda import device_image
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.estimator import Estimator
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.inference.types import Result
from service.inference.windows.batching import batcher as device_module
from service.models.spec import Calibration
from service.models.spec_parts import Instances, ObjectCalibration, RangeNormalization

VOXEL = VoxelSize(0.5, 0.25, 0.25)


def with_voxel_size(spec, *voxel_size):
    return spec.model_copy(update={"input": spec.input.model_copy(update={"voxel_size": voxel_size})})


@pytest.fixture(scope="module")
def eager(bands) -> ModelRunner:
    return start_runner(bands, make_settings())


@pytest.fixture(scope="module")
def compiled(bands) -> ModelRunner:
    return start_runner(bands, make_settings("compiled"))


@pytest.fixture
def volume(phantom) -> Volume:
    return Volume.from_array(phantom.image[None], VOXEL)


def test_the_classes_match_the_phantom(eager, volume, phantom):
    result = segment(eager, volume, Options())
    segmentation = result.segmentation
    assert segmentation.pixels.shape == phantom.classes.shape
    assert segmentation.kind == "classes"
    assert segmentation.names == ("background", "dim", "bright")
    assert segmentation.voxel_size == VOXEL
    for value in (1, 2):
        found, true = segmentation.pixels == value, phantom.classes == value
        assert (found & true).sum() / (found | true).sum() > 0.9
    assert list(result.seconds) == ["prepare", "windows", "decode"]
    assert min(result.seconds.values()) > 0
    assert result[2:] == Result(segmentation, {}, (), spec=eager.spec, engine="eager fp32")[2:]


def test_a_result_includes_the_notes_of_the_volume(eager, volume):
    assert segment(eager, replace(volume, notes=("Pages are z.",)), Options()).notes == ("Pages are z.",)


def test_the_compiled_and_the_eager_engine_agree(eager, compiled, volume):
    assert compiled.report().engine == "compiled"
    assert compiled.report().warnings == ()
    first, second = (segment(s, volume, Options(output="probabilities")).segmentation for s in (eager, compiled))
    assert first.pixels.shape == (3, *volume.shape[1:])
    np.testing.assert_allclose(first.pixels, second.pixels, atol=1e-5)
    first, second = (segment(s, volume, Options()).segmentation for s in (eager, compiled))
    assert np.mean(first.pixels != second.pixels) < 1e-5


def test_a_warm_engine_does_not_compile_for_new_shapes(compiled, volume):
    pixels, rng = volume.read_all(), np.random.default_rng(0)
    shapes = {tuple(rng.integers(1, edge + 1) for edge in pixels.shape[1:]) for _ in range(25)}
    assert len(shapes) >= 20
    num_graphs = count_graphs()
    for z, y, x in shapes:
        segment(compiled, Volume.from_array(pixels[:, :z, :y, :x]), Options(overlap=0.5))
    assert count_graphs() == num_graphs


def test_compiled_graphs_are_counted(bands, volume):
    runner = ModelRunner(bands, make_settings())
    runner.score_computer.module = torch.compile(runner.score_computer.module, backend="eager")
    num_graphs = count_graphs()
    segment(runner, volume, Options())
    assert count_graphs() > num_graphs


def test_a_different_batch_size_keeps_the_engine_and_adds_a_note(eager, compiled, volume):
    sizes = []
    network = compiled._engine.window.network
    compiled.instrument(lambda call: lambda x: sizes.append(len(x)) or call(x))
    try:
        result = segment(compiled, volume, Options(sw_batch_size=3))
        planned = compiled.estimator.estimate(volume, Options(sw_batch_size=3)).sw_batch_size
    finally:
        compiled.instrument(lambda _: network)
    assert result.notes == ("The compiled engine processes 2 windows per batch, not 3.",)
    assert (set(sizes), planned) == ({2}, 2)
    assert np.array_equal(result.segmentation.pixels, segment(eager, volume, Options()).segmentation.pixels)
    assert segment(eager, volume, Options(sw_batch_size=3)).notes == ()


@pytest.mark.parametrize("kind", ["eager", "winograd"])
def test_a_different_window_size_gives_the_result_of_a_model_with_that_window_size(bands, volume, kind):
    def with_input(**input_keys):
        return bands.model_copy(update={"input": bands.input.model_copy(update=input_keys)})

    roi, options = (8, 16, 24), Options(roi_size=(8, 16, 24), overlap=0.5)
    expected = segment(
        start_runner(with_input(roi_size=roi), make_settings(kind, streams=1)), volume, Options(overlap=0.5)
    )
    runner = start_runner(with_input(roi_multiple=(2, 2, 2)), make_settings(kind, streams=1))
    for result in (segment(runner, volume, options) for _ in range(2)):
        assert np.array_equal(result.segmentation.pixels, expected.segmentation.pixels)
        assert (result.engine, result.notes) == (expected.engine, ())
    (other_runner,) = runner._runners_by_window.values()
    assert tuple(other_runner._engine.window.batch.shape[2:]) == roi
    single_batch = segment(runner, volume, replace(options, sw_batch_size=1))
    assert np.array_equal(single_batch.segmentation.pixels, expected.segmentation.pixels)
    assert len(runner._runners_by_window) == 1, "only the most recent runner is kept"
    assert segment(runner, volume, Options(roi_size=bands.input.roi_size)).notes == ()
    assert runner.estimator.estimate(volume, options).windows > runner.estimator.estimate(volume, Options()).windows


@pytest.mark.parametrize(
    ("roi_multiple", "roi", "message"),
    [
        (None, (16, 32, 64), "The model bands supports only the window size 16,32,32"),
        ((2, 4, 4), (16, 32, 34), "The window size \\(roi_size\\) of bands must be a multiple of 2,4,4, not 16,32,34"),
        ((1, 1, 1), (15, 31, 31), "The model bands does not run with the window size 15x31x31"),
    ],
    ids=["fixed", "multiple", "untrue"],
)
def test_a_window_size_that_the_model_does_not_support_is_rejected(bands, volume, roi_multiple, roi, message):
    spec = bands.model_copy(update={"input": bands.input.model_copy(update={"roi_multiple": roi_multiple})})
    with pytest.raises(BadParameter, match=message):
        segment(start_runner(spec, make_settings()), volume, Options(roi_size=roi))


def test_a_smaller_batch_keeps_an_engine_that_supports_any_batch_size(bands, volume):
    runner, sizes = start_runner(bands, make_settings("winograd", streams=1)), []
    expected = segment(runner, volume, Options()).segmentation.pixels
    assert runner._engine.window.accepts_partial_batches
    runner.instrument(lambda call: lambda x: sizes.append(len(x)) or call(x))
    result = segment(runner, volume, Options(sw_batch_size=1))
    assert (result.notes, set(sizes)) == ((), {1})
    assert np.array_equal(result.segmentation.pixels, expected)


@pytest.mark.parametrize("engine", [{"precision": "bf16"}, {"channels_last": False}])
def test_precision_and_memory_layout_barely_change_the_classes(bands, eager, volume, engine):
    runner = start_runner(bands, make_settings(**engine))
    expected = segment(eager, volume, Options()).segmentation.pixels
    assert np.mean(segment(runner, volume, Options()).segmentation.pixels != expected) < 0.01


def test_the_overlap_determines_the_number_of_windows(eager, volume):
    steps = []
    segment(
        eager,
        volume,
        Options(overlap=0.0),
        callbacks=Callbacks(progress=lambda done, total: steps.append((done, total))),
    )
    assert steps[0] == (0, 18)
    assert steps[-1] == (18, 18)
    assert eager.estimator.estimate(volume, Options(overlap=0.0)).windows == 18
    assert eager.estimator.estimate(volume, Options(overlap=0.5)).windows > 18


def test_best_quality_scores_every_window_three_times_with_every_engine(eager, compiled, volume):
    best, probabilities = Options(quality="best", overlap=0.0), Options("probabilities", quality="best")
    strides, steps = [], []
    network = compiled._engine.window.network
    compiled.instrument(lambda call: lambda x: strides.append(x.stride()) or call(x))
    try:
        windows = compiled.estimator.estimate(volume, Options(overlap=0.0)).windows
        result = segment(
            compiled, volume, best, callbacks=Callbacks(progress=lambda done, total: steps.append((done, total)))
        )
    finally:
        compiled.instrument(lambda _: network)
    assert len(strides) == 3 * -(-windows // 2)
    # The seconds per window are the same for all requests, so the queue can predict the duration of this request.
    total = compiled.estimator.estimate(volume, best).windows
    assert (steps[0], steps[-1]) == ((0, total), (total, total))
    assert len(set(strides)) == 1
    assert result.notes == ()
    first, second = (segment(s, volume, probabilities).segmentation.pixels for s in (eager, compiled))
    np.testing.assert_allclose(first, second, atol=1e-5)
    assert np.mean(segment(eager, volume, best).segmentation.pixels != result.segmentation.pixels) < 1e-5


def test_an_instance_model_gives_labels(random_nuclei, phantom):
    runner = start_runner(random_nuclei, make_settings())
    volume = Volume.from_array(phantom.image[None, :20, :30, :40])
    labels = segment(runner, volume, Options()).segmentation
    assert labels.kind == "labels"
    assert labels.pixels.dtype == np.uint16
    assert labels.pixels.max() == labels.count
    assert len(np.unique(labels.pixels[labels.pixels > 0])) == labels.count
    foreground = segment(runner, volume, Options(output="classes")).segmentation
    assert not labels.pixels[foreground.pixels == 0].any()


def test_the_result_of_a_resampled_volume_has_its_original_grid(bands, phantom, eager, volume):
    doubled = phantom.image.repeat(2, axis=1).repeat(2, axis=2)
    runner = start_runner(with_voxel_size(bands, *VOXEL), make_settings())
    fine = Volume.from_array(doubled[None], VoxelSize(0.5, 0.125, 0.125))
    result = segment(runner, fine, Options())
    assert result.segmentation.pixels.shape == doubled.shape
    assert result.segmentation.voxel_size == fine.voxel_size
    assert "Resampled from 24 x 140 x 160 to 24 x 70 x 80" in result.notes[0]
    assert runner.estimator.estimate(fine, Options()).working_size == (24, 70, 80)
    expected = segment(eager, volume, Options()).segmentation.pixels.repeat(2, axis=1).repeat(2, axis=2)
    assert np.mean(result.segmentation.pixels != expected) < 0.001


def test_requests_with_more_windows_than_the_operator_allows_are_refused(bands):
    settings = make_settings().model_copy(update={"limits": Limits(windows=4)})
    runner = start_runner(bands, settings)
    edge = bands.input.roi_size[0]
    runner.estimator.estimate(Volume.from_array(np.zeros((1, edge, edge, edge), np.uint8)), Options())
    large = Volume.from_array(np.zeros((1, edge, 4 * edge, 4 * edge), np.uint8))
    for call in (runner.estimator.estimate, partial(segment, runner)):
        with pytest.raises(TooLarge, match="windows, but this service allows at most 4"):
            call(large, Options())


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 200, 3), (40, 5, 33)])
def test_volumes_of_any_shape_are_segmented(eager, size):
    pixels = np.full((1, *size), 400, np.uint16)
    assert segment(eager, Volume.from_array(pixels), Options()).segmentation.pixels.shape == size


@pytest.mark.parametrize("dtype", ["int16", "int32", "float16", "float64"])
def test_other_dtypes_give_the_same_classes(phantom, eager, volume, dtype):
    converted = segment(eager, Volume.from_array(phantom.image[None].astype(dtype)), Options())
    assert np.mean(converted.segmentation.pixels != segment(eager, volume, Options()).segmentation.pixels) < 1e-3


def test_nan_pixels_are_noted(eager):
    pixels = np.full((1, 4, 8, 8), 400, np.float32)
    pixels[0, 0, 0, 0] = np.nan
    assert "1 pixels that are NaN" in segment(eager, Volume.from_array(pixels), Options()).notes[0]


def test_the_error_for_a_wrong_number_of_channels_names_them(eager):
    volume = Volume.from_array(np.zeros((2, 4, 8, 8), np.uint16), channels=("DAPI", ""))
    for call in (partial(segment, eager), eager.estimator.estimate):
        with pytest.raises(
            BadParameter, match=r"needs 1 channel, but the volume has 2 channels: 0 \(DAPI\), 1. Use channel="
        ):
            call(volume, Options())


def test_a_request_can_be_canceled(eager, volume):
    with pytest.raises(Cancelled, match="after 0 of"):
        segment(eager, volume, Options(), callbacks=Callbacks(cancelled=lambda: True))
    assert segment(eager, volume, Options()).segmentation.pixels.any()


def score_brightness(windows):
    """Return scores: bright voxels are foreground, and brightness is the distance."""
    return torch.cat([100 * (windows - 0.1), torch.logit(windows.clamp(1e-3, 1 - 1e-3))], 1)


@pytest.fixture
def balls() -> Volume:
    """Return a stack of 5 x 5 x 5 balls with a visible diameter of 5 voxels, bright at the center."""
    positions = [(axis % 7 - 3.0) / 3 for axis in np.indices((35, 35, 35))]
    brightness = np.clip(1 - np.sqrt(sum(np.square(position) for position in positions)), 0, 1)
    return Volume.from_array(brightness.astype(np.float32)[None])


@pytest.fixture
def make_estimating_runner(random_nuclei):
    """Return a function that creates a runner of a model for balls of 8 voxels, which finds balls at any scale."""
    changes = {
        "diameter": 8.0,
        "estimate_diameter": True,
        "roi_size": (32, 32, 32),
        "normalisation": RangeNormalization(kind="range", low=0, high=1),
    }
    spec = random_nuclei.model_copy(
        update={
            "input": random_nuclei.input.model_copy(update=changes),
            "activation": "sigmoid",
            "decoding": Instances(kind="instances", persistence=0.2, minimum_size=4),
        }
    )

    def make_runner(settings=None, default_diameter=None):
        # The confidence is highest for objects of the model's diameter.
        calibration = Calibration(intercept=0, certainty=0, peak=0, size=-6, giants=0, threshold=0.1)
        model_input = spec.input.model_copy(update={"default_diameter": default_diameter})
        changes = {"input": model_input, "confidence": default_diameter and calibration}
        return make_runner_with_network(spec.model_copy(update=changes), score_brightness, settings)

    return make_runner


def test_the_diameter_is_estimated_if_the_request_does_not_specify_it(make_estimating_runner, balls):
    runner, new_estimates, progress_calls = make_estimating_runner(), [], []
    estimated = segment(
        runner,
        balls,
        Options(),
        callbacks=Callbacks(on_new_estimate=new_estimates.append, progress=lambda *done: progress_calls.append(done)),
    )
    assert estimated.segmentation.count == 125
    assert estimated.segmentation.pixels.shape == (35, 35, 35)
    assert estimated.is_diameter_estimated
    assert estimated.diameter.lengths[-1] == pytest.approx(5, rel=0.2)
    assert estimated.diameter_text == f"{estimated.diameter}; estimated"
    assert list(estimated.seconds) == ["prepare", "size", "windows", "decode"]
    assert [estimated.diameter.describe() in note for note in estimated.notes] == [True, False]
    assert estimated.notes[1].startswith("Resampled from 35 x 35 x 35")
    specified = segment(runner, balls, Options(diameter=estimated.diameter))
    assert (specified.diameter_text, specified.seconds.keys()) == (
        f"{estimated.diameter}; stated",
        {"prepare", "windows", "decode"},
    )
    assert np.array_equal(specified.segmentation.pixels, estimated.segmentation.pixels)
    assert [estimate.windows for estimate in new_estimates] == [
        runner.estimator.estimate(balls, Options(diameter=estimated.diameter)).windows
    ]
    total = new_estimates[0].windows
    assert (progress_calls[0], progress_calls[-1]) == ((0, total), (total, total))
    without_diameter = segment(runner, balls, Options(diameter="none"))
    assert (without_diameter.diameter_text, without_diameter.notes) == (None, ())
    estimator = Estimator(runner.spec, make_settings())
    settings_used = [
        estimator.get_diameter_setting(Options(diameter=setting))
        for setting in (None, "none", "auto", estimated.diameter)
    ]
    assert settings_used == ["auto", "none", "auto", estimated.diameter]


@pytest.mark.parametrize(("default", "is_replaced"), [("5px", False), ("14px", True)])
def test_the_default_diameter_is_replaced_if_it_does_not_suit_the_stack(
    make_estimating_runner, balls, default, is_replaced
):
    runner = make_estimating_runner(default_diameter=default)
    result = segment(runner, balls, Options())
    assert result.segmentation.count == 125
    assert result.is_diameter_estimated == is_replaced
    assert (str(result.diameter) == default) != is_replaced
    assert result.diameter.lengths[-1] == pytest.approx(5, rel=0.2)
    assert ("assumed to be" in result.notes[0]) != is_replaced
    specified = segment(runner, balls, Options(diameter=result.diameter))
    assert np.array_equal(specified.segmentation.pixels, result.segmentation.pixels)
    # The cached estimate is not used for requests that must be estimated without the default.
    automatic = segment(runner, balls, Options(diameter="auto"))
    assert automatic.is_diameter_estimated
    assert "assumed" not in automatic.notes[0]


def test_the_default_diameter_is_used_if_the_better_estimate_is_not_allowed(make_estimating_runner, balls):
    runner = make_estimating_runner(default_diameter="14px")
    estimated_diameter = segment(runner, balls, Options()).diameter
    windows = runner.estimator.estimate(balls, Options(diameter=estimated_diameter)).windows
    settings = make_settings().model_copy(update={"limits": Limits(windows=windows - 1)})
    runner = make_estimating_runner(settings, default_diameter="14px")
    result = segment(runner, balls, Options())
    assert result.diameter_text == "14px; stated"
    assert "segmented with diameter=14px" in result.notes[0]


def test_the_estimator_knows_the_bytes_of_the_scores_after_warm_up(write_model, random_nuclei_content):
    arguments = random_nuclei_content["architecture"]["arguments"] | {"widths": [16, 16]}
    spec = write_model(random_nuclei_content | {"architecture": {"name": "ShuffleUNet", "arguments": arguments}})
    runner = ModelRunner(spec, make_settings("winograd"))
    assert runner.estimator.score_bytes is None
    runner.warm_up()
    assert runner.estimator.score_bytes == 4 * len(spec.outputs) * math.prod(spec.input.roi_size)


def test_the_diameter_of_a_stack_is_estimated_once(make_estimating_runner, balls):
    runner, calls = make_estimating_runner(), []

    def count_windows(windows):
        calls.append(len(windows))
        return score_brightness(windows)

    runner.score_computer.module.network.forward = count_windows
    first = segment(runner, balls, Options())
    num_calls = len(calls)
    repeated = segment(runner, Volume.from_array(balls.read_all().copy()), Options(output="classes"))
    assert (repeated.diameter_text, repeated.notes) == (first.diameter_text, first.notes)
    # Only the windows of the stack itself are computed, in batches of two.
    assert (
        len(calls) - num_calls
        == -(-runner.estimator.estimate(balls, Options(diameter=first.diameter)).windows // 2)
        < num_calls
    )
    for stack in (
        Volume.from_array(balls.read_all()[..., 1:]),
        Volume.from_array(balls.read_all(), VoxelSize(3, 1, 1)),
    ):
        num_calls = len(calls)
        num_windows = runner.estimator.estimate(
            stack, Options(diameter=segment(runner, stack, Options()).diameter)
        ).windows
        assert len(calls) - num_calls > -(-num_windows // 2)


def test_a_diameter_estimate_does_not_depend_on_shared_batches(make_estimating_runner, balls):
    """The windows of several concurrent estimates share batches."""
    pixels = balls.read_all()
    stacks = [Volume.from_array(part) for part in (pixels, pixels[:, :30], pixels[:, 5:, ::-1], pixels[..., 2:])]
    settings = make_settings().model_copy(update={"windows": Windows(sw_batch_size=5)})
    alone_results = [segment(make_estimating_runner(settings), stack, Options()) for stack in stacks]
    runner, device, images, shares = make_estimating_runner(settings), device_module.WindowBatcher("device"), [], []

    def run(window, image, overlap, **options):
        images.append(image)
        return device.run(window, image, overlap, report_share=shares.append, **options)

    with ThreadPoolExecutor(len(stacks)) as pool:
        shared_results = [pool.submit(segment, runner, stack, Options(), callbacks=Callbacks(run)) for stack in stacks]
        # Computation starts when all requests are waiting.
        wait_until(lambda: len(device._requests) == len(stacks))
        device.start()
        shared_results = [segmentation.result() for segmentation in shared_results]
    device.close()
    assert device.join(10)
    # A request that did not share its batches would get all five slots.
    assert any(share.num_slots < 5 for share in shares)
    for first, second in zip(alone_results, shared_results, strict=True):
        assert (first.diameter_text, first.notes) == (second.diameter_text, second.notes)
        assert np.array_equal(first.segmentation.pixels, second.segmentation.pixels)


def test_a_stack_without_a_diameter_estimate_keeps_its_resolution(make_estimating_runner):
    result = segment(make_estimating_runner(), Volume.from_array(np.zeros((1, 20, 20, 20), np.uint8)), Options())
    assert (result.segmentation.count, result.diameter_text, result.is_diameter_estimated) == (0, None, False)
    (note,) = result.notes
    assert "could not be estimated" in note


def test_a_stack_that_would_become_too_large_keeps_its_resolution(make_estimating_runner, balls):
    limited_settings = make_settings().model_copy(update={"limits": Limits(windows=4)})
    balls = Volume.from_array(balls.read_all()[:, :32, :32, :32])
    result = segment(make_estimating_runner(limited_settings), balls, Options())
    assert result.diameter_text is not None
    (note,) = result.notes
    assert "segmented at its original resolution" in note
    assert (
        result.segmentation.count
        == segment(make_estimating_runner(limited_settings), balls, Options(diameter="none")).segmentation.count
    )


def test_diameter_estimation_can_be_canceled_and_uses_fallbacks(make_estimating_runner, balls):
    with pytest.raises(Cancelled, match="0 of"):
        segment(make_estimating_runner(), balls, Options(), callbacks=Callbacks(cancelled=lambda: True))

    def forward_single(windows):
        if len(windows) > 1:
            raise MemoryError
        return score_brightness(windows)

    expected = segment(make_estimating_runner(), balls, Options()).segmentation.pixels
    runner = make_estimating_runner()
    runner.score_computer.module.network.forward = forward_single
    result = segment(runner, balls, Options())
    assert result.num_fallbacks == 1
    assert np.array_equal(result.segmentation.pixels, expected)


def test_only_instance_models_estimate_a_diameter(bands, random_nuclei):
    for spec in (bands, random_nuclei):
        with pytest.raises(BadParameter, match="has no object diameter"):
            ModelRunner(spec, make_settings()).estimator.get_output_kind(Options(diameter="auto"))


def test_a_huge_volume_is_refused_before_its_pixels_are_read(eager):
    def read(z0, z1):
        raise AssertionError("must not be read")

    volume = Volume((1, 10**5, 10**5, 10**5), np.dtype(np.uint8), read)
    with pytest.raises(TooLarge):
        segment(eager, volume, Options())


def test_the_engine_report_before_and_after_warm_up(bands):
    runner = ModelRunner(bands, make_settings(channels_last=False))
    assert runner.report().engine == "starting"
    runner.warm_up()
    report = runner.report()
    assert (report.device, report.engine, report.precision) == ("cpu", "eager", "fp32")
    assert (report.memory_format, report.compile_mode) == ("contiguous", None)
    assert (report.roi_size, report.sw_batch_size, report.overlap) == ((16, 32, 32), 2, 0.25)
    assert report.warm_up_seconds > 0
    assert report.device_name


def test_warnings_are_reported_and_logged(bands, caplog):
    with caplog.at_level(logging.WARNING):
        runner = start_runner(bands, make_settings("cudagraph"))
    assert runner.report().warnings == ("The cudagraph engine needs a CUDA device; running eagerly.",)
    assert "bands/1: The cudagraph engine needs" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize("total", [2**40, 1])
@pytest.mark.parametrize("fits_image", [True, False])
def test_a_device_with_separate_memory_gives_the_same_result(
    bands, random_nuclei, phantom, fits_image, total, monkeypatch
):
    """The cases include a device whose memory holds neither the stack nor the data for decoding."""
    if not fits_image:
        monkeypatch.setattr(device_image, "MAX_WHOLE_IMAGE_BYTES", 0)
    image = np.concatenate([phantom.image] * 2)
    for spec in (bands, with_voxel_size(bands, 0.25, 0.25, 0.25), random_nuclei):
        volume = Volume.from_array(image[None, :, :40, :40], VOXEL)
        runner = ModelRunner(spec, make_settings(), SeparateMemoryDriver(total=total))
        runner.warm_up()
        request = runner.estimator.plan_request(volume, Options())
        assert request.plan.decode_on_host == (total == 1)
        expected = segment(start_runner(spec, make_settings()), volume, Options()).segmentation
        np.testing.assert_array_equal(segment(runner, volume, Options()).segmentation.pixels, expected.pixels)


def test_a_stack_that_does_not_fit_on_its_device_is_refused_before_work_starts(bands, volume):
    runner = ModelRunner(bands, make_settings(), SeparateMemoryDriver(free=2**20))
    runner.warm_up()
    with pytest.raises(OutOfMemory, match="device memory"):
        segment(runner, volume, Options(), callbacks=Callbacks(progress=pytest.fail))


def test_a_missing_device_is_a_configuration_error(bands):
    with pytest.raises(ConfigError):
        ModelRunner(bands, Settings(device=Device(name="cuda")))


def test_a_diameter_that_the_voxel_size_already_implies_is_not_suggested(random_nuclei):
    input_changes = {
        "roi_size": (32, 32, 32),
        "diameter": 16.0,
        "voxel_size": (0.25, 0.25, 0.25),
        "normalisation": RangeNormalization(kind="range", low=0, high=1),
    }
    calibration = Calibration(intercept=-9, certainty=0, peak=0, size=0, giants=0)
    spec = random_nuclei.model_copy(
        update={"confidence": calibration, "input": random_nuclei.input.model_copy(update=input_changes)}
    )
    runner = make_runner_with_network(spec, lambda x: torch.cat([x - 0.5, x], 1))
    # Balls that are brightest at the center, and 8 voxels wide where they are foreground.
    positions = np.indices((24, 48, 48)) % 12 - 5.5
    pixels = (1 - np.sqrt(np.square(positions).sum(0)) / 8).clip(0, 1).astype(np.float32)[None]
    suggestions = [
        segment(runner, Volume.from_array(pixels, size), Options()).quality_warning.suggestion
        for size in (None, VoxelSize(0.5, 0.5, 0.5))
    ]
    assert suggestions == ["diameter=8px", ""]


def make_size_sensitive_runner(random_nuclei, roi_size, diameter, *, object_size):
    """Return a runner whose network is the identity. Objects of another size than `diameter` have a low confidence."""
    input_changes = {
        "roi_size": roi_size,
        "diameter": diameter,
        "normalisation": RangeNormalization(kind="range", low=0, high=1),
    }
    object_calibration = ObjectCalibration(intercept=4, certainty=0, peak=0, size=object_size, result=0)
    calibration = Calibration(intercept=5, certainty=0, peak=0, size=0, giants=0, objects=object_calibration)
    spec = random_nuclei.model_copy(
        update={"confidence": calibration, "input": random_nuclei.input.model_copy(update=input_changes)}
    )
    return make_runner_with_network(spec, lambda x: torch.cat([x - 0.5, x], 1))


def test_a_stated_diameter_is_corrected_if_the_confidence_is_low(random_nuclei):
    """The balls are eight voxels wide. With this calibration, the confidence is high at eight, low at twelve."""
    runner = make_size_sensitive_runner(random_nuclei, (32, 32, 32), 16.0, object_size=-30)
    positions = np.indices((24, 48, 48)) % 12 - 5.5
    balls = Volume.from_array((1 - np.sqrt(np.square(positions).sum(0)) / 8).clip(0, 1).astype(np.float32)[None])

    def segment_with(diameter, **options):
        return segment(runner, balls, Options(diameter=parse_diameter(diameter), **options))

    corrected, suggested = segment_with("12px"), segment_with("8px")
    assert (corrected.diameter_text, corrected.quality_warning) == ("8px; estimated", None)
    assert corrected.notes[0].startswith("With the specified object diameter, 12px, the confidence is only 0.")
    assert corrected.notes[0].endswith("set diameter=12,12,12px.")
    assert corrected.confidence == suggested.confidence > 0.9
    assert set(corrected.segmentation.objects.match_probability) == {np.float32(corrected.confidence)}
    np.testing.assert_array_equal(corrected.segmentation.pixels, suggested.segmentation.pixels)
    # A diameter that is exact, or must be the same for several stacks, is not corrected.
    for result, diameter in (
        (segment_with("12,12,12px"), "12,12,12px; stated"),
        (segment_with("12px", may_correct_diameter=False), "12px; stated"),
    ):
        assert (result.diameter_text, result.quality_warning.suggestion) == (diameter, "diameter=8px")
    assert segment_with("8px", strict=True).confidence == segment_with("12px", strict=True).confidence
    with pytest.raises(LowConfidenceResult, match="diameter=8px"):
        segment_with("12,12,12px", strict=True)


def test_a_stated_diameter_of_flat_objects_is_not_used_as_their_depth(random_nuclei):
    """The objects are 12 voxels wide and 3 voxels deep."""
    runner = make_size_sensitive_runner(random_nuclei, (32, 48, 48), 12.0, object_size=-3)
    z, y, x = np.indices((20, 98, 98))
    distances = np.sqrt((4 * (z % 5 - 2)) ** 2 + (y % 14 - 7) ** 2 + (x % 14 - 7) ** 2)
    pixels = (1 - distances / 12).clip(0, 1).astype(np.float32)[None]

    def segment_with(diameter, voxel_size=None, **options):
        options = Options(diameter=parse_diameter(diameter), **options)
        return segment(runner, Volume.from_array(pixels, voxel_size), options)

    corrected, estimated = segment_with("12px"), segment_with("auto")
    assert corrected.diameter_text == estimated.diameter_text == "2,11,11px; estimated"
    assert corrected.notes[0].startswith("The objects are flat and the voxel size is unknown")
    np.testing.assert_array_equal(corrected.segmentation.pixels, estimated.segmentation.pixels)
    for result, diameter in (
        (segment_with("12px", VoxelSize(4, 1, 1)), "12px; stated"),
        (segment_with("12,12,12px"), "12,12,12px; stated"),
        (segment_with("12px", may_correct_diameter=False), "12px; stated"),
    ):
        assert result.diameter_text == diameter


def test_only_installed_models_are_suggested(random_nuclei, tmp_path):
    folder = shutil.copytree(random_nuclei.folder, tmp_path / "nuclei")
    calibration = Calibration(intercept=-9, certainty=0, peak=0, size=0, giants=0, sheets="membranes")
    input_spec = random_nuclei.input.model_copy(update={"roi_size": (32, 32, 32), "diameter": 16.0})
    spec = random_nuclei.model_copy(update={"confidence": calibration, "input": input_spec, "folder": folder})
    runner = make_runner_with_network(spec, lambda x: torch.cat([x - 0.5, x], 1))
    radius = np.sqrt(np.square(np.indices((48, 48, 48)) % 24 - 11.5).sum(0))
    shells = Volume.from_array(np.exp(-np.square((radius - 8) / 1.5)).astype(np.float32)[None])
    assert segment(runner, shells, Options()).quality_warning.suggestion != "model=membranes"
    (tmp_path / "membranes").mkdir()
    assert segment(runner, shells, Options()).quality_warning.suggestion == "model=membranes"


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: no memory"), OSError()])
def test_an_error_while_collecting_evidence_does_not_lose_the_labels(random_nuclei, phantom, error):
    calibration = Calibration(intercept=-9, certainty=0, peak=0, size=0, giants=0)
    input_spec = random_nuclei.input.model_copy(update={"diameter": 16.0})
    spec, progress_done = (
        random_nuclei.model_copy(update={"confidence": calibration, "input": input_spec}),
        list[bool](),
    )
    failed_windows = list[torch.Tensor]()

    def network(x):
        if progress_done:
            failed_windows.append(x)
            raise error
        return torch.cat([x - 0.5, x], 1)

    volume = Volume.from_array(phantom.image[None])
    result = segment(
        make_runner_with_network(spec, network),
        volume,
        Options(),
        callbacks=Callbacks(progress=lambda done, total: progress_done.append(True) if done == total else None),
    )
    expected = segment(make_runner_with_network(spec, lambda x: torch.cat([x - 0.5, x], 1)), volume, Options())
    assert failed_windows
    np.testing.assert_array_equal(result.segmentation.pixels, expected.segmentation.pixels)
    assert result.confidence == expected.confidence
    assert "may be wrong" in result.quality_warning.detail


def test_the_memory_of_a_different_window_size_counts_until_it_is_replaced(bands, volume):
    input_spec = bands.input.model_copy(update={"roi_multiple": (2, 2, 2)})
    runner = start_runner(bands.model_copy(update={"input": input_spec}), make_settings())
    initial_bytes = runner.nbytes
    segment(runner, volume, Options(roi_size=(8, 32, 32)))
    bytes_with_window = runner.nbytes
    assert bytes_with_window - initial_bytes >= 4 * runner._config.sw_batch_size * 8 * 32 * 32
    segment(runner, volume, Options(roi_size=(8, 16, 16)))
    assert initial_bytes < runner.nbytes < bytes_with_window
