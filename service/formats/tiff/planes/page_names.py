"""Find out from the tags of plain pages whether they are channels or tiles instead of the planes of a z-stack.

Programs for multiplexed images write one page per channel, and name the channel in the description or in the tag
PageName. Programs for slides write one page per tile, with its position.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from tifffile import TiffPage

from service.formats.tiff.planes.page_loader import Page

_PAGE_NAME_TAG = 285
_POSITION_TAGS = (286, 287)
_RESOLUTION_TAGS = (282, 283)
_QPTIFF_DESCRIPTION = "<PerkinElmer-QPI-ImageDescription>"
_MIBI_DESCRIPTION = '"channel.target"'
# Maximum number of pages whose tags are parsed. No image has more channels.
_MAX_PAGES = 2**11
# Number of names of pages that an error message lists.
_MAX_LISTED_NAMES = 4
# Pages are tiles if their positions differ by a larger part of their size. Stages do not return exactly to a position.
_MIN_TILE_DISTANCE = 0.5


class PageNames(NamedTuple):
    """Interpretation of pages according to their names and positions.

    channel_names  names of the pages if they are or may be channels, or ()
    problem        clause that explains why the pages may not be the planes of a z-stack, or ""
    """

    channel_names: tuple[str, ...] = ()
    problem: str = ""

    @property
    def are_channels(self) -> bool:
        """Whether the pages are channels according to their descriptions."""
        return bool(self.channel_names) and not self.problem


def interpret_page_tags(pages: Sequence[Page]) -> PageNames:
    """Find out from the tags of several pages whether they are channels, or may be channels or tiles."""
    if not 1 < len(pages) <= _MAX_PAGES or not _has_names_or_positions(pages[0].aspage()):
        return PageNames()
    own_pages = [page.aspage() for page in pages]
    channels = [_read_channel_name(page.description) for page in own_pages]
    if all(channels):
        return PageNames(tuple(channels))
    names = [str(page.tags.valueof(_PAGE_NAME_TAG, "")).strip() for page in own_pages]
    if all(names) and _differ_in_words(names):
        return PageNames(tuple(names), f"its pages have the names {_join_names(names)}, which may be channels")
    if _are_tiles(own_pages):
        return PageNames(problem="its pages have different positions, like the tiles of a mosaic")
    return PageNames()


def _differ_in_words(names: Sequence[str]) -> bool:
    """Return whether names differ not only in numbers, as those of planes, such as "z 1" and "z 2", do."""
    return len({re.sub(r"[\d\W_]+", "", name) for name in names}) > 1


def _join_names(names: Sequence[str]) -> str:
    listed_names = ", ".join(name[:40] for name in names[:_MAX_LISTED_NAMES])
    return f"{listed_names} and others" if len(names) > _MAX_LISTED_NAMES else listed_names


def _has_names_or_positions(page: TiffPage) -> bool:
    has_tags = any(tag in page.tags for tag in (_PAGE_NAME_TAG, *_POSITION_TAGS))
    return has_tags or bool(_read_channel_name(page.description))


def _read_channel_name(description: str) -> str:
    """Return the name of the channel in the description of a page by PerkinElmer (QPTIFF) or Ionpath (MIBI), or ""."""
    if _QPTIFF_DESCRIPTION in description:
        match = re.search("<Name>([^<]*)</Name>", description)
        return match[1].strip() if match else ""
    if _MIBI_DESCRIPTION in description:
        try:
            return str(json.loads(description).get("channel.target") or "")
        except (AttributeError, ValueError):
            return ""
    return ""


def _are_tiles(pages: Sequence[TiffPage]) -> bool:
    """Return whether the positions of pages differ by more than a part of their width or height."""
    for position_tag, resolution_tag, axis in zip(_POSITION_TAGS, _RESOLUTION_TAGS, "XY", strict=True):
        positions = [_read_pixels(page, position_tag, resolution_tag) for page in pages]
        known = [position for position in positions if position is not None]
        length = pages[0].shape[pages[0].axes.index(axis)]
        if known and max(known) - min(known) > _MIN_TILE_DISTANCE * length:
            return True
    return False


def _read_pixels(page: TiffPage, position_tag: int, resolution_tag: int) -> float | None:
    """Return the position of a page in pixels, or None if it is unknown."""
    factors = (page.tags.valueof(position_tag), page.tags.valueof(resolution_tag))
    try:
        (a, b), (c, d) = factors
        return float(a * c / (b * d))
    except (TypeError, ValueError, ZeroDivisionError):
        return None
