"""Written results, as read by the programs that users open them with.

The environment variable OTHER_READERS names a folder with packages of Python (`pip install --target`), and with
`ij.jar` and `bioformats_package.jar`. Tests of readers that are not installed there are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.core.quantities import TimeInterval, VoxelSize
from service.core.types import OutputKind, Segmentation
from service.formats import writers

READERS_FOLDER = Path(os.environ.get("OTHER_READERS", "/usr/share/java"))
# Programs that run briefly are not worth optimizing, and do not need several threads that collect garbage.
FAST_START = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
VOXEL_SIZE = [0.37, 0.13, 0.11]
SHAPE = (20, 48, 64)

IMAGEJ_PROGRAM = """
import ij.*; import ij.io.*; import ij.measure.*; import ij.process.*;
public class Report {
  public static void main(String[] paths) {
    ImagePlus image = new Opener().openImage(paths[0]);
    Calibration size = image.getCalibration();
    LUT colors = image.getProcessor().getLut();
    long sum = 0;
    for (int slice = 1; slice <= image.getStackSize(); slice++) {
      ImageProcessor plane = image.getStack().getProcessor(slice);
      for (int i = 0; i < plane.getPixelCount(); i++) sum += Math.round(plane.getf(i));
    }
    image.setC(image.getNChannels());
    System.out.println("{\\"voxel_size\\": [" + size.pixelDepth + ", " + size.pixelHeight + ", " + size.pixelWidth
      + "], \\"unit\\": \\"" + size.getUnit() + "\\", \\"channels\\": " + image.getNChannels() + ", \\"slices\\": "
      + image.getNSlices() + ", \\"frames\\": " + image.getNFrames() + ", \\"interval\\": " + size.frameInterval
      + ", \\"range\\": [" + image.getDisplayRangeMin() + ", " + image.getDisplayRangeMax() + "], \\"color\\": ["
      + colors.getRed(1) + ", " + colors.getGreen(1) + ", " + colors.getBlue(1) + "], \\"sum\\": " + sum + "}");
  }
}
"""
PYTHON_PROGRAMS = {
    "cv2": "import cv2; pixels = cv2.imreadmulti(path, flags=cv2.IMREAD_UNCHANGED)[1]",
    "SimpleITK": "import SimpleITK; image = SimpleITK.ReadImage(path); pixels = SimpleITK.GetArrayFromImage(image);"
    " voxel_size = [size * 1000 for size in image.GetSpacing()[::-1]]",
    "PIL": "from PIL import Image, ImageSequence; pixels = [np.array(page) for page in ImageSequence.Iterator("
    "Image.open(path))]",
    "skimage": "from skimage import io; pixels = io.imread(path)",
    "napari": "from napari_builtins.io import napari_get_reader; pixels = napari_get_reader(path)(path)[0][0]",
    "bioio_ome_tiff": "import bioio_ome_tiff; image = bioio_ome_tiff.Reader(path);"
    " pixels = image.get_image_data('ZYX'); voxel_size = list(image.physical_pixel_sizes)",
    "nibabel": "import nibabel; image = nibabel.load(path); pixels = np.asarray(image.dataobj).T;"
    " voxel_size = [float(size) for size in image.header.get_zooms()[::-1]]",
}


def make_segmentation(kind: OutputKind, dtype: str, *, times: int = 0) -> Segmentation:
    """Return a segmentation with the values 0 to 4, or with large label numbers if the dtype has 32 bits."""
    pixels = np.random.default_rng(0).integers(0, 5, (*([times] if times else []), *SHAPE)).astype(dtype)
    if dtype == "uint32":
        pixels *= 25_000
    if kind == "probabilities":
        pixels = np.stack([pixels == 0, pixels != 0]).astype(dtype)
    return Segmentation(
        pixels,
        kind,
        VoxelSize(*VOXEL_SIZE),
        count=int(pixels.max()) if kind == "labels" else None,
        names=("background", "nuclei") if kind == "probabilities" else (),
        time_interval=TimeInterval(5, "min") if times else None,
    )


def write(segmentation: Segmentation, path: Path) -> Path:
    writers.write(segmentation, path, {"model": "nuclei/1"})
    return path


def run_imagej(path: Path) -> dict[str, Any]:
    """Open a file with ImageJ's built-in reader, as File > Open of Fiji does."""
    jar = READERS_FOLDER / "ij.jar"
    if not jar.exists() or shutil.which("javac") is None:
        pytest.skip("needs ImageJ (Debian's libij-java) and a Java compiler")
    program = path.parent / "Report.java"
    program.write_text(IMAGEJ_PROGRAM)
    command = ["java", *FAST_START, "-Djava.awt.headless=true", "-cp", jar, program, path]
    report = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return dict(json.loads(report.stdout))


