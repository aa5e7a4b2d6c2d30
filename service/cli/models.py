"""`stackseg models` lists the repository; `stackseg models import PATH` adds a model to it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from service.cli.options import add_settings
from service.core.config import Settings
from service.core.errors import BadParameter, ConfigError
from service.models.repository import FILE_NAME, read_repository, read_spec, select_model
from service.models.spec import ModelSpec


def add_arguments(models: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg models`."""
    models.add_argument("--json", action="store_true", help="everything that the model files say")
    models.set_defaults(run=run_list)
    actions = models.add_subparsers(metavar="import")
    imported = actions.add_parser("import", help="add a MONAI bundle, a bioimage.io package, TorchScript or ONNX")
    imported.add_argument(
        "package", type=Path, metavar="PATH", help="folder, zip archive or file; nothing is downloaded"
    )
    imported.add_argument("--name", help="name of the model; the package's own if not given")
    imported.add_argument(
        "--with",
        dest="stated",
        type=Path,
        metavar="YAML",
        help="keys of model.yaml, before what the package says",
    )
    imported.add_argument(
        "--trust",
        action="store_true",
        help="take TorchScript, too: a program, which can do whatever this command and the service can",
    )
    add_settings(imported, argparse.SUPPRESS)
    imported.set_defaults(run=run_import)


def run_list(options: argparse.Namespace, settings: Settings) -> int:
    """List the models and their stored plans; nothing is loaded."""
    from service.engine import plans  # noqa: PLC0415

    specs = read_repository(settings.models.folder, settings.models.serve)
    folder = plans.choose_folder(settings.engine.cache_folder)
    stored = {spec.name: plans.find_all(folder, spec.name, spec.weights.sha256) for spec in specs.values()}
    if options.json:
        content = [
            spec.model_dump(mode="json") | {"plans": [asdict(plan) for plan in stored[spec.name]]}
            for spec in specs.values()
        ]
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return 0
    for spec in specs.values():
        window = "x".join(map(str, spec.input.roi_size))
        sys.stdout.write(f"{spec.identifier:20} {spec.decoding.kind:10} window {window:12} {spec.summary}\n")
        for plan in stored[spec.name]:
            sys.stdout.write("".join(f"  {line}\n" for line in plan.lines()))
    return 0


def run_import(options: argparse.Namespace, settings: Settings) -> int:
    """Import one package into the folder of `--models` or models.folder; print notes for the operator."""
    from service.inference.resample import prepare_tensor  # noqa: PLC0415
    from service.models.importers.import_model import import_model  # noqa: PLC0415

    if settings.models.folder is None:
        raise BadParameter("Say which folder gets the model: --models FOLDER, which is made where it is missing.")
    stated = {} if options.stated is None else _read_stated_keys(options.stated)
    spec, notes = import_model(
        options.package, settings.models.folder, stated, options.name, prepare=prepare_tensor, trust=options.trust
    )
    sys.stdout.write(f"{spec.folder}: {spec.identifier}, {spec.network}\n")
    for note in notes:
        sys.stdout.write(f"note: {note}\n")
    return 0


def _read_stated_keys(path: Path) -> dict[str, Any]:
    """Read keys of model.yaml from a YAML file. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a mapping of keys of model.yaml is expected.")
    return content


def choose_model(name: str | None, settings: Settings) -> ModelSpec:
    """Return the model of that name in the repository, or of that folder; None: the default one.

    Raises UnknownModel, BrokenModel, and ConfigError for a repository that is none.
    """
    if name is not None and (Path(name) / FILE_NAME).is_file():
        return read_spec(Path(name))
    return select_model(read_repository(settings.models.folder, settings.models.serve), name, settings.models.default)
