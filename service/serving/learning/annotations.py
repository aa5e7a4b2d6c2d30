"""The store of annotated stacks, which are kept until their owner deletes them."""

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
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from service.core.buffers import make_allocator
from service.core.errors import BadParameter, OutOfStorage, SwitchedOff, UnknownAnnotation
from service.core.files.whole_file import sync_to_disk
from service.core.quantities import VoxelSize
from service.core.types import Segmentation, Volume, label_dtype
from service.formats.tiff import writer as tiff_writer
from service.serving.learning.annotation import IMAGE, LABELS, Annotation, NewAnnotation, Origin, Region
from service.serving.storage.disk import translate_disk_faults
from service.serving.storage.scratch import MARKER, make_locked_folder, sweep

RECORD = "annotation.json"
# Of a folder that is being written.
PARTIAL_PREFIX = ".part-"
_ID = re.compile(r"[0-9a-f]{32}")
# Numbers up to this are counted in a table, larger ones by sorting, of which there may be so many.
_TABLE_NUMBERS, _MOST_SORTED = 2**24, 2**20
# Of one owner: each call of an owner reads all of their records.
MOST_STACKS = 10_000


class Usage(NamedTuple):
    """Number of annotated stacks, and the bytes of their files."""

    stacks: int
    nbytes: int


