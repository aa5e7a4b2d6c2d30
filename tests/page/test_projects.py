"""Tests of projects in the web UI, with a real service that is restarted."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from browsing import OpenPage, check_accessibility
from live import LiveServer, as_tiff, eager_settings, serve
from paths import ROOT
from playwright.sync_api import Locator, Page, expect

SAMPLE = tifffile.imread(ROOT / "models" / "nuclei" / "sample.tif")
# Text that would run as a script if it were inserted as markup.
MARKUP = "<img src=x onerror=alert(1)>"


def start(folder: Path, port: int = 0) -> Any:
    models = {"serve": ("nuclei",), "load": ("nuclei",)}
    return serve(eager_settings(ROOT / "models", models=models, jobs={"folder": folder}), port=port)


def crop(x: int) -> bytes:
    return as_tiff(SAMPLE[8:20, 24:72, x : x + 48])


def find_row(page: Page, name: str) -> Locator:
    return page.locator(".project-table tr").filter(has=page.get_by_text(name, exact=True))


def add_batch(page: Page, folder: Path) -> None:
    """Segment a folder with two stacks, and add the results to a new project."""
    for name, x in (("a.tif", 24), ("day 2/b.tif", 96)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(crop(x))
    page.locator("#folder").set_input_files(folder)
    page.get_by_label("How the object diameter is determined").select_option("none")
    page.get_by_role("button", name="Segment 2 stacks").click()
    expect(page.locator(".batch-list > li[data-phase=done]")).to_have_count(2)
    page.get_by_role("button", name="Add to a project").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name of the new project").fill("Drug trial")
    dialog.get_by_label("Group").fill("control")
    dialog.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator("#title")).to_have_text("Drug trial")


def add_result(page: Page, live: LiveServer) -> str:
    """Segment another stack and correct it, add both to the project, and return the id of the job."""
    headers = {"Content-Type": "image/tiff", "X-Filename": MARKUP}
    stack = live.post("/stacks", crop(60), headers).json()["id"]
    job = live.run(b"", stack=stack, diameter="none", measurements="zip")["id"]
    labels = live.client.get(f"/jobs/{job}/result", headers={"Accept": "application/x-npy"}).content
    live.post("/annotations", labels, {"Content-Type": "application/x-npy"}, job=job, name="by hand")
    page.get_by_role("button", name="Add results").click()
    dialog = page.get_by_role("dialog")
    for title, name in (("Results", MARKUP), ("Annotated stacks", "by hand"), ("Models", "nuclei")):
        dialog.get_by_role("group", name=title).get_by_role("checkbox", name=name).check()
    dialog.get_by_label("Group").fill("treated")
    check_accessibility(page)
    dialog.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator(".project-table tbody tr")).to_have_count(5 + 3)
    return str(job)


def check_plots(page: Page, live: LiveServer, project: str) -> None:
    """Compare the numbers in the plots with the table of the project."""
    table = csv.DictReader(io.StringIO(live.client.get(f"/projects/{project}/table").text))
    volumes: dict[str, list[float]] = {}
    for row in table:
        volumes.setdefault(row["stack"], []).append(float(row["area"]))
    plot = page.get_by_role("img", name="Objects per stack")
    assert volumes.keys() == {"a.tif", "day 2/b.tif", MARKUP}
    for name, values in volumes.items():
        cells = plot.locator("g").filter(has=page.locator("title", has_text=name))
        numbers = [text for text in cells.locator(".plot-number").all_text_contents() if text]
        assert numbers[0] == str(len(values)), name
        assert numbers[1] == f"{np.median(values):.3g}", name
    control = [value for name, values in volumes.items() if name != MARKUP for value in values]
    description = plot.get_attribute("aria-label") or ""
    assert f"Volume (µm³): control (2): median {np.median(control):.3g}, treated (1): median" in description
    expect(page.locator(".project-plots")).to_contain_text("corrected labels of 1 stack")


def test_project_collects_results_and_survives_a_restart(tmp_path: Path, open_page: OpenPage) -> None:
    with start(tmp_path / "jobs") as live:
        page = open_page(live, accept_downloads=True)
        add_batch(page, tmp_path / "embryos")
        job = add_result(page, live)
        project = live.client.get("/projects").json()["projects"][0]["id"]
        check_plots(page, live, project)
        page.get_by_label("Notes").fill("10 µM")
        page.get_by_label("Notes").press("Tab")
        expect(page.locator(".project-head")).to_contain_text("Saved on the server")
        page.get_by_label("Select a.tif").check()
        page.get_by_label("Group of the selected members").fill("placebo")
        check_accessibility(page)
        page.get_by_role("button", name="Set the group").click()
        expect(page.get_by_role("img", name="placebo (1)")).to_be_visible()
        with page.expect_download() as download_info:
            page.get_by_role("button", name="Archive (ZIP)").click()
        with zipfile.ZipFile(download_info.value.path()) as archive:
            assert archive.testzip() is None
            names = archive.namelist()
            description = json.loads(archive.read("project.json"))
        assert {"objects.csv", "labels/placebo/a_labels.ome.tif", "labels/control/day 2/b_labels.ome.tif"} <= set(names)
        assert "corrections/treated/by hand_labels.ome.tif" in names
        assert [member["group"] for member in description["members"]] == ["placebo", "control", *3 * ["treated"]]
    with start(tmp_path / "jobs", live.port) as restarted:
        page.reload()
        expect(page.get_by_label("Notes")).to_have_value("10 µM")
        expect(page.get_by_label("Group of a.tif")).to_have_value("placebo")
        expect(page.get_by_role("img", name="placebo (1)")).to_be_visible()
        restarted.client.delete(f"/jobs/{job}")
        page.reload()
        expect(find_row(page, MARKUP)).to_contain_text("no longer on the server")
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete the project").click()
        expect(page.locator(".projects")).to_contain_text("A project keeps")
        assert restarted.client.get("/projects").json() == {"projects": []}
        assert len(restarted.client.get("/annotations").json()["annotations"]) == 1
