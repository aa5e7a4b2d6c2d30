import math
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import bind_to_variants
from segmenters import make_settings, start_runner
from torch import nn
from torch.nn.functional import avg_pool3d

from service.core.config import Settings
from service.core.errors import BadParameter, TooLarge
from service.core.quantities import Diameter, VoxelSize
from service.core.sections.computing import Windows
from service.core.sections.serving import Limits
from service.core.types import Description, Options, Volume
from service.inference.cuda import device_image
from service.inference.decoding.decoders import BOUNDARY_BYTES_PER_VOXEL
from service.inference.preprocessing.resample import prepare
from service.inference.runner.estimator import Estimator, make_plan
from service.inference.runner.memory_estimate import WindowMemory, estimate_request, measure_activation_bytes
from service.inference.segment import segment
from service.inference.types import Plan
from service.inference.windows.grid import MAX_SKIPPED_SLAB_BYTES, Grid
from service.inference.windows.kernels import window_kernels
from service.models.repository import read_spec
from service.models.spec import Calibration
from service.models.spec_parts import Boundaries

SETTINGS = Settings(windows=Windows(sw_batch_size=2, overlap=0.25), limits=Limits(sw_batch_size=8, overlap=0.5))


def describe(*size, voxel_size=None):
    """Return the description of a stack. No pixels are needed."""
    return Description("TIFF", "ZYX", size, (1, *size), "uint16", voxel_size, "not stated", ("",), 1)


def host_bytes(spec, size, plan, load=0, *kernel):
    """Return the estimated host bytes for a stack and a network that needs `load` bytes per window."""
    return estimate_request(spec, describe(*size), plan, WindowMemory(load), *kernel).host_bytes


def test_each_stream_needs_memory_for_one_batch_unless_there_are_fewer_batches(bands):
    plan = make_plan(bands, Settings(), Options(overlap=0.0, sw_batch_size=2))
    volume = describe(16, 64, 96)

    def windows(streams):
        one, none = (
            estimate_request(bands, volume, plan, WindowMemory(nbytes, streams)).host_bytes for nbytes in (1000, 0)
        )
        return (one - none) / 1000

    assert [windows(streams) for streams in (1, 2, 3)] == [2, 4, 6]
    assert windows(8) == 6, "six windows are three batches"


def test_plan_uses_options_within_the_limits_and_operator_defaults_otherwise(bands, random_nuclei):
    assert make_plan(bands, SETTINGS, Options()) == Plan("classes", 2, 0.25)
    assert make_plan(random_nuclei, SETTINGS, Options()) == Plan("labels", 2, 0.25)
    options = Options(output="probabilities", sw_batch_size=8, overlap=0.5)
    assert make_plan(random_nuclei, SETTINGS, options) == Plan("probabilities", 8, 0.5)
    assert make_plan(random_nuclei, SETTINGS, Options(sw_batch_size=1, overlap=0.0)).overlap == 0
    skipping = Settings(windows=Windows(skip_below="auto"))
    assert make_plan(bands, SETTINGS, Options(skip_below=7)).skip_below == 7
    assert make_plan(bands, skipping, Options()).skip_below == "auto"
    assert make_plan(bands, skipping, Options(skip_below="none")).skip_below is None


def test_best_quality_overlaps_more_unless_overlap_is_set_or_limited(bands):
    best = make_plan(bands, SETTINGS, Options(quality="best"))
    assert (best.overlap, len(best.views)) == (0.5, 3)
    assert make_plan(bands, SETTINGS, Options(quality="best", overlap=0.125)).overlap == 0.125
    limited = Settings(limits=Limits(overlap=0.3))
    assert make_plan(bands, limited, Options(quality="best")).overlap == 0.3
    assert make_plan(bands, SETTINGS, Options(quality="fast")) == make_plan(bands, SETTINGS, Options())


def test_window_counts_once_for_each_view(bands):
    volume, estimator = describe(40, 80, 80), Estimator(bands, SETTINGS)
    fast = estimator.estimate(volume, Options(overlap=0.25))
    best = estimator.estimate(volume, Options(overlap=0.25, quality="best"))
    assert best.windows == 3 * fast.windows > 3
    limited = Estimator(bands, Settings(limits=Limits(windows=fast.windows)))
    assert limited.estimate(volume, Options(overlap=0.25)) == fast
    with pytest.raises(TooLarge, match="quality=fast"):
        limited.estimate(volume, Options(overlap=0.25, quality="best"))


