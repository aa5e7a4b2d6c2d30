"""Tests with the original client of Triton, which is not installed by default: pip install 'tritonclient[http]'."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tifffile
from live import LabelTiff, LiveServer, as_tiff, make_live_fixture
from numpy.typing import NDArray
from paths import ROOT

triton = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")


live = make_live_fixture(ROOT / "models", models={"serve": ["nuclei"]}, device={"threads": 2})


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[Any]:
    with triton.InferenceServerClient(f"{live.host}:{live.port}", network_timeout=120) as running:
        yield running


def infer(client: Any, pixels: NDArray[Any], *, is_binary: bool = True, output: Any = None, **options: Any) -> Any:
    tensor = triton.InferInput("image", list(pixels.shape), "UINT16")
    tensor.set_data_from_numpy(pixels, binary_data=is_binary)
    return client.infer("nuclei", [tensor], outputs=None if output is None else [output], **options)


def test_client_segments_the_sample(live: LiveServer, client: Any) -> None:
    sample = live.client.get("/models/nuclei/sample").content
    expected = live.segment(sample)
    pixels, voxel_size = tifffile.imread(io.BytesIO(sample)), expected.headers["x-stackseg-voxel-size"]
    result = infer(client, pixels.astype(np.uint16), parameters={"voxel_size": voxel_size}, request_id="7")
    labels = result.as_numpy("labels")
    assert (labels.dtype, result.get_response()["id"]) == (np.uint32, "7")
    assert labels.max() == result.get_response()["parameters"]["objects"] > 10
    assert np.array_equal(labels, LabelTiff(expected.content).pixels)


def test_client_uses_all_formats(live: LiveServer, client: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 1000, (8, 20, 20), np.uint16)
    expected = LabelTiff(live.segment(as_tiff(pixels, metadata={"axes": "ZYX"}), output="classes").content).pixels
    for options in (
        {"output": triton.InferRequestedOutput("classes")},
        {"output": triton.InferRequestedOutput("classes", binary_data=False), "is_binary": False},
        {"parameters": {"output": "classes"}, "request_compression_algorithm": "gzip"},
        {"parameters": {"output": "classes"}, "response_compression_algorithm": "deflate"},
    ):
        assert np.array_equal(infer(client, pixels, **options).as_numpy("classes"), expected)


def test_client_reads_descriptions_and_errors(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("nuclei", client.get_model_metadata("nuclei")["versions"][0])
    assert not client.is_model_ready("none")
    assert client.get_server_metadata()["name"] == "stackseg"
    assert {model["name"] for model in client.get_model_repository_index()} == {"nuclei"}
    assert client.get_model_metadata("nuclei")["inputs"][0]["name"] == "image"
    assert client.get_model_config("nuclei")["max_batch_size"] == 0
    with pytest.raises(triton.InferenceServerException, match="'sequence_id'"):
        infer(client, np.zeros((2, 4, 4), np.uint16), sequence_id=1)
