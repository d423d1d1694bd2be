"""Models cut at every possible layer, over plain torch: their parts give the bits of the whole."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.families import TINY, Tiny, write, write_config
from support.models import pack
from support.specs import GROUPED, LATENT, changed

from moe_pack.formats import ModelSpec, Pack, PackError, RunError, dump
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import read_spec
from moe_pack.formats.pack.layouts import DENSE_FILE
from moe_pack.formats.pack.slices import PackSlice, cuts
from moe_pack.runtime.model import Decoder, PackWeights, embed, head
from moe_pack.runtime.model.passes import Pass

CPU = torch.device("cpu")
IDS = [(37 * i + 5) % 96 for i in range(12)]
SHARES = 6  # of the families, a test each
# States and attention; dense first layers and latent attention; windows; several kinds; factors; halves; two streams.
FAST = ("qwen3_next", "deepseek_v3", "gpt_oss", "gemma4_text", "minimax", "nemotron_h", "longcat_flash")


def named(family: str) -> Tiny:
    return next(tiny for tiny in TINY if str(tiny) == f"{family}: as it comes")


def spec_of(tiny: Tiny, folder: Path) -> ModelSpec:
    folder.mkdir()
    return read_spec(Config(write_config(tiny, folder), "config.json"))[1]


def logits_by_slices(whole: Pack, ends: list[int]) -> torch.Tensor:
    """Logits of layers up to the first end, then up to the next one, and so on."""
    ids, x = torch.tensor(IDS), torch.empty(0)
    for first, last in pairwise((0, *ends)):
        decoder = Decoder(PackWeights(PackSlice(whole, first, last), CPU), 64)
        batch = Pass(decoder.weights, [decoder.sequences[0]], [None], len(IDS), [len(IDS)])
        x = decoder.run_layers(x if first else embed(ids, decoder.weights), batch, ids, ends_early=False)
    return head(x, decoder.weights)


def check_cuts(tiny: Tiny, folder: Path) -> None:
    pack(write(tiny, folder / "source"), folder / "packed", dense_width=8)
    with Pack(folder / "packed") as whole:
        expected, last = Decoder(PackWeights(whole, CPU), 64).logits(IDS), whole.spec.num_hidden_layers
        found = cuts(whole.spec)
        assert found or len(whole.spec.moe_layers) == 1
        for ends in (*([cut, last] for cut in found), [*found, last]):
            with case(ends):
                assert torch.equal(logits_by_slices(whole, ends), expected)


@pytest.mark.parametrize("family", FAST)
def test_slices_of_a_model_give_its_logits(family: str, tmp_path: Path) -> None:
    check_cuts(named(family), tmp_path)


def can_be_cut() -> Iterator[Tiny]:
    return (tiny for tiny in TINY if tiny.name == "as it comes")


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_slices_of_every_family_give_its_logits(share: int, tmp_path: Path) -> None:
    for tiny in list(can_be_cut())[share::SHARES]:
        spec = spec_of(tiny, tmp_path / tiny.family)
        if spec.encoder is None and spec.ngrams is None and not spec.needs_ids and not list(spec.lacks("gpus")):
            with case(str(tiny)):
                check_cuts(tiny, tmp_path / f"made {tiny.family}")


def test_each_dense_tensor_is_in_one_slice(tmp_path: Path) -> None:
    """Embedding and head are at the ends alone, where nobody asks for more; a tied head is at both."""
    tiny = named("mixtral")
    for is_tied in (False, True):
        folder = tmp_path / str(is_tied)
        pack(write(Tiny(tiny.family, "", {"tie_word_embeddings": is_tied}), folder / "source"), folder / "packed")
        with Pack(folder / "packed") as whole:
            first, second, third = (PackSlice(whole, layer, layer + 1) for layer in range(3))
            names = [{dense.role.name for dense in each.layout.dense} for each in (first, second, third)]
            ends = {name for each in names for name in each if not name.startswith("layers.0.")}
            assert "embed" in names[0] and ends == ({"embed", "norm"} if is_tied else {"embed", "norm", "head"})
            assert not names[1] - {name for name in names[0] if name != "embed"}
            assert ("embed" in names[2]) == is_tied and "norm" in names[2]
            num_bytes = sum(dense.entry.num_bytes for each in (first, second, third) for dense in each.layout.dense)
            tied = next(dense for dense in whole.layout.dense if dense.role.name == "embed").entry.num_bytes * is_tied
            assert num_bytes == sum(dense.entry.num_bytes for dense in whole.layout.dense) + tied
            with_embed = PackSlice(whole, 2, 3, has_embed=True)
            assert "embed" in {dense.role.name for dense in with_embed.layout.dense}


def test_a_damaged_dense_file_is_found(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack(write(named("mixtral"), tmp_path / "source"), packed)
    file = packed / DENSE_FILE
    raw = np.fromfile(file, np.uint8)
    raw[-1] ^= 1
    raw.tofile(file)
    with Pack(packed) as whole, pytest.raises(PackError, match=f"{DENSE_FILE}: SHA-256 does not match"):
        PackWeights(PackSlice(whole, 0, 1), CPU)


def test_a_model_is_cut_between_layers_with_experts() -> None:
    spec = changed(changed(GROUPED, "num_hidden_layers", 6), "moe_layers", [1, 3, 4])
    assert cuts(spec) == (2, 3, 4)


def test_a_model_is_not_cut_between_an_indexer_and_the_layers_that_share_its_choice() -> None:
    indexer = {"num_heads": 4, "head_dim": 8, "top_k": 5}
    shared = changed(LATENT, "attention indexer", {**indexer, "shared": True})
    first = changed(LATENT, "attention indexer", indexer)
    spec = changed(changed(shared, "num_hidden_layers", 4), "moe_layers", [0, 1, 2, 3])
    others = [{"layers": [0, 2], "attention": dump(first.attention), "rope": dump(first.rope)}]
    assert cuts(changed(spec, "others", others)) == (2,)


def test_layers_that_depend_on_their_place_are_refused(tmp_path: Path) -> None:
    spec = spec_of(named("beam"), tmp_path / "beam")
    with pytest.raises(RunError, match=r"^--budget: models with sums that are weighed by their depth run on one GPU; "):
        cuts(spec)
