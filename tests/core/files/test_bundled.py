import tomllib

from paths import ROOT

from service.core.files.bundled import get_software_version


def test_clone_that_is_not_installed_has_the_version_of_pyproject_toml():
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert get_software_version("not-installed") == get_software_version() == expected
