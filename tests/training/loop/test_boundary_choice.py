import numpy as np
import pytest
import torch
from new_models import make_new_spec
from numpy.typing import NDArray

from service.inference.decoding.external import boundaries
from service.models.spec import ModelSpec
from service.training.loop.boundary_choice import choose_boundary_decoding, match_boundary_objects
from service.training.loop.decoding_choice import ScoredPart
from service.training.targets.boundaries import find_boundaries
from service.training.targets.choice import BOUNDARY_DECODING

OFFSETS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 6))


def make_spec(offsets: tuple[tuple[int, int, int], ...] = ()) -> ModelSpec:
    names = ["boundary", *(f"affinity_{index}" for index in range(len(offsets)))]
    decoding = BOUNDARY_DECODING.model_copy(update={"affinities": offsets})
    return make_new_spec(outputs=names, decoding=decoding.model_dump(), input={"diameter": None})


@pytest.fixture(scope="module")
def truth() -> NDArray[np.uint8]:
    """Labels [24, 30, 40] of boxes of 12 x 15 x 20 voxels."""
    return np.kron(np.arange(1, 9).reshape(2, 2, 2), np.ones((12, 15, 20))).astype(np.uint8)


def make_part(truth: NDArray[np.uint8], certainty: float = 3.0, offset: float = 0.0) -> ScoredPart:
    """Return the scores of a network that finds boundaries, with a tendency towards or away from them."""
    labels = torch.from_numpy(truth.astype(np.int64))[None]
    boundary = find_boundaries(labels, torch.ones_like(labels, dtype=torch.bool))
    noise = torch.from_numpy(np.random.default_rng(0).normal(0, 0.5, truth.shape)).float()
    return ScoredPart((torch.where(boundary, certainty, -certainty) + noise + offset)[None], truth)


@pytest.mark.parametrize("offset", [-2.5, 0.0, 2.0])
def test_chosen_decoding_suits_the_bias_of_the_network(truth: NDArray[np.uint8], offset: float) -> None:
    part, spec = make_part(truth, offset=offset), make_spec()
    decoding, counts = choose_boundary_decoding([part, part], spec)
    assert (counts.true, counts.f1) == (16, 1.0)
    assert counts.voi == pytest.approx(0, abs=0.3)
    found, objects = match_boundary_objects(part, spec.model_copy(update={"decoding": decoding}))
    assert (found.f1, len(objects)) == (1.0, 8)


def test_untrained_networks_are_not_cut_into_millions_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A multicut of supervoxels with a few voxels each takes minutes."""
    monkeypatch.setattr(boundaries, "merge_by_multicut", lambda *_: pytest.fail("multicut"))
    truth = np.ones((16, 16, 16), np.uint8)
    scores = torch.from_numpy(np.random.default_rng(0).normal(3, 0.5, (1, 1, 16, 16, 16))).float()
    decoding, counts = choose_boundary_decoding([ScoredPart(scores, truth)], make_spec())
    assert decoding.agglomeration != "multicut"
    assert counts.true == 1


def test_affinities_distinguish_true_from_false_boundaries(truth: NDArray[np.uint8]) -> None:
    """The network predicts a false boundary in the middle of the boxes, but long affinities connect its sides."""
    boundary = make_part(truth).scores[0, 0].clone()
    boundary[:, :, [9, 10, 29, 30]] = boundary[:, :, [19, 20, 19, 20]]
    connected = [np.roll(truth, tuple(-distance for distance in offset), (0, 1, 2)) == truth for offset in OFFSETS]
    affinities = torch.from_numpy(np.where(connected, 3, -3)).float()
    affinities[:3] = -boundary
    scores = torch.cat([boundary[None], affinities])[None]
    false = choose_boundary_decoding([ScoredPart(scores[:, :1], truth)], make_spec()).counts
    true = choose_boundary_decoding([ScoredPart(scores, truth)], make_spec(OFFSETS)).counts
    assert false.f1 < 0.5
    assert true.f1 > 0.9


def test_unknown_voxels_are_not_counted(truth: NDArray[np.uint8]) -> None:
    unknown = np.zeros(truth.shape, np.bool_)
    unknown[:, :, 20:] = True
    part = make_part(truth)._replace(unknown=unknown)
    counts = choose_boundary_decoding([part], make_spec()).counts
    assert (counts.true, counts.voxels) == (4, truth.size // 2)
