"""A typical segmentation script without StackSeg, using tifffile, MONAI in eager FP32, and scikit-image.

python benchmarks/plain.py IN.tif OUT.tif [--model models/nuclei] [--sw-batch-size 1] [--overlap 0.25] [--device cpu]

For semantic segmentation models, the label is the class with the highest score. For instance segmentation models, the
objects are found with a watershed.

Prints a line of JSON: the seconds of each stage, CPU seconds, the number of objects, the seconds that StackSeg's
decoder takes for the same scores, and whether TF32 is allowed. By default, torch uses TF32 in convolutions on GPUs that
support it. Importing, loading the weights and a first forward pass are not measured, because a running server does not
repeat them.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from monai.inferers.utils import sliding_window_inference
from numpy.typing import NDArray
from skimage.feature import peak_local_max
from skimage.segmentation import watershed

from service.inference.decoding.decoders import make_decoder
from service.models.loader import load_network
from service.models.repository import read_spec
from service.models.spec import ModelSpec
from service.models.spec_parts import Instances, PercentileNormalization

Seconds = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, default=Path("models/nuclei"))
    parser.add_argument("--sw-batch-size", type=int, default=1)
    parser.add_argument("--overlap", type=float, default=0.25)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    spec = read_spec(options.model)
    normalisation = spec.input.normalisation
    assert isinstance(normalisation, PercentileNormalization), "This script supports only percentile normalization."
    network = load_network(spec).to(options.device)
    with torch.inference_mode():
        network(torch.zeros(1, 1, *spec.input.roi_size, device=options.device))

    seconds: Seconds = {}
    cpu_start, began = read_cpu_seconds(), time.perf_counter()

    def finish_stage(stage: str) -> None:
        nonlocal began
        now = time.perf_counter()
        seconds[stage], began = now - began, now

    image = tifffile.imread(options.input)
    finish_stage("read")

    low, high = np.percentile(image, (normalisation.low, normalisation.high))
    image = ((image - low) / (high - low)).astype(np.float32)
    finish_stage("normalise")

    with torch.inference_mode():
        scores = sliding_window_inference(
            torch.from_numpy(image)[None, None].to(options.device),
            spec.input.roi_size,
            options.sw_batch_size,
            network,
            overlap=options.overlap,
            mode="gaussian",
        ).cpu()
    finish_stage("windows")

    labels = decode(scores[0], spec)
    finish_stage("decode")

    tifffile.imwrite(options.output, labels.astype(np.uint16), compression="zlib", metadata={"axes": "ZYX"})
    finish_stage("write")
    cpu = read_cpu_seconds() - cpu_start

    began = time.perf_counter()
    with torch.inference_mode():
        kind = "labels" if isinstance(spec.decoding, Instances) else "classes"
        decoder = make_decoder(spec, labels.shape, kind, None)
        decoder.add(0, 0, scores)
        decoder.finish()
    decoder_seconds = time.perf_counter() - began
    objects, tf32 = int(labels.max()), allows_tf32(options.device)
    print(
        json.dumps(
            {"stages": seconds, "cpu": cpu, "objects": objects, "decode_by_stackseg": decoder_seconds, "tf32": tf32}
        )
    )


def allows_tf32(device: torch.device) -> bool:
    """Return whether torch's current settings allow TF32 in convolutions on `device`."""
    return device.type == "cuda" and torch.backends.cudnn.allow_tf32 and torch.cuda.is_tf32_supported()


def decode(scores: torch.Tensor, spec: ModelSpec) -> NDArray[Any]:
    """Convert scores [K, Z, Y, X] to class labels or object labels [Z, Y, X]."""
    if not isinstance(spec.decoding, Instances):
        return scores.argmax(0).numpy()
    probability = torch.sigmoid(scores).numpy()
    foreground = probability[spec.outputs.index(spec.decoding.foreground)] > spec.decoding.threshold
    distance = probability[spec.outputs.index(spec.decoding.distance)] * foreground
    markers = np.zeros(distance.shape, np.int32)
    peaks = peak_local_max(distance, min_distance=3, threshold_abs=spec.decoding.persistence, exclude_border=False)
    markers[tuple(peaks.T)] = np.arange(1, len(peaks) + 1)
    return watershed(-distance, markers, mask=foreground)


def read_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
