"""A small pack to damage, made once."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import TinyMixtral, pack


@pytest.fixture(scope="session")
def sound_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of two experts, 4 bit in groups of 16, dense matrices in 16 bit; do not write into it."""
    folder = tmp_path_factory.mktemp("sound")
    pack(TinyMixtral(num_layers=2).write(folder / "source"), folder / "pack")
    return folder / "pack"


@pytest.fixture(scope="session")
def sound_dense_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, dense matrices quantized to 8 bit; do not write into it."""
    folder = tmp_path_factory.mktemp("sound-dense")
    pack(TinyMixtral().write(folder / "source"), folder / "pack", dense_width=8)
    return folder / "pack"


@pytest.fixture
def new_pack(sound_pack: Path, new_folder: Callable[[], Path]) -> Callable[[], Path]:
    return lambda: Path(shutil.copytree(sound_pack, new_folder() / "pack"))


@pytest.fixture
def folder(new_pack: Callable[[], Path]) -> Path:
    return new_pack()


@pytest.fixture
def new_dense_pack(sound_dense_pack: Path, new_folder: Callable[[], Path]) -> Callable[[], Path]:
    return lambda: Path(shutil.copytree(sound_dense_pack, new_folder() / "pack"))
