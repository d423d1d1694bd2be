"""Attention to blocks of positions that an indexer chooses, against the modules of transformers that have it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.cases import case
from support.native import operations_limited_to
from support.specs import GROUPED
from torch import Tensor

from moe_pack.formats import ModelSpec, NormSpec
from moe_pack.formats.parts import BlockIndexerSpec, GroupedQuerySpec, RopeSpec
from moe_pack.formats.parts.specs import cache_values, cached_values, spec_fault
from moe_pack.runtime.model import TORCH, Matrix, Operations, StoredMatrix
from moe_pack.runtime.model.attention.grouped import choose_blocks
from moe_pack.runtime.model.attention.kinds import attend
from moe_pack.runtime.model.attention.shared import largest
from moe_pack.runtime.model.caches import KvDtype, LayerRopes
from moe_pack.runtime.model.compute import softmax
from moe_pack.runtime.model.kv_cache import KVCache

D, HEADS, KV_HEADS, HEAD_DIM, NUM_TOKENS = 64, 4, 2, 32, 50
CPU = torch.device("cpu")
POOLED = BlockIndexerSpec("pooled", num_heads=12, head_dim=16, block_tokens=4, num_blocks=3)
LARGEST = BlockIndexerSpec("largest", num_heads=2, head_dim=16, block_tokens=4, num_blocks=3, local_blocks=1)
INDEXERS = [
    POOLED,
    replace(POOLED, block_tokens=7, num_blocks=1),
    replace(POOLED, block_tokens=1, num_blocks=9, head_dim=8),
    LARGEST,
    replace(LARGEST, local_blocks=2, num_heads=1),
    replace(LARGEST, block_tokens=7, num_blocks=2, local_blocks=0),
]
PIECES = ([50], [1] * 50, [13, 1, 1, 20, 4, 11])


@dataclass
class OneLayer:
    """The weights of a layer's attention, by role."""

    spec: ModelSpec
    tensors: dict[str, Tensor]
    operations: Operations = TORCH

    def vector(self, role: str) -> Tensor:
        return self.tensors[role.removeprefix("layers.0.attention.")] + 1  # zero-centered

    def matrix(self, role: str) -> Matrix:
        return StoredMatrix(self.tensors[role.removeprefix("layers.0.attention.")])


def spec_of(indexer: BlockIndexerSpec | None, is_gated: bool) -> ModelSpec:
    attention = GroupedQuerySpec(
        "grouped_query", HEADS, KV_HEADS, HEAD_DIM, None, HEAD_DIM**-0.5, (), "head", gated=is_gated, indexer=indexer
    )
    norm, rope = NormSpec("rms", 1e-6, zero_centered=True), RopeSpec(1e4, 8, interleaved=False, scaling=None)
    return replace(GROUPED, hidden_size=D, attention=attention, norm=norm, rope=rope)


