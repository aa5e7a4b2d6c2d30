from __future__ import annotations

import pytest

from service.api.admission import merge_fields
from service.core.errors import BadParameter
from service.serving.parameters import Query


def test_fields_join_the_query() -> None:
    query = Query.model_validate({"overlap": "0.5"})
    assert merge_fields(query, {}) is query
    both = merge_fields(query, {"channel": "1", "time": ""})
    assert (both.overlap, both.selection.channel, both.time) == (0.5, 1, None)
    with pytest.raises(BadParameter, match="overlap"):
        merge_fields(query, {"overlap": "0.5"})
    with pytest.raises(BadParameter, match="sw_batch_size"):
        merge_fields(query, {"sw_batch_size": "many"})
