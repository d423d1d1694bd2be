"""gpt-oss from its checkpoint to text: MXFP4 experts as transformers dequantizes them, packs with every selector.

Experts here have clamped SwiGLU neurons and three biases, a router with one, sinks, and windows on two of three layers.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.coded import MXFP4_CONFIG, random_mxfp4
from support.families import Tiny, config_of, token_ids, write
from support.models import pack
from support.native import operations_limited_to
from support.streaming import budget_for
from torch import Tensor

from moe_pack.convert.kept import keep_source
from moe_pack.convert.pipeline import convert
from moe_pack.formats import BF16, Pack, PackError, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.plans import E5M2, MXFP4
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.model import TORCH, CheckpointWeights, Decoder, open_weights
from moe_pack.runtime.offload import OffloadedWeights

CPU = torch.device("cpu")
TINY = Tiny(
    "gpt_oss", "f of 96", {"intermediate_size": 96, "layer_types": ["full_attention", *["sliding_attention"] * 2]}
)
EXPERTS = "model.layers.{i}.mlp.experts."
FOUR = part_format(4, 64)


def write_blocks(folder: Path) -> tuple[Path, Tensor]:
    """A checkpoint with experts in MXFP4 blocks, and transformers' logits over the same, dequantized by itself."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = config_of(TINY)
    write(TINY, folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    draw, f, d, num_experts = torch.Generator().manual_seed(3), 96, 64, 6
    blocks = dict(tensors)
    for i in range(3):
        for name, shape in (("gate_up_proj", (num_experts, 2 * f, d)), ("down_proj", (num_experts, d, f))):
            place = EXPERTS.format(i=i) + name
            held, scales = random_mxfp4(shape, draw, 119, 126)
            del blocks[place]
            blocks |= {f"{place}_blocks": held, f"{place}_scales": scales}
            tensors[place] = convert_moe_packed_tensors(held, scales).contiguous()  # type: ignore[no-untyped-call]  # untyped
    (folder / "blocks").mkdir()
    save_file(blocks, folder / "blocks" / "model.safetensors")
    values = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "blocks" / "config.json").write_text(json.dumps(values | {"quantization_config": MXFP4_CONFIG}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # untyped
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    model.train(False)
    with torch.no_grad():
        return folder / "blocks", model(torch.tensor([token_ids()])).logits[0]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    return write_blocks(tmp_path_factory.mktemp("blocks"))


def test_a_checkpoint_in_blocks_is_what_transformers_makes_of_it(blocks: tuple[Path, Tensor]) -> None:
    source, expected = blocks
    checkpoint = Checkpoint(source)
    found = Decoder(CheckpointWeights(checkpoint), 96).logits(token_ids())
    checkpoint.close()
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.slow
def test_a_pack_that_keeps_the_blocks_is_what_transformers_makes_of_them(
    blocks: tuple[Path, Tensor], new_folder: Callable[[], Path]
) -> None:
    for selector in SELECTORS:
        for has_kernels in [True, False]:
            with case(selector, has_kernels):
                tmp_path = new_folder()
                source, expected = blocks
                checkpoint = Checkpoint(source)
                plan = uniform_plan(checkpoint.spec, selector, FOUR, FOUR, quantizer="nearest")
                convert(checkpoint, keep_source(checkpoint, plan, "source", "source", None), tmp_path / "packed", 1)
                checkpoint.close()
                with Pack(tmp_path / "packed") as opened:
                    audit(opened)
                    assert {
                        part for layer in opened.index.experts for e in layer for part in (e.gate, e.up, e.down)
                    } <= {MXFP4, E5M2, BF16}
                    weights = open_weights(opened, CPU, operations_limited_to("avx2") if has_kernels else TORCH)
                    decoder = Decoder(weights, 96, chunk_tokens=16)
                    found = torch.cat(
                        [decoder.logits(token_ids()[:50]), *(decoder.logits([token]) for token in token_ids()[50:])]
                    )
                assert (found - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def sparse_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack at 8 bit with a threshold for about half the neurons; not to be changed."""
    folder = tmp_path_factory.mktemp("sparse")
    pack(write(TINY, folder / "source"), folder / "packed", width=8, selector="up")
    with Pack(folder / "packed") as opened:
        thresholds = opened.thresholds.copy()
    thresholds[:] = 0.8  # of abs(u + 1)
    rewrite_thresholds(folder / "packed", thresholds)
    return folder / "packed"


def answers(engine: Engine) -> Tensor:
    ids = token_ids()[:60]
    found = [engine.decoder.next_logits(ids[:40])]
    return torch.stack([*found, *(engine.decoder.next_logits([token]) for token in ids[40:])])


def test_streaming_within_a_budget_gives_the_bits_that_memory_gives(sparse_pack: Path) -> None:
    """With a cutover of 1 rows come alone, and the bias of down with them."""
    for kernels, cutover, num_experts in [("portable", 0.0, 2), ("portable", 1.0, 7), ("torch", 0.0, 7)]:
        with case(kernels, cutover, num_experts):
            options = EngineOptions(kernels=kernels, chunk_tokens=16, read="map")
            with Pack(sparse_pack) as opened:
                with Engine(opened, options, 64) as engine:
                    whole = answers(engine)
                budget = budget_for(opened, num_experts, 64)
                limited = replace(options, read="auto", budget_bytes=budget, cutover=cutover)
                with Engine(opened, limited, 64) as engine:
                    assert isinstance(engine.weights, OffloadedWeights) and engine.decoder.cache.is_ring
                    assert torch.equal(answers(engine), whole)
                    assert (engine.weights.decode.in_part > 0) == (cutover == 1.0)
            assert whole.isfinite().all()


@pytest.mark.parametrize("cutover", [0.0, 1.0])
def test_a_damaged_bias_of_down_is_found_whether_rows_come_alone_or_not(
    sparse_pack: Path, cutover: float, tmp_path: Path
) -> None:
    folder = shutil.copytree(sparse_pack, tmp_path / "packed")
    with Pack(folder) as opened:
        budget = budget_for(opened, 2, 64)
        for layer_idx, file in enumerate(opened.manifest.expert_files):
            raw = bytearray((folder / file.name).read_bytes())
            for offset, layout in zip(opened.layout.offsets[layer_idx], opened.layout.experts[layer_idx], strict=True):
                raw[offset + layout.num_bytes - layout.extra_bytes + 5] ^= 1
            (folder / file.name).write_bytes(raw)
    options = EngineOptions(kernels="portable", budget_bytes=budget, cutover=cutover)
    with Pack(folder) as opened, Engine(opened, options, 64) as engine, pytest.raises(PackError, match="CRC-32"):
        answers(engine)
