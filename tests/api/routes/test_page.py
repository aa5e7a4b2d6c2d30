from __future__ import annotations

import posixpath
import re
from urllib.parse import urljoin

from job_service import Service

# Names of XML vocabularies, from which nothing is loaded.
XML_NAMESPACES = ("http://www.w3.org/2000/svg", "http://www.openmicroscopy.org/Schemas/OME/2016-06")


def test_page_loads_only_files_of_the_service(service: Service) -> None:
    page = service.client.get("/")
    policy = dict(part.split(maxsplit=1) for part in page.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
    assert "unsafe" not in page.headers["content-security-policy"]
    cached = service.client.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert cached.status_code == 304
    assert cached.headers["content-security-policy"] == page.headers["content-security-policy"]
    urls = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert len(urls) == 15
    for url in urls:
        file = service.client.get(urljoin("/", url))
        assert file.status_code == 200
        # Loading the page again transfers no file again.
        cached = service.client.get(urljoin("/", url), headers={"If-None-Match": file.headers["etag"]})
        assert (cached.status_code, cached.content) == (304, b"")
        assert cached.headers["cache-control"] == "no-cache"


def test_all_imported_modules_are_served(service: Service) -> None:
    pending, seen = ["main.js"], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        module = service.client.get(f"/page/{name}")
        assert module.headers["content-type"].startswith("text/javascript"), name
        text = module.text
        for namespace in XML_NAMESPACES:
            text = text.replace(f'"{namespace}"', "")
        assert not re.search("https?://", text), name
        imported = re.findall(r'(?: from |import\()"(\.[^"]+)"', module.text)
        pending += [posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) for path in imported]
    assert {"viewer/viewer.js", "viewer/volume_renderer.js", "volumes/slices.js", "result/objects_view.js"} <= seen
    assert service.client.get("/page/page.py").json()["type"].endswith("not-found")
    assert service.client.get("/page/index.html").status_code == 404
    assert service.client.get("/page/core/../index.html").status_code == 404
    assert service.client.get("/page/core").status_code == 404
