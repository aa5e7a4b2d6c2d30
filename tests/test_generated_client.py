"""A client generated from the OpenAPI document by openapi-python-client, which is not installed by default."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from live import LabelTiff, LiveServer, eager_settings, serve
from paths import ROOT

GENERATOR = shutil.which("openapi-python-client")

# Downloads the sample, and segments it as a raw body, as a form, and as a job. Writes the labels to files.
PROGRAM = """
import io, sys, time
from pathlib import Path
from stackseg_client import Client
from stackseg_client.api.jobs import download_result_jobs_job_result_get as download_result
from stackseg_client.api.jobs import get_job_jobs_job_get as get_job, submit_job_jobs_post as submit_job
from stackseg_client.api.models import download_sample_models_name_sample_get as download_sample
from stackseg_client.api.segmentation import segment_segment_post as segment
from stackseg_client.models import SegmentSegmentPostFilesBody as Form
from stackseg_client.types import File

with Client(sys.argv[1], timeout=120) as client:
    sample = download_sample.sync("nuclei", client=client).payload.read()
    raw = segment.sync(client=client, body=File(io.BytesIO(sample)), overlap=0.1)
    fields = Form(file=File(io.BytesIO(sample), "sample.tif", "image/tiff"), overlap=0.1)
    form = segment.sync(client=client, body=fields)
    job = submit_job.sync(client=client, body=File(io.BytesIO(sample)), overlap=0.1, idempotency_key="a-key")
    again = submit_job.sync(client=client, body=File(io.BytesIO(sample)), overlap=0.1, idempotency_key="a-key")
    assert again.id == job.id
    while get_job.sync(job.id, client=client).state not in {"done", "failed"}:
        time.sleep(0.2)
    for name, file in {"raw": raw, "form": form, "job": download_result.sync(job.id, client=client)}.items():
        Path(f"{name}.tif").write_bytes(file.payload.read())
    problem = segment.sync(client=client, body=File(io.BytesIO(b"no stack")))
    assert (problem.status, problem.type_) == (415, "urn:stackseg:problem:unsupported-media"), problem
"""


@pytest.mark.skipif(GENERATOR is None, reason="openapi-python-client is not installed")
def test_generated_client_segments_the_sample(tmp_path: Path) -> None:
    with serve(eager_settings(ROOT / "models", models={"serve": ["nuclei"]})) as live:
        _generate_client(live, tmp_path)
        assert GENERATOR is not None
        python = Path(GENERATOR).resolve().with_name("python")
        command = [python, "-c", PROGRAM, str(live.client.base_url)]
        completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert completed.returncode == 0, completed.stderr
        expected = live.segment(live.client.get("/models/nuclei/sample").content, overlap="0.1")
    labels = LabelTiff(expected.content).pixels
    assert labels.max() > 10
    for name in ("raw", "form", "job"):
        assert np.array_equal(LabelTiff((tmp_path / f"{name}.tif").read_bytes()).pixels, labels), name


def _generate_client(live: LiveServer, folder: Path) -> None:
    document = folder / "openapi.json"
    document.write_bytes(live.client.get("/openapi.json").content)
    output = folder / "stackseg_client"
    options = ["--path", str(document), "--output-path", str(output), "--meta", "none"]
    subprocess.run([str(GENERATOR), "generate", *options], cwd=folder, capture_output=True, check=True, timeout=120)
