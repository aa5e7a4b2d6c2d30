from __future__ import annotations

import csv
import gc
import io
import threading
import time
import weakref
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from fakes import FakeSegmenter, until
from live import as_tiff
from object_server import serve_objects
from runtimes import FAKE_PARTS, loaded_segmenter
from starlette.testclient import TestClient
from zarr_files import pack, write_zarr

from service.api.app import create_app
from service.api.http.uploads import BLOCK_BYTES
from service.api.messages.results import MAX_NOTE_LETTERS, build_headers
from service.core.config import Settings
from service.core.quantities import VoxelSize
from service.models.spec import ModelSpec
from service.serving.build import Parts
from service.serving.parameters import Query
from service.serving.results.answers import answer_name, fingerprint
from service.serving.results.metadata import AnswerMetadata
from service.serving.runtime import Runtime
from service.serving.storage.readers import SMALL_READERS
from service.serving.storage.threads import HOST_FILE_THREADS

TIFF = {"Content-Type": "image/tiff"}
STACK = as_tiff(np.full((3, 8, 8), 200, np.uint8))


def start(folder: Path, scratch: Path, references: dict[str, Any] | None = None, **limits: Any) -> TestClient:
    chosen = {"models": {"folder": folder}, "server": {"scratch_folder": scratch}, "references": references or {}}
    settings = Settings.model_validate(chosen | {"limits": {"cache_bytes": 0} | limits})
    app = create_app(settings, FAKE_PARTS)
    return TestClient(app)


@pytest.fixture(scope="module")
def client(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with start(bands_repository, tmp_path_factory.mktemp("scratch")) as running:
        until(lambda: runtime_of(running).unready_reasons() == ())
        yield running


def runtime_of(client: TestClient) -> Runtime:
    return client.app.state.runtime


def test_volume_goes_to_the_model_and_its_answer_comes_back(client: TestClient) -> None:
    response = client.post("/segment", content=STACK, headers=TIFF)
    assert response.status_code == 200
    with tifffile.TiffFile(io.BytesIO(response.content)) as file:
        assert np.array_equal(file.asarray(), np.ones((3, 8, 8)))
    assert int(response.headers["content-length"]) == len(response.content)
    assert response.headers["x-stackseg-voxel-size"] == "0.5,0.2,0.2"
    assert response.headers["cache-control"] == "no-store"


def block(folder: Path) -> None:
    """Let an empty folder take no files any more, not even root's; the service makes a deleted one again."""
    folder.rmdir()
    folder.symlink_to("/proc/self")


def test_small_request_is_never_on_a_disk(client: TestClient) -> None:
    """Where nothing can be written it is answered nevertheless; large ones are not, nor those that must be decoded."""
    scratch = runtime_of(client).scratch.requests
    # Known once a process that reads has started.
    assert client.post("/inspect", content=STACK, headers=TIFF).status_code == 200
    block(scratch)
    try:
        response = client.post("/segment", content=STACK, headers=TIFF)
        assert response.status_code == 200, response.text
        assert np.array_equal(tifffile.imread(io.BytesIO(response.content)), np.ones((3, 8, 8)))
        compressed = as_tiff(np.full((3, 8, 8), 200, np.uint8), compression="zlib")
        for content in (STACK + bytes(BLOCK_BYTES), compressed):
            refused = client.post("/segment", content=content, headers=TIFF)
            assert (refused.status_code, refused.json()["type"]) == (503, "urn:stackseg:problem:storage-unavailable")
    finally:
        scratch.unlink()
        scratch.mkdir()
    assert client.post("/segment", content=compressed, headers=TIFF).content[-100:] == response.content[-100:]
    assert client.post("/segment", content=STACK + bytes(BLOCK_BYTES), headers=TIFF).status_code == 200
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("overlop=1", "overlop"),
        ("overlap=0.1&overlap=0.2", "twice"),
        ("output=labels", "output=classes"),
        ("measurements=csv", "only labels"),
        ("measurements=xlsx", "measurements"),
        ("time=99999999999999999999999x", "time"),
        ("channel=" + "x" * 300, "channel"),
    ],
)
def test_bad_parameter_is_refused_before_the_body_is_looked_at(client: TestClient, query: str, word: str) -> None:
    response = client.post(f"/segment?{query}", content=b"not a TIFF", headers=TIFF)
    assert response.status_code == 422
    assert word in response.json()["detail"]


