"""`benchmarks/wheels.py` keeps only the used codecs in the wheels, and checks their size."""

from __future__ import annotations

import base64
import hashlib
import os
import runpy
import subprocess
import sys
from importlib.metadata import files, version
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import tifffile
from paths import ROOT

SCRIPT = ROOT / "benchmarks" / "wheels.py"
WHEELS = runpy.run_path(str(SCRIPT))
INFO = "imagecodecs-1.dist-info"
# Checks a repacked imagecodecs in another interpreter. Arguments: the folder of the package, the folder of the images.
CHECK_SCRIPT = """
import sys
from pathlib import Path
import imagecodecs, numpy, tifffile
folder, images = map(Path, sys.argv[1:])
assert Path(imagecodecs.__file__).is_relative_to(folder), imagecodecs.__file__
for image in images.glob("*.tif"):
    expected = numpy.load(images / f"{image.name.split('-')[0]}.npy")
    numpy.testing.assert_array_equal(tifffile.imread(image), expected, image.name)
for codec in "bz2", "gzip", "lz4", "zlib", "zstd", "blosc":
    encoded = getattr(imagecodecs, f"{codec}_encode")(bytes(1000))
    assert getattr(imagecodecs, f"{codec}_decode")(encoded) == bytes(1000), codec
assert imagecodecs.png_decode(imagecodecs.png_encode(numpy.eye(9, dtype="u1"))).sum() == 9
# All libraries in the wheel are loaded, and none is loaded from another folder.
mapped = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if "imagecodecs.libs/" in line}
assert mapped == set(map(str, folder.glob("imagecodecs.libs/*"))), mapped
assert not imagecodecs.JPEG8.available and not imagecodecs.JPEG2K.available
try:
    imagecodecs.jpeg8_decode(b"")
except imagecodecs.DelayedImportError:
    print("unavailable")
"""


def make_wheel(path: Path, contents: dict[str, bytes]) -> None:
    """Write a wheel of imagecodecs, including its RECORD."""
    record = [f"{name},sha256={digest(content)},{len(content)}\n" for name, content in contents.items()]
    with ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr(f"{INFO}/RECORD", "".join(record) + f"{INFO}/RECORD,,\n")


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def assert_record_is_complete(wheel: Path) -> None:
    """Check that RECORD lists every file of the wheel once, with its hash and size."""
    with ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    rows = [row.split(",") for row in contents.pop(f"{INFO}/RECORD").decode().splitlines()]
    expected = [[name, f"sha256={digest(content)}", str(len(content))] for name, content in contents.items()]
    assert sorted(rows) == sorted([*expected, [f"{INFO}/RECORD", "", ""]])


def test_repacking_keeps_used_modules_and_only_the_libraries_that_they_link_to(tmp_path: Path) -> None:
    wheel = tmp_path / "imagecodecs-1-cp312-abi3-manylinux_2_28_x86_64.whl"
    kept = {
        "imagecodecs/__init__.py": b"import",
        "imagecodecs/_zstd.abi3.so": b"\0libc.so.6\0libzstd-01.so.1\0",
        "imagecodecs/_blosc.cpython-312-x86_64-linux-gnu.so": b"\0libblosc-02.so.1\0",
        "imagecodecs.libs/libzstd-01.so.1": b"\0libc.so.6\0",
        "imagecodecs.libs/libblosc-02.so.1": b"\0libzstd-01.so.1\0libsnappy-03.so\0",
        "imagecodecs.libs/libsnappy-03.so": b"\0libblosc-02.so.1\0libjpeg-04.so.88\0",
        f"{INFO}/METADATA": b"Name: imagecodecs",
    }
    removed = {
        "imagecodecs/_blosc2.abi3.so": b"\0libblosc2-05.so.1\0",
        "imagecodecs/_jpeg8.abi3.so": b"\0libjpeg-04.so.8\0libzstd-01.so.1\0",
        "imagecodecs.libs/libblosc2-05.so.1": b"\0libzstd-01.so.1\0",
        "imagecodecs.libs/libjpeg-04.so.8": b"",
    }
    make_wheel(wheel, removed | kept)
    command = [sys.executable, SCRIPT, "--repack", tmp_path]
    # Repacking again changes nothing.
    for _ in range(2):
        subprocess.run(command, check=True)
        with ZipFile(wheel) as archive:
            assert {name: archive.read(name) for name in archive.namelist() if "RECORD" not in name} == kept
        assert_record_is_complete(wheel)
    assert list(tmp_path.iterdir()) == [wheel]


@pytest.mark.skipif(sys.platform != "linux", reason="shared libraries have other locations on other platforms")
def test_repacked_imagecodecs_supports_the_codecs_of_the_benchmarks_and_reports_others_as_unavailable(
    tmp_path: Path,
) -> None:
    installed = [file for file in files("imagecodecs") or [] if file.parts[0] in {"imagecodecs", "imagecodecs.libs"}]
    contents = {file.as_posix(): file.locate().read_bytes() for file in installed if "__pycache__" not in file.parts}
    wheel, folder, images = tmp_path / "imagecodecs-1.whl", tmp_path / "site", tmp_path / "images"
    make_wheel(wheel, contents | {f"{INFO}/METADATA": version("imagecodecs").encode()})
    WHEELS["repack"](wheel)
    assert wheel.stat().st_size < 5 << 20
    assert_record_is_complete(wheel)

    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    images.mkdir()
    for dtype in ("uint16", "float32"):
        image = np.random.default_rng(0).integers(0, 99, (5, 40, 50)).astype(dtype)
        np.save(images / f"{dtype}.npy", image)
        for compression in ("adobe_deflate", "zstd", "lzw", "packbits"):
            for predictor in {False, compression != "packbits"}:
                name = f"{dtype}-{compression}-{predictor}.tif"
                tifffile.imwrite(images / name, image, compression=compression, predictor=predictor)
    command = [sys.executable, "-c", CHECK_SCRIPT, folder, images]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (process.stderr, process.stdout) == ("", "unavailable\n")


def test_exceeding_the_size_limit_is_an_error_that_names_the_sizes_and_the_setting(tmp_path: Path) -> None:
    (tmp_path / "one-1-py3-none-any.whl").write_bytes(bytes(3 << 20))
    (tmp_path / "pins.txt").write_text("one==1")
    command = [sys.executable, SCRIPT, "--size", tmp_path]
    allowed = subprocess.run(
        command, env=os.environ | {"MAX_CARRIED_MIB": "1000"}, capture_output=True, text=True, check=True
    )
    assert allowed.stdout.startswith("wheels 3.0 MiB + tracked files ")
    refused = subprocess.run(
        command, env=os.environ | {"MAX_CARRIED_MIB": "3.5"}, capture_output=True, text=True, check=False
    )
    assert (refused.returncode, refused.stdout) == (1, allowed.stdout)
    assert "but the GPU machine accepts only 3.5 MiB" in refused.stderr
    assert "set the environment variable MAX_CARRIED_MIB" in refused.stderr
