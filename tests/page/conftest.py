"""Fixtures of the page's tests: Debian's chromium, driven by playwright, and services to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import ARGUMENTS, CHROMIUM, SECONDS, Open
from fakes import FakeSegmenter
from live import Live, eager, serve
from paths import ROOT
from playwright.sync_api import Browser, Page, expect, sync_playwright

expect.set_options(timeout=1000 * SECONDS)


# While playwright runs, its event loop is that of this thread, and tests of other folders begin loops of their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="package")
def nuclei(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    models = {"serve": ("nuclei", "membranes"), "load": ("nuclei",)}
    annotations = {"folder": tmp_path_factory.mktemp("annotations")}
    with serve(eager(ROOT / "models", models=models, annotations=annotations)) as live:
        yield live


@pytest.fixture(scope="package")
def fake(bands_repository: Path) -> Iterator[Live]:
    with serve(eager(bands_repository, models={"load": "all"}), load=FakeSegmenter) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open the page of a service; at the end, no request has left it, and nothing was against the policy."""
    faults: list[str] = []
    contexts = []

    def open_at(live: Live, **options: Any) -> Page:
        origin = f"http://{live.host}:{live.port}"
        context = browser.new_context(base_url=origin, **{"viewport": {"width": 1280, "height": 720}, **options})
        own = (origin, "blob:", "data:")
        context.set_default_timeout(1000 * SECONDS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
        page.on("request", lambda sent: None if sent.url.startswith(own) else faults.append(sent.url))
        page.goto("/")
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert faults == []
