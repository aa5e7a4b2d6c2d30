"""Tests of projects: members, groups, the table and the archive, and what other keys can see."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from job_service import Service, start_service
from live import TIFF, as_tiff, parse_problem
from model_files import copy_model
from starlette.requests import ClientDisconnect
from starlette.types import Message

from service.api.access.keys import hash_key
from service.api.routes.projects import ChunkedResponse
from service.models.spec import ModelSpec
from service.serving.jobs.projects import store as project_store
from service.serving.learning.trained_models import OWNER_FILE

JSON = {"Content-Type": "application/json"}
NPY = {"Content-Type": "application/x-npy"}


@pytest.fixture(scope="module")
def shared_service(random_nuclei: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    copy_model(random_nuclei.folder, folder / "jobs" / "trained-models" / "mine")
    models = {"folder": random_nuclei.folder.parent, "default": random_nuclei.name}
    with start_service(random_nuclei.folder.parent, folder, models=models) as running:
        yield running


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    shared_service.caller = "ann"
    yield shared_service
    for caller in ("ann", "bob"):
        shared_service.caller = caller
        for project in shared_service.client.get("/projects").json()["projects"]:
            shared_service.client.delete(f"/projects/{project['id']}")
    shared_service.reset()


def make_stack(width: int) -> bytes:
    """Return a stack with one object of 2 x 2 x `width` voxels."""
    pixels = np.zeros((4, 8, 16), np.uint16)
    pixels[1:3, 2:4, 1 : 1 + width] = 300
    return as_tiff(pixels)


def run(service: Service, name: str = "a.tif", width: int = 3, **parameters: Any) -> str:
    headers = TIFF | {"X-Filename": name}
    response = service.client.post("/jobs", content=make_stack(width), headers=headers, params=parameters)
    assert response.status_code == 202, response.text
    return str(service.wait(response.json(), "done")["id"])


def send(service: Service, method: str, path: str = "", **content: Any) -> Any:
    return service.client.request(method, f"/projects{path}", content=json.dumps(content), headers=JSON)


def create(service: Service, **content: Any) -> dict[str, Any]:
    response = send(service, "POST", **{"name": "Drug trial", **content})
    assert response.status_code == 201, response.text
    return dict(response.json())


def as_job(job: str, **properties: str) -> dict[str, str]:
    return {"kind": "job", "id": job, **properties}


def store_annotation(service: Service, job: str) -> str:
    stack = service.post("/stacks", make_stack(3)).json()["id"]
    np.save(array := io.BytesIO(), (tifffile.imread(io.BytesIO(make_stack(3))) > 0).astype(np.uint8))
    response = service.post("/annotations", array.getvalue(), NPY, job=job, stack=stack, name="by hand")
    return str(response.json()["id"])


def read_archive(service: Service, project: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the files of the archive of a project, and its description in `project.json`."""
    response = service.client.get(f"/projects/{project}/archive")
    assert response.status_code == 200, response.text
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        assert archive.testzip() is None
        files = {name: archive.read(name) for name in archive.namelist()}
    return files, json.loads(files["project.json"])


def test_project_lists_its_members_and_their_groups(service: Service) -> None:
    control, treated = run(service, measurements="zip"), run(service, "b.tif", 5, measurements="csv")
    annotation = store_annotation(service, control)
    response = send(
        service, "POST", name="  Drug\n trial ", notes="Two embryos", add=[as_job(control, group="control")]
    )
    project = response.json()
    assert (response.status_code, response.headers["location"]) == (201, f"/projects/{project['id']}")
    assert (project["name"], project["notes"]) == ("Drug trial", "Two embryos")
    members = [
        as_job(treated, group="treated", name="day 2/b.tif"),
        {"kind": "annotation", "id": annotation, "group": "control"},
        {"kind": "model", "id": "mine"},
        as_job(control, group="placebo"),
    ]
    changed = send(service, "PATCH", f"/{project['id']}", add=members).json()
    assert changed == service.client.get(f"/projects/{project['id']}").json()
    assert [(member["kind"], member["name"], member["group"]) for member in changed["members"]] == [
        ("job", "a.tif", "placebo"),
        ("job", "day 2/b.tif", "treated"),
        ("annotation", "by hand", "control"),
        ("model", "mine", ""),
    ]
    first, second, third, _ = changed["members"]
    assert (first["available"], first["has_table"], first["model"]) == (True, True, "random-nuclei/1")
    assert first["expires"] > first["added"]
    assert (second["bytes"], third["job"]) == (len(service.result({"id": treated}).content), control)
    listed = service.client.get("/projects").json()["projects"]
    assert [(entry["id"], entry["members"]) for entry in listed] == [
        (project["id"], {"job": 2, "annotation": 1, "model": 1})
    ]
    assert service.show({"id": control})["expires"] is None
    remaining = send(service, "PATCH", f"/{project['id']}", remove=[as_job(control)], name="Trial").json()
    assert (remaining["name"], len(remaining["members"])) == ("Trial", 3)
    assert service.show({"id": control})["expires"] is not None


