"""n-gram embeddings against transformers' qwen4_exp: hashes, a layer's arithmetic and state; reads of their rows."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import pack
from support.native import INSTRUCTION_SETS, kernels_limited_to
from support.ngrams import EOS, TinyNgrams, known_family, ngrams_of
from support.reseal import edit_byte
from support.second_reader import SecondReader
from support.specs import GROUPED
from transformers import DynamicCache
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

from moe_pack.formats import ModelSpec, NormSpec, Pack, PackError
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.ngrams import read_ngrams
from moe_pack.formats.parts import GatedStreamsSpec
from moe_pack.formats.parts.specs import dense_roles, state_values
from moe_pack.runtime import model
from moe_pack.runtime.cpu import reads
from moe_pack.runtime.cpu.reads import BlockingReads
from moe_pack.runtime.engine.engine import Engine
from moe_pack.runtime.engine.options import EngineOptions, cpu_only
from moe_pack.runtime.model.caches import LayerState
from moe_pack.runtime.model.compute import LaterRows, NgramRows
from moe_pack.runtime.model.compute.ngrams import row_numbers
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.model.mixers import ngram_output
from moe_pack.runtime.offload.budgets import cache_bytes, ngram_bytes

Tensor = torch.Tensor
CPU = torch.device("cpu")
D, VOCAB, STREAMS = 64, 96, 4
BOUND = 1e-4  # of logits: sums in another order
KEYS = {
    "hidden_size": D,
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "ple_layer_ids": [1, 3],
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 16,
    "eos_token_id": EOS,
}
SHAPES = [
    {"ple_embed_dim": 64, "heads_per_ngram": 4},
    {"ple_embed_dim": 30, "heads_per_ngram": 5, "ngram_size": 2},
    {"ple_embed_dim": 24, "heads_per_ngram": 2, "ngram_size": 4, "ple_conv_kernel_size": 2},
    {"heads_per_ngram": 1, "seed": 0},
]


def tokens_with_ends(num_tokens: int = 41) -> Tensor:
    """Random tokens with ends of texts at the beginning, in the middle, one after another, and at the end."""
    tokens = torch.randint(VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(3))
    tokens[[0, 7, 8, 20, 22, num_tokens - 1]] = EOS
    return tokens


class Layer:
    """A layer of transformers with random weights, and the same weights for ours."""

    def __init__(self, change: dict[str, int], operations: model.Operations = model.TORCH, layer: int = 2) -> None:
        values = KEYS | change
        config = Qwen4ExpTextConfig(**values, hc_count=STREAMS)
        torch.manual_seed(5)
        self.config, self.layer = config, layer
        self.module = Qwen4ExpTextPLELayer(config, layer, config.ple_layer_ids.index(layer + 1))
        for parameter in self.module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        ngrams = read_ngrams(Config(values, "config.json"))
        norm = NormSpec("rms", config.rms_norm_eps, zero_centered=True)
        streams = GatedStreamsSpec("gated_streams", STREAMS, rank=8)
        self.spec: ModelSpec = replace(GROUPED, num_hidden_layers=4, norm=norm, ngrams=ngrams, residual=streams)
        self.selector, self.operations = "none", operations
        state = {name: value.detach() for name, value in self.module.state_dict().items()}
        self._held = {
            "key": state["key_proj.weight"],
            "value": state["value_proj.weight"],
            "conv": state["conv1d.weight"].flatten(),
        } | {f"{name}_norm": 1 + state[f"norm_{name}.weight"] for name in ("key", "query", "conv")}
        self._table = state["ple_embedding.ngram_embedding.weight"]

    def vector(self, role: str) -> Tensor:
        return self._held[role.rpartition(".")[2]]

    def matrix(self, role: str) -> model.StoredMatrix:
        return model.StoredMatrix(self._held[role.rpartition(".")[2]], self.operations)

    def ngram_table(self, layer: int) -> Callable[[np.ndarray], LaterRows]:
        assert layer == self.layer
        return self._begin

    def _begin(self, numbers: np.ndarray) -> LaterRows:
        assert (np.diff(numbers) > 0).all(), "rising, none twice"
        return LaterRows(lambda: self._table[torch.from_numpy(numbers)])

    def state(self) -> LayerState:
        assert self.spec.ngrams is not None
        return LayerState.zeros(self.spec.ngrams.state(self.spec.stream_width), CPU)

    @torch.inference_mode()
    def ours(self, x: Tensor, tokens: Tensor, sizes: list[int]) -> Tensor:
        """Returns the output for x float32 [T, streams * d], if the tokens enter so many at a time."""
        assert self.spec.ngrams is not None
        state, start, found = self.state(), 0, []
        for size in sizes:
            stop = start + size
            history = tokens[max(start - self.spec.ngrams.ngram_size + 1, 0) : stop]
            rows = NgramRows(self.spec.ngrams, self.ngram_table, history, size, (self.layer,))
            found.append(ngram_output(x[start:stop], rows.of(self.layer), self, self.layer, state))
            start = stop
        assert start == len(tokens)
        return torch.cat(found)

    @torch.inference_mode()
    def theirs(self, x: Tensor, tokens: Tensor, sizes: list[int]) -> Tensor:
        cache, start, found = DynamicCache(config=self.config), 0, []
        for size in sizes:
            at = slice(start, start + size)
            found.append(self.module(x[None, at], tokens[None, at], cache)[0])
            start += size
        return torch.cat(found)


def cut(num_tokens: int, size: int) -> list[int]:
    """Pieces of a size, the last of what is left."""
    return [min(size, num_tokens - start) for start in range(0, num_tokens, size)]


def test_a_layer_adds_what_that_of_transformers_adds_whatever_enters_at_once() -> None:
    tokens = tokens_with_ends()
    x = torch.randn((len(tokens), STREAMS * D), generator=torch.Generator().manual_seed(1))
    for change in SHAPES:
        for layer in (0, 2):
            given = Layer(change, layer=layer)
            expected = given.theirs(x, tokens, [len(tokens)])
            assert expected.abs().max() > 1
            for size in (len(tokens), 16, 3, 2, 1):
                with case(change, layer, size):
                    for found in (given.ours, given.theirs):
                        some = found(x, tokens, cut(len(tokens), size))
                        torch.testing.assert_close(some, expected, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_native_operations_add_the_same(instruction_set: str) -> None:
    tokens = tokens_with_ends()
    x = torch.randn((len(tokens), STREAMS * D), generator=torch.Generator().manual_seed(1))
    given = Layer(SHAPES[0], model.NativeOperations(kernels_limited_to(instruction_set)))
    found = given.ours(x, tokens, cut(len(tokens), 5))
    torch.testing.assert_close(found, given.theirs(x, tokens, [len(tokens)]), atol=2e-5, rtol=1e-4)


def specified_rows(ngrams: dict[str, Any], layer: int, tokens: list[int]) -> list[list[int]]:
    """The rows of each token, by the definition (docs/model.md), from the manifest's values."""
    place, eos, heads = ngrams["layers"].index(layer), ngrams["eos_token"], ngrams["heads_per_ngram"]
    m, sizes = ngrams["multipliers"][place], ngrams["head_sizes"][place]
    found = []
    for t, token in enumerate(tokens):
        row = []
        for n in range(2, ngrams["ngram_size"] + 1):
            mixed = token * m[0]
            for j in range(1, n):
                between = tokens[max(t - j, 0) : t]
                mixed ^= (eos if t < j or eos in between else tokens[t - j]) * m[j]
            assert mixed < 2**63
            for k in range((n - 2) * heads, (n - 1) * heads):
                row.append(mixed % sizes[k] + sum(sizes[:k]))
        found.append(row)
    return found


