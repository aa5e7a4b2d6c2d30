"""The Galaxy tool calls the command line with options and values that exist."""

from __future__ import annotations

import re
import shlex
from xml.etree import ElementTree

import pytest
import yaml
from paths import ROOT

from service.__main__ import create_parser
from service.core.files.bundled import get_software_version
from service.serving.parameters import Query

FOLDER = ROOT / "clients" / "galaxy"
TOOL = ElementTree.parse(FOLDER / "stackseg_segment.xml").getroot()
PARAMETERS = {
    (parameter.get("name") or parameter.get("argument", "").lstrip("-").replace("-", "_")): parameter
    for parameter in TOOL.iter("param")
    if parameter.get("type")
}
# Values of the fields for text and numbers.
VALUES = {
    "input": "stack.tif",
    "voxel_size": "0.5,0.2,0.2",
    "diameter": "7,15,15px",
    "channel": "DAPI",
    "scene": "1",
    "time": "2:5",
    "axes": "TZYX",
    "threshold": "0.5",
    "minimum_size": "12.5um3",
    "min_confidence": "0.8",
}


def list_choices(name: str) -> list[str]:
    """Return the values that a selection or a checkbox inserts into the command."""
    parameter = PARAMETERS[name]
    if parameter.get("type") == "boolean":
        return [parameter.get("truevalue", ""), parameter.get("falsevalue", "")]
    return [option.get("value", "") for option in parameter.iter("option")]


def make_command(**choices: str) -> list[str]:
    """Return the words of the command, as Galaxy makes it if all fields have values."""
    values = {name: (list_choices(name) or [""])[0] for name in PARAMETERS} | VALUES | choices
    template = TOOL.findtext("command", "")
    lines = [line for line in template.splitlines() if not line.strip().startswith("#")]
    text = re.sub(r"(?<!\\)\$(?:\w+\.)*(\w+)", lambda match: values[match[1]], " ".join(lines))
    return shlex.split(text.rpartition("&&")[2].replace("\\$", "$"))


@pytest.mark.parametrize("name", ["model", "link", "border", "fill_holes", "quality", "strict"])
def test_every_choice_gives_a_valid_command(name: str) -> None:
    for choice in filter(None, list_choices(name)):
        program, *arguments = make_command(**{name: choice})
        options = vars(create_parser().parse_args(arguments))
        assert program == "stackseg"
        assert (str(options["input"]), str(options["result"])) == ("stack.tif", "labels.ome.tif")
        assert str(options["measurements"]) == "objects.csv"
        parameters = {key: value for key, value in options.items() if key in Query.model_fields and key != "input"}
        query = Query.model_validate(parameters | {"measurements": None})
        for key, value in VALUES.items():
            assert key == "input" or str(getattr(query, key)) == value


def test_options_have_the_names_of_their_fields() -> None:
    template = TOOL.findtext("command", "")
    for name, parameter in PARAMETERS.items():
        if name != "input":
            assert f"--{name.replace('_', '-')}" == parameter.get("argument")
            assert re.search(rf"\$(\w+\.)?{name}\b", template), name
    assert set(VALUES) <= set(PARAMETERS)


@pytest.mark.parametrize(
    "name", [name for name, parameter in PARAMETERS.items() if parameter.find("validator") is not None]
)
def test_validators_accept_empty_and_valid_values(name: str) -> None:
    pattern = PARAMETERS[name].findtext("validator", "")
    assert re.match(pattern, "")
    assert re.match(pattern, VALUES[name])
    assert not re.match(pattern, "x' y")


def test_models_with_objects_are_offered() -> None:
    specs = {path.parent.name: yaml.safe_load(path.read_text()) for path in (ROOT / "models").glob("*/model.yaml")}
    assert set(list_choices("model")) == {
        name for name, spec in specs.items() if spec["decoding"]["kind"] == "instances"
    }


def test_files_and_versions_exist() -> None:
    version = get_software_version()
    assert TOOL.get("version", "").partition("+")[0] == version
    assert TOOL.findtext("requirements/container") == f"stackseg:{version}-workflows"
    for parameter in TOOL.iterfind("tests/test/param[@name='input']"):
        assert (FOLDER / "test-data" / parameter.get("value", "")).is_file()
