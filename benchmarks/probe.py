"""Measure the latency of /health/live, and print its percentiles in milliseconds as JSON.

python benchmarks/probe.py HOST PORT SECONDS

Runs in a separate process and uses only the standard library, so that no other work delays the measurement.
"""

from __future__ import annotations

import http.client
import json
import sys
import time


def main(host: str, port: int, seconds: float) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    latencies = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        connection.request("GET", "/health/live")
        response = connection.getresponse()
        response.read()
        latencies.append(time.perf_counter() - began)
        assert response.status == 200
        time.sleep(0.02)
    latencies.sort()
    quantiles = {"median": 0.5, "p99": 0.99, "most": 1.0}
    milliseconds = {
        key: round(1000 * latencies[min(int(quantile * len(latencies)), len(latencies) - 1)], 1)
        for key, quantile in quantiles.items()
    }
    print(json.dumps(milliseconds | {"requests": len(latencies)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