def test_rows_are_those_of_the_specification(made: Path) -> None:
    values, tokens = SecondReader(made / "pack").manifest["model"]["ngrams"], tokens_with_ends()
    spec = ngrams_of()
    for place, layer in enumerate(spec.layers):
        found = row_numbers(spec, tokens.numpy(), len(tokens), spec.layers)[place]
        assert found.tolist() == specified_rows(values, layer, tokens.tolist())
        for start in range(1, len(tokens)):
            history = tokens[max(start - 2, 0) : start + 1].numpy()
            assert row_numbers(spec, history, 1, (layer,))[0, 0].tolist() == found[start].tolist()


# ---- whole models ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with known_family():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in `source` and its pack in `pack`, experts and dense matrices in 16 bit; do not write into them."""
    work = tmp_path_factory.mktemp("ngrams")
    with known_family():
        pack(TinyNgrams().write(work / "source"), work / "pack", width=16)
    return work


def ids_of(num_tokens: int = 41) -> list[int]:
    return [int(token) for token in tokens_with_ends(num_tokens)]


def expected_logits(made: Path, ids: list[int]) -> Tensor:
    checkpoint = Checkpoint(made / "source")
    logits = model.Decoder(model.CheckpointWeights(checkpoint), len(ids)).logits(ids)
    checkpoint.close()
    return logits


