"""Attention to a window and compressed entries, and tables from tokens to experts: caches, chunks, refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.families import Tiny, token_ids, write
from support.models import pack
from support.random_weights import RandomWeights
from support.specs import COMPRESSED, changed
from support.streaming import budget_for

from moe_pack.formats import MATRICES, CheckpointError, ModelSpec, Pack, RunError, dense_roles
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.parts.specs import cache_values, cached_tokens, cached_values
from moe_pack.runtime import Engine, EngineOptions, Sampler, SamplingOptions
from moe_pack.runtime.engine.options import cpu_only
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import TORCH, CheckpointWeights, Decoder, open_weights, route_tokens
from moe_pack.runtime.model.caches import KvDtype, LayerCache
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.offload.prefetch import NextRouterPrediction, PartialPrediction, PredictionInput

CPU = torch.device("cpu")
TINY = Tiny("deepseek_v4", "tables, windows, entries")
NUM_TOKENS, CONTEXT = 100, 64


def logits(spec: ModelSpec, ids: list[int], chunk: int, context: int) -> torch.Tensor:
    return Decoder(RandomWeights(spec), context, chunk_tokens=chunk).logits(ids)


def test_chunks_of_any_size_give_the_same_as_the_whole_text() -> None:
    ids = token_ids()[:40]
    expected = logits(COMPRESSED, ids, 40, 40)
    for chunk in (1, 2, 3, 5, 7, 11, 39):
        with case(chunk):
            torch.testing.assert_close(logits(COMPRESSED, ids, chunk, 40), expected, atol=2e-4, rtol=2e-4)
    parts = Decoder(RandomWeights(COMPRESSED), 40, chunk_tokens=4)
    found = torch.cat([parts.logits(ids[first:last]) for first, last in ((0, 1), (1, 8), (8, 9), (9, 30), (30, 40))])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_the_cache_holds_a_window_of_keys_what_entries_follow_from_and_entries() -> None:
    # A key; with the indexer's, half of an entry of 16 + 12 values; a third of one of 16, rounded up.
    assert cached_values(COMPRESSED) == 3 * 16 + 14 + 6
    windows, chunk, context = 3 + 10, 10, 50
    sparse = windows * 16 + (3 + chunk) * 4 * 28 + 25 * 28
    heavy = windows * 16 + (2 + chunk) * 2 * 16 + 16 * 16
    places = [cached_tokens(COMPRESSED, layer, context, chunk) for layer in range(3)]
    found = [COMPRESSED.attention_of(layer).cache_values(places[layer], context, chunk) for layer in range(3)]
    assert found == [sparse, heavy, windows * 16]
    assert cache_values(COMPRESSED, context, chunk) == sum(found)
    dtypes: tuple[tuple[KvDtype, int], ...] = (("f32", 4), ("bf16", 2))
    for dtype, itemsize in dtypes:
        cache = KVCache(COMPRESSED, context, CPU, dtype=dtype, chunk_tokens=chunk)
        held = [cache.layer(layer) for layer in range(3)]
        tensors = [each.keys for each in held]
        for each in held:
            tensors += [] if each.compressed is None else [each.compressed.raw, each.compressed.entries]
        assert cache.num_bytes == sum(t.nbytes for t in tensors) == itemsize * sum(found)
        assert cache.is_ring
    whole = KVCache(COMPRESSED, 8, CPU, chunk_tokens=8)
    assert not whole.is_ring, "all positions are kept, and what entries follow from"
    small = changed(COMPRESSED, "attention sliding_window", 9)
    assert KVCache(small, 10, CPU, chunk_tokens=2).is_ring, "what entries follow from is not"


def test_a_text_begins_again_where_the_cache_leads_back() -> None:
    ids = token_ids()[:36]
    for chunk, kept in ((40, 20), (4, 0)):
        with case(chunk):
            decoder = Decoder(RandomWeights(COMPRESSED), 40, chunk_tokens=chunk)
            decoder.next_logits(ids)
            again = [*ids[:20], *((token + 1) % 90 for token in ids[20:30])]
            left = decoder.keep_beginning(again)
            assert again[len(again) - len(left) :] == left and len(again) - len(left) == kept
            fresh = Decoder(RandomWeights(COMPRESSED), 40, chunk_tokens=chunk)
            torch.testing.assert_close(decoder.next_logits(left), fresh.next_logits(again), atol=2e-4, rtol=2e-4)


class Failing(RandomWeights):
    """Weights that cannot be read after some time."""

    left = 1_000_000

    def expert(self, layer_idx: int, expert: int):  # type: ignore[no-untyped-def]  # as its parent's
        self.left -= 1
        if self.left < 0:
            raise RunError("cannot be read")
        return super().expert(layer_idx, expert)


def test_after_a_pass_that_failed_the_text_can_go_on_or_begin_again() -> None:
    ids, weights = token_ids()[:30], Failing(COMPRESSED)
    decoder = Decoder(weights, 40, chunk_tokens=4)
    decoder.next_logits(ids[:20])
    weights.left = 3
    with pytest.raises(RunError, match="cannot be read"):
        decoder.next_logits(ids[20:])
    weights.left = 1_000_000
    kept = decoder.cache.num_tokens
    assert kept in (0, 20)
    found = decoder.next_logits(ids[kept:])
    torch.testing.assert_close(found, logits(COMPRESSED, ids, 40, 40)[-1], atol=2e-4, rtol=2e-4)


def test_with_no_more_entries_than_an_indexer_chooses_it_changes_nothing() -> None:
    ids = token_ids()[:12]
    plain = changed(changed(COMPRESSED, "attention compression indexer top_k", 6), "hidden_size", 64)
    weights, without = RandomWeights(plain), changed(plain, "attention compression indexer", None)
    others = RandomWeights(without)
    others.tensors = weights.tensors
    others._experts = weights._experts  # the same model, without its indexer
    found, expected = (Decoder(each, 12).logits(ids) for each in (weights, others))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    chosen = replace(weights.spec)
    fewer = RandomWeights(changed(chosen, "attention compression indexer top_k", 2))
    fewer.tensors, fewer._experts = weights.tensors, weights._experts
    assert not torch.allclose(Decoder(fewer, 12).logits(ids), expected, atol=1e-3)


# ---- tables from tokens to experts ----------------------------------------------------------------------------------


def test_the_experts_of_a_token_are_those_of_its_row_and_their_weights_the_routers() -> None:
    weights, x = RandomWeights(COMPRESSED), torch.randn((5, 64), generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([7, 95, 0, 7, 3])
    experts, shares = route_tokens(x, weights, 0, ids)
    assert torch.equal(experts, weights.tensors["layers.0.router_table"][ids])
    scores = torch.nn.functional.softplus(x @ weights.tensors["layers.0.router"].T).sqrt().gather(1, experts)
    torch.testing.assert_close(shares, 1.5 * scores / scores.sum(dim=1, keepdim=True))
    assert "layers.0.router_bias" not in weights.tensors and "layers.1.router_bias" in weights.tensors


@pytest.mark.parametrize("row", [[2, 2], [0, 6], [-1, 3]])
def test_a_row_that_does_not_name_different_experts_is_refused_when_it_is_needed(row: list[int]) -> None:
    weights, x = RandomWeights(COMPRESSED), torch.zeros((2, 64))
    weights.tensors["layers.0.router_table"][5] = torch.tensor(row)
    route_tokens(x, weights, 0, torch.tensor([4, 6]))
    line = f"layer 0: the router's table names experts {row} for token 5, expected different ones from 0 to 5"
    with pytest.raises(RunError, match=re.escape(line)):
        route_tokens(x, weights, 0, torch.tensor([4, 5]))


def test_a_router_that_does_not_choose_predicts_nothing() -> None:
    weights = RandomWeights(changed(COMPRESSED, "router table_layers", [0, 1]))
    seen = PredictionInput(torch.zeros((1, 64)), np.zeros((1, 1, 2), np.int64), torch.zeros((1, 192)))
    partial = PartialPrediction(weights)
    assert NextRouterPrediction(weights).scores(1, seen) is None and partial.scores(1, seen) is None
    assert not partial.needs_partial(1)
    own = RandomWeights(COMPRESSED)
    assert PartialPrediction(own).needs_partial(1) and PartialPrediction(own).scores(1, seen) is not None
    assert NextRouterPrediction(own).scores(1, seen) is not None


def test_a_table_is_packed_as_it_is(tmp_path: Path) -> None:
    source, role = write(TINY, tmp_path / "source"), "layers.1.router_table"
    pack(source, tmp_path / "packed", width=16, dense_width=8)
    checkpoint = Checkpoint(source)
    table = CheckpointWeights(checkpoint).matrix(role).rows(0, 96)
    checkpoint.close()
    with Pack(tmp_path / "packed") as opened:
        held = next(dense for dense in opened.layout.dense if dense.role.name == role)
        assert held.dtype == "I64" and held.rows is None
        assert torch.equal(open_weights(opened, CPU, TORCH).matrix(role).rows(0, 96), table)


@pytest.mark.slow
def test_inside_a_budget_and_with_every_prediction_the_answer_is_the_same(tmp_path: Path) -> None:
    source, ids = write(TINY, tmp_path / "source"), token_ids()[:20]
    pack(source, tmp_path / "packed", width=16)
    with Pack(tmp_path / "packed") as opened:
        expected = made_by(opened, EngineOptions(kernels="portable"), ids)
        for policy in ("lru", "corm", "importance"):
            with case(policy):
                budget = budget_for(opened, 14, CONTEXT)
                options = EngineOptions(kernels="portable", budget_bytes=budget, policy=policy)  # type: ignore[arg-type]  # a Literal each
                assert made_by(opened, options, ids) == expected


def made_by(opened: Pack, options: EngineOptions, ids: list[int]) -> list[int]:
    """The tokens that an engine makes after a prompt."""
    with Engine(opened, options, CONTEXT) as engine:
        assert isinstance(engine.decoder, Decoder)
        return list(generate(engine.decoder, ids, Sampler(SamplingOptions(temperature=0)), 24, frozenset()))


def test_gpus_refuse_the_parts_by_name() -> None:
    assert cpu_only(COMPRESSED) == "compressed attention"
    alone = replace(COMPRESSED, others=())
    assert cpu_only(alone) == "compressed attention"


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_table_of_another_dtype_is_refused(tmp_path: Path) -> None:
    path, name = write(TINY, tmp_path / "source") / "model.safetensors", "model.layers.0.ffn.gate.tid2eid"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].int()}, path)
    Checkpoint(path.parent).close()
    save_file(tensors | {name: tensors[name].float()}, path)
    assert refused(path.parent) == f"checkpoint: tensor {name!r} is F32, expected one of I32, I64"


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as fault:
        Checkpoint(folder)
    return str(fault.value)


def published(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint under the names of its authors."""
    others = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight"}
    others |= {f"model.hc_head.hc_{name}": f"hc_head_{name}" for name in ("fn", "base", "scale")}
    return {others.get(name, name.removeprefix("model.")): tensor for name, tensor in load_file(path).items()}