def test_slabs_of_skipped_rows_are_part_of_the_estimate(bands):
    volume, plans = describe(64, 512, 512), [Plan("classes", 2, 0.25), Plan("classes", 2, 0.25, skip_below=0)]
    default, skipping = (estimate_request(bands, volume, plan, WindowMemory(2**20)).host_bytes for plan in plans)
    grid = Grid.cover((64, 512, 512), bands.input.roi_size, 0.25)
    (depth, height, _), skipped = grid.window_size, grid.compute_max_skipped_rows(len(bands.outputs), 2)
    rows = min(2 * (skipped + 1) + skipped, grid.num_rows)
    assert skipping - default == 4 * len(bands.outputs) * depth * (0.75 * height) * 512 * rows
    assert 0 < skipping - default <= 1.5 * MAX_SKIPPED_SLAB_BYTES


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (Options(sw_batch_size=9), "sw_batch_size must be between 1 and 8"),
        (Options(sw_batch_size=0), "sw_batch_size"),
        (Options(overlap=0.51), "overlap must be between 0 and 0.5"),
        (Options(overlap=-0.1), "overlap"),
        (Options(overlap=float("nan")), "overlap"),
        # A semantic model has no objects.
        (Options(output="labels"), "output=classes"),
    ],
)
def test_options_that_exceed_the_limits_are_rejected(bands, options, name):
    with pytest.raises(BadParameter, match=name):
        make_plan(bands, SETTINGS, options)


def test_windows_are_counted_on_the_grid_of_the_network(bands):
    plan = Plan("classes", 2, 0.0)
    assert estimate_request(bands, describe(16, 64, 96), plan, WindowMemory(0)).windows == 1 * 2 * 3
    spec = bands.model_copy(update={"input": bands.input.model_copy(update={"voxel_size": (1.0, 1.0, 1.0)})})
    fine = describe(16, 64, 96, voxel_size=VoxelSize(1, 0.5, 0.5))
    coarse = estimate_request(spec, fine, plan, WindowMemory(0))
    assert coarse.working_size == (16, 32, 48)
    assert coarse.windows == 1 * 1 * 2


def test_estimate_needs_only_shape_and_voxel_size(bands):
    plan, size = make_plan(bands, SETTINGS, Options()), VoxelSize(1, 2, 3)
    volume = Volume.from_array(np.zeros((1, 16, 64, 96), np.uint16), size)
    estimated = estimate_request(bands, describe(16, 64, 96, voxel_size=size), plan, WindowMemory(7))
    assert estimated == estimate_request(bands, volume, plan, WindowMemory(7))


def test_channel_error_lists_the_channels_before_pixels_are_read(bands):
    stored = ((3, 32, 64, 64), "uint16", None, "not stated", ("DAPI", "", "Cy5"), 1)
    with pytest.raises(BadParameter, match=r"the volume has 3 channels: 0 \(DAPI\), 1, 2 \(Cy5\). Use"):
        Estimator(bands, SETTINGS).estimate(Description("TIFF", "CZYX", (3, 32, 64, 64), *stored), Options())


def test_memory_is_counted_for_the_device_or_the_host(random_nuclei):
    # The kernel on the host needs a third of the memory that torch needs on a device.
    plan = Plan("labels", 2, 0.25)
    host = estimate_request(random_nuclei, describe(32, 64, 64), plan, WindowMemory(1000))
    device = estimate_request(random_nuclei, describe(32, 64, 64), plan, WindowMemory(1000, uses_host_memory=False))
    assert host.device_bytes == 0
    assert device.device_bytes > 2 * 1000 + 4 * 32 * 64 * 64
    assert host.host_bytes > device.host_bytes > 0


def test_boundaries_are_always_decoded_on_the_host(random_nuclei):
    decoding = Boundaries(kind="boundaries", boundary="foreground")
    spec = random_nuclei.model_copy(update={"decoding": decoding})
    plan = make_plan(spec, SETTINGS, Options())
    assert plan.output == "labels"
    instances, boundaries = (
        estimate_request(model, describe(32, 64, 64), plan, WindowMemory(1000, uses_host_memory=False))
        for model in (random_nuclei, spec)
    )
    assert boundaries.host_bytes > BOUNDARY_BYTES_PER_VOXEL * 32 * 64 * 64 > instances.host_bytes
    assert boundaries.device_bytes < instances.device_bytes


def test_device_memory_does_not_grow_with_depth_if_scores_are_decoded_on_the_host(random_nuclei, monkeypatch):
    monkeypatch.setattr(device_image, "MAX_WHOLE_IMAGE_BYTES", 0)

    def plan(depth, memory):
        estimator = Estimator(
            random_nuclei, SETTINGS, uses_host_memory=False, window_bytes=1000, device_memory_bytes=memory
        )
        return estimator.plan_request(describe(depth, 640, 640), Options())

    with_enough, with_little = plan(640, 2**40), plan(640, 2**30)
    assert not with_enough.plan.decode_on_host
    assert with_little.plan.decode_on_host
    assert with_enough.estimate.device_bytes > 2**30 > with_little.estimate.device_bytes
    assert plan(328, 2**30).estimate.device_bytes == with_little.estimate.device_bytes
    assert with_little.estimate.host_bytes > 4 * 640**3


