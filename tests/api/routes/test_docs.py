from __future__ import annotations

import re
from urllib.parse import urljoin

from job_service import Service


def test_documentation_loads_nothing_from_other_hosts(service: Service) -> None:
    page = service.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    urls = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(urls) == 5
    for url in urls:
        assert "//" not in url
        part = service.client.get(urljoin("/docs", url))
        assert part.status_code == 200
        assert part.content
    start = service.client.get("/docs/start.js").text
    assert "openapi.json" in start
    assert "//" not in start
    assert service.client.get("/docs/__init__.py").json()["type"].endswith("not-found")