def test_deleted_members_are_marked(service: Service) -> None:
    job = run(service)
    annotation = store_annotation(service, job)
    project = create(service, add=[as_job(job), {"kind": "annotation", "id": annotation}])
    for path in (f"/jobs/{job}", f"/annotations/{annotation}"):
        assert service.client.delete(path).status_code == 204
    members = service.client.get(f"/projects/{project['id']}").json()["members"]
    assert [(member["name"], member["available"], member["objects"]) for member in members] == [
        ("a.tif", False, None),
        ("by hand", False, None),
    ]
    files, description = read_archive(service, project["id"])
    assert files.keys() == {"objects.csv", "project.json"}
    assert [member["files"] for member in description["members"]] == [[], []]


def test_table_joins_the_objects_of_all_results(service: Service) -> None:
    jobs = [run(service, width=width, measurements=kind) for width, kind in ((3, "zip"), (5, "csv"))]
    members = [as_job(jobs[0], name="=1+1.tif", group="control"), as_job(jobs[1], group="a, b"), as_job(run(service))]
    path = f"/projects/{create(service, add=members)['id']}/table"
    response = service.client.get(path)
    assert response.headers["content-type"].startswith("text/csv")
    assert "Drug trial_objects.csv" in response.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert [(row["stack"], row["group"], row["job"], row["num_pixels"]) for row in rows] == [
        ("'=1+1.tif", "control", jobs[0], "12"),
        ("a.tif", "a, b", jobs[1], "20"),
    ]
    selected = service.client.get(path, params={"columns": "area, centroid"}).text.splitlines()[0]
    assert selected == "stack,group,job,model,area,centroid-0,centroid-1,centroid-2"
    unknown = service.client.get(path, params={"columns": "volume"})
    assert (parse_problem(unknown), unknown.json()["parameter"]) == ((422, "bad-parameter"), "columns")


def test_archive_contains_all_files_and_their_origin(service: Service) -> None:
    job, table_job, labels_job = run(service, measurements="zip"), run(service, measurements="csv"), run(service)
    annotation = store_annotation(service, job)
    members = [
        as_job(job, group="control", name="day 1/a.tif"),
        as_job(table_job, group="../..", name="../../etc/passwd"),
        as_job(labels_job, group="control", name="day 1/A.tif"),
        {"kind": "annotation", "id": annotation, "group": "CON"},
        {"kind": "model", "id": "mine"},
        {"kind": "model", "id": service.runtime.settings.models.default},
    ]
    files, description = read_archive(service, create(service, name="a/b: c", add=members)["id"])
    labels, suffix = "labels/control/day 1", "_labels.ome.tif"
    assert {name for name in files if not name.startswith("models/")} == {
        "objects.csv",
        "project.json",
        f"{labels}/a{suffix}",
        "tables/control/day 1/a_measurements.csv",
        "tables/_/_/_/etc/passwd_measurements.csv",
        f"{labels}/A (2){suffix}",
        "corrections/_CON/by hand_image.ome.tif",
        "corrections/_CON/by hand_labels.ome.tif",
    }
    model_files = {name for name in files if name.startswith("models/")}
    trained_folder = service.runtime.settings.trained_folder
    assert {name.removeprefix("models/") for name in model_files} == {
        path.relative_to(trained_folder).as_posix() for path in trained_folder.rglob("*") if path.is_file()
    }
    assert files[f"{labels}/A (2){suffix}"] == service.result({"id": labels_job}).content
    assert files[f"{labels}/a{suffix}"] == service.result({"id": job}, Accept="image/tiff").content
    image = service.client.get(f"/annotations/{annotation}/image").content
    assert files["corrections/_CON/by hand_image.ome.tif"] == image
    first, *_, default_model = description["members"]
    assert first["files"] == [f"{labels}/a{suffix}", "tables/control/day 1/a_measurements.csv"]
    assert first["details"]["parameters"] == {"measurements": "zip"}
    assert (default_model["available"], default_model["files"]) == (True, [])


