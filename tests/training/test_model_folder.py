from pathlib import Path

import torch
from safetensors.torch import load_file

from service.training.model_folder import draft_content, save_weights


def test_saved_weights_load_again_even_with_shared_layers(tmp_path: Path) -> None:
    network = torch.nn.ModuleDict({"one": torch.nn.Conv3d(1, 2, 3)})
    network["other"] = network["one"]
    save_weights(network, tmp_path)
    state = load_file(tmp_path / "weights.safetensors")
    assert state.keys() == network.state_dict().keys()
    assert all(torch.equal(state[f"{name}.weight"], network["one"].weight) for name in network)


def test_summary_contains_the_number_of_annotated_stacks() -> None:
    assert draft_content(None, "mine", ["a"])["summary"] == "Trained on 1 annotated stack."
    assert draft_content(None, "mine", ["a", "b"])["summary"] == "Trained on 2 annotated stacks."
