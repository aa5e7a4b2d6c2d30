"""Tests of averaging the weights of training runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.recipes.average_weights import main


def test_weights_are_averaged_by_their_shares_in_half_precision(tmp_path: Path) -> None:
    for run, value in (("1", 1.0), ("2", 3.0)):
        (tmp_path / run).mkdir()
        tensors = {"layer": torch.full((2, 3), value), "count": torch.tensor(7)}
        save_file(tensors, tmp_path / run / "weights.safetensors")
    main([str(tmp_path), "1:0.25", "2:0.75"])
    averaged = load_file(tmp_path / "weights.safetensors")
    assert averaged["layer"].dtype == torch.float16
    assert averaged["layer"].flatten().tolist() == pytest.approx([2.5] * 6)
    assert averaged["count"] == 7
