"""The commands `segment`, `evaluate`, `train`, `tune` and `models` with real files."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from model_files import copy_model
from object_server import serve_objects
from paths import ROOT
from scipy.ndimage import maximum_filter, minimum_filter
from zarr_files import write_zarr

from scripts.recipes.synthetic_nuclei import synthesize
from service.__main__ import main
from service.cli.models import choose_model
from service.cli.segmentation.dispatch import MAX_NAME_BYTES
from service.cli.segmentation.parameters import PARAMETERS, use_option_names
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
    image, labels = synthesize(np.random.default_rng(0), (16, 32, 48))
    for name, pixels in (("image", image), ("mask", labels)):
        tiff_writer.write(Segmentation(pixels, "labels", VoxelSize(1, 0.5, 0.5)), folder / f"{name}.tif")
    return folder


@pytest.fixture
def base(random_nuclei_content: dict[str, Any], write_model: Callable[..., ModelSpec]) -> ModelSpec:
    """Return a model from which training continues."""
    return write_model(random_nuclei_content | {"activation": "sigmoid"})


# The expected labels of a model are computed in float32. After 20 training steps, BF16 gives different labels.
FLOAT32 = {"kind": "eager", "precision": "fp32"}


@pytest.fixture
def config(base: ModelSpec, write_config: Callable[..., Path]) -> list[str]:
    """Return the options for a configuration whose only model is `base`."""
    return ["--config", str(write_config(base.folder.parent, engine=FLOAT32))]


def read(path: Path) -> Volume:
    return stack_reader.read(path, Selection(), 2**30)


def annotation_options(stack: Path) -> list[str]:
    return ["--images", str(stack / "image.tif"), "--labels", str(stack / "mask.tif")]


def training_command(stack: Path, base: ModelSpec) -> list[str]:
    """Return a `train` command with small crops of the stack."""
    return ["train", *annotation_options(stack), "--edge", "16", "--from", str(base.folder)]


def test_unsupported_crop_size_is_rejected_with_supported_sizes(
    base: ModelSpec, config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    output = run_stackseg(*training_command(stack, base), "--edge", "17", "--out", tmp_path / "out", *config, status=1)
    assert "--edge 17: the network does not support cubes with edges of 17 voxels. Use one of 8, 16, " in output


def test_evaluate_compares_model_and_classical_method(
    base: ModelSpec, config: list[str], stack: Path, run_stackseg: Any, capsys: Any
) -> None:
    model, classical = json.loads(run_stackseg("evaluate", stack, "--json", *config))
    assert (model["method"], classical["method"]) == (base.identifier, "classical")
    assert model["stack"] == stack.name
    assert all(model[name] >= 0 for name in ("voi_split", "voi_merge", "adapted_rand_error"))
    assert model["true"] == classical["true"] == len(np.unique(read(stack / "mask.tif").read_all())) - 1
    lines = run_stackseg("evaluate", *annotation_options(stack), "--no-floor", *config).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith(f"| {stack.name} | {base.identifier} | original resolution | {model['true']} |")
    nowhere = str(stack / "nowhere.tif")
    assert main(["evaluate", "--images", nowhere, "--labels", nowhere, *config]) == 1
    assert capsys.readouterr().out == ""
    assert "1 images and 0 label files" in run_stackseg("evaluate", "--images", stack / "image.tif", *config, status=1)
    output = run_stackseg("evaluate", "nuclei", stack, *config, status=1)
    assert f"nuclei: each folder needs the files image.tif and mask.tif. These folders have them: {stack}." in output
    assert "There are no stacks" in run_stackseg("evaluate", *config, status=1)


def test_evaluate_compares_only_annotated_voxels(
    config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    labels = read(stack / "mask.tif").read_all()[0]
    planes = np.zeros_like(labels)
    planes[5:8] = labels[5:8]
    ignored = np.where(planes.any((1, 2), keepdims=True), planes, 60_000).astype(np.uint16)
    rows = []
    for name, pixels, options in (("a", planes, ["--partial-planes"]), ("b", ignored, ["--ignore-label", 60_000])):
        tiff_writer.write(Segmentation(pixels, "labels"), tmp_path / f"{name}.tif")
        files = ("--images", stack / "image.tif", "--labels", tmp_path / f"{name}.tif")
        rows.append(json.loads(run_stackseg("evaluate", *files, *options, "--no-floor", "--json", *config))[0])
    assert rows[0] == rows[1]
    assert rows[0]["true"] == len(np.unique(planes)) - 1
    files = (stack, "--partial-planes", "--diameter", "extents")
    assert "cannot be combined with --partial-planes" in run_stackseg("evaluate", *files, *config, status=1)


def test_evaluate_refuses_labels_that_are_not_whole_numbers(
    config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    labels = read(stack / "mask.tif").read_all()[0]
    for pixels, message in (
        (labels.astype(np.int16) - 1, "must not be negative"),
        (labels.astype(np.float32) / 2, "whole numbers"),
    ):
        tifffile.imwrite(tmp_path / "labels.tif", pixels, photometric="minisblack")
        files = ("--images", stack / "image.tif", "--labels", tmp_path / "labels.tif")
        assert message in run_stackseg("evaluate", *files, *config, status=1)


def test_evaluate_uses_each_requested_diameter(
    write_model: Any,
    random_nuclei_content: dict[str, Any],
    write_config: Any,
    stack: Path,
    tmp_path: Path,
    run_stackseg: Any,
) -> None:
    model_input = random_nuclei_content["input"] | {"diameter": 8}
    model = write_model(random_nuclei_content | {"input": model_input}).folder
    options = ["--model", model, "--config", write_config(tmp_path / "nowhere", engine=FLOAT32), "--json"]
    *lines, classical = json.loads(run_stackseg("evaluate", stack, *options, "--diameter", "none", "mean", "extents"))
    original, mean, extents = (line["diameter"] for line in lines)
    assert original == "original resolution"
    # A ball of the same volume spans half as many planes as pixels.
    diameters = [float(text.removesuffix("px")) for text in (mean, classical["diameter"])]
    assert diameters[0] == pytest.approx(diameters[1] * 2 ** (1 / 3), rel=0.01)
    assert extents.count(",") == 2
    assert {line["true"] for line in lines} == {classical["true"]}


def test_trained_model_is_available_immediately(
    base: ModelSpec, config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any, capsys: Any
) -> None:
    out, training_options = base.folder.parent / "mine", ["--learning-rate", "0.01", "--steps", "20"]
    command = [*training_command(stack, base), *training_options, "--out", str(out), *config]
    assert main([*command, "--keep"]) == 0
    output = capsys.readouterr()
    assert "mine/1, 20 steps, F1 on the validation parts " in output.out
    assert "nan" not in output.out + output.err + (out / "training.csv").read_text()
    spec = read_spec(out)
    assert spec.weights.sha256 != base.weights.sha256
    assert (spec.architecture, spec.decoding) == (base.architecture, base.decoding)
    expected_files = {"model.yaml", "weights.safetensors", "training.csv", "sample.tif", "expected.tif"}
    assert {file.name for file in out.iterdir()} == expected_files
    labels_path = tmp_path / "labels.tif"
    run_stackseg("segment", out / "sample.tif", labels_path, "--model", "mine", *config)
    assert np.array_equal(read(labels_path).read_all(), read(out / "expected.tif").read_all())
    assert "is not empty" in run_stackseg(*command, status=1)


def test_standard_input_is_refused_with_a_way_to_send_it(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["segment", "-", str(tmp_path / "labels.tif")])
    assert re.search(r"standard input is not supported.* --data-binary @- .*/segment", capsys.readouterr().err)


def test_pipes_are_refused_instead_of_waiting_for_them(tmp_path: Path, capsys: Any) -> None:
    os.mkfifo(tmp_path / "stack.tif")
    with pytest.raises(SystemExit):
        main(["segment", str(tmp_path / "stack.tif"), str(tmp_path / "labels.tif")])
    assert "is a pipe. Write the stack to a file first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["--validation", "0.9"], "training.validation", 2),
        (["--steps", "0"], "training.steps", 2),
        (["--from", "nowhere"], "nowhere", 1),
    ],
)
def test_error_names_the_invalid_option(
    stack: Path, tmp_path: Path, run_stackseg: Any, arguments: list[str], message: str, status: int
) -> None:
    assert message in run_stackseg(
        "train", *annotation_options(stack), "--out", tmp_path / "mine", *arguments, status=status
    )


def test_suffix_selects_the_format_of_labels(config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any) -> None:
    for name in ("labels.tif", "labels.npy", "labels.nii.gz"):
        run_stackseg("segment", stack / "image.tif", tmp_path / name, *config)
    labels = read(tmp_path / "labels.tif").read_all()[0]
    assert np.array_equal(np.load(tmp_path / "labels.npy"), labels)
    nifti_content = gzip.decompress((tmp_path / "labels.nii.gz").read_bytes())[352:]
    assert np.array_equal(np.frombuffer(nifti_content, labels.dtype).reshape(labels.shape), labels)
    command = ["segment", str(stack / "image.tif"), str(tmp_path / "scores.npy"), "--output", "probabilities", *config]
    assert "only TIFF and OME-Zarr support probabilities" in run_stackseg(*command, status=1)
    (tmp_path / "image.zarr").mkdir()
    (tmp_path / "image.zarr" / "zarr.json").write_text("{}")
    command[2] = str(tmp_path / "image.zarr" / "labels" / "scores")
    assert "must be integers, not probabilities" in run_stackseg(*command, status=1)


@pytest.mark.parametrize("result_arguments", [["labels.tif"], ["out"], ["labels.zarr", "--workers", "1"]])
def test_model_path_may_be_long(
    base: ModelSpec, write_config: Any, stack: Path, tmp_path: Path, result_arguments: list[str], run_stackseg: Any
) -> None:
    model = shutil.copytree(base.folder, tmp_path / ("a" * 100) / ("b" * 100) / base.name)
    source = stack / "image.tif"
    if result_arguments == ["out"]:
        source = tmp_path / "stacks"
        source.mkdir()
        tifffile.imwrite(source / "image.tif", np.ones((4, 8, 8), np.uint8), imagej=True, metadata={"axes": "ZYX"})
    if "--workers" in result_arguments:
        source = write_zarr(tmp_path / "in.zarr", np.ones((4, 8, 8), np.uint8), chunks=(4, 8, 8))
    result, *options = result_arguments
    options += ["--model", str(model), "--config", str(write_config(tmp_path / "nowhere"))]
    run_stackseg("segment", source, tmp_path / result, *options)
    assert (tmp_path / result).exists()


def test_model_name_is_found_in_the_repository_before_a_folder(
    base: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.model_validate({"models": {"folder": base.folder.parent, "trained_folder": tmp_path / "none"}})
    same_name_folder, other_folder = (shutil.copytree(base.folder, tmp_path / name) for name in (base.name, "other"))
    monkeypatch.chdir(tmp_path)
    assert choose_model(base.name, settings).folder == base.folder
    assert choose_model(f"./{base.name}", settings).folder.resolve() == same_name_folder
    assert choose_model("other", settings).folder.resolve() == other_folder


@pytest.mark.parametrize("length", [65, 300, 5000])
def test_long_unknown_model_name_is_rejected(
    config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any, length: int
) -> None:
    command = ["segment", str(stack / "image.tif"), str(tmp_path / "labels.tif"), "--model", "m" * length]
    assert "random-nuclei" in run_stackseg(*command, *config, status=1)


def test_ome_zarr_labels_are_written_to_a_store_or_into_the_image(
    config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    image = write_zarr(tmp_path / "image.ome.zarr", read(stack / "image.tif").read_all()[0], chunks=(8, 20, 20))
    size = ["--voxel-size", "0.5,0.2,0.2"]
    run_stackseg("segment", stack / "image.tif", tmp_path / "labels.tif", *size, *config)
    labels = read(tmp_path / "labels.tif")
    for path in (tmp_path / "labels.ome.zarr", image / "labels" / "nuclei"):
        run_stackseg("segment", image, path, *config)
        written = read(path)
        assert np.array_equal(written.read_all(), labels.read_all())
        assert written.voxel_size == VoxelSize(0.5, 0.2, 0.2)
        assert "already exists" in run_stackseg("segment", image, path, *config, status=1)
        run_stackseg("segment", image, path, "--force", *config)
    with serve_objects(tmp_path) as server:
        remote_result = tmp_path / "far.tif"
        run_stackseg(
            "segment", f"{server.url}/image.ome.zarr", remote_result, "--measurements", f"{remote_result}.csv", *config
        )
        assert np.array_equal(read(remote_result).read_all(), labels.read_all())
        assert "no OME-Zarr image" in run_stackseg(
            "segment", f"{server.url}/no.zarr", str(tmp_path / "no.tif"), *config, status=1
        )
    for source in (image, image / "labels" / "nuclei"):
        assert "would replace the input stack" in run_stackseg("segment", source, image, "--force", *config, status=1)


def test_long_name_of_a_result_is_refused_before_the_stack_is_segmented(
    config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    names = [f"{'n' * count}.tif" for count in (MAX_NAME_BYTES - 4, MAX_NAME_BYTES - 3)]
    run_stackseg("segment", stack / "image.tif", tmp_path / names[0], *config)

    output = run_stackseg("segment", stack / "image.tif", tmp_path / names[1], *config, status=1)

    assert f"has {MAX_NAME_BYTES + 1} bytes. Use at most {MAX_NAME_BYTES}." in output


@pytest.mark.parametrize("name", ["threshold", "min_confidence"])
def test_help_contains_the_defaults_of_the_default_model(name: str) -> None:
    value = getattr(read_spec(ROOT / "models" / "nuclei").decoding, name)
    assert f"the model's setting; {value:g} for the model nuclei" in PARAMETERS[name][1]


def test_model_that_is_not_better_gives_a_status_and_advice(
    base: ModelSpec, config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    options = ["--edge", "16", "--from", str(base.folder), "--steps", "1", "--learning-rate", "1e-30", *config]
    output = run_stackseg("train", stack, *options, "--out", tmp_path / "mine", "--diameter", "none", status=3)
    assert "stackseg: The new model is not better than the base model" in output
    assert "What to try: annotate more objects" in output
    assert not (tmp_path / "mine").exists()


def test_train_requires_a_model_folder(stack: Path, run_stackseg: Any) -> None:
    assert "--out" in run_stackseg("train", *annotation_options(stack), status=1)


def test_training_benchmark_measures_both_precisions_and_writes_no_files(
    base: ModelSpec, config: list[str], stack: Path, tmp_path: Path, run_stackseg: Any
) -> None:
    previous_files = set(tmp_path.rglob("*"))
    _head, _rule, *rows = run_stackseg(
        *training_command(stack, base), "--batch-size", "3", "--benchmark", *config
    ).splitlines()
    assert set(tmp_path.rglob("*")) == previous_files
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["fp32", "bf16"]
    for _, rate, milliseconds, memory in cells:
        assert float(rate) == pytest.approx(3000 / float(milliseconds), rel=0.2)
        assert memory.endswith("MiB") or memory == "not known"


@pytest.fixture
def make_tuning_options(base: ModelSpec, write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., list[str]]:
    """make_tuning_options(**device): return the options for a configuration with few engines to try."""
    engine = {"precision": "fp32", "streams": 1, "cache_folder": str(tmp_path / "cache")}

    def write(**device: Any) -> list[str]:
        sections = {"windows": {"sw_batch_size": 1}, "device": {"name": "cpu", "threads": 1} | device}
        return ["--config", str(write_config(base.folder.parent, engine=engine, **sections))]

    return write


@pytest.mark.parametrize("model_options", [[], ["--all"], ["--model", "random-nuclei"]])
def test_tuning_stores_the_fastest_engine(
    make_tuning_options: Callable[..., list[str]], model_options: list[str], run_stackseg: Any
) -> None:
    config = make_tuning_options()
    # The time limit only allows the first engine.
    table = run_stackseg("tune", *model_options, "--minutes", "0.0001", *config)
    assert "random-nuclei/1" in table
    assert "chosen" in table
    assert "time limit reached" in table
    assert "chosen" in run_stackseg("models", *config)


def test_trained_models_are_listed_and_removed(
    base: ModelSpec, write_config: Any, tmp_path: Path, run_stackseg: Any
) -> None:
    trained_model = tmp_path / "trained" / "mine"
    path = write_config(
        base.folder.parent, models={"folder": str(base.folder.parent), "trained_folder": str(trained_model.parent)}
    )
    copy_model(base.folder, trained_model)
    assert [line.split("/")[0] for line in run_stackseg("models", "--config", path).splitlines()] == [
        "random-nuclei",
        "mine",
    ]
    for name in ("random-nuclei", "..", "mine/../mine", ""):
        assert "Trained models: mine" in run_stackseg("models", "remove", name, "--config", path, status=1)
    run_stackseg("models", "remove", "mine", "--config", path)
    assert (trained_model.exists(), base.folder.is_dir()) == (False, True)


def test_tuning_result_is_used_by_all_devices_of_a_kind(
    base: ModelSpec, make_tuning_options: Callable[..., list[str]], run_stackseg: Any
) -> None:
    config = make_tuning_options(serve=["cpu", "cpu"])
    assert run_stackseg("tune", "--minutes", "0.0001", *config).count("random-nuclei/1") == 1
    for _name, settings in split_settings(read_settings(Path(config[1]))):
        segmenter = ModelRunner(base, settings)
        segmenter.warm_up()
        assert (segmenter.report().planned, segmenter.report().cached) == ("tuned", True)


@pytest.mark.parametrize(
    ("options", "engine", "status", "message"),
    [(["--minutes", "0"], "auto", 1, "positive"), ([], "eager", 2, "Set engine.kind to auto")],
)
def test_invalid_tuning_options_are_rejected(
    base: ModelSpec, write_config: Any, run_stackseg: Any, options: list[str], engine: str, status: int, message: str
) -> None:
    path = write_config(base.folder.parent, engine={"kind": engine})
    assert message in run_stackseg("tune", *options, "--config", path, status=status)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (BadParameter("voxel_size: wrong.", parameter="voxel_size"), "--voxel-size: wrong."),
        (BadParameter("time: say which, as time=0.", parameter="time"), "--time: say which, as --time 0."),
        (BadParameter("input: is not there.", parameter="input"), "input: is not there."),
        ("try diameter=4px, or choose with channel= (index)", "try --diameter 4px, or choose with --channel (index)"),
        ("skip_below: of another kind", "skip_below: of another kind"),
    ],
)
def test_parameters_in_messages_are_replaced_by_options(message: str | BadParameter, expected: str) -> None:
    assert use_option_names(message) == expected


def test_advice_for_objects_that_fill_the_stack_works_when_typed(
    base: ModelSpec, config: list[str], tmp_path: Path, run_stackseg: Any
) -> None:
    folder = tmp_path / "dense"
    folder.mkdir()
    labels = np.kron(np.arange(1, 25).reshape(2, 3, 4), np.ones((8, 12, 12))).astype(np.uint16)
    is_boundary = maximum_filter(labels, 3) != minimum_filter(labels, 3)
    noise = np.random.default_rng(0).normal(0, 5, labels.shape)
    for name, pixels in (("image", (100 + 100 * is_boundary + noise).astype(np.uint16)), ("mask", labels)):
        tiff_writer.write(Segmentation(pixels, "labels", VoxelSize(1, 0.5, 0.5)), folder / f"{name}.tif")
    command = ["train", folder, "--edge", "16", "--from", base.folder, "--steps", "3", "--keep"]
    out = base.folder.parent / "mine"
    advice = run_stackseg(*command, "--out", out, *config, status=1)
    assert not out.exists()
    assert "--target boundaries" in advice
    target = re.findall("--target [a-z]+", advice)[-1].split()
    output = run_stackseg(*command, "--out", out, *target, *config)
    assert "variation of information" in output
    spec = read_spec(out)
    assert (spec.input.diameter, spec.input.default_diameter, spec.sample is None) == (None, None, False)
    assert len(spec.outputs) == 10
    result = tmp_path / "labels.tif"
    run_stackseg("segment", folder / "image.tif", result, "--model", "mine", *config)
    found = read(result).read_all()[0]
    assert found.shape == labels.shape
    assert found.all()
    (row,) = json.loads(run_stackseg("evaluate", folder, "--model", "mine", "--no-floor", "--json", *config))
    assert row["found"] == len(np.unique(found))
    # Training continues with the same target. A model for objects needs another start.
    again = [*command[:4], "--from", out, *config]
    assert "again/1" in run_stackseg(*again, "--out", tmp_path / "again", "--steps", "1", "--keep")
    options = ["--out", tmp_path / "instances", "--target", "instances"]
    assert "Start from another model" in run_stackseg(*again, *options, status=1)
