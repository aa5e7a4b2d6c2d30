"""Tests of jobs on host folders: resumption after a crash, cancellation, and agreement with the command line."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tifffile
from common import run_server
from fakes import wait_until
from job_service import Service, start_service
from live import STACK, as_tiff, read_recorded_stacks, serve
from zarr_files import write_zarr

from scripts.recipes.synthetic_nuclei import synthesize
from service.__main__ import main
from service.core.config import read_settings
from service.models.spec import ModelSpec

NAMES = [f"stack {number:02}.tif" for number in range(19)]
FOLDER_PARAMETERS = {"input": "scans/day 1", "output_to": "results/day 1"}


def test_killed_service_resumes_a_folder_and_agrees_with_the_command_line(
    random_nuclei: ModelSpec, write_config: Any, tmp_path: Path
) -> None:
    scans, results = tmp_path / "scans", tmp_path / "results"
    stacks, out, cli_out = scans / "day 1", results / "day 1", tmp_path / "own"
    stacks.mkdir(parents=True)
    results.mkdir()
    image, _labels = synthesize(np.random.default_rng(0), (8, 40, 40))
    for number, name in enumerate(NAMES):
        (stacks / name).write_bytes(as_tiff(np.roll(image, 3 * number, 1)))
    (stacks / "broken.tif").write_bytes(as_tiff(image)[:5000])
    roots = {"inputs": {"scans": {"folder": str(scans)}}, "outputs": {"results": {"folder": str(results)}}}
    jobs = {"folder": str(tmp_path / "jobs"), "attempts": 2}
    config = write_config(random_nuclei.folder.parent, jobs=jobs, references=roots)

    with run_server(tmp_path, "--config", str(config)) as (process, port):
        response = httpx2.post(f"http://127.0.0.1:{port}/jobs", params=FOLDER_PARAMETERS)
        assert response.status_code == 202, response.text
        job = response.json()
        wait_until(lambda: len(read_recorded_stacks(out)) >= 4, 60)
        report = httpx2.get(f"http://127.0.0.1:{port}/jobs/{job['id']}").json()
        assert (report["state"], report["stacks"]["total"], report["time_points"]) == ("running", 20, None)
        assert report["stacks"]["done"] >= 3
        assert report["seconds_left"] > 0
        os.kill(process, signal.SIGKILL)
    before = len(read_recorded_stacks(out))
    assert before < 20

    with serve(read_settings(config)) as live:
        report = live.wait(job, "done", "failed")
        result = live.result(job).json()
    assert (report["state"], report["stacks"]) == ("done", {"done": 19, "total": 20})
    assert report["warnings"][0].startswith("broken.tif: ")
    assert sorted(set(read_recorded_stacks(out))) == sorted([*NAMES, "broken.tif"])
    # Only the failed stack, and stacks that were not recorded yet, were processed again.
    assert len(read_recorded_stacks(out)) <= 22

    assert main(["segment", str(stacks), str(cli_out), "--config", str(config)]) == 1
    assert {path.name for path in out.iterdir()} == {path.name for path in cli_out.iterdir()}
    assert (out / "objects.csv").read_bytes() == (cli_out / "objects.csv").read_bytes()
    for name in NAMES:
        stem = name.removesuffix(".tif")
        assert (out / f"{stem}.png").read_bytes() == (cli_out / f"{stem}.png").read_bytes()
        labels, cli_labels = (tifffile.TiffFile(folder / f"{stem}_labels.ome.tif") for folder in (out, cli_out))
        with labels, cli_labels:
            np.testing.assert_array_equal(labels.asarray(), cli_labels.asarray())
            assert labels.pages.first.tags[270].value == labels.pages.first.tags[270].value
    assert result["report"] == "results/day 1/report.html"
    assert [stack["problem"] is None for stack in result["stacks"]] == [False, *[True] * 19]
    # The command line does not repeat stacks that the job has finished.
    assert main(["segment", str(stacks), str(out), "--config", str(config)]) == 1
    assert len(read_recorded_stacks(out)) <= 23


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with an input folder of eight stacks and an output folder."""
    (tmp_path / "scans" / "day 1" / "below").mkdir(parents=True)
    (tmp_path / "results").mkdir()
    for name in (*NAMES[:6], "below/a.tif", "below/b.ome.tif"):
        (tmp_path / "scans" / "day 1" / name).write_bytes(STACK)
    return tmp_path


@pytest.fixture
def service(bands_repository: Path, host: Path) -> Iterator[Service]:
    roots = {"inputs": {"scans": {"folder": host / "scans"}}, "outputs": {"results": {"folder": host / "results"}}}
    with start_service(bands_repository, host, references=roots) as service:
        yield service


def submit(service: Service, **parameters: Any) -> dict[str, Any]:
    """Submit a job on the input folder."""
    return service.submit(b"", **FOLDER_PARAMETERS | parameters)