class AnnotationStore:
    """A folder with a folder for every annotated stack. Safe to use from threads, and by several processes.

    `quota_bytes` and `most` annotated stacks: of one owner. Nothing is deleted for something new: labels are somebody's
    work.
    Methods raise OutOfStorage for a full disk and StorageUnavailable for other faults of it.
    """

    def __init__(self, folder: Path, *, quota_bytes: int, most: int = MOST_STACKS) -> None:
        self.folder, self.quota_bytes, self.most = folder, quota_bytes, most
        # Held while the room of an owner is counted and taken.
        self._lock = threading.Lock()
        # What was read of each folder, and of which record.
        self._known: dict[str, tuple[tuple[int, int], Annotation]] = {}

    def clean_up(self) -> None:
        """Delete what processes that were killed have written by half."""
        sweep(self.folder, PARTIAL_PREFIX)

    def measure(self) -> Usage:
        """Return how much is kept for all owners together."""
        sizes = [annotation.nbytes for annotation in self._all()]
        return Usage(len(sizes), sum(sizes))

    def check_room(self, owner: str | None) -> None:
        """Raise SwitchedOff where nothing is kept, and OutOfStorage for an owner whose room is used up."""
        if not self.quota_bytes:
            raise SwitchedOff("Annotated stacks are not kept here; the operator has set annotations.quota_bytes to 0.")
        self._check_quota(owner, 1)

    def keep(self, image: Volume, labels: Volume, stated: NewAnnotation) -> Annotation:
        """Write image and labels, both of one channel and one shape; they are there whole or not at all.

        Raises BadParameter for another shape and for numbers that are no labels, SwitchedOff, and OutOfStorage beyond
        the quota.
        """
        if labels.shape != image.shape or image.shape[0] != 1:
            raise BadParameter(f"Image and labels differ in shape: {image.shape[1:]} and {labels.shape[1:]}.")
        self.check_room(stated.owner)
        self.clean_up()
        number = uuid.uuid4().hex
        partial = self.folder / f"{PARTIAL_PREFIX}{number}"
        with translate_disk_faults():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = make_locked_folder(partial)
            try:
                nbytes = _write(partial, image, labels, stated)
                with self._lock:
                    self._check_quota(stated.owner, nbytes)
                    partial.rename(self.folder / number)
                (self.folder / number / MARKER).unlink()
                sync_to_disk(self.folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                os.close(lock)
        return self.find(number, stated.owner)

    def find(self, annotation: str, owner: str | None, *, everyone: bool = False) -> Annotation:
        """Return an annotated stack of this owner, or with `everyone` of any. Raises UnknownAnnotation."""
        found = _read(self.folder / annotation) if _ID.fullmatch(annotation) else None
        if found is None or not (everyone or found.owner == owner):
            raise UnknownAnnotation("There is no such annotated stack: its id is wrong, or it was deleted.")
        return found

    def newest(self, owner: str | None, *, everyone: bool = False) -> list[Annotation]:
        """Return the annotated stacks of this owner, or with `everyone` of all, newest first."""
        found = (annotation for annotation in self._all() if everyone or annotation.owner == owner)
        return sorted(found, key=attrgetter("created"), reverse=True)

    def delete(self, annotation: str, owner: str | None, *, everyone: bool = False) -> None:
        """Delete an annotated stack. Raises UnknownAnnotation."""
        found = self.find(annotation, owner, everyone=everyone)
        with translate_disk_faults(), suppress(FileNotFoundError):
            # The record goes first: without it there is no annotated stack.
            (found.folder / RECORD).unlink()
            shutil.rmtree(found.folder)

    def _check_quota(self, owner: str | None, nbytes: int) -> None:
        kept = self.newest(owner)
        if len(kept) >= self.most:
            raise OutOfStorage(f"You keep {len(kept):,} annotated stacks, and no more are kept; delete some.")
        if (used := sum(annotation.nbytes for annotation in kept)) + nbytes > self.quota_bytes:
            raise OutOfStorage(
                f"Your annotated stacks take {used:,} of {self.quota_bytes:,} bytes (annotations.quota_bytes), and"
                f" {nbytes:,} more have no room; delete some, or keep a smaller stack."
            )

    def _all(self) -> list[Annotation]:
        """Return all annotated stacks, of which only new records are read: an owner may have thousands."""
        known, found = self._known, dict[str, tuple[tuple[int, int], Annotation]]()
        with translate_disk_faults():
            names = [entry.name for entry in os.scandir(self.folder)] if self.folder.is_dir() else []
        for name in filter(_ID.fullmatch, names):
            try:
                status = os.stat(f"{self.folder}/{name}/{RECORD}")  # noqa: PTH116 - a Path takes as long again
            except OSError:
                continue
            record = status.st_ino, status.st_mtime_ns
            one = known.get(name)
            if one is not None and one[0] == record:
                found[name] = one
            elif (annotation := _read(self.folder / name)) is not None:
                found[name] = record, annotation
        self._known = found
        return [annotation for _, annotation in found.values()]


def _read(folder: Path) -> Annotation | None:
    """Return the annotated stack in a folder; None where there is none, or a record that is damaged."""
    try:
        facts: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        z, y, x = facts.pop("shape")
        size, region = facts.pop("voxel_size"), facts.pop("region")
        return Annotation(
            folder=folder,
            shape=(z, y, x),
            voxel_size=None if size is None else VoxelSize(*size),
            region=None if region is None else Region.parse(region, (z, y, x)),
            origin=Origin(**facts.pop("origin")),
            **facts,
        )
    except (OSError, ValueError, TypeError, LookupError, BadParameter):
        return None


def _write(folder: Path, image: Volume, labels: Volume, stated: NewAnnotation) -> int:
    """Write image, labels and the record into a folder; return the bytes of image and labels."""
    tiff_writer.write_image(image, folder / IMAGE)
    objects = _write_labels(labels, folder / LABELS, image.voxel_size, stated.region)
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    facts = {
        "name": stated.name,
        "owner": stated.owner,
        "shape": image.shape[1:],
        "voxel_size": None if image.voxel_size is None else tuple(image.voxel_size),
        "region": None if stated.region is None else str(stated.region),
        "objects": objects,
        "digest": _digest(image),
        "origin": asdict(stated.origin),
        "nbytes": nbytes,
        "created": time.time(),
    }
    (folder / RECORD).write_text(json.dumps(facts), encoding="utf-8")
    sync_to_disk(*folder.iterdir(), folder)
    return nbytes


def _write_labels(labels: Volume, path: Path, voxel_size: VoxelSize | None, region: Region | None) -> int:
    """Write labels as uint16, or uint32 where there are more, and return the number of objects in the region."""
    planes, highest = range(labels.shape[1]), _highest_number(labels)
    counted = np.zeros(min(highest, _TABLE_NUMBERS) + 1, np.bool_)
    large = np.empty(0, np.uint32)
    pixels = make_allocator(path.parent)(labels.shape[1:], label_dtype(highest))
    z0, z1 = (0, len(planes)) if region is None else region.z
    inside = (slice(None), slice(None)) if region is None else region.slices[1:]
    for z in planes:
        pixels[z] = labels.read(z, z + 1)[0, 0]
        if z0 <= z < z1:
            part = pixels[z][inside]
            counted[part[part < len(counted)]] = True
            large = np.union1d(large, part[part >= len(counted)])
            if len(large) > _MOST_SORTED:
                raise BadParameter(
                    f"The labels have more than {_MOST_SORTED:,} numbers beyond {_TABLE_NUMBERS:,}; number the objects"
                    " from 1 on."
                )
    objects = int(np.count_nonzero(counted[1:])) + len(large)
    tiff_writer.write(Segmentation(pixels, "labels", voxel_size, objects), path)
    return objects


def _highest_number(labels: Volume) -> int:
    """Return the highest of all labels. Raises BadParameter for one below 0."""
    planes = (labels.read(z, z + 1) for z in range(labels.shape[1]))
    extremes = [(int(plane.min()), int(plane.max())) for plane in planes]
    if min(low for low, _ in extremes) < 0:
        raise BadParameter("The labels have numbers below 0; objects are numbered from 1, and background is 0.")
    return max(high for _, high in extremes)


def _digest(image: Volume) -> str:
    """Return BLAKE3 of the pixels of an image [1, Z, Y, X], its shape and its dtype."""
    digest = blake3(f"{image.dtype.name} {image.shape}".encode())
    for z in range(image.shape[1]):
        digest.update(np.ascontiguousarray(image.read(z, z + 1)).view(np.uint8).data)
    return digest.hexdigest()