def test_deletion_says_what_is_deleted(service: Service) -> None:
    job, shared_job = run(service), run(service)
    annotation = store_annotation(service, job)
    create(service, name="Other", add=[as_job(shared_job)])
    members = [as_job(job), as_job(shared_job), {"kind": "annotation", "id": annotation}]
    project = create(service, add=members)["id"]
    deletion = service.client.delete(f"/projects/{project}").json()
    assert [result["job"] for result in deletion["released"]] == [job]
    assert deletion["kept"] == {"job": 1, "annotation": 1}
    assert "no other project: 1." in deletion["message"]
    assert parse_problem(service.client.get(f"/projects/{project}")) == (404, "unknown-project")
    assert service.client.get(f"/annotations/{annotation}").status_code == 200
    assert service.show({"id": shared_job})["expires"] is None


def test_projects_of_other_keys_are_hidden(service: Service) -> None:
    job = run(service)
    annotation = store_annotation(service, job)
    project = create(service, add=[as_job(job)])["id"]
    service.caller = "bob"
    assert service.client.get("/projects").json() == {"projects": []}
    for path in ("", "/table", "/archive"):
        assert parse_problem(service.client.get(f"/projects/{project}{path}")) == (404, "unknown-project")
    assert parse_problem(send(service, "PATCH", f"/{project}", name="Mine")) == (404, "unknown-project")
    assert parse_problem(service.client.delete(f"/projects/{project}")) == (404, "unknown-project")
    for member, slug in (
        (as_job(job), "unknown-job"),
        ({"kind": "annotation", "id": annotation}, "unknown-annotation"),
    ):
        response = send(service, "POST", name="Stolen", add=[member])
        assert (parse_problem(response), response.json()["parameter"]) == ((404, slug), "add")
    assert service.client.get("/projects").json() == {"projects": []}
    create(service, name="Drug trial")
    service.caller = "ann"
    assert [entry["id"] for entry in service.client.get("/projects").json()["projects"]] == [project]


@pytest.mark.parametrize(
    ("content", "status", "slug", "parameter"),
    [
        ({"name": " "}, 422, "bad-parameter", "name"),
        ({"name": "x" * 101}, 422, "bad-parameter", "name"),
        ({"name": "a\0b"}, 422, "bad-parameter", "name"),
        ({"name": "Taken"}, 422, "bad-parameter", "name"),
        ({"name": "New", "notes": "x" * 10_001}, 422, "bad-parameter", "notes"),
        ({"name": "New", "owner": "bob"}, 422, "bad-parameter", "owner"),
        ({"name": "New", "add": [{"kind": "stack", "id": "0"}]}, 422, "bad-parameter", "add"),
        ({"name": "New", "add": [{"kind": "model", "id": "../x"}]}, 422, "bad-parameter", "add"),
        ({"name": "New", "add": [{"kind": "model", "id": "livers"}]}, 404, "unknown-model", "add"),
    ],
)
def test_invalid_projects_are_refused(
    service: Service, content: dict[str, Any], status: int, slug: str, parameter: str
) -> None:
    create(service, name="Taken")
    response = send(service, "POST", **content)
    assert parse_problem(response) == (status, slug)
    assert response.json()["parameter"] == parameter
    assert len(service.client.get("/projects").json()["projects"]) == 1


def test_change_is_made_completely_or_not_at_all(service: Service) -> None:
    job, running = run(service), service.submit_blocked_job(make_stack(3))
    project = create(service)
    response = send(service, "PATCH", f"/{project['id']}", name="New", add=[as_job(job), as_job(running["id"])])
    assert (parse_problem(response), response.json()["parameter"]) == ((409, "not-finished"), "add")
    assert service.client.get(f"/projects/{project['id']}").json() == project
    service.fake.error = ValueError("a bug")
    service.fake.gate.set()
    service.wait(running, "failed")
    response = send(service, "PATCH", f"/{project['id']}", add=[as_job(running["id"])])
    assert parse_problem(response) == (410, "result-gone")