def test_subfolders_are_processed_but_links_and_other_files_are_not(service: Service, host: Path) -> None:
    stacks, out = host / "scans" / "day 1", host / "results" / "day 1"
    (host / "secret.tif").write_bytes(STACK)
    (stacks / "link.tif").symlink_to(host / "secret.tif")
    (host / "elsewhere").mkdir()
    (host / "elsewhere" / "far.tif").write_bytes(STACK)
    (stacks / "linked").symlink_to(host / "elsewhere")
    os.mkfifo(stacks / "pipe.tif")
    (stacks / "hostile.tif").write_bytes(b"II*\0" + b"\xff" * 100)
    (stacks / os.fsdecode(b"no text \xff.tif")).write_bytes(STACK)

    report = service.wait(submit(service, glob="**/*.tif"), "done", "failed")

    assert (report["state"], report["stacks"]) == ("done", {"done": 8, "total": 10})
    assert report["parameters"]["input"] == "scans/day 1/"
    assert [warning.partition(":")[0] for warning in report["warnings"]] == ["hostile.tif", "no text \\udcff.tif"]
    assert (out / "below" / "b_classes.ome.tif").is_file()
    assert not list(out.rglob("*far*")) + list(out.rglob("*link*"))
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    assert not list(service.runtime.scratch.requests_folder.iterdir())
    result = service.result(report).json()
    assert {stack["stack"] for stack in result["stacks"]} >= {"below/a.tif", NAMES[0]}


def test_folder_with_different_formats_is_processed(service: Service, host: Path) -> None:
    mixed, out = host / "scans" / "mixed", host / "results" / "day 1"
    mixed.mkdir()
    pixels = tifffile.imread(host / "scans" / "day 1" / NAMES[0])
    write_zarr(mixed / "folder.ome.zarr", pixels)
    (mixed / "without suffix").write_bytes(STACK)
    (mixed / "upper.TIF").write_bytes(STACK)
    (mixed / "page.tif").write_text("<html>")
    for name in ("._upper.TIF", "Thumbs.db", "notes.txt"):
        (mixed / name).write_text("not a stack")

    report = service.wait(submit(service, input="scans/mixed"), "done", "failed")

    assert (report["state"], report["stacks"]) == ("done", {"done": 3, "total": 4})
    assert [warning.partition(":")[0] for warning in report["warnings"]] == ["page.tif"]
    expected = tifffile.imread(out / "upper_classes.ome.tif")
    for name in ("folder", "without suffix"):
        np.testing.assert_array_equal(tifffile.imread(out / f"{name}_classes.ome.tif"), expected)
    (mixed / "upper.lsm").write_bytes(STACK)
    response = service.post("/jobs", b"", **FOLDER_PARAMETERS | {"input": "scans/mixed"})
    assert response.status_code == 422
    assert "upper.TIF and upper.lsm would have result files with the same name" in response.json()["detail"]


def test_job_fails_if_all_its_stacks_fail(service: Service, host: Path) -> None:
    for path in (host / "scans" / "day 1").glob("*.tif"):
        path.write_bytes(STACK[:200])
    report = service.wait(submit(service), "done", "failed")
    assert (report["state"], report["result"]) == ("failed", None)
    assert report["problem"]["detail"].startswith(f"None of the 6 stacks could be segmented. First error: {NAMES[0]}: ")
    assert (host / "results" / "day 1" / "report.html").is_file()


def test_cancelled_folder_keeps_its_results_and_shares_the_device(service: Service, host: Path) -> None:
    """A folder has one stack at a time in the queue, so that another client gets its turn."""
    out = host / "results" / "day 1"
    service.caller = "ann"
    plane_counts = list[int]()  # number of planes of each stack whose segmentation has begun
    original = type(service.fake).segment

    def segment(volume: Any, *arguments: Any, **more: Any) -> Any:
        plane_counts.append(volume.shape[1])
        if len(plane_counts) in {3, 5}:
            service.fake.gate.clear()
        return original(service.fake, volume, *arguments, **more)

    service.fake.segment = segment  # type: ignore[method-assign]
    job = submit(service)
    wait_until(lambda: len(plane_counts) == 3, 60)
    assert service.show(job)["stacks"] == {"done": 2, "total": 6}
    assert service.runtime.devices.waiting_count + len(service.runtime.devices.running_jobs) == 1
    service.caller = "bob"
    other = service.submit(as_tiff(np.full((5, 8, 8), 200, np.uint8)))
    queue = service.runtime.devices.all[0].scheduler.queue
    wait_until(lambda: len(queue.jobs) == 2 and all(job.is_ready for job in queue.jobs), 60)
    service.fake.gate.set()
    wait_until(lambda: len(plane_counts) == 5, 60)
    assert plane_counts == [3, 3, 3, 5, 3]
    service.wait(other, "done")
    assert service.client.get(f"/jobs/{job['id']}").status_code == 404
    service.caller = "ann"
    assert service.client.delete(f"/jobs/{job['id']}").status_code == 204
    wait_until((out / "report.html").exists, 60)
    assert service.show(job)["state"] == "cancelled"
    assert read_recorded_stacks(out) == NAMES[:3]
    assert "not processed" in (out / "report.html").read_text()

    # Submitting the folder again resumes it.
    service.fake.gate.set()
    assert service.wait(submit(service), "done")["stacks"] == {"done": 6, "total": 6}
    assert read_recorded_stacks(out) == NAMES[:6]


