"""Remote stores on object storage and web servers are read in the sandbox, or rejected with the right error."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_server import ObjectServer, serve_objects
from sockets import create_certificate
from zarr_files import write_zarr

from service.core.errors import BadFile, BadParameter, Cancelled, StackSegError, StorageUnavailable, TooLarge
from service.core.quantities import VoxelSize
from service.core.types import Selection
from service.formats import stack_reader
from service.formats.sandbox import limited_response
from service.formats.sandbox.reader import Reader
from service.formats.sandbox.remote_store import RemoteStore, check_url
from service.formats.zarr import reader as zarr_reader
from service.formats.zarr.store import FileRange

LIMIT = 2**28
PIXELS = np.random.default_rng(0).integers(0, 60_000, (2, 9, 40, 50)).astype(np.uint16)
# Key of the file to which all server faults apply. Only this file contains the selected channel of the sharded store.
SHARD = "sharded.zarr/0/c/1/0/0/0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    folder = tmp_path_factory.mktemp("bucket")
    write_zarr(folder / "data" / "plain.zarr", PIXELS, "czyx", "0.4", chunks=(1, 4, 16, 16))
    write_zarr(folder / "data" / "sharded.zarr", PIXELS, "czyx", chunks=(1, 4, 8, 16), shards=(1, 12, 40, 64))
    (folder / "secret.json").write_text("{}")
    with serve_objects(folder) as server:
        yield server


# Environment variables that set a different endpoint for each kind of object storage.
ENDPOINT_VARIABLES = {
    "s3": {"AWS_ENDPOINT": "{url}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "eu-central-1"},
    "gs": {"GOOGLE_BASE_URL": "{url}", "GOOGLE_ALLOW_HTTP": "true"},
    "az": {"AZURE_STORAGE_ENDPOINT": "{url}", "AZURE_ALLOW_HTTP": "true", "AZURE_STORAGE_ACCOUNT_NAME": "lab"},
}


def set_endpoint(cloud: str, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the environment so that a cloud's client uses a local object server. Return the URL of its bucket."""
    for name, value in ENDPOINT_VARIABLES[cloud].items():
        monkeypatch.setenv(name, value.format(url=url))
    return f"{cloud}://data"


