"""Tests of the Open Inference Protocol with a server on a real socket, as in the documents of KServe and Triton."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bands import Phantom
from fakes import wait_until
from live import LabelTiff, LiveServer, as_tiff, eager_settings, serve
from numpy.typing import NDArray

from service.api.access.keys import hash_key
from service.api.kserve import body
from service.api.kserve.messages import PARAMETERS
from service.api.kserve.tensors import DTYPES
from service.formats.open_stack import MAX_PLANES
from service.formats.tiff.writer import make_uncompressed_header

KEY = "stackseg_ada"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
INFER = "/v2/models/bands/infer"
BINARY = {"binary_data_output": True}


@pytest.fixture(scope="module")
def live(bands_repository: Path) -> Iterator[LiveServer]:
    settings = eager_settings(
        bands_repository, access={"keys": {"ada": hash_key(KEY)}}, limits={"upload_bytes": 2**22, "cache_bytes": 2**24}
    )
    with serve(settings) as running:
        running.client.headers.update(AUTHORIZATION)
        yield running


def describe_array(pixels: NDArray[Any]) -> dict[str, Any]:
    prefix = {"u": "UINT", "i": "INT", "f": "FP"}[pixels.dtype.kind]
    return {"name": "image", "shape": list(pixels.shape), "datatype": f"{prefix}{8 * pixels.dtype.itemsize}"}


def send_binary(
    live: LiveServer, pixels: NDArray[Any], encode: Callable[[bytes], bytes] = bytes, /, **members: Any
) -> Any:
    """Send an array as binary data. `members` override members of the request."""
    tensor = describe_array(pixels) | {"parameters": {"binary_data_size": pixels.nbytes}} | members.pop("tensor", {})
    headers = members.pop("headers", {})
    document = json.dumps({"inputs": [tensor], "parameters": BINARY} | members).encode()
    lengths = {body.LENGTH_HEADER: str(len(document))}
    return live.client.post(INFER, content=encode(document + pixels.tobytes()), headers=lengths | headers)


def send_json(live: LiveServer, pixels: NDArray[Any], values: Any, /, **members: Any) -> Any:
    return live.client.post(INFER, json={"inputs": [describe_array(pixels) | {"data": values}], **members})


def read_output(response: Any) -> tuple[dict[str, Any], NDArray[Any]]:
    """Return the JSON object and the values of a response."""
    assert response.status_code == 200, response.text
    length = response.headers.get(body.LENGTH_HEADER)
    document = json.loads(response.content[: int(length)] if length else response.content)
    (output,) = document["outputs"]
    dtype = DTYPES[output["datatype"]]
    if "parameters" in output:
        content = response.content[int(length) :]
        assert len(content) == output["parameters"]["binary_data_size"]
        values = np.frombuffer(content, dtype)
    else:
        values = np.array(output["data"], dtype)
    return document, values.reshape(output["shape"])


@pytest.fixture(scope="module")
def pixels() -> NDArray[np.uint16]:
    return np.random.default_rng(0).integers(0, 1000, (10, 40, 48), np.uint16)


@pytest.fixture(scope="module")
def expected(live: LiveServer, pixels: NDArray[np.uint16]) -> LabelTiff:
    return LabelTiff(live.segment(as_tiff(pixels), voxel_size="0.5,0.2,0.2").content)


def test_binary_tensor_gives_the_result_of_segment(live: LiveServer, phantom: Phantom) -> None:
    expected = live.segment(as_tiff(phantom.image), voxel_size="0.5,0.2,0.2", overlap="0.25")
    parameters = BINARY | {"voxel_size": "0.5,0.2,0.2", "overlap": 0.25}
    document, values = read_output(send_binary(live, phantom.image, id="a-7", parameters=parameters))
    assert len(np.unique(values)) == 3
    assert np.array_equal(values, LabelTiff(expected.content).pixels)
    assert (document["id"], document["model_name"], document["model_version"]) == ("a-7", "bands", "1")
    assert document["parameters"]["voxel_size"] == expected.headers["x-stackseg-voxel-size"]
    assert (document["outputs"][0]["name"], document["outputs"][0]["datatype"]) == ("classes", "UINT16")


def test_probabilities_have_the_values_of_segment(live: LiveServer, pixels: NDArray[np.uint16]) -> None:
    outputs = [{"name": "probabilities", "parameters": {"binary_data": True}}]
    _, values = read_output(send_binary(live, pixels, parameters={}, outputs=outputs))
    expected = LabelTiff(live.segment(as_tiff(pixels), output="probabilities").content).pixels
    assert values.shape == (3, *pixels.shape)
    assert np.array_equal(values, expected)


def test_json_and_binary_values_are_equivalent(
    live: LiveServer, pixels: NDArray[np.uint16], expected: LabelTiff
) -> None:
    for response in (
        send_json(live, pixels, pixels.ravel().tolist()),
        send_json(live, pixels, pixels.tolist(), parameters=BINARY),
        send_binary(live, pixels, parameters={}),
        send_json(live, pixels.astype(np.float32), pixels.tolist(), id="[]}]}"),
    ):
        assert np.array_equal(read_output(response)[1], expected.pixels)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_datatypes_are_read_without_loss(
    live: LiveServer, pixels: NDArray[np.uint16], expected: LabelTiff, dtype: str
) -> None:
    converted = (pixels // 8).astype(DTYPES[dtype])
    result = read_output(send_binary(live, converted))[1]
    reference = LabelTiff(live.segment(as_tiff((pixels // 8).astype(np.uint8))).content)
    assert np.array_equal(result, reference.pixels)


def test_axes_are_those_of_the_parameter(live: LiveServer, pixels: NDArray[np.uint16], expected: LabelTiff) -> None:
    two_channels = np.stack([np.zeros_like(pixels), pixels])
    for array, parameters in (
        (two_channels, {"channel": 1}),
        (two_channels.swapaxes(0, 1).copy(), {"channel": 1, "axes": "ZCYX"}),
        (two_channels, {"time": 1, "axes": "TZYX"}),
    ):
        assert np.array_equal(read_output(send_binary(live, array, parameters=BINARY | parameters))[1], expected.pixels)


@pytest.mark.parametrize(
    ("encoding", "encode", "decode"),
    [("gzip", gzip.compress, gzip.decompress), ("deflate", zlib.compress, zlib.decompress)],
)
def test_bodies_may_be_compressed(
    live: LiveServer, pixels: NDArray[np.uint16], expected: LabelTiff, encoding: str, encode: Any, decode: Any
) -> None:
    headers = {"Content-Encoding": encoding, "Accept-Encoding": encoding}
    send_binary(live, pixels)
    response = send_binary(live, pixels, encode, headers=headers)
    # The client of the test has decompressed the response.
    assert response.headers["x-cache"] == "hit"
    assert response.headers["content-encoding"] == encoding
    assert int(response.num_bytes_downloaded) < len(response.content) / 5
    assert np.array_equal(read_output(response)[1], expected.pixels)


def test_models_are_described(live: LiveServer) -> None:
    get = live.client.get
    assert get("/v2").json()["name"] == "stackseg"
    assert [model["state"] for model in live.client.post("/v2/repository/index").json()] == ["READY"]
    for path in ("/v2/models/bands", "/v2/models/bands/versions/1"):
        model = get(path).json()
        assert model["versions"] == ["1"]
        assert model["inputs"] == [{"name": "image", "datatype": "UINT16", "shape": [-1, -1, -1]}]
        assert [output["shape"] for output in model["outputs"]] == [[-1, -1, -1], [3, -1, -1, -1]]
        assert get(f"{path}/ready").json()["ready"]
        assert get(f"{path}/config").json()["output"][0] == {
            "name": "classes",
            "data_type": "TYPE_UINT16",
            "dims": [-1, -1, -1],
        }
    for path in ("/v2/models/none", "/v2/models/bands/versions/2", "/v2/models/none/ready"):
        response = get(path)
        assert (response.status_code, response.json()["error"]) == (404, response.json()["detail"])


TENSOR_ERRORS: list[tuple[dict[str, Any], int, str]] = [
    ({"shape": [10, 40, 47]}, 422, "binary_data_size"),
    ({"shape": [10, 40, 48, 1, 1, 1, 1]}, 422, "shape"),
    ({"shape": [1920]}, 422, "shape"),
    ({"shape": [-10, -40, 48]}, 422, "shape"),
    ({"shape": [0, 40, 48]}, 422, "shape"),
    ({"shape": [2**31, 1, 1]}, 422, "shape"),
    ({"shape": [2**30] * 3}, 413, "too large"),
    ({"datatype": "BYTES"}, 422, "'BYTES' is not supported"),
    ({"name": "input"}, 422, "'image'"),
    ({"parameters": {"binary_data_size": 7}}, 422, "38400 bytes"),
    ({"parameters": {"shared_memory_region": "x"}}, 422, "shared_memory_region"),
    ({"parameters": {}}, 422, "binary_data_size"),
    ({"data": [1]}, 422, "either"),
]


@pytest.mark.parametrize(("members", "status", "words"), TENSOR_ERRORS)
def test_invalid_tensors_are_refused(
    live: LiveServer, pixels: NDArray[np.uint16], members: dict[str, Any], status: int, words: str
) -> None:
    check_refusal(send_binary(live, pixels, tensor=members), status, words)


def check_refusal(response: Any, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    assert words in response.json()["error"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"parameters": {"sequence_id": 1}}, "'sequence_id'"),
        ({"parameters": {"voxel_size": [1, 1, 1]}}, "parameters.voxel_size: expected a string such as"),
        ({"parameters": {"input": "scans/a.tif"}}, "'input'"),
        ({"parameters": {"overlap": 2}}, "overlap"),
        ({"parameters": {"time": "all", "axes": "TYX"}}, "time"),
        ({"parameters": {"output": "classes"}, "outputs": [{"name": "probabilities"}]}, "output"),
        ({"parameters": {"binary_data_output": "yes"}}, "binary_data_output"),
        ({"outputs": [{"name": "labels"}]}, "predicts classes"),
        ({"outputs": [{"name": "masks"}]}, "labels, classes, probabilities"),
        ({"outputs": [{"name": "classes"}, {"name": "probabilities"}]}, "several"),
        ({"outputs": [{"name": "classes", "parameters": {"classification": 2}}]}, "classification"),
        ({"inputs": []}, "exactly one"),
        ({"batch": 1}, "batch"),
    ],
)
def test_invalid_requests_are_refused(
    live: LiveServer, pixels: NDArray[np.uint16], members: dict[str, Any], words: str
) -> None:
    check_refusal(send_binary(live, pixels, **members), 422, words)


def test_bodies_that_do_not_match_their_tensor_are_refused(live: LiveServer, pixels: NDArray[np.uint16]) -> None:
    check_refusal(send_binary(live, pixels, lambda content: content[:-1]), 422, "1 bytes shorter")
    check_refusal(send_binary(live, pixels, lambda content: content + b"0"), 422, "longer")
    gzipped = {"Content-Encoding": "gzip"}
    check_refusal(send_binary(live, pixels, headers=gzipped), 422, "decompressed")
    check_refusal(send_binary(live, pixels, lambda c: gzip.compress(c)[:-9], headers=gzipped), 422, "truncated")
    check_refusal(send_binary(live, pixels, lambda c: gzip.compress(c) + b"0", headers=gzipped), 422, "other data")
    bomb = gzip.compress(bytes(2**27))
    check_refusal(send_binary(live, pixels, lambda c: gzip.compress(c) + bomb, headers=gzipped), 422, "other data")
    check_refusal(send_binary(live, pixels, lambda c: gzip.compress(c + bytes(2**27)), headers=gzipped), 422, "longer")
    check_refusal(send_binary(live, pixels, headers={"Content-Encoding": "br"}), 415, "br")


@pytest.mark.parametrize("length", ["x", "-1", "0", "9" * 30, str(body.MAX_HEADER_BYTES + 1)])
def test_invalid_lengths_of_the_json_object_are_refused(
    live: LiveServer, pixels: NDArray[np.uint16], length: str
) -> None:
    check_refusal(send_binary(live, pixels, headers={body.LENGTH_HEADER: length}), 422, body.LENGTH_HEADER)


@pytest.mark.parametrize(
    ("values", "datatype", "status", "words"),
    [
        ([1, 256], "UINT8", 422, "range"),
        ([1, -1], "UINT64", 422, "range"),
        ([1, 10**30], "UINT64", 422, "range"),
        ([1, 1.5], "UINT8", 422, "numbers"),
        ([1, True], "UINT8", 422, "numbers"),
        ([1, "2"], "FP32", 422, "numbers"),
        ([1, 1e300], "FP32", 422, "range"),
        ([1, 10**400], "FP64", 422, "range"),
        ([1, 2, 3], "UINT8", 422, "shape [1, 2]"),
        ([[1], [2]], "UINT8", 422, "shape [1, 2]"),
        ([[[1, 2]]], "UINT8", 422, "shape [1, 2]"),
        ("12", "UINT8", 422, "shape [1, 2]"),
        ([[]] * (body.MAX_JSON_PARTS + 1), "UINT8", 413, "flat list"),
        (None, "UINT8", 422, "either"),
    ],
)
def test_values_that_the_tensor_cannot_have_are_refused(
    live: LiveServer, values: Any, datatype: str, status: int, words: str
) -> None:
    tensor = {"name": "image", "shape": [1, 2], "datatype": datatype, "data": values}
    check_refusal(live.client.post(INFER, json={"inputs": [tensor]}), status, words)


def test_json_is_limited_in_size_and_depth(live: LiveServer, pixels: NDArray[np.uint16]) -> None:
    for content, status in (
        (b"", 422),
        (b"[" * 10**5, 422),
        (b"\xff", 422),
        (b"null", 422),
        (b"[" * 2**18, 413),
        (b" " * (body.MAX_JSON_BYTES + 1), 413),
    ):
        assert live.client.post(INFER, content=content).status_code == status
    headers = {"Content-Encoding": "gzip"}
    compressed = gzip.compress(b" " * (body.MAX_JSON_BYTES + 1))
    check_refusal(live.client.post(INFER, content=compressed, headers=headers), 413, "binary")
    huge = np.zeros((1, 2048, 2049), np.uint8)
    check_refusal(send_binary(live, huge, parameters={}), 413, "too large")
    shape = {"shape": [5, 1024, 1024], "datatype": "UINT8", "parameters": {"binary_data_size": 5 * 2**20}}
    check_refusal(send_binary(live, pixels, tensor=shape, parameters={}), 413, "too large")


def test_memory_for_json_is_limited_per_client(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "JSON_MEMORY_BUDGET", body.FairMemoryBudget(2**8))
    response = live.client.post(INFER, json={"inputs": []})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


def test_access_is_that_of_the_http_api(live: LiveServer, pixels: NDArray[np.uint16]) -> None:
    assert live.client.get("/v2/health/ready", headers={"Authorization": ""}).status_code == 200
    for response in (
        live.client.get("/v2/models/bands", headers={"Authorization": "Bearer none"}),
        send_binary(live, pixels, headers={"Authorization": "Bearer none"}),
    ):
        check_refusal(response, 401, "key")
    assert send_binary(live, pixels, headers={"Origin": "https://evil.example"}).status_code == 403


def test_requests_leave_no_files(live: LiveServer, pixels: NDArray[np.uint16]) -> None:
    send_binary(live, pixels)
    send_binary(live, pixels, headers={"Content-Encoding": "gzip"})
    document = {"inputs": [describe_array(pixels) | {"parameters": {"binary_data_size": pixels.nbytes}}]}
    start = json.dumps(document).encode()
    headers = (f"{body.LENGTH_HEADER}: {len(start)}", f"Authorization: Bearer {KEY}")
    with live.open_request(INFER, start + bytes(1000), len(start) + pixels.nbytes, *headers):
        wait_until(lambda: live.runtime.scratch_space.used_bytes > 0)
    wait_until(lambda: live.runtime.scratch_space.used_bytes == 0)
    wait_until(lambda: live.leftovers() == [])


@pytest.mark.parametrize(("change", "status"), [(0, 200), (-1, 422), (1, 422)])
def test_bodies_of_unknown_length_are_checked_as_they_arrive(
    live: LiveServer, pixels: NDArray[np.uint16], change: int, status: int
) -> None:
    document = {"inputs": [describe_array(pixels) | {"parameters": {"binary_data_size": pixels.nbytes}}]}
    start = json.dumps(document | {"parameters": BINARY}).encode()
    values = (pixels.tobytes() + b"0")[: pixels.nbytes + change]
    parts = iter([start[:9], start[9:] + values[:7], values[7:1000], values[1000:]])
    response = live.client.post(INFER, content=parts, headers={body.LENGTH_HEADER: str(len(start))})
    assert response.status_code == status, response.text


def test_parameters_are_those_of_segment_that_apply_to_tensors() -> None:
    assert {"voxel_size", "diameter", "channel", "axes", "output", "threshold", "quality"} < set(PARAMETERS)
    assert not {"input", "output_to", "stack", "model"} & set(PARAMETERS)


def test_many_tiny_planes_are_refused_by_every_route(live: LiveServer) -> None:
    pixels = np.zeros((MAX_PLANES + 1, 1, 2), np.uint8)
    content = make_uncompressed_header(pixels.shape, pixels.dtype, "ZYX") + pixels.tobytes()
    check_refusal(send_binary(live, pixels), 413, f"{MAX_PLANES + 1} planes")
    stack = live.post("/stacks", content).json()["id"]
    responses = [live.post(path, content) for path in ("/segment", "/inspect", "/jobs")]
    responses += [live.post(path, b"", stack=stack) for path in ("/segment", "/inspect", "/jobs")]
    responses.append(live.client.get(f"/stacks/{stack}/planes?from=0&to=1"))
    labels = {"file": ("a.tif", content), "labels": ("b.tif", content)}
    responses.append(live.client.post("/annotations", files=labels))
    for response in responses:
        assert (response.status_code, f"{MAX_PLANES + 1} planes" in response.text) == (413, True), response.text
