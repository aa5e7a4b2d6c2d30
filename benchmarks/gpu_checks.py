"""Checks before anything is measured on a GPU: `benchmarks/gpu.py check` prints a row for each as soon as it has run.

A check that fails makes the figures that follow it worthless, so each says what was found. Rates are compared with what
an H100 reaches; other cards, and a CPU, have rows without a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from service.cli.benchmark.networks import load_selector
from service.cli.benchmark.timing import measure_matrix_peak, synchronize, time_alternately
from service.cli.models import choose_model
from service.core.config import Settings, override_settings, read_settings
from service.core.hardware import devices
from service.core.types import Options, Segmentation, Selection
from service.engine.compile.torch_compile import explain_missing_compiler
from service.engine.tuning.plans import EngineConfig
from service.formats import stack_reader
from service.inference.cuda.device_image import Upload
from service.inference.runner.callbacks import Callbacks
from service.inference.runner.engine_builder import ReadyEngine, default_batch_size
from service.inference.runner.label_agreement import fraction_differing
from service.inference.runner.model_runner import ModelRunner
from service.inference.runner.selector import EngineSelector
from service.inference.segment import segment as segment_volume
from service.inference.windows.batching.batcher import WindowBatcher, open_batcher

# Parts of the names of operations that no BF16 channels-last forward should run: convolutions without cuDNN, and
# conversions of the memory format.
SLOW_OPERATIONS = ("vol2col", "slow_conv", "nchwtonhwc", "nhwctonchw")
# What an H100 reaches: TB/s that a copy on the device reads and writes, GB/s from pinned memory, TFLOP/s of a product.
MIN_DEVICE_TBYTES, MIN_UPLOAD_GBYTES, MIN_BF16_TFLOPS = 2.5, 20.0, 600.0
# Largest share of voxels with another label than on the CPU in float32.
FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 1e-3
# Largest difference between two scores in BF16, relative to their root mean square: some units in the last place, as
# two runs of the same network may use other algorithms.
SCORE_TOLERANCE = 2e-2
# Requests may interleave their work on a stream differently, which takes one more segment of the allocator at most.
MAX_SEGMENTS, MAX_RESERVED_BYTES = 1, 2**25
# Seconds of work after which the clocks of an idle card have risen.
CLOCK_SECONDS = 0.5


class Check(NamedTuple):
    """Result of one check; `passed` is None if nothing is expected of this device."""

    name: str
    found: str
    passed: bool | None

    @property
    def verdict(self) -> str:
        return "" if self.passed is None else "passed" if self.passed else "FAILED"


class Bench:
    """The bundled model on one device, made as the checks need it."""

    def __init__(self, device_name: str) -> None:
        self.device = devices.choose_device(device_name)
        self.on_cuda = self.device.type == "cuda"
        self.settings = plain_settings(device_name)
        self.spec = choose_model(None, self.settings)

    @cached_property
    def selector(self) -> EngineSelector:
        return load_selector(self.spec, self.settings, self.device)[1]

    def build(self, engine: str) -> ReadyEngine:
        """Build the network in the precision and memory format that are measured, without compiling it."""
        precision, memory_format = ("bf16", "channels_last_3d") if self.on_cuda else ("fp32", "contiguous")
        size = default_batch_size(self.settings, self.device)
        return self.selector.build(EngineConfig(engine, precision, memory_format, size))

    @cached_property
    def plain_graph(self) -> ReadyEngine:
        """The network recorded as one CUDA graph; eager on a CPU."""
        return self.build("cudagraph" if self.on_cuda else "eager")


def settings_of(device_name: str, **engine: object) -> Settings:
    """Return the settings of the environment for one device, with these keys of `engine`."""
    return override_settings(override_settings(read_settings(), "device", {"name": device_name}), "engine", engine)


def plain_settings(device_name: str) -> Settings:
    """Return settings that compile nothing: on a GPU a CUDA graph in BF16."""
    is_cuda = devices.choose_device(device_name).type == "cuda"
    return settings_of(device_name, **({"kind": "cudagraph", "precision": "bf16"} if is_cuda else {}))


def run_checks(device_name: str) -> Iterator[Check]:
    """Yield the result of each check as soon as it has run; an error is a check that failed."""
    bench = Bench(device_name)
    for check in CHECKS:
        yield from attempt(check.__name__.removeprefix("check_").replace("_", " "), partial(check, bench))


def attempt(name: str, check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield the results of a check; an error is a check that failed, with this name."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks still run
        yield Check(name, f"{type(error).__name__}: {error}", passed=False)


def check_cudnn(_bench: Bench) -> Iterator[Check]:
    version = torch.backends.cudnn.version()
    yield Check("cuDNN", str(version), None if version is None else version >= devices.FAULTY_CUDNN.stop)


@torch.inference_mode()
def check_compiler(bench: Bench) -> Iterator[Check]:
    """Compile a function: on a GPU by Triton, whose launcher needs a C compiler and Python's headers."""
    missing = explain_missing_compiler()
    yield Check("g++ and Python.h", missing or "found", missing is None)
    x = torch.rand(1000, device=bench.device)
    found = torch.compile(lambda x: x.sin() + 1)(x)
    difference = float((found - x.sin() - 1).abs().max())
    yield Check("a compiled kernel", f"differs by {difference:.0e}", difference < 1e-5)


