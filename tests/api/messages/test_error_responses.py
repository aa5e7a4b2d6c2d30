from __future__ import annotations

import errno
import inspect
import io
import json
from pathlib import Path

import hanging_reader
import numpy as np
import pytest
import tifffile
from fakes import wait_until
from job_service import Service, start_service
from live import STACK, parse_problem
from model_files import copy_model

from service.api.messages.error_responses import STATUS_BY_ERROR, get_status_code
from service.core import errors
from service.formats.sandbox.reader import Reader


def make_error(error_type: type[errors.StackSegError]) -> errors.StackSegError:
    """Create an error of any class in the tree."""
    match error_type:
        case errors.QueueFull | errors.NotReady | errors.RateLimited:
            return error_type("try later", 7)
        case errors.OutOfMemory:
            return error_type("too much", 123)
        case errors.MissingKeys:
            return error_type("what to do", {"input.channels": "how many"})
    return error_type("what to do")


def list_tree(error_type: type[errors.StackSegError]) -> list[type[errors.StackSegError]]:
    """Return an error class and all its subclasses."""
    return [error_type, *(descendant for child in error_type.__subclasses__() for descendant in list_tree(child))]


@pytest.mark.parametrize(
    ("status", "error_types"),
    [
        (401, [errors.Unauthorized]),
        (404, [errors.UnknownModel]),
        (408, [errors.TooSlow]),
        (413, [errors.TooLarge]),
        (415, [errors.UnsupportedMedia]),
        (421, [errors.MisdirectedRequest]),
        (422, [errors.BadFile, errors.AmbiguousAxes, errors.BadParameter]),
        (429, [errors.RateLimited]),
        (499, [errors.Cancelled]),
        (500, [errors.BrokenModel, errors.NonFiniteScores, errors.ConfigError]),
        (503, [errors.DeviceLost, errors.QueueFull, errors.NotReady]),
        (504, [errors.TimedOut]),
        (507, [errors.OutOfMemory, errors.OutOfStorage]),
    ],
)
def test_error_classes_have_the_expected_status(status: int, error_types: list[type[errors.StackSegError]]) -> None:
    assert {get_status_code(error_type) for error_type in error_types} == {status}


def test_unlisted_error_class_inherits_the_status_of_its_parent() -> None:
    class UnlistedError(errors.UnsupportedMedia):
        pass

    assert UnlistedError not in STATUS_BY_ERROR
    assert get_status_code(UnlistedError) == 415


# Cancelled is never sent to a client, and DeviceLost makes the service unready.
EXCLUDED = (errors.Cancelled, errors.DeviceLost)


@pytest.mark.parametrize(
    "error_type", [error_type for error_type in list_tree(errors.StackSegError) if error_type not in EXCLUDED]
)
def test_device_error_is_reported_as_a_problem_document(
    service: Service, error_type: type[errors.StackSegError]
) -> None:
    error = service.fake.error = make_error(error_type)
    response = service.segment()
    document = response.json()
    assert (
        parse_problem(response)
        == (document["status"], error_type.slug)
        == (get_status_code(error_type), error_type.slug)
    )
    assert document["detail"] == str(error)
    assert document["instance"] == f"urn:uuid:{response.headers['x-request-id']}"
    assert document.get("needed_bytes") == (123 if error_type is errors.OutOfMemory else None)
    retry_after = getattr(error, "retry_after", None)
    assert response.headers.get("retry-after") == (None if retry_after is None else str(retry_after))
    assert service.leftovers() == []


def test_lost_device_makes_the_service_unready_and_sets_retry_after(bands_repository: Path, tmp_path: Path) -> None:
    with start_service(bands_repository, tmp_path) as service:
        service.fake.error = errors.DeviceLost("cuda:0 has failed.")
        response = service.segment()
        assert parse_problem(response) == (503, "device-lost")
        assert response.headers["retry-after"] == "60"
        wait_until(lambda: service.client.get("/health/ready").status_code == 503)
        assert service.client.get("/health/live").status_code == 200


def test_work_cancelled_by_the_service_is_reported_as_not_ready(service: Service) -> None:
    service.fake.error = errors.Cancelled("cancelled")
    assert parse_problem(service.segment()) == (503, "not-ready")