def test_number_of_projects_and_members_is_limited(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [run(service) for _ in range(3)]
    for name, limit in (("MAX_PROJECTS_PER_OWNER", 2), ("MAX_MEMBERS_PER_PROJECT", 2), ("MAX_MEMBERS_PER_OWNER", 3)):
        monkeypatch.setattr(project_store, name, limit)
    first = create(service, add=[as_job(job) for job in jobs[:2]])["id"]
    too_many = send(service, "PATCH", f"/{first}", add=[as_job(jobs[2])])
    assert (parse_problem(too_many), too_many.json()["parameter"]) == ((507, "out-of-storage"), "add")
    second = create(service, name="Second", add=[as_job(jobs[0])])["id"]
    assert parse_problem(send(service, "PATCH", f"/{second}", add=[as_job(jobs[1])])) == (507, "out-of-storage")
    assert parse_problem(send(service, "POST", name="Third")) == (507, "out-of-storage")
    service.caller = "bob"
    create(service)


def test_projects_survive_a_restart(random_nuclei: ModelSpec, tmp_path: Path) -> None:
    with start_service(random_nuclei.folder.parent, tmp_path) as service:
        project = create(service, add=[as_job(run(service), group="control")])
    with start_service(random_nuclei.folder.parent, tmp_path) as service:
        assert service.client.get(f"/projects/{project['id']}").json() == project


def test_models_of_other_keys_are_not_in_the_archive(random_nuclei: ModelSpec, tmp_path: Path) -> None:
    for name in ("anns", "bobs"):
        folder = copy_model(random_nuclei.folder, tmp_path / "jobs" / "trained-models" / name)
        (folder / OWNER_FILE).write_text(json.dumps(name.removesuffix("s")))
    access = {"keys": {name: hash_key(name) for name in ("ann", "bob")}, "admins": ["ann"]}
    models = {"folder": random_nuclei.folder.parent, "default": random_nuclei.name}
    with start_service(random_nuclei.folder.parent, tmp_path, access=access, models=models) as service:
        service.client.headers["X-API-Key"] = "ann"
        members = [{"kind": "model", "id": name} for name in ("anns", "bobs", random_nuclei.name)]
        files, description = read_archive(service, create(service, add=members)["id"])
    assert {name.split("/")[1] for name in files if name.startswith("models/")} == {"anns"}
    assert not any(OWNER_FILE in name for name in files)
    assert [bool(member["files"]) for member in description["members"]] == [True, False, False]


def test_bodies_are_described_without_references(service: Service) -> None:
    paths = service.client.get("/openapi.json").json()["paths"]
    for path, method in (("/projects", "post"), ("/projects/{project}", "patch"), ("/trainings", "post")):
        body = paths[path][method]["requestBody"]["content"]["application/json"]["schema"]
        assert "$ref" not in json.dumps(body)
    members = paths["/projects"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]["add"]
    assert members["items"]["properties"].keys() == {"kind", "id", "group", "name"}


def test_head_sends_no_content(service: Service) -> None:
    project = create(service, add=[as_job(run(service, measurements="zip"))])["id"]
    for part, media_type in (("table", "text/csv; charset=utf-8"), ("archive", "application/zip")):
        response = service.client.head(f"/projects/{project}/{part}")
        assert (response.status_code, response.headers["content-type"], response.content) == (200, media_type, b"")


@pytest.mark.anyio
async def test_files_are_closed_if_the_client_disconnects() -> None:
    closed: list[bool] = []

    async def generate() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            yield b"second"
        finally:
            closed.append(True)

    async def send(message: Message) -> None:
        if message.get("body"):
            raise BrokenPipeError

    async def receive() -> Message:
        raise AssertionError

    scope = {"type": "http", "method": "GET", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(ClientDisconnect):
        await ChunkedResponse(generate(), "text/csv", "table.csv")(scope, receive, send)
    assert closed == [True]
