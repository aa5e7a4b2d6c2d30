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
from model_files import copy_model
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
from service.core.types import Segmentation, Selection, Volume
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


@pytest.fixture
def base(random_nuclei_content: dict[str, Any], write_model: Callable[..., ModelSpec]) -> ModelSpec:
    """A model to go on from."""
    return write_model(random_nuclei_content | {"activation": "sigmoid"})


# In float32, as what a model is expected to give was made: after 20 steps of training BF16 gives other labels.
FLOAT32 = {"kind": "eager", "precision": "fp32"}


@pytest.fixture
def config(base: ModelSpec, configure: Callable[..., Path]) -> list[str]:
    """Options that name a configuration with `base` alone."""
    return ["--config", str(configure(base.folder.parent, engine=FLOAT32))]


def read(path: Path) -> Volume:
    return stack_reader.read(path, Selection(), 2**30)


def annotated(stack: Path) -> list[str]:
    return ["--images", str(stack / "image.tif"), "--labels", str(stack / "mask.tif")]


def training(stack: Path, base: ModelSpec) -> list[str]:
    """`train` on small crops of the stack."""
    return ["train", *annotated(stack), "--edge", "16", "--from", str(base.folder)]


def test_crops_that_the_network_cannot_take_are_refused_with_those_that_it_can(
    base: ModelSpec, config: list[str], stack: Path, tmp_path: Path, stackseg: Any
) -> None:
    told = stackseg(*training(stack, base), "--edge", "17", "--out", tmp_path / "out", *config, status=1)
    assert "--edge 17: the network takes no cubes of 17 voxels. It takes 8, 16, " in told


def test_a_model_is_scored_beside_the_classical_method(
    base: ModelSpec, config: list[str], stack: Path, stackseg: Any, capsys: Any
) -> None:
    model, classical = json.loads(stackseg("evaluate", stack, "--json", *config))
    assert (model["method"], classical["method"]) == (base.identifier, "classical")
    assert model["stack"] == stack.name
    assert model["true"] == classical["true"] == len(np.unique(read(stack / "mask.tif").array())) - 1
    lines = stackseg("evaluate", *annotated(stack), "--no-floor", *config).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith(f"| {stack.name} | {base.identifier} | as sampled | {model['true']} |")
    nowhere = str(stack / "nowhere.tif")
    assert main(["evaluate", "--images", nowhere, "--labels", nowhere, *config]) == 1
    assert capsys.readouterr().out == ""
    assert "1 images and 0 labels" in stackseg("evaluate", "--images", stack / "image.tif", *config, status=1)


def test_a_model_is_scored_with_and_without_what_is_true_of_the_objects(
    write_model: Any, random_nuclei_content: dict[str, Any], configure: Any, stack: Path, tmp_path: Path, stackseg: Any
) -> None:
    given = random_nuclei_content["input"] | {"diameter": 8}
    model = write_model(random_nuclei_content | {"input": given}).folder
    options = ["--model", model, "--config", configure(tmp_path / "nowhere", engine=FLOAT32), "--json"]
    *lines, classical = json.loads(stackseg("evaluate", stack, *options, "--diameter", "none", "mean", "extents"))
    sampled, mean, extents = (line["diameter"] for line in lines)
    assert sampled == "as sampled"
    # A ball of the same volume, of which half as many planes as pixels are to be seen.
    widths = [float(text.removesuffix("px")) for text in (mean, classical["diameter"])]
    assert widths[0] == pytest.approx(widths[1] * 2 ** (1 / 3), rel=0.01)
    assert extents.count(",") == 2
    assert {line["true"] for line in lines} == {classical["true"]}


def test_a_trained_model_is_served_at_once(
    base: ModelSpec, config: list[str], stack: Path, tmp_path: Path, stackseg: Any, capsys: Any
) -> None:
    out, quickly = base.folder.parent / "mine", ["--learning-rate", "0.01", "--steps", "20"]
    train = [*training(stack, base), *quickly, "--out", str(out), *config]
    assert main(train) == 0
    said = capsys.readouterr()
    assert "mine/1, 20 steps, validation loss " in said.out
    assert "nan" not in said.out + said.err + (out / "training.csv").read_text()
    spec = read_spec(out)
    assert spec.weights.sha256 != base.weights.sha256
    assert (spec.architecture, spec.decoding) == (base.architecture, base.decoding)
    written = {"model.yaml", "weights.safetensors", "training.csv", "sample.tif", "expected.tif"}
    assert {file.name for file in out.iterdir()} == written
    again = tmp_path / "again.tif"
    stackseg("segment", out / "sample.tif", again, "--model", "mine", *config)
    assert np.array_equal(read(again).array(), read(out / "expected.tif").array())
    assert "holds something already" in stackseg(*train, status=1)


