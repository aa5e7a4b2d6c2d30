"""End-to-end tests of a server on a real socket: normal use, hostile files, disconnecting clients, and shutdown."""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from live import (
    LabelTiff,
    LiveServer,
    as_tiff,
    make_live_fixture,
    read_classes,
    read_descriptor_target,
    wait_until,
)
from paths import ROOT
from paths import SHARED_DATA as DATA
from sockets import connect_tls, create_certificate, needs_openssl

from service.api.access.keys import hash_key
from service.api.http.uploads import BLOCK_BYTES
from service.core.config import Settings
from service.core.types import Segmentation
from service.inference.runner.label_agreement import compute_label_difference

KEY = "X-API-Key: secret"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the test data folder {DATA} does not exist")

REAL = sorted(path.parent.name for path in (DATA / "real").glob("*/image.tif"))
HOSTILE = sorted(path for path in (DATA / "hostile").rglob("*") if path.is_file() and path.suffix != ".json")

live = make_live_fixture()
bundled = make_live_fixture(ROOT / "models", device={"threads": 2})


def test_response_has_classes_and_the_voxel_size_of_the_stack(live: LiveServer, phantom: Any) -> None:
    response = live.segment(as_tiff(phantom.image))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "image/tiff"
    assert response.headers["x-stackseg-model"] == "bands/1"
    assert "x-stackseg-objects" not in response.headers
    answer = LabelTiff(response.content)
    assert (answer.axes, answer.pixels.shape) == ("ZYX", phantom.image.shape)
    assert answer.voxel_size == pytest.approx((0.5, 0.2, 0.2))
    assert np.mean(answer.pixels == phantom.classes) > 0.97
    stages = [entry.partition(";")[0] for entry in response.headers["server-timing"].split(", ")]
    assert stages == ["receive", "read", "queue", "prepare", "windows", "decode", "write", "total"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(
    ("sent", "saved", "encoded"),
    [
        ("my cells.tif", "my cells_classes.ome.tif", None),
        ("Zellkörper 7.tif", "Zellkorper 7_classes.ome.tif", "Zellk%C3%B6rper%207_classes.ome.tif"),
        ("%E7%B4%B0%E8%83%9E 1.ome.tif", "__ 1_classes.ome.tif", "%E7%B4%B0%E8%83%9E%201_classes.ome.tif"),
        ('a "b" 5%.tif', "a _b_ 5__classes.ome.tif", "a%20%22b%22%205%25_classes.ome.tif"),
    ],
)
def test_curl_and_browsers_name_the_result_after_the_uploaded_file(
    live: LiveServer, phantom: Any, tmp_path: Path, sent: str, saved: str, encoded: str | None
) -> None:
    stack, folder = tmp_path / "stack", tmp_path / "saved"
    stack.write_bytes(as_tiff(phantom.image))
    folder.mkdir()
    command = ["curl", "-sS", "--fail-with-body", "-OJ", "-D", "-", "--data-binary", f"@{stack}"]
    named = [*command, "-H", "Content-Type: image/tiff", "-H", f"X-Filename: {sent}"]
    headers = subprocess.check_output([*named, f"{live.client.base_url}/segment"], cwd=folder, text=True)
    assert [file.name for file in folder.iterdir()] == [saved]
    (disposition,) = [line for line in headers.splitlines() if line.lower().startswith("content-disposition")]
    # Browsers prefer this parameter to `filename`.
    assert disposition.partition("filename*=UTF-8''")[2] == (encoded or "")
    assert read_classes((folder / saved).read_bytes()).shape == phantom.image.shape


def test_probabilities_have_channel_names_and_sum_to_one(live: LiveServer, phantom: Any) -> None:
    stack = as_tiff(phantom.image)
    answer = LabelTiff(live.segment(stack, output="probabilities").content)
    assert np.array_equal(answer.pixels.argmax(0), read_classes(live.segment(stack).content))
    assert (answer.axes, answer.pixels.dtype) == ("CZYX", np.float32)
    assert answer.names == ["background", "dim", "bright"]
    assert answer.pixels.sum(0) == pytest.approx(np.ones(phantom.image.shape), abs=1e-5)


def test_response_job_and_metrics_report_the_number_of_skipped_windows(live: LiveServer, phantom: Any) -> None:
    sparse = np.pad(phantom.image, ((0, 0), (0, 90), (0, 60)), constant_values=400)
    answered = live.segment(as_tiff(sparse), skip_below=700)
    skipped_header = answered.headers["x-stackseg-skipped"]
    skipped, total = (
        int(number) for number in re.match(r"(\d+) of (\d+) windows; up to 700$", skipped_header).groups()
    )
    assert 0 < skipped < total
    assert np.mean(LabelTiff(answered.content).pixels[:, :70, :80] == phantom.classes) > 0.97
    assert live.run(as_tiff(sparse), skip_below=700)["skipped"] == skipped_header
    assert f'stackseg_skipped_windows_total{{model="bands"}} {2.0 * skipped}' in live.client.get("/metrics").text


def test_response_notes_assumptions_about_the_file(live: LiveServer, phantom: Any) -> None:
    answered = live.segment(as_tiff(phantom.image, imagej=False, metadata=None))
    assert "pages are read as z planes" in answered.headers["x-stackseg-note"]
    assert "has no voxel size" in answered.headers["x-stackseg-note"]
    assert "x-stackseg-note" not in live.segment(as_tiff(phantom.image), voxel_size="1,0.5,0.5").headers


def test_inspect_predicts_what_segment_does(live: LiveServer, phantom: Any) -> None:
    report = live.post("/inspect", as_tiff(phantom.image)).json()
    assert report["file"]["axes"] == "ZYX"
    assert report["file"]["shape"] == [1, *phantom.image.shape]
    assert report["file"]["voxel_size"] == pytest.approx({"z": 0.5, "y": 0.2, "x": 0.2})
    assert report["estimate"]["windows"] == 2 * 3 * 3
    assert report["diameter"] == "none"
    assert report["problem"] is None
    assert live.leftovers() == []


def test_pixels_are_freed_when_the_client_disconnects(live: LiveServer, phantom_maker: Any) -> None:
    """The pixels are freed immediately, without the garbage collector."""

    def uploads() -> list[str]:
        # Servers of other modules in this process may have open files, too.
        names = map(read_descriptor_target, Path("/proc/self/fd").iterdir())
        return [name for name in names if name.startswith(str(live.runtime.scratch.path)) and "upload" in name]

    large = as_tiff(phantom_maker((64, 400, 400), seed=1).image)
    gc.collect()
    # Wait until the files of the previous test are closed.
    wait_until(lambda: uploads() == [], 20)
    gc.disable()
    try:
        with live.open_request("/segment", large):
            wait_until(lambda: any(job.progress.total > 0 for job in live.runtime.devices.running_jobs), 60)
            assert uploads() != []
        wait_until(lambda: uploads() == [], 20)
    finally:
        gc.enable()


def test_client_that_is_still_uploading_receives_the_error(live: LiveServer) -> None:
    with live.open_request("/segment?overlop=1", bytes(20_000_000), None, "Connection: close") as connection:
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 422 ")
    assert b"overlop" in answer


def test_upload_that_is_interrupted_leaves_no_files(live: LiveServer) -> None:
    # Larger than the uploads that stay in memory.
    with live.open_request("/segment", b"II*\0" + bytes(2 * BLOCK_BYTES), 9_000_000):
        wait_until(lambda: live.leftovers() != [], 20)
    wait_until(lambda: live.leftovers() == [], 20)


def test_state_endpoints(live: LiveServer) -> None:
    assert live.client.get("/health").json()["models"] == {"bands": "ready"}
    for path in ("/health", "/health/live", "/v2/health/ready"):
        head = live.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert live.client.post(path).headers["allow"] == "GET, HEAD"
    hardware = live.client.get("/gpu").json()
    assert hardware["cpu"]["cores"] >= 1
    assert hardware["models"]["bands"]["engine"] == "eager"
    model = live.client.get("/models/bands").json()
    assert (model["state"], model["input"]["roi_size"]) == ("ready", [16, 32, 32])
    assert model["engine"]["precision"] in {"fp32", "bf16"}
    assert live.client.get("/models").json()["default"] == "bands"
    assert live.client.get("/models/livers").status_code == 404
    assert b"stackseg_requests_total" in live.client.get("/metrics").content


def test_bundled_models_are_listed_and_give_their_expected_labels(bundled: LiveServer) -> None:
    listed = bundled.client.get("/models").json()
    assert listed["default"] == "nuclei"
    assert {"embryos", "membranes", "nuclei", "tissue"} == {model["name"] for model in listed["models"]}
    for model in listed["models"]:
        folder = ROOT / "models" / model["name"]
        stack, expected = (folder / "sample.tif").read_bytes(), LabelTiff((folder / "expected.tif").read_bytes())
        response = bundled.segment(stack, model=model["name"])
        assert response.status_code == 200, response.text
        assert response.headers["x-stackseg-model"] == f"{model['name']}/1"
        answer = LabelTiff(response.content)
        assert answer.voxel_size == pytest.approx(expected.voxel_size)
        kind = "classes" if model["name"] == "tissue" else "labels"
        assert compute_label_difference(Segmentation(expected.pixels, kind), Segmentation(answer.pixels, kind)) < 1e-3
        if kind == "labels":
            assert int(response.headers["x-stackseg-objects"]) == answer.pixels.max()


@needs_data
@pytest.mark.parametrize("name", REAL)
def test_classes_of_real_volumes_have_their_shape_and_voxel_size(name: str, live: LiveServer) -> None:
    path = DATA / "real" / name / "image.tif"
    parameters = {"channel": 0} if name == "single_nucleus_confocal_vs_widefield" else {}
    inspected = live.post("/inspect", path.read_bytes(), **parameters).json()
    response = live.segment(path.read_bytes(), **parameters, overlap=0)
    assert response.status_code == 200, response.text
    answer = LabelTiff(response.content)
    with tifffile.TiffFile(path) as file:
        stored = dict(zip(file.series[0].axes.replace("Q", "Z"), file.series[0].shape, strict=True))
    assert answer.pixels.shape == tuple(stored[axis] for axis in "ZYX")
    size = inspected["file"]["voxel_size"]
    assert answer.voxel_size == (pytest.approx(tuple(size.values())) if size else None)
    assert answer.units == {"µm"}


@needs_data
def test_hostile_files_do_not_harm_the_service(live: LiveServer, phantom: Any) -> None:
    assert len(HOSTILE) > 100
    failures = {}
    for path in HOSTILE:
        response = live.segment(path.read_bytes(), overlap=0)
        if not (400 <= response.status_code < 500 or response.status_code == 200):
            failures[path.name] = response.status_code
        elif response.status_code != 200 and "type" not in response.json():
            failures[path.name] = "no problem document"
    assert failures == {}
    assert live.leftovers() == []
    assert live.segment(as_tiff(phantom.image)).status_code == 200


@contextmanager
def run_serve_command(config: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `stackseg serve` until the context exits. Yield its process and address.

    The log is the file `log` next to the configuration file.
    """
    command = [sys.executable, "-m", "service", "serve", "--config", str(config), "--port", "0", *options]
    with config.with_name("log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
        process.stdout.close()
    assert status == 0, config.with_name("log").read_text()


@needs_openssl
def test_serve_command_supports_https_api_keys_and_json_logs_and_finishes_running_requests_before_it_exits(
    bands_repository: Path, write_config: Any, phantom: Any, phantom_maker: Any, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    files, access = create_certificate(tmp_path), {"keys": {"ada": hash_key("secret")}}
    config = write_config(
        bands_repository, server={"scratch_folder": str(scratch)}, access=access, logging={"format": "json"}
    )
    certificate = ["--ssl-keyfile", files["ssl_keyfile"], "--ssl-certfile", files["ssl_certfile"]]
    (tmp_path / "stack.tif").write_bytes(as_tiff(phantom.image))
    with run_serve_command(config, *certificate) as (process, address):
        assert address.startswith("https://")
        wait_until(lambda: _curl("-f", f"{address}/health/ready").returncode == 0, 180)
        status = ["-o", "/dev/null", "-w", "%{http_code}", f"{address}/models"]
        assert _curl(*status).stdout == b"401"
        assert _curl(*status, "-H", KEY, "-H", "X-Request-ID: first-look").stdout == b"200"
        done = _curl(
            "--data-binary", f"@{tmp_path / 'stack.tif'}", "-H", "Content-Type: image/tiff", "-H", KEY,
            f"{address}/segment", "-o", str(tmp_path / "labels.tif"),
        )  # fmt: skip
        assert done.returncode == 0
        assert np.mean(read_classes((tmp_path / "labels.tif").read_bytes()) == phantom.classes) > 0.97
        (tmp_path / "larger.tif").write_bytes(as_tiff(phantom_maker((48, 160, 160), seed=1).image))
        host, port = address.rpartition("/")[2].split(":")
        with ThreadPoolExecutor(1) as pool, connect_tls((host, int(port)), files) as stalled:
            running = pool.submit(
                _curl, "-f", "--data-binary", f"@{tmp_path / 'larger.tif'}", "-H", KEY, f"{address}/segment"
            )
            wait_until(lambda: list(scratch.glob("*/requests/*/upload.tif")) != [], 20)
            head = f"POST /segment HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\nContent-Length: 100\r\n"
            stalled.sendall(head.encode() + b"Expect: 100-continue\r\n\r\nhalf")
            # Wait for the interim response: the server may drop requests that it has not read at shutdown.
            assert stalled.recv(100).startswith(b"HTTP/1.1 100 ")
            stopped_at = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert running.result().returncode == 0
            assert stalled.recv(100).startswith(b"HTTP/1.1 503 ")
            assert process.wait(60) == 0
            assert time.monotonic() - stopped_at < Settings().server.drain_seconds
    assert list(scratch.iterdir()) == []
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "first-look"]
    assert (line["caller"], line["path"], line["status"]) == ("ada", "/models", 200)


def _curl(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["curl", "-skS", *arguments], capture_output=True, check=False)
