"""Checks to run before measurements on a GPU: `benchmarks/gpu.py check` prints a row for each.

If a check fails, the measurements cannot be trusted. Rates are compared with those of an H100 or H200; on other
devices, their rows have no verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from service.cli.benchmark.engine_comparison import load_selector
from service.cli.benchmark.timing import measure_matrix_peak, synchronize, time_alternately
from service.cli.models import choose_model
from service.core.config import Settings, override_settings, read_settings
from service.core.hardware import devices
from service.core.types import Options, Segmentation, Selection
from service.engine.compile.torch_compile import explain_missing_compiler
from service.engine.tuning.plans import EngineConfig
from service.formats import stack_reader
from service.inference.cuda.device_image import Uploader
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.engine_builder import ReadyEngine, choose_default_batch_size
from service.inference.runner.label_agreement import compute_label_difference
from service.inference.runner.model_runner import ModelRunner
from service.inference.runner.selector import EngineSelector
from service.inference.segment import segment as segment_volume
from service.inference.windows.batching.batcher import WindowBatcher, open_batcher

# Parts of the names of operations that a BF16 channels-last forward pass should not contain: convolutions without
# cuDNN, and conversions of the memory format.
SLOW_OPERATIONS = ("vol2col", "slow_conv", "nchwtonhwc", "nhwctonchw")
# Minimum rates of an H100: memory bandwidth (reads and writes of a copy on the device) in TB/s, uploads from pinned
# memory in GB/s, and matrix products in TFLOP/s.
MIN_DEVICE_TBYTES = 2.5
MIN_UPLOAD_GBYTES = 20.0
MIN_BF16_TFLOPS = 600.0
# Maximum fraction of voxels whose label differs from that on the CPU in float32.
FP32_TOLERANCE = 1e-4
BF16_TOLERANCE = 1e-3
# Maximum difference of two BF16 scores, relative to their root mean square. It allows for rounding, because cuDNN may
# use different algorithms in two runs of the same network.
SCORE_TOLERANCE = 2e-2
# Maximum memory that repeated requests may allocate. One segment of the allocator is allowed, because requests may
# interleave their work on a stream differently.
MAX_SEGMENTS = 1
MAX_RESERVED_BYTES = 2**25
# Seconds of work until the clocks of an idle GPU have risen.
CLOCK_SECONDS = 0.5


class Check(NamedTuple):
    """Result of a check; `passed` is None if nothing is expected of this device."""

    name: str
    result: str
    passed: bool | None

    @property
    def verdict(self) -> str:
        return "" if self.passed is None else "passed" if self.passed else "FAILED"


class CheckContext:
    """The device to check, and the bundled model, which is built for it as the checks need it."""

    def __init__(self, device_name: str) -> None:
        self.device = devices.choose_device(device_name)
        self.on_cuda = self.device.type == "cuda"
        self.settings = plain_settings(device_name)
        self.spec = choose_model(None, self.settings)

    @cached_property
    def selector(self) -> EngineSelector:
        return load_selector(self.spec, self.settings, self.device)[1]

    def build(self, engine: str) -> ReadyEngine:
        """Build the network without compilation, in the precision and memory format of the measurements."""
        precision, memory_format = ("bf16", "channels_last_3d") if self.on_cuda else ("fp32", "contiguous")
        size = choose_default_batch_size(self.settings, self.device)
        return self.selector.build(EngineConfig(engine, precision, memory_format, size))

    @cached_property
    def plain_graph(self) -> ReadyEngine:
        """The network recorded as one CUDA graph; eager on a CPU."""
        return self.build("cudagraph" if self.on_cuda else "eager")


def make_settings(device_name: str, **engine: object) -> Settings:
    """Return the settings from the environment, with this device and these keys of `engine`."""
    return override_settings(override_settings(read_settings(), "device", {"name": device_name}), "engine", engine)


def plain_settings(device_name: str) -> Settings:
    """Return settings without compilation; on a GPU, they select a CUDA graph in BF16."""
    is_cuda = devices.choose_device(device_name).type == "cuda"
    return make_settings(device_name, **({"kind": "cudagraph", "precision": "bf16"} if is_cuda else {}))


def run_checks(device_name: str) -> Iterator[Check]:
    """Yield the results of each check as soon as they are available. An error counts as a failed check."""
    context = CheckContext(device_name)
    for check in CHECKS:
        yield from attempt(check.__name__.removeprefix("check_").replace("_", " "), partial(check, context))


def attempt(name: str, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield the results of a check. If it raises an error, yield a failed check with this name."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - the other checks must still run
        yield Check(name, f"{type(error).__name__}: {error}", passed=False)


def check_cudnn(_context: CheckContext) -> Iterator[Check]:
    version = torch.backends.cudnn.version()
    yield Check("cuDNN", str(version), None if version is None else version >= devices.FAULTY_CUDNN_VERSIONS.stop)


@torch.inference_mode()
def check_compiler(context: CheckContext) -> Iterator[Check]:
    """Compile a function. On a GPU, this uses Triton, whose launcher needs a C compiler and Python's headers."""
    missing = explain_missing_compiler()
    yield Check("g++ and Python.h", missing or "found", missing is None)
    x = torch.rand(1000, device=context.device)
    actual = torch.compile(lambda x: x.sin() + 1)(x)
    difference = float((actual - x.sin() - 1).abs().max())
    yield Check("a compiled kernel", f"differs by {difference:.0e}", difference < 1e-5)


