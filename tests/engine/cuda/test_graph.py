import gc
import inspect
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from paths import ROOT
from torch import nn

from service.core.config import read_settings
from service.core.errors import BadParameter
from service.core.sections.computing import Engine
from service.engine.backends import list_configs
from service.engine.cuda.graph import CudaGraphBackend, CudaRecorder, GraphedNetwork, count_graph_bytes
from service.engine.tuning.plans import EngineConfig


class FakeRecorder:
    """A recorder that replays by running the work again and copying the result into the captured output."""

    nbytes = 1000

    def __init__(self):
        self.log = []

    def warm_up(self, work):
        self.log.append("warm up")
        work()

    def capture(self, work):
        self.log.append("capture")
        self._work, self._output = work, work()
        return self._output

    def replay(self):
        self.log.append("replay")
        self._output.copy_(self._work())


class FakeStream:
    def __init__(self, device):
        self.device = device

    def wait_stream(self, other):
        pass


class FakeGraph:
    finished_pool = None

    def pool(self):
        if self.finished_pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.finished_pool


class FakeCuda:
    """A fake of the parts of `torch.cuda` that a recorder uses. `captures` lists the arguments of every capture.

    As in torch, a failed capture leaves its stream current. With `ends_pools=False`, as in torch before 2.12, it also
    leaves the allocator in capture mode if CUDA has invalidated the capture (`is_capture_invalid`). A Python error
    alone does not.
    """

    CUDAGraph = FakeGraph

    def __init__(self, *, is_capture_invalid=True, ends_pools=False):
        self.captures, self.current_streams, self.created_streams = [], {}, 0
        self.recording_pools, self.released_pools, self.is_capture_invalid, self.ends_pools = (
            set(),
            [],
            is_capture_invalid,
            ends_pools,
        )

    def Stream(self, device):  # noqa: N802
        # Torch cycles through 32 streams of a device.
        self.created_streams += 1
        stream = FakeStream(device)
        stream.number = self.created_streams % 32
        return stream

    def graph_pool_handle(self):
        return 0, len(self.captures) + 1

    def memory_snapshot(self):
        pools = [(0, 0), *(capture["cuda_graph"].pool() for capture in self.captures)]
        return [{"segment_pool_id": pool, "total_size": 2**21} for pool in pools for _ in range(2)]

    def _cuda_endAllocateToPool(self, device, pool):  # noqa: N802
        if pool not in self.recording_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording_pools.remove(pool)

    def _cuda_releasePool(self, device, pool):  # noqa: N802
        self.released_pools.append((device, pool))

    def current_stream(self, device):
        return self.current_streams.setdefault(device, FakeStream(device))

    @contextmanager
    def device(self, device):
        yield

    @contextmanager
    def stream(self, stream):
        previous_stream, self.current_streams[stream.device] = self.current_stream(stream.device), stream
        try:
            yield
        finally:
            self.current_streams[stream.device] = previous_stream

    @contextmanager
    def graph(self, *positional, **keywords):
        arguments = inspect.signature(torch.cuda.graph).bind(*positional, **keywords).arguments
        self.captures.append(arguments)
        previous_stream, self.current_streams[arguments["stream"].device] = None, arguments["stream"]
        self.recording_pools.add(arguments["pool"])
        try:
            yield
        except RuntimeError:
            if self.is_capture_invalid:
                if self.ends_pools:
                    self.recording_pools.remove(arguments["pool"])
                raise
            self.recording_pools.remove(arguments["pool"])
            arguments["cuda_graph"].finished_pool = arguments["pool"]
            raise
        self.recording_pools.remove(arguments["pool"])
        arguments["cuda_graph"].finished_pool = arguments["pool"]
        self.current_streams[arguments["stream"].device] = previous_stream


