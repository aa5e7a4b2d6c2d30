import logging
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fakes import SeparateDevice, until
from segmenters import settings_of, started, with_network

from service.core.config import Settings
from service.core.errors import BadParameter, Cancelled, ConfigError, OutOfMemory, TooLarge
from service.core.quantities import VoxelSize
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
from service.models.spec import Calibration, Instances, RangeNormalisation

VOXEL = VoxelSize(0.5, 0.25, 0.25)


def with_voxel_size(spec, *voxel_size):
    return spec.model_copy(update={"input": spec.input.model_copy(update={"voxel_size": voxel_size})})


@pytest.fixture(scope="module")
def eager(bands) -> ModelRunner:
    return started(bands, settings_of())


@pytest.fixture(scope="module")
def compiled(bands) -> ModelRunner:
    return started(bands, settings_of("compiled"))


@pytest.fixture
def volume(phantom) -> Volume:
    return Volume.from_array(phantom.image[None], VOXEL)


def test_classes_are_those_of_the_phantom(eager, volume, phantom):
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


def test_a_result_says_how_the_file_was_understood(eager, volume):
    assert segment(eager, replace(volume, notes=("Pages are z.",)), Options()).notes == ("Pages are z.",)


def test_compiled_and_eager_agree(eager, compiled, volume):
    assert compiled.report().engine == "compiled"
    assert compiled.report().warnings == ()
    one, other = (segment(s, volume, Options(output="probabilities")).segmentation for s in (eager, compiled))
    assert one.pixels.shape == (3, *volume.shape[1:])
    np.testing.assert_allclose(one.pixels, other.pixels, atol=1e-5)
    one, other = (segment(s, volume, Options()).segmentation for s in (eager, compiled))
    assert np.mean(one.pixels != other.pixels) < 1e-5


def test_nothing_is_compiled_once_warm_whatever_the_volume(compiled, volume):
    pixels, rng = volume.array(), np.random.default_rng(0)
    shapes = {tuple(rng.integers(1, edge + 1) for edge in pixels.shape[1:]) for _ in range(25)}
    assert len(shapes) >= 20
    before = count_graphs()
    for z, y, x in shapes:
        segment(compiled, Volume.from_array(pixels[:, :z, :y, :x]), Options(overlap=0.5))
    assert count_graphs() == before


def test_a_graph_that_is_compiled_is_counted(bands, volume):
    runner = ModelRunner(bands, settings_of())
    runner.scores.module = torch.compile(runner.scores.module, backend="eager")
    before = count_graphs()
    segment(runner, volume, Options())
    assert count_graphs() > before


def test_another_batch_size_keeps_the_engine_and_says_so(eager, compiled, volume):
    sizes = []
    network = compiled._ready.window.network
    compiled.instrument(lambda call: lambda x: sizes.append(len(x)) or call(x))
    try:
        result = segment(compiled, volume, Options(sw_batch_size=3))
        planned = compiled.estimator.estimate(volume, Options(sw_batch_size=3)).sw_batch_size
    finally:
        compiled.instrument(lambda _: network)
    assert result.notes == ("The compiled engine computes 2 windows per batch, not 3.",)
    assert (set(sizes), planned) == ({2}, 2)
    assert np.array_equal(result.segmentation.pixels, segment(eager, volume, Options()).segmentation.pixels)
    assert segment(eager, volume, Options(sw_batch_size=3)).notes == ()


@pytest.mark.parametrize("kind", ["eager", "winograd"])
def test_another_window_gives_what_a_model_of_that_window_gives_by_the_same_engine(bands, volume, kind):
    def model(**input_keys):
        return bands.model_copy(update={"input": bands.input.model_copy(update=input_keys)})

    roi, options = (8, 16, 24), Options(roi_size=(8, 16, 24), overlap=0.5)
    expected = segment(started(model(roi_size=roi), settings_of(kind, streams=1)), volume, Options(overlap=0.5))
    runner = started(model(roi_multiple=(2, 2, 2)), settings_of(kind, streams=1))
    for result in (segment(runner, volume, options) for _ in range(2)):
        assert np.array_equal(result.segmentation.pixels, expected.segmentation.pixels)
        assert (result.engine, result.notes) == (expected.engine, ())
    (other,) = runner._other_windows.values()
    assert tuple(other._ready.window.batch.shape[2:]) == roi
    single = segment(runner, volume, replace(options, sw_batch_size=1))
    assert np.array_equal(single.segmentation.pixels, expected.segmentation.pixels)
    assert len(runner._other_windows) == 1, "the latest is kept"
    assert segment(runner, volume, Options(roi_size=bands.input.roi_size)).notes == ()
    assert runner.estimator.estimate(volume, options).windows > runner.estimator.estimate(volume, Options()).windows