@torch.inference_mode()
def check_operations(context: CheckContext) -> Iterator[Check]:
    """Profile a forward pass, and report slow operations and the longest kernels."""
    window = context.build("eager").window
    window.network(window.batch)
    with torch.profiler.profile() as recorded:
        window.network(window.batch)
        synchronize(context.device)
    averages = recorded.key_averages()
    slow = find_slow_operations([operation.key for operation in averages])
    yield Check("slow operations in a forward pass", ", ".join(slow) or "none", not slow)
    # Operators are left out, because their time includes that of their kernels.
    kernels = [kernel for kernel in averages if kernel.device_type == torch.autograd.DeviceType.CUDA]
    for kernel in sorted(kernels, key=lambda kernel: -kernel.self_device_time_total)[:8]:
        yield Check(
            f"kernel `{kernel.key[:80]}`", f"{kernel.self_device_time_total / 1000:.3f} ms, {kernel.count} calls", None
        )


def find_slow_operations(names: Sequence[str]) -> list[str]:
    """Return the names of operations that convert the memory format, or convolve without cuDNN."""
    return [name for name in names if any(part in name.lower() for part in SLOW_OPERATIONS)]


@torch.inference_mode()
def check_replay(context: CheckContext) -> Iterator[Check]:
    """Compare replays of the CUDA graph with the recorded module, on two batches."""
    ready = context.plain_graph
    batches = [torch.rand_like(ready.window.batch) for _ in range(2)]
    replayed = [ready.window.network(batch).clone() for batch in batches]
    difference = max(
        largest_difference(actual, ready.module(batch)) for actual, batch in zip(replayed, batches, strict=True)
    )
    between = largest_difference(*replayed)
    yield Check("replay and module", f"differ by {difference:.1e}", difference <= SCORE_TOLERANCE)
    yield Check("replays of two batches", f"differ by {between:.1e}", between > SCORE_TOLERANCE)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the root mean square of `expected`; NaN if a score is not finite."""
    return float((actual - expected).abs().max() / expected.square().mean().sqrt())


def check_labels(context: CheckContext) -> Iterator[Check]:
    """Compare the labels of the model's sample with the labels on the CPU in float32."""
    exact: dict[str, object] = {"kind": "eager", "precision": "fp32", "channels_last": False}
    # Benchmarking cuDNN's algorithms takes seconds, and speed does not matter here.
    exact |= {"matmul_precision": "highest", "cudnn_benchmark": False}
    name = context.settings.device.name
    expected = segment_sample(load(make_settings("cpu", **exact)))
    actual = segment_sample(load(make_settings(name, **exact)))
    yield compare("labels in eager fp32 and on the CPU", actual, expected, FP32_TOLERANCE)
    actual = segment_sample(load(context.settings))
    yield compare("labels of the plain graph and on the CPU", actual, expected, BF16_TOLERANCE)


def load(settings: Settings) -> ModelRunner:
    """Load and warm up the bundled model. Raises RuntimeError if it does not run as configured on a GPU."""
    runner = ModelRunner(choose_model(None, settings), settings)
    runner.warm_up()
    if (report := runner.report()).warnings and report.device != "cpu":
        raise RuntimeError("; ".join(report.warnings))
    return runner


