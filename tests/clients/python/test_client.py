from __future__ import annotations

import asyncio
import gzip
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from zipfile import ZipFile

import numpy as np
import pytest
import tifffile
import zarr
from bands import Phantom
from cutting_proxy import cut_connections
from fakes import wait_until
from live import LiveServer, as_tiff, eager_settings, serve
from numpy.typing import NDArray
from paths import ROOT
from stackseg_client import AsyncClient, Client, ConnectionFailed, Job, Result, Retries, errors
from stackseg_client.bodies import FileBody
from stackseg_client.operations import Operation, T

from service.api.access.keys import hash_key


@pytest.fixture(scope="module")
def stack(phantom: Phantom) -> NDArray[Any]:
    return phantom.image[:, :40, :48]


@pytest.fixture(scope="module")
def path(stack: NDArray[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stack") / "phantom.tif"
    path.write_bytes(as_tiff(stack))
    return path


def test_files_bytes_and_arrays_have_the_same_labels(client: Client, stack: NDArray[Any], path: Path) -> None:
    result = client.segment(path)
    assert (result.model, result.objects, result.path, result.table) == ("bands/1", None, None, None)
    assert result.voxel_size == (0.5, 0.2, 0.2)
    assert {"read", "windows", "total"} <= result.seconds.keys()
    assert result.labels.shape == stack.shape
    assert len(np.unique(result.labels)) == 3
    others: list[tuple[Any, dict[str, Any]]] = [
        (path.read_bytes(), {}),
        (stack, {"voxel_size": (0.5, 0.2, 0.2)}),
        (stack[None, :, None], {"axes": "TZCYX", "voxel_size": np.array([0.5, 0.2, 0.2])}),
        (np.asfortranarray(stack.astype(">u2")), {"overlap": np.float64(0.25)}),
    ]
    for source, parameters in others:
        other = client.segment(source, **parameters)
        np.testing.assert_array_equal(other.labels, result.labels)
        assert other.voxel_size == (result.voxel_size if "voxel_size" in parameters or source is others[0][0] else None)
    single = client.segment(stack[7])
    assert single.labels.shape == (1, *stack.shape[1:])
    np.testing.assert_array_equal(np.asarray(result), result.labels)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_folders_of_ome_zarr_are_sent_as_they_are(
    client: Client, stack: NDArray[Any], path: Path, tmp_path: Path, zarr_format: Literal[2, 3]
) -> None:
    folder = tmp_path / "scan.ome.zarr"
    group = zarr.open_group(folder, mode="w", zarr_format=zarr_format)
    group.create_array("0", data=stack, chunks=(8, 16, 16))
    dataset = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [0.5, 0.2, 0.2]}]}
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    version = {2: "0.4", 3: "0.5"}[zarr_format]
    ome = {"version": version, "multiscales": [{"version": version, "axes": axes, "datasets": [dataset]}]}
    group.attrs.update(ome if zarr_format == 2 else {"ome": ome})
    result = client.segment(folder)
    assert result.voxel_size == (0.5, 0.2, 0.2)
    np.testing.assert_array_equal(result.labels, client.segment(path).labels)
    assert sorted(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("parameters", [{}, {"output": "probabilities"}, {"time": "all", "axes": "TZYX"}])
def test_results_in_files_equal_those_in_memory(
    client: Client, stack: NDArray[Any], tmp_path: Path, parameters: dict[str, Any]
) -> None:
    source = np.stack([stack, stack[:, ::-1]]) if "time" in parameters else stack
    expected = client.segment(source, **parameters).labels
    assert expected.ndim == (4 if parameters else 3)
    for name in ("labels.tif", "new/folder/labels.npy"):
        result = client.segment(source, save_to=tmp_path / name, **parameters)
        assert result.path == tmp_path / name
        np.testing.assert_array_equal(result.labels, expected)
    assert isinstance(result.labels, np.memmap)
    assert {file.name for file in tmp_path.rglob("*.*")} == {"labels.tif", "labels.npy"}


def test_results_are_saved_as_nifti_and_zarr(
    client: Client, stack: NDArray[Any], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = client.segment(path).labels
    client.segment(path, save_to=tmp_path / "labels.nii.gz")
    voxels = np.frombuffer(gzip.decompress((tmp_path / "labels.nii.gz").read_bytes())[352:], np.uint8)
    np.testing.assert_array_equal(voxels.reshape(expected.shape), expected)
    result = client.segment(path, save_to=str(tmp_path / "labels.ozx"))
    assert isinstance(result.labels, zarr.Array)
    np.testing.assert_array_equal(result.labels[2:4], expected[2:4])
    np.testing.assert_array_equal(np.asarray(result), expected)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match="pip install zarr"):
        _ = replace(result).labels
    with pytest.raises(ValueError, match="nibabel"):
        _ = client.segment(path, save_to=tmp_path / "labels.nii.gz").labels
    with pytest.raises(errors.BadParameter, match=r"application/x-ozx.* which are image/tiff"):
        client.segment(np.stack([stack, stack]), axes="TZYX", time="all", save_to=tmp_path / "series.ozx")
    for arguments in ({"save_to": "labels.png"}, {"save_to": "labels.ozx", "table": True}):
        with pytest.raises(ValueError, match=r"\.tif"):
            client.segment(path, **arguments)
    assert not list(tmp_path.glob("series*"))


def test_objects_are_measured(nuclei_url: str, tmp_path: Path) -> None:
    pixels = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[:24, :96, :96]
    with Client(nuclei_url) as client:
        result = client.segment(pixels, diameter="25px", table=True)
        saved = client.segment(pixels, diameter="25px", table=True, save_to=tmp_path / "nuclei.ome.tif")
        job = client.submit(pixels, diameter="25px", table=True, idempotency_key=str(uuid.uuid4()))
        results = [result, saved, job.result(), job.result(tmp_path / "job.tif")]
    for each in results:
        assert each.table is not None
        assert each.objects == len(each.table["label"]) == each.labels.max() > 5
        np.testing.assert_array_equal(each.table["num_pixels"], np.bincount(each.labels.ravel())[1:])
        assert (each.table["touching_border"].dtype, each.table["unit"][0]) == (np.dtype(bool), "voxel")
        assert each.confidence is not None
    assert (tmp_path / "nuclei.csv").read_text() == (tmp_path / "job.csv").read_text()


def test_low_confidence_comes_with_parameters_to_try(nuclei_url: str) -> None:
    membranes = tifffile.imread(ROOT / "models" / "membranes" / "sample.tif")[8:48, 24:88, 24:88]
    with Client(nuclei_url) as client:
        result = client.segment(membranes)
        assert result.low_confidence is not None
        assert result.low_confidence.detail == result.warnings[0]
        assert result.low_confidence.suggested == {"model": "membranes"}
        with pytest.raises(errors.LowConfidenceResult):
            client.segment(membranes, strict=True)


def test_problems_raise_their_class(client: Client, stack: NDArray[Any]) -> None:
    series = np.stack([stack, stack])
    with pytest.raises(errors.AmbiguousAxes) as caught:
        client.segment(series)
    assert caught.value.parameter == "axes"
    suggested: Any = caught.value.suggested
    assert client.inspect(series, **suggested).axes == suggested["axes"]
    with pytest.raises(errors.UnsupportedMedia):
        client.segment(b"no stack")
    with pytest.raises(errors.UnknownModel):
        client.segment(stack, model="missing")
    with pytest.raises(errors.UnknownJob):
        client.job("missing")
    with pytest.raises(TypeError, match="Pass either a stack"):
        client.segment()
    unknown: Any = {"measurements": "zip"}
    with pytest.raises(TypeError, match="table=True"):
        client.segment(stack, **unknown)


def test_server_refuses_large_uploads_before_they_are_complete(client: Client) -> None:
    stack = np.zeros((64, 1024, 1024), np.uint16)
    with pytest.raises(errors.BadParameter) as caught:
        client.segment(stack, overlap=2)
    assert caught.value.parameter == "overlap"


def test_inspect_and_models_describe_what_the_server_has(client: Client, stack: NDArray[Any], path: Path) -> None:
    inspection = client.inspect(path)
    assert (inspection.axes, inspection.stored_shape, inspection.dtype) == ("ZYX", stack.shape, str(stack.dtype))
    assert (inspection.voxel_size, inspection.time_points, inspection.problem) == ((0.5, 0.2, 0.2), 1, None)
    assert inspection.windows
    (model,) = client.models()
    assert (model.name, model.is_default, model.problem) == ("bands", True, None)
    assert client.inspect(stack, name="a b/ü.tif").voxel_size is None


def test_jobs_report_progress_and_return_the_result(client: Client, path: Path, tmp_path: Path) -> None:
    expected = client.segment(path).labels
    job = client.submit(path, sw_batch_size=1, overlap=0.5)
    reports = list(job.progress())
    assert reports[-1].state == job.report.state == "done"
    assert reports[-1].fraction == 1
    assert reports[-1].name == "phantom.tif"
    result = job.result(tmp_path / "labels.npy")
    assert result.labels.shape == expected.shape
    assert client.jobs()[0].id == job.id
    np.testing.assert_array_equal(job.planes(3, 9, step=(2, 1, 3)), result.labels[3:9:2, :, ::3])
    np.testing.assert_array_equal(job.planes(5, 6, axis="x"), result.labels[:, :, 5:6])
    job.delete()
    with pytest.raises(errors.UnknownJob):
        job.refresh()


def test_jobs_are_canceled(client: Client, server: LiveServer, stack: NDArray[Any]) -> None:
    large = np.tile(stack, (8, 8, 8))
    job = client.submit(large, overlap=0.75)
    job.cancel()
    assert [report.state for report in job.progress()][-1] == "cancelled"
    job.cancel()
    assert client.job(job.id).report.state == "cancelled"
    with pytest.raises(errors.ResultUnavailable):
        job.result()


def test_canceling_a_job_that_ends_at_the_same_moment_keeps_its_result(client: Client, path: Path) -> None:
    class LateClient(Client):
        """A client whose DELETE requests arrive after all jobs have ended."""

        def _attempt(self, operation: Operation[T]) -> T:
            if operation.method == "DELETE":
                wait_until(lambda: all(job.report.has_ended for job in client.jobs()))
            return super()._attempt(operation)

    with LateClient(client.url) as late_client:
        job = late_client.submit(path)
        job.cancel()
        assert job.result().labels.shape
        job.delete()
        with pytest.raises(errors.UnknownJob):
            job.refresh()


def test_failed_jobs_raise_their_problem(client: Client, stack: NDArray[Any], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.tif"
    tifffile.imwrite(damaged, stack, compression="zlib", metadata={"axes": "ZYX"})
    with tifffile.TiffFile(damaged) as tiff:
        (offset, *_), (count, *_) = tiff.pages.first.dataoffsets, tiff.pages.first.databytecounts
    with damaged.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(count))
    job = client.submit(damaged)
    with pytest.raises(errors.BadFile) as caught:
        job.result()
    assert job.report.state == "failed"
    assert job.report.problem == str(caught.value)


def test_uploaded_stacks_are_used_again(client: Client, path: Path) -> None:
    stack = client.upload(path)
    assert (stack.name, stack.nbytes) == ("phantom.tif", path.stat().st_size)
    np.testing.assert_array_equal(client.segment(stack=stack.id).labels, client.segment(path).labels)
    client.delete_stack(stack.id)
    with pytest.raises(errors.UnknownStack):
        client.inspect(stack=stack.id)


def test_stacks_on_the_host_of_the_server_are_used(client: Client, path: Path, host_folder: Path) -> None:
    (host_folder / "folder").mkdir()
    for name in ("phantom.tif", "folder/a.tif"):
        (host_folder / name).write_bytes(path.read_bytes())
    expected = client.segment(path).labels
    np.testing.assert_array_equal(client.segment(input="scans/phantom.tif").labels, expected)
    result = client.segment(input="scans/phantom.tif", output_to="results/labels.tif")
    assert result.saved is not None
    assert result.saved["output"] == "results/labels.tif"
    np.testing.assert_array_equal(tifffile.imread(host_folder / "labels.tif"), expected)
    with pytest.raises(ValueError, match="see `saved`"):
        _ = result.labels
    with pytest.raises(errors.OutputExists):
        client.segment(path, output_to="results/labels.tif")
    job = client.submit(input="scans/folder", output_to="results/out")
    saved = job.result().saved
    assert saved is not None
    assert [stack["stack"] for stack in saved["stacks"]] == ["a.tif"]


def test_folders_continue_and_report_refused_stacks(client: Client, path: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "stacks", tmp_path / "stacks" / "labels"
    (source / "deep").mkdir(parents=True)
    for name in ("a.ome.tif", "deep/b.TIF"):
        (source / name).write_bytes(path.read_bytes())
    (source / "notes.txt").write_text("none")
    (source / "broken.tif").write_bytes(b"no stack")
    run = client.segment_folder(source, target, pattern="**/*", suffix=".npy")
    assert len(run) == 3
    items = list(run)
    assert [item.done for item in items] == [1, 2, 3]
    by_name = {item.path.name: item for item in items}
    assert isinstance(by_name.pop("broken.tif").error, errors.UnsupportedMedia)
    assert {item.labels_path.relative_to(target).as_posix() for item in by_name.values()} == {
        "a_labels.npy",
        "deep/b_labels.npy",
    }
    assert all(item.result is not None and item.result.labels.max() == 2 for item in by_name.values())
    (source / "broken.tif").write_bytes(path.read_bytes())
    again = {
        item.path.name: item.result for item in client.segment_folder(source, target, pattern="**/*", suffix=".npy")
    }
    assert [name for name, result in again.items() if result is not None] == ["broken.tif"]
    (source / "a.tif").write_bytes(b"")
    for pattern, message in (("*", "Rename one"), ("*.czi", "no stacks")):
        with pytest.raises(ValueError, match=message):
            client.segment_folder(source, target, pattern=pattern)
    with pytest.raises(ValueError, match="another folder"):
        client.segment_folder(source, source / "deep" / "..")


def test_async_client_returns_the_same(client: Client, stack: NDArray[Any], path: Path, tmp_path: Path) -> None:
    expected = client.segment(path).labels

    async def use_all() -> list[Result]:
        async with AsyncClient(client.url) as other:
            results = list(await asyncio.gather(other.segment(path), other.segment(stack, save_to=tmp_path / "a.npy")))
            job = await other.submit(path)
            assert [report.state async for report in job.progress()][-1] == "done"
            results += [await job.result(), await (await other.job(job.id)).result(tmp_path / "b.tif")]
            np.testing.assert_array_equal(await job.planes(2, 4), expected[2:4])
            await job.cancel()
            assert (await job.refresh()).state == "done"
            await job.delete()
            assert job.id not in [each.id for each in await other.jobs()]
            uploaded = await other.upload(stack)
            results.append(await other.segment(stack=uploaded.id, axes="ZYX"))
            await other.delete_stack(uploaded.id)
            assert (await other.inspect(path)).axes == "ZYX"
            assert [model.name for model in await other.models()] == ["bands"]
            items = [item async for item in other.segment_folder(path.parent, tmp_path / "folder")]
            results += [item.result for item in items if item.result]
            with pytest.raises(errors.UnknownModel):
                await other.segment(path, model="missing")
            return results

    results = asyncio.run(use_all())
    assert len(results) == 6
    for result in results:
        np.testing.assert_array_equal(result.labels, expected)


def test_async_clients_name_their_event_loop(client: Client) -> None:
    other = AsyncClient(client.url)

    async def list_models() -> None:
        async with other:
            await other.models()

    asyncio.run(list_models())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(other.models())


def exhaust(client: Client) -> errors.RateLimited:
    """Send requests until the server refuses one."""
    for _ in range(300):
        try:
            client.models()
        except errors.RateLimited as error:
            return error
    raise AssertionError("the server has no limit")


def test_client_waits_as_long_as_the_server_asks(bands_repository: Path, path: Path, tmp_path: Path) -> None:
    access = {"keys": {"ann": hash_key("ann")}, "requests_per_minute": 120, "requests_at_once": 1}
    (tmp_path / "stacks").mkdir()
    for number in range(2):
        (tmp_path / "stacks" / f"{number}.tif").write_bytes(path.read_bytes())
    with serve(eager_settings(bands_repository, access=access)) as live:
        url = f"http://{live.host}:{live.port}"
        with Client(url) as anonymous, pytest.raises(errors.Unauthorized):
            anonymous.models()
        with Client(url, "ann") as patient, Client(url, "ann", retries=Retries(count=0)) as impatient:
            error = exhaust(impatient)
            assert error.retry_after == 1
            start = time.monotonic()
            patient.models()
            assert 0.5 < time.monotonic() - start < 10
            items = list(patient.segment_folder(tmp_path / "stacks", tmp_path / "labels", concurrency=2))
            assert [item.error for item in items] == [None] * 2


def test_retried_submission_creates_one_job(server: LiveServer, path: Path) -> None:
    earlier = len(server.client.get("/jobs").json()["jobs"])
    with cut_connections(server.host, server.port, 1, 1) as proxy, Client(proxy.url) as client:
        job = client.submit(path)
        assert proxy.connections == 3
        assert job.result().labels.max() == 2
    jobs = server.client.get("/jobs").json()["jobs"]
    assert [each["id"] for each in jobs[: len(jobs) - earlier]] == [job.id]


def test_lost_connections_are_repeated_only_without_a_second_effect(server: LiveServer, path: Path) -> None:
    with cut_connections(server.host, server.port, 900, 1) as proxy, Client(proxy.url) as client:
        assert client.segment(path).labels.max() == 2
        assert proxy.connections == 3
    with cut_connections(server.host, server.port, 1) as proxy, Client(proxy.url) as client:
        with pytest.raises(ConnectionFailed, match="was lost") as caught:
            client.upload(path)
        assert caught.value.is_sent
    with Client(proxy.url, retries=Retries(count=1)) as client:
        with pytest.raises(ConnectionFailed, match="Is the server running") as caught:
            client.models()
        assert not caught.value.is_sent


@pytest.mark.parametrize(
    "run", [lambda job: list(job.progress()), lambda job: job.result()], ids=["progress", "result"]
)
def test_jobs_are_followed_over_lost_connections(
    server: LiveServer, client: Client, stack: NDArray[Any], run: Callable[[Job], Any]
) -> None:
    job = client.submit(np.tile(stack, (2, 2, 2)))
    with cut_connections(server.host, server.port, 200, 900) as proxy, Client(proxy.url) as other:
        run(Job(other, job.report))
        assert proxy.connections >= 3


@pytest.mark.parametrize("difference", [-100, 100])
def test_stacks_that_change_during_the_upload_are_reported(
    client: Client, path: Path, monkeypatch: pytest.MonkeyPatch, difference: int
) -> None:
    earlier_size = path.stat().st_size + difference
    monkeypatch.setattr("stackseg_client.operations.make_body", lambda source: FileBody(source, earlier_size))
    with pytest.raises(errors.StackChanged, match=r"phantom.tif changed"):
        client.segment(path)


def test_urls_need_a_scheme() -> None:
    with pytest.raises(ValueError, match="http://localhost:8000"):
        Client("localhost:8000")


def test_projects_collect_results(nuclei_url: str, tmp_path: Path) -> None:
    pixels = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[:24, :96, :96]
    with Client(nuclei_url) as client:
        jobs = [client.submit(pixels, diameter=diameter, table=True) for diameter in ("25px", "20px")]
        counts = [job.result().objects for job in jobs]
        project = client.create_project(f"Trial {uuid.uuid4()}", notes="first")
        report = project.add(jobs[0], group="control")
        project.add(jobs[1].id, group="treated", name="b.tif")
        assert project.add("nuclei", kind="model").counts == {"job": 2, "model": 1}
        assert (report.notes, report.counts) == ("first", {"job": 1})
        assert project.report.members is not None
        members = {member.id: (member.group, member.objects) for member in project.report.members}
        assert members[jobs[1].id] == ("treated", counts[1])
        table = project.table("area")
        groups, rows = np.unique(table["group"], return_counts=True)
        assert dict(zip(groups, rows, strict=True)) == {"control": counts[0], "treated": counts[1]}
        assert set(table) == {"stack", "group", "job", "model", "area"}
        with ZipFile(project.archive(tmp_path / "new" / "trial.zip")) as archive:
            assert {"objects.csv", "project.json"} < set(archive.namelist())
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["trial.zip"]
        with pytest.raises(errors.UnknownJob) as caught:
            project.add("missing")
        assert caught.value.parameter == "add"
        assert project.remove(jobs[0]).counts == {"job": 1, "model": 1}
        assert project.change(name="renamed").name == "renamed"
        assert [each.report.counts for each in client.projects() if each.id == project.id] == [project.report.counts]
        # Models are not deleted.
        assert "models (1)" in project.delete()
        with pytest.raises(errors.UnknownProject):
            client.project(project.id)


def test_async_client_has_projects(nuclei_url: str, tmp_path: Path) -> None:
    async def use_all() -> list[Any]:
        async with AsyncClient(nuclei_url) as client:
            project = await client.create_project(f"Trial {uuid.uuid4()}")
            with pytest.raises(errors.BadParameter):
                await client.create_project(project.report.name)
            await project.add("nuclei", kind="model")
            found = await client.project(project.id)
            results = [found.report.counts, (await found.change(notes="n")).notes, len((await found.table())["stack"])]
            assert (await found.archive(tmp_path / "a.zip")).stat().st_size > 100
            results.append((await found.remove("nuclei", kind="model")).counts)
            await project.refresh()
            assert project.report.members == []
            assert project.id in [each.id for each in await client.projects()]
            await project.delete()
            assert project.id not in [each.id for each in await client.projects()]
            return results

    assert asyncio.run(use_all()) == [{"model": 1}, "n", 0, {}]
