"""The store of annotated stacks. Annotated stacks never expire."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from blake3 import blake3

from service.core.buffers import make_allocator
from service.core.errors import BadParameter, FeatureDisabled, OutOfStorage, UnknownAnnotation
from service.core.files.atomic_files import sync_to_disk
from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Volume, choose_label_dtype
from service.formats.tiff import writer as tiff_writer
from service.serving.learning.annotation import (
    IMAGE_FILE,
    LABELS_FILE,
    Annotation,
    LabelProvenance,
    NewAnnotation,
    Region,
)
from service.serving.storage.disk import RecordCache, translate_disk_errors
from service.serving.storage.scratch import MARKER_FILE, delete_abandoned_folders, make_locked_folder

RECORD_FILE = "annotation.json"
# Prefix of folders that are being written.
PARTIAL_PREFIX = ".part-"
_ID_PATTERN = re.compile(r"[0-9a-f]{32}")
# Label numbers up to this value are counted in a lookup table, and larger numbers by sorting.
_MAX_TABLE_LABEL = 2**24
# Maximum number of distinct label numbers that are counted by sorting.
_MAX_SORTED_LABELS = 2**20
# Maximum number of annotated stacks per owner. Listing them reads all records of the owner.
MAX_STACKS_PER_OWNER = 10_000


class AnnotationUsage(NamedTuple):
    """Number of annotated stacks, and the size of their files in bytes."""

    stack_count: int
    nbytes: int


class AnnotationStore:
    """A folder with a subfolder for each annotated stack. Safe for use by several threads and processes.

    `quota_bytes` and `max_stacks` limit the annotated stacks of one owner. New annotated stacks never evict old ones,
    because the labels were corrected by hand. Methods raise OutOfStorage if the disk is full, and StorageUnavailable
    for other disk errors.
    """

    def __init__(self, folder: Path, *, quota_bytes: int, max_stacks: int = MAX_STACKS_PER_OWNER) -> None:
        self.folder, self.quota_bytes, self.max_stacks = folder, quota_bytes, max_stacks
        # Held from the check of the owner's quota until the new stack is stored.
        self._lock = threading.Lock()
        self._records = RecordCache(folder, RECORD_FILE, _read_stack)

    def clean_up(self) -> None:
        """Delete the incomplete folders of killed processes."""
        delete_abandoned_folders(self.folder, PARTIAL_PREFIX)

    def measure_usage(self) -> AnnotationUsage:
        """Return the total usage of all owners."""
        sizes = [annotation.nbytes for annotation in self._records.list()]
        return AnnotationUsage(len(sizes), sum(sizes))

    def check_space(self, owner: str | None) -> None:
        """Raise FeatureDisabled if the store is disabled, and OutOfStorage if the owner's quota is used up."""
        if not self.quota_bytes:
            raise FeatureDisabled(
                "This service does not store annotated stacks, because annotations.quota_bytes is 0 in its settings."
            )
        self._check_quota(owner, 1)

    def add(self, image: Volume, labels: Volume, new_annotation: NewAnnotation) -> Annotation:
        """Store an image and its labels atomically. Both have one channel and the same shape.

        Raises BadParameter if the shapes differ or the label numbers are invalid, FeatureDisabled if the store is
        disabled, and OutOfStorage if the quota is exceeded.
        """
        if labels.shape != image.shape or image.shape[0] != 1:
            raise BadParameter(f"The image and the labels differ in shape: {image.shape[1:]} and {labels.shape[1:]}.")
        self.check_space(new_annotation.owner)
        self.clean_up()
        annotation_id = uuid.uuid4().hex
        partial_folder = self.folder / f"{PARTIAL_PREFIX}{annotation_id}"
        with translate_disk_errors():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = make_locked_folder(partial_folder)
            try:
                nbytes = _write_stack(partial_folder, image, labels, new_annotation)
                with self._lock:
                    self._check_quota(new_annotation.owner, nbytes)
                    partial_folder.rename(self.folder / annotation_id)
                (self.folder / annotation_id / MARKER_FILE).unlink()
                sync_to_disk(self.folder)
            finally:
                shutil.rmtree(partial_folder, ignore_errors=True)
                os.close(lock_fd)
        return self.find(annotation_id, new_annotation.owner)

    def find(self, annotation_id: str, owner: str | None, *, is_admin: bool = False) -> Annotation:
        """Return an annotated stack of this owner, or of any owner if `is_admin` is set. Raises UnknownAnnotation."""
        annotation = _read_stack(self.folder / annotation_id)
        if annotation is None or not (is_admin or annotation.owner == owner):
            raise UnknownAnnotation("There is no such annotated stack: the ID is wrong, or the stack was deleted.")
        return annotation

    def open_file(self, annotation: Annotation, name: str) -> BinaryIO:
        """Open a file of an annotated stack. Deleting the stack does not close the file. Raises UnknownAnnotation."""
        with translate_disk_errors():
            try:
                return (annotation.folder / name).open("rb")
            except FileNotFoundError:
                self.find(annotation.id, None, is_admin=True)
                raise

    def list_newest_first(self, owner: str | None, *, is_admin: bool = False) -> list[Annotation]:
        """Return the annotated stacks of this owner, or of all owners if `is_admin` is set, newest first."""
        annotations = (annotation for annotation in self._records.list() if is_admin or annotation.owner == owner)
        return sorted(annotations, key=attrgetter("created"), reverse=True)

    def delete(self, annotation_id: str, owner: str | None, *, is_admin: bool = False) -> Annotation:
        """Delete an annotated stack and return its properties. Raises UnknownAnnotation."""
        annotation = self.find(annotation_id, owner, is_admin=is_admin)
        with translate_disk_errors(), suppress(FileNotFoundError):
            # Delete the record first. A folder without a record is not an annotated stack.
            (annotation.folder / RECORD_FILE).unlink()
            shutil.rmtree(annotation.folder)
        return annotation

    def _check_quota(self, owner: str | None, nbytes: int) -> None:
        annotations = self.list_newest_first(owner)
        if len(annotations) >= self.max_stacks:
            raise OutOfStorage(
                f"You have {len(annotations):,} annotated stacks, which is the maximum. Delete some of them."
            )
        if (used_bytes := sum(annotation.nbytes for annotation in annotations)) + nbytes > self.quota_bytes:
            raise OutOfStorage(
                f"Your annotated stacks use {used_bytes:,} of {self.quota_bytes:,} bytes (annotations.quota_bytes), so"
                f" there is no space for another {nbytes:,} bytes. Delete some of them, or save a smaller stack."
            )