def random_weights(module: torch.nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        size = 0.2 if name.endswith("norm.weight") else D**-0.5
        parameter.data = size * torch.randn(parameter.shape, generator=draw)


def pooled(indexer: BlockIndexerSpec, seed: int) -> tuple[Callable[[Tensor], Tensor], dict[str, Tensor]]:
    """The attention of Qwen4-Exp for a whole text, and its weights by role."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    config: Any = Qwen4ExpTextConfig(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, num_hidden_layers=4,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        },
        indexer_n_heads=indexer.num_heads, indexer_kv_heads=1, indexer_head_dim=indexer.head_dim,
        indexer_budget=indexer.num_blocks * indexer.block_tokens, indexer_compress_ratio=indexer.block_tokens,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module: Any = qwen4.Qwen4ExpTextAttention(config, 0).eval()
    random_weights(module, seed)
    weights = {name.removesuffix(".weight"): tensor for name, tensor in module.state_dict().items()}
    width = indexer.num_heads * indexer.head_dim
    q, k = weights["indexer.index_qk_proj"][:width], weights["indexer.index_qk_proj"][width:]
    norms = {"index_q_norm": weights["indexer.q_layernorm"], "index_k_norm": weights["indexer.k_layernorm"]}

    def run(x: Tensor) -> Tensor:
        angles = qwen4.Qwen4ExpTextRotaryEmbedding(config)(x[None], torch.arange(len(x))[None])
        mask = torch.ones(1, 1, len(x), len(x), dtype=torch.bool).tril()
        found: Tensor = module(x[None], angles, mask)[0][0]
        return found

    return run, named(weights) | {"index_q": q, "index_k": k} | norms


def by_the_best(indexer: BlockIndexerSpec, seed: int) -> tuple[Callable[[Tensor], Tensor], dict[str, Tensor]]:
    """The attention of MiniMax-M3 for a whole text, and its weights by role."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    config: Any = MiniMaxM3VLTextConfig(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        layer_types=["minimax_m3_sparse"], index_n_heads=indexer.num_heads, index_head_dim=indexer.head_dim,
        index_block_size=indexer.block_tokens, index_topk_blocks=indexer.num_blocks,
        index_local_blocks=indexer.local_blocks,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module: Any = minimax.MiniMaxM3VLAttention(config, 0).eval()
    random_weights(module, seed)
    weights = {name.removesuffix(".weight"): tensor for name, tensor in module.state_dict().items()}
    index = {f"index_{name}": weights[f"indexer.{name}_proj"] for name in "qk"}

    def run(x: Tensor) -> Tensor:
        positions = torch.arange(len(x))[None]
        angles = minimax.MiniMaxM3VLRotaryEmbedding(config)(x[None], positions)
        found: Tensor = module(x[None], angles, None, position_ids=positions)[0][0]
        return found

    norms = {f"index_{name}_norm": weights[f"indexer.{name}_norm"] for name in "qk"}
    return run, named(weights) | index | norms


def named(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    roles = {name: weights[f"{name}_proj"] for name in "qkvo"}
    return roles | {"q_norm": weights["q_norm"], "k_norm": weights["k_norm"]}


@torch.inference_mode()
def attended(weights: OneLayer, x: Tensor, pieces: list[int], cache: KVCache | None = None) -> Tensor:
    """The layer's attention of tokens that come in pieces."""
    cache = cache or KVCache(weights.spec, NUM_TOKENS, CPU)
    angles, found, first = LayerRopes(weights.spec, CPU), [], 0
    for size in pieces:
        start = cache.num_tokens
        (turns,) = angles(torch.arange(start, start + size), start + size)
        found.append(attend(x[first : first + size], weights, 0, cache.layer(0), turns))  # type: ignore[arg-type]  # all it asks
        cache.num_tokens += size
        first += size
    return torch.cat(found)


def text(seed: int = 0, length: int = NUM_TOKENS) -> Tensor:
    return torch.randn(length, D, generator=torch.Generator().manual_seed(seed))


def made(indexer: BlockIndexerSpec, seed: int = 1) -> tuple[Callable[[Tensor], Tensor], OneLayer]:
    run, tensors = (pooled if indexer.kind == "pooled" else by_the_best)(indexer, seed)
    spec = spec_of(indexer, is_gated=indexer.kind == "pooled")
    assert spec_fault(spec) is None
    return run, OneLayer(spec, tensors)


@pytest.mark.parametrize("instruction_set", [None, "portable"])
@pytest.mark.parametrize("indexer", INDEXERS, ids=str)
def test_attention_is_that_of_transformers_however_the_text_comes(
    indexer: BlockIndexerSpec, instruction_set: str | None
) -> None:
    run, weights = made(indexer)
    if instruction_set is not None:
        weights.operations = operations_limited_to(instruction_set)
    x = text()
    with torch.inference_mode():
        expected = run(x)
    plain = attended(replace(weights, spec=spec_of(None, indexer.kind == "pooled")), x, [NUM_TOKENS])
    differs = (plain - expected).abs().amax(dim=1) > 1e-3
    assert differs.sum() > NUM_TOKENS // 3 and not differs[: indexer.num_blocks * indexer.block_tokens].any()
    for pieces in PIECES:
        with case(pieces):
            assert (attended(weights, x, pieces) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("indexer", [POOLED, LARGEST], ids=str)
def test_pieces_of_the_work_change_nothing(indexer: BlockIndexerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights = made(indexer)
    whole = attended(weights, text(), [NUM_TOKENS])
    monkeypatch.setattr(softmax, "MAX_DECODED_BYTES", 1)
    monkeypatch.setattr(softmax, "MAX_SCORE_BYTES", 4 * HEADS * NUM_TOKENS * 3)
    torch.testing.assert_close(attended(weights, text(), [NUM_TOKENS]), whole)


@pytest.mark.parametrize("indexer", [POOLED, LARGEST], ids=str)
def test_a_text_may_go_on_differently_from_the_middle_of_a_block(indexer: BlockIndexerSpec) -> None:
    _, weights = made(indexer)
    first, second = text(0), text(1)
    for kept in (21, 24, 26, 27):
        with case(kept):
            mixed = torch.cat((first[:kept], second[kept:]))
            expected = attended(weights, mixed, [NUM_TOKENS])
            cache = KVCache(weights.spec, NUM_TOKENS, CPU)
            attended(weights, first, [40], cache)
            assert cache.reachable(kept) == kept
            cache.return_to(kept)
            found = attended(weights, mixed[kept:], [3, NUM_TOKENS - kept - 3], cache)
            torch.testing.assert_close(found, expected[kept:])


@pytest.mark.parametrize("indexer", [POOLED, LARGEST], ids=str)
def test_while_all_blocks_are_chosen_there_is_nothing_to_choose(indexer: BlockIndexerSpec) -> None:
    _, weights = made(indexer)
    cache, angles = KVCache(weights.spec, NUM_TOKENS, CPU), LayerRopes(weights.spec, CPU)
    most = 15 if indexer.kind == "pooled" else 12  # three blocks, and pooled ones in addition to the last, not complete
    for start, stop, is_all in ((0, 8, True), (8, most, True), (most, most + 1, False)):
        cache.num_tokens = start
        (turns,) = angles(torch.arange(start, stop), stop)
        chosen = choose_blocks(text()[start:stop], weights, indexer, 0, cache.layer(0), turns)  # type: ignore[arg-type]  # all it asks
        assert (chosen is None) == is_all
    assert chosen is not None
    assert chosen.shape == (1 if indexer.kind == "pooled" else 2, 1, 4) and (chosen.sum(dim=-1) == 3).all()


def test_of_blocks_with_equal_scores_the_first_are_chosen() -> None:
    """Scores of a ReLU are often all 0; which of them transformers takes then is up to torch's topk."""
    _, weights = made(POOLED)
    weights.tensors["index_q"] = torch.zeros_like(weights.tensors["index_q"])
    cache = KVCache(weights.spec, NUM_TOKENS, CPU)
    (turns,) = LayerRopes(weights.spec, CPU)(torch.arange(22), 22)
    chosen = choose_blocks(text()[:22], weights, POOLED, 0, cache.layer(0), turns)  # type: ignore[arg-type]  # all it asks
    assert chosen is not None
    first = [True, True, True]
    assert chosen[0, 21].tolist() == [*first, False, False, True], "and the block that the token is in the middle of"
    assert chosen[0, 19].tolist() == [*first, False, False, False], "at the end of a block, which is not chosen"
    assert chosen[0, 14].tolist() == [*first, True, False, False]


def test_the_largest_are_chosen_and_of_equal_ones_the_first() -> None:
    scores = torch.tensor([[3.0, 1.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    allowed = torch.tensor([[True] * 5, [False, True, True, True, True], [True, True, False, False, False]])
    expected = [[1, 1, 0, 1, 0], [0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert largest(scores, 3, allowed).int().tolist() == expected
    assert largest(scores, 9, allowed).tolist() == allowed.tolist()


def test_the_cache_holds_a_key_of_the_indexer_in_addition() -> None:
    spec = spec_of(POOLED, is_gated=False)
    width = 2 * KV_HEADS * HEAD_DIM + POOLED.head_dim
    assert cached_values(spec) == 3 * width
    dtypes: tuple[tuple[KvDtype, int], ...] = (("f32", 4), ("bf16", 2))
    for dtype, itemsize in dtypes:
        cache = KVCache(spec, 10, CPU, dtype=dtype)
        held = [cache.layer(layer) for layer in range(3)]
        tensors = [t for each in held for t in (each.keys, each.values, each.index) if t is not None]
        assert cache.num_bytes == sum(t.nbytes for t in tensors) == itemsize * cache_values(spec, 10, 4)
    assert KVCache(spec_of(None, is_gated=False), 10, CPU).layer(0).index is None
