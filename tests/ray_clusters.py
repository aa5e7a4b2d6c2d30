"""Ray clusters of several nodes on this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def ray_environment(**more: str) -> Iterator[Any]:
    """Return Ray, which reads its environment when it is imported first: every test takes it from here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Actors find the service and the modules of the tests where this process does.
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path.cwd() / "tests")]),
            **more,
        }.items():
            patch.setenv(name, value)
        import ray  # noqa: PLC0415

        yield ray


@contextmanager
def ray_cluster(**head: Any) -> Iterator[Any]:
    """A cluster whose head, with these parameters, has no device. Call it in a `ray_environment`."""
    import ray  # noqa: PLC0415
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    args = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, **head}
    made = Cluster(initialize_head=True, head_node_args=args)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
