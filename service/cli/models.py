"""`stackseg models`, or `models list`, lists the models; `models import` and `models remove` change which there are."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from service.cli import import_model
from service.cli.options import add_settings
from service.core.config import Settings
from service.core.errors import UnknownModel
from service.models.repository import FILE_NAME, read_repository, read_spec, select_model
from service.models.spec import ModelSpec


def add_arguments(models: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg models`."""
    models.set_defaults(run=run_list)
    _add_list_arguments(models)
    actions = models.add_subparsers(metavar="list|import|remove")
    listed = actions.add_parser("list", help="list the models, as without any action")
    _add_list_arguments(listed)
    add_settings(listed, argparse.SUPPRESS)
    imported = actions.add_parser("import", help="add a MONAI bundle, a bioimage.io package, or a file of weights")
    import_model.add_arguments(imported)
    removed = actions.add_parser("remove", help="delete a model that the service or its page has trained")
    removed.add_argument("name", help="of the model")
    removed.set_defaults(run=run_remove)
    add_settings(removed, argparse.SUPPRESS)


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    # Of the two parsers that know it the second one must not undo what the first has seen.
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="everything that model files say"
    )


def run_list(options: argparse.Namespace, settings: Settings) -> int:
    """List the models and their stored plans; nothing is loaded."""
    from service.engine.tuning import plans  # noqa: PLC0415

    specs = read_repository(settings.models.folder, settings.models.serve, settings.trained_folder)
    folder = plans.choose_folder(settings.engine.cache_folder)
    stored = {spec.name: plans.find_all(folder, spec.name, spec.weights.sha256) for spec in specs.values()}
    if getattr(options, "json", False):
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


def run_remove(options: argparse.Namespace, settings: Settings) -> int:
    """Delete the folder of a trained model. Raises UnknownModel."""
    trained = {file.parent.name: file.parent for file in sorted(settings.trained_folder.glob(f"*/{FILE_NAME}"))}
    if options.name not in trained:
        raise UnknownModel(
            f"There is no trained model {options.name!r} in {settings.trained_folder}; there are"
            f" {', '.join(trained) or 'none'}. Folders of other models are their owner's to remove."
        )
    shutil.rmtree(trained[options.name])
    sys.stdout.write(f"{trained[options.name]} is removed. A service that runs lists it until POST /models/reload.\n")
    return 0


def choose_model(name: str | None, settings: Settings) -> ModelSpec:
    """Return the model of that name in the repository, or else one that was trained by the service; or of that folder.

    What has a slash is a folder first, and may be without a repository. None: the default one. Raises UnknownModel,
    BrokenModel, and ConfigError for a repository that is none.
    """
    if name and "/" in name and _is_model(Path(name)):
        return read_spec(Path(name))
    specs = read_repository(settings.models.folder, settings.models.serve)
    if name and name not in specs:
        for folder in (settings.trained_folder / name, Path(name)):
            if _is_model(folder):
                return read_spec(folder)
    return select_model(specs, name, settings.models.default)


def _is_model(folder: Path) -> bool:
    """Return whether a folder is that of a model; no path is too long to be asked."""
    with suppress(OSError):
        return (folder / FILE_NAME).is_file()
    return False
