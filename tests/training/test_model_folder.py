from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from service.core.types import Volume
from service.models.spec import ModelSpec
from service.training.model_folder import draft_content, draft_model, save_weights
from service.training.stacks.annotated_stack import AnnotatedStack


def test_saved_weights_load_again_even_with_shared_layers(tmp_path: Path) -> None:
    network = torch.nn.ModuleDict({"one": torch.nn.Conv3d(1, 2, 3)})
    network["other"] = network["one"]
    save_weights(network, tmp_path)
    state = load_file(tmp_path / "weights.safetensors")
    assert state.keys() == network.state_dict().keys()
    assert all(torch.equal(state[f"{name}.weight"], network["one"].weight) for name in network)


@pytest.mark.parametrize(("extents", "default"), [((2.0, 8.0, 8.0), "2,8,8px"), (None, None)])
def test_the_default_diameter_can_be_replaced_by_estimates_only_if_the_base_model_estimates(
    random_nuclei: ModelSpec, extents: tuple[float, float, float] | None, default: str | None
) -> None:
    pixels = np.zeros((4, 8, 8), np.uint8)
    stack = AnnotatedStack("a", Volume.from_array(pixels[None]), pixels, extents=extents)
    for estimates in (False, True):
        changes = {"diameter": 20.0, "estimate_diameter": estimates}
        base = random_nuclei.model_copy(update={"input": random_nuclei.input.model_copy(update=changes)})
        model_input = draft_model([stack], base, "mine", is_private=True)["input"]
        expected = {"default_diameter": default, "estimate_diameter": estimates and default is not None}
        assert model_input.items() >= expected.items()
    assert draft_model([stack], None, "mine", is_private=True)["input"]["estimate_diameter"] is False


def test_summary_contains_the_number_of_annotated_stacks() -> None:
    assert draft_content(None, "mine", ["a"])["summary"] == "Trained on 1 annotated stack."
    assert draft_content(None, "mine", ["a", "b"])["summary"] == "Trained on 2 annotated stacks."