def segment_sample(runner: ModelRunner) -> Segmentation:
    """Segment the model's sample with a new batcher."""
    with open_batcher(runner._settings) as batcher:
        return segment(runner, batcher)


def segment(runner: ModelRunner, batcher: WindowBatcher) -> Segmentation:
    """Segment the model's sample with a batcher."""
    assert runner.spec.sample is not None
    volume = stack_reader.read(runner.spec.folder / runner.spec.sample.input, Selection(), 2**30)
    return segment_volume(runner, volume, Options(diameter="none"), callbacks=Callbacks(batcher.run)).segmentation


def compare(name: str, actual: Segmentation, expected: Segmentation, tolerance: float) -> Check:
    """Return a check that the fraction of voxels with different labels is within the tolerance."""
    share = compute_label_difference(expected, actual)
    text = f"{actual.count} and {expected.count} objects, {share:.1e} of the voxels differ"
    return Check(name, text, share <= tolerance)


def check_memory(context: CheckContext) -> Iterator[Check]:
    """Count the allocations from the driver during the third to fifth request, and the growth of reserved memory."""
    counts = list[tuple[int, int]]()
    with open_batcher(context.settings) as batcher:
        runner = batcher.call(lambda: load(context.settings))
        for _ in range(5):
            segment(runner, batcher)
            counts.append(count_segments(context.device))
    allocations, reserved = (last - first for first, last in zip(counts[1], counts[-1], strict=True))
    text = f"{allocations} allocations, {reserved / 2**20:+.0f} MiB reserved"
    passed = allocations <= MAX_SEGMENTS and reserved <= MAX_RESERVED_BYTES if context.on_cuda else None
    yield Check("memory from the driver for requests 3 to 5", text, passed)


def count_segments(device: torch.device) -> tuple[int, int]:
    """Return the number of allocations from the driver and the reserved bytes; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_stats(device)["segment.all.allocated"], torch.cuda.memory_reserved(device)


@torch.inference_mode()
def check_rates(context: CheckContext) -> Iterator[Check]:
    """Measure the bandwidth of copies on the device and to it, and the speed of a large matrix product."""
    is_hopper = context.on_cuda and any(card in devices.get_device_name(context.device) for card in ("H100", "H200"))
    nbytes = 2**30 if context.on_cuda else 2**24
    upload = Uploader(context.device, 2**23)
    pinned = all(buffer.is_pinned() for buffer in upload._buffers) if context.on_cuda else None
    yield Check("buffers for uploads", "pinned" if pinned else "not pinned", pinned)
    raise_clocks(context.device)
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=context.device) for _ in range(2))
    rate = 2 * nbytes / min_seconds(lambda: target.copy_(source), context.device) / 1e12
    yield Check("copy on the device", f"{rate:.2f} TB/s", rate >= MIN_DEVICE_TBYTES if is_hopper else None)
    staged = torch.zeros(2**26, dtype=torch.uint8, pin_memory=context.on_cuda)
    part = target[: len(staged)] if len(target) > len(staged) else torch.empty_like(staged)
    rate = len(staged) / min_seconds(lambda: part.copy_(staged, non_blocking=True), context.device) / 1e9
    yield Check("copy from pinned memory", f"{rate:.1f} GB/s", rate >= MIN_UPLOAD_GBYTES if is_hopper else None)
    # BF16 would take minutes on a CPU without BF16 instructions.
    rate = measure_matrix_peak(torch.bfloat16 if context.on_cuda else torch.float32, context.device) / 1e12
    yield Check("a large matrix product", f"{rate:.2f} TFLOP/s", rate >= MIN_BF16_TFLOPS if is_hopper else None)


def raise_clocks(device: torch.device) -> None:
    """Keep an idle GPU busy until its clocks have risen."""
    a = torch.rand(2048, 2048, device=device)
    began = time.monotonic()
    while device.type == "cuda" and time.monotonic() - began < CLOCK_SECONDS:
        torch.matmul(a, a)
        synchronize(device)


def min_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of five run times of `call`."""

    def run() -> None:
        call()
        synchronize(device)

    run()
    return min(time_alternately([run], 5)[0])


CHECKS = (
    check_cudnn,
    check_compiler,
    check_rates,
    check_operations,
    check_replay,
    check_memory,
    check_labels,
)