@pytest.mark.parametrize(
    ("multiple", "roi", "message"),
    [
        (None, (16, 32, 64), "bands supports only windows of 16,32,32"),
        ((2, 4, 4), (16, 32, 34), "bands supports multiples of 2,4,4, not 16,32,34"),
        ((1, 1, 1), (15, 31, 31), "bands does not run with windows of 15x31x31"),
    ],
    ids=["fixed", "multiple", "untrue"],
)
def test_a_window_that_the_model_does_not_take_is_refused(bands, volume, multiple, roi, message):
    spec = bands.model_copy(update={"input": bands.input.model_copy(update={"roi_multiple": multiple})})
    with pytest.raises(BadParameter, match=message):
        segment(started(spec, settings_of()), volume, Options(roi_size=roi))


def test_fewer_windows_keep_an_engine_that_takes_any_number(bands, volume):
    runner, sizes = started(bands, settings_of("winograd", streams=1)), []
    expected = segment(runner, volume, Options()).segmentation.pixels
    assert runner._ready.window.any_batch_size
    runner.instrument(lambda call: lambda x: sizes.append(len(x)) or call(x))
    result = segment(runner, volume, Options(sw_batch_size=1))
    assert (result.notes, set(sizes)) == ((), {1})
    assert np.array_equal(result.segmentation.pixels, expected)


@pytest.mark.parametrize("engine", [{"precision": "bf16"}, {"channels_last": False}])
def test_precision_and_layout_hardly_change_the_classes(bands, eager, volume, engine):
    other = started(bands, settings_of(**engine))
    expected = segment(eager, volume, Options()).segmentation.pixels
    assert np.mean(segment(other, volume, Options()).segmentation.pixels != expected) < 0.01


def test_overlap_and_blending_are_used(eager, volume):
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


def test_best_quality_scores_every_window_three_times_whatever_the_engine(eager, compiled, volume):
    best, probabilities = Options(quality="best", overlap=0.0), Options("probabilities", quality="best")
    seen, steps = [], []
    network = compiled._ready.window.network
    compiled.instrument(lambda call: lambda x: seen.append(x.stride()) or call(x))
    try:
        windows = compiled.estimator.estimate(volume, Options(overlap=0.0)).windows
        result = segment(
            compiled, volume, best, callbacks=Callbacks(progress=lambda done, total: steps.append((done, total)))
        )
    finally:
        compiled.instrument(lambda _: network)
    assert len(seen) == 3 * -(-windows // 2)
    # So that the seconds of a window are those of any request, and the queue knows how long this one takes.
    total = compiled.estimator.estimate(volume, best).windows
    assert (steps[0], steps[-1]) == ((0, total), (total, total))
    assert len(set(seen)) == 1
    assert result.notes == ()
    one, other = (segment(s, volume, probabilities).segmentation.pixels for s in (eager, compiled))
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert np.mean(segment(eager, volume, best).segmentation.pixels != result.segmentation.pixels) < 1e-5


def test_instances_of_the_other_kind_of_model(random_nuclei, phantom):
    runner = started(random_nuclei, settings_of())
    volume = Volume.from_array(phantom.image[None, :20, :30, :40])
    labels = segment(runner, volume, Options()).segmentation
    assert labels.kind == "labels"
    assert labels.pixels.dtype == np.uint16
    assert labels.pixels.max() == labels.count
    assert len(np.unique(labels.pixels[labels.pixels > 0])) == labels.count
    foreground = segment(runner, volume, Options(output="classes")).segmentation
    assert not labels.pixels[foreground.pixels == 0].any()


def test_a_resampled_volume_comes_back_on_its_own_grid(bands, phantom, eager, volume):
    doubled = phantom.image.repeat(2, axis=1).repeat(2, axis=2)
    runner = started(with_voxel_size(bands, *VOXEL), settings_of())
    fine = Volume.from_array(doubled[None], VoxelSize(0.5, 0.125, 0.125))
    result = segment(runner, fine, Options())
    assert result.segmentation.pixels.shape == doubled.shape
    assert result.segmentation.voxel_size == fine.voxel_size
    assert "Resampled from 24 x 140 x 160 to 24 x 70 x 80" in result.notes[0]
    assert runner.estimator.estimate(fine, Options()).working_size == (24, 70, 80)
    expected = segment(eager, volume, Options()).segmentation.pixels.repeat(2, axis=1).repeat(2, axis=2)
    assert np.mean(result.segmentation.pixels != expected) < 0.001


def test_more_windows_than_the_operator_allows_are_refused(bands):
    settings = settings_of().model_copy(update={"limits": Limits(windows=4)})
    runner = started(bands, settings)
    edge = bands.input.roi_size[0]
    runner.estimator.estimate(Volume.from_array(np.zeros((1, edge, edge, edge), np.uint8)), Options())
    large = Volume.from_array(np.zeros((1, edge, 4 * edge, 4 * edge), np.uint8))
    for ask in (runner.estimator.estimate, partial(segment, runner)):
        with pytest.raises(TooLarge, match="windows, and this service computes up to 4"):
            ask(large, Options())


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 200, 3), (40, 5, 33)])
def test_odd_shapes(eager, size):
    pixels = np.full((1, *size), 400, np.uint16)
    assert segment(eager, Volume.from_array(pixels), Options()).segmentation.pixels.shape == size


