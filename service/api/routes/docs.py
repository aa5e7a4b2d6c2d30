"""GET /docs: Swagger UI, served from local files.

The page works without Internet access, and scripts from other hosts cannot see what users enter on the page.
"""

from __future__ import annotations

import json
from pathlib import Path

import fastapi_swagger
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from service.api.requests.downloads import DownloadResponse

router = APIRouter(include_in_schema=False)

RESOURCE_FOLDER = Path(fastapi_swagger.__file__).parent / "resources"
# Names of the resource files, by their names in URLs.
RESOURCE_FILES = {"page.js": "swagger-ui-bundle.js", "page.css": "swagger-ui.css", "icon.png": "favicon-32x32.png"}

# The URLs are relative, so that the page works behind a proxy that adds a path prefix.
PAGE_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>StackSeg</title>
<link rel="icon" href="docs/icon.png">
<link rel="stylesheet" href="docs/page.css">
</head>
<body>
<main id="page"></main>
<noscript>This page requires JavaScript. Its content is also in <a href="openapi.json">openapi.json</a>.</noscript>
<script src="docs/page.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START_SCRIPT = """SwaggerUIBundle({
  url: "openapi.json", dom_id: "#page", deepLinking: true, tryItOutEnabled: true, defaultModelsExpandDepth: 0,
});
"""
CACHE_HEADERS = {"Cache-Control": "max-age=3600"}


@router.get("/openapi.json")
async def get_openapi(request: Request) -> Response:
    """Return the OpenAPI document. Behind a proxy that adds a path prefix, it names the prefix as the server."""
    content: bytes = request.app.openapi_json
    if root_path := request.scope.get("root_path"):
        # The document is cached as JSON, so add the member without parsing the document.
        content = b'{"servers":' + json.dumps([{"url": root_path}]).encode() + b"," + content.removeprefix(b"{")
    return Response(content, media_type="application/json")


@router.get("/docs")
async def get_documentation() -> HTMLResponse:
    return HTMLResponse(PAGE_HTML)


@router.get("/docs/{name}")
async def get_resource(name: str) -> Response:
    """Return a script, style sheet or image of the page. Raises HTTPException 404."""
    if name == "start.js":
        return Response(START_SCRIPT, media_type="text/javascript", headers=CACHE_HEADERS)
    if name not in RESOURCE_FILES:
        raise HTTPException(404)
    path = RESOURCE_FOLDER / RESOURCE_FILES[name]
    return DownloadResponse(path, headers=CACHE_HEADERS, stat_result=path.stat())
