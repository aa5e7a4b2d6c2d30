from __future__ import annotations

import csv
import gc
import io
import itertools
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from fakes import FakeSegmenter, wait_until
from job_service import Service, start_service
from live import STACK, TIFF, as_tiff, parse_problem
from object_server import serve_objects
from zarr_files import write_zarr, zip_store

from service.api.http.uploads import BLOCK_BYTES
from service.api.messages.result_headers import MAX_NOTE_CHARS, build_headers
from service.core.config import Settings
from service.core.quantities import VoxelSize
from service.models.spec import ModelSpec
from service.serving.parameters import Query
from service.serving.results.answers import compute_fingerprint
from service.serving.results.metadata import ResultMetadata, make_answer_name
from service.serving.storage.readers import SMALL_FILE_READER_COUNT

ONES = np.ones((3, 8, 8))
FORM = {"file": b"II*"}


def read_pixels(content: bytes) -> Any:
    return tifffile.imread(io.BytesIO(content))


def test_stack_is_segmented_and_its_labels_are_returned(service: Service) -> None:
    response = service.segment()
    assert response.status_code == 200
    assert np.array_equal(read_pixels(response.content), ONES)
    assert int(response.headers["content-length"]) == len(response.content)
    assert response.headers["x-stackseg-voxel-size"] == "0.5,0.2,0.2"
    assert response.headers["cache-control"] == "no-store"


def make_unwritable(folder: Path) -> None:
    """Make an empty folder unwritable, even for root. (The service would create a deleted folder again.)"""
    folder.rmdir()
    folder.symlink_to("/proc/self")


def test_small_request_needs_no_disk(service: Service) -> None:
    """It succeeds with an unwritable scratch folder, whereas large requests and compressed files fail."""
    scratch = service.runtime.scratch.requests_folder
    # Start the reader process.
    assert service.post("/inspect", STACK).status_code == 200
    make_unwritable(scratch)
    try:
        response = service.segment()
        assert response.status_code == 200, response.text
        assert np.array_equal(read_pixels(response.content), ONES)
        compressed = as_tiff(np.full((3, 8, 8), 200, np.uint8), compression="zlib")
        for content in (STACK + bytes(BLOCK_BYTES), compressed):
            assert parse_problem(service.segment(content)) == (503, "storage-unavailable")
    finally:
        scratch.unlink()
        scratch.mkdir()
    assert np.array_equal(read_pixels(service.segment(compressed).content), ONES)
    assert service.segment(STACK + bytes(BLOCK_BYTES)).status_code == 200
    assert service.leftovers() == []


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("overlop=1", "overlop"),
        ("overlap=0.1&overlap=0.2", "twice"),
        ("output=labels", "output=classes"),
        ("measurements=csv", "only labels"),
        ("roi_size=16,16,16", "The model bands supports only the window size 16,32,32"),
        ("channel=" + "x" * 300, "channel"),
    ],
)
def test_bad_parameter_is_rejected_before_the_body_is_read(service: Service, query: str, word: str) -> None:
    response = service.post(f"/segment?{query}", b"not a TIFF")
    assert parse_problem(response) == (422, "bad-parameter")
    assert word in response.json()["detail"]


@pytest.mark.parametrize(
    ("data", "query", "status", "word"),
    [
        ({"voxels": "3,2,1"}, "", 422, "'voxels'"),
        ({"overlap": "0.2"}, "?overlap=0.1", 422, "twice"),
        ({"overlap": "0.9"}, "", 422, "0.75"),
        ({"model": "livers"}, "", 404, "livers"),
    ],
)
def test_bad_form_field_is_rejected(service: Service, data: dict[str, str], query: str, status: int, word: str) -> None:
    response = service.client.post(f"/segment{query}", files={"file": ("a.tif", STACK)}, data=data)
    assert (response.status_code, word in response.json()["detail"]) == (status, True)


def test_form_fields_are_parameters_and_blank_fields_are_ignored(service: Service) -> None:
    data = {"voxel_size": "3,2,1", "model": "", "channel": ""}
    response = service.client.post("/segment", files={"file": ("my cells.tif", STACK, "image/tiff")}, data=data)
    assert response.headers["x-stackseg-voxel-size"] == "3,2,1"
    assert response.headers["content-disposition"] == 'attachment; filename="my cells_classes.ome.tif"'


