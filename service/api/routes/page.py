"""GET /: the web UI. It consists of static files of this package and loads nothing from other hosts."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Media types of the served files, by path relative to the folder.
FILES = {
    file.relative_to(FOLDER).as_posix(): MEDIA_TYPES[file.suffix]
    for file in FOLDER.rglob("*")
    if file.suffix in MEDIA_TYPES
}
# The page creates images and files as blobs, and thumbnails of earlier jobs as data URLs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Browsers must revalidate every file, because modules of different versions do not work together.
HEADERS = {"Cache-Control": "no-cache"}


@router.get("/")
async def index() -> FileResponse:
    return FileResponse(FOLDER / INDEX, headers=HEADERS | {"Content-Security-Policy": POLICY})


@router.get("/page/{name}")
def page_file(name: str) -> Response:
    """Return a file in the top folder of the page, such as its main module. Raises HTTPException 404."""
    return _serve(name)


@router.get("/page/{folder}/{name}")
def page_file_in_folder(folder: str, name: str) -> Response:
    """Return a module, style sheet or image in a subfolder of the page. Raises HTTPException 404."""
    return _serve(f"{folder}/{name}")


def _serve(file: str) -> Response:
    """Return a file in one piece. A FileResponse switches threads several times, which takes longer than reading it."""
    if file not in FILES:
        raise HTTPException(404)
    path = FOLDER / file
    template = FileResponse(path, media_type=FILES[file], headers=HEADERS, stat_result=path.stat())
    headers = {name: value for name, value in template.headers.items() if name != "accept-ranges"}
    return Response(path.read_bytes(), headers=headers)