@pytest.mark.parametrize("dtype", ["int16", "int32", "float16", "float64"])
def test_other_dtypes_give_the_same_classes(phantom, eager, volume, dtype):
    other = segment(eager, Volume.from_array(phantom.image[None].astype(dtype)), Options())
    assert np.mean(other.segmentation.pixels != segment(eager, volume, Options()).segmentation.pixels) < 1e-3


def test_nan_pixels_are_noted(eager):
    pixels = np.full((1, 4, 8, 8), 400, np.float32)
    pixels[0, 0, 0, 0] = np.nan
    assert "1 NaN" in segment(eager, Volume.from_array(pixels), Options()).notes[0]


def test_a_volume_with_other_channels_is_refused_by_their_names(eager):
    volume = Volume.from_array(np.zeros((2, 4, 8, 8), np.uint16), channels=("DAPI", ""))
    for call in (partial(segment, eager), eager.estimator.estimate):
        with pytest.raises(BadParameter, match=r"needs 1 channel, but the volume has 2: 0 \(DAPI\), 1. Use channel="):
            call(volume, Options())


def test_cancelling(eager, volume):
    with pytest.raises(Cancelled, match="after 0 of"):
        segment(eager, volume, Options(), callbacks=Callbacks(cancelled=lambda: True))
    assert segment(eager, volume, Options()).segmentation.pixels.any()


def see(windows):
    """Foreground wherever there is light, and light as the distance."""
    return torch.cat([100 * (windows - 0.1), torch.logit(windows.clamp(1e-3, 1 - 1e-3))], 1)


@pytest.fixture
def cones() -> Volume:
    """5 x 5 x 5 balls, seen 5 voxels wide, bright in their middle."""
    places = [(axis % 7 - 3.0) / 3 for axis in np.indices((35, 35, 35))]
    light = np.clip(1 - np.sqrt(sum(np.square(place) for place in places)), 0, 1)
    return Volume.from_array(light.astype(np.float32)[None])


@pytest.fixture
def measuring(random_nuclei):
    """A runner that sees balls at any scale, wants them 8 voxels wide and estimates how wide they are."""
    given = {
        "diameter": 8.0,
        "estimate_diameter": True,
        "roi_size": (32, 32, 32),
        "normalisation": RangeNormalisation(kind="range", low=0, high=1),
    }
    spec = random_nuclei.model_copy(
        update={
            "input": random_nuclei.input.model_copy(update=given),
            "activation": "sigmoid",
            "decoding": Instances(kind="instances", persistence=0.2, minimum_size=4),
        }
    )
    return lambda settings=None: with_network(spec, see, settings)


