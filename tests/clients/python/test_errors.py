from __future__ import annotations

import json
import pickle
import re
from email.utils import formatdate
from time import time

import pytest
from paths import ROOT
from stackseg_client import errors
from stackseg_client.errors import ProblemError, parse_problem

from service.api.messages.error_responses import build_problem_document


def parse_slug(slug: str, status: int = 422, **headers: str) -> ProblemError:
    document = build_problem_document(slug, status, "What to do.", "6d6c0b4e-6f0e-4c8e-9a54-1f0d0c3a7f11")
    members = document | {"parameter": "axes", "suggested": {"axes": "TZYX"}}
    return parse_problem(status, headers, json.dumps(members).encode())


def list_documented_problems() -> list[tuple[int, str]]:
    """Return status and slug of the problems in the API reference that requests of this client can cause."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    problems = re.findall(r"^\| ([45]\d\d) \| `([a-z-]+)` \|", text, re.MULTILINE)
    # The client has no annotations, training runs, browser pages, conditions and malformed requests.
    others = {"unknown-annotation", "unknown-training", "model-kept", "cross-site", "method-not-allowed"}
    others |= {"precondition-failed", "range-not-satisfiable"}
    return [(int(status), slug) for status, slug in problems if slug not in others]


def test_every_documented_problem_has_a_class_of_its_kind() -> None:
    problems = list_documented_problems()
    assert len(problems) > 25
    classes = {type(parse_slug(slug, status)) for status, slug in problems}
    assert len(classes) == len(problems)
    for status, slug in problems:
        error = parse_slug(slug, status)
        base = errors.RequestError if status < 500 else errors.CapacityError if status > 500 else errors.ServerError
        assert isinstance(error, errors.CapacityError if status == 429 else base), slug
        assert type(error) not in {ProblemError, errors.RequestError, errors.CapacityError}, slug


def test_members_of_the_document_are_attributes() -> None:
    error = parse_slug("ambiguous-axes", 422)
    assert isinstance(error, errors.AmbiguousAxes)
    assert (str(error), error.parameter, error.suggested) == ("What to do.", "axes", {"axes": "TZYX"})
    assert error.instance == "urn:uuid:6d6c0b4e-6f0e-4c8e-9a54-1f0d0c3a7f11"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.members) == (type(error), error.members)


def test_unknown_problems_have_the_class_of_their_status() -> None:
    for status, expected in ((418, errors.RequestError), (500, errors.ServerError), (503, errors.CapacityError)):
        assert type(parse_slug("of-a-later-version", status)) is expected


def test_responses_of_proxies_are_quoted() -> None:
    error = parse_problem(502, {}, b"<html>\n<h1>Bad Gateway</h1>" + b"x" * 10_000)
    assert (error.type, error.status) == ("about:blank", 502)
    assert "<h1>Bad Gateway</h1>" in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(("header", "expected"), [("7", 7), ("0", 0), ("-3", 0), ("soon", None)])
def test_retry_after_is_a_number_of_seconds(header: str, expected: float | None) -> None:
    assert parse_slug("queue-full", 503, **{"Retry-After": header}).retry_after == expected


def test_retry_after_may_be_a_date() -> None:
    header = formatdate(time() + 60, usegmt=True)
    assert parse_slug("queue-full", 503, **{"Retry-After": header}).retry_after == pytest.approx(60, abs=5)
    # The clock of the server differs.
    headers = {"Retry-After": formatdate(90_060, usegmt=True), "Date": formatdate(90_000, usegmt=True)}
    assert parse_slug("queue-full", 503, **headers).retry_after == 60