def each_weights(opened: Pack) -> Iterator[model.Weights]:
    """The weights that run on a CPU."""
    yield model.PackWeights(opened, CPU)
    yield model.StreamedPackWeights(opened, CPU)
    with model.operations_for(CPU, 2) as operations, closing(model.open_weights(opened, CPU, operations)) as mapped:
        yield mapped


@pytest.mark.slow
def test_a_model_gives_the_same_logits_from_any_weights_and_in_any_pieces(made: Path) -> None:
    ids = ids_of()
    expected = expected_logits(made, ids)
    without = expected_logits(made, [each if each != ids[3] else 0 for each in ids])
    assert (expected - without).abs().max() > 0.1
    with Pack(made / "pack") as opened:
        for number, weights in enumerate(each_weights(opened)):
            for size in (41, 7, 1):
                with case(number, size):
                    decoder = model.Decoder(weights, len(ids), chunk_tokens=size)
                    torch.testing.assert_close(decoder.logits(ids), expected, atol=BOUND, rtol=0)
                    decoder.reset()
                    one_by_one = torch.stack([decoder.next_logits([each]) for each in ids])
                    torch.testing.assert_close(one_by_one, expected, atol=BOUND, rtol=0)


def test_ngrams_change_what_a_model_predicts(made: Path) -> None:
    checkpoint = Checkpoint(made / "source")
    weights = model.CheckpointWeights(checkpoint)
    expected = model.Decoder(weights, 41).logits(ids_of())
    weights.spec = replace(weights.spec, ngrams=None)
    assert (model.Decoder(weights, 41).logits(ids_of()) - expected).abs().max() > 0.1
    checkpoint.close()


def test_a_text_goes_on_from_a_copied_state_with_its_tokens(made: Path) -> None:
    ids = ids_of()
    with Pack(made / "pack") as opened, closing(model.PackWeights(opened, CPU)) as weights:
        decoder = model.Decoder(weights, 64)
        decoder.begin(ids[:30])
        first = decoder.logits([9, 3, 8])
        left = decoder.keep_beginning([*ids[:30], 9, 4])
        assert left == [9, 4] and decoder.cache.num_tokens == 30
        again = decoder.logits([9, 3, 8])
        torch.testing.assert_close(again, first, atol=0, rtol=0)
        whole = model.Decoder(weights, 64).logits([*ids[:30], 9, 3, 8])
        torch.testing.assert_close(again, whole[-3:], atol=BOUND, rtol=0)


def test_the_cache_has_a_state_for_each_layer_with_ngrams(made: Path) -> None:
    with Pack(made / "pack") as opened:
        spec = opened.spec
    assert state_values(spec) == 2 * 9 * 64
    cache = KVCache(spec, 32, CPU)
    assert cache.num_bytes == cache_bytes(spec, 32, 32)
    state = cache.states.of_ngrams(2)
    assert state is not None and cache.states.of_ngrams(1) is None
    state.copied().conv.fill_(1)
    assert state.conv.shape == (9, 64) and not state.conv.any()


