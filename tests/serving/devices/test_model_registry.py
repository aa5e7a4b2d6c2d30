from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeSegmenter, FakeSegmenterFactory, close_gate, wait_until
from runtimes import get_loaded_segmenter, run_runtime, settings

from service.core.config import Settings
from service.core.errors import BrokenModel, NotReady, UnknownModel


def test_models_become_ready_after_startup(bands_repository: Path, tmp_path: Path) -> None:
    fakes = FakeSegmenterFactory(close_gate)
    with run_runtime(settings(bands_repository, tmp_path), fakes) as runtime:
        assert [model.state for model in runtime.models.list_states()] == ["loading"]
        wait_until(lambda: runtime.list_unready_reasons() == ("bands is being loaded: warming up (for 0 s).",))
        with pytest.raises(NotReady):
            get_loaded_segmenter(runtime.models, None)
        wait_until(lambda: fakes)
        fakes[0].gate.set()
        wait_until(lambda: runtime.list_unready_reasons() == ())
        assert get_loaded_segmenter(runtime.models, "bands") is fakes[0]
        assert get_loaded_segmenter(runtime.models, None) is fakes[0]


@pytest.mark.parametrize("error", [BrokenModel("no weights"), RuntimeError("unexpected"), TypeError("unexpected")])
def test_default_model_that_cannot_be_loaded_makes_the_service_unready(
    bands_repository: Path, tmp_path: Path, error: Exception
) -> None:
    def load(spec: Any, config: Settings, _driver: Any) -> FakeSegmenter:
        raise error

    with run_runtime(settings(bands_repository, tmp_path), load) as runtime:
        wait_until(lambda: runtime.models.list_states()[0].state == "failed")
        assert str(error) in (runtime.models.list_states()[0].problem or "")
        assert runtime.list_unready_reasons() == ("bands cannot be used. GET /models and the log show the reason.",)
        with pytest.raises(BrokenModel, match="bands"):
            get_loaded_segmenter(runtime.models, None)


def test_models_with_the_same_name_are_not_served(bands_repository: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("first", "second"):
        shutil.copytree(bands_repository / "bands", models / name)
    with run_runtime(settings(models, tmp_path)) as runtime:
        (state,) = runtime.models.list_states()
        assert (state.name, state.state) == ("bands", "failed")
        assert "second: another folder contains a model named 'bands'" in (state.problem or "")


def test_model_of_the_operator_takes_precedence_over_a_trained_model(bands_repository: Path, tmp_path: Path) -> None:
    config = settings(bands_repository, tmp_path, jobs={"folder": tmp_path / "jobs"})
    shutil.copytree(bands_repository / "bands", config.trained_folder / "bands")
    with run_runtime(config) as runtime:
        for _ in range(2):
            (state,) = runtime.models.list_states()
            assert state.problem is None
            assert state.spec is not None
            assert state.spec.folder.parent == bands_repository
            assert runtime.models.reload().broken == {}


def test_default_model_does_not_change_while_the_service_runs(bands_repository: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(bands_repository / "bands", models / "bands")
    with run_runtime(settings(models, tmp_path)) as runtime:
        wait_until(lambda: runtime.list_unready_reasons() == ())
        for name in ("atoms", "nuclei"):
            shutil.copytree(bands_repository / "bands", models / name)
            model_file = models / name / "model.yaml"
            model_file.write_text(model_file.read_text().replace("name: bands", f"name: {name}"))
        assert runtime.models.reload().added == ["atoms", "nuclei"]
        assert runtime.models.get_spec(None).name == "bands"

        shutil.rmtree(models / "bands")
        assert runtime.models.reload().removed == ["bands"]

        with pytest.raises(UnknownModel, match="default model 'bands' is missing; the available models are: atoms, nu"):
            runtime.models.get_spec(None)
        assert runtime.list_unready_reasons() == ("bands is the default model, but the repository has no such model.",)