@pytest.fixture(scope="module")
def instance_service(random_nuclei: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with start_service(random_nuclei.folder.parent, tmp_path_factory.mktemp("service")) as running:
        yield running


def make_two_channel_stack() -> bytes:
    """Return a stack whose channel 0 exceeds the fake segmenter's threshold in two of four planes.

    The values of channel 1 are the indices of the planes.
    """
    stack = np.zeros((4, 2, 8, 8), np.uint16)
    stack[1:3, 0, 2:4, 3:6] = 300
    stack[:, 1] = np.arange(4)[:, None, None]
    metadata = {"axes": "ZCYX", "spacing": 0.5, "unit": "um"}
    return as_tiff(stack, metadata=metadata)


@pytest.mark.parametrize(
    ("accept", "measurements", "suggested"),
    [
        ("text/csv", None, "csv"),
        ("text/csv, application/zip;q=0.5", None, "csv"),
        ("text/csv, application/problem+json", None, "csv"),
        ("application/zip", None, "zip"),
        ("application/x-npy", "csv", "zip"),
        ("image/tiff", "csv", "zip"),
        ("image/png", None, None),
        ("image/png", "zip", None),
    ],
)
def test_result_in_a_format_that_is_not_accepted_is_refused(
    instance_service: Service, accept: str, measurements: str | None, suggested: str | None
) -> None:
    query = {} if measurements is None else {"measurements": measurements}
    service = instance_service
    job = service.run(**query)
    expected = None if suggested is None else {"measurements": suggested}
    files, headers = {"file": ("stack.tif", STACK)}, {"Accept": accept}
    form_response = service.client.post("/segment", params=query, files=files, headers=headers)
    responses = [service.result(job, Accept=accept), form_response]
    service.fake.error = RuntimeError("The stack was segmented before the header was checked.")
    responses.append(service.segment(headers=TIFF | {"Accept": accept}, **query))
    service.fake.error = None
    for response in responses:
        assert parse_problem(response) == (422, "bad-parameter")
        assert response.json().get("suggested") == expected
    if expected is not None:
        response = service.segment(headers=TIFF | {"Accept": accept}, **query | expected)
        assert response.status_code == 200
        assert response.headers["content-type"].partition(";")[0] == accept.partition(",")[0]
    gc.collect()
    assert service.leftovers() == []


def test_measurements_include_all_channels_of_the_file(instance_service: Service) -> None:
    response = instance_service.segment(make_two_channel_stack(), measurements="csv", channel=0)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/csv")
    assert "stack_measurements.csv" in response.headers["content-disposition"]
    assert "measure;dur=" in response.headers["server-timing"]
    (row,) = csv.DictReader(io.StringIO(response.text))
    assert (row["label"], row["num_pixels"], row["unit"], row["touching_border"]) == ("1", "12", "um", "False")
    assert float(row["area"]) == pytest.approx(12 * 0.5 * 0.2 * 0.2)
    assert [row[f"bbox-{number}"] for number in range(6)] == ["1", "2", "3", "3", "4", "6"]
    assert (row["intensity_mean-0"], row["intensity_mean-1"], row["intensity_max-1"]) == ("300", "1.5", "2")


def test_archive_contains_labels_and_measurements(instance_service: Service) -> None:
    response = instance_service.segment(make_two_channel_stack(), measurements="zip", channel=0)
    assert response.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        assert archive.namelist() == ["labels.ome.tif", "measurements.csv"]
        labels = read_pixels(archive.read("labels.ome.tif"))
        table = archive.read("measurements.csv").decode()
    assert np.count_nonzero(labels) == 12
    assert table == instance_service.segment(make_two_channel_stack(), measurements="csv", channel=0).text
    assert instance_service.leftovers() == []


@pytest.fixture
def caching_service(bands_repository: Path, tmp_path: Path) -> Iterator[Service]:
    """A service with a result cache, for a single test."""
    with start_service(bands_repository, tmp_path, limits={"cache_bytes": 100_000, "request_seconds": 10}) as running:
        yield running


def test_repeated_request_is_answered_from_the_cache(caching_service: Service) -> None:
    def post(stack: bytes = STACK, query: str = "", name: str = "a.tif") -> Any:
        response = caching_service.post(f"/segment{query}", stack, TIFF | {"X-Filename": name})
        assert response.status_code == 200
        return response

    first = post()
    caching_service.fake.gate.clear()
    again = post(name="b.tif")
    caching_service.fake.gate.set()
    assert (first.headers["x-cache"], again.headers["x-cache"]) == ("miss", "hit")
    assert (first.content, first.headers["etag"]) == (again.content, again.headers["etag"])
    assert "b_classes.ome.tif" in again.headers["content-disposition"]
    assert again.headers["x-stackseg-voxel-size"] == first.headers["x-stackseg-voxel-size"]
    assert again.headers["server-timing"].startswith("receive;")
    other_responses = post(as_tiff(np.full((3, 8, 8), 201, np.uint8))), post(query="?overlap=0.5")
    assert {other.headers["x-cache"] for other in other_responses} == {"miss"}
    assert len({first.headers["etag"], *(other.headers["etag"] for other in other_responses)}) == 3
    metrics = caching_service.client.get("/metrics").text
    assert 'stackseg_cache_total{outcome="hit"} 1.0' in metrics
    assert 'stackseg_cache_total{outcome="miss"} 3.0' in metrics
    assert caching_service.leftovers() == []


def test_result_that_cannot_be_cached_is_still_returned(
    caching_service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    make_unwritable(caching_service.runtime.scratch.path / "cache")
    for _ in range(2):
        response = caching_service.segment()
        assert (response.status_code, response.headers["x-cache"]) == (200, "miss")
    assert caplog.text.count("a result could not be cached") == 2


def test_failure_is_not_cached(caching_service: Service) -> None:
    caching_service.fake.error = RuntimeError("once")
    assert caching_service.segment().status_code == 500
    caching_service.fake.error = None
    assert caching_service.segment().headers["x-cache"] == "miss"


def test_cached_result_does_not_wait_for_busy_reader_threads(caching_service: Service) -> None:
    threads, gate = caching_service.runtime.read_threads, threading.Event()
    assert caching_service.segment().headers["x-cache"] == "miss"
    stuck = [threads.for_client(str(number)).submit(gate.wait, 60) for number in range(SMALL_FILE_READER_COUNT)]
    assert threads.is_busy("testclient")
    try:
        again = caching_service.segment()
        assert (again.status_code, again.headers.get("x-cache")) == (200, "hit")
        with ThreadPoolExecutor(1) as pool:
            posted = pool.submit(caching_service.segment, as_tiff(np.full((3, 8, 8), 201, np.uint8)))
            wait_until(lambda: threads.waiting_count == 1)
            time.sleep(0.1)
            gate.set()
            other = posted.result(60)
    finally:
        gate.set()
    assert other.headers["x-cache"] == "miss"
    timing = dict(stage.split(";dur=") for stage in other.headers["server-timing"].split(", "))
    assert float(timing["read"]) > 50
    assert all(waited.result(60) for waited in stuck)
    wait_until(lambda: not threads.is_busy("testclient"))


def test_nothing_is_computed_if_the_request_times_out_while_its_file_is_read(
    bands_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_service(bands_repository, tmp_path, limits={"request_seconds": 0.2}) as service:
        runtime, submitted = service.runtime, []
        read, reserve = runtime.reader.read_small, runtime.reserve

        def slow(*arguments: Any, **options: Any) -> Any:
            volume = read(*arguments, **options)
            time.sleep(0.4)
            return volume

        def record_reservation(*arguments: Any) -> Any:
            submitted.append(arguments)
            return reserve(*arguments)

        monkeypatch.setattr(runtime.reader, "read_small", slow)
        monkeypatch.setattr(runtime, "reserve", record_reservation)
        assert service.segment().status_code == 504
        assert submitted == []
        assert service.leftovers() == []


def test_volume_and_labels_leave_memory_with_their_request(service: Service) -> None:
    with service.check_memory_is_freed() as seen:
        assert service.segment().status_code == 200
        assert len(seen) == 2


def make_key(caller: str | None, spec: ModelSpec, query: Query, **execution: Any) -> str:
    """Return the cache key of a request."""
    return compute_fingerprint(caller, "0" * 64, spec.model_dump_json(), query, execution)


def test_cache_key_depends_on_the_caller(bands: ModelSpec) -> None:
    assert len({make_key(caller, bands, Query()) for caller in ("ada", "bob", None)}) == 3
    assert make_key("ada", bands, Query()) == make_key("ada", bands, Query(model="bands"))


def test_cache_key_depends_on_everything_that_affects_labels(bands: ModelSpec) -> None:
    new_version = bands.model_copy(update={"version": "2"})
    other_activation = bands.model_copy(update={"activation": "none"})
    keys = {make_key(None, spec, Query()) for spec in (bands, new_version, other_activation)}
    keys |= {make_key(None, bands, Query(overlap=0.5)), make_key(None, bands, Query(), windows={"overlap": 0.5})}
    keys |= {make_key(None, bands, Query(diameter=text)) for text in ("auto", "none", "15px")}
    keys |= {make_key(None, bands, Query(skip_below=text)) for text in ("auto", "none", "15")}
    keys.add(make_key(None, bands, Query(quality="best")))
    options = {"threshold": 0.4, "minimum_size": "9", "border": "drop", "fill_holes": True, "min_confidence": 0.4}
    keys |= {make_key(None, bands, Query.model_validate({name: value})) for name, value in options.items()}
    assert len(keys) == 17


def test_etag_depends_on_settings_and_precision(bands_repository: Path, tmp_path: Path) -> None:
    etags = []
    for overlap, precision in ((0.25, "fp32"), (0.25, "fp32"), (0.5, "fp32"), (0.25, "bf16")):

        def load(spec: Any, settings: Settings, _driver: Any, precision: str = precision) -> FakeSegmenter:
            fake = FakeSegmenter(spec, settings)
            fake.precision = precision
            return fake

        with start_service(bands_repository, tmp_path, load, windows={"overlap": overlap}) as service:
            etags.append(service.segment().headers["etag"])
    assert etags[0] == etags[1]
    assert len(set(etags)) == 3


def test_request_that_takes_too_long_is_cancelled(bands_repository: Path, tmp_path: Path) -> None:
    with start_service(bands_repository, tmp_path, limits={"request_seconds": 0.5}) as service:
        service.fake.gate.clear()
        assert parse_problem(service.segment()) == (504, "timed-out")
        wait_until(lambda: not service.runtime.devices.running_jobs)
        assert service.leftovers() == []
        service.fake.gate.set()
        assert service.segment().status_code == 200


def test_waiting_request_is_rejected_at_shutdown(service: Service) -> None:
    devices = service.runtime.devices
    service.fake.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        responses = [pool.submit(service.segment) for _ in range(2)]
        # The first request is also waiting until the worker takes it.
        wait_until(lambda: devices.running_jobs and devices.waiting_count == 1)
        devices.all[0].scheduler.queue.cancel_all()
        assert [parse_problem(response.result(20)) for response in responses] == [(503, "not-ready")] * 2


@pytest.fixture(scope="module")
def host(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that may read `scans/stack.tif` and write to `results`, both in its folder."""
    folder = tmp_path_factory.mktemp("host")
    for name in ("scans", "results"):
        (folder / name).mkdir()
    (folder / "scans" / "stack.tif").write_bytes(STACK)
    roots = {"inputs": {"scans": str(folder / "scans")}, "outputs": {"results": str(folder / "results")}}
    limits = {"cache_bytes": 10**6, "upload_bytes": 10}
    with serve_objects(folder) as server:
        roots["stores"] = {"far": f"{server.url}/scans"}
        with start_service(bands_repository, folder, references=roots, limits=limits) as service:
            yield service


def test_host_file_is_segmented_without_an_upload(host: Service) -> None:
    assert parse_problem(host.segment()) == (413, "too-large")
    response = host.segment(b"", input="scans/stack.tif")
    assert response.status_code == 200, response.text
    assert np.array_equal(read_pixels(response.content), ONES)
    assert 'filename="stack_classes.ome.tif"' in response.headers["content-disposition"]
    assert "x-cache" not in response.headers
    assert host.post("/inspect", b"", input="scans/stack.tif").json()["file"]["shape"] == [1, 3, 8, 8]
    assert host.leftovers() == []


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_ome_zarr_is_segmented_from_host_folder_remote_store_and_archive(
    host: Service, service: Service, version: str
) -> None:
    store = host.folder / "scans" / f"{version}.ome.zarr"
    write_zarr(store, read_pixels(STACK), version=version, chunks=(2, 5, 5))
    packed = zip_store(store).read_bytes()
    url = host.runtime.settings.references.stores["far"].url
    paths = [f"scans/{store.name}", f"far/{store.name}"]
    responses = [host.segment(b"", input=path) for path in (*paths, f"{url}/{store.name}")]
    responses.append(service.segment(packed, headers={"Content-Type": "application/zip", "X-Filename": "a.ozx"}))
    for response in responses:
        assert response.status_code == 200, response.text
        assert np.array_equal(read_pixels(response.content), ONES)
        assert response.headers["x-stackseg-voxel-size"].startswith("0.5,")
    assert 'filename="a_classes.ome.tif"' in response.headers["content-disposition"]
    for path in paths:
        description = host.post("/inspect", b"", input=path).json()["file"]
        assert (description["container"], description["shape"]) == (f"OME-Zarr {version}", [1, 3, 8, 8])
    (store / "zarr.json").unlink(missing_ok=True)
    (store / ".zattrs").unlink(missing_ok=True)
    assert {host.segment(b"", input=path).status_code for path in paths} <= {400, 422}
    assert host.leftovers() == []


def test_form_may_select_a_host_file(host: Service) -> None:
    response = host.client.post("/segment", data={"input": "scans/stack.tif"}, files={"overlap": (None, "0.5")})
    assert response.status_code == 200, response.text


def test_result_is_written_on_the_host_and_described_in_the_response(host: Service) -> None:
    parameters = {"input": "scans/stack.tif", "output_to": "results/labels.tif"}
    response = host.segment(b"", **parameters)
    written = host.folder / "results" / "labels.tif"
    assert response.json() == {
        "output": "results/labels.tif",
        "media_type": "image/tiff",
        "bytes": written.stat().st_size,
        "model": "bands/1",
        "objects": None,
    }
    assert np.array_equal(tifffile.imread(written), ONES)
    assert response.headers["x-stackseg-voxel-size"] == "0.5,0.2,0.2"
    assert parse_problem(host.segment(b"", **parameters)) == (409, "output-exists")
    assert host.segment(b"", **parameters, overwrite="true").status_code == 200
    assert [path.name for path in written.parent.iterdir()] == ["labels.tif"]
    assert host.leftovers() == []


@pytest.mark.parametrize(
    ("query", "sent", "status", "word"),
    [
        ("", [b""], 422, "no file"),
        ("input=scans/stack.tif", [b"II*"], 422, "Use only one of them"),
        ("input=secrets/stack.tif", [b""], 422, "scans"),
        ("input=scans/stack.tif&output_to=results/labels.png", [b""], 422, "tif"),
        ("input=scans/stack.tif&output_to=results/folder.tif", [b""], 422, "is a folder"),
        ("input=scans/stack.tif&overwrite=true", [b""], 422, "output_to"),
        ("format=zarr", [b"II*"], 422, "format"),
        ("glob=*.tif", [b"II*"], 422, "glob"),
        ("output_to=results/labels.png", [b"II*", FORM], 422, "tif"),
        ("output_to=results/labels.png&overwrite=true", [b"II*", FORM], 422, "tif"),
        ("overwrite=true", [b"II*", FORM], 422, "output_to"),
        ("output_to=results/there.tif", [b"II*", FORM], 409, "already exists"),
    ],
)
def test_invalid_host_file_parameters_are_rejected(
    host: Service, query: str, sent: list[Any], status: int, word: str
) -> None:
    existing = host.folder / "results" / "there.tif"
    existing.write_text("precious")
    (existing.parent / "folder.tif").mkdir(exist_ok=True)
    for endpoint, body in itertools.product(("/segment", "/jobs", "/inspect"), sent):
        options = {"files": body} if body is FORM else {"content": body, "headers": TIFF}
        response = host.client.post(f"{endpoint}?{query}", **options)
        assert (response.status_code, word in response.json()["detail"]) == (status, True), response.text
        assert str(host.folder) not in response.text
    assert existing.read_text() == "precious"
    assert host.leftovers() == []


def test_host_file_that_is_not_a_stack_is_rejected(host: Service) -> None:
    (host.folder / "scans" / "notes.txt").write_text("nothing to see")
    assert parse_problem(host.segment(b"", input="scans/notes.txt")) == (415, "unsupported-media")


def make_metadata(**members: Any) -> ResultMetadata:
    seconds = members.pop("seconds", {})
    return ResultMetadata("nuclei/1", "image/tiff", "stack_labels.ome.tif", "labels", seconds, **members)


def test_notes_are_sent_as_printable_ascii() -> None:
    notes = ("0.2 µm per voxel.", "Channel 'ß\r\nX-Evil: 1\x7f'.")
    header = build_headers(make_metadata(notes=notes))["X-StackSeg-Note"]
    assert header == "0.2 um per voxel. Channel '?  X-Evil: 1 '."
    assert header.isascii()
    assert header.isprintable()
    assert len(build_headers(make_metadata(notes=("x" * 10_000,)))["X-StackSeg-Note"]) == MAX_NOTE_CHARS


def test_headers_for_unknown_metadata_are_omitted() -> None:
    assert build_headers(make_metadata()).keys() == {"Cache-Control", "X-StackSeg-Model", "Server-Timing"}
    headers = build_headers(make_metadata(objects=3, voxel_size=VoxelSize(0.5, 0.1, 1e-5)))
    assert (headers["X-StackSeg-Objects"], headers["X-StackSeg-Voxel-Size"]) == ("3", "0.5,0.1,1e-05")
    timing = build_headers(make_metadata(seconds={"windows": 1.2345, "total": 2}))["Server-Timing"]
    assert timing == "windows;dur=1234.5, total;dur=2000.0"
    assert build_headers(make_metadata(diameter="15px; stated"))["X-StackSeg-Diameter"] == "15px; stated"
    assert (
        build_headers(make_metadata(skipped="3 of 9 windows; up to 7"))["X-StackSeg-Skipped"]
        == "3 of 9 windows; up to 7"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embryo.tif", "embryo_labels.ome.tif"),
        ("embryo.ome.TIFF", "embryo_labels.ome.tif"),
        ("embryo.day2.tif", "embryo.day2_labels.ome.tif"),
        ("embryo", "embryo_labels.ome.tif"),
        ("embryo.LSM", "embryo_labels.ome.tif"),
        ("embryo.ome.zarr.zip", "embryo_labels.ome.tif"),
        ("embryo.zarr.zip", "embryo_labels.ome.tif"),
        (".tif", "stack_labels.ome.tif"),
        ("", "stack_labels.ome.tif"),
    ],
)
def test_result_is_named_after_the_input(name: str, expected: str) -> None:
    assert make_answer_name(name, "_labels.ome.tif") == expected


def test_blocked_threads_do_not_block_inspections_and_new_jobs(service: Service) -> None:
    """Decoding may be slow, and folders may be on a file server that does not respond."""
    gate, runtime = threading.Event(), service.runtime
    pools = (
        runtime.read_threads.for_client("others"),
        runtime.decode_threads.for_client("testclient"),
        runtime.host_threads.for_client("testclient"),
    )
    stuck = [pool.submit(gate.wait, 60) for pool in pools for _ in range(16)]
    try:
        assert service.post("/inspect", STACK).json()["file"]["shape"] == [1, 3, 8, 8]
        service.submit()
    finally:
        gate.set()
    assert all(waited.result(60) for waited in stuck)
    assert service.segment().status_code == 200


def test_channels_too_large_to_measure_are_rejected_before_the_computation(
    random_nuclei: ModelSpec, tmp_path: Path
) -> None:
    """One channel of the file has 512 bytes, and both channels together have 1024 bytes."""
    with start_service(random_nuclei.folder.parent, tmp_path, limits={"decoded_bytes": 600}) as service:
        service.fake.error = AssertionError("nothing must be computed")
        assert parse_problem(service.segment(make_two_channel_stack(), measurements="csv", channel=0)) == (
            413,
            "too-large",
        )
        service.fake.error = None
        assert service.segment(make_two_channel_stack(), channel=0).status_code == 200
