"""Messages of the service in the terms of the web UI."""

from __future__ import annotations

import re

from playwright.sync_api import Page

from service.core.errors import UnsupportedMedia
from service.formats.tiff import unsupported_formats

TRANSLATE = """async texts => {
  const { toPageTerms } = await import("/page/core/terminology.js");
  return texts.map(toPageTerms);
}"""


def test_advice_about_files_names_menu_items_instead_of_commands(module_page: Page) -> None:
    formats = (*unsupported_formats._FORMATS, unsupported_formats._OTHER_HDF5)
    commands = re.compile(r"pip install|import \w|bfconvert|\w+\(|unzip|unxz|unzstd|tar -|`")
    messages = [f"The file has the format {name}, which is not supported. {advice}" for name, _, advice in formats]
    assert sum(commands.search(message) is not None for message in messages) > 10
    for message, text in zip(messages, module_page.evaluate(TRANSLATE, messages), strict=True):
        assert commands.search(text) is None, text
        assert text.startswith(message.split(". ")[0])
        assert "Fiji" in text or commands.search(message) is None or "napari" in text or "file manager" in text


def test_missing_libraries_are_the_task_of_the_operator(module_page: Page) -> None:
    message = (
        f"The file has the format CZI, which this installation cannot read. {unsupported_formats.FIJI_ADVICE} Or"
        " install the libraries for this format where StackSeg runs: pip install 'stackseg[vendor]'."
    )
    (text,) = module_page.evaluate(TRANSLATE, [str(UnsupportedMedia(message))])
    assert text.endswith("Or ask the operator of this service to install the libraries for this format.")
    assert "Bio-Formats" in text


def test_sizes_and_time_points_are_counted_as_in_the_views(module_page: Page) -> None:
    messages = {
        "The stack has 48 x 192 x 160 voxels.": "The stack has 160 × 192 × 48 voxels.",
        "Its dimensions are 3 x 12 x 64 x 80 (QQYX).": "Its dimensions are 3 x 12 x 64 x 80 (QQYX).",
        "Time points 0, 4, 11 and 2 more: a note": "Time points 1, 5, 12 and 2 more: a note",
        "Time point 3: cannot be read. Set time=0:3.": "Time point 4: cannot be read. Set “Time point: 1 to 3”.",
        "The file has 12 time points. Choose one with time=0 to time=11, or all with time=all.": (
            "The file has 12 time points. Choose one with “Time point: 1” to “Time point: 12”, or all with “Time point:"
            " all”."
        ),
        "Set channel=1, or channel=488.": "Set “Channel to segment: 2”, or “Channel to segment: 488”.",
        "It has 3 scenes: 0 (a, 1), 1, 2 (b (2)). Choose one with scene=0 to scene=2, or by name.": (
            "It has 3 scenes: 1 (a, 1), 2, 3 (b (2)). Choose one with “Scene: 1” to “Scene: 3”, or by name."
        ),
        "The file has no scene 7. It has one scene: 0 (7).": "The file has no scene 8. It has one scene: 1 (7).",
        "channel=4 does not exist: the file has 12 channels: 0 (DAPI), 1 and 10 more.": (
            "“Channel to segment: 5” does not exist: the file has 12 channels: 1 (DAPI), 2 and 10 more."
        ),
        "axes='QYX' is not valid, as is channel='2'.": "“Axes: QYX” is not valid, as is “Channel to segment: 3”.",
        "The largest is used. To use another one, set scene to its name or index.": (
            "The largest is used. Select another one under “Scene”."
        ),
        "Try diameter=1,3.5,3.5um. If not, train again with --partial-planes (partial_planes in requests).": (
            "Try “Object diameter: 3.5 × 3.5 × 1 µm”. If not, mark the planes in which every object is labeled, save"
            " the stack again, and train again."
        ),
        "Objects are 41 x 42 px wide and 9 px deep.": "Objects are 42 × 41 voxels wide and 9 voxels deep.",
        "The request has no file, or an empty one. Send the TIFF file as the body, or in the form field 'file'.": (
            "The file is empty. Copy or export it again."
        ),
        "it does not begin like a TIFF, but with b'PK'. Send a TIFF.": "it does not begin like a TIFF. Open a TIFF.",
    }
    assert module_page.evaluate(TRANSLATE, list(messages)) == list(messages.values())