def test_unexpected_error_is_reported_with_a_request_id_and_without_details(service: Service) -> None:
    service.fake.error = KeyError("the password")
    response = service.segment()
    assert parse_problem(response) == (500, "internal-error")
    assert "password" not in response.text
    assert response.json()["instance"].startswith("urn:uuid:")
    assert service.leftovers() == []


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no"), RuntimeError("can't start new thread")])
def test_out_of_memory_errors_of_all_kinds_are_reported_as_such(
    service: Service, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    service.fake.error = error
    response = service.segment()
    assert parse_problem(response) == (507, "out-of-memory")
    assert "needed_bytes" not in response.json()
    assert not [record for record in caplog.records if record.exc_info]


def test_wrong_path_and_method_are_reported_as_problem_documents(service: Service) -> None:
    wrong_path, wrong_method = service.client.get("/nowhere"), service.client.get("/segment")
    assert parse_problem(wrong_path) == (404, "not-found")
    assert parse_problem(wrong_method) == (405, "method-not-allowed")
    assert wrong_method.headers["allow"] == "POST"
    assert service.client.put("/jobs").headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(
    ("url", "parameter", "suggested"),
    [
        ("/segment?overlap=2", "overlap", None),
        ("/segment?zoom=2", "zoom", None),
        ("/segment?measurements=csv&output=classes", "measurements", None),
        ("/segment?diameter=15px&time=3", "time", {"time": "0"}),
        ("/segment?model=unknown", "model", None),
        ("/segment?output_to=a.tif", "output_to", None),
    ],
)
def test_problem_document_has_the_parameter_and_suggested_values(
    service: Service, url: str, parameter: str, suggested: dict[str, str] | None
) -> None:
    document = service.post(url, STACK).json()
    assert (document["parameter"], document.get("suggested")) == (parameter, suggested)


def test_extension_members_are_absent_if_unknown(service: Service) -> None:
    assert service.client.get("/jobs?limit=0").json()["parameter"] == "limit"
    assert {"parameter", "suggested", "needed_bytes"}.isdisjoint(service.segment(b"no TIFF").json())


def test_documented_statuses_match_the_error_classes(service: Service) -> None:
    document = service.client.get("/openapi.json").json()
    responses = document["paths"]["/segment"]["post"]["responses"]
    possible = {str(get_status_code(error_type)) for error_type in list_tree(errors.StackSegError)} - {"400", "499"}
    assert possible | {"200", "202"} == set(responses)
    for status in possible:
        (media,) = responses[status]["content"]
        assert media == "application/problem+json"


def test_killed_reader_process_is_reported(
    bands_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(hanging_reader.__file__).parent))
    packed = io.BytesIO()
    tifffile.imwrite(packed, np.zeros((5, 8, 8), np.uint8), photometric="minisblack", compression="packbits")
    with start_service(bands_repository, tmp_path) as service:
        client = service.client
        wait_until(lambda: service.runtime.read_threads.waiting_count == 0)
        before = client.get("/health").json()["degraded"]
        service.runtime.reader.close()
        service.runtime._readers.reader = Reader(
            memory_bytes=2**29,
            time_limit_seconds=30,
            max_decoded_bytes=2**20,
            process_count=1,
            module=hanging_reader.__name__,
        )
        response = service.segment(packed.getvalue(), axes="ZYX")
        assert parse_problem(response) == (503, "reader-killed")
        assert "damaged" not in response.json()["detail"]
        assert "stackseg_reader_kills 2.0" in client.get("/metrics").text
        degraded = client.get("/health").json()["degraded"]
        assert degraded[: len(before)] == before
        assert degraded[-1].startswith("Files are read without seccomp: ")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("/srv/models/nuclei/model.yaml: cannot be read", "model.yaml: cannot be read"),
        ("[Errno 2] No such file or directory: '/srv/a b/c'", "[Errno 2] No such file or directory: 'a b/c'"),
        ("/models/nuclei: the name is taken by /models/other", "nuclei: the name is taken by other"),
        ("output_to: results/2026/a/labels.tif is there", "output_to: results/2026/a/labels.tif is there"),
        ("see https://example.org/a/b or GET /models", "see https://example.org/a/b or GET /models"),
    ],
)
def test_folders_are_removed_from_paths_in_messages(message: str, expected: str) -> None:
    assert errors.remove_host_details(message) == expected


def test_responses_do_not_reveal_folders_of_the_host(bands_repository: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("bands", "mute", "strange", "light", "failing"):
        copy_model(bands_repository / "bands", models / name)
    (models / "mute" / "model.yaml").unlink()
    (models / "strange" / "model.yaml").write_text("a: [")
    (models / "light" / "weights.safetensors").write_bytes(b"none")
    with start_service(models, tmp_path, models={"folder": models, "default": "bands"}) as service:
        client = service.client
        service.fake.error = OSError(2, "No such file", str(models / "bands" / "weights.safetensors"))
        responses = [
            client.get(path)
            for path in ("/models", "/models/strange", "/models/failing", "/health", "/health/ready", "/gpu", "/jobs")
        ]
        for name in ("bands", "mute", "strange", "light", "failing"):
            for path in ("/segment", "/inspect", "/jobs"):
                responses.append(service.post(path, STACK, model=name))
        for response in [response for response in responses if response.status_code == 202]:
            url = response.headers["Location"]
            service.wait(response.json(), "done", "failed")
            responses += [client.get(url), client.get(f"{url}/events"), client.get(f"{url}/result")]
        assert {"failed", "cannot be read"} <= {
            word for word in ("failed", "cannot be read") for response in responses if word in response.text
        }
        for response in responses:
            assert str(tmp_path) not in response.text, response.url
            for text in list_strings(json.loads(response.text)) if response.text.startswith("{") else ():
                assert (
                    text in {"/health", "/docs"}
                    or text.startswith("/jobs/")
                    or errors.remove_host_details(text) == text
                )


def list_strings(value: object) -> list[str]:
    """Return all strings in a JSON document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in list_strings(item)]
    return [value] if isinstance(value, str) else []


def test_exception_handlers_are_coroutines_and_need_no_thread(service: Service) -> None:
    assert all(inspect.iscoroutinefunction(handler) for handler in service.app.exception_handlers.values())
