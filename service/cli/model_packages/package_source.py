"""Options that select the source of a model package, and access to its files."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.cli.model_packages.download import DEFAULT_MAX_BYTES, Downloader, check_sha256
from service.cli.model_packages.remote_package import COLLECTION_URL, RemotePackage, is_remote
from service.cli.options import integer
from service.cli.progress import show_progress


def add_download_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for packages that are downloaded."""
    parser.add_argument("--sha256", metavar="HEX", help="Expected SHA-256 of the file")
    parser.add_argument(
        "--max-bytes",
        type=integer,
        default=DEFAULT_MAX_BYTES,
        metavar="N",
        help="Maximum size of a downloaded file in bytes (default: %(default)s)",
    )
    parser.add_argument("--allow-http", action="store_true", help="Also download over HTTP without encryption")
    parser.add_argument(
        "--collection",
        default=COLLECTION_URL,
        metavar="URL",
        help="Collection (JSON) that contains the names of bioimage.io models (default: %(default)s)",
    )


def list_download_options(options: argparse.Namespace) -> list[str]:
    """Return the words of the command line for the download options that differ from the defaults."""
    words = [] if options.sha256 is None else ["--sha256", options.sha256]
    words += [] if options.max_bytes == DEFAULT_MAX_BYTES else ["--max-bytes", str(options.max_bytes)]
    words += ["--allow-http"] if options.allow_http else []
    return words + ([] if options.collection == COLLECTION_URL else ["--collection", options.collection])


@contextmanager
def provide_package(options: argparse.Namespace, models_folder: Path) -> Iterator[Path]:
    """Yield the path of the package. Downloads are written next to the models, and deleted when the context exits."""
    if not is_remote(options.package):
        if options.sha256 is not None:
            check_sha256(Path(options.package), options.sha256, options.package)
        yield Path(options.package)
        return
    models_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=models_folder) as scratch:
        source = RemotePackage(options.package, options.sha256, options.collection)
        downloader = Downloader(options.max_bytes, options.allow_http)
        with show_progress() as bar:
            package = source.download(
                Path(scratch), downloader, lambda done, total: bar.show_step("downloading", done, total or done)
            )
        yield package