def _read_stack(folder: Path) -> Annotation | None:
    """Return the annotated stack in a folder, or None if the folder contains no stack or a damaged record."""
    if not _ID_PATTERN.fullmatch(folder.name):
        return None
    try:
        content: dict[str, Any] = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        z, y, x = content.pop("shape")
        voxel_size, region = content.pop("voxel_size"), content.pop("region")
        return Annotation(
            folder=folder,
            shape=(z, y, x),
            voxel_size=None if voxel_size is None else VoxelSize(*voxel_size),
            region=None if region is None else Region.parse(region, (z, y, x)),
            provenance=LabelProvenance(**content.pop("origin")),
            **content,
        )
    except (OSError, ValueError, TypeError, LookupError, BadParameter):
        return None


def _write_stack(folder: Path, image: Volume, labels: Volume, new_annotation: NewAnnotation) -> int:
    """Write an image, its labels and the record to a folder. Return the size of the image and the labels in bytes."""
    tiff_writer.write_image(image, folder / IMAGE_FILE)
    object_count = _write_labels(labels, folder / LABELS_FILE, image.voxel_size, new_annotation)
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    content = {
        "name": new_annotation.name,
        "owner": new_annotation.owner,
        "shape": image.shape[1:],
        "voxel_size": None if image.voxel_size is None else tuple(image.voxel_size),
        "region": None if new_annotation.region is None else str(new_annotation.region),
        "objects": object_count,
        "ignored": new_annotation.ignored,
        "is_partial": new_annotation.is_partial,
        "digest": _compute_digest(image),
        "origin": asdict(new_annotation.provenance),
        "nbytes": nbytes,
        "created": time.time(),
    }
    (folder / RECORD_FILE).write_text(json.dumps(content), encoding="utf-8")
    sync_to_disk(*folder.iterdir(), folder)
    return nbytes


def _write_labels(labels: Volume, path: Path, voxel_size: VoxelSize | None, new_annotation: NewAnnotation) -> int:
    """Write labels as uint16, or as uint32 if necessary. Return the number of objects in the annotated region."""
    region, ignored = new_annotation.region, new_annotation.ignored
    plane_indices, highest_number = range(labels.shape[1]), _find_highest_number(labels)
    is_present = np.zeros(min(highest_number, _MAX_TABLE_LABEL) + 1, np.bool_)
    large_labels = np.empty(0, np.uint32)
    pixels = make_allocator(path.parent)(labels.shape[1:], choose_label_dtype(highest_number))
    z0, z1 = (0, len(plane_indices)) if region is None else region.z
    region_slices = (slice(None), slice(None)) if region is None else region.slices[1:]
    for z in plane_indices:
        pixels[z] = labels.read(z, z + 1)[0, 0]
        if z0 <= z < z1:
            region_labels = pixels[z][region_slices]
            is_present[region_labels[region_labels < len(is_present)]] = True
            large_labels = np.union1d(large_labels, region_labels[region_labels >= len(is_present)])
            if len(large_labels) > _MAX_SORTED_LABELS:
                raise BadParameter(
                    f"The labels contain more than {_MAX_SORTED_LABELS:,} distinct numbers above {_MAX_TABLE_LABEL:,}."
                    " Renumber the objects, starting from 1."
                )
    if ignored is not None:
        is_present[ignored : ignored + 1] = False
    object_count = int(np.count_nonzero(is_present[1:])) + int(np.count_nonzero(large_labels != ignored))
    tiff_writer.write(Segmentation(pixels, "labels", voxel_size, object_count), path)
    return object_count


def _find_highest_number(labels: Volume) -> int:
    """Return the highest label number. Raises BadParameter for negative numbers."""
    planes = (labels.read(z, z + 1) for z in range(labels.shape[1]))
    plane_ranges = [(int(plane.min()), int(plane.max())) for plane in planes]
    if min(low for low, _ in plane_ranges) < 0:
        raise BadParameter(
            "The labels contain negative numbers. Number the objects from 1, and use 0 for the background."
        )
    return max(high for _, high in plane_ranges)


def _compute_digest(image: Volume) -> str:
    """Return the BLAKE3 hash of an image [1, Z, Y, X]: its dtype, shape and pixels."""
    digest = blake3(f"{image.dtype.name} {image.shape}".encode())
    for z in range(image.shape[1]):
        digest.update(np.ascontiguousarray(image.read(z, z + 1)).view(np.uint8).data)
    return digest.hexdigest()
