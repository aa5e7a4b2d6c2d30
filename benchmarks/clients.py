"""Clients of the chaos run: well-behaved ones, who check every answer, and rude ones."""

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

OVER = {"done", "failed", "cancelled", "expired"}
# Types of problems that the file of a request may cause.
REFUSALS = {"ambiguous-axes", "bad-file", "bad-parameter", "too-large", "unsupported-media"}


class User(threading.Thread):
    """A client with an API key; its thread acts until the journal is over, and then lets all of its jobs end."""

    def __init__(self, world: World, key: str, seed: int) -> None:
        super().__init__()
        self._world, self._journal, self._rng = world, world.journal, random.Random(seed)
        self._http = httpx2.Client(verify=world.trust, timeout=STUCK_SECONDS)
        self._headers = {"Authorization": f"Bearer {key}"}
        # Jobs that were done, are kept for a while, and must be the same later.
        self._kept: dict[str, Stack] = {}

    def run(self) -> None:
        try:
            with self._http:
                while not self._journal.over.is_set():
                    self.act()
                    time.sleep(self._rng.uniform(0, 0.1))
                for job, stack in list(self._kept.items()):
                    self.take(job, stack)
        except Exception as error:  # noqa: BLE001 - a thread that ends unseen would be taken for a good one
            self._journal.blame("clients understand every answer", repr(error))

    def act(self) -> None:
        """Do what a well-behaved user might do next."""
        habits = [self.wait_for_labels, self.come_back_for_labels, self.cancel, self.inspect, self.take_kept]
        self._rng.choices(habits, [4, 6, 1, 2, 1])[0]()

    def wait_for_labels(self) -> None:
        stack = self.choose_stack()
        if answer := self.ask("POST", "/segment", self.body(stack)):
            self.compare(answer, stack, "labels waited for")

    def come_back_for_labels(self) -> None:
        stack, began = self.choose_stack(), time.monotonic()
        if (job := self.submit(stack)) is None or (view := self.follow(job, began)) is None:
            return
        if view["state"] == "done":
            self._kept[job] = stack
            if self._rng.random() < 0.7:
                self.take(job, stack)
            return
        slug = view["problem"]["type"].rpartition(":")[2] if view["problem"] else view["state"]
        if not self._journal.excuses(slug, began):
            self._journal.blame("every job ends as it should", f"{job} is {view['state']}: {view['problem']}")
        self._journal.count(f"jobs failed: {slug}")
        self.ask("DELETE", f"/jobs/{job}")

    def cancel(self) -> None:
        began = time.monotonic()
        if (job := self.submit(self.choose_stack())) is None:
            return
        time.sleep(self._rng.uniform(0, 0.5))
        if self.ask("DELETE", f"/jobs/{job}", allowed={"unknown-job"}) is None:
            return
        self._journal.count("jobs cancelled")
        # What was done is forgotten at once, what was not by asking once more.
        view = self.follow(job, began, gone="fine")
        if view is not None and view["state"] not in {"cancelled", "failed"}:
            self._journal.blame("every job ends as it should", f"{job} was cancelled and is {view['state']}")

    def inspect(self) -> None:
        answer = self.ask("POST", "/inspect", self.choose_stack().content)
        if answer is not None and answer.json()["problem"] is not None:
            self._journal.blame("well-behaved requests are answered", answer.text)

    def take_kept(self) -> None:
        if self._kept:
            self.take(*self._rng.choice(list(self._kept.items())))

    def take(self, job: str, stack: Stack) -> None:
        """Compare the result of a job that is done, and delete the job."""
        began = time.monotonic()
        while (answer := self.ask("GET", f"/jobs/{job}/result")) is None:
            if self._journal.is_stuck(began):
                return
        self.compare(answer, stack, "labels fetched later")
        if self.ask("DELETE", f"/jobs/{job}", allowed={"unknown-job"}) is not None:
            del self._kept[job]

    def submit(self, stack: Stack) -> str | None:
        """Return the id of a new job."""
        answer = self.ask("POST", "/jobs", self.body(stack))
        if answer is None:
            return None
        self._journal.count("jobs accepted")
        return str(answer.json()["id"])

    def follow(self, job: str, began: float, gone: str = "lost") -> dict[str, Any] | None:
        """Ask for a job until it is over; None where it never is, or is unknown."""
        while True:
            answer = self.ask("GET", f"/jobs/{job}", allowed={"unknown-job"})
            if answer is not None and answer.status_code == 404:
                if gone == "lost":
                    self._journal.blame("no accepted job is lost", job)
                return None
            if answer is not None and (view := answer.json())["state"] in OVER:
                return dict(view)
            if self._journal.is_stuck(began):
                self._journal.blame("no job is stuck", f"{job}: {answer.text if answer else 'no answer'}")
                return None
            time.sleep(self._rng.uniform(0.05, 0.3))

    def ask(
        self,
        method: str,
        path: str,
        content: bytes | Iterator[bytes] | None = None,
        allowed: Collection[str] = (),
    ) -> httpx2.Response | None:
        """Return an answer of success or of an allowed type; None where a fault excuses that there is none."""
        began, answer, text = time.monotonic(), None, ""
        headers = self._headers | (TIFF if content is not None else {})
        try:
            answer = self._http.request(method, self._world.server.address + path, content=content, headers=headers)
            if answer.is_success:
                return answer
            text, slug = answer.text, str(answer.json()["type"]).rpartition(":")[2]
        except httpx2.TimeoutException:
            slug = "no answer"
        except httpx2.TransportError as error:
            text, slug = repr(error), "connection"
        if answer is not None and slug in allowed:
            return answer
        status = answer.status_code if answer is not None else 0
        if status == 500 or not self._journal.excuses(slug, began):
            self._journal.blame("well-behaved requests are answered", f"{method} {path}: {slug} {text}")
        self._journal.count(f"retried: {slug}")
        time.sleep(self._rng.uniform(0.1, 0.5))
        return None

    def body(self, stack: Stack) -> bytes | Iterator[bytes]:
        """A stack, half of the time in a file that was never posted before, at times in pieces that come slowly."""
        if self._rng.random() < 0.1:
            return stack.slowly(self._rng.uniform(0.1, 2))
        return stack.content + (self._rng.randbytes(16) if self._rng.random() < 0.5 else b"")

    def choose_stack(self) -> Stack:
        stacks = self._world.stacks
        return self._rng.choices(stacks, [10] * (len(stacks) - 2) + [2, 2])[0]

    def compare(self, answer: httpx2.Response, stack: Stack, name: str) -> None:
        self._journal.count(name)
        if not stack.is_segmented(answer.content):
            self._journal.blame("every label is that computed alone", name)