@torch.inference_mode()
def check_operations(bench: Bench) -> Iterator[Check]:
    """Profile one forward pass."""
    window = bench.build("eager").window
    window.network(window.batch)
    with torch.profiler.profile() as recorded:
        window.network(window.batch)
        synchronize(bench.device)
    averages = recorded.key_averages()
    slow = find_slow_operations([each.key for each in averages])
    yield Check("slow operations in a forward pass", ", ".join(slow) or "none", not slow)
    # Operators have the time of their kernels, too.
    kernels = [each for each in averages if each.device_type == torch.autograd.DeviceType.CUDA]
    for each in sorted(kernels, key=lambda each: -each.self_device_time_total)[:8]:
        yield Check(
            f"kernel `{each.key[:80]}`", f"{each.self_device_time_total / 1000:.3f} ms, {each.count} calls", None
        )


def find_slow_operations(names: Sequence[str]) -> list[str]:
    """Return the names of operations that convert the memory format, or convolve without cuDNN."""
    return [name for name in names if any(part in name.lower() for part in SLOW_OPERATIONS)]


@torch.inference_mode()
def check_replay(bench: Bench) -> Iterator[Check]:
    """Compare replays of a graph with the module that was recorded, on two batches."""
    ready = bench.plain_graph
    batches = [torch.rand_like(ready.window.batch) for _ in range(2)]
    replayed = [ready.window.network(batch).clone() for batch in batches]
    difference = max(
        largest_difference(found, ready.module(batch)) for found, batch in zip(replayed, batches, strict=True)
    )
    between = largest_difference(*replayed)
    yield Check("replay and module", f"differ by {difference:.1e}", difference <= SCORE_TOLERANCE)
    yield Check("replays of two batches", f"differ by {between:.1e}", between > SCORE_TOLERANCE)


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the root mean square of what is expected; NaN if one is not finite."""
    return float((found - expected).abs().max() / expected.square().mean().sqrt())


def check_labels(bench: Bench) -> Iterator[Check]:
    """Compare labels of the model's sample with those on the CPU in float32."""
    exact: dict[str, object] = {"kind": "eager", "precision": "fp32", "channels_last": False}
    # Trying cuDNN's algorithms takes seconds, which are not measured here.
    exact |= {"matmul_precision": "highest", "cudnn_benchmark": False}
    name = bench.settings.device.name
    expected = segment_sample(load(settings_of("cpu", **exact)))
    found = segment_sample(load(settings_of(name, **exact)))
    yield compare("labels in eager fp32 and on the CPU", found, expected, FP32_TOLERANCE)
    found = segment_sample(load(bench.settings))
    yield compare("labels of the plain graph and on the CPU", found, expected, BF16_TOLERANCE)