@pytest.mark.parametrize(
    ("arguments", "word", "status"),
    [
        (["--validation", "0.9"], "training.validation", 2),
        (["--steps", "0"], "training.steps", 2),
        (["--from", "nowhere"], "nowhere", 1),
    ],
)
def test_bad_options_are_refused_by_name(
    stack: Path, tmp_path: Path, stackseg: Any, arguments: list[str], word: str, status: int
) -> None:
    assert word in stackseg("train", *annotated(stack), "--out", tmp_path / "mine", *arguments, status=status)


def test_labels_are_written_in_the_form_that_a_name_asks_for(
    config: list[str], stack: Path, tmp_path: Path, stackseg: Any
) -> None:
    for name in ("labels.tif", "labels.npy", "labels.nii.gz"):
        stackseg("segment", stack / "image.tif", tmp_path / name, *config)
    labels = read(tmp_path / "labels.tif").array()[0]
    assert np.array_equal(np.load(tmp_path / "labels.npy"), labels)
    stored = gzip.decompress((tmp_path / "labels.nii.gz").read_bytes())[352:]
    assert np.array_equal(np.frombuffer(stored, labels.dtype).reshape(labels.shape), labels)
    refused = ["segment", str(stack / "image.tif"), str(tmp_path / "scores.npy"), "--output", "probabilities", *config]
    assert "only TIFF and OME-Zarr hold probabilities" in stackseg(*refused, status=1)


@pytest.mark.parametrize("end", [["labels.tif"], ["out"], ["labels.zarr", "--workers", "1"]])
def test_the_path_of_a_model_may_be_as_long_as_the_system_allows(
    base: ModelSpec, configure: Any, stack: Path, tmp_path: Path, end: list[str], stackseg: Any
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
    options += ["--model", str(model), "--config", str(configure(tmp_path / "nowhere"))]
    stackseg("segment", source, tmp_path / result, *options)
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
    config: list[str], stack: Path, tmp_path: Path, stackseg: Any, letters: int
) -> None:
    command = ["segment", str(stack / "image.tif"), str(tmp_path / "labels.tif"), "--model", "m" * letters]
    assert "random-nuclei" in stackseg(*command, *config, status=1)


def test_ome_zarr_is_read_and_written_beside_its_image_or_in_it(
    config: list[str], stack: Path, tmp_path: Path, stackseg: Any
) -> None:
    image = write_zarr(tmp_path / "image.ome.zarr", read(stack / "image.tif").array()[0], chunks=(8, 20, 20))
    size = ["--voxel-size", "0.5,0.2,0.2"]
    stackseg("segment", stack / "image.tif", tmp_path / "labels.tif", *size, *config)
    labels = read(tmp_path / "labels.tif")
    for place in (tmp_path / "labels.ome.zarr", image / "labels" / "nuclei"):
        stackseg("segment", image, place, *config)
        written = read(place)
        assert np.array_equal(written.array(), labels.array())
        assert written.voxel_size == VoxelSize(0.5, 0.2, 0.2)
        assert "is there already" in stackseg("segment", image, place, *config, status=1)
        stackseg("segment", image, place, "--force", *config)
    with serve_objects(tmp_path) as server:
        far = tmp_path / "far.tif"
        stackseg("segment", f"{server.url}/image.ome.zarr", far, "--measurements", f"{far}.csv", *config)
        assert np.array_equal(read(far).array(), labels.array())
        assert "no image of OME-Zarr" in stackseg(
            "segment", f"{server.url}/no.zarr", str(tmp_path / "no.tif"), *config, status=1
        )
    for source in (image, image / "labels" / "nuclei"):
        assert "would be replaced" in stackseg("segment", source, image, "--force", *config, status=1)