class RudeUser(User):
    """A client that nobody wants; it may be refused, but not with 5xx, and only the connection is its own."""

    def act(self) -> None:
        self._rng.choice([self.hang_up, self.send_slowly, self.read_slowly, self.post_hostile, self.post_hostile])()

    def hang_up(self) -> None:
        self.send(self._rng.random(), 0.0)

    def send_slowly(self) -> None:
        self.send(self._rng.random(), self._rng.uniform(1, 5))

    def read_slowly(self) -> None:
        self.send(1.0, 0.0, reads=self._rng.randrange(1, 40))

    def send(self, share: float, seconds: float, reads: int = 0) -> None:
        """Send a share of a request, over so many seconds, read a little, and hang up."""
        body, path = self.choose_stack().content, self._rng.choice(["/segment", "/jobs", "/inspect"])
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {self._headers['Authorization']}\r\n"
        data = (head + f"Content-Type: image/tiff\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body
        with suppress(OSError), self._world.connect() as connection:
            sent = data[: int(share * len(data))]
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
        """Post a hostile file; a job of it is deleted at some time."""
        path, began = self._rng.choice(["/segment", "/jobs", "/inspect"]), time.monotonic()
        answer = self.ask("POST", path, self.hostile_file(), allowed=REFUSALS)
        self._journal.count("hostile files posted")
        if answer is None or answer.status_code != 202:
            return
        job = answer.json()["id"]
        view = self.follow(job, began) if self._rng.random() < 0.5 else None
        if view is not None and view["problem"] is not None:
            slug = view["problem"]["type"].rpartition(":")[2]
            if slug not in REFUSALS and not self._journal.excuses(slug, began):
                self._journal.blame("every job ends as it should", f"{job} of a hostile file: {view['problem']}")
        self.ask("DELETE", f"/jobs/{job}", allowed={"unknown-job"})

    def hostile_file(self) -> bytes:
        if self._world.hostile and self._rng.random() < 0.5:
            return self._rng.choice(self._world.hostile).read_bytes()
        content = bytearray(self._rng.choice(self._world.stacks[:-2]).content)
        for _ in range(self._rng.randrange(1, 8)):
            # The tags lie in the first bytes, and behind the pixels.
            place = self._rng.choice([self._rng.randrange(400), self._rng.randrange(len(content))])
            content[place] = self._rng.randrange(256)
        return bytes(content[: self._rng.choice([len(content), self._rng.randrange(8, len(content))])])
