"""Clients of the chaos test: well-behaved clients, which check every response, and misbehaving clients."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import httpx2
from common import TIFF
from faults import STUCK_SECONDS, World
from server import Stack

FINAL_STATES = {"done", "failed", "cancelled", "expired"}
# Types of the problems that an invalid file may cause.
FILE_PROBLEMS = {"ambiguous-axes", "bad-file", "bad-parameter", "too-large", "unsupported-media"}


class Client(threading.Thread):
    """A client with an API key, whose thread sends requests until the journal's event `stop_requested` is set."""

    def __init__(self, world: World, key: str, seed: int) -> None:
        super().__init__()
        self._world, self._journal, self._rng = world, world.journal, random.Random(seed)
        self._http = httpx2.Client(verify=world.tls_context, timeout=STUCK_SECONDS)
        self._headers = {"Authorization": f"Bearer {key}"}
        # Finished jobs whose results are fetched later, and must still be the same then.
        self._finished: dict[str, Stack] = {}
        # Finished jobs whose deletion failed. On a full disk, the service deletes the result before the job.
        self._partly_deleted = set[str]()

    def run(self) -> None:
        try:
            with self._http:
                while not self._journal.stop_requested.is_set():
                    self.act()
                    time.sleep(self._rng.uniform(0, 0.1))
                for job, stack in list(self._finished.items()):
                    self.fetch_result(job, stack)
        except Exception as error:  # noqa: BLE001 - a thread that dies silently would look like success
            self._journal.add_violation("clients understand every response", repr(error))

    def act(self) -> None:
        """Perform one random action."""
        actions = [self.wait_for_labels, self.run_job, self.cancel, self.inspect, self.fetch_finished_result]
        self._rng.choices(actions, [4, 6, 1, 2, 1])[0]()

    def wait_for_labels(self) -> None:
        stack = self.choose_stack()
        if response := self.send_request("POST", "/segment", self.make_body(stack)):
            self.compare(response, stack, "labels waited for")

    def run_job(self) -> None:
        """Submit a job and wait until it ends; fetch the result now or later."""
        stack, began = self.choose_stack(), time.monotonic()
        if (job := self.submit(stack)) is None or (view := self.poll_job(job, began)) is None:
            return
        if view["state"] == "done":
            self._finished[job] = stack
            if self._rng.random() < 0.7:
                self.fetch_result(job, stack)
            return
        slug = view["problem"]["type"].rpartition(":")[2] if view["problem"] else view["state"]
        if not self._journal.is_excused(slug, began):
            self._journal.add_violation(
                "every job ends in the expected state", f"{job} is {view['state']}: {view['problem']}"
            )
        self._journal.count(f"jobs failed: {slug}")
        self.send_request("DELETE", f"/jobs/{job}")

    def cancel(self) -> None:
        began = time.monotonic()
        if (job := self.submit(self.choose_stack())) is None:
            return
        time.sleep(self._rng.uniform(0, 0.5))
        if self.send_request("DELETE", f"/jobs/{job}", allowed={"unknown-job"}) is None:
            return
        self._journal.count("jobs cancelled")
        # DELETE removes a finished job. Any other job is cancelled, and remains until a second DELETE.
        view = self.poll_job(job, began, if_unknown="expected")
        if view is not None and view["state"] not in {"cancelled", "failed"}:
            self._journal.add_violation(
                "every job ends in the expected state", f"{job} was cancelled, but is {view['state']}"
            )

    def inspect(self) -> None:
        response = self.send_request("POST", "/inspect", self.choose_stack().content)
        if response is not None and response.json()["problem"] is not None:
            self._journal.add_violation("valid requests succeed", response.text)

    def fetch_finished_result(self) -> None:
        if self._finished:
            self.fetch_result(*self._rng.choice(list(self._finished.items())))

    def fetch_result(self, job: str, stack: Stack) -> None:
        """Compare the result of a finished job with the expected labels, and delete the job."""
        began, allowed = time.monotonic(), {"result-gone"} if job in self._partly_deleted else set[str]()
        while (response := self.send_request("GET", f"/jobs/{job}/result", allowed=allowed)) is None:
            if self._journal.is_stuck(began):
                return
        if response.is_success:
            self.compare(response, stack, "labels fetched later")
        if self.send_request("DELETE", f"/jobs/{job}", allowed={"unknown-job"}) is not None:
            del self._finished[job]
        else:
            self._partly_deleted.add(job)

    def submit(self, stack: Stack) -> str | None:
        """Submit a job; return its ID, or None if the request failed and a fault excuses the failure."""
        response = self.send_request("POST", "/jobs", self.make_body(stack))
        if response is None:
            return None
        self._journal.count("jobs accepted")
        return str(response.json()["id"])

    def poll_job(self, job: str, began: float, if_unknown: str = "violation") -> dict[str, Any] | None:
        """Poll a job until it ends, and return it; None if it does not end in time, or is unknown.

        An unknown job is a violation unless `if_unknown` is "expected".
        """
        while True:
            response = self.send_request("GET", f"/jobs/{job}", allowed={"unknown-job"})
            if response is not None and response.status_code == 404:
                if if_unknown == "violation":
                    self._journal.add_violation("no accepted job is lost", job)
                return None
            if response is not None and (view := response.json())["state"] in FINAL_STATES:
                return dict(view)
            if self._journal.is_stuck(began):
                self._journal.add_violation("no job is stuck", f"{job}: {response.text if response else 'no response'}")
                return None
            time.sleep(self._rng.uniform(0.05, 0.3))

    def send_request(
        self,
        method: str,
        path: str,
        content: bytes | Iterator[bytes] | None = None,
        allowed: Collection[str] = (),
    ) -> httpx2.Response | None:
        """Send a request; return the response if it succeeds or has a problem of an allowed type, else None.

        A failure that no recent fault explains is a violation.
        """
        began, response, text = time.monotonic(), None, ""
        headers = self._headers | (TIFF if content is not None else {})
        try:
            response = self._http.request(method, self._world.server.address + path, content=content, headers=headers)
            if response.is_success:
                return response
            text, slug = response.text, str(response.json()["type"]).rpartition(":")[2]
        except httpx2.TimeoutException:
            slug = "no response"
        except httpx2.TransportError as error:
            text, slug = repr(error), "connection"
        if response is not None and slug in allowed:
            return response
        status = response.status_code if response is not None else 0
        if status == 500 or not self._journal.is_excused(slug, began):
            self._journal.add_violation("valid requests succeed", f"{method} {path}: {slug} {text}")
        self._journal.count(f"retried: {slug}")
        time.sleep(self._rng.uniform(0.1, 0.5))
        return None

    def make_body(self, stack: Stack) -> bytes | Iterator[bytes]:
        """Return a request body with the stack: sometimes a slow upload, sometimes a file that no cache can contain."""
        if self._rng.random() < 0.1:
            return stack.iterate_slowly(self._rng.uniform(0.1, 2))
        return stack.content + (self._rng.randbytes(16) if self._rng.random() < 0.5 else b"")

    def choose_stack(self) -> Stack:
        stacks = self._world.stacks
        return self._rng.choices(stacks, [10] * (len(stacks) - 2) + [2, 2])[0]

    def compare(self, response: httpx2.Response, stack: Stack, name: str) -> None:
        self._journal.count(name)
        if not stack.has_labels(response.content):
            self._journal.add_violation("labels equal those computed alone", name)