def test_captures_use_thread_local_mode_and_one_stream_per_device():
    cuda = FakeCuda()
    for index in (0, 1, 1):
        recorder = CudaRecorder(torch.device("cuda", index), cuda)
        recorder.warm_up(lambda: torch.zeros(1))
        recorder.capture(lambda: torch.zeros(1))
    assert {capture["capture_error_mode"] for capture in cuda.captures} == {"thread_local"}
    streams = [capture["stream"] for capture in cuda.captures]
    assert [stream.device.index for stream in streams] == [0, 1, 1]
    assert streams[1] is streams[2]


@pytest.mark.parametrize(
    ("cuda", "released"),
    [(FakeCuda(), [(1, (0, 1))]), (FakeCuda(ends_pools=True), []), (FakeCuda(is_capture_invalid=False), [])],
    ids=["before torch 2.12", "since torch 2.12", "only a Python error"],
)
def test_failed_capture_restores_stream_and_allocator(cuda, released):
    device = torch.device("cuda", 1)
    previous_stream = cuda.current_stream(device)
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaRecorder(device, cuda, cuda).capture(fail)
    assert cuda.current_stream(device) is previous_stream
    assert not cuda.recording_pools
    assert cuda.released_pools == released, "a pool that torch releases must not be released twice"


def test_memory_of_a_graph_includes_only_its_own_pool():
    cuda, example = FakeCuda(), torch.zeros(2, 1, 3, 3, 3)
    networks = [GraphedNetwork(lambda x: x, example, CudaRecorder(torch.device("cuda", 0), cuda)) for _ in range(2)]
    assert [count_graph_bytes(network, 7) for network in networks] == [example.nbytes + 2 * 2**21] * 2
    assert [count_graph_bytes(lambda x: x, pool_bytes) for pool_bytes in (2**21, 0, -(2**21))] == [2**21, 0, 0]


def fail():
    raise RuntimeError("operation not permitted when stream is capturing")


def test_graph_keeps_its_network_alive():
    module = nn.Conv3d(1, 1, 1)
    network_reference = weakref.ref(module)
    graphed_network = GraphedNetwork(module, torch.zeros(1, 1, 2, 2, 2), ForgetfulRecorder())
    del module
    gc.collect()
    assert network_reference() is not None
    del graphed_network
    assert network_reference() is None


class ForgetfulRecorder(FakeRecorder):
    """A recorder that, like a CUDA graph, does not reference the recorded work."""

    def capture(self, work):
        return work()


@torch.inference_mode()
def test_graph_is_recorded_once_after_warm_up_and_then_replayed():
    """The example and the inputs stay unchanged, and all scores use the same memory."""
    recorder, example, addresses = FakeRecorder(), torch.zeros(2, 1, 3, 3, 3), set()
    network = GraphedNetwork(lambda x: 2 * x, example, recorder)
    assert recorder.log == ["warm up", "capture"]
    for value in (1.0, 5.0):
        x = torch.full((2, 1, 3, 3, 3), value)
        scores = network(x)
        assert torch.equal(scores, 2 * x)
        assert (x == value).all()
        addresses.add(scores.data_ptr())
    assert len(addresses) == 1
    assert not example.any()
    assert recorder.log == ["warm up", "capture", "replay", "replay"]


class BusyRecorder(FakeRecorder):
    """A recorder that fails if another one is recording at the same time."""

    stream = threading.Lock()

    def warm_up(self, work):
        assert self.stream.acquire(blocking=False)
        time.sleep(0.01)
        super().warm_up(work)

    def capture(self, work):
        output = super().capture(work)
        self.stream.release()
        return output


def test_concurrently_loaded_networks_are_recorded_one_at_a_time():
    with ThreadPoolExecutor(4) as pool:
        examples = [torch.zeros(1, 1, 2, 2, 2)] * 4
        list(pool.map(lambda example: GraphedNetwork(nn.Identity(), example, BusyRecorder()), examples))