def load(settings: Settings) -> ModelRunner:
    """Load the bundled model and make it ready. Raises RuntimeError if it does not run as configured."""
    runner = ModelRunner(choose_model(None, settings), settings)
    runner.warm_up()
    if (report := runner.report()).warnings and report.device != "cpu":
        raise RuntimeError("; ".join(report.warnings))
    return runner


def segment_sample(runner: ModelRunner) -> Segmentation:
    """Return the labels of the model's sample, whose windows the threads of a batcher compute."""
    with open_batcher(runner._settings) as batcher:
        return segment(runner, batcher)


def segment(runner: ModelRunner, batcher: WindowBatcher) -> Segmentation:
    assert runner.spec.sample is not None
    volume = stack_reader.read(runner.spec.folder / runner.spec.sample.input, Selection(), 2**30)
    return segment_volume(runner, volume, Options(diameter="none"), callbacks=Callbacks(batcher.run)).segmentation


def compare(name: str, found: Segmentation, expected: Segmentation, tolerance: float) -> Check:
    share = fraction_differing(expected, found)
    text = f"{found.count} and {expected.count} objects, {share:.1e} of the voxels differ"
    return Check(name, text, share <= tolerance)


def check_memory(bench: Bench) -> Iterator[Check]:
    """Count what the third to fifth request allocate from the driver, and what they leave reserved."""
    counts = list[tuple[int, int]]()
    with open_batcher(bench.settings) as batcher:
        runner = batcher.call(lambda: load(bench.settings))
        for _ in range(5):
            segment(runner, batcher)
            counts.append(count_segments(bench.device))
    allocations, reserved = (last - first for first, last in zip(counts[1], counts[-1], strict=True))
    text = f"{allocations} allocations, {reserved / 2**20:+.0f} MiB reserved"
    passed = allocations <= MAX_SEGMENTS and reserved <= MAX_RESERVED_BYTES if bench.on_cuda else None
    yield Check("memory from the driver for requests 3 to 5", text, passed)


def count_segments(device: torch.device) -> tuple[int, int]:
    """Return how often memory was allocated from the driver, and the bytes that are reserved; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_stats(device)["segment.all.allocated"], torch.cuda.memory_reserved(device)


@torch.inference_mode()
def check_rates(bench: Bench) -> Iterator[Check]:
    """Measure the limits of the device: copies on it and to it, and a large matrix product."""
    expects = bench.on_cuda and any(card in devices.device_name(bench.device) for card in ("H100", "H200"))
    nbytes = 2**30 if bench.on_cuda else 2**24
    upload = Upload(bench.device, 2**23)
    pinned = all(buffer.is_pinned() for buffer in upload._buffers) if bench.on_cuda else None
    yield Check("buffers for uploads", "pinned" if pinned else "not pinned", pinned)
    raise_clocks(bench.device)
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=bench.device) for _ in range(2))
    rate = 2 * nbytes / least_seconds(lambda: target.copy_(source), bench.device) / 1e12
    yield Check("copy on the device", f"{rate:.2f} TB/s", rate >= MIN_DEVICE_TBYTES if expects else None)
    staged = torch.zeros(2**26, dtype=torch.uint8, pin_memory=bench.on_cuda)
    part = target[: len(staged)] if len(target) > len(staged) else torch.empty_like(staged)
    rate = len(staged) / least_seconds(lambda: part.copy_(staged, non_blocking=True), bench.device) / 1e9
    yield Check("copy from pinned memory", f"{rate:.1f} GB/s", rate >= MIN_UPLOAD_GBYTES if expects else None)
    # A CPU without BF16 units would take minutes.
    rate = measure_matrix_peak(torch.bfloat16 if bench.on_cuda else torch.float32, bench.device) / 1e12
    yield Check("a large matrix product", f"{rate:.2f} TFLOP/s", rate >= MIN_BF16_TFLOPS if expects else None)


def raise_clocks(device: torch.device) -> None:
    """Keep an idle card busy until its clocks have risen."""
    a = torch.rand(2048, 2048, device=device)
    began = time.monotonic()
    while device.type == "cuda" and time.monotonic() - began < CLOCK_SECONDS:
        torch.matmul(a, a)
        synchronize(device)


def least_seconds(call: Callable[[], object], device: torch.device) -> float:
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
