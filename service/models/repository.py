"""The model repository: `models/<name>/model.yaml` -> ModelSpec. Nothing in a folder is executed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from service.core.errors import BrokenModel, ConfigError, UnknownModel, validation_message
from service.core.files.bundled import bundled_folder
from service.models.documents import read_document
from service.models.spec import ModelSpec

FILE_NAME = "model.yaml"

# Served by default where no other default is configured, so that a model added beside it does not take its place.
DEFAULT_NAME = "nuclei"

CORRECTION = "name the folder of your models with --models or models.folder, or neither for the bundled models"

T = TypeVar("T")


def read_spec(folder: Path) -> ModelSpec:
    """Read and check one model folder, with the SHA-256 of its weights. Raise BrokenModel."""
    path = folder / FILE_NAME
    try:
        content = read_document(path)
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise BrokenModel(f"{path}: a mapping of keys is expected at the top level")
    try:
        spec = ModelSpec.model_validate({**content, "folder": folder})
    except ValidationError as error:
        raise BrokenModel(f"{path}: {_describe_errors(error)}") from error
    check_weights(spec)
    return spec


def find_model_folders(root: Path | None, names: tuple[str, ...] = (), trained: Path | None = None) -> list[Path]:
    """Return the folders below `root` that hold a model file, or those of `names`; None: of the bundled models.

    They are followed by those below `trained`, of which there may be none.

    Raises ConfigError where `root` is no folder, or holds no model.
    """
    root = bundled_folder("models") if root is None else root
    if not root.is_dir():
        where = "" if root.is_absolute() else " of the working directory"
        raise ConfigError(f"The model repository {root} is not a folder{where}; {CORRECTION}.")
    folders = [root / name for name in names] or _list_folders(root)
    if not folders:
        is_model = (root / FILE_NAME).is_file()
        raise ConfigError(
            f"{root} is a model; name the folder that holds it, {root.resolve().parent}."
            if is_model
            else f"The model repository {root} holds no */{FILE_NAME}; {CORRECTION}."
        )
    return folders if trained is None else _join(folders, _list_folders(trained))


def _join(folders: list[Path], others: list[Path]) -> list[Path]:
    """Return folders, and those of others that are not among them."""
    known = {folder.resolve() for folder in folders}
    return [*folders, *(folder for folder in others if folder.resolve() not in known)]


def _list_folders(root: Path) -> list[Path]:
    """Return the folders in `root` that have a model file, by name; none where `root` is missing."""
    return sorted(file.parent for file in root.glob(f"*/{FILE_NAME}"))


def read_repository(
    root: Path | None, names: tuple[str, ...] = (), trained: Path | None = None
) -> dict[str, ModelSpec]:
    """Read every model folder below `root`, or only `names`, by model name; None: of the bundled models.

    They are followed by those below `trained` whose names are not taken.

    Raises BrokenModel, and ConfigError where `root` is no folder, or holds no model.
    """
    specs: dict[str, ModelSpec] = {}
    for folder in find_model_folders(root, names, trained):
        spec = read_spec(folder)
        if spec.name in specs and folder.parent == trained:
            continue
        if spec.name in specs:
            raise BrokenModel(f"{folder}: the name {spec.name!r} is taken by {specs[spec.name].folder}")
        specs[spec.name] = spec
    return specs


def default_name(models: Collection[str]) -> str:
    """Return the default among names of models where none is configured: `nuclei`, else the first."""
    return DEFAULT_NAME if DEFAULT_NAME in models else next(iter(models))


def select_model(models: Mapping[str, T], name: str | None, default: str | None) -> T:
    """Return the model called `name`, else `default`, else the one of `default_name`. Raise UnknownModel."""
    wanted = name or default or default_name(models)
    if wanted not in models:
        raise UnknownModel(f"There is no model {wanted!r}; served are: {', '.join(models)}.", parameter="model")
    return models[wanted]


def _describe_errors(error: ValidationError) -> str:
    """Return every fault after the key it concerns, in one line."""
    faults = [(".".join(map(str, fault["loc"])), validation_message(fault)) for fault in error.errors()]
    return "; ".join(f"{key}: {message}" if key else message for key, message in faults)


def check_weights(spec: ModelSpec) -> None:
    """Compare the weights with the SHA-256 in the model file. Raises BrokenModel."""
    if spec.weights_path.exists() and not spec.weights_path.is_file():
        raise BrokenModel(f"{spec.weights_path}: the weights cannot be read: it is no regular file.")
    try:
        with spec.weights_path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BrokenModel(f"{spec.weights_path}: the weights cannot be read: {error.strerror}") from error
    if digest != spec.weights.sha256:
        raise BrokenModel(
            f"{spec.weights_path}: the SHA-256 of the weights is {digest}, "
            f"but {FILE_NAME} says {spec.weights.sha256}; restore the weights or correct the model file."
        )
