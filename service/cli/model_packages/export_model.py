"""`stackseg models export NAME`: write a model as a file that other programs can run.

`service.cli.models` imports this module only when it runs, because the import of torch is slow.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from service.core.config import Settings
from service.core.errors import BadParameter
from service.core.types import Selection, Volume
from service.formats import stack_reader
from service.inference.preprocessing.resample import prepare_tensor
from service.models.exporters import export_model as exporter
from service.models.spec import DOI_PATTERN, Citation, ModelSpec


def export_model(spec: ModelSpec, options: argparse.Namespace, settings: Settings) -> int:
    """Write a model to a file, and print notes for the operator. Raises BadParameter for inconsistent options."""
    path: Path = options.out
    export_format = _choose_format(options)
    if path.exists() and not options.force:
        raise BadParameter(f"{path} already exists. Choose another name, or use --force to replace the file.")
    if not path.parent.is_dir():
        raise BadParameter(f"--out: the folder {path.parent} does not exist.")
    authors, citations = tuple(map(_check_author, options.author)), tuple(map(_parse_citation, options.cite))
    spec = spec.model_copy(update={"authors": authors or spec.authors, "cite": citations or spec.cite})
    request = exporter.ExportRequest(path, export_format, _read_sample(spec, settings))
    notes = exporter.export_model(spec, request, prepare_tensor)
    sys.stdout.write(f"{path}: {spec.identifier}, {path.stat().st_size / 1e6:.1f} MB\n")
    for note in notes:
        sys.stdout.write(f"note: {note}\n")
    return 0


def _choose_format(options: argparse.Namespace) -> exporter.ExportFormat:
    path: Path = options.out
    formats: dict[str, exporter.ExportFormat] = {suffix: name for name, suffix in exporter.SUFFIXES.items()}
    export_format = formats.get(path.suffix)
    if export_format is None or options.format not in {None, export_format}:
        expected = ", ".join(formats) if options.format is None else exporter.SUFFIXES[options.format]
        raise BadParameter(f"--out: the suffix of {path} is {path.suffix!r}; expected {expected}.")
    return export_format


def _read_sample(spec: ModelSpec, settings: Settings) -> Volume | None:
    if spec.sample is None:
        return None
    return stack_reader.read(spec.folder / spec.sample.input, Selection(), settings.limits.decoded_bytes)


def _check_author(name: str) -> str:
    if not name.strip() or "/" in name or "\\" in name:
        raise BadParameter(f"--author: {name!r} is not a name without slashes.")
    return name.strip()


def _parse_citation(text: str) -> Citation:
    doi = re.sub(r"^https?://(dx\.)?doi\.org/", "", text.strip())
    if re.fullmatch(DOI_PATTERN, doi) is None:
        raise BadParameter(f"--cite: {text!r} is not a DOI, such as 10.1038/s41592-018-0261-2.")
    return Citation(text=f"https://doi.org/{doi}", doi=doi)
