"""The Fiji script, run without dialogs by ImageJ and Groovy, against a real server that requires an API key.

Needs ImageJ and Groovy (Debian's libij-java and groovy), or a folder OTHER_READERS with `ij.jar` and `groovy-all.jar`.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import tifffile
from live import LiveServer, as_tiff, eager_settings, serve
from numpy.typing import NDArray
from paths import ROOT

from service.api.access.keys import hash_key

SCRIPT = ROOT / "clients" / "fiji" / "StackSeg_.groovy"
JARS_FOLDER = Path(os.environ.get("OTHER_READERS", "/usr/share/java"))
JARS = [JARS_FOLDER / "ij.jar", JARS_FOLDER / "groovy-all.jar"]
# Programs that run briefly are not worth optimizing, and do not need several threads that collect garbage.
FAST_START = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
KEY = "ann"
# Presses Esc as soon as the service has a running job, and runs the script.
ESCAPE_PROGRAM = """
Thread.start {
  def list = { new URL(args[0] + '/jobs').openConnection().with { it.setRequestProperty('X-API-Key', args[1])
    it.inputStream.text } }
  while (!list().contains('"running"')) sleep(50)
  ij.IJ.setKeyDown(java.awt.event.KeyEvent.VK_ESCAPE)
}
new GroovyShell(new Binding(args: args.drop(3))).evaluate(new File(args[2]))
"""

# Prints the voxel size of an image for each argument: the units of x, y and z, and the size along z (4 by default).
# The image has 2 and 3 units along x and y.
VOXEL_SIZE_PROGRAM = """
def loader = new GroovyClassLoader()
loader.parseClass(new File(args[0]))
args.drop(1).each { argument ->
  def image = ij.IJ.createImage('a', '8-bit', 2, 2, 2)
  def units = argument.split(',', -1)
  image.calibration.with { pixelWidth = 2; pixelHeight = 3; pixelDepth = units.size() > 3 ? units[3].toDouble() : 4
    XUnit = units[0]; YUnit = units[1]; ZUnit = units[2] }
  println loader.loadClass('Images').voxelSize(image)
}
"""

needs_imagej = pytest.mark.skipif(
    shutil.which("java") is None or not all(jar.exists() for jar in JARS),
    reason="needs ImageJ and Groovy (Debian's libij-java and groovy)",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = eager_settings(
        ROOT / "models",
        models={"serve": ["nuclei", "tissue"]},
        access={"keys": {KEY: hash_key(KEY)}},
        annotations={"folder": tmp_path_factory.mktemp("annotations")},
    )
    with serve(settings) as live:
        live.client.headers["X-API-Key"] = KEY
        yield live


@pytest.fixture(scope="module")
def stack() -> NDArray[np.uint16]:
    """A part of the sample with several nuclei [Z, Y, X]."""
    return np.ascontiguousarray(tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")[:24, :80, :96])


def run_groovy(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    classpath = os.pathsep.join(map(str, JARS))
    command = ["java", *FAST_START, "-Djava.awt.headless=true", "-Dfile.encoding=US-ASCII", "-cp", classpath]
    command.append("groovy.ui.GroovyMain")
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)


def run_script(server: LiveServer, **arguments: object) -> subprocess.CompletedProcess[str]:
    settings = {"url": f"http://{server.host}:{server.port}/", "key": KEY} | arguments
    return run_groovy(SCRIPT, *(f"{name}={value}" for name, value in settings.items()))


def read_table(text: str) -> tuple[list[str], list[list[str]]]:
    names, *rows = csv.reader(io.StringIO(text))
    return names, rows


def convert(value: str) -> float | str:
    """Convert a cell as the script does: ResultsTable has no truth values."""
    flags = {"True": 1.0, "False": 0.0}
    return flags.get(value, value) if re.search("[a-zA-Z]", value) else float(value)


def unpack(content: bytes) -> tuple[NDArray[Any], str]:
    with ZipFile(io.BytesIO(content)) as archive:
        labels = tifffile.imread(io.BytesIO(archive.read("labels.ome.tif")))
        return labels, archive.read("measurements.csv").decode()


@needs_imagej
def test_labels_and_table_of_a_hyperstack_are_those_of_the_service(
    tmp_path: Path, server: LiveServer, stack: NDArray[np.uint16]
) -> None:
    series = np.stack([stack, stack[:, ::-1]])
    other_channel = np.random.default_rng(0).integers(0, 50, series.shape).astype(np.uint16)
    metadata = {"axes": "TZCYX", "spacing": 500, "unit": "nm", "finterval": 30}
    image = tmp_path / "image.tif"
    image.write_bytes(as_tiff(np.stack([other_channel, series], 2), metadata=metadata, resolution=(1 / 200, 1 / 200)))
    options = {"diameter": "none", "link": "overlap", "minimum_size": "30"}
    output, table = tmp_path / "labels.tif", tmp_path / "objects.csv"
    run = run_script(
        server, task="segment", image=image, channel="2", time="all", output=output, table=table, **options
    )
    assert run.returncode == 0, run.stderr
    sent = as_tiff(series, metadata={"axes": "TZYX"})
    answer = server.segment(sent, time="all", voxel_size="0.5,0.2,0.2", measurements="zip", **options)
    labels, expected_table = unpack(answer.content)
    with tifffile.TiffFile(output) as file:
        np.testing.assert_array_equal(file.asarray(), labels)
        description = file.imagej_metadata or {}
        resolution = file.pages.first.tags["XResolution"].value
        colors = np.reshape(file.pages.first.tags["ColorMap"].value, (3, 256)).T
    assert (description["unit"], description["spacing"], description["finterval"]) == ("nm", 500, 30)
    assert resolution[1] / resolution[0] == pytest.approx(200)
    assert tuple(colors[0]) == (0, 0, 0)
    assert len(np.unique(colors, axis=0)) > 200
    names, rows = read_table(table.read_text())
    expected_names, expected_rows = read_table(expected_table)
    assert names == expected_names
    assert len(rows) == len(expected_rows) > 10
    for row, expected_row in zip(rows, expected_rows, strict=True):
        for value, expected in zip(map(convert, row), map(convert, expected_row), strict=True):
            assert value == (expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-5, abs=1e-6))


@needs_imagej
def test_voxel_sizes_have_the_unit_of_their_axis(tmp_path: Path) -> None:
    expected = {
        "um,um,um": "2, 3, 4",
        "nm,nm,um": "0.002, 0.003, 4",
        "micrometers,microns,Micrometre": "2, 3, 4",
        "nanometres,nanometer,nm": "0.002, 0.003, 0.004",
        "mm,millimeters,cm": "2000, 3000, 40000",
        "inch,inches,in": "50800, 76200, 101600",
        "\u00c5,angstrom,angstroms": "0.0002, 0.0003, 0.0004",
        "um,um,pixel": "",
        "pixel,pixel,pixel": "",
        "um,um,um,-0.5": "2, 3, 0.5",
        "um,um,um,0": "",
        "um,um,um,NaN": "",
        "um,um,um,Infinity": "",
    }
    program = tmp_path / "program.groovy"
    program.write_text(VOXEL_SIZE_PROGRAM)
    run = run_groovy(program, SCRIPT, *expected)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == list(expected.values())


@needs_imagej
def test_results_do_not_replace_the_stack(tmp_path: Path, server: LiveServer, stack: NDArray[np.uint16]) -> None:
    image = tmp_path / "stack.tif"
    image.write_bytes(as_tiff(stack))
    run = run_script(server, task="segment", image=image, output=tmp_path / "." / "stack.tif")
    assert (run.returncode, image.read_bytes()) == (1, as_tiff(stack))
    assert "would replace the stack" in run.stderr


@needs_imagej
def test_damaged_file_in_a_folder_does_not_stop_the_others(
    tmp_path: Path, server: LiveServer, stack: NDArray[np.uint16]
) -> None:
    content = as_tiff(stack)
    for name, part in (("a.tif", content[:5000]), ("b \u00b5.tif", content), ("c_labels.tif", content)):
        (tmp_path / name).write_bytes(part)
    output = tmp_path / "results"
    run = run_script(server, task="folder", folder=tmp_path, files="*.tif", output=output, diameter="none")
    assert run.returncode == 1
    log = (output / "stackseg_log.txt").read_text(encoding="utf-8")
    assert re.search(r"a\.tif: Error: The file is truncated .*\n.*\.tif: \d+ objects, .*\n.* 1 of 2 stacks", log)
    labels, table = unpack(server.segment(content, diameter="none", measurements="zip").content)
    (labels_file,), (table_file,) = output.glob("b*_labels.ome.tif"), output.glob("b*_objects.csv")
    np.testing.assert_array_equal(tifffile.imread(labels_file), labels)
    assert table_file.read_text(encoding="utf-8") == table


@needs_imagej
def test_corrected_labels_become_an_annotated_stack(
    tmp_path: Path, server: LiveServer, stack: NDArray[np.uint16]
) -> None:
    labels = np.zeros(stack.shape, np.float32)
    labels[2:6, 10:20, 10:20], labels[8:12, 40:60, 30:50] = 7, 70_000
    (tmp_path / "stack.tif").write_bytes(as_tiff(stack))
    (tmp_path / "labels.tif").write_bytes(as_tiff(labels))
    files = {"image": tmp_path / "stack.tif", "labels": tmp_path / "labels.tif"}
    run = run_script(server, task="annotate", **files, name="embryo", region="0:24,0:64,0:96")
    assert run.returncode == 0, run.stderr
    (report,) = server.client.get("/annotations").json()["annotations"]
    assert (report["name"], report["voxel_size"]) == ("embryo", [0.5, 0.2, 0.2])
    assert report["region"] is not None
    for kind, expected in (("image", stack), ("labels", labels)):
        stored = server.client.get(f"/annotations/{report['id']}/{kind}").content
        np.testing.assert_array_equal(tifffile.imread(io.BytesIO(stored)), expected)


@needs_imagej
def test_models_of_classes_need_no_table(tmp_path: Path, server: LiveServer, stack: NDArray[np.uint16]) -> None:
    image, output = tmp_path / "stack.tif", tmp_path / "labels.tif"
    image.write_bytes(as_tiff(stack))
    run = run_script(server, task="segment", image=image, model="tissue", output=output)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Classes, not objects")
    assert tifffile.imread(output).shape == stack.shape


@needs_imagej
def test_escape_cancels_the_job_on_the_service(tmp_path: Path, server: LiveServer) -> None:
    sample = ROOT / "models" / "nuclei" / "sample.tif"
    url = f"http://{server.host}:{server.port}"
    arguments = [f"url={url}", f"key={KEY}", f"image={sample}", f"output={tmp_path / 'labels.tif'}"]
    run = run_groovy("-e", ESCAPE_PROGRAM, url, KEY, SCRIPT, "task=segment", "quality=best", *arguments)
    assert run.returncode == 1, run.stderr
    assert server.client.get("/jobs").json()["jobs"][0]["state"] == "cancelled"
    assert not (tmp_path / "labels.tif").exists()


@needs_imagej
def test_errors_say_what_to_do_in_the_words_of_the_page(
    tmp_path: Path, server: LiveServer, stack: NDArray[np.uint16]
) -> None:
    image = tmp_path / "stack.tif"
    image.write_bytes(as_tiff(stack))
    run = run_script(server, task="segment", image=image, diameter="12", output=tmp_path / "labels.tif")
    assert run.returncode == 1
    assert run.stderr.startswith("Object diameter: Expected a diameter with its unit, such as 15 voxels")
    run = run_script(server, task="segment", image=image, key="other", output=tmp_path / "labels.tif")
    assert "Check the API key in the dialog" in run.stderr
    jobs = len(server.client.get("/jobs").json()["jobs"])
    for output, message in (
        (tmp_path / "labels.png", "Specify a TIFF file"),
        (tmp_path / "a" / "b.tif", "a does not exist"),
    ):
        run = run_script(server, task="segment", image=image, output=output)
        assert message in run.stderr
    # The stack was not sent.
    assert len(server.client.get("/jobs").json()["jobs"]) == jobs
    run = run_groovy(SCRIPT)
    assert (run.returncode, "Specify one of task=segment" in run.stderr) == (1, True)


def test_script_does_not_depend_on_the_encoding_of_the_platform() -> None:
    assert SCRIPT.read_bytes().isascii()


def test_settings_have_the_titles_of_the_page() -> None:
    page = (ROOT / "service" / "api" / "page" / "core" / "terminology.js").read_text(encoding="utf-8")
    script = SCRIPT.read_text(encoding="ascii")
    titles = re.findall(r"(\w+): '([^']+)'", script.partition("TITLES = [")[2].partition("]")[0])
    assert len(titles) > 10
    for name, title in titles:
        if name not in ("quality", "link", "time"):
            assert f'{name}: "{title}"' in page


# Methods and classes that Java has only since version 9, of the classes that the script might use: a comparison of the
# class files of JDK 17 with those in its `ct.sym` for release 8. Many installations of Fiji still run Java 8.
NAMES_SINCE_JAVA_9 = """
checkIndex descendants dropWhile errorReader formatted ifPresentOrElse indent inputReader isBlank lines
mismatch nullInputStream nullOutputStream nullReader ofEntries onExit outputWriter pid readAllBytes
readNBytes readString repeat requireNonNullElse requireNonNullElseGet skipNBytes strip stripIndent stripLeading
stripTrailing takeWhile toHandle transferTo translateEscapes writeString
"""
CLASSES_SINCE_JAVA_9 = r"\b(?:java\.net\.http|HttpClient|ProcessHandle|StackWalker|Cleaner|HexFormat)\b"
FACTORIES_SINCE_JAVA_9 = r"\b(?:List|Set|Map|Path)\.(?:of|copyOf|entry)\("
# Overloads of methods that Java 8 has, too: buffers that return their own type, and encoders that accept a Charset.
OVERLOADS_SINCE_JAVA_9 = r"URL(?:En|De)coder\.\w+\([^)]*(?:Charset|UTF_8)|\.toString\(\s*(?:Standard)?Charset"


def test_script_calls_no_methods_that_java_8_lacks() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert not set(re.findall(r"[.&](\w+)\s*[({]", text)) & set(NAMES_SINCE_JAVA_9.split())
    for pattern in (CLASSES_SINCE_JAVA_9, FACTORIES_SINCE_JAVA_9, OVERLOADS_SINCE_JAVA_9):
        assert re.search(pattern, text) is None, pattern
