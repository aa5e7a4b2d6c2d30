"""Twenty recorded stacks in one batch, some of them broken, while the service is killed twice and restarted."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tifffile
from browsing import check_accessibility
from common import run_server
from paths import ROOT, SHARED_DATA
from playwright.sync_api import Browser, Page, expect

RECORDED = (
    "arabidopsis_lateral_root_nuclei", "arabidopsis_ovule_nuclei_1135", "celegans_membrane_t046",
    "cellos_organoid_egfp_d0_108", "cellos_organoid_hoechst_d4_120", "cellos_organoid_mcherry_d4_1",
    "drosophila_nuclear_envelope", "fluorescent_beads_imagexpress", "mesospim_brain_nuclei_c5",
    "mouse_embryo_8cell", "single_nucleus_confocal_vs_widefield", "synthetic_nuclei_stardist",
)  # fmt: skip
FORMATS = ("ome/cells-2t.ome.tif", "ome/rand_im.tif", "derived/const_zero.tif", "derived/dtype_complex64.tif",
           "derived/two_series.ome.tif", "derived/ome_zcyx.ome.tif")  # fmt: skip
# Recorded stacks that do not name their first axis.
UNNAMED_AXES = ("mesospim_brain_nuclei_c5.tif", "synthetic_nuclei_stardist.tif")
# Files without a result, whatever the settings are.
BROKEN = ("dtype_complex64.tif", "truncated.tif", "picture.tif")
MAX_LOSS_NOTICE_MILLISECONDS = 5000
TIMEOUT_MILLISECONDS = 900_000

# Drops the files of an input element on the page, all together.
DROP_CHOSEN = """input => {
  const transfer = new DataTransfer();
  for (const file of input.files) transfer.items.add(file);
  input.remove();
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
}"""


def collect_stacks(folder: Path) -> list[Path]:
    """Link or write twenty files with different names to a folder."""
    links = {f"{name}.tif": SHARED_DATA / "real" / name / "image.tif" for name in RECORDED}
    links |= {Path(path).name: SHARED_DATA / "formats" / path for path in FORMATS}
    for name, path in links.items():
        (folder / name).symlink_to(path)
    root = (folder / f"{RECORDED[0]}.tif").read_bytes()
    (folder / "truncated.tif").write_bytes(root[: len(root) // 2])
    (folder / "picture.tif").write_bytes((ROOT / "models" / "nuclei" / "example.png").read_bytes())
    return sorted(folder.iterdir())


class KillableService:
    """A service in a separate process, which is killed and started again on the same port with the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contexts = ExitStack()
        self.process, self.port = self.contexts.enter_context(self._run("0"))
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def _run(self, port: str) -> Any:
        arguments = ("--port", port, "--models", str(ROOT / "models"))
        return run_server(self.folder, *arguments, STACKSEG_JOBS__FOLDER=str(self.folder / "jobs"))

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        self.contexts.close()

    def start(self) -> None:
        self.process, _port = self.contexts.enter_context(self._run(str(self.port)))

    def list_jobs(self) -> list[dict[str, Any]]:
        return list(self.client.get("/jobs?limit=100").json()["jobs"])


@pytest.fixture
def service(tmp_path: Path) -> Iterator[KillableService]:
    (tmp_path / "service").mkdir()
    started = KillableService(tmp_path / "service")
    yield started
    started.client.close()
    started.contexts.close()


@pytest.fixture
def page(browser: Browser, service: KillableService) -> Iterator[Page]:
    context = browser.new_context(
        base_url=str(service.client.base_url), viewport={"width": 1280, "height": 720}, accept_downloads=True
    )
    context.set_default_timeout(TIMEOUT_MILLISECONDS)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto("/")
    yield page
    context.close()
    assert errors == []


def read_rows(page: Page) -> dict[str, tuple[str, str]]:
    """Return the phase and the text of each stack."""
    rows = page.locator(".batch-list > li")
    found = rows.evaluate_all(
        "nodes => nodes.map(node => [node.querySelector('.batch-name').textContent, node.dataset.phase,"
        " node.querySelector('.batch-state').textContent])"
    )
    return {name: (phase, text) for name, phase, text in found}


