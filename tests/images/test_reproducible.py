"""Two builds of one commit have the same layers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.image_archive import Archive

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "scripts" / "build_images.py"


@pytest.mark.images
@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.skipif(
    not any(map(shutil.which, ("docker", "podman", "buildah"))), reason="needs a builder of images"
)
@pytest.mark.parametrize("name", ["operator", "runtime"])
def test_a_second_build_without_the_first_ones_stages_has_the_same_layers(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    first: Archive = request.getfixturevalue(name)
    subprocess.run([sys.executable, BUILD, "--no-cache", "--out", tmp_path, name], check=True)
    second = Archive(tmp_path / f"{name}.tar")
    assert second.layers == first.layers
