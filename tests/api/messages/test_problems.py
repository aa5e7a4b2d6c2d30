from __future__ import annotations

import errno
import inspect
import io
import json
import shutil
from pathlib import Path
from typing import Any

import doomed_reader
import numpy as np
import pytest
import tifffile
from fakes import until
from live import FakeService, as_tiff
from runtimes import loaded_segmenter

from service.api.messages.problems import STATUS, status_of
from service.core import errors
from service.formats.sandbox.reader import Reader

TIFF = {"Content-Type": "image/tiff"}
STACK = as_tiff(np.full((3, 8, 8), 200, np.uint8))


def concrete(kind: type[errors.StackSegError]) -> errors.StackSegError:
    match kind:
        case errors.QueueFull | errors.NotReady | errors.RateLimited:
            return kind("try later", 7)
        case errors.OutOfMemory:
            return kind("too much", 123)
        case errors.MissingKeys:
            return kind("what to do", {"input.channels": "how many"})
    return kind("what to do")


def tree(kind: type[errors.StackSegError]) -> list[type[errors.StackSegError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.BadFile, 422),
        (errors.AmbiguousAxes, 422),
        (errors.BadParameter, 422),
        (errors.UnsupportedMedia, 415),
        (errors.TooLarge, 413),
        (errors.TooSlow, 408),
        (errors.UnknownModel, 404),
        (errors.Unauthorized, 401),
        (errors.Misdirected, 421),
        (errors.RateLimited, 429),
        (errors.DeviceLost, 503),
        (errors.QueueFull, 503),
        (errors.NotReady, 503),
        (errors.TimedOut, 504),
        (errors.OutOfMemory, 507),
        (errors.OutOfStorage, 507),
        (errors.BrokenModel, 500),
        (errors.NonFiniteScores, 500),
        (errors.ConfigError, 500),
        (errors.Cancelled, 499),
    ],
)
def test_every_error_has_its_status(kind: type[errors.StackSegError], status: int) -> None:
    assert status_of(kind) == status


def test_class_without_a_row_has_its_parents_status() -> None:
    class Cracked(errors.UnsupportedMedia):
        pass

    assert Cracked not in STATUS
    assert status_of(Cracked) == 415


# Never answered, and never answered by a service that goes on.
ELSEWHERE = (errors.Cancelled, errors.DeviceLost)


@pytest.mark.parametrize("kind", [kind for kind in tree(errors.StackSegError) if kind not in ELSEWHERE])
def test_error_of_the_device_becomes_its_problem_document(
    service: FakeService, kind: type[errors.StackSegError]
) -> None:
    fake = service.fake()
    fake.error = concrete(kind)
    response = service.client.post("/segment", content=STACK, headers=TIFF)
    problem = response.json()
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["type"] == f"urn:stackseg:problem:{kind.slug}"
    assert problem["status"] == response.status_code == status_of(type(fake.error))
    assert problem["detail"] == str(fake.error)
    assert problem["instance"] == f"urn:uuid:{response.headers['x-request-id']}"
    assert problem.get("needed_bytes") == (123 if kind is errors.OutOfMemory else None)
    assert response.headers.get("retry-after") == (
        str(fake.error.retry_after) if hasattr(fake.error, "retry_after") else None
    )
    assert list(service.runtime.scratch.requests.iterdir()) == []


def test_lost_device_ends_readiness_and_asks_to_come_again(bands_repository: Path, tmp_path: Path) -> None:
    running = FakeService(bands_repository, tmp_path)
    with running.client as client:
        running.fake().error = errors.DeviceLost("cuda:0 has failed.")
        response = client.post("/segment", content=STACK, headers=TIFF)
        assert (response.status_code, response.json()["type"]) == (503, "urn:stackseg:problem:device-lost")
        assert response.headers["retry-after"] == "60"
        until(lambda: client.get("/health/ready").status_code == 503)
        assert client.get("/health/live").status_code == 200


def test_work_given_up_by_the_service_is_answered_not_dropped(service: FakeService) -> None:
    service.fake().error = errors.Cancelled("given up")
    response = service.client.post("/segment", content=STACK, headers=TIFF)
    assert (response.status_code, response.json()["type"]) == (503, "urn:stackseg:problem:not-ready")


