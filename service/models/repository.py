"""The model repository: read `models/<name>/model.yaml` into a `ModelSpec`. Nothing in a model folder is executed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from service.core.errors import BrokenModel, ConfigError, UnknownModel, get_validation_message
from service.core.files.bundled import get_bundled_folder
from service.core.files.documents import read_document
from service.models.spec import ModelSpec

MODEL_FILE_NAME = "model.yaml"
# Optional image file in a model folder, which shows what the model segments.
PICTURE_FILE = "example.png"

# The default model if none is configured, so that adding other models does not change the default.
DEFAULT_NAME = "nuclei"

FOLDER_HINT = "set --models or models.folder to the folder of your models, or omit both to use the bundled models"

T = TypeVar("T")


def read_spec(folder: Path) -> ModelSpec:
    """Read and check one model folder, including the SHA-256 of its weights. Raises BrokenModel if it is invalid."""
    path = folder / MODEL_FILE_NAME
    try:
        content = read_document(path)
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{path}: the file cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise BrokenModel(f"{path}: the file must contain a mapping of keys at the top level.")
    try:
        spec = ModelSpec.model_validate({**content, "folder": folder})
    except ValidationError as error:
        raise BrokenModel(f"{path}: {_describe_errors(error)}") from error
    check_weights(spec)
    return spec


def find_model_folders(root: Path | None, names: tuple[str, ...] = (), trained_root: Path | None = None) -> list[Path]:
    """Return the model folders in `root`, or only those in `names`, followed by those in `trained_root`.

    If `root` is None, the bundled models are used. The folder `trained_root` may be missing or empty.

    Raises ConfigError if `root` is not a folder or contains no model.
    """
    root = get_bundled_folder("models") if root is None else root
    if not root.is_dir():
        location = "" if root.is_absolute() else " in the working directory"
        raise ConfigError(f"The model repository {root} is not a folder{location}; {FOLDER_HINT}.")
    folders = [root / name for name in names] or _list_folders(root)
    if not folders:
        is_model = (root / MODEL_FILE_NAME).is_file()
        raise ConfigError(
            f"{root} is a single model; specify the folder that contains it, {root.resolve().parent}."
            if is_model
            else f"The model repository {root} contains no folder with a {MODEL_FILE_NAME} file; {FOLDER_HINT}."
        )
    return folders if trained_root is None else _append_new_folders(folders, _list_folders(trained_root))


def _append_new_folders(folders: list[Path], candidates: list[Path]) -> list[Path]:
    """Return `folders`, followed by the folders in `candidates` that `folders` does not contain."""
    known_paths = {folder.resolve() for folder in folders}
    return [*folders, *(folder for folder in candidates if folder.resolve() not in known_paths)]


def _list_folders(root: Path) -> list[Path]:
    """Return the folders in `root` that contain a model file, sorted by name, or none if `root` does not exist."""
    return sorted(file.parent for file in root.glob(f"*/{MODEL_FILE_NAME}"))


def read_repository(
    root: Path | None, names: tuple[str, ...] = (), trained_root: Path | None = None
) -> dict[str, ModelSpec]:
    """Read the model folders in `root`, or only those in `names`, and those in `trained_root`.

    Returns the specs by name. If `root` is None, the bundled models are used. Trained models whose names are already
    used are skipped.

    Raises BrokenModel, or ConfigError if `root` is not a folder or contains no model.
    """
    specs: dict[str, ModelSpec] = {}
    for folder in find_model_folders(root, names, trained_root):
        spec = read_spec(folder)
        if spec.name in specs and folder.parent == trained_root:
            continue
        if spec.name in specs:
            raise BrokenModel(
                f"{folder}: the name {spec.name!r} is already used by {specs[spec.name].folder}; rename one of the"
                " models."
            )
        specs[spec.name] = spec
    return specs


def choose_default_name(models: Collection[str]) -> str:
    """Return the name of the default model if none is configured: `nuclei` if present, otherwise the first model."""
    return DEFAULT_NAME if DEFAULT_NAME in models else next(iter(models))


def select_model(models: Mapping[str, T], name: str | None, default: str | None) -> T:
    """Return the model `name`, or else the model `default`, or else the model that `choose_default_name` chooses.

    Raises UnknownModel if there is no such model.
    """
    selected_name = name or default or choose_default_name(models)
    if selected_name not in models:
        subject = f"There is no model {selected_name!r}" if name else f"The default model {selected_name!r} is missing"
        raise UnknownModel(f"{subject}; the available models are: {', '.join(models)}.", parameter="model")
    return models[selected_name]


def _describe_errors(error: ValidationError) -> str:
    """Return all validation errors in one line, each preceded by its key."""
    # Pydantic inserts the types of a union, such as `tagged-union[...]`, which are no keys of the file.
    keys = (".".join(str(part) for part in problem["loc"] if "[" not in str(part)) for problem in error.errors())
    problems = zip(keys, map(get_validation_message, error.errors()), strict=True)
    return "; ".join(f"{key}: {message}" if key else message for key, message in problems)


def check_weights(spec: ModelSpec) -> None:
    """Compare the weights with the SHA-256 in the model file. Raises BrokenModel if they do not match."""
    if spec.weights_path.exists() and not spec.weights_path.is_file():
        raise BrokenModel(f"{spec.weights_path}: the weights cannot be read: the path is not a regular file.")
    try:
        with spec.weights_path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BrokenModel(f"{spec.weights_path}: the weights cannot be read: {error.strerror}") from error
    if digest != spec.weights.sha256:
        raise BrokenModel(
            f"{spec.weights_path}: the SHA-256 of the weights is {digest}, "
            f"but {MODEL_FILE_NAME} specifies {spec.weights.sha256}; restore the weights or correct the model file."
        )
