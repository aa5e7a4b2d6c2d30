"""Requests of the plugin, without napari and a server."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from napari_stackseg.connection import annotate


def test_labels_are_sent_only_if_their_numbers_are_kept() -> None:
    sent: list[Any] = []
    client: Any = SimpleNamespace(run=sent.append)
    labels = np.zeros((2, 3, 4), np.int64)
    labels[0, 0, 0] = 2**32 - 1
    annotate(client, labels, stack="1")
    (operation,) = sent
    content = b"".join(operation.body.read_blocks())
    np.testing.assert_array_equal(np.load(io.BytesIO(content)), labels)
    for number in (-1, 2**32):
        labels[1, 1, 1] = number
        with pytest.raises(ValueError, match=f"{number}.*1 to 4294967295"):
            annotate(client, labels, stack="1")
    assert len(sent) == 1
