"""The web UI while the service is stopped, restarted or does not respond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from browsing import OpenPage, check_accessibility, choose_file, press_segment
from fakes import FakeSegmenter, wait_until
from live import LiveServer, as_tiff, eager_settings, serve
from playwright.sync_api import Page, expect

STACK = as_tiff(np.full((4, 16, 16), 200, np.uint8))
# A lost connection must be visible after this time. Most of it passes before a hanging request counts as unanswered.
MAX_MILLISECONDS = 5000


def start(repository: Path, folder: Path | str, port: int = 0) -> Any:
    """Serve a fake segmenter with this jobs folder. Running jobs do not delay the shutdown."""
    settings = eager_settings(
        repository, models={"load": "all"}, jobs={"folder": folder}, server={"drain_seconds": 0.1}
    )
    return serve(settings, load=FakeSegmenter, port=port)


def submit_blocked_job(live: LiveServer, page: Page) -> None:
    """Segment a stack, and block the segmentation until the service has been restarted."""
    live.fake.gate.clear()
    choose_file(page, STACK)
    press_segment(page)
    expect(page.locator("#side")).to_contain_text("Segmenting")


def test_page_reconnects_after_a_restart_and_finds_its_jobs(
    bands_repository: Path, tmp_path: Path, open_page: OpenPage
) -> None:
    with start(bands_repository, tmp_path) as live:
        page, canceled_page = open_page(live), open_page(live)
        expect(page.locator("#start")).not_to_contain_text("deletes stacks and results")
        submit_blocked_job(live, page)
        expect(page.locator("#side")).to_contain_text("0% done")
        submit_blocked_job(live, canceled_page)
        wait_until(lambda: len(live.client.get("/jobs").json()["jobs"]) == 2)
    for lost_page in (page, canceled_page):
        expect(lost_page.locator("#side")).to_contain_text("Connection lost", timeout=MAX_MILLISECONDS)
        expect(lost_page.locator("#connection")).to_contain_text("This page reconnects automatically")
        expect(lost_page.get_by_role("progressbar")).to_have_count(0)
    expect(page.locator("#side")).to_contain_text("0% done")
    check_accessibility(page)
    canceled_page.get_by_role("button", name="Cancel").click()
    expect(canceled_page.locator("#side")).to_contain_text("The job is canceled as soon as the service responds")
    with start(bands_repository, tmp_path, live.port) as restarted:
        expect(page.locator("#summary")).to_contain_text("classes")
        expect(page.locator("#connection")).to_be_hidden()
        expect(canceled_page.locator("#side")).to_contain_text("The segmentation was canceled")
        wait_until(
            lambda: {job["state"] for job in restarted.client.get("/jobs").json()["jobs"]} <= {"done", "cancelled"}
        )


def test_page_announces_temporary_jobs_and_marks_those_that_are_gone(
    bands_repository: Path, open_page: OpenPage
) -> None:
    with start(bands_repository, "temporary") as live:
        page = open_page(live)
        choose_file(page, STACK)
        expect(page.locator(".run-box")).to_contain_text("deletes stacks and results when it stops")
        press_segment(page)
        page.get_by_role("tab", name="Export").click()
        expect(page.locator("#side")).to_contain_text("The service deletes this result when it stops")
        expect(page.locator("#side")).not_to_contain_text("The service stores this result until")
        page.get_by_role("button", name="New stack").click()
        submit_blocked_job(live, page)
    with start(bands_repository, "temporary", live.port):
        expect(page.locator("#side")).to_contain_text("The service no longer has this job")
        expect(page.locator("#side")).to_contain_text("Open the file again")
        expect(page.get_by_role("button", name="Segment", exact=True)).to_be_disabled()
        check_accessibility(page)
        page.get_by_role("button", name="New stack").click()
        missing_entries = page.locator(".recent li.missing")
        expect(missing_entries).to_have_count(2)
        expect(missing_entries.last).to_contain_text("no longer on the server")
        check_accessibility(page)
        missing_entries.last.get_by_role("button").first.click()
        expect(page.locator("#problem")).to_contain_text("There is no such job")
        expect(missing_entries).to_have_count(2)


def test_hanging_service_is_noticed_and_an_upload_or_a_request_can_be_canceled(
    fake: LiveServer, open_page: OpenPage
) -> None:
    page = open_page(fake)
    expect(page.locator("#file")).to_be_attached()
    page.route("**/*", lambda _route: None)
    choose_file(page, STACK)
    expect(page.locator("#start")).to_contain_text("The service does not respond", timeout=MAX_MILLISECONDS)
    page.get_by_role("button", name="Cancel").click()
    page.unroute("**/*")
    expect(page.locator("#connection")).to_be_hidden()
    choose_file(page, STACK)
    expect(page.get_by_role("button", name="Segment", exact=True)).to_be_enabled()
    page.route("**/jobs?*", lambda _route: None)
    press_segment(page)
    expect(page.locator("#side")).to_contain_text("Sending the request")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#side")).to_contain_text("Check your stack")
    expect(page.get_by_role("button", name="Segment", exact=True)).to_be_enabled()


def test_view_planes_and_result_are_loaded_after_the_connection_was_lost(fake: LiveServer, open_page: OpenPage) -> None:
    job = fake.run(b"", stack=fake.post("/stacks", STACK).json()["id"])
    page = open_page(fake)
    expect(page.locator("#file")).to_be_attached()
    for lost in ("**/*", "**/planes*"):
        page.evaluate("location.hash = ''")
        page.route(lost, lambda route: route.abort())
        page.route("**/health/live", lambda route: route.abort())
        page.evaluate("id => (location.hash = `job=${id}`)", job["id"])
        expect(page.locator("#connection")).to_be_visible()
        page.unroute_all()
        expect(page.locator("#summary")).to_contain_text("classes")
        expect(page.locator(".caption").first).to_contain_text("/ 4")
        expect(page.locator(".fetch-status")).to_be_empty()


def test_upload_and_job_are_sent_again_after_the_connection_was_lost(fake: LiveServer, open_page: OpenPage) -> None:
    page = open_page(fake)
    job_count = len(fake.client.get("/jobs").json()["jobs"])
    for pattern in ("**/stacks", "**/jobs?*"):
        # The service accepts the job, but the response does not arrive.
        page.route(pattern, lambda route: (route.fetch(), route.abort()), times=1)
    choose_file(page, STACK)
    press_segment(page)
    expect(page.locator("#summary")).to_contain_text("classes")
    assert len(fake.client.get("/jobs").json()["jobs"]) == job_count + 1
