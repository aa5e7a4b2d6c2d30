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
def test_faulty_addresses_are_refused_at_once_in_a_few_words(service: Service, query: str) -> None:
    service.client.post("/segment?warm=up")
    for path in ("/segment", "/inspect", "/jobs"):
        began = time.process_time()
        response = service.client.post(f"{path}?{query}")
        assert time.process_time() - began < 0.5
        assert response.status_code == 422, response.text
        assert len(response.content) < 2500


def test_form_with_faulty_fields_is_refused_in_a_few_words(service: Service) -> None:
    for number in (20, 5000):
        fields = {f"{index}{'n' * 2000}": (None, "1") for index in range(number)}
        response = service.client.post("/segment", files={"file": b"II*", **fields})
        assert response.status_code == 422
        assert len(response.content) < 2500


def test_all_parameters_may_be_given_at_their_longest() -> None:
    longest = {
        name: next((limit.max_length for limit in field.metadata if hasattr(limit, "max_length")), 20)
        for name, field in Query.model_fields.items()
    }
    assert len(longest) <= MAX_PARAMETERS
    assert sum(len(name) + 2 + length * len(quote("😀")) for name, length in longest.items()) <= MAX_QUERY_BYTES
