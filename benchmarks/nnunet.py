"""Compare the time of a request with that of nnU-Net's own predictor, for the same model and stack, one after another.

Create the model in nnU-Net's environment, and pass its interpreter to this script:

    NNUNET/bin/python scripts/fixtures/nnunet.py --benchmark FOLDER
    python benchmarks/nnunet.py FOLDER/Dataset004_Benchmark --original NNUNET/bin/python
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from service.core.config import Settings
from service.core.types import Options, Volume
from service.inference.preprocessing.resample import prepare_tensor
from service.inference.runner.model_runner import ModelRunner
from service.inference.segment import segment
from service.models.importers.import_model import import_model

# Program that runs the original predictor once for each line of its input, and prints the seconds.
ORIGINAL = """
import sys, time
import numpy as np, torch
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
folder, image, mirroring, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False, use_mirroring=mirroring == "True")
predictor.initialize_from_trained_model_folder(folder, None)
pixels = np.load(image).astype(np.float32)
for _ in sys.stdin:
    start, cpu_start = time.perf_counter(), time.process_time()
    labels = predictor.predict_single_npy_array(pixels, {"spacing": (1, 1, 1)})
    seconds = time.perf_counter() - start, time.process_time() - cpu_start
    np.save(image + ".labels.npy", labels)
    print("seconds", *seconds, flush=True)
"""


class Duration(NamedTuple):
    """Wall-clock time and CPU time in seconds."""

    seconds: float
    cpu_seconds: float


def measure(function: Callable[[], object]) -> Duration:
    """Measure one call."""
    start, cpu_start = time.perf_counter(), time.process_time()
    function()
    return Duration(time.perf_counter() - start, time.process_time() - cpu_start)


class OriginalPredictor:
    """nnU-Net's predictor, in a process with the environment of nnU-Net."""

    def __init__(self, python: Path, model: Path, image: Path, *, mirroring: bool) -> None:
        arguments = [str(model), str(image), str(mirroring), str(torch.get_num_threads())]
        self._process = subprocess.Popen(
            [python, "-c", ORIGINAL, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._image = image

    def run(self) -> Duration:
        """Predict the labels of the image."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return Duration(*map(float, line.split()[1:]))
        raise RuntimeError("The original predictor failed.")

    def close(self) -> np.ndarray:
        """End the process, and return the labels."""
        self._process.communicate()
        labels: np.ndarray = np.load(f"{self._image}.labels.npy")
        return labels


def main() -> None:
    """Print the medians of both programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--original", type=Path, required=True, help="Python interpreter with nnunetv2")
    parser.add_argument("--shape", type=int, nargs=3, default=(64, 192, 192))
    parser.add_argument("--mirroring", action="store_true", help="mirror the windows, as with quality=best")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--repeats", type=int, default=3)
    parsed = parser.parse_args()
    folder = next(parsed.model.glob("**/plans.json")).parent
    pixels = np.random.default_rng(0).integers(0, 2000, (1, *parsed.shape)).astype(np.uint16)
    options = Options(output="classes", quality="best" if parsed.mirroring else "fast", overlap=0.5)
    with tempfile.TemporaryDirectory() as scratch:
        image, models = Path(scratch, "image.npy"), Path(scratch, "models")
        np.save(image, pixels)
        start = time.perf_counter()
        spec = import_model(folder, models, {}, prepare=prepare_tensor).spec
        print(f"import: {time.perf_counter() - start:.1f} s")
        settings = Settings.model_validate(
            {"models": {"folder": str(models)}, "engine": {"precision": parsed.precision}, "device": {"name": "cpu"}}
        )
        runner = ModelRunner(spec, settings)
        runner.warm_up()
        original = OriginalPredictor(parsed.original, folder, image, mirroring=parsed.mirroring)
        volume, results = Volume.from_array(pixels), list[np.ndarray]()

        def run_service() -> None:
            results.append(segment(runner, volume, options).segmentation.pixels)

        rows = [(original.run(), measure(run_service)) for _ in range(parsed.repeats + 1)][1:]
        agreement = (original.close() == results[-1]).mean()
    for name, durations in zip(("nnU-Net", "StackSeg"), zip(*rows, strict=True), strict=True):
        seconds, cpu_seconds = (statistics.median(values) for values in zip(*durations, strict=True))
        print(f"{name}: {seconds:.2f} s, {cpu_seconds:.2f} CPU s")
    ratios = sorted(before.seconds / after.seconds for before, after in rows)
    cpu_ratios = sorted(before.cpu_seconds / after.cpu_seconds for before, after in rows)
    print(
        f"{runner.describe_engine()}: {ratios[len(ratios) // 2]:.2f} times as fast "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}), {cpu_ratios[len(ratios) // 2]:.2f} per CPU second; "
        f"{agreement:.4%} of the labels are equal"
    )


if __name__ == "__main__":
    main()
