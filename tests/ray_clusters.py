"""Ray clusters with several nodes on one host."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import wait_until
from live import LiveServer

# Time limit in seconds for the start of a node, a worker, or the service.
START_TIMEOUT_SECONDS = 120
# ID of the head node in the autoscaler's fake provider.
HEAD_NODE_ID = "f" * 51 + "00000"
# Commands that the autoscaler would run on real hosts. They are left empty.
HOST_COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")


@contextmanager
def ray_environment(**variables: str) -> Iterator[Any]:
    """Set the environment of Ray and yield the module.

    Ray reads these variables when it is first imported, so tests must not import it themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Actors must be able to import the service and the test helpers.
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path.cwd() / "tests")]),
            **variables,
        }.items():
            patch.setenv(name, value)
        import ray  # noqa: PLC0415

        yield ray


@contextmanager
def ray_cluster(**head: Any) -> Iterator[Any]:
    """Start a cluster with a head node without devices. It needs a `ray_environment`.

    head  parameters of the head node
    """
    import ray  # noqa: PLC0415
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    args = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, **head}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def autoscaled_cluster(folder: Path, hosts: int, idle_seconds: float) -> Iterator[Any]:
    """Start a cluster to which Ray's autoscaler adds up to `hosts` nodes, and from which it removes idle nodes.

    Each node pretends to have one GPU.
    """
    with (
        ray_environment(
            RAY_FAKE_CLUSTER="1",
            AUTOSCALER_UPDATE_INTERVAL_S="1",
            RAY_OVERRIDE_NODE_ID_FOR_TESTING=HEAD_NODE_ID,
            RAY_CLOUD_INSTANCE_ID=HEAD_NODE_ID,
        ) as ray,
        socket.socket() as free_socket,
    ):
        free_socket.bind(("", 0))
        port = free_socket.getsockname()[1]
        free_socket.close()
        resources = {"CPU": 1, "GPU": 1, "object_store_memory": 150 * 2**20}
        config = {
            "cluster_name": "autoscaled-hosts",
            "max_workers": hosts,
            "upscaling_speed": 10,
            "idle_timeout_minutes": idle_seconds / 60,
            "provider": {
                "type": "fake_multinode",
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "head_node_id": HEAD_NODE_ID,
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
            **{f"{which}_commands": [] for which in HOST_COMMANDS},
        }
        path = folder / "autoscaling.json"
        path.write_text(json.dumps(config))
        with ray_cluster(gcs_server_port=port, autoscaling_config=str(path)) as cluster:
            yield cluster


def wait_ready(live: LiveServer) -> None:
    """Wait until the service is ready, as long as a cluster may take to start."""
    wait_until(lambda: live.runtime.list_unready_reasons() == (), START_TIMEOUT_SECONDS)
