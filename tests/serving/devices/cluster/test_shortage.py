"""Checks of a cluster before its workers start. Ray does not report workers that wait for resources."""

from __future__ import annotations

import pytest

from service.core.errors import ConfigError
from service.core.sections.computing import Cluster
from service.serving.devices.cluster import ray_cluster
from service.serving.devices.cluster.ray_cluster import check_ray, describe_shortage


def test_shortage_lists_missing_gpus_and_cpus() -> None:
    cluster = Cluster(gpus=1, cpus=2)
    assert describe_shortage({"GPU": 2, "CPU": 4}, cluster, 2) is None
    assert "has only 1 of the 2 GPUs that 2 workers" in (describe_shortage({"GPU": 1, "CPU": 4}, cluster, 2) or "")
    assert "has only 0 of the 3 GPUs and 2 of the 6 CPUs that" in (describe_shortage({"CPU": 2}, cluster, 3) or "")
    assert describe_shortage({"CPU": 3}, Cluster(gpus=0), 3) is None


@pytest.mark.parametrize("mode", [None, "", "disabled"])
def test_cluster_without_token_authentication_is_refused(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda _name: object())
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        check_ray()