def test_a_pass_with_more_rows_than_a_buffer_and_more_passes_than_buffers_reads_them_all(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.compute, "SLOT_TOKENS", 3)  # 12 rows
    ids = ids_of()
    expected = expected_logits(made, ids)
    for kind in (None, BlockingReads):
        with Pack(made / "pack") as opened, closing(model.PackWeights(opened, CPU)) as weights:
            if kind is not None:
                monkeypatch.setattr(reads, "open_reads", kind)
            for chunk_tokens in (41, 5):
                torch.testing.assert_close(
                    model.Decoder(weights, 41, chunk_tokens=chunk_tokens).logits(ids), expected, atol=BOUND, rtol=0
                )
            assert opened.spec.ngrams is not None
            numbers = np.arange(0, 90, 7)
            held = [weights.ngram_table(0)(numbers) for _ in range(6)]  # there are four buffers
            rows = [each.result() for each in held]
            assert all(torch.equal(each, rows[0]) for each in rows)
            for each in [weights.ngram_table(2)(numbers) for _ in range(6)]:
                each.cancel()
            assert len(weights._tables.free) == 4  # type: ignore[union-attr]


def test_a_failed_pass_gives_its_buffers_back(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of()
    with Pack(made / "pack") as opened, closing(model.PackWeights(opened, CPU)) as weights:
        decoder = model.Decoder(weights, 64, chunk_tokens=4)
        whole = decoder.logits(ids)
        decoder.reset()
        expert = model.PackWeights.expert

        def failing(self: model.PackWeights, layer_idx: int, number: int) -> object:
            if layer_idx == 1:
                raise PackError("damaged")
            return expert(self, layer_idx, number)

        for _ in range(3):
            with monkeypatch.context() as patch, pytest.raises(PackError):
                patch.setattr(model.PackWeights, "expert", failing)
                decoder.logits(ids)
            assert len(weights._tables.free) == 4  # type: ignore[union-attr]
        decoder.reset()
        torch.testing.assert_close(decoder.logits(ids), whole, atol=0, rtol=0)


def test_a_damaged_row_is_named_when_it_is_read(made: Path, new_folder: Callable[[], Path]) -> None:
    ids, spec = ids_of(), ngrams_of()
    read = row_numbers(spec, np.array(ids), len(ids), (2,)).ravel()
    row, unread = int(read[5]), next(number for number in range(spec.num_rows[1]) if number not in read)
    folder = new_folder() / "pack"
    folder.mkdir()
    for path in (made / "pack").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    path = folder / "ngrams-002.safetensors"
    edit_byte(path, 4096 + 16 * unread)
    with Pack(folder) as opened, closing(model.PackWeights(opened, CPU)) as weights:
        model.Decoder(weights, 64).logits(ids)  # a row that is not read may be damaged
    edit_byte(path, 4096 + 16 * row + 2)
    for make in (model.PackWeights, model.StreamedPackWeights):
        with Pack(folder) as opened, pytest.raises(PackError) as refused:
            model.Decoder(make(opened, CPU), 64).logits(ids)
        message = f"ngrams-002.safetensors: row {row}: CRC-32 does not match its bytes; the file is damaged"
        assert str(refused.value) == message


def test_a_table_that_is_cut_while_it_is_in_use_is_named(made: Path, new_folder: Callable[[], Path]) -> None:
    folder = new_folder() / "pack"
    folder.mkdir()
    for path in (made / "pack").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    with Pack(folder) as opened, closing(model.PackWeights(opened, CPU)) as weights:
        decoder = model.Decoder(weights, 64)
        decoder.logits([1, 2, 3])
        with (folder / "ngrams-000.safetensors").open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(PackError) as refused:
            decoder.logits([4])
    cut = "was truncated while it was in use; restore the file and start again"
    assert str(refused.value) == f"ngrams-000.safetensors: {cut}"


def test_engines_run_a_pack_with_tables_inside_a_budget_without_them(made: Path) -> None:
    ids = ids_of()
    expected = expected_logits(made, ids)[-1]
    with Pack(made / "pack") as opened:
        spec = opened.spec
        assert cpu_only(spec) == "n-gram tables"
        assert ngram_bytes(spec) < 1 << 20 and ngram_bytes(replace(spec, ngrams=None)) == 0
        chosen = {"read": "map"}, {"budget_bytes": 64 << 20}, {"kernels": "torch"}
        for options in (EngineOptions(**each) for each in chosen):
            with case(options), Engine(opened, options, 64) as engine:
                found = engine.decoder.next_logits(ids)
                torch.testing.assert_close(found, expected, atol=BOUND, rtol=0)
    assert {role.name for role in dense_roles(spec) if ".ngrams." in role.name and "layers.0" in role.name}
