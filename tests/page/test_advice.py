"""Advice on the results of one stack: suggestions that were tried, and the result with the highest confidence."""

from __future__ import annotations

from typing import Any

from browsing import OpenPage
from live import LiveServer
from playwright.sync_api import expect

ADVISE = """async ([jobs, results]) => {
  const advice = await import("./page/result/advice.js");
  return jobs.map((job) => {
    const suggestion = advice.getSuggestion(job);
    const tried = suggestion && advice.findTriedResult(job, suggestion, results);
    return [tried?.id ?? null, advice.findBetterResult(job, results)?.id ?? null];
  });
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


def test_tried_suggestions_and_better_results_are_found(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_page(fake)
    expect(page.locator("#file")).to_be_attached()
    expected = [
        (CUSTOM, ["estimated", None]),
        (ESTIMATED, [None, "custom"]),
        (OTHER_CHANNEL, [None, None]),
        (MEMBRANES, [None, None]),
        (EMPTY, ["membranes", "custom"]),
        (NOT_TRIED, [None, None]),
    ]
    results = [ESTIMATED, CUSTOM, OTHER_CHANNEL, MEMBRANES, EMPTY]
    assert page.evaluate(ADVISE, [[job for job, _ in expected], results]) == [advice for _, advice in expected]
