from __future__ import annotations

import errno
import inspect
import io
import json
from pathlib import Path

import doomed_reader
import numpy as np
import pytest
import tifffile
from fakes import until
from job_service import Service, start
from live import STACK, problem
from model_files import copy_model

from service.api.messages.problems import STATUS, status_of
from service.core import errors
from service.formats.sandbox.reader import Reader


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
    ("status", "kinds"),
    [
        (401, [errors.Unauthorized]),
        (404, [errors.UnknownModel]),
        (408, [errors.TooSlow]),
        (413, [errors.TooLarge]),
        (415, [errors.UnsupportedMedia]),
        (421, [errors.Misdirected]),
        (422, [errors.BadFile, errors.AmbiguousAxes, errors.BadParameter]),
        (429, [errors.RateLimited]),
        (499, [errors.Cancelled]),
        (500, [errors.BrokenModel, errors.NonFiniteScores, errors.ConfigError]),
        (503, [errors.DeviceLost, errors.QueueFull, errors.NotReady]),
        (504, [errors.TimedOut]),
        (507, [errors.OutOfMemory, errors.OutOfStorage]),
    ],
)
def test_every_error_has_its_status(status: int, kinds: list[type[errors.StackSegError]]) -> None:
    assert {status_of(kind) for kind in kinds} == {status}


def test_class_without_a_row_has_its_parents_status() -> None:
    class Cracked(errors.UnsupportedMedia):
        pass

    assert Cracked not in STATUS
    assert status_of(Cracked) == 415


# Never answered, and never answered by a service that goes on.
ELSEWHERE = (errors.Cancelled, errors.DeviceLost)


@pytest.mark.parametrize("kind", [kind for kind in tree(errors.StackSegError) if kind not in ELSEWHERE])
def test_error_of_the_device_becomes_its_problem_document(service: Service, kind: type[errors.StackSegError]) -> None:
    error = service.fake.error = concrete(kind)
    response = service.segment()
    document = response.json()
    assert problem(response) == (document["status"], kind.slug) == (status_of(kind), kind.slug)
    assert document["detail"] == str(error)
    assert document["instance"] == f"urn:uuid:{response.headers['x-request-id']}"
    assert document.get("needed_bytes") == (123 if kind is errors.OutOfMemory else None)
    assert response.headers.get("retry-after") == (str(error.retry_after) if hasattr(error, "retry_after") else None)
    assert service.leftovers() == []


def test_lost_device_ends_readiness_and_asks_to_come_again(bands_repository: Path, tmp_path: Path) -> None:
    with start(bands_repository, tmp_path) as service:
        service.fake.error = errors.DeviceLost("cuda:0 has failed.")
        response = service.segment()
        assert problem(response) == (503, "device-lost")
        assert response.headers["retry-after"] == "60"
        until(lambda: service.client.get("/health/ready").status_code == 503)
        assert service.client.get("/health/live").status_code == 200


def test_work_given_up_by_the_service_is_answered_not_dropped(service: Service) -> None:
    service.fake.error = errors.Cancelled("given up")
    assert problem(service.segment()) == (503, "not-ready")


def test_unforeseen_error_tells_a_number_and_no_secrets(service: Service) -> None:
    service.fake.error = KeyError("the password")
    response = service.segment()
    assert problem(response) == (500, "internal-error")
    assert "password" not in response.text
    assert response.json()["instance"].startswith("urn:uuid:")
    assert service.leftovers() == []


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no"), RuntimeError("can't start new thread")])
def test_exhausted_memory_is_told_wherever_it_shows(
    service: Service, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    service.fake.error = error
    response = service.segment()
    assert problem(response) == (507, "out-of-memory")
    assert "needed_bytes" not in response.json()
    assert not [record for record in caplog.records if record.exc_info]


def test_wrong_path_and_method_are_problem_documents(service: Service) -> None:
    missing, wrong = service.client.get("/nowhere"), service.client.get("/segment")
    assert problem(missing) == (404, "not-found")
    assert problem(wrong) == (405, "method-not-allowed")
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
    service: Service, address: str, parameter: str, suggested: dict[str, str] | None
) -> None:
    document = service.post(address, STACK).json()
    assert (document["parameter"], document.get("suggested")) == (parameter, suggested)


def test_members_are_there_where_something_is_known(service: Service) -> None:
    assert service.client.get("/jobs?limit=0").json()["parameter"] == "limit"
    assert {"parameter", "suggested", "needed_bytes"}.isdisjoint(service.segment(b"no TIFF").json())


def test_documented_errors_are_those_that_occur(service: Service) -> None:
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
    with start(bands_repository, tmp_path) as service:
        client = service.client
        until(lambda: service.runtime.read_threads.waiting == 0)
        before = client.get("/health").json()["degraded"]
        service.runtime.reader.close()
        service.runtime._readers.reader = Reader(
            memory_bytes=2**29, seconds=30, decoded_bytes=2**20, processes=1, module=doomed_reader.__name__
        )
        response = service.segment(packed.getvalue(), axes="ZYX")
        assert problem(response) == (503, "reader-killed")
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
    models = tmp_path / "models"
    for name in ("bands", "mute", "strange", "light", "failing"):
        copy_model(bands_repository / "bands", models / name)
    (models / "mute" / "model.yaml").unlink()
    (models / "strange" / "model.yaml").write_text("a: [")
    (models / "light" / "weights.safetensors").write_bytes(b"none")
    with start(models, tmp_path, models={"folder": models, "default": "bands"}) as service:
        client = service.client
        service.fake.error = OSError(2, "No such file", str(models / "bands" / "weights.safetensors"))
        answers = [
            client.get(path)
            for path in ("/models", "/models/strange", "/models/failing", "/health", "/health/ready", "/gpu", "/jobs")
        ]
        for name in ("bands", "mute", "strange", "light", "failing"):
            for path in ("/segment", "/inspect", "/jobs"):
                answers.append(service.post(path, STACK, model=name))
        for answer in [answer for answer in answers if answer.status_code == 202]:
            url = answer.headers["Location"]
            service.wait(answer.json(), "done", "failed")
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


def test_errors_are_answered_without_a_thread_that_memory_may_not_hold(service: Service) -> None:
    assert all(inspect.iscoroutinefunction(handler) for handler in service.app.exception_handlers.values())
