"""A trained network -> a complete model folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import nn

from service.core import hardware
from service.core.config import Settings, overruled
from service.core.errors import BadParameter
from service.core.volume import Options, Segmentation, Volume
from service.engine import precision
from service.formats import tiff_writer
from service.inference.normalize import normalise
from service.inference.segmenter import Segmenter
from service.models.architectures import build
from service.models.loader import load
from service.models.repository import FILE_NAME, read_spec
from service.models.spec import Architecture, Instances, ModelSpec, Normalisation, Sample
from service.training import throughput
from service.training.examples import Pair
from service.training.train import read_pairs, save
from service.training.trainer import CHECKPOINT, Plan, State, Trainer, split

FRESH: dict[str, Any] = {
    "licence": "Not stated.",
    "architecture": {"name": "ShuffleUNet", "arguments": {"in_channels": 1, "out_channels": 2}},
    "input": {"channels": 1, "normalisation": {"kind": "percentile"}, "roi_size": [64, 64, 64]},
    "outputs": ["foreground", "distance"],
    "activation": "sigmoid",
    "decoding": {"kind": "instances", "minimum_size": 32},
}
"""Of a model that is trained from nothing; what `Instances` says by default applies."""


def check_trainable(spec: ModelSpec) -> None:
    """Raises BadParameter for a model that this training has no targets for."""
    decoding = spec.decoding
    roles = (decoding.foreground, decoding.distance) if isinstance(decoding, Instances) else ()
    if spec.outputs != roles or spec.activation != "sigmoid" or spec.input.channels != 1 or spec.architecture is None:
        raise BadParameter(
            f"{spec.name}: only models of one channel with the sigmoid outputs foreground and distance can be trained."
        )
    if spec.architecture.arguments.get("deep_supervision"):
        raise BadParameter(f"{spec.name}: deep_supervision has no targets here; only its last output can be trained.")
    if spec.input.voxel_size is not None:
        raise BadParameter(f"{spec.name}: works at a voxel size of its own, to which training does not resample yet.")


def content_of(base: ModelSpec | None, name: str, trained_on: list[str]) -> dict[str, Any]:
    """The keys of a new model file but `weights`: those of `base`, or `FRESH`."""
    content = FRESH if base is None else base.model_dump(mode="json", exclude={"weights", "sample", "format"})
    start = "" if base is None else f"{base.training_data} Then: "
    return {
        "format": 1,
        **content,
        "name": name,
        "version": "1",
        "summary": f"Trained on {len(trained_on)} annotated stacks" + (f", from {base.identifier}." if base else "."),
        "training_data": start + ", ".join(trained_on),
    }


def write_model(
    network: nn.Module, content: dict[str, Any], folder: Path, image: NDArray[Any], settings: Settings
) -> ModelSpec:
    """Write weights, model file and a sample into `folder`, and read them back as the service does. Raises BrokenModel.

    The sample is the middle of `image`, [Z, Y, X], as large as a window: engines are compared by what they make of it.
    """
    save(network, folder)
    digest = hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()
    stated = content | {"weights": {"file": "weights.safetensors", "sha256": digest}, "sample": Sample().model_dump()}
    _write_sample(ModelSpec.model_validate({**stated, "folder": folder}), image, settings)
    text = yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)
    (folder / FILE_NAME).write_text(text, encoding="utf-8")
    return read_spec(folder)


def _write_sample(spec: ModelSpec, image: NDArray[Any], settings: Settings) -> None:
    sample = spec.sample or Sample()
    starts = [max(0, length - edge) // 2 for length, edge in zip(image.shape, spec.input.roi_size, strict=True)]
    middle = image[tuple(slice(start, start + edge) for start, edge in zip(starts, spec.input.roi_size, strict=True))]
    segmenter = Segmenter(spec, overruled(settings, "engine", {"kind": "eager", "precision": "fp32"}))
    segmenter.warm_up()
    found = segmenter.segment(Volume.from_array(np.ascontiguousarray(middle)[None]), Options()).segmentation
    tiff_writer.write(Segmentation(middle, "labels"), spec.folder / sample.input)
    tiff_writer.write(found, spec.folder / sample.expected)


@dataclass(frozen=True)
class Normaliser:
    """The normalisation of a model file, which processes can hand to each other."""

    how: Normalisation

    def __call__(self, image: NDArray[Any]) -> NDArray[np.float32]:
        return normalise(image, self.how)


def trainers(
    pairs: Sequence[Pair], settings: Settings, content: dict[str, Any], base: ModelSpec | None
) -> Callable[[Path, torch.dtype], Trainer]:
    """A maker of trainers on stacks and their labels, by folder and dtype.

    The device and its threads are those of the settings. Raises BadParameter, BadFile, BrokenModel, ConfigError.
    """
    draft = ModelSpec.model_validate({**content, "weights": {"sha256": "0" * 64}, "folder": Path()})
    check_trainable(draft)
    device = hardware.choose_device(settings.device.name)
    plan = Plan(**settings.training.model_dump())
    if device.type == "cpu":
        hardware.use_threads(settings.device.threads)
    else:
        torch.backends.cudnn.deterministic = True
    training, validation = split(pairs, settings.training.validation)

    def make(folder: Path, dtype: torch.dtype) -> Trainer:
        torch.manual_seed(plan.seed)
        network = load(base) if base is not None else build(Architecture.model_validate(content["architecture"]))
        return Trainer(
            network, training, validation, Normaliser(draft.input.normalisation), plan, folder, device, dtype
        )

    return make


def train_model(
    paths: tuple[Sequence[Path], Sequence[Path]],
    out: Path,
    settings: Settings,
    *,
    base: ModelSpec | None = None,
    resume: bool = False,
) -> tuple[ModelSpec, State]:
    """Train on stacks and their labels (paths, in one order) and make `out` a model folder of that name.

    The device, its threads, the precision and how to train are those of the settings. Raises BadParameter, BadFile,
    BrokenModel, ConfigError.
    """
    if (out / FILE_NAME).exists() or (out.exists() and any(out.iterdir()) and not resume):
        raise BadParameter(f"{out} holds something already; choose another folder, or --resume an unfinished training.")
    content = content_of(base, out.name, [path.name for path in paths[0]])
    pairs = read_pairs(*paths)
    make = trainers(pairs, settings, content, base)
    device = hardware.choose_device(settings.device.name)
    chosen = precision.choose(settings.engine.precision, hardware.native_precisions(device))
    out.mkdir(parents=True, exist_ok=True)
    trainer = make(out, chosen.dtype)
    if resume:
        trainer.resume()
    trained = trainer.run()
    spec = write_model(trained, content, out, pairs[0][0], settings)
    (out / CHECKPOINT).unlink(missing_ok=True)
    return spec, trainer.state


def benchmark(
    paths: tuple[Sequence[Path], Sequence[Path]], settings: Settings, base: ModelSpec | None = None, steps: int = 10
) -> list[throughput.Measured]:
    """What steps of such a training take, in FP32 and in mixed precision; writes nothing. Raises as `train_model`."""
    device = hardware.choose_device(settings.device.name)
    names = throughput.precisions(settings.engine.precision, hardware.native_precisions(device))
    return throughput.compare(
        trainers(read_pairs(*paths), settings, content_of(base, "mine", []), base), names, device, steps
    )