def wait_for_rows(page: Page, is_met: Callable[[list[str]], bool]) -> None:
    """Wait until the phases of all stacks fulfil a condition."""
    for _ in range(TIMEOUT_MILLISECONDS // 250):
        if is_met([phase for phase, _text in read_rows(page).values()]):
            return
        page.wait_for_timeout(250)
    raise AssertionError(read_rows(page))


def kill_and_restart(page: Page, service: KillableService) -> None:
    """Kill the service. Check that the page says so in time, and claims nothing until the service is back."""
    service.kill()
    expect(page.locator("#connection")).to_contain_text("not responded", timeout=MAX_LOSS_NOTICE_MILLISECONDS)
    lost = read_rows(page)
    for phase, text in lost.values():
        assert phase not in {"waiting", "loading", "running"} or "before the connection was lost" in text
        assert "%" not in text or phase == "done"
    page.wait_for_timeout(3000)
    assert read_rows(page) == lost
    service.start()
    expect(page.locator("#connection")).to_be_hidden(timeout=TIMEOUT_MILLISECONDS)


def answer_questions(page: Page) -> None:
    """Specify what the files do not: axes, channel, time point and scene. Leave the voxel sizes unknown."""
    for name in UNNAMED_AXES:
        row = page.locator(".batch-list > li").filter(has=page.get_by_text(name, exact=True))
        if row.get_attribute("data-phase") == "question":
            row.get_by_role("button", name="Settings").click()
            page.get_by_role("dialog").get_by_role("button", name="ZYX", exact=True).click()
            page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Settings: two_series.ome.tif").click()
    page.locator("dialog .previews button").first.click()
    page.get_by_role("button", name="Close").click()
    settings = page.get_by_role("region", name="Settings for all stacks")
    settings.get_by_label("Channel to segment").select_option("0")
    settings.get_by_label("Time points").select_option("0")


@pytest.mark.thorough
@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs the recorded stacks")
def test_each_of_twenty_stacks_gets_a_result_or_a_reason_although_the_service_is_killed(
    page: Page, service: KillableService, tmp_path: Path
) -> None:
    (tmp_path / "stacks").mkdir()
    paths = collect_stacks(tmp_path / "stacks")
    assert len(paths) == 20
    expect(page.get_by_role("button", name="Choose files")).to_be_visible()
    chosen = page.evaluate_handle(
        "document.body.appendChild(Object.assign(document.createElement('input'), { type: 'file', multiple: true }))"
    ).as_element()
    assert chosen is not None
    chosen.set_input_files(paths)
    page.evaluate(DROP_CHOSEN, chosen)
    names = {path.name for path in paths}
    expect(page.locator(".batch-list > li")).to_have_count(20)

    # The first time, the service is killed during the uploads.
    wait_for_rows(page, lambda phases: phases.count("ready") >= 3)
    kill_and_restart(page, service)
    wait_for_rows(page, lambda phases: {*phases} <= {"ready", "question", "problem"})
    assert read_rows(page).keys() == names
    answer_questions(page)
    wait_for_rows(page, lambda phases: phases.count("ready") + phases.count("problem") == 20)
    count = 20 - len(BROKEN)
    page.get_by_role("button", name=f"Segment {count} stacks").click()

    # The second time, it is killed while it is segmenting.
    wait_for_rows(page, lambda phases: phases.count("done") >= 3)
    kill_and_restart(page, service)
    expect(page.get_by_role("status").first).to_contain_text(f"{count} of 20 stacks", timeout=TIMEOUT_MILLISECONDS)
    check_rows(page, service)
    check_accessibility(page)
    check_archive(page, service, tmp_path / "batch.zip")
    rows = read_rows(page)
    page.reload()
    wait_for_rows(page, lambda phases: len(phases) == 20 and "checking" not in phases)
    assert read_rows(page) == rows


def check_rows(page: Page, service: KillableService) -> None:
    """Compare what the page says about each stack with the jobs of the service."""
    jobs = {job["name"]: job for job in service.list_jobs()}
    assert len(service.list_jobs()) == len(jobs) == 20 - len(BROKEN)
    for name, (phase, text) in read_rows(page).items():
        print(f"{name}: {phase}: {text}")
        if name in BROKEN:
            assert phase == "problem"
            assert len(text) > len("Cannot be segmented") + 20
            assert name not in jobs
        else:
            assert (phase, jobs[name]["state"]) == ("done", "done")
            assert int(re.sub(r"\D.*", "", text.replace(",", ""))) == jobs[name]["objects"]


def check_archive(page: Page, service: KillableService, path: Path) -> None:
    """Compare the labels, the table and the report in the archive with the jobs of the service."""
    with page.expect_download() as download_info:
        page.get_by_role("button", name="ZIP").click()
    download_info.value.save_as(path)
    with zipfile.ZipFile(path) as archive:
        table = list(csv.DictReader(io.StringIO(archive.read("objects.csv").decode())))
        report = archive.read("report.html").decode()
        for job in service.list_jobs():
            stem = job["name"].removesuffix(".tif").removesuffix(".ome")
            labels = tifffile.imread(io.BytesIO(archive.read(f"labels/{stem}_labels.ome.tif")))
            rows = [row for row in table if row["stack"] == job["name"]]
            assert len(rows) == job["objects"] == labels.max()
    assert all(name in report for name in read_rows(page))
