"""Files of annotated stacks in the options of `evaluate` and `train`."""

from __future__ import annotations

import argparse
from pathlib import Path

from service.core.errors import BadParameter

IMAGE_FILE = "image.tif"
LABELS_FILE = "mask.tif"


def list_pairs(options: argparse.Namespace) -> list[tuple[Path, Path]]:
    """Return the pairs of a stack and its labels in `--images` and `--labels`, and in folders.

    Raises BadParameter if there are no stacks, or if a folder lacks one of the files.
    """
    if len(options.images) != len(options.labels):
        raise BadParameter(
            f"Each image needs labels, but there are {len(options.images)} images and {len(options.labels)} label"
            " files."
        )
    unsuitable = [str(folder) for folder in options.folders if not _is_annotated(folder)]
    if unsuitable:
        suitable = [str(folder) for folder in options.folders if _is_annotated(folder)]
        found = f" These folders have them: {', '.join(suitable)}." if suitable else ""
        raise BadParameter(
            f"{', '.join(unsuitable)}: each folder needs the files {IMAGE_FILE} and {LABELS_FILE}.{found} For files"
            " with other names, use --images and --labels."
        )
    pairs = list(zip(options.images, options.labels, strict=True))
    pairs += [(folder / IMAGE_FILE, folder / LABELS_FILE) for folder in options.folders]
    if not pairs:
        raise BadParameter(
            f"There are no stacks. Specify folders with {IMAGE_FILE} and {LABELS_FILE}, or use --images and --labels."
        )
    return pairs


def _is_annotated(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (IMAGE_FILE, LABELS_FILE))
