"""Latency of /health/live: python benchmarks/probe.py HOST PORT SECONDS, prints JSON.

A process of its own with nothing but the standard library, so that it waits for nobody but the service.
"""

from __future__ import annotations

import http.client
import json
import sys
import time


def main(host: str, port: int, seconds: float) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    taken = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        connection.request("GET", "/health/live")
        answer = connection.getresponse()
        answer.read()
        taken.append(time.perf_counter() - began)
        assert answer.status == 200
        time.sleep(0.02)
    taken.sort()
    places = {"median": 0.5, "p99": 0.99, "most": 1.0}
    figures = {
        name: round(1000 * taken[min(int(share * len(taken)), len(taken) - 1)], 1) for name, share in places.items()
    }
    print(json.dumps(figures | {"requests": len(taken)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
