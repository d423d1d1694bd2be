"""The GPU's engine under the interpreter, for every family, against the decoder in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.cases import case
from support.gpu_runs import IDS, TOLERANCE, GpuRun, gpu_logits, reference_logits
from support.models import pack

if TYPE_CHECKING:
    from moe_pack.runtime.gpu.placements import Misses


def check(name: str, changes: dict[str, object], folder: Path, run: GpuRun) -> None:
    """Compares a tiny model of this name, with some keys changed, with the reference's logits."""
    from support.families import TINY, Tiny, write  # which imports transformers

    (tiny,) = (tiny for tiny in TINY if str(tiny) == name)
    source = write(Tiny(tiny.family, tiny.name, tiny.config | changes), folder / "source")
    pack(source, folder / "packed", dense_width=8)
    found, expected = gpu_logits(folder / "packed", run, IDS[:3]), reference_logits(folder / "packed", IDS[:3])
    assert (found - expected).abs().max() < TOLERANCE


# Latent attention, a dense layer and experts in groups. What else families differ in, `test_gpu_runs` has (phimoe:
# biases, layer norms, another router), or single kernels.
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_family_that_differs_most_runs_as_in_plain_torch(share: float, tmp_path: Path) -> None:
    check("deepseek_v2: groups, query latent, yarn", {"num_hidden_layers": 2}, tmp_path, GpuRun(share))


# Hybrids with states, heads of two kinds, chunks, gates, experts of one layer that join the next: `test_rows` has all.
@pytest.mark.slow
@pytest.mark.parametrize("misses", ["split", "pull"])
def test_families_with_missing_experts_run_as_in_plain_torch(misses: Misses, tmp_path: Path) -> None:
    names = ("qwen3_next: as it comes", "gemma4: as it comes", "llama4: as it comes", "longcat_flash: as it comes")
    window_is_full = ("mixtral: window of 7", {"num_hidden_layers": 2, "sliding_window": 2})
    for number, (name, changes) in enumerate([*((name, {}) for name in names), window_is_full]):
        with case(name):
            check(name, changes, tmp_path / str(number), GpuRun(0.3, misses))
