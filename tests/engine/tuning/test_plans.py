import json
import os
import pwd
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from service.engine.tuning import plans
from service.engine.tuning.plans import EngineConfig, EnginePlan, Outcome, Trial, Verdict

CONFIG = EngineConfig("compiled", "bf16", "channels_last_3d", 4, "default")
PLAN = EnginePlan(
    "nuclei",
    CONFIG,
    (
        Trial(CONFIG, Verdict(Outcome.CHOSEN), 12.5, 0.0005, 9.0),
        Trial(EngineConfig("eager", "fp32", "contiguous", 2), Verdict(Outcome.SKIPPED, "no time")),
    ),
    31.5,
    {"device": "a processor", "torch": "2.13", "weights": "abc", "threads": "2"},
    tuned=True,
)


def test_saved_plan_is_found_only_under_the_same_circumstances(tmp_path):
    plans.save(tmp_path / "new", PLAN)
    assert plans.find(tmp_path / "new", "nuclei", PLAN.circumstances) == PLAN
    assert [file.suffix for file in (tmp_path / "new").iterdir()] == [".json"]
    assert plans.find(tmp_path / "new", "cells", PLAN.circumstances) is None
    for change in ({"torch": "2.14"}, {"threads": "4"}):
        assert plans.find(tmp_path / "new", "nuclei", PLAN.circumstances | change) is None


@pytest.mark.parametrize(
    ("verdict", "string"),
    [
        (Verdict(Outcome.CHOSEN), "chosen"),
        (Verdict(Outcome.SKIPPED, "bf16: as good"), "skipped: bf16: as good"),
        (Verdict(Outcome.SLOWER, "80% of the speed of eager"), "80% of the speed of eager"),
    ],
)
def test_verdict_is_serialized_as_a_string(verdict, string):
    trial, adapter = Trial(CONFIG, verdict), TypeAdapter(Trial)
    assert adapter.dump_python(trial, mode="json")["verdict"] == string
    assert adapter.validate_json(adapter.dump_json(trial)) == trial
    assert adapter.json_schema(mode="serialization")["properties"]["verdict"]["type"] == "string"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"[1", b"\xff"),
        *({"precision": "fp8"}, {"memory_format": "rows"}, {"sw_batch_size": 0}, {"streams": 99}),
    ],
    ids=repr,
)
def test_damaged_or_invalid_plan_is_ignored(tmp_path, content):
    plans.save(tmp_path, PLAN)
    (file,) = tmp_path.iterdir()
    if isinstance(content, dict):
        plan = json.loads(file.read_bytes())
        plan["choice"].update(content)
        content = json.dumps(plan).encode()
    file.write_bytes(content)
    assert plans.find(tmp_path, "nuclei", PLAN.circumstances) is None
    assert plans.find_all(tmp_path, "nuclei", "abc") == ()


def test_full_disk_leaves_no_partial_plan(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="large"):
            plans.save(tmp_path, PLAN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_plans_of_a_model_are_listed_newest_first_and_deleted_files_are_skipped(tmp_path):
    older_plan = EnginePlan("nuclei", CONFIG, (), 1.0, {"device": "another", "weights": "abc"})
    other_plans = (
        EnginePlan("nuclei-2", CONFIG, (), 1.0, older_plan.circumstances),
        EnginePlan("nuclei", CONFIG, (), 1.0, {}),
    )
    for plan in (older_plan, PLAN, *other_plans):
        plans.save(tmp_path, plan)
    for file in tmp_path.glob("*"):
        if plans._read(file) == older_plan:
            os.utime(file, (0, 0))
    (tmp_path / "nuclei-gone.json").symlink_to(tmp_path / "deleted")
    assert plans.find_all(tmp_path, "nuclei", "abc") == (PLAN, older_plan)
    assert plans.find_all(tmp_path / "nowhere", "nuclei", "abc") == ()


def test_unused_plans_are_deleted_when_another_one_is_saved(tmp_path):
    names = ("unused", "used", "new")
    for name in names[:2]:
        plans.save(tmp_path, replace(PLAN, model=name))
    for file in tmp_path.iterdir():
        os.utime(file, (0, time.time() - plans.MAX_UNUSED_SECONDS - 60))
    assert plans.find(tmp_path, "used", PLAN.circumstances) is not None
    plans.save(tmp_path, replace(PLAN, model="new"))
    assert [plans.find(tmp_path, name, PLAN.circumstances) is not None for name in names] == [False, True, True]
    assert len(list(tmp_path.iterdir())) == 2


def test_plan_is_formatted_as_a_table():
    title, chosen_row, skipped_row = PLAN.format_lines()
    assert title == "tuned in 32 s on a processor, 2 threads:"
    assert next(replace(PLAN, tuned=False).format_lines()).startswith("checked in 32 s")
    assert "compiled (default) bf16 channels_last_3d x4" in chosen_row
    assert "12.5 windows/s" in chosen_row
    assert "0.050% differ" in chosen_row
    assert "built in 9.0 s" in chosen_row
    assert skipped_row.endswith("skipped: no time")


def test_plans_are_stored_in_the_configured_folder_or_the_users_cache(tmp_path, monkeypatch):
    assert plans.resolve_folder(tmp_path) == tmp_path / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert plans.resolve_folder(None) == Path("/caches/stackseg/plans")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert plans.resolve_folder(None) == Path("~/.cache/stackseg/plans").expanduser()


def test_plans_of_a_user_without_a_home_directory_are_not_stored(monkeypatch):
    """Containers may run as a user ID without a name."""

    def find_no_user(_uid):
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", find_no_user)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = plans.resolve_folder(None)
    assert plans.find_all(folder, PLAN.model, "hash") == ()
    assert plans.find(folder, PLAN.model, PLAN.circumstances) is None
    with pytest.raises(OSError, match="Not a directory"):
        plans.save(folder, PLAN)


def test_digest_depends_on_the_sources_of_engines_and_given_folders(tmp_path):
    (tmp_path / "windows").mkdir()
    digests = {plans.hash_sources(), plans.hash_sources(tmp_path)}
    for name in ("blending.py", "windows/kernels.cpp"):
        (tmp_path / name).write_text("A = 1\n")
        plans.hash_sources.cache_clear()
        digests.add(plans.hash_sources(tmp_path))
    (tmp_path / "notes.txt").write_text("nothing")
    plans.hash_sources.cache_clear()
    digests.add(plans.hash_sources(tmp_path))
    assert len(digests) == 3, "no file, one file, and two files"
