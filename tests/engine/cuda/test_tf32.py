import pytest
import torch

from service.core.sections.computing import Engine
from service.engine.cuda import tf32

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def switches():
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark


@pytest.fixture(autouse=True)
def _restored():
    matrices, convolutions, benchmark = switches()
    yield
    torch.set_float32_matmul_precision(matrices)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = convolutions, benchmark


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Engine(), ("high", True, True)),
        (Engine(matmul_precision="medium", cudnn_benchmark=False), ("medium", True, False)),
        (Engine(matmul_precision="highest"), ("highest", False, True)),
    ],
)
def test_a_gpu_computes_as_configured_and_a_cpu_is_left_as_it_is(settings, expected):
    before = switches()
    tf32.use(settings, CPU)
    assert switches() == before
    tf32.use(settings, CUDA)
    assert switches() == expected


def test_the_reference_is_exact_and_what_was_set_comes_back():
    tf32.use(Engine(), CUDA)
    seen = tf32.without_tf32(lambda x: (switches(), x)[0])(torch.zeros(1))
    assert seen[:2] == ("highest", False)
    assert switches() == ("high", True, True)
    with pytest.raises(RuntimeError, match="of its own"), tf32.exact():
        raise RuntimeError("an error of its own")
    assert switches() == ("high", True, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_is_exact_is_closer_to_float64():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(512, 512, generator=generator).to(CUDA) for _ in range(2))
    expected = x.double() @ y.double()
    tf32.use(Engine(), CUDA)
    with tf32.exact():
        exact = (x @ y - expected).abs().max()
    assert exact < 1e-3
    if torch.cuda.get_device_capability()[0] >= 8:
        assert (x @ y - expected).abs().max() > exact
