"""What a stack of one window costs a server beside the network, part by part, in a process of its own.

python benchmarks/parts.py [--model DIRECTORY] [--repeats 60]

Least CPU milliseconds of one thread for each part, which other work on the machine disturbs least. A busy server takes
up to twice as long for each of them, as the network keeps the caches to itself.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from end_to_end import ROOT, synthetic_nuclei
from share import as_tiff

from service.ascent import ascent
from service.core import hardware
from service.core.volume import Segmentation, Selection
from service.formats import tiff_reader
from service.formats.deflate import deflation
from service.formats.sandbox import Reader
from service.models.loader import load
from service.models.repository import ModelSpec, read_spec
from service.postprocess import make_decoder
from service.preprocess import normalised
from service.stitching import stitching


def least(work: Callable[[], object], repeats: int) -> float:
    """CPU milliseconds of the calling thread."""
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return 1000 * min(seconds)


def parts(spec: ModelSpec, folder: Path, reader: Reader) -> dict[str, Callable[[], object]]:
    """By name what a request for one window does beside the network, ready to be called."""
    content = as_tiff(synthetic_nuclei(spec.input.roi_size))
    file, limit = folder / "stack.tif", 2**30
    file.write_bytes(content)
    extract = tiff_reader.extract(file, Selection(), limit, folder)
    volume = extract.volume()
    image, _ = normalised(volume, spec)
    scores = load(spec)(image.tensor())
    ascent.prepare()
    deflation.prepare()
    stitching.prepare()

    def decode() -> Segmentation:
        decoder = make_decoder(spec, spec.input.roi_size, "labels", volume.voxel_size)
        decoder.add(0, 0, scores)
        return decoder.finish()

    segmentation = decode()
    return {
        "understand the file": lambda: tiff_reader.extract(file, Selection(), limit, folder),
        "map it": extract.volume,
        "both for one like an earlier one": lambda: reader.read(file, Selection(), folder),
        "normalise": lambda: normalised(volume, spec),
        "decode": decode,
        "write": lambda: tiff_reader.encoded(segmentation, deflation.compress),
        "look how much memory is free": hardware.available_memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "nuclei", help="of instances")
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with (
        torch.inference_mode(),
        tempfile.TemporaryDirectory(prefix="benchmark-") as folder,
        Reader(memory_bytes=2**30, seconds=60, decoded_bytes=2**30, processes=1) as reader,
    ):
        for name, work in parts(read_spec(options.model), Path(folder), reader).items():
            print(f"{name:32} {least(work, options.repeats):.2f}")


if __name__ == "__main__":
    main()