def test_the_width_of_objects_is_estimated_where_nobody_says_it(measuring, cones):
    runner, revised, counted = measuring(), [], []
    auto = segment(
        runner,
        cones,
        Options(),
        callbacks=Callbacks(revised=revised.append, progress=lambda *done: counted.append(done)),
    )
    assert auto.segmentation.count == 125
    assert auto.segmentation.pixels.shape == (35, 35, 35)
    assert auto.estimated
    assert auto.diameter.lengths[-1] == pytest.approx(5, rel=0.2)
    assert auto.width == f"{auto.diameter}; estimated"
    assert list(auto.seconds) == ["prepare", "size", "windows", "decode"]
    assert [str(auto.diameter) in note for note in auto.notes] == [True, False]
    assert auto.notes[1].startswith("Resampled from 35 x 35 x 35")
    told = segment(runner, cones, Options(diameter=auto.diameter))
    assert (told.width, told.seconds.keys()) == (f"{auto.diameter}; stated", {"prepare", "windows", "decode"})
    assert np.array_equal(told.segmentation.pixels, auto.segmentation.pixels)
    assert [needed.windows for needed in revised] == [
        runner.estimator.estimate(cones, Options(diameter=auto.diameter)).windows
    ]
    total = revised[0].windows
    assert (counted[0], counted[-1]) == ((0, total), (total, total))
    sampled = segment(runner, cones, Options(diameter="none"))
    assert (sampled.width, sampled.notes) == (None, ())
    estimator = Estimator(runner.spec, settings_of())
    sizes = [estimator.object_size(Options(diameter=said)) for said in (None, "none", "auto", auto.diameter)]
    assert sizes == ["auto", "none", "auto", auto.diameter]


def test_buffers_that_were_set_aside_are_not_in_the_estimate(write_model, random_nuclei_content):
    arguments = random_nuclei_content["architecture"]["arguments"] | {"widths": [16, 16]}
    spec = write_model(random_nuclei_content | {"architecture": {"name": "ShuffleUNet", "arguments": arguments}})
    runner = ModelRunner(spec, settings_of("winograd"))
    assert runner.estimator.score_bytes is None
    runner.warm_up()
    assert runner.estimator.score_bytes == 4 * len(spec.outputs) * math.prod(spec.input.roi_size)


