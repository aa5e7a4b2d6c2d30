import pytest
import torch

from service.core.sections.computing import Engine
from service.engine.cuda import tf32

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def read_switches():
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark


@pytest.fixture(autouse=True)
def _restore_switches():
    matmul_precision, cudnn_allow_tf32, benchmark = read_switches()
    yield
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = cudnn_allow_tf32, benchmark


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Engine(), ("high", True, True)),
        (Engine(matmul_precision="medium", cudnn_benchmark=False), ("medium", True, False)),
        (Engine(matmul_precision="highest"), ("highest", False, True)),
    ],
)
def test_settings_apply_to_a_gpu_but_not_to_a_cpu(settings, expected):
    switches_before = read_switches()
    tf32.configure(settings, CPU)
    assert read_switches() == switches_before
    tf32.configure(settings, CUDA)
    assert read_switches() == expected


def test_tf32_is_disabled_temporarily_for_the_reference():
    tf32.configure(Engine(), CUDA)
    observed = tf32.wrap_without_tf32(lambda x: (read_switches(), x)[0])(torch.zeros(1))
    assert observed[:2] == ("highest", False)
    assert read_switches() == ("high", True, True)
    with pytest.raises(RuntimeError, match="inside the context"), tf32.disable_tf32():
        raise RuntimeError("an error inside the context")
    assert read_switches() == ("high", True, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_results_without_tf32_are_closer_to_float64():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(512, 512, generator=generator).to(CUDA) for _ in range(2))
    expected = x.double() @ y.double()
    tf32.configure(Engine(), CUDA)
    with tf32.disable_tf32():
        error = (x @ y - expected).abs().max()
    assert error < 1e-3
    if torch.cuda.get_device_capability()[0] >= 8:
        assert (x @ y - expected).abs().max() > error
