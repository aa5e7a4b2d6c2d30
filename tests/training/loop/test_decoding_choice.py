import numpy as np
import pytest
import torch
from new_models import make_new_spec

from scripts.recipes.synthetic_nuclei import synthesize
from service.models.spec_parts import Instances
from service.training.loop.decoding_choice import ScoredPart, choose_decoding, match_objects
from service.training.loop.object_scores import ObjectCounts
from service.training.targets.instances import compute_instance_targets

DECODING = Instances(kind="instances", threshold=0.5, min_confidence=0.8, minimum_size=8)
SPEC = make_new_spec(decoding=DECODING)


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    return synthesize(np.random.default_rng(0), (24, 48, 48))[1]


def make_part(truth: np.ndarray, confidence: float, **fields: np.ndarray) -> ScoredPart:
    """Return the scores of a network that separates all objects, with this foreground probability."""
    foreground, distance = torch.from_numpy(compute_instance_targets(truth)).logit(eps=1e-3)
    foreground = foreground.clamp(max=float(np.log(confidence / (1 - confidence))))
    return ScoredPart(torch.stack([foreground, distance])[None], truth, **fields)


def test_correct_objects_of_an_uncertain_network_are_not_removed(truth: np.ndarray) -> None:
    count = len(np.unique(truth)) - 1
    assert match_objects(make_part(truth, 0.75), SPEC)[0] == ObjectCounts(count, 0, 0, 0)
    decoding, counts = choose_decoding([make_part(truth, 0.75)], SPEC)
    assert decoding.min_confidence < 0.74
    assert counts.f1 > 0.9
    assert counts == match_objects(make_part(truth, 0.75), SPEC.model_copy(update={"decoding": decoding}))[0]


def test_thresholds_of_the_base_model_are_kept_if_others_are_not_better(truth: np.ndarray) -> None:
    assert choose_decoding([make_part(truth, 0.95)], SPEC).decoding == DECODING


def test_objects_in_unknown_regions_are_not_wrong(truth: np.ndarray) -> None:
    known_truth = truth.copy()
    known_truth[..., 24:] = 0
    unknown = np.zeros(truth.shape, np.bool_)
    unknown[..., 24:] = True
    part = make_part(truth, 0.95)._replace(truth=known_truth)
    assert match_objects(part, SPEC)[0].precision < 0.7
    assert match_objects(part._replace(unknown=unknown), SPEC)[0].precision > 0.9


def test_objects_that_continue_in_unknown_planes_are_correct(truth: np.ndarray) -> None:
    unknown = np.ones(truth.shape, np.bool_)
    unknown[10:13] = False
    known_truth = np.where(unknown, 0, truth)
    counts = match_objects(make_part(truth, 0.95)._replace(truth=known_truth, unknown=unknown), SPEC)[0]
    assert counts.true == len(np.unique(known_truth)) - 1
    assert min(counts.precision, counts.recall) > 0.9