def test_form_fields_are_parameters_and_blank_ones_are_not(client: TestClient) -> None:
    file = {"file": ("a.tif", STACK, "image/tiff")}
    filled = client.post("/segment", files=file, data={"voxel_size": "3,2,1", "model": "", "channel": ""})
    assert filled.headers["x-stackseg-voxel-size"] == "3,2,1"
    unknown = client.post("/segment", files=file, data={"voxels": "3,2,1"})
    assert (unknown.status_code, "'voxels'" in unknown.json()["detail"]) == (422, True)
    twice = client.post("/segment?overlap=0.1", files=file, data={"overlap": "0.2"})
    assert (twice.status_code, "twice" in twice.json()["detail"]) == (422, True)
    beyond = client.post("/segment", files=file, data={"overlap": "0.9"})
    assert (beyond.status_code, "0.75" in beyond.json()["detail"]) == (422, True)
    assert client.post("/segment", files=file, data={"model": "livers"}).status_code == 404


@pytest.fixture(scope="module")
def instances(random_nuclei: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with start(random_nuclei.folder.parent, tmp_path_factory.mktemp("scratch")) as running:
        until(lambda: runtime_of(running).unready_reasons() == ())
        yield running


def two_channels() -> bytes:
    """Channel 0 is above the fake segmenter's threshold in two planes of four, channel 1 counts the planes."""
    stack = np.zeros((4, 2, 8, 8), np.uint16)
    stack[1:3, 0, 2:4, 3:6] = 300
    stack[:, 1] = np.arange(4)[:, None, None]
    metadata = {"axes": "ZCYX", "spacing": 0.5, "unit": "um"}
    return as_tiff(stack, metadata=metadata)


def test_measurements_are_of_every_channel_of_the_file(instances: TestClient) -> None:
    response = instances.post("/segment?measurements=csv&channel=0", content=two_channels(), headers=TIFF)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/csv")
    assert "stack_measurements.csv" in response.headers["content-disposition"]
    assert "measure;dur=" in response.headers["server-timing"]
    (row,) = csv.DictReader(io.StringIO(response.text))
    assert (row["label"], row["num_pixels"], row["unit"], row["touching_border"]) == ("1", "12", "um", "False")
    assert float(row["area"]) == pytest.approx(12 * 0.5 * 0.2 * 0.2)
    assert [row[f"bbox-{number}"] for number in range(6)] == ["1", "2", "3", "3", "4", "6"]
    assert (row["intensity_mean-0"], row["intensity_mean-1"], row["intensity_max-1"]) == ("300", "1.5", "2")


def test_both_files_come_in_an_archive(instances: TestClient) -> None:
    response = instances.post("/segment?measurements=zip&channel=0", content=two_channels(), headers=TIFF)
    assert response.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        assert archive.namelist() == ["labels.ome.tif", "measurements.csv"]
        labels = tifffile.imread(io.BytesIO(archive.read("labels.ome.tif")))
        table = archive.read("measurements.csv").decode()
    assert np.count_nonzero(labels) == 12
    assert table == instances.post("/segment?measurements=csv&channel=0", content=two_channels(), headers=TIFF).text
    assert list(runtime_of(instances).scratch.requests.iterdir()) == []


def test_same_request_is_answered_again_without_the_device(bands_repository: Path, tmp_path: Path) -> None:
    with start(bands_repository, tmp_path, cache_bytes=100_000) as client:
        runtime = runtime_of(client)
        until(lambda: runtime.unready_reasons() == ())
        fake: Any = loaded_segmenter(runtime.models, None)

        def post(stack: bytes = STACK, query: str = "", name: str = "a.tif") -> Any:
            response = client.post(f"/segment{query}", content=stack, headers=TIFF | {"X-Filename": name})
            assert response.status_code == 200
            return response

        first = post()
        fake.gate.clear()
        again = post(name="b.tif")
        fake.gate.set()
        assert (first.headers["x-cache"], again.headers["x-cache"]) == ("miss", "hit")
        assert (first.content, first.headers["etag"]) == (again.content, again.headers["etag"])
        assert "b_classes.ome.tif" in again.headers["content-disposition"]
        assert again.headers["x-stackseg-voxel-size"] == first.headers["x-stackseg-voxel-size"]
        assert again.headers["server-timing"].startswith("receive;")
        others = post(as_tiff(np.full((3, 8, 8), 201, np.uint8))), post(query="?overlap=0.5")
        assert {other.headers["x-cache"] for other in others} == {"miss"}
        assert len({first.headers["etag"], *(other.headers["etag"] for other in others)}) == 3
        metrics = client.get("/metrics").text
        assert 'stackseg_cache_total{outcome="hit"} 1.0' in metrics
        assert 'stackseg_cache_total{outcome="miss"} 3.0' in metrics
        assert list(runtime.scratch.requests.iterdir()) == []


def test_answer_that_cannot_be_kept_is_given(
    bands_repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(bands_repository, tmp_path, cache_bytes=100_000) as client:
        runtime = runtime_of(client)
        until(lambda: runtime.unready_reasons() == ())
        block(runtime.scratch.path / "cache")
        for _ in range(2):
            response = client.post("/segment", content=STACK, headers=TIFF)
            assert (response.status_code, response.headers["x-cache"]) == (200, "miss")
        assert caplog.text.count("A result is not kept") == 2


def test_what_is_kept_need_not_wait_for_files_that_are_decoded(bands_repository: Path, tmp_path: Path) -> None:
    with start(bands_repository, tmp_path, cache_bytes=100_000, request_seconds=10) as client:
        runtime, gate = runtime_of(client), threading.Event()
        until(lambda: runtime.unready_reasons() == ())
        assert client.post("/segment", content=STACK, headers=TIFF).headers["x-cache"] == "miss"
        stuck = [runtime.read_threads.of(str(number)).submit(gate.wait, 60) for number in range(SMALL_READERS)]
        assert runtime.read_threads.busy("testclient")
        try:
            again = client.post("/segment", content=STACK, headers=TIFF)
            assert (again.status_code, again.headers.get("x-cache")) == (200, "hit")
            with ThreadPoolExecutor(1) as pool:
                unknown = as_tiff(np.full((3, 8, 8), 201, np.uint8))
                posted = pool.submit(client.post, "/segment", content=unknown, headers=TIFF)
                until(lambda: runtime.read_threads.waiting == 1)
                time.sleep(0.1)
                gate.set()
                other = posted.result(60)
        finally:
            gate.set()
        assert other.headers["x-cache"] == "miss"
        timing = dict(stage.split(";dur=") for stage in other.headers["server-timing"].split(", "))
        assert float(timing["read"]) > 90
        assert all(waited.result(60) for waited in stuck)
        until(lambda: not runtime.read_threads.busy("testclient"))


def test_nothing_is_computed_for_a_client_that_left_while_its_file_was_read(
    bands_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(bands_repository, tmp_path, request_seconds=0.2) as client:
        runtime, submitted = runtime_of(client), []
        until(lambda: runtime.unready_reasons() == ())
        read, reserve = runtime.reader.read_small, runtime.reserve

        def slow(*arguments: Any, **options: Any) -> Any:
            volume = read(*arguments, **options)
            time.sleep(0.4)
            return volume

        def noting(*arguments: Any) -> Any:
            submitted.append(arguments)
            return reserve(*arguments)

        monkeypatch.setattr(runtime.reader, "read_small", slow)
        monkeypatch.setattr(runtime, "reserve", noting)
        assert client.post("/segment", content=STACK, headers=TIFF).status_code == 504
        assert submitted == []
        assert list(runtime.scratch.requests.iterdir()) == []


def test_volume_and_labels_leave_memory_with_their_request(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not when Python next looks for cycles, which takes hours among all that torch brings along."""
    fake: Any = loaded_segmenter(runtime_of(client).models, None)
    seen: list[weakref.ref[Any]] = []
    segment = fake.segment

    def noting(volume: Any, *arguments: Any, **options: Any) -> Any:
        result = segment(volume, *arguments, **options)
        seen.extend((weakref.ref(volume.read), weakref.ref(result.segmentation.pixels)))
        return result

    monkeypatch.setattr(fake, "segment", noting)
    gc.collect()
    gc.disable()
    try:
        assert client.post("/segment", content=STACK, headers=TIFF).status_code == 200
        until(lambda: len(seen) == 2 and all(known() is None for known in seen))
    finally:
        gc.enable()


def test_failure_is_not_kept(bands_repository: Path, tmp_path: Path) -> None:
    with start(bands_repository, tmp_path, cache_bytes=100_000) as client:
        until(lambda: runtime_of(client).unready_reasons() == ())
        fake: Any = loaded_segmenter(runtime_of(client).models, None)
        fake.error = RuntimeError("once")
        with pytest.raises(RuntimeError, match="once"):
            client.post("/segment", content=STACK, headers=TIFF)
        fake.error = None
        assert client.post("/segment", content=STACK, headers=TIFF).headers["x-cache"] == "miss"


def key(caller: str | None, spec: ModelSpec, query: Query, **manner: Any) -> str:
    return fingerprint(caller, "0" * 64, spec.model_dump_json(), query, manner)


def test_one_caller_is_not_told_what_another_has_sent(bands: ModelSpec) -> None:
    assert len({key(caller, bands, Query()) for caller in ("ada", "bob", None)}) == 3
    assert key("ada", bands, Query()) == key("ada", bands, Query(model="bands"))


def test_whatever_decides_about_labels_is_in_the_validator(bands: ModelSpec) -> None:
    later = bands.model_copy(update={"version": "2"})
    whole = bands.model_copy(update={"activation": "none"})
    keys = {key(None, spec, Query()) for spec in (bands, later, whole)}
    keys |= {key(None, bands, Query(overlap=0.5)), key(None, bands, Query(), windows={"overlap": 0.5})}
    keys |= {key(None, bands, Query(diameter=text)) for text in ("auto", "none", "15px")}
    keys |= {key(None, bands, Query(skip_below=text)) for text in ("auto", "none", "15")}
    keys.add(key(None, bands, Query(quality="best")))
    steered = {"threshold": 0.4, "minimum_size": "9", "border": "drop", "fill_holes": True, "min_confidence": 0.4}
    keys |= {key(None, bands, Query.model_validate({name: value})) for name, value in steered.items()}
    assert len(keys) == 17


def test_validator_changes_with_what_the_operator_chose_and_with_how_the_model_runs(
    bands_repository: Path, tmp_path: Path
) -> None:
    tags = []
    for overlap, precision in ((0.25, "fp32"), (0.25, "fp32"), (0.5, "fp32"), (0.25, "bf16")):

        def load(spec: Any, settings: Settings, _driver: Any, precision: str = precision) -> FakeSegmenter:
            fake = FakeSegmenter(spec, settings)
            fake.precision = precision
            return fake

        chosen = {"models": {"folder": bands_repository}, "server": {"scratch_folder": tmp_path}}
        settings = Settings.model_validate(chosen | {"windows": {"overlap": overlap}})
        app = create_app(settings, Parts(load=load))
        with TestClient(app) as client:
            until(lambda client=client: runtime_of(client).unready_reasons() == ())
            tags.append(client.post("/segment", content=STACK, headers=TIFF).headers["etag"])
    assert tags[0] == tags[1]
    assert len(set(tags)) == 3


def test_request_that_takes_too_long_is_given_up(bands_repository: Path, tmp_path: Path) -> None:
    with start(bands_repository, tmp_path, request_seconds=0.5) as client:
        runtime = runtime_of(client)
        until(lambda: runtime.unready_reasons() == ())
        fake: Any = loaded_segmenter(runtime.models, None)
        fake.gate.clear()
        response = client.post("/segment", content=STACK, headers=TIFF)
        assert (response.status_code, response.json()["type"]) == (504, "urn:stackseg:problem:timed-out")
        until(lambda: not runtime.devices.running)
        assert list(runtime.scratch.requests.iterdir()) == []
        fake.gate.set()
        assert client.post("/segment", content=STACK, headers=TIFF).status_code == 200


def test_request_that_waits_when_the_service_stops_is_told_so(bands_repository: Path, tmp_path: Path) -> None:
    with start(bands_repository, tmp_path) as client:
        runtime = runtime_of(client)
        until(lambda: runtime.unready_reasons() == ())
        fake: Any = loaded_segmenter(runtime.models, None)
        fake.gate.clear()
        answers: list[Any] = []

        def post() -> None:
            answers.append(client.post("/segment", content=STACK, headers=TIFF))

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        # The first of the two waits as well, until the worker has noticed it.
        until(lambda: runtime.devices.running and runtime.devices.waiting == 1)
        runtime.devices.all[0].scheduler.queue.cancel_all()
        for thread in threads:
            thread.join(20)
        assert [answer.status_code for answer in answers] == [503, 503]
        assert {answer.json()["type"] for answer in answers} == {"urn:stackseg:problem:not-ready"}


@pytest.fixture(scope="module")
def host(bands_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Path]]:
    """A service that may read `scans/stack.tif` and write below `results`, and the folder that holds both."""
    folder = tmp_path_factory.mktemp("host")
    for name in ("scans", "results", "scratch"):
        (folder / name).mkdir()
    (folder / "scans" / "stack.tif").write_bytes(STACK)
    roots = {"inputs": {"scans": str(folder / "scans")}, "outputs": {"results": str(folder / "results")}}
    with serve_objects(folder) as server:
        roots["stores"] = {"far": f"{server.url}/scans"}
        with start(bands_repository, folder / "scratch", roots, cache_bytes=10**6, upload_bytes=10) as client:
            until(lambda: runtime_of(client).unready_reasons() == ())
            yield client, folder


def test_file_of_the_host_is_segmented_without_being_sent(host: tuple[TestClient, Path]) -> None:
    client, _ = host
    response = client.post("/segment?input=scans/stack.tif")
    assert response.status_code == 200, response.text
    assert np.array_equal(tifffile.imread(io.BytesIO(response.content)), np.ones((3, 8, 8)))
    assert 'filename="stack_classes.ome.tif"' in response.headers["content-disposition"]
    assert "x-cache" not in response.headers
    assert client.post("/inspect?input=scans/stack.tif").json()["file"]["shape"] == [1, 3, 8, 8]
    assert list(runtime_of(client).scratch.requests.iterdir()) == []


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_ome_zarr_is_segmented_from_a_folder_of_the_host_and_from_an_archive(
    host: tuple[TestClient, Path], client: TestClient, version: str
) -> None:
    service, folder = host
    store = folder / "scans" / f"{version}.ome.zarr"
    write_zarr(store, tifffile.imread(io.BytesIO(STACK)), version=version, chunks=(2, 5, 5))
    packed = pack(store).read_bytes()
    url = runtime_of(service).settings.references.stores["far"].url
    for response in (
        service.post(f"/segment?input=scans/{store.name}"),
        service.post(f"/segment?input=far/{store.name}"),
        service.post("/segment", params={"input": f"{url}/{store.name}"}),
        client.post("/segment", content=packed, headers={"Content-Type": "application/zip", "X-Filename": "a.ozx"}),
    ):
        assert response.status_code == 200, response.text
        assert np.array_equal(tifffile.imread(io.BytesIO(response.content)), np.ones((3, 8, 8)))
        assert response.headers["x-stackseg-voxel-size"].startswith("0.5,")
    assert 'filename="a_classes.ome.tif"' in response.headers["content-disposition"]
    for place in ("scans", "far"):
        facts = service.post(f"/inspect?input={place}/{store.name}").json()["file"]
        assert (facts["container"], facts["shape"]) == (f"OME-Zarr {version}", [1, 3, 8, 8])
    (store / "zarr.json").unlink(missing_ok=True)
    (store / ".zattrs").unlink(missing_ok=True)
    assert service.post(f"/segment?input=scans/{store.name}").status_code in (400, 422)
    assert service.post(f"/segment?input=far/{store.name}").status_code in (400, 422)
    assert list(runtime_of(service).scratch.requests.iterdir()) == []


def test_form_without_a_file_may_name_one(host: tuple[TestClient, Path]) -> None:
    client, _ = host
    response = client.post("/segment", data={"input": "scans/stack.tif"}, files={"overlap": (None, "0.5")})
    assert response.status_code == 200, response.text


def test_result_is_written_on_the_host_and_the_answer_says_so(host: tuple[TestClient, Path]) -> None:
    client, folder = host
    url = "/segment?input=scans/stack.tif&output_to=results/labels.tif"
    response = client.post(url)
    written = folder / "results" / "labels.tif"
    assert response.json() == {
        "output": "results/labels.tif",
        "media_type": "image/tiff",
        "bytes": written.stat().st_size,
        "model": "bands/1",
        "objects": None,
    }
    assert np.array_equal(tifffile.imread(written), np.ones((3, 8, 8)))
    assert response.headers["x-stackseg-voxel-size"] == "0.5,0.2,0.2"
    again = client.post(url)
    assert (again.status_code, again.json()["type"]) == (409, "urn:stackseg:problem:output-exists")
    assert client.post(url + "&overwrite=true").status_code == 200
    assert [path.name for path in (folder / "results").iterdir()] == ["labels.tif"]
    assert list(runtime_of(client).scratch.requests.iterdir()) == []


@pytest.mark.parametrize(
    ("query", "body", "word"),
    [
        ("", b"", "no file"),
        ("input=scans/stack.tif", b"II*", "leave one of them out"),
        ("input=secrets/stack.tif", b"", "scans"),
        ("input=scans/stack.tif&output_to=results/labels.png", b"", "tif"),
        ("input=scans/stack.tif&output_to=results/folder.tif", b"", "is a folder"),
        ("input=scans/stack.tif&overwrite=true", b"", "output_to"),
        ("format=zarr", b"II*", "format"),
        ("glob=*.tif", b"II*", "glob"),
    ],
)
def test_reference_that_cannot_be_used_is_refused(
    host: tuple[TestClient, Path], query: str, body: bytes, word: str
) -> None:
    client, folder = host
    (folder / "results" / "folder.tif").mkdir(exist_ok=True)
    for endpoint in ("/segment", "/jobs", "/inspect"):
        response = client.post(f"{endpoint}?{query}", content=body, headers=TIFF)
        assert (response.status_code, response.json()["type"]) == (422, "urn:stackseg:problem:bad-parameter")
        assert word in response.json()["detail"]
        assert str(folder) not in response.text
    assert list(runtime_of(client).scratch.requests.iterdir()) == []


@pytest.mark.parametrize(
    ("query", "status", "word"),
    [
        ("output_to=results/labels.png", 422, "tif"),
        ("output_to=results/labels.png&overwrite=true", 422, "tif"),
        ("overwrite=true", 422, "output_to"),
        ("output_to=results/there.tif", 409, "there already"),
    ],
)
def test_a_form_may_write_no_more_than_a_plain_body(
    host: tuple[TestClient, Path], query: str, status: int, word: str
) -> None:
    client, folder = host
    there = folder / "results" / "there.tif"
    there.write_text("precious")
    for sent in ({"content": b"II*", "headers": TIFF}, {"files": {"file": b"II*"}}):
        for endpoint in ("/segment", "/jobs"):
            response = client.post(f"{endpoint}?{query}", **sent)
            assert (response.status_code, word in response.json()["detail"]) == (status, True), response.text
    assert there.read_text() == "precious"


def test_file_of_the_host_that_is_no_stack_is_refused(host: tuple[TestClient, Path]) -> None:
    client, folder = host
    (folder / "scans" / "notes.txt").write_text("nothing to see")
    response = client.post("/segment?input=scans/notes.txt")
    assert (response.status_code, response.json()["type"]) == (415, "urn:stackseg:problem:unsupported-media")


def outcome(**facts: Any) -> AnswerMetadata:
    return AnswerMetadata("nuclei/1", "image/tiff", "stack_labels.ome.tif", "labels", facts.pop("seconds", {}), **facts)


def test_notes_reach_the_client_as_plain_text() -> None:
    notes = ("0.2 µm per voxel.", "Channel 'ß\r\nX-Evil: 1\x7f'.")
    header = build_headers(outcome(notes=notes))["X-StackSeg-Note"]
    assert header == "0.2 um per voxel. Channel '?  X-Evil: 1 '."
    assert header.isascii()
    assert header.isprintable()
    assert len(build_headers(outcome(notes=("x" * 10_000,)))["X-StackSeg-Note"]) == MAX_NOTE_LETTERS


def test_headers_say_only_what_is_known() -> None:
    assert build_headers(outcome()).keys() == {"Cache-Control", "X-StackSeg-Model", "Server-Timing"}
    known = build_headers(outcome(objects=3, voxel_size=VoxelSize(0.5, 0.1, 1e-5)))
    assert (known["X-StackSeg-Objects"], known["X-StackSeg-Voxel-Size"]) == ("3", "0.5,0.1,1e-05")
    assert build_headers(outcome(diameter="15px; stated"))["X-StackSeg-Diameter"] == "15px; stated"
    assert build_headers(outcome(skipped="3 of 9 windows; up to 7"))["X-StackSeg-Skipped"] == "3 of 9 windows; up to 7"


def test_server_timing_is_in_milliseconds() -> None:
    timing = build_headers(outcome(seconds={"windows": 1.2345, "total": 2}))["Server-Timing"]
    assert timing == "windows;dur=1234.5, total;dur=2000.0"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("embryo.tif", "embryo_labels.ome.tif"),
        ("embryo.ome.TIFF", "embryo_labels.ome.tif"),
        ("embryo.day2.tif", "embryo.day2_labels.ome.tif"),
        ("embryo", "embryo_labels.ome.tif"),
        (".tif", "stack_labels.ome.tif"),
        ("", "stack_labels.ome.tif"),
    ],
)
def test_answer_is_named_after_the_input(name: str, answer: str) -> None:
    assert answer_name(name, "_labels.ome.tif") == answer


def test_files_that_nobody_can_read_keep_no_others_from_being_looked_at(client: TestClient) -> None:
    """Decoding waits for its turn, and so do folders on a server that does not answer."""
    gate, runtime = threading.Event(), runtime_of(client)
    others = runtime.read_threads.of("others"), runtime.decode_threads.of("testclient")
    stuck = [pool.submit(gate.wait, 60) for pool in (*others, HOST_FILE_THREADS) for _ in range(16)]
    try:
        inspected = client.post("/inspect", content=STACK, headers=TIFF)
        assert inspected.json()["file"]["shape"] == [1, 3, 8, 8]
        assert client.post("/jobs", content=STACK, headers=TIFF).status_code == 202
    finally:
        gate.set()
    assert all(waited.result(60) for waited in stuck)
    assert client.post("/segment", content=STACK, headers=TIFF).status_code == 200


def test_channels_that_are_too_large_to_measure_are_refused_before_anything_is_computed(
    random_nuclei: ModelSpec, tmp_path: Path
) -> None:
    """One channel of the file has 512 bytes, and both have 1024."""
    with start(random_nuclei.folder.parent, tmp_path, decoded_bytes=600) as client:
        until(lambda: runtime_of(client).unready_reasons() == ())
        fake: Any = loaded_segmenter(runtime_of(client).models, None)
        fake.error = AssertionError("nothing is to be computed")
        refused = client.post("/segment?measurements=csv&channel=0", content=two_channels(), headers=TIFF)
        fake.error = None
        assert refused.status_code == 413
        assert client.post("/segment?channel=0", content=two_channels(), headers=TIFF).status_code == 200