def test_stored_pixels_count_as_device_memory_only_up_to_a_limit(random_nuclei):
    plan = make_plan(random_nuclei, SETTINGS, Options(output="classes"))

    def device_bytes(depth):
        return estimate_request(
            random_nuclei, describe(depth, 1024, 1024), plan, WindowMemory(0, uses_host_memory=False)
        ).device_bytes

    # Stored pixels and float32 pixels. For a larger volume, only the float32 pixels of one layer of windows count.
    assert device_bytes(256) - device_bytes(208) == (2 + 4) * 48 * 1024**2
    assert device_bytes(352) == device_bytes(304)


def test_single_window_needs_no_sums(bands):
    plan = Plan("classes", 2, 0.0)
    single, two = (host_bytes(bands, (16, 32, width), plan) - 16 * 32 * width for width in (32, 64))
    voxels, outputs = 16 * 32 * 32, len(bands.outputs)
    assert single == 4 * outputs * voxels
    assert two >= 2 * 4 * (2 * outputs + 1) * voxels


def test_only_scores_count_if_the_engine_has_buffers_for_the_batch_size(bands):
    without = Estimator(bands, Settings(), 2, window_bytes=10**6)
    with_bytes = replace(without, score_bytes=1000)

    def difference(batch_size):
        options = Options(sw_batch_size=batch_size, overlap=0.0)
        one, other = (
            estimator.estimate(describe(16, 64, 96), options).host_bytes for estimator in (without, with_bytes)
        )
        return one - other

    assert [difference(batch_size) for batch_size in (None, 1, 2, 4)] == [2 * (10**6 - 1000), 0, 2 * (10**6 - 1000), 0]


def test_kernel_needs_sums_of_overlaps_but_torch_needs_sums_of_rows(bands):
    plan, size, outputs = Plan("classes", 2, 0.25), (24, 64, 96), len(bands.outputs)
    kernels = (window_kernels, bind_to_variants(window_kernels))
    by_kernel, by_torch = (host_bytes(bands, size, plan, 0, kernel) for kernel in kernels)
    depth, height, edge = bands.input.roi_size
    planes, rows, columns = Grid.cover(size, bands.input.roi_size, 0.25).max_overlap
    shared = outputs * (2 * depth * height * columns + depth * rows * 96 + planes * 64 * 96)
    whole = 96 * ((outputs + 1) * (depth * (height + rows) + planes * 64) + depth * height)
    whole += 4 * outputs * depth * height * edge  # weighted scores of the windows of a row
    assert by_torch - by_kernel == 4 * (whole - shared) > 0


def test_slabs_are_one_step_high_except_for_the_last_one(bands):
    """Two waiting slabs are smaller by the overlap of two rows, for which the blender holds sums."""
    (depth, height, width), outputs = bands.input.roi_size, len(bands.outputs)
    sizes = ((depth, rows, 2 * width) for rows in (height, height + 24))
    short, long = (host_bytes(bands, size, Plan("classes", 2, 0.25)) - math.prod(size) for size in sizes)
    assert short - long == 4 * outputs * depth * 2 * width * (2 - 1) * (height - 24)


def test_larger_batches_and_more_outputs_need_more_memory(random_nuclei):
    def needed(batch_size, output):
        return host_bytes(random_nuclei, (32, 64, 64), Plan(output, batch_size, 0.25), 10**6)

    assert needed(4, "labels") - needed(2, "labels") == 2 * 10**6
    assert needed(2, "classes") < needed(2, "probabilities") < needed(2, "labels")


def test_large_class_results_are_stored_on_disk_and_need_only_the_planes_of_one_layer(bands):
    plan = Plan("classes", 2, 0.0)
    assert host_bytes(bands, (64, 2048, 2048), plan, 10**6) == host_bytes(bands, (2496, 2048, 2048), plan, 10**6)


def blobs(x):
    height = avg_pool3d(x, 3, 1, 1)
    return torch.cat((height - 0.2, height), 1)