@pytest.fixture(params=["http", "s3"])
def prefix(request: pytest.FixtureRequest, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    server.requested_paths.clear()
    server.authorized_paths.clear()
    server.faults.clear()
    if request.param == "http":
        return f"{server.url}/data"
    return set_endpoint(request.param, server.url, monkeypatch)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which creates the certificate, is not installed")
    return create_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.mark.parametrize("prefix", ["http", *ENDPOINT_VARIABLES], indirect=True)
@pytest.mark.parametrize("name", ["plain.zarr", "sharded.zarr"])
def test_selected_pixels_are_read_and_no_others_are_fetched(
    name: str, prefix: str, server: ObjectServer, reader: Reader, tmp_path: Path
) -> None:
    with RemoteStore(f"{prefix}/{name}/") as store:
        volume = reader.read(store, Selection(channel=1), tmp_path)
        assert np.array_equal(volume.read_all()[0], PIXELS[1])
        assert volume.voxel_size == VoxelSize(0.5, 0.2, 0.2)
        assert store.name == name
        chunks = [
            path for path in server.requested_paths if "/0/" in path and not path.endswith((".zarray", "zarr.json"))
        ]
        assert all("/0/1/" in path or "/c/1/" in path for path in chunks)
        assert len(chunks) == (
            3 * 3 * 4 if name == "plain.zarr" else 3 * 5 * 4 + len({"index"}) + (not prefix.startswith("http"))
        )
        server.requested_paths.clear()
        assert reader.inspect(store, Selection()).shape == (2, *PIXELS.shape[1:])
        # Metadata, and one byte of a chunk.
        assert len(server.requested_paths) <= 5
        assert np.array_equal(stack_reader.read(store, Selection(), LIMIT).read_all(), PIXELS)


@pytest.mark.parametrize(
    ("cloud", "credentials"),
    [
        ("s3", {"AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": "secret"}),
        ("gs", {"GOOGLE_BEARER_TOKEN": "secret"}),
        ("az", {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"}),
    ],
)
def test_requests_are_signed_only_if_credentials_are_set(
    cloud: str, credentials: dict[str, str], server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = set_endpoint(cloud, server.url, monkeypatch)
    for has_credentials in (False, True):
        server.authorized_paths.clear()
        for name, value in credentials.items() if has_credentials else ():
            monkeypatch.setenv(name, value)
        with RemoteStore(f"{prefix}/plain.zarr") as store:
            assert store.read([FileRange(".zattrs", 3, 0)]) == [b"{\n "]
        assert server.authorized_paths == ["/data/plain.zarr/.zattrs"] * has_credentials


def test_servers_are_trusted_by_certificate(
    server: ObjectServer, certificate: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_objects(server.folder, certificate) as secure:
        for is_trusted in (False, True):
            if is_trusted:
                monkeypatch.setenv("SSL_CERT_FILE", certificate["ssl_certfile"])
            for prefix in (f"{secure.url}/data", set_endpoint("s3", secure.url, monkeypatch)):
                with RemoteStore(f"{prefix}/plain.zarr") as store:
                    if is_trusted:
                        assert store.read([FileRange(".zattrs", 3, 0)]) == [b"{\n "]
                    else:
                        with pytest.raises(StorageUnavailable, match="failed"):
                            store.read([FileRange(".zattrs", 3, 0)])
        assert secure.requested_paths == ["/data/plain.zarr/.zattrs"] * 2


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (404, None, ""),
        (403, BadFile, "Set credentials"),
        ("cut", (BadFile, StorageUnavailable), "truncated|failed"),
        (500, StorageUnavailable, "not available at the moment"),
        (416, BadFile, "truncated"),
    ],
)
def test_server_errors_are_reported(fault: Any, error: Any, words: str, prefix: str, server: ObjectServer) -> None:
    server.faults = {SHARD: fault}
    with RemoteStore(f"{prefix}/sharded.zarr") as store:
        if error is None:
            assert not stack_reader.read(store, Selection(channel=1), LIMIT).read_all().any()
            return
        with pytest.raises(error, match=words) as raised:
            stack_reader.read(store, Selection(channel=1), LIMIT)
        assert "127.0.0.1" not in str(raised.value)


def test_reader_recovers_after_a_server_error(server: ObjectServer, reader: Reader, tmp_path: Path) -> None:
    server.faults = {SHARD: 500}
    with RemoteStore(f"{server.url}/data/sharded.zarr") as store:
        with pytest.raises(StorageUnavailable, match="not available at the moment"):
            reader.read(store, Selection(channel=1), tmp_path)
        server.faults = {}
        assert np.array_equal(reader.read(store, Selection(channel=1), tmp_path).read_all()[0], PIXELS[1])


def test_store_of_20_gb_is_described_from_two_objects(server: ObjectServer, reader: Reader) -> None:
    path = write_zarr(server.folder / "data" / "big.zarr", np.ones((8, 64, 64), np.uint16), chunks=(8, 64, 64))
    array_metadata = json.loads((path / "0" / "zarr.json").read_text()) | {"shape": [1024, 3200, 3200]}
    (path / "0" / "zarr.json").write_text(json.dumps(array_metadata))
    server.requested_paths.clear()
    with RemoteStore(f"{server.url}/data/big.zarr") as store:
        with pytest.raises(TooLarge, match=r"decodes to 20\.97 GB"):
            reader.inspect(store, Selection())
        assert server.requested_paths == ["/data/big.zarr/zarr.json", "/data/big.zarr/0/zarr.json"]
        assert zarr_reader.open_stack(store, Selection(), 2**40).read_region((range(3), range(70), range(9))).any()
    chunks = sorted(path for path in server.requested_paths if "/0/c/" in path)
    assert chunks == ["/data/big.zarr/0/c/0/0/0", "/data/big.zarr/0/c/0/1/0"]


def test_redirects_from_web_servers_are_not_followed(server: ObjectServer, reader: Reader, tmp_path: Path) -> None:
    server.faults = {"zarr.json": f"{server.url}/secret.json"}
    server.requested_paths.clear()
    with (
        RemoteStore(f"{server.url}/data/sharded.zarr") as store,
        pytest.raises(BadFile, match=r"redirects zarr\.json to another URL"),
    ):
        reader.read(store, Selection(), tmp_path)
    assert server.requested_paths == ["/data/sharded.zarr/zarr.json"]
    server.faults = {}


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_redirects_from_object_storage_are_https_only_and_without_credentials(
    is_encrypted: bool, server: ObjectServer, certificate: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certificate["ssl_certfile"])
    with (
        serve_objects(server.folder, certificate) as endpoint,
        serve_objects(server.folder, certificate if is_encrypted else None) as other,
    ):
        prefix = set_endpoint("s3", endpoint.url, monkeypatch)
        monkeypatch.delenv("AWS_ALLOW_HTTP")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ada")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        endpoint.faults = {"zarr.json": f"{other.url}/secret.json"}
        with RemoteStore(f"{prefix}/sharded.zarr") as store:
            if is_encrypted:
                assert store.read([FileRange("zarr.json", 3)]) == [b"{}"]
            else:
                with pytest.raises(StorageUnavailable, match="failed"):
                    store.read([FileRange("zarr.json", 3)])
        assert set(endpoint.authorized_paths) == {"/data/sharded.zarr/zarr.json"}
        assert (other.requested_paths, other.authorized_paths) == (["/secret.json"] if is_encrypted else [], [])


def test_cancelled_request_does_not_wait_for_a_slow_store(
    prefix: str, server: ObjectServer, reader: Reader, tmp_path: Path
) -> None:
    server.faults = {SHARD: 3.0}
    cancelled = threading.Event()
    with RemoteStore(f"{prefix}/sharded.zarr") as store, ThreadPoolExecutor(1) as pool:
        future = pool.submit(reader.read, store, Selection(channel=1), tmp_path, cancelled=cancelled.is_set)
        with pytest.raises(TimeoutError):
            future.result(0.5)
        start = time.monotonic()
        cancelled.set()
        with pytest.raises(Cancelled):
            future.result(10)
        assert time.monotonic() - start < 2
    server.faults = {}


def test_compromised_child_cannot_fetch_forever(
    server: ObjectServer, make_compromised_reader: Callable[..., Reader]
) -> None:
    compromised_reader = make_compromised_reader('b\'{"fetch": [["nothing", 1, null]]}\\n\'', seconds=0.05)
    deadline = time.monotonic() + 10
    with RemoteStore(f"{server.url}/data") as store, pytest.raises(TooLarge, match="took more than"):
        compromised_reader.inspect(store, Selection(), cancelled=lambda: time.monotonic() > deadline)


@contextmanager
def serve_forever(data: bytes, pause_seconds: float) -> Iterator[str]:
    """Run a server that answers each connection with endless repetitions of `data`. Yield its URL."""
    stopped = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1000)
            while not stopped.wait(pause_seconds):
                connection.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stopped.set()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("data", [b"HTTP/1.1 100 Continue\r\n\r\n", b"H", b"HTTP/1.1 200 OK\r\nX: y\r\n"])
def test_endless_responses_end_at_the_time_limit_for_an_object(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_response, "OBJECT_TIMEOUT_SECONDS", 1.0)
    start_time = time.monotonic()
    with (
        serve_forever(data, 0.05) as url,
        RemoteStore(f"{url}/a.zarr") as store,
        pytest.raises(StorageUnavailable, match=r"takes too long|failed"),
    ):
        store.read([FileRange(".zattrs", 100)])
    assert time.monotonic() - start_time < 10


def test_unreachable_server_is_reported(reader: Reader, tmp_path: Path) -> None:
    with (
        RemoteStore("http://127.0.0.1:9/a.zarr") as store,
        pytest.raises(StorageUnavailable, match="connection failed"),
    ):
        reader.inspect(store, Selection())


@pytest.mark.parametrize(
    "key", ["../secret.json", "/secret.json", "a/../../secret.json", "", "a//b", ".hidden", "a\\b", "a\nb", "\ud800"]
)
def test_keys_cannot_leave_the_store(key: str, prefix: str, server: ObjectServer) -> None:
    with RemoteStore(f"{prefix}/plain.zarr") as store, pytest.raises(BadFile, match="not a path inside"):
        store.read([FileRange(key, 100)])
    # A request that was cancelled in the previous test may arrive late.
    assert [path for path in server.requested_paths if not path.endswith(SHARD)] == []


def test_fetched_size_is_limited(prefix: str, server: ObjectServer) -> None:
    with RemoteStore(f"{prefix}/plain.zarr") as store:
        with pytest.raises(BadFile, match=r"larger than|at most"):
            store.read([FileRange(".zattrs", 10)])
        with pytest.raises(TooLarge, match="512 MiB"):
            store.read([FileRange(".zattrs", 2**40)])
        with pytest.raises(TooLarge, match="512 MiB"):
            store.read([FileRange(".zattrs", 2**40), FileRange("nothing", -(2**40))])
        with pytest.raises(StackSegError):
            store.read([FileRange(".zattrs", 10, 10_000)])
        assert store.read([FileRange(".zattrs", 3, 0), FileRange("nothing", 5, 1)]) == [b"{\n ", None]


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/a", "file:///etc", "s3:///a", "s3://key:secret@bucket/a", "https://user@host/a", "http://host/a?b=c",
        "http://host/a#b", "http://host:port/a", "http://[::1/a", "gopher://host", "http://host/a\\..\\b",
        "http://host/a%5c..%5Cb",
    ],
)  # fmt: skip
def test_unsupported_urls_are_rejected(url: str) -> None:
    with pytest.raises(BadParameter, match="Set credentials in the environment"):
        check_url(url)


def test_missing_storage_account_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(BadParameter, match="Account must be specified"):
        RemoteStore("az://container/a.zarr")


@pytest.mark.parametrize("name", ["stack.tif", "Stack.TIFF", "stack.czi", "stack.ozx"])
def test_urls_of_single_files_are_refused(name: str) -> None:
    with pytest.raises(BadParameter, match=f"Only OME-Zarr images are read from URLs. Download {name}"):
        RemoteStore(f"https://images.example.org/{name}")
