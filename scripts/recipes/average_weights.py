"""Average the weights of several training runs, and store them in half precision.

    python -m scripts.recipes.average_weights FOLDER RUN:SHARE ...

The weights of a run are read from `FOLDER/RUN/weights.safetensors`. The mean is written to
`FOLDER/weights.safetensors`. The sum of the shares is usually 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def average_weights(weights: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted mean of floating-point tensors in half precision, and other tensors of the first run."""
    averaged = {}
    for name, first in weights[0].items():
        if not first.is_floating_point():
            averaged[name] = first
            continue
        terms = [share * run[name].double() for run, share in zip(weights, shares, strict=True)]
        averaged[name] = torch.stack(terms).sum(dim=0).half().contiguous()
    return averaged


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("runs", nargs="+", metavar="RUN:SHARE", help="a run and its share in the mean")
    options = parser.parse_args(arguments)
    pairs = [run.rpartition(":") for run in options.runs]
    weights = [load_file(options.folder / run / "weights.safetensors") for run, _, _ in pairs]
    averaged = average_weights(weights, [float(share) for _, _, share in pairs])
    save_file(averaged, options.folder / "weights.safetensors")


if __name__ == "__main__":
    main()