@pytest.mark.parametrize("name", ["threshold", "min_confidence"])
def test_defaults_in_the_help_are_those_of_the_default_model(name: str) -> None:
    value = getattr(read_spec(ROOT / "models" / "nuclei").decoding, name)
    assert f"the model's file says, {value:g} for nuclei" in PARAMETERS[name][1]


def test_a_model_folder_must_be_named(stack: Path, stackseg: Any) -> None:
    assert "--out" in stackseg("train", *annotated(stack), status=1)


def test_the_benchmark_trains_with_and_without_mixed_precision_and_writes_nothing(
    base: ModelSpec, config: list[str], stack: Path, tmp_path: Path, stackseg: Any
) -> None:
    before = set(tmp_path.rglob("*"))
    _head, _rule, *rows = stackseg(*training(stack, base), "--batch-size", "3", "--benchmark", *config).splitlines()
    assert set(tmp_path.rglob("*")) == before
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["fp32", "bf16"]
    for _, rate, milliseconds, memory in cells:
        assert float(rate) == pytest.approx(3000 / float(milliseconds), rel=0.2)
        assert memory.endswith("MiB") or memory == "not known"


@pytest.fixture
def tunable(base: ModelSpec, configure: Callable[..., Path], tmp_path: Path) -> Callable[..., list[str]]:
    """tunable(**device) -> options that name a configuration of few engines to try."""
    engine = {"precision": "fp32", "streams": 1, "cache_folder": str(tmp_path / "cache")}

    def write(**device: Any) -> list[str]:
        sections = {"windows": {"sw_batch_size": 1}, "device": {"name": "cpu", "threads": 1} | device}
        return ["--config", str(configure(base.folder.parent, engine=engine, **sections))]

    return write


@pytest.mark.parametrize("which", [[], ["--all"], ["--model", "random-nuclei"]])
def test_tuning_keeps_what_won_for_the_next_start(
    tunable: Callable[..., list[str]], which: list[str], stackseg: Any
) -> None:
    config = tunable()
    # Whatever is tried first is all that there is time for.
    table = stackseg("tune", *which, "--minutes", "0.0001", *config)
    assert "random-nuclei/1" in table
    assert "chosen" in table
    assert "time limit reached" in table
    assert "chosen" in stackseg("models", *config)


def test_trained_models_are_listed_and_removed(base: ModelSpec, configure: Any, tmp_path: Path, stackseg: Any) -> None:
    mine = tmp_path / "trained" / "mine"
    path = configure(base.folder.parent, models={"folder": str(base.folder.parent), "trained_folder": str(mine.parent)})
    copy_model(base.folder, mine)
    assert [line.split("/")[0] for line in stackseg("models", "--config", path).splitlines()] == [
        "random-nuclei",
        "mine",
    ]
    for name in ("random-nuclei", "..", "mine/../mine", ""):
        assert "there are mine" in stackseg("models", "remove", name, "--config", path, status=1)
    stackseg("models", "remove", "mine", "--config", path)
    assert (mine.exists(), base.folder.is_dir()) == (False, True)


def test_what_tuning_finds_holds_for_every_device_that_is_served(
    base: ModelSpec, tunable: Callable[..., list[str]], stackseg: Any
) -> None:
    config = tunable(serve=["cpu", "cpu"])
    assert stackseg("tune", "--minutes", "0.0001", *config).count("random-nuclei/1") == 1
    for _name, settings in split_settings(read_settings(Path(config[1]))):
        segmenter = ModelRunner(base, settings)
        segmenter.warm_up()
        assert (segmenter.report().planned, segmenter.report().cached) == ("tuned", True)


@pytest.mark.parametrize(
    ("options", "engine", "status", "words"),
    [(["--minutes", "0"], "auto", 1, "positive"), ([], "eager", 2, "set it to auto")],
)
def test_what_cannot_be_tuned_is_refused(
    base: ModelSpec, configure: Any, stackseg: Any, options: list[str], engine: str, status: int, words: str
) -> None:
    path = configure(base.folder.parent, engine={"kind": engine})
    assert words in stackseg("tune", *options, "--config", path, status=status)


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