class MisbehavingClient(Client):
    """A misbehaving client. The server may refuse its requests, but not with 5xx, and no other client may suffer."""

    def act(self) -> None:
        self._rng.choice([self.hang_up, self.send_slowly, self.read_slowly, self.post_hostile, self.post_hostile])()

    def hang_up(self) -> None:
        self.send(self._rng.random(), 0.0)

    def send_slowly(self) -> None:
        self.send(self._rng.random(), self._rng.uniform(1, 5))

    def read_slowly(self) -> None:
        self.send(1.0, 0.0, reads=self._rng.randrange(1, 40))

    def send(self, fraction: float, seconds: float, reads: int = 0) -> None:
        """Send a fraction of a request over `seconds`, read a little of the response, and disconnect."""
        body, path = self.choose_stack().content, self._rng.choice(["/segment", "/jobs", "/inspect"])
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {self._headers['Authorization']}\r\n"
        data = (head + f"Content-Type: image/tiff\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body
        with suppress(OSError), self._world.connect() as connection:
            sent = data[: int(fraction * len(data))]
            step = max(len(sent) // 20, 1)
            for start in range(0, len(sent), step):
                connection.sendall(sent[start : start + step])
                time.sleep(seconds / 20)
            for _ in range(reads):
                connection.recv(512)
                time.sleep(0.1)
            time.sleep(self._rng.uniform(0, 0.5))
        self._journal.count("hung up")

    def post_hostile(self) -> None:
        """Upload a hostile file; if a job accepts it, delete the job."""
        path, began = self._rng.choice(["/segment", "/jobs", "/inspect"]), time.monotonic()
        response = self.send_request("POST", path, self.make_hostile_file(), allowed=FILE_PROBLEMS)
        self._journal.count("hostile files posted")
        if response is None or response.status_code != 202:
            return
        job = response.json()["id"]
        view = self.poll_job(job, began) if self._rng.random() < 0.5 else None
        if view is not None and view["problem"] is not None:
            slug = view["problem"]["type"].rpartition(":")[2]
            if slug not in FILE_PROBLEMS and not self._journal.is_excused(slug, began):
                self._journal.add_violation(
                    "every job ends in the expected state", f"{job} of a hostile file: {view['problem']}"
                )
        self.send_request("DELETE", f"/jobs/{job}", allowed={"unknown-job"})

    def make_hostile_file(self) -> bytes:
        """Return a random hostile file, or a valid one with random bytes changed and sometimes truncated."""
        if self._world.hostile and self._rng.random() < 0.5:
            return self._rng.choice(self._world.hostile).read_bytes()
        content = bytearray(self._rng.choice(self._world.stacks[:-2]).content)
        for _ in range(self._rng.randrange(1, 8)):
            # The tags are at the start of the file, and after the pixels.
            position = self._rng.choice([self._rng.randrange(400), self._rng.randrange(len(content))])
            content[position] = self._rng.randrange(256)
        return bytes(content[: self._rng.choice([len(content), self._rng.randrange(8, len(content))])])