def read_status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure_memory(folder):
    """Return the estimated bytes for a stack, and the bytes that its segmentation needs in this process."""
    torch.set_num_threads(1)
    runner = start_runner(read_spec(folder), make_settings())
    runner.instrument(lambda _network: blobs)
    wave = sum(np.sin(axis * 2 * np.pi / 16) for axis in np.ogrid[:32, :256, :256])
    volume = Volume.from_array((1000 + 300 * wave).astype(np.uint16)[None])
    # Load all code first, because the estimate does not include it.
    segment(runner, Volume.from_array(volume.read(0, 8)[:, :, :32, :32]), Options())
    estimated = runner.estimator.estimate(volume, Options()).host_bytes
    Path("/proc/self/clear_refs").write_text("5")
    before = read_status("VmRSS")
    segment(runner, volume, Options())
    return estimated, read_status("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_estimate_is_within_a_quarter_of_the_measured_peak(random_nuclei, monkeypatch):
    """Measure in a separate process, so that no other test has raised the peak. The network needs no memory.

    A single malloc arena returns all free memory; otherwise the peak depends on the thread that allocates first.
    """
    for name, value in (("ARENA_MAX", "1"), ("MMAP_THRESHOLD_", "65536"), ("TRIM_THRESHOLD_", "0")):
        monkeypatch.setenv(f"MALLOC_{name}", value)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        estimated, measured = pool.submit(measure_memory, random_nuclei.folder).result()
    assert 0.75 < measured / estimated < 1.25


def test_activations_are_measured_and_all_hooks_are_removed():
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 1))
    voxels = 6**3
    assert measure_activation_bytes(network, (1, 1, 6, 6, 6)) == 4 * voxels * (4 + 4 + 2)
    assert not any(module._forward_hooks for module in network.modules())
    with pytest.raises(RuntimeError):
        measure_activation_bytes(network, (1, 3, 6, 6, 6))
    assert not any(module._forward_hooks for module in network.modules())
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize("width", [(24.0,), (4.0,), (24.0, 7.0, 4.0)])
def test_voxels_that_a_window_is_interpolated_from_are_counted(width: tuple[float, ...], bands) -> None:
    spec = bands.model_copy(update={"input": bands.input.model_copy(update={"diameter": 6.0})})
    volume, diameter = Volume.from_array(np.zeros((1, 64, 160, 160), np.uint16)), Diameter(width, "px")
    plan = make_plan(spec, SETTINGS, Options(diameter=diameter))
    estimated = estimate_request(spec, volume, plan, WindowMemory(0))
    plain = estimate_request(spec, describe(*estimated.working_size), plan._replace(diameter=None), WindowMemory(0))
    image, _notes = prepare(volume, spec, diameter)
    window = tuple(slice(0, min(edge, n)) for edge, n in zip(bands.input.roi_size, estimated.working_size, strict=True))
    tracemalloc.start()
    image[0, slice(None), *window]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < estimated.host_bytes - plain.host_bytes < 8 * peak


def test_default_diameter_of_a_model_is_used_unless_the_request_specifies_one(random_nuclei) -> None:
    spec = random_nuclei.model_copy(
        update={
            "input": random_nuclei.input.model_copy(
                update={"diameter": 10.0, "default_diameter": "2,10,10um", "estimate_diameter": True}
            )
        }
    )
    estimator, volume = Estimator(spec, SETTINGS), describe(40, 80, 80, voxel_size=VoxelSize(1, 1, 1))
    plan, estimate = estimator.plan_request(volume, Options())
    assert (plan.diameter, plan.needs_diameter_estimate) == (Diameter((2.0, 10.0, 10.0), "um"), False)
    assert estimate.working_size == (200, 80, 80)
    assert "10 um wide and 2 um deep, as in the stacks that the model was trained on" in plan.diameter_notes[0]
    assert estimator.get_diameter_setting(Options()) == plan.diameter
    for diameter, needs_estimate in (("auto", True), ("none", False), (Diameter((5.0,), "px"), False)):
        plan = estimator.plan(Options(diameter=diameter))
        assert (plan.needs_diameter_estimate, plan.diameter_notes) == (needs_estimate, ())
        assert plan.diameter == (None if isinstance(diameter, str) else diameter)
    with pytest.raises(BadParameter, match="does not specify a voxel size"):
        estimator.plan_request(describe(40, 80, 80), Options())
    # An estimate replaces the default only if its confidence is higher, so the confidence must be calibrated.
    calibration = Calibration(intercept=0, certainty=0, peak=0, size=-6, giants=0, threshold=0.4)
    calibrated_estimator = Estimator(spec.model_copy(update={"confidence": calibration}), SETTINGS)
    plan = calibrated_estimator.plan(Options())
    assert (plan.diameter, plan.needs_diameter_estimate) == (Diameter((2.0, 10.0, 10.0), "um"), True)
    assert calibrated_estimator.get_diameter_setting(Options()) == plan.diameter