def test_stacks_deleted_or_replaced_during_the_job_fail_individually(service: Service, host: Path) -> None:
    stacks = host / "scans" / "day 1"
    service.fake.gate.clear()
    job = submit(service)
    wait_until(lambda: service.runtime.devices.running_jobs)
    (stacks / NAMES[1]).unlink()
    (stacks / NAMES[2]).unlink()
    (stacks / NAMES[2]).symlink_to("/etc/passwd")
    service.fake.gate.set()
    report = service.wait(job, "done")
    assert [warning.partition(": ")[0] for warning in report["warnings"]] == NAMES[1:3]


def test_results_in_the_input_folder_are_not_processed_as_stacks(bands_repository: Path, host: Path) -> None:
    roots = {"inputs": {"scans": {"folder": host / "scans"}}, "outputs": {"scans": {"folder": host / "scans"}}}
    with start_service(bands_repository, host, references=roots) as service:
        for _ in range(2):
            report = service.wait(submit(service, output_to="scans/day 1/out", glob="**/*.tif"), "done")
            assert report["stacks"] == {"done": 8, "total": 8}
        response = service.post("/jobs", b"", **FOLDER_PARAMETERS | {"output_to": "scans/day 1"})
        assert "is the input folder" in response.json()["detail"]


INVALID_REQUESTS: list[tuple[dict[str, str], str]] = [
    ({"output_to": ""}, "is a folder. Use POST /jobs for a folder"),
    ({"output_to": "results/no/such"}, "is in a folder that does not exist"),
    ({"output_to": "results/taken"}, "contains files other than results"),
    ({"output_to": "results/file"}, "contains a link or a file where a folder is expected"),
    ({"output_to": "results/link"}, "contains a link or a file where a folder is expected"),
    ({"output_to": "scans/day 2"}, "the path must begin with one of results"),
    ({"glob": "*.lsm"}, "contains no stack that matches *.lsm"),
    ({"glob": "../*"}, "a pattern must consist of names separated by single slashes"),
    ({"glob": "/etc/*"}, "a pattern must consist of names separated by single slashes"),
    ({"diameter": "auto"}, "has no object diameter"),
    ({"input": "scans/link"}, "is a folder, a link or a device"),
    ({"input": "scans/none"}, "does not exist"),
    ({"input": f"scans/day 1/{NAMES[0]}", "output_to": "", "glob": "*"}, "glob: this parameter is valid only"),
    ({"input": "", "output_to": "", "glob": "*"}, "glob: this parameter is valid only"),
    ({"input": f"scans/day 1/{NAMES[0]}", "output_to": "", "format": "zarr"}, "format: this parameter is valid"),
]


def test_invalid_folder_jobs_are_refused(service: Service, host: Path) -> None:
    (host / "results" / "taken").mkdir()
    (host / "results" / "taken" / "thesis.doc").touch()
    (host / "results" / "file").touch()
    (host / "results" / "link").symlink_to(host / "scans")
    (host / "scans" / "link").symlink_to(host)
    for parameters, words in INVALID_REQUESTS:
        response = service.post("/jobs", b"", **FOLDER_PARAMETERS | parameters)
        assert response.status_code == 422, parameters
        assert words in response.json()["detail"]
    assert service.client.get("/jobs").json()["jobs"] == []
    assert not (host / "results" / "day 1").exists()


def test_labels_of_a_host_file_have_no_source_hash(service: Service, host: Path) -> None:
    report = service.wait(submit(service, input=f"scans/day 1/{NAMES[0]}", output_to="results/a.tif"), "done")
    assert report["stacks"] is None
    with tifffile.TiffFile(host / "results" / "a.tif") as file:
        assert NAMES[0] in str(file.ome_metadata)
        assert "source_blake3" not in str(file.ome_metadata)


def test_only_jobs_accept_folders(service: Service) -> None:
    for path in ("/segment", "/inspect"):
        response = service.post(path, b"", **FOLDER_PARAMETERS)
        assert response.status_code == 422
        assert "POST /jobs" in response.json()["detail"]
