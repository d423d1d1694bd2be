"""Mixtral with n-gram embeddings before some of its layers, as qwen4_exp has them: a family for tests alone.

Its residual is plain: one stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from moe_pack.formats import ModelSpec
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.mixtral import MIXTRAL
from moe_pack.formats.families.ngrams import NGRAM_NAMES, NGRAM_TABLES, read_ngrams
from moe_pack.formats.families.registry import LOADED
from moe_pack.formats.parts import NgramSpec
from support.models import Tensors, TinyMixtral

EOS = 5
CONFIG: dict[str, Any] = {
    "model_type": "ngram_mixtral", "num_hidden_layers": 3, "ple_layer_ids": [1, 3], "ple_embed_dim": 24,
    "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 37,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 3, "seed": 1234, "eos_token_id": EOS,
}  # fmt: skip


def _read_config(config: Config) -> ModelSpec:
    return replace(MIXTRAL.read_config(config), family="ngram_mixtral", ngrams=read_ngrams(config))


NGRAM_MIXTRAL = replace(
    MIXTRAL,
    model_type="ngram_mixtral",
    short_names={},
    read_config=_read_config,
    dense_names={**MIXTRAL.dense_names, **NGRAM_NAMES},
    table_names=NGRAM_TABLES,
)


@contextmanager
def known_family() -> Iterator[None]:
    """Adds the family to the known ones."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(LOADED, "ngram_mixtral", NGRAM_MIXTRAL)
        yield


def ngrams_of(config: dict[str, Any] = CONFIG, hidden_size: int = 64, vocab_size: int = 96) -> NgramSpec:
    """The spec of a config."""
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    spec = read_ngrams(Config(config | sizes, "config.json"))
    assert spec is not None
    return spec


@dataclass(frozen=True)
class TinyNgrams(TinyMixtral):
    """A random checkpoint of the family; `num_parts` 0: each table is one tensor."""

    num_layers: int = 3
    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))
    num_parts: int = 3
    has_constants: bool = True

    def tensors(self) -> Tensors:
        held, spec = super().tensors(), ngrams_of(self.config, self.hidden_size, self.vocab_size)
        generator = torch.Generator().manual_seed(self.seed + 1)
        d = self.hidden_size

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * 0.3).to(self.dtype)

        for place, layer in enumerate(spec.layers):
            ple = f"model.layers.{layer}.ple"
            held |= {f"{ple}.key_proj.weight": random(d, spec.embed_dim)}
            held |= {f"{ple}.value_proj.weight": random(d, spec.embed_dim)}
            held |= {f"{ple}.norm_{name}.weight": 1 + random(d) for name in ("key", "query", "conv")}
            held |= {f"{ple}.conv1d.weight": random(d, 1, spec.conv_kernel)}
            table, name = random(*spec.table_shape(layer)), f"{ple}.ple_embedding.ngram_embedding"
            held |= self._parts(table, name)
            if self.has_constants:
                held |= _constants(spec, place, f"{ple}.ple_embedding")
        return held

    def _parts(self, table: torch.Tensor, name: str) -> Tensors:
        if not self.num_parts:
            return {f"{name}.weight": table}
        parts = torch.chunk(table, self.num_parts)
        return {f"{name}.shard_{number}.weight": part.clone() for number, part in enumerate(parts)}


def _constants(spec: NgramSpec, place: int, name: str) -> Tensors:
    sizes = torch.tensor(spec.head_sizes[place])
    return {
        f"{name}.layer_multipliers": torch.tensor(spec.multipliers[place]),
        f"{name}.ngram_heads_vocab_sizes": sizes,
        f"{name}.ngram_heads_offsets": sizes.cumsum(0) - sizes,
    }


def table_of(tensors: Tensors, layer: int) -> torch.Tensor:
    """The whole table of a layer of a checkpoint."""
    name = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
    if f"{name}.weight" in tensors:
        return tensors[f"{name}.weight"]
    numbers = range(sum(key.startswith(name) for key in tensors))
    return torch.cat([tensors[f"{name}.shard_{number}.weight"] for number in numbers])