def test_the_authors_names_of_tensors_mean_the_same(tmp_path: Path) -> None:
    ours = write(TINY, tmp_path / "ours")
    path = write(TINY, tmp_path / "theirs") / "model.safetensors"
    save_file(published(path) | {"mtp.0.norm.weight": torch.ones(64)}, path)
    first, second = Checkpoint(ours), Checkpoint(path.parent)
    assert first.spec == second.spec
    assert list(second.claims.unused) == ["mtp.0.norm.weight"]
    for one, other in (
        *((first.dense_source(role.name), second.dense_source(role.name)) for role in dense_roles(first.spec)),
        *((first.expert_source(2, 5, matrix), second.expert_source(2, 5, matrix)) for matrix in MATRICES),
    ):
        assert np.array_equal(first.rows(one, 0, one.num_rows), second.rows(other, 0, other.num_rows)), (
            one.tensor,
            other.tensor,
        )
    first.close()
    second.close()


def test_published_codes_are_refused_by_the_name_of_their_scales(tmp_path: Path) -> None:
    path = write(TINY, tmp_path / "source") / "model.safetensors"
    config = json.loads((path.parent / "config.json").read_text())
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    (path.parent / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    Checkpoint(path.parent).close()  # where all tensors have 16 bit
    tensors = published(path)
    name, scales = "layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale"
    powers = torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn), scales: powers}, path)
    assert refused(path.parent) == (
        f"checkpoint: tensor {scales!r} has the scales of {name!r}, which are not supported under this name; "
        "use a 16-bit copy"
    )
    expert = "layers.0.ffn.experts.0.w1.weight"
    save_file(tensors | {expert: torch.zeros((48, 32), dtype=torch.int8)}, path)
    assert refused(path.parent) == f"checkpoint: tensor {expert!r} has shape [48, 32], expected [48, 64]"


def test_layer_caches_are_of_layers_with_entries_alone() -> None:
    held = [KVCache.of_layer(COMPRESSED, layer, 12, CPU) for layer in range(3)]
    assert [each.compressed is not None for each in held] == [True, True, False]
    assert all(isinstance(each, LayerCache) and each.values is each.keys for each in held)