@pytest.mark.parametrize(
    "other", [torch.zeros(1, 1, 3, 3, 3), torch.zeros(2, 1, 3, 3, 4), torch.zeros(2, 1, 3, 3, 3).double()]
)
def test_other_shapes_and_dtypes_are_rejected(other):
    network = GraphedNetwork(lambda x: x, torch.zeros(2, 1, 3, 3, 3), FakeRecorder())
    with pytest.raises(BadParameter, match=r"captured for batches of \(2, 1, 3, 3, 3\)"):
        network(other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_real_capture_does_not_interfere_with_other_threads():
    device, stop_event = torch.device("cuda", 0), threading.Event()

    def use_device():
        while not stop_event.is_set():
            torch.cuda.empty_cache()
            torch.empty(2**20, pin_memory=True).to(device, non_blocking=True).sum().item()

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(use_device) for _ in range(2)]
        try:
            for _ in range(20):
                network = GraphedNetwork(lambda x: x.sin() + 1, torch.zeros(2, 1, 16, 16, 16, device=device))
                assert (network(torch.zeros(2, 1, 16, 16, 16, device=device)) == 1).all()
        finally:
            stop_event.set()
        for future in futures:
            future.result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.inference_mode()
def test_failed_real_captures_release_their_memory():
    example = torch.zeros(2, 1, 16, 16, 16, device="cuda")

    def synchronize(x):
        # Synchronize only during the capture. Before that, the network runs eagerly.
        if torch.cuda.is_current_stream_capturing():
            x.sum().item()
        return x + 1

    reserved_bytes = []
    for _ in range(4):
        with pytest.raises(RuntimeError):
            GraphedNetwork(synchronize, example)
        torch.cuda.empty_cache()
        reserved_bytes.append(torch.cuda.memory_reserved())
    # Libraries may allocate memory at the first call.
    assert len(set(reserved_bytes[1:])) == 1
    assert (GraphedNetwork(lambda x: x + 1, example)(example) == 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.inference_mode()
def test_real_graph_gives_the_scores_of_the_module():
    module = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 1)).cuda().eval()
    example = torch.zeros(2, 1, 16, 16, 16, device="cuda")
    # Available since torch 2.12.
    options = {"check_input_liveness"} & inspect.signature(torch.cuda.graph).parameters.keys()
    network = GraphedNetwork(module, example, CudaRecorder(example.device, **dict.fromkeys(options, True)))
    assert network.nbytes > 2 * 4 * 16**3 * 4
    for _ in range(3):
        x = torch.rand(2, 1, 16, 16, 16, device="cuda")
        torch.testing.assert_close(network(x), module(x))


def test_network_is_compiled_without_torch_graphs_before_recording():
    calls = []

    def compile_network(module, mode, *, freeze):
        calls.append((module, mode, freeze))
        return lambda x: module(x) + 1

    backend = CudaGraphBackend(lambda network, x: network(x), compile_network)
    module, example = nn.Identity(), torch.zeros(1)
    for mode, expected in [(None, 0), ("reduce-overhead", 1), ("default", 1)]:
        config = EngineConfig("cudagraph", "bf16", "channels_last_3d", 8, mode)
        assert backend.build(module, example, config, Engine()).item() == expected
    assert calls == [(module, "default", False)] * 2


def test_gpu_preset_starts_with_compiled_cuda_graphs():
    settings = read_settings(ROOT / "configs" / "gpu.yaml", {}).engine
    first, *_ = list_configs(settings, torch.device("cuda"), ("bf16",), 8)
    assert first == EngineConfig("cudagraph", "bf16", "channels_last_3d", 8, "reduce-overhead")


def test_configured_compile_mode_is_tried_before_none():
    device = torch.device("cuda")
    assert CudaGraphBackend().list_compile_modes(Engine(compile_mode="default"), device) == ("default", None)
    assert CudaGraphBackend().list_compile_modes(Engine(), device)[0] is None, "None is ready in seconds"
