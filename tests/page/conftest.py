"""Fixtures for tests of the web UI: Chromium driven by Playwright, and running services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM_ARGUMENTS, CHROMIUM_PATH, TIMEOUT_SECONDS, OpenPage
from fakes import FakeSegmenter
from live import LiveServer, eager_settings, serve
from paths import ROOT
from playwright.sync_api import Browser, Page, expect, sync_playwright

expect.set_options(timeout=1000 * TIMEOUT_SECONDS)


# Playwright runs an event loop in this thread. Stop it after these tests, because other tests start their own loops.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM_PATH is None:
        pytest.skip("Chromium is not installed. Install it with: apt-get install chromium-headless-shell")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM_PATH, args=CHROMIUM_ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def nuclei(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    models = {"serve": ("nuclei", "membranes"), "load": ("nuclei",)}
    annotations = {"folder": tmp_path_factory.mktemp("annotations")}
    jobs = {"folder": tmp_path_factory.mktemp("jobs")}
    # Several modules segment the same parts of the samples.
    limits = {"cache_bytes": 2**28}
    settings = eager_settings(ROOT / "models", models=models, annotations=annotations, jobs=jobs, limits=limits)
    with serve(settings) as live:
        yield live


@pytest.fixture(scope="package")
def fake(bands_repository: Path) -> Iterator[LiveServer]:
    with serve(eager_settings(bands_repository, models={"load": "all"}), load=FakeSegmenter) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """A function that opens the web UI of a service in a new browser context."""
    with open_contexts(browser) as open_web_ui:
        yield open_web_ui


@pytest.fixture(scope="package")
def module_page(browser: Browser, fake: LiveServer) -> Iterator[Page]:
    """The start page of the web UI, for tests that only call functions of its modules. Do not change it."""
    with open_contexts(browser) as open_web_ui:
        page = open_web_ui(fake)
        page.locator("#file").wait_for(state="attached")
        yield page


@contextmanager
def open_contexts(browser: Browser) -> Iterator[OpenPage]:
    """Yield a function that opens the web UI of a service in a new browser context, and close the contexts at the end.

    Assert that there were no errors, requests to other hosts or violations of the security policy.
    """
    errors: list[str] = []
    contexts = []

    def open_web_ui(live: LiveServer, **options: Any) -> Page:
        origin = f"http://{live.host}:{live.port}"
        context = browser.new_context(base_url=origin, **{"viewport": {"width": 1280, "height": 720}, **options})
        allowed_prefixes = (origin, "blob:", "data:")
        context.set_default_timeout(1000 * TIMEOUT_SECONDS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda entry: errors.append(entry.text) if "Content Security Policy" in entry.text else None)
        page.on(
            "request", lambda request: None if request.url.startswith(allowed_prefixes) else errors.append(request.url)
        )
        page.goto("/")
        return page

    yield open_web_ui
    for context in contexts:
        context.close()
    assert errors == []
