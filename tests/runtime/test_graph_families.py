"""The graph engine's launches under the interpreter, of every family, against the decoder in plain torch."""

from pathlib import Path

import pytest
from cases import case
from gpu_runs import IDS, TOLERANCE, graph_logits, reference_logits
from models import pack


def check(name: str, changes: dict[str, object], folder: Path, ids: list[int]) -> None:
    """That a tiny model of this name, with some keys changed, has the reference's logits."""
    from families import TINY, Tiny, write  # which imports transformers

    (tiny,) = (tiny for tiny in TINY if str(tiny) == name)
    source = write(Tiny(tiny.family, tiny.name, tiny.config | changes), folder / "source")
    pack(source, folder / "packed", dense_width=8)
    assert (
        graph_logits(folder / "packed", 0.3, ids) - reference_logits(folder / "packed", ids)
    ).abs().max() < TOLERANCE


# A window that is full after two tokens; latent attention, a dense layer and experts in groups; a shared expert with a
# gate. What else families differ in, `test_graph` has (phimoe: biases, layer norms, another router), or single kernels.
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("mixtral: window of 7", {"sliding_window": 2}, marks=pytest.mark.slow),
        ("deepseek_v2: groups, query latent, yarn", {}),
        pytest.param("qwen2_moe: as it comes", {}, marks=pytest.mark.slow),
    ],
)
def test_families_of_every_kind_run_as_in_plain_torch(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    check(name, {"num_hidden_layers": 2} | changes, tmp_path, IDS[:3])


@pytest.mark.slow
def test_every_family_runs_as_in_plain_torch(tmp_path: Path) -> None:
    from families import TINY, WITH_ENCODER

    usual = {"mixtral: window of 7", "deepseek_v2: groups, query latent, yarn"}
    names = [str(tiny) for tiny in TINY if tiny.name == "as it comes" and tiny.family not in WITH_ENCODER]
    for number, name in enumerate([*names, *usual]):  # the GPU's engines run no encoder
        with case(name):
            check(name, {"num_hidden_layers": 2}, tmp_path / str(number), IDS[:3])
