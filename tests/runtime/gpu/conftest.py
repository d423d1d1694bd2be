"""Shared by the tests of the GPU's engine: its order is proven wherever one runs without a GPU."""

import os
from collections.abc import Iterator

import pytest
from support.ordered_engine import Watch, ordered_engines

from moe_pack.runtime.gpu.kernels import grids


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets grids have few programs: under the interpreter they run one after another."""
    monkeypatch.setattr(grids, "_INTERPRETED_PROGRAMS", 2)


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch | None]:
    """Looks at all work, if the interpreter runs kernels; None otherwise."""
    if os.environ["TRITON_INTERPRET"] == "0":
        yield None
        return
    with ordered_engines(monkeypatch) as looking:
        yield looking
