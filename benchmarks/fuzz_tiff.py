"""Fuzz the TIFF reader, guided by coverage: each file must be refused with a known error or read as described.

    pip install atheris
    python benchmarks/fuzz_tiff.py --seeds FOLDER --seconds 600

Reads each input with the functions that a sandbox process calls, under the same memory limit. Saves an input in the
folder `--findings` if it raises any other error, or if it needs more than one CPU second or 512 MB. atheris is not a
development dependency, because it has no wheels for some of the Python versions that StackSeg supports.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["service.formats", "tifffile"]):
    from service.core.errors import RequestError
    from service.core.types import Selection
    from service.formats import stack_reader

LIMIT_BYTES = 2**34
MEMORY_BYTES = 2 * 2**30
SELECTIONS = (Selection(), Selection(channel=0, time=0))


class Fuzzer:
    """Function that reads one input; saves one input for each kind of failure."""

    def __init__(self, findings: Path) -> None:
        self._findings = findings
        self._scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self._path = self._scratch / "input.tif"

    def __call__(self, data: bytes) -> None:
        self._path.write_bytes(data)
        cpu_start, peak_before = time.process_time(), _peak_bytes()
        try:
            for selection in SELECTIONS:
                self._read(selection)
        except (RequestError, MemoryError):
            pass
        except Exception as error:  # noqa: BLE001 - any other error is a finding
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            self._save_finding(
                data, f"{type(error).__name__} at {[f'{Path(f.filename).name}:{f.lineno}' for f in frames]}"
            )
        if time.process_time() - cpu_start > 1:
            self._save_finding(data, "slow")
        if _peak_bytes() - peak_before > 2**29:
            self._save_finding(data, "memory")

    def _read(self, selection: Selection) -> None:
        described = stack_reader.inspect(self._path, selection, LIMIT_BYTES)
        volume = stack_reader.read(self._path, selection, LIMIT_BYTES, self._scratch)
        if volume.shape != described.shape:
            raise AssertionError(f"described as {described.shape}, read as {volume.shape}")

    def _save_finding(self, data: bytes, reason: str) -> None:
        name = hashlib.sha256(reason.encode()).hexdigest()[:12]
        if not (self._findings / name).exists():
            (self._findings / name).write_bytes(data)
            (self._findings / f"{name}.txt").write_text(reason + "\n", encoding="utf-8")
            sys.stderr.write(f"found {name}: {reason}\n")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seeds", type=Path, required=True, help="folder of initial TIFFs; those above 20 kB are skipped"
    )
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    options = parser.parse_args()
    options.findings.mkdir(exist_ok=True)
    corpus = Path(tempfile.mkdtemp(prefix="corpus-"))
    for number, path in enumerate(sorted(options.seeds.rglob("*"))):
        if path.is_file() and path.stat().st_size < 20_000:
            (corpus / str(number)).write_bytes(path.read_bytes())
    warnings.simplefilter("ignore")
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    arguments = ["-max_len=20000", "-rss_limit_mb=0", "-malloc_limit_mb=0", f"-max_total_time={options.seconds}"]
    atheris.Setup([sys.argv[0], str(corpus), *arguments], Fuzzer(options.findings))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
