from __future__ import annotations

import time
from urllib.parse import quote

import pytest
from job_service import Service

from service.api.requests.admission import MAX_PARAMETERS, MAX_QUERY_BYTES
from service.serving.parameters import Query


@pytest.mark.parametrize(
    "query",
    [
        "&".join(f"p{number}=" for number in range(8500)),
        "&".join(f"{name}=" for name in "abcdefghijklmnopqrstuvwxyz"),
        "&".join(f"{number}{'n' * 2000}=" for number in range(MAX_PARAMETERS - 1)),
        "n" * MAX_QUERY_BYTES + "=1",
        f"model={'n' * 10_000}",
        f"{'n' * 10_000}=1&{'n' * 10_000}=1",
        f"voxel_size={',' * 10_000}",
        f"time={'9' * 10_000}",
        "&" * 30_000,
    ],
)
def test_invalid_query_strings_are_rejected_quickly_with_short_messages(service: Service, query: str) -> None:
    service.client.post("/segment?warm=up")
    for path in ("/segment", "/inspect", "/jobs"):
        began = time.process_time()
        response = service.client.post(f"{path}?{query}")
        assert time.process_time() - began < 0.5
        assert response.status_code == 422, response.text
        assert len(response.content) < 2500


def test_form_with_invalid_fields_is_rejected_with_a_short_message(service: Service) -> None:
    for number in (20, 5000):
        fields = {f"{index}{'n' * 2000}": (None, "1") for index in range(number)}
        response = service.client.post("/segment", files={"file": b"II*", **fields})
        assert response.status_code == 422
        assert len(response.content) < 2500


def test_limits_allow_all_parameters_at_their_maximum_length() -> None:
    max_lengths = {
        name: next((limit.max_length for limit in field.metadata if hasattr(limit, "max_length")), 20)
        for name, field in Query.model_fields.items()
    }
    assert len(max_lengths) <= MAX_PARAMETERS
    assert sum(len(name) + 2 + length * len(quote("😀")) for name, length in max_lengths.items()) <= MAX_QUERY_BYTES
