"""GET /: the web UI, plain files of this package that request nothing from other hosts."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Media types of the files that are served, by their paths below the folder.
FILES = {
    file.relative_to(FOLDER).as_posix(): MEDIA_TYPES[file.suffix]
    for file in FOLDER.rglob("*")
    if file.suffix in MEDIA_TYPES
}
# Blobs are pictures and files that the page itself makes; small pictures of earlier jobs are data.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A browser asks whether a file has changed each time: modules of two versions would not fit.
HEADERS = {"Cache-Control": "no-cache"}


@router.get("/")
async def front() -> FileResponse:
    return FileResponse(FOLDER / INDEX, headers=HEADERS | {"Content-Security-Policy": POLICY})


@router.get("/page/{name}")
def part(name: str) -> Response:
    """Return the main module. Raises HTTPException 404."""
    return _serve(name)


@router.get("/page/{folder}/{name}")
def part_in_folder(folder: str, name: str) -> Response:
    """Return a module, a style sheet or a picture of the page. Raises HTTPException 404."""
    return _serve(f"{folder}/{name}")


def _serve(file: str) -> Response:
    """Return a file, read whole: a FileResponse enters a thread several times, which costs more than reading these."""
    if file not in FILES:
        raise HTTPException(404)
    path = FOLDER / file
    described = FileResponse(path, media_type=FILES[file], headers=HEADERS, stat_result=path.stat())
    headers = {name: value for name, value in described.headers.items() if name != "accept-ranges"}
    return Response(path.read_bytes(), headers=headers)
