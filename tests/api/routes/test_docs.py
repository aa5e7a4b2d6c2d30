from __future__ import annotations

import re
from urllib.parse import urljoin

from job_service import Service


def test_the_documentation_loads_nothing_from_elsewhere(service: Service) -> None:
    page = service.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(addresses) == 5
    for address in addresses:
        assert "//" not in address
        part = service.client.get(urljoin("/docs", address))
        assert part.status_code == 200
        assert part.content
    start = service.client.get("/docs/start.js").text
    assert "openapi.json" in start
    assert "//" not in start
    assert service.client.get("/docs/__init__.py").json()["type"].endswith("not-found")
