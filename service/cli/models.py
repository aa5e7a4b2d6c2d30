"""`stackseg models`: list, import, export and remove models."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from service.cli.model_packages import import_model
from service.cli.options import add_settings_options
from service.core.config import Settings
from service.core.errors import UnknownModel
from service.models.repository import MODEL_FILE_NAME, read_repository, read_spec, select_model
from service.models.spec import ModelSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg models`."""
    parser.set_defaults(run=run_list)
    _add_list_arguments(parser)
    actions = parser.add_subparsers(metavar="list|import|export|remove")
    list_parser = actions.add_parser("list", help="List the models (default action)")
    _add_list_arguments(list_parser)
    add_settings_options(list_parser, argparse.SUPPRESS)
    import_parser = actions.add_parser("import", help="Import a MONAI bundle, a bioimage.io package, or a weights file")
    import_model.add_arguments(import_parser)
    export_parser = actions.add_parser(
        "export", help="Write a model as a bioimage.io package, ONNX or torch.export file"
    )
    _add_export_arguments(export_parser)
    remove_parser = actions.add_parser("remove", help="Delete a model that was trained by the service")
    remove_parser.add_argument("name", help="Name of the model")
    remove_parser.set_defaults(run=run_remove)
    add_settings_options(remove_parser, argparse.SUPPRESS)


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    # SUPPRESS, because the default of the subparser would overwrite a value that the parent parser has set.
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="Print the full contents of every model.yaml as JSON",
    )


def _add_export_arguments(export_parser: argparse.ArgumentParser) -> None:
    export_parser.add_argument("name", help="Name of the model, or its folder")
    export_parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="File to write, with the suffix .zip, .onnx or .pt2"
    )
    export_parser.add_argument(
        "--format",
        choices=("bioimageio", "onnx", "pt2"),
        help="bioimage.io package, ONNX file or torch.export file (default: according to the suffix of PATH)",
    )
    export_parser.add_argument(
        "--author",
        action="append",
        default=[],
        metavar="NAME",
        help="Author (default: those in model.yaml); repeatable",
    )
    export_parser.add_argument(
        "--cite",
        action="append",
        default=[],
        metavar="DOI",
        help="Publication (default: those in model.yaml); repeatable",
    )
    export_parser.add_argument("--force", action="store_true", help="Overwrite an existing file")
    export_parser.set_defaults(run=run_export)
    add_settings_options(export_parser, argparse.SUPPRESS)


def run_list(options: argparse.Namespace, settings: Settings) -> int:
    """List the models and their stored tuning results without loading the models."""
    from service.engine.tuning import plans  # noqa: PLC0415

    specs = read_repository(settings.models.folder, settings.models.serve, settings.trained_folder)
    folder = plans.resolve_folder(settings.engine.cache_folder)
    plans_by_name = {spec.name: plans.find_all(folder, spec.name, spec.weights.sha256) for spec in specs.values()}
    if getattr(options, "json", False):
        content = [
            spec.model_dump(mode="json") | {"plans": [asdict(plan) for plan in plans_by_name[spec.name]]}
            for spec in specs.values()
        ]
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return 0
    for spec in specs.values():
        window = "x".join(map(str, spec.input.roi_size))
        sys.stdout.write(f"{spec.identifier:20} {spec.decoding.kind:10} window {window:12} {spec.summary}\n")
        for plan in plans_by_name[spec.name]:
            sys.stdout.write("".join(f"  {line}\n" for line in plan.format_lines()))
    return 0


def run_export(options: argparse.Namespace, settings: Settings) -> int:
    """Write a model to a file. Raises UnknownModel, BadParameter, UnsupportedPackage."""
    module = import_module("service.cli.model_packages.export_model")
    status: int = module.export_model(choose_model(options.name, settings), options, settings)
    return status


def run_remove(options: argparse.Namespace, settings: Settings) -> int:
    """Delete the folder of a trained model. Raises UnknownModel."""
    trained_folders = {
        file.parent.name: file.parent for file in sorted(settings.trained_folder.glob(f"*/{MODEL_FILE_NAME}"))
    }
    if options.name not in trained_folders:
        raise UnknownModel(
            f"There is no trained model {options.name!r} in {settings.trained_folder}. Trained models:"
            f" {', '.join(trained_folders) or 'none'}. To remove another model, delete its folder."
        )
    shutil.rmtree(trained_folders[options.name])
    sys.stdout.write(
        f"Removed {trained_folders[options.name]}. Running services continue to list the model until you call POST"
        " /models/reload.\n"
    )
    return 0


def choose_model(name: str | None, settings: Settings) -> ModelSpec:
    """Find a model by its name or folder. `None` selects the default model.

    A name is looked up in the repository, then among the models trained by the service, and then as a folder. A name
    with a slash is looked up as a folder first, which requires no repository. Raises UnknownModel, BrokenModel, and
    ConfigError if there is no valid repository.
    """
    if name and "/" in name and _is_model_folder(Path(name)):
        return read_spec(Path(name))
    specs = read_repository(settings.models.folder, settings.models.serve)
    if name and name not in specs:
        for folder in (settings.trained_folder / name, Path(name)):
            if _is_model_folder(folder):
                return read_spec(folder)
    return select_model(specs, name, settings.models.default)


def _is_model_folder(folder: Path) -> bool:
    """Return whether a path is a model folder. Paths that are too long for the system are not model folders."""
    with suppress(OSError):
        return (folder / MODEL_FILE_NAME).is_file()
    return False
