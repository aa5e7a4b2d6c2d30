"""Ray clusters of several nodes on this host."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import until
from live import Live

# Seconds that a node, a worker, or a service in front of it may take to be there.
STARTING = 120
# As the autoscaler's pretended provider knows the head.
HEAD = "f" * 51 + "00000"
# That it would run on hosts of its own.
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")


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


@contextmanager
def autoscaled_cluster(folder: Path, hosts: int, idle_seconds: float) -> Iterator[Any]:
    """A cluster to which Ray's autoscaler adds up to so many nodes with a pretended GPU, and removes idle ones."""
    with (
        ray_environment(
            RAY_FAKE_CLUSTER="1",
            AUTOSCALER_UPDATE_INTERVAL_S="1",
            RAY_OVERRIDE_NODE_ID_FOR_TESTING=HEAD,
            RAY_CLOUD_INSTANCE_ID=HEAD,
        ) as ray,
        socket.socket() as free,
    ):
        free.bind(("", 0))
        port = free.getsockname()[1]
        free.close()
        resources = {"CPU": 1, "GPU": 1, "object_store_memory": 150 * 2**20}
        config = {
            "cluster_name": "hosts-that-come-and-go",
            "max_workers": hosts,
            "upscaling_speed": 10,
            "idle_timeout_minutes": idle_seconds / 60,
            "provider": {
                "type": "fake_multinode",
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "head_node_id": HEAD,
                "gcs_address": f"{ray.util.get_node_ip_address()}:{port}",
            },
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "gpu": {"resources": resources, "node_config": {}, "max_workers": hosts},
            },
            "head_node_type": "ray.head.default",
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "auth": {},
            **{f"{which}_commands": [] for which in COMMANDS},
        }
        path = folder / "autoscaling.json"
        path.write_text(json.dumps(config))
        with ray_cluster(gcs_server_port=port, autoscaling_config=str(path)) as made:
            yield made


def wait_ready(live: Live) -> None:
    until(lambda: live.runtime.unready_reasons() == (), STARTING)
