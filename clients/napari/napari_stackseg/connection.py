"""The server that all widgets of the plugin use, and requests that `Client` has no methods for."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from stackseg_client import Client, Model, Retries
from stackseg_client.bodies import BytesBody
from stackseg_client.operations import Operation, receive_json, send_json
from stackseg_client.parameters import encode_parameters
from stackseg_client.reports import ContentReceiver

DEFAULT_URL = "http://localhost:8000"


@dataclass
class Connection:
    """URL and API key of the server, by default those of the environment."""

    url: str
    key: str | None

    def open(self) -> Client:
        """Return a client that soon reports a server that cannot be reached. Raises ValueError for an invalid URL."""
        return Client(self.url, self.key, retries=Retries(count=2, max_seconds=20.0))


CONNECTION = Connection(os.environ.get("NAPARI_STACKSEG_URL", DEFAULT_URL), os.environ.get("NAPARI_STACKSEG_KEY"))


def download_picture(client: Client, model: str) -> bytes:
    """Return a picture of the result for the sample of a model, as PNG. Raises NotFound if it has none."""
    path = f"/models/{quote(model, safe='')}/picture"
    return client.run(Operation("GET", path, lambda _headers: ContentReceiver(bytes)))


def list_models(connection: Connection) -> list[tuple[Model, bytes]]:
    """Return the models of the server with their pictures, which are empty for models without one."""
    with connection.open() as client:
        return [
            (model, download_picture(client, model.name) if model.raw.get("picture") else b"")
            for model in client.models()
        ]


def annotate(client: Client, labels: NDArray[Any], **parameters: Any) -> dict[str, Any]:
    """Store corrected labels [Z, Y, X] of an uploaded stack (`stack`) or of a job (`job`), and return the record.

    `parameters` are those of `POST /annotations`: `name`, `channel`, `time`, `axes`, `voxel_size` and `changes`. Raises
    ValueError for labels that are not numbers from 0 to 4294967295.
    """
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest > np.iinfo(np.uint32).max:
        raise ValueError(
            f"The labels range from {lowest} to {highest}. Use 0 for the background, and 1 to 4294967295 for objects."
        )
    content = io.BytesIO()
    np.save(content, np.ascontiguousarray(labels, np.uint32))
    body = BytesBody(content.getvalue())
    headers = {"Content-Type": "application/x-npy", "Content-Length": str(body.nbytes)}
    encoded = encode_parameters(parameters)
    record: dict[str, Any] = client.run(
        Operation("POST", "/annotations", receive_json(dict), encoded, headers, body, is_repeatable=False)
    )
    return record


def list_annotations(client: Client) -> list[dict[str, Any]]:
    """Return the records of your annotated stacks, newest first."""
    return client.run(Operation("GET", "/annotations", receive_json(lambda raw: list(raw["annotations"]))))


def train(client: Client, model: str, annotations: list[str], name: str, minutes: float) -> dict[str, Any]:
    """Start to train `model` on annotated stacks, and return the report of the training run."""
    request = {"model": model, "annotations": annotations, "name": name, "minutes": minutes}
    report: dict[str, Any] = client.run(send_json("POST", "/trainings", request, dict, is_repeatable=False))
    return report


def get_training(client: Client, training_id: str) -> dict[str, Any]:
    """Return the report of a training run."""
    return client.run(Operation("GET", _training_path(training_id), receive_json(dict)))


def cancel_training(client: Client, training_id: str) -> None:
    """Cancel a training run."""
    client.run(Operation("DELETE", _training_path(training_id), receive_json(bool), is_repeatable=False))


def _training_path(training_id: str) -> str:
    return f"/trainings/{quote(training_id, safe='')}"
