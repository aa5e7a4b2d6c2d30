"""Advice on the results of one stack: suggestions that were tried, and the result with the highest confidence."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

from service.core.quantities import Diameter
from service.inference.diameter.advice import Correction

ADVISE = """async ([jobs, results]) => {
  const advice = await import("./page/result/advice.js");
  return jobs.map((job) => {
    const suggestion = advice.getSuggestion(job);
    const tried = suggestion && advice.findTriedResult(job, suggestion, results);
    return [tried?.id ?? null, advice.findBetterResult(job, results)?.id ?? null];
  });
}"""

# Shows the notes of a job. Returns their text, and the parameters with which its button segments the stack again.
SHOW_CORRECTION = """async (job) => {
  const { createNotes } = await import("./page/result/notes.js");
  let parameters = null;
  const notes = createNotes(job, [job], async (changes) => { parameters = changes; }, () => {});
  notes.querySelector(".advice button").click();
  return [[...notes.children].map((item) => item.textContent), parameters];
}"""


def make_job(
    job_id: str, confidence: float | None, suggestion: str = "", used_diameter: str | None = None, **parameters: str
) -> dict[str, Any]:
    model = parameters.get("model", "nuclei")
    doubt = {"try": suggestion, "detail": ""} if suggestion else None
    report = {"id": job_id, "state": "done", "objects": 5, "model": f"{model}/1", "parameters": parameters}
    return report | {"confidence": confidence, "doubt": doubt, "diameter": used_diameter}


# The diameter of 10 voxels gives a better result, and its advice is the estimated diameter, which gave a worse result.
ESTIMATED = make_job("estimated", 0.012, "", "20,50,50px; estimated")
CUSTOM = make_job("custom", 0.17, "diameter=20,50,50px", "10px; stated", diameter="10px")
OTHER_CHANNEL = make_job("other", 0.99, "", "20,50,50px; estimated", channel="1")
# The difference from the confidence of CUSTOM is too small for a recommendation.
MEMBRANES = make_job("membranes", 0.16, "", "20,50,50px; estimated", model="membranes")
EMPTY = make_job("empty", None, "model=membranes") | {"objects": 0}
NOT_TRIED = CUSTOM | {"doubt": {"try": "diameter=4px"}}


def test_tried_suggestions_and_better_results_are_found(module_page: Page) -> None:
    expected = [
        (CUSTOM, ["estimated", None]),
        (ESTIMATED, [None, "custom"]),
        (OTHER_CHANNEL, [None, None]),
        (MEMBRANES, [None, None]),
        (EMPTY, ["membranes", "custom"]),
        (NOT_TRIED, [None, None]),
    ]
    results = [ESTIMATED, CUSTOM, OTHER_CHANNEL, MEMBRANES, EMPTY]
    assert module_page.evaluate(ADVISE, [[job for job, _ in expected], results]) == [advice for _, advice in expected]


def test_note_about_a_replaced_diameter_is_always_shown_and_can_be_reverted(
    module_page: Page,
) -> None:
    correction = Correction(Diameter((4.0, 18.0, 18.0), "px"), is_for_flat=True)
    note = correction.make_note(Diameter((18.0,), "px"), (18.0, 18.0, 18.0), 0.65)
    job = make_job("flat", 0.7, "", "4,18,18px; estimated", diameter="18px")
    texts, parameters = module_page.evaluate(SHOW_CORRECTION, job | {"warnings": [note, "one", "two", "three"]})
    assert parameters == {"diameter": "18,18,18px"}
    assert len(texts) == 2
    assert "specified object diameter, 18 voxels, cannot be their depth" in texts[0]
    assert "18 voxels wide and 4 voxels deep" in texts[0]
    assert "set “Object diameter" not in texts[0]
    assert texts[1].startswith("3 notes")
