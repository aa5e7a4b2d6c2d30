"""`stackseg evaluate`, `stackseg train` and `stackseg tune`, with files."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_server import serve_objects
from paths import ROOT
from zarr_files import write_zarr

from scripts.recipes.synthetic_nuclei import synthesise
from service.__main__ import main
from service.cli.models import choose_model
from service.cli.segmentation.parameters import PARAMETERS, name_options
from service.core.config import Settings, read_settings
from service.core.errors import BadParameter
from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Selection
from service.formats import stack_reader
from service.formats.tiff import writer as tiff_writer
from service.inference.runner.model_runner import ModelRunner
from service.models.repository import read_spec
from service.models.spec import ModelSpec
from service.serving.devices.local.settings import split_settings


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stack")
    image, labels = synthesise(np.random.default_rng(0), (16, 32, 48))
    for name, pixels in (("image", image), ("mask", labels)):
        tiff_writer.write(Segmentation(pixels, "labels", VoxelSize(1, 0.5, 0.5)), folder / f"{name}.tif")
    return folder


def configured(folder: Path, tmp_path: Path) -> list[str]:
    path = tmp_path / "config.yaml"
    # In float32, as what a model is expected to give was made: after 20 steps of training BF16 gives other labels.
    engine = "{kind: eager, precision: fp32}"
    path.write_text(f"models: {{folder: {folder}}}\nengine: {engine}\ndevice: {{name: cpu, threads: 1}}\n")
    return ["--config", str(path)]


@pytest.fixture
def base(random_nuclei_content: dict[str, Any], write_model: Callable[..., ModelSpec]) -> ModelSpec:
    """A model to go on from."""
    return write_model(random_nuclei_content | {"activation": "sigmoid"})


def training(stack: Path) -> list[str]:
    """`train` on small crops of the stack."""
    return ["train", *annotated(stack), "--edge", "16"]


def test_crops_that_the_network_cannot_take_are_refused_with_those_that_it_can(
    base: ModelSpec, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(base.folder.parent, tmp_path)
    train = ["train", *annotated(stack), "--edge", "17", "--from", str(base.folder), "--out", str(tmp_path / "out")]
    assert main([*train, *config]) == 1
    assert "--edge 17: the network takes no cubes of 17 voxels. It takes 8, 16, " in capsys.readouterr().err


def annotated(stack: Path) -> list[str]:
    return ["--images", str(stack / "image.tif"), "--labels", str(stack / "mask.tif")]


def test_a_model_is_scored_beside_the_classical_method(
    random_nuclei: ModelSpec, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(random_nuclei.folder.parent, tmp_path)
    assert main(["evaluate", str(stack), "--json", *config]) == 0
    model, classical = json.loads(capsys.readouterr().out)
    assert (model["method"], classical["method"]) == (random_nuclei.identifier, "classical")
    assert model["stack"] == stack.name
    truth = stack_reader.read(stack / "mask.tif", Selection(), 2**30).array()
    assert model["true"] == classical["true"] == len(np.unique(truth)) - 1
    assert main(["evaluate", *annotated(stack), "--no-floor", *config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith(f"| {stack.name} | {random_nuclei.identifier} | as sampled | {model['true']} |")
    capsys.readouterr()
    nowhere = str(stack / "nowhere.tif")
    assert main(["evaluate", "--images", nowhere, "--labels", nowhere, *config]) == 1
    assert capsys.readouterr().out == ""
    assert main(["evaluate", "--images", str(stack / "image.tif"), *config]) == 1
    assert "1 images and 0 labels" in capsys.readouterr().err


def test_a_model_is_scored_with_and_without_what_is_true_of_the_objects(
    write_model: Any, random_nuclei_content: dict[str, Any], stack: Path, tmp_path: Path, capsys: Any
) -> None:
    given = random_nuclei_content["input"] | {"diameter": 8}
    folder = write_model(random_nuclei_content | {"input": given}).folder
    config = configured(tmp_path / "nowhere", tmp_path)
    command = [
        "evaluate",
        str(stack),
        "--model",
        str(folder),
        "--diameter",
        "none",
        "mean",
        "extents",
        "--json",
        *config,
    ]
    assert main(command) == 0
    *lines, classical = json.loads(capsys.readouterr().out)
    sampled, mean, extents = (line["diameter"] for line in lines)
    assert sampled == "as sampled"
    # A ball of the same volume, of which half as many planes as pixels are to be seen.
    widths = [float(text.removesuffix("px")) for text in (mean, classical["diameter"])]
    assert widths[0] == pytest.approx(widths[1] * 2 ** (1 / 3), rel=0.01)
    assert extents.count(",") == 2
    assert {line["true"] for line in lines} == {classical["true"]}


def test_a_trained_model_is_served_at_once(
    base: ModelSpec, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(base.folder.parent, tmp_path)
    out = base.folder.parent / "mine"
    quickly = ["--learning-rate", "0.01", "--steps", "20"]
    train = [*training(stack), *quickly, "--from", str(base.folder), "--out", str(out), *config]
    assert main(train) == 0
    said = capsys.readouterr()
    assert "mine/1, 20 steps, validation loss " in said.out
    assert "nan" not in said.out + said.err + (out / "training.csv").read_text()
    spec = read_spec(out)
    assert spec.weights.sha256 != base.weights.sha256
    assert (spec.architecture, spec.decoding) == (base.architecture, base.decoding)
    assert {file.name for file in out.iterdir()} == {
        "model.yaml",
        "weights.safetensors",
        "training.csv",
        "sample.tif",
        "expected.tif",
    }
    again = ["segment", str(out / "sample.tif"), str(tmp_path / "again.tif"), "--model", "mine", *config]
    assert main(again) == 0
    found, expected = (
        stack_reader.read(path, Selection(), 2**30).array() for path in (tmp_path / "again.tif", out / "expected.tif")
    )
    assert np.array_equal(found, expected)
    assert main(["segment", str(stack / "image.tif"), str(tmp_path / "labels.tif"), "--model", "mine", *config]) == 0
    assert main(train) == 1
    assert "holds something already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word", "status"),
    [
        (["--validation", "0.9"], "training.validation", 2),
        (["--steps", "0"], "training.steps", 2),
        (["--from", "nowhere"], "nowhere", 1),
    ],
)
def test_bad_options_are_refused_by_name(
    stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str, status: int
) -> None:
    assert main(["train", *annotated(stack), "--out", str(tmp_path / "mine"), *arguments]) == status
    assert word in capsys.readouterr().err


def test_labels_are_written_in_the_form_that_a_name_asks_for(
    base: ModelSpec, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--model", base.name, *configured(base.folder.parent, tmp_path)]
    for name in ("labels.tif", "labels.npy", "labels.nii.gz"):
        assert main(["segment", str(stack / "image.tif"), str(tmp_path / name), *config]) == 0
    labels = stack_reader.read(tmp_path / "labels.tif", Selection(), 2**30).array()[0]
    assert np.array_equal(np.load(tmp_path / "labels.npy"), labels)
    stored = gzip.decompress((tmp_path / "labels.nii.gz").read_bytes())[352:]
    assert np.array_equal(np.frombuffer(stored, labels.dtype).reshape(labels.shape), labels)
    capsys.readouterr()
    refused = ["segment", str(stack / "image.tif"), str(tmp_path / "scores.npy"), "--output", "probabilities", *config]
    assert main(refused) == 1
    assert "only TIFF and OME-Zarr hold probabilities" in capsys.readouterr().err


@pytest.mark.parametrize("end", [["labels.tif"], ["out"], ["labels.zarr", "--workers", "1"]])
def test_the_path_of_a_model_may_be_as_long_as_the_system_allows(
    base: ModelSpec, stack: Path, tmp_path: Path, end: list[str]
) -> None:
    model = shutil.copytree(base.folder, tmp_path / ("a" * 100) / ("b" * 100) / base.name)
    source = stack / "image.tif"
    if end == ["out"]:
        source = tmp_path / "stacks"
        source.mkdir()
        shutil.copy(stack / "image.tif", source)
    if "--workers" in end:
        source = write_zarr(tmp_path / "in.zarr", np.zeros((4, 8, 8), np.uint8), chunks=(4, 8, 8))
    result, *options = end
    config = configured(tmp_path / "nowhere", tmp_path)
    assert main(["segment", str(source), str(tmp_path / result), *options, "--model", str(model), *config]) == 0
    assert (tmp_path / result).exists()


def test_a_bare_name_is_that_of_the_repository_before_it_is_a_folder(
    base: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.model_validate({"models": {"folder": base.folder.parent, "trained_folder": tmp_path / "none"}})
    here, other = (shutil.copytree(base.folder, tmp_path / name) for name in (base.name, "other"))
    monkeypatch.chdir(tmp_path)
    assert choose_model(base.name, settings).folder == base.folder
    assert choose_model(f"./{base.name}", settings).folder.resolve() == here
    assert choose_model("other", settings).folder.resolve() == other


@pytest.mark.parametrize("letters", [65, 300, 5000])
def test_a_long_name_of_no_model_is_refused(
    base: ModelSpec, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], letters: int
) -> None:
    command = ["segment", str(stack / "image.tif"), str(tmp_path / "labels.tif"), "--model", "m" * letters]
    assert main([*command, *configured(base.folder.parent, tmp_path)]) == 1
    assert "random-nuclei" in capsys.readouterr().err


def test_ome_zarr_is_read_and_written_beside_its_image_or_in_it(
    base: ModelSpec, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--model", base.name, *configured(base.folder.parent, tmp_path)]
    pixels = stack_reader.read(stack / "image.tif", Selection(), 2**30).array()[0]
    image = write_zarr(tmp_path / "image.ome.zarr", pixels, chunks=(8, 20, 20))
    size = ["--voxel-size", "0.5,0.2,0.2"]
    assert main(["segment", str(stack / "image.tif"), str(tmp_path / "labels.tif"), *size, *config]) == 0
    labels = stack_reader.read(tmp_path / "labels.tif", Selection(), 2**30)
    for place in (tmp_path / "labels.ome.zarr", image / "labels" / "nuclei"):
        assert main(["segment", str(image), str(place), *config]) == 0
        written = stack_reader.read(place, Selection(), 2**30)
        assert np.array_equal(written.array(), labels.array())
        assert written.voxel_size == VoxelSize(0.5, 0.2, 0.2)
        assert main(["segment", str(image), str(place), *config]) == 1
        assert "is there already" in capsys.readouterr().err
        assert main(["segment", str(image), str(place), "--force", *config]) == 0
    with serve_objects(tmp_path) as server:
        far = tmp_path / "far.tif"
        assert main(["segment", f"{server.url}/image.ome.zarr", str(far), "--measurements", f"{far}.csv", *config]) == 0
        assert np.array_equal(stack_reader.read(far, Selection(), 2**30).array(), labels.array())
        assert main(["segment", f"{server.url}/no.zarr", str(tmp_path / "no.tif"), *config]) == 1
        assert "no image of OME-Zarr" in capsys.readouterr().err
    for source in (image, image / "labels" / "nuclei"):
        assert main(["segment", str(source), str(image), "--force", *config]) == 1
        assert "would be replaced" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["threshold", "min_confidence"])
def test_defaults_in_the_help_are_those_of_the_default_model(name: str) -> None:
    value = getattr(read_spec(ROOT / "models" / "nuclei").decoding, name)
    assert f"the model's file says, {value:g} for nuclei" in PARAMETERS[name][1]


def test_a_model_folder_must_be_named(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *annotated(stack)]) == 1
    assert "--out" in capsys.readouterr().err


def test_the_benchmark_trains_with_and_without_mixed_precision_and_writes_nothing(
    base: ModelSpec, stack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(base.folder.parent, tmp_path)
    train = [*training(stack), "--from", str(base.folder), "--batch-size", "3", "--benchmark"]
    before = set(tmp_path.rglob("*"))
    assert main([*train, *config]) == 0
    _head, _rule, *rows = capsys.readouterr().out.splitlines()
    assert set(tmp_path.rglob("*")) == before
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["fp32", "bf16"]
    for _, rate, milliseconds, memory in cells:
        assert float(rate) == pytest.approx(3000 / float(milliseconds), rel=0.2)
        assert memory.endswith("MiB") or memory == "not known"


@pytest.mark.parametrize("which", [[], ["--all"], ["--model", "random-nuclei"]])
def test_tuning_keeps_what_won_for_the_next_start(
    base: ModelSpec, which: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    engine = f"{{precision: fp32, streams: 1, cache_folder: {tmp_path / 'cache'}}}"
    path.write_text(
        f"models: {{folder: {base.folder.parent}}}\nengine: {engine}\nwindows: {{sw_batch_size: 1}}\n"
        "device: {name: cpu, threads: 1}\n"
    )
    # Whatever is tried first is all that there is time for.
    assert main(["tune", *which, "--minutes", "0.0001", "--config", str(path)]) == 0
    table = capsys.readouterr().out
    assert "random-nuclei/1" in table
    assert "chosen" in table
    assert "the time was up" in table
    assert main(["models", "--config", str(path)]) == 0
    assert "chosen" in capsys.readouterr().out


def test_trained_models_are_listed_and_removed(
    base: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, mine = tmp_path / "config.yaml", tmp_path / "trained" / "mine"
    path.write_text(f"models: {{folder: {base.folder.parent}, trained_folder: {mine.parent}}}\n")
    shutil.copytree(base.folder, mine)
    (mine / "model.yaml").write_text((mine / "model.yaml").read_text().replace("name: random-nuclei", "name: mine"))
    assert main(["models", "--config", str(path)]) == 0
    assert [line.split("/")[0] for line in capsys.readouterr().out.splitlines()] == ["random-nuclei", "mine"]
    for name in ("random-nuclei", "..", "mine/../mine", ""):
        assert main(["models", "remove", name, "--config", str(path)]) == 1
        assert "there are mine" in capsys.readouterr().err
    assert main(["models", "remove", "mine", "--config", str(path)]) == 0
    assert (mine.exists(), base.folder.is_dir()) == (False, True)


def test_what_tuning_finds_holds_for_every_device_that_is_served(
    base: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"models: {{folder: {base.folder.parent}}}\nwindows: {{sw_batch_size: 1}}\ndevice: {{serve: [cpu, cpu]}}\n"
        f"engine: {{precision: fp32, streams: 1, cache_folder: {tmp_path / 'cache'}}}\n"
    )
    assert main(["tune", "--minutes", "0.0001", "--config", str(path)]) == 0
    assert capsys.readouterr().out.count("random-nuclei/1") == 1
    for _name, settings in split_settings(read_settings(path)):
        segmenter = ModelRunner(base, settings)
        segmenter.warm_up()
        assert (segmenter.report().planned, segmenter.report().cached) == ("tuned", True)


@pytest.mark.parametrize(
    ("options", "engine", "status", "words"),
    [(["--minutes", "0"], "auto", 1, "positive"), ([], "eager", 2, "set it to auto")],
)
def test_what_cannot_be_tuned_is_refused(
    base: ModelSpec,
    options: list[str],
    engine: str,
    status: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"models: {{folder: {base.folder.parent}}}\nengine: {{kind: {engine}}}\n")
    assert main(["tune", *options, "--config", str(path)]) == status
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (BadParameter("voxel_size: wrong.", parameter="voxel_size"), "--voxel-size: wrong."),
        (BadParameter("time: say which, as time=0.", parameter="time"), "--time: say which, as --time 0."),
        (BadParameter("input: is not there.", parameter="input"), "input: is not there."),
        ("try diameter=4px, or choose with channel= (index)", "try --diameter 4px, or choose with --channel (index)"),
        ("skip_below: of another kind", "skip_below: of another kind"),
    ],
)
def test_parameters_are_named_as_options(message: str | BadParameter, told: str) -> None:
    assert name_options(message) == told