def test_unforeseen_error_tells_a_number_and_no_secrets(service: FakeService) -> None:
    service.fake().error = KeyError("the password")
    response = service.client.post("/segment", content=STACK, headers=TIFF)
    assert (response.status_code, response.json()["type"]) == (500, "urn:stackseg:problem:internal-error")
    assert "password" not in response.text
    assert response.json()["instance"].startswith("urn:uuid:")
    assert list(service.runtime.scratch.requests.iterdir()) == []


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no"), RuntimeError("can't start new thread")])
def test_exhausted_memory_is_told_wherever_it_shows(
    service: FakeService, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    service.fake().error = error
    response = service.client.post("/segment", content=STACK, headers=TIFF)
    assert (response.status_code, response.json()["type"]) == (507, "urn:stackseg:problem:out-of-memory")
    assert "needed_bytes" not in response.json()
    assert not [record for record in caplog.records if record.exc_info]


def test_wrong_path_and_method_are_problem_documents(service: FakeService) -> None:
    missing, wrong = service.client.get("/nowhere"), service.client.get("/segment")
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:stackseg:problem:not-found")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "urn:stackseg:problem:method-not-allowed")
    assert wrong.headers["allow"] == "POST"
    assert service.client.put("/jobs").headers["allow"] == "GET, POST"


@pytest.mark.parametrize(
    ("address", "parameter", "suggested"),
    [
        ("/segment?overlap=2", "overlap", None),
        ("/segment?zoom=2", "zoom", None),
        ("/segment?measurements=csv&output=classes", "measurements", None),
        ("/segment?diameter=15px&time=3", "time", {"time": "0"}),
        ("/segment?model=unknown", "model", None),
        ("/segment?output_to=a.tif", "output_to", None),
    ],
)
def test_problem_names_its_parameter(
    service: FakeService, address: str, parameter: str, suggested: dict[str, str] | None
) -> None:
    problem = service.client.post(address, content=STACK, headers=TIFF).json()
    assert (problem["parameter"], problem.get("suggested")) == (parameter, suggested)


def test_parameter_of_the_address_is_named_by_the_framework_too(service: FakeService) -> None:
    assert service.client.get("/jobs?limit=0").json()["parameter"] == "limit"


def test_unknown_members_are_absent(service: FakeService) -> None:
    problem = service.client.post("/segment", content=b"no TIFF", headers=TIFF).json()
    assert {"parameter", "suggested", "needed_bytes"}.isdisjoint(problem)


def test_documented_errors_are_those_that_occur(service: FakeService) -> None:
    document = service.client.get("/openapi.json").json()
    responses = document["paths"]["/segment"]["post"]["responses"]
    possible = {str(status_of(kind)) for kind in tree(errors.StackSegError)} - {"400", "499"}
    assert possible | {"200", "202"} == set(responses)
    for status in possible:
        (media,) = responses[status]["content"]
        assert media == "application/problem+json"


def test_what_became_of_the_process_that_reads_files_is_told(
    bands_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(doomed_reader.__file__).parent))
    packed = io.BytesIO()
    tifffile.imwrite(packed, np.zeros((5, 8, 8), np.uint8), photometric="minisblack", compression="packbits")
    service = FakeService(bands_repository, tmp_path)
    with service.client as client:
        service.fake()
        until(lambda: service.runtime.read_threads.waiting == 0)
        before = client.get("/health").json()["degraded"]
        service.runtime.reader.close()
        service.runtime._readers.reader = Reader(
            memory_bytes=2**29, seconds=30, decoded_bytes=2**20, processes=1, module=doomed_reader.__name__
        )
        response = client.post("/segment", params={"axes": "ZYX"}, content=packed.getvalue(), headers=TIFF)
        assert (response.status_code, response.json()["type"]) == (503, "urn:stackseg:problem:reader-killed")
        assert "damaged" not in response.json()["detail"]
        assert "stackseg_reader_kills 2.0" in client.get("/metrics").text
        degraded = client.get("/health").json()["degraded"]
        assert degraded[: len(before)] == before
        assert degraded[-1].startswith("Files are read without seccomp: ")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("/srv/models/nuclei/model.yaml: cannot be read", "model.yaml: cannot be read"),
        ("[Errno 2] No such file or directory: '/srv/a b/c'", "[Errno 2] No such file or directory: 'a b/c'"),
        ("/models/nuclei: the name is taken by /models/other", "nuclei: the name is taken by other"),
        ("output_to: results/2026/a/labels.tif is there", "output_to: results/2026/a/labels.tif is there"),
        ("see https://example.org/a/b or GET /models", "see https://example.org/a/b or GET /models"),
    ],
)
def test_messages_tell_names_of_files_and_not_where_they_lie(message: str, told: str) -> None:
    assert errors.without_folders(message) == told


def test_no_answer_tells_where_the_host_has_its_files(bands_repository: Path, tmp_path: Path) -> None:
    models, scratch = tmp_path / "models", tmp_path / "scratch"
    scratch.mkdir()
    for name in ("bands", "mute", "strange", "light", "failing"):
        shutil.copytree(bands_repository / "bands", models / name)
        described = (models / name / "model.yaml").read_text()
        (models / name / "model.yaml").write_text(described.replace("name: bands", f"name: {name}"))
    (models / "mute" / "model.yaml").unlink()
    (models / "strange" / "model.yaml").write_text("a: [")
    (models / "light" / "weights.safetensors").write_bytes(b"none")
    running = FakeService(models, scratch)
    with running.client as client:
        until(lambda: client.get("/models/bands").json()["state"] == "ready")
        bands: Any = loaded_segmenter(running.runtime.models, "bands")
        bands.error = OSError(2, "No such file", str(models / "bands" / "weights.safetensors"))
        answers = [
            client.get(path)
            for path in ("/models", "/models/strange", "/models/failing", "/health", "/health/ready", "/gpu", "/jobs")
        ]
        for name in ("bands", "mute", "strange", "light", "failing"):
            for path in ("/segment", "/inspect", "/jobs"):
                answers.append(client.post(f"{path}?model={name}", content=STACK, headers=TIFF))
        for answer in [answer for answer in answers if answer.status_code == 202]:
            url = answer.headers["Location"]
            until(lambda url=url: client.get(url).json()["state"] not in {"waiting", "loading", "running"})
            answers += [client.get(url), client.get(f"{url}/events"), client.get(f"{url}/result")]
        assert {"failed", "cannot be read"} <= {
            word for word in ("failed", "cannot be read") for answer in answers if word in answer.text
        }
        for answer in answers:
            assert str(tmp_path) not in answer.text, answer.url
            for said in strings(json.loads(answer.text)) if answer.text.startswith("{") else ():
                assert said in {"/health", "/docs"} or said.startswith("/jobs/") or errors.without_folders(said) == said


def strings(value: object) -> list[str]:
    """All strings in a JSON document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_errors_are_answered_without_a_thread_that_memory_may_not_hold(service: FakeService) -> None:
    assert all(inspect.iscoroutinefunction(handler) for handler in service.app.exception_handlers.values())
