"""Results in files, and damaged results, without a server."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from live import as_tiff
from stackseg_client import errors, operations
from stackseg_client.results import Result, ResultReceiver, parse_table


def test_texts_of_tables_are_not_converted_to_numbers() -> None:
    table = parse_table(b"stack,group,job,model,label,area,unit\n001,1_0,12e4,nuclei/1,1,2.5,um\n002,nan,7,a,2,,um\n")
    assert {name: column.tolist()[0] for name, column in table.items()} == {
        "stack": "001", "group": "1_0", "job": "12e4", "model": "nuclei/1", "label": 1, "area": 2.5, "unit": "um",
    }  # fmt: skip
    assert table["group"][1] == "nan"
    assert np.isnan(table["area"][1])
    assert parse_table(b"stack,label\n")["stack"].dtype.kind == "U"


def make_zip(**members: bytes) -> bytes:
    content = io.BytesIO()
    with ZipFile(content, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "."), data)
    return content.getvalue()


@pytest.mark.parametrize("suffix", [None, ".npy", ".tif"])
@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ({"Content-Type": "application/zip"}, b"PK\3\4"),
        ({"Content-Type": "application/zip"}, make_zip(other__txt=b"")),
        ({"Content-Type": "application/json"}, b"[1]"),
        ({"Content-Type": "application/json"}, b'{"detail": "Log in first."}'),
        ({"Content-Type": "image/tiff", "X-StackSeg-Objects": "many"}, as_tiff(np.zeros((2, 4, 5), np.uint16))),
        ({"Content-Type": "image/tiff", "X-StackSeg-Warning": "oops"}, as_tiff(np.zeros((2, 4, 5), np.uint16))),
    ],
)
def test_damaged_results_raise_and_leave_no_file(
    tmp_path: Path, suffix: str | None, headers: dict[str, str], content: bytes
) -> None:
    path = None if suffix is None else tmp_path / f"labels{suffix}"
    receiver = ResultReceiver(headers, path)
    receiver.write(content)
    with pytest.raises(errors.InvalidResponse, match="damaged"):
        receiver.finish()
    receiver.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"<html>", b"II*\0\1\1\1\1"])
def test_damaged_labels_raise(content: bytes, tmp_path: Path) -> None:
    receiver = ResultReceiver({"Content-Type": "image/tiff"}, None)
    receiver.write(content)
    result = receiver.finish()
    with pytest.raises(errors.InvalidResponse, match="damaged"):
        _ = result.labels
    receiver = ResultReceiver({"Content-Type": "image/tiff"}, tmp_path / "labels.npy")
    receiver.write(content)
    with pytest.raises(errors.InvalidResponse, match="damaged"):
        receiver.finish()
    receiver.close()
    assert list(tmp_path.iterdir()) == []


def test_results_on_the_host_of_the_server_are_not_saved_here(tmp_path: Path) -> None:
    receiver = ResultReceiver({"Content-Type": "application/json"}, tmp_path / "labels.tif")
    receiver.write(b'{"output": "results/labels.tif"}')
    with pytest.raises(errors.InvalidResponse, match=r"on its own host as results/labels\.tif"):
        receiver.finish()
    with pytest.raises(TypeError, match="not both"):
        operations.segment(None, tmp_path / "a.tif", None, {"input": "a.tif", "output_to": "b.tif"}, table=False)


def test_results_in_files_are_read_from_the_file_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def save(planes: int, name: str) -> Result:
        receiver = ResultReceiver({"Content-Type": "image/tiff"}, Path(name))
        receiver.write(as_tiff(np.ones((planes, 4, 5), np.uint16)))
        return receiver.finish()

    for name in ("labels.tif", "labels.npy"):
        first, second = save(2, name), save(3, name)
        monkeypatch.chdir("/")
        assert pickle.loads(pickle.dumps(second)).labels.shape == (3, 4, 5)
        with pytest.raises(ValueError, match="save each result in its own file"):
            _ = first.labels
        monkeypatch.chdir(tmp_path)
    assert second.path == Path("labels.npy")


def test_results_with_tables_are_keys_and_list_members() -> None:
    receiver = ResultReceiver({"Content-Type": "application/zip"}, None)
    labels = as_tiff(np.ones((2, 4, 5), np.uint16))
    receiver.write(make_zip(labels__ome__tif=labels, measurements__csv=b"label,area\n1,40\n2,1\n"))
    result = receiver.finish()
    assert pickle.loads(pickle.dumps(result)) not in [result]
    assert {result: 1}[result] == 1


@pytest.mark.parametrize("suffix", [".tif", ".npy"])
def test_names_may_be_as_long_as_file_systems_allow(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / ("a" * 251 + suffix)
    receiver = ResultReceiver({"Content-Type": "image/tiff"}, path)
    receiver.write(as_tiff(np.ones((2, 4, 5), np.uint16)))
    assert receiver.finish().labels.sum() == 40
    assert list(tmp_path.iterdir()) == [path]
