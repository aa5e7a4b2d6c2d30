"""GET /: the web UI, which consists of static files in this package and loads nothing from other hosts."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.api.requests.downloads import DownloadResponse, is_cached

router = APIRouter(include_in_schema=False)

PAGE_FOLDER = Path(__file__).parents[1] / "page"
INDEX_FILE = "index.html"
MEDIA_TYPES_BY_SUFFIX = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Media types of the served files, by path relative to the page folder.
MEDIA_TYPES_BY_FILE = {
    file.relative_to(PAGE_FOLDER).as_posix(): MEDIA_TYPES_BY_SUFFIX[file.suffix]
    for file in PAGE_FOLDER.rglob("*")
    if file.suffix in MEDIA_TYPES_BY_SUFFIX
}
# The page creates images and files as blobs, and thumbnails of earlier jobs as data URLs.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Browsers must revalidate every file, because JavaScript modules from different versions do not work together.
CACHE_HEADERS = {"Cache-Control": "no-cache"}


@router.get("/")
async def get_index() -> DownloadResponse:
    path, headers = PAGE_FOLDER / INDEX_FILE, CACHE_HEADERS | {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
    return DownloadResponse(path, headers=headers, stat_result=path.stat())


@router.get("/page/{name}")
def get_page_file(request: Request, name: str) -> Response:
    """Return a file in the page folder, such as the main module. Raises HTTPException 404."""
    return _build_file_response(request, name)


@router.get("/page/{folder}/{name}")
def get_page_file_in_folder(request: Request, folder: str, name: str) -> Response:
    """Return a module, style sheet or image in a subfolder of the page folder. Raises HTTPException 404."""
    return _build_file_response(request, f"{folder}/{name}")


def _build_file_response(request: Request, relative_path: str) -> Response:
    # A DownloadResponse sends the 304 to browsers that have the file. For others, it would be slower than sending the
    # file in one piece, because it switches threads several times.
    if relative_path not in MEDIA_TYPES_BY_FILE:
        raise HTTPException(404)
    path = PAGE_FOLDER / relative_path
    download = DownloadResponse(
        path, media_type=MEDIA_TYPES_BY_FILE[relative_path], headers=CACHE_HEADERS, stat_result=path.stat()
    )
    if is_cached(request.scope, download.headers["etag"]):
        return download
    headers = {name: value for name, value in download.headers.items() if name != "accept-ranges"}
    return Response(path.read_bytes(), headers=headers)