def test_a_width_is_estimated_once_for_a_stack(measuring, cones):
    runner, calls = measuring(), []

    def counted(windows):
        calls.append(len(windows))
        return see(windows)

    runner.scores.module.network.forward = counted
    first = segment(runner, cones, Options())
    before = len(calls)
    again = segment(runner, Volume.from_array(cones.array().copy()), Options(output="classes"))
    assert (again.width, again.notes) == (first.width, first.notes)
    # Batches of two for the windows of the stack itself, and none beside them.
    assert (
        len(calls) - before
        == -(-runner.estimator.estimate(cones, Options(diameter=first.diameter)).windows // 2)
        < before
    )
    for other in (Volume.from_array(cones.array()[..., 1:]), Volume.from_array(cones.array(), VoxelSize(3, 1, 1))):
        before = len(calls)
        needed = runner.estimator.estimate(other, Options(diameter=segment(runner, other, Options()).diameter)).windows
        assert len(calls) - before > -(-needed // 2)


def test_a_width_is_the_same_when_others_share_its_batches(measuring, cones):
    """Looks of several requests, each with windows of its own, fill batches together."""
    pixels = cones.array()
    stacks = [Volume.from_array(part) for part in (pixels, pixels[:, :30], pixels[:, 5:, ::-1], pixels[..., 2:])]
    fives = settings_of().model_copy(update={"windows": Windows(sw_batch_size=5)})
    alone = [segment(measuring(fives), stack, Options()) for stack in stacks]
    runner, device, asked, shares = measuring(fives), device_module.WindowBatcher("device"), [], []

    def run(window, image, overlap, **options):
        asked.append(image)
        return device.run(window, image, overlap, share=shares.append, **options)

    with ThreadPoolExecutor(len(stacks)) as pool:
        together = [pool.submit(segment, runner, stack, Options(), callbacks=Callbacks(run)) for stack in stacks]
        # Nothing is computed until all of them wait.
        until(lambda: len(device._requests) == len(stacks))
        device.start()
        together = [segmentation.result() for segmentation in together]
    device.close()
    assert device.join(10)
    # Of a batch of its own a request has all the room.
    assert any(share.slots < 5 for share in shares)
    for one, other in zip(alone, together, strict=True):
        assert (one.width, one.notes) == (other.width, other.notes)
        assert np.array_equal(one.segmentation.pixels, other.segmentation.pixels)


def test_a_stack_whose_objects_cannot_be_measured_is_used_as_it_is_sampled(measuring):
    result = segment(measuring(), Volume.from_array(np.zeros((1, 20, 20, 20), np.uint8)), Options())
    assert (result.segmentation.count, result.width, result.estimated) == (0, None, False)
    (note,) = result.notes
    assert "could not be told" in note


def test_a_stack_that_would_become_too_large_is_used_as_it_is_sampled(measuring, cones):
    few = settings_of().model_copy(update={"limits": Limits(windows=4)})
    cones = Volume.from_array(cones.array()[:, :32, :32, :32])
    result = segment(measuring(few), cones, Options())
    assert result.width is not None
    (note,) = result.notes
    assert "yet the stack is used as it is sampled" in note
    assert result.segmentation.count == segment(measuring(few), cones, Options(diameter="none")).segmentation.count


def test_measuring_can_be_cancelled_and_falls_back_like_any_windows(measuring, cones):
    with pytest.raises(Cancelled, match="0 of"):
        segment(measuring(), cones, Options(), callbacks=Callbacks(cancelled=lambda: True))

    def crowded(windows):
        if len(windows) > 1:
            raise MemoryError
        return see(windows)

    expected = segment(measuring(), cones, Options()).segmentation.pixels
    runner = measuring()
    runner.scores.module.network.forward = crowded
    result = segment(runner, cones, Options())
    assert result.fallbacks == 1
    assert np.array_equal(result.segmentation.pixels, expected)


def test_only_models_of_objects_estimate_how_wide_these_are(bands, random_nuclei):
    for spec in (bands, random_nuclei):
        with pytest.raises(BadParameter, match="has no object diameter"):
            ModelRunner(spec, settings_of()).estimator.output(Options(diameter="auto"))


def test_an_absurd_volume_is_refused_before_its_pixels_are_read(eager):
    def read(z0, z1):
        raise AssertionError("must not be read")

    volume = Volume((1, 10**5, 10**5, 10**5), np.dtype(np.uint8), read)
    with pytest.raises(TooLarge):
        segment(eager, volume, Options())


def test_a_report_before_and_after_warming_up(bands):
    runner = ModelRunner(bands, settings_of(channels_last=False))
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
        runner = started(bands, settings_of("cudagraph"))
    assert runner.report().warnings == ("The cudagraph engine needs a CUDA device; running eagerly.",)
    assert "bands/1: The cudagraph engine needs" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize("total", [2**40, 1])
@pytest.mark.parametrize("whole", [True, False])
def test_a_device_with_memory_of_its_own_gives_the_same(bands, random_nuclei, phantom, whole, total, monkeypatch):
    """Also a device that holds neither the stack nor what its labels are made from."""
    if not whole:
        monkeypatch.setattr(device_image, "MAX_WHOLE_IMAGE_BYTES", 0)
    image = np.concatenate([phantom.image] * 2)
    for spec in (bands, with_voxel_size(bands, 0.25, 0.25, 0.25), random_nuclei):
        volume = Volume.from_array(image[None, :, :40, :40], VOXEL)
        there = ModelRunner(spec, settings_of(), SeparateDevice(total=total))
        there.warm_up()
        request = there.estimator.plan_request(volume, Options())
        assert request.plan.decode_on_host == (total == 1)
        expected = segment(started(spec, settings_of()), volume, Options()).segmentation
        np.testing.assert_array_equal(segment(there, volume, Options()).segmentation.pixels, expected.pixels)


def test_a_stack_that_does_not_fit_on_its_device_is_refused_before_work_starts(bands, volume):
    runner = ModelRunner(bands, settings_of(), SeparateDevice(free=2**20))
    runner.warm_up()
    with pytest.raises(OutOfMemory, match="device memory"):
        segment(runner, volume, Options(), callbacks=Callbacks(progress=pytest.fail))


def test_a_device_that_is_not_there(bands):
    with pytest.raises(ConfigError):
        ModelRunner(bands, Settings(device=Device(name="cuda")))


def test_a_width_that_the_voxel_size_brings_about_is_not_advised(random_nuclei):
    scan = {
        "roi_size": (32, 32, 32),
        "diameter": 16.0,
        "voxel_size": (0.25, 0.25, 0.25),
        "normalisation": RangeNormalisation(kind="range", low=0, high=1),
    }
    calibration = Calibration(intercept=-9, certainty=0, peak=0, size=0, giants=0)
    spec = random_nuclei.model_copy(
        update={"confidence": calibration, "input": random_nuclei.input.model_copy(update=scan)}
    )
    runner = with_network(spec, lambda x: torch.cat([x - 0.5, x], 1))
    # Balls, the brighter the deeper inside.
    places = np.indices((24, 48, 48)) % 12 - 5.5
    pixels = (1 - np.sqrt(np.square(places).sum(0)) / 8).clip(0, 1).astype(np.float32)[None]
    attempts = [
        segment(runner, Volume.from_array(pixels, size), Options()).doubt.attempt
        for size in (None, VoxelSize(0.5, 0.5, 0.5))
    ]
    assert attempts == ["diameter=6px", ""]


def test_only_a_model_that_is_there_is_advised(random_nuclei, tmp_path):
    folder = shutil.copytree(random_nuclei.folder, tmp_path / "nuclei")
    calibration = Calibration(intercept=-9, certainty=0, peak=0, size=0, giants=0, sheets="membranes")
    scan = random_nuclei.input.model_copy(update={"roi_size": (32, 32, 32), "diameter": 16.0})
    spec = random_nuclei.model_copy(update={"confidence": calibration, "input": scan, "folder": folder})
    runner = with_network(spec, lambda x: torch.cat([x - 0.5, x], 1))
    radius = np.sqrt(np.square(np.indices((48, 48, 48)) % 24 - 11.5).sum(0))
    shells = Volume.from_array(np.exp(-np.square((radius - 8) / 1.5)).astype(np.float32)[None])
    assert segment(runner, shells, Options()).doubt.attempt != "model=membranes"
    (tmp_path / "membranes").mkdir()
    assert segment(runner, shells, Options()).doubt.attempt == "model=membranes"


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: no memory"), OSError()])
def test_labels_that_are_there_outlast_an_error_while_advice_is_looked_for(random_nuclei, phantom, error):
    calibration = Calibration(intercept=-9, certainty=0, peak=0, size=0, giants=0)
    scan = random_nuclei.input.model_copy(update={"diameter": 16.0})
    spec, over = random_nuclei.model_copy(update={"confidence": calibration, "input": scan}), list[bool]()
    failed = list[torch.Tensor]()

    def network(x):
        if over:
            failed.append(x)
            raise error
        return torch.cat([x - 0.5, x], 1)

    volume = Volume.from_array(phantom.image[None])
    doubted = segment(
        with_network(spec, network),
        volume,
        Options(),
        callbacks=Callbacks(progress=lambda done, total: over.append(True) if done == total else None),
    )
    expected = segment(with_network(spec, lambda x: torch.cat([x - 0.5, x], 1)), volume, Options())
    assert failed
    np.testing.assert_array_equal(doubted.segmentation.pixels, expected.segmentation.pixels)
    assert doubted.confidence == expected.confidence
    assert (doubted.doubt.attempt, "doubtful" in doubted.doubt.detail) == ("", True)


def test_what_another_window_takes_counts_until_the_next_one_replaces_it(bands, volume):
    scan = bands.input.model_copy(update={"roi_multiple": (2, 2, 2)})
    runner = started(bands.model_copy(update={"input": scan}), settings_of())
    before = runner.nbytes
    segment(runner, volume, Options(roi_size=(8, 32, 32)))
    one = runner.nbytes
    assert one - before >= 4 * runner._config.sw_batch_size * 8 * 32 * 32
    segment(runner, volume, Options(roi_size=(8, 16, 16)))
    assert before < runner.nbytes < one
