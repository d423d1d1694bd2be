"""The GPU's engine under the interpreter, for every family, against the decoder in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.cases import case
from support.gpu_runs import IDS, TOLERANCE, GpuRun, gpu_logits, reference_logits
from support.models import pack

from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import read_spec
from moe_pack.runtime.engine.options import cpu_only

if TYPE_CHECKING:
    from support.families import Tiny


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


def is_run_by_gpus(tiny: Tiny, folder: Path) -> bool:
    """Whether the GPU's engine runs models of this shape; others it refuses by name."""
    from support.families import write_config

    folder.mkdir()
    return cpu_only(read_spec(Config(write_config(tiny, folder), "config.json"))[1]) is None


def _of_two_layers(name: str) -> dict[str, object]:
    """The lists of a row's config that have a value for each layer, cut to two."""
    from support.families import CARDS

    kinds = CARDS[name.partition(":")[0]].config.get("mlp_layer_types")
    return {} if kinds is None else {"mlp_layer_types": kinds[:2]}


@pytest.mark.slow
def test_every_family_runs_as_in_plain_torch(tmp_path: Path) -> None:
    from support.families import TINY

    names = [str(tiny) for tiny in TINY if tiny.name == "as it comes" and is_run_by_gpus(tiny, tmp_path / tiny.family)]
    window_is_full = ("mixtral: window of 7", {"sliding_window": 2})
    for number, (name, changes) in enumerate([*((name, {}) for name in names), window_is_full]):
        with case(name):
            run = GpuRun(0.3, ("split", "pull")[number % 2])
            check(name, {"num_hidden_layers": 2} | _of_two_layers(name) | changes, tmp_path / str(number), run)
