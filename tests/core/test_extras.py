"""The lines that install extras."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import tk
from tk.core.extras import DISTRIBUTION, install_line, requirements_of

EXTRAS = ("compiler", "otel", "parquet", "plot", "structured", "tensorboard")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    text = (Path(tk.__file__).parent / "pyproject.toml").read_text()
    declared: dict[str, Any] = tomllib.loads(text)["project"]
    return declared


def test_the_name_is_the_distributions(project: dict[str, Any]) -> None:
    assert project["name"] == DISTRIBUTION


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_line_of_an_extra_names_its_packages_and_not_tk(extra: str, project: dict[str, Any]) -> None:
    pip, install, *packages = shlex.split(install_line(extra))
    assert (pip, install) == ("pip", "install")
    assert packages == project["optional-dependencies"][extra]
    assert not any(package.startswith("tk") for package in packages)


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_wheel_which_has_no_project_file_knows_its_extras_too(extra: str, tmp_path: Path) -> None:
    found = {Requirement(each) for each in requirements_of(extra, tmp_path / "pyproject.toml")}
    assert found == {Requirement(each) for each in requirements_of(extra)}