def read_with_python(module: str, path: Path) -> tuple[NDArray[Any], list[float] | None, str]:
    """Read a file in a new process. Return the pixels, the voxel size (z, y, x) if known, and the error stream."""
    output = path.parent / "pixels.npy"
    program = (
        f"import numpy as np\npath, voxel_size = {str(path)!r}, None\n{PYTHON_PROGRAMS[module]}\n"
        f"np.save({str(output)!r}, np.asarray(pixels))\nimport json; print(json.dumps(voxel_size))"
    )
    environment = os.environ | {"PYTHONPATH": str(READERS_FOLDER)}
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    if subprocess.run([sys.executable, "-c", find], env=environment, check=False).returncode:
        pytest.skip(f"needs the Python package that provides {module}")
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return np.load(output), json.loads(process.stdout.splitlines()[-1]), process.stderr


@pytest.mark.parametrize(("kind", "dtype"), [("labels", "uint16"), ("labels", "uint32"), ("classes", "uint8")])
def test_imagej_shows_all_planes_in_color_with_the_voxel_size(tmp_path: Path, kind: OutputKind, dtype: str) -> None:
    segmentation = make_segmentation(kind, dtype)
    report = run_imagej(write(segmentation, tmp_path / "labels.ome.tif"))
    assert (report["channels"], report["slices"], report["frames"]) == (1, 20, 1)
    assert (report["unit"], report["voxel_size"]) == ("µm", pytest.approx(VOXEL_SIZE, rel=1e-6))
    assert report["sum"] == segmentation.pixels.sum(dtype=np.int64)
    assert report["range"] == [0, max(255, int(segmentation.pixels.max()))]
    assert report["color"] == [255, 0, 0]


def test_imagej_shows_the_frames_of_a_time_series(tmp_path: Path) -> None:
    report = run_imagej(write(make_segmentation("labels", "uint16", times=3), tmp_path / "labels.ome.tif"))
    assert (report["channels"], report["slices"], report["frames"], report["interval"]) == (1, 20, 3, 5)


def test_imagej_shows_probabilities_from_0_to_1(tmp_path: Path) -> None:
    report = run_imagej(write(make_segmentation("probabilities", "float32"), tmp_path / "scores.ome.tif"))
    assert (report["channels"], report["slices"], report["frames"]) == (2, 20, 1)
    assert (report["range"], report["sum"]) == ([0, 1], 20 * 48 * 64)


@pytest.mark.parametrize("module", sorted(PYTHON_PROGRAMS.keys() - {"nibabel"}))
@pytest.mark.parametrize(("kind", "dtype"), [("labels", "uint16"), ("labels", "uint32"), ("classes", "uint8")])
def test_python_readers_of_tiff_return_the_same_pixels(
    tmp_path: Path, module: str, kind: OutputKind, dtype: str
) -> None:
    segmentation = make_segmentation(kind, dtype)
    pixels, voxel_size, errors = read_with_python(module, write(segmentation, tmp_path / "labels.ome.tif"))
    np.testing.assert_array_equal(pixels, segmentation.pixels)
    if voxel_size is not None:
        # The resolution tags, which are all that SimpleITK reads, contain only y and x.
        np.testing.assert_allclose(voxel_size[1:], VOXEL_SIZE[1:], rtol=1e-5)
    # libtiff warns at most about the second description and the color map of the first page, and reads all pages.
    assert errors.count("TIFFReadDirectory") <= 4


@pytest.mark.parametrize("module", ["nibabel", "SimpleITK"])
@pytest.mark.parametrize(("kind", "dtype"), [("labels", "uint16"), ("labels", "uint32"), ("classes", "uint8")])
def test_readers_of_nifti_return_the_same_pixels(tmp_path: Path, module: str, kind: OutputKind, dtype: str) -> None:
    segmentation = make_segmentation(kind, dtype)
    pixels, voxel_size, _ = read_with_python(module, write(segmentation, tmp_path / "labels.nii.gz"))
    np.testing.assert_array_equal(pixels, segmentation.pixels)
    assert voxel_size is not None
    np.testing.assert_allclose(voxel_size, VOXEL_SIZE, rtol=1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [("labels", "uint16"), ("labels", "uint32"), ("classes", "uint8")])
def test_bioformats_reads_valid_ome_xml(tmp_path: Path, kind: OutputKind, dtype: str) -> None:
    jar = READERS_FOLDER / "bioformats_package.jar"
    if not jar.exists():
        pytest.skip("needs bioformats_package.jar of Bio-Formats, which QuPath uses")
    path = write(make_segmentation(kind, dtype), tmp_path / "labels.ome.tif")
    command = [
        "java",
        "-Djava.awt.headless=true",
        "-cp",
        jar,
        "loci.formats.tools.ImageInfo",
        "-nopix",
        "-omexml",
        path,
    ]
    report = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "No validation errors found." in report
    for fact in (
        "SizeZ = 20",
        f"Pixel type = {dtype}",
        'PhysicalSizeX="0.11"',
        'PhysicalSizeY="0.13"',
        'PhysicalSizeZ="0.37"',
    ):
        assert fact in report
