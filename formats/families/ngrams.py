"""n-gram embeddings as configs of qwen4_exp describe them, and the names of their tensors.

Source: transformers, models/qwen4_exp; conversion_mapping.py for the shards of tables.
"""

from moe_pack.formats import CheckpointError
from moe_pack.formats.families.family import Config, TableNames
from moe_pack.formats.parts import ngrams

_EMBEDDING = "model.layers.{i}.ple.ple_embedding"
_CONSTANTS = (
    f"{_EMBEDDING}.layer_multipliers",
    f"{_EMBEDDING}.ngram_heads_vocab_sizes",
    f"{_EMBEDDING}.ngram_heads_offsets",
)
# As published, in shards; and as transformers has it in memory.
NGRAM_TABLES = (
    TableNames(f"{_EMBEDDING}.ngram_embedding.shard_{{part}}.weight", *_CONSTANTS),
    TableNames(f"{_EMBEDDING}.ngram_embedding.weight", *_CONSTANTS),
)
NGRAM_NAMES = {
    ".ngrams.key": "ple.key_proj.weight",
    ".ngrams.value": "ple.value_proj.weight",
    ".ngrams.key_norm": "ple.norm_key.weight",
    ".ngrams.query_norm": "ple.norm_query.weight",
    ".ngrams.conv_norm": "ple.norm_conv.weight",
    ".ngrams.conv": "ple.conv1d.weight",
}


def read_ngrams(config: Config) -> ngrams.NgramSpec | None:
    """Reads the n-gram embeddings of a model; None if no layer has them. Layers count from 1 in `ple_layer_ids`."""
    config.ignore("split_ngram_parts")  # in how many tensors a table is saved
    layers = tuple(sorted(set(config.counts("ple_layer_ids"))))
    if not layers:
        config.ignore("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base")
        config.ignore("make_ngram_vocab_size_divisible_by", "seed")
        return None
    if layers[0] < 1:
        raise CheckpointError(f"{config.place}: ple_layer_ids has layer 0, expected layers counted from 1")
    ngram_size, heads = config.whole("ngram_size", 3), config.whole("heads_per_ngram", 8)
    num_heads = (ngram_size - 1) * heads
    if not 2 <= ngram_size <= ngrams.MAX_NGRAM_SIZE or len(layers) * num_heads > ngrams.MAX_HEADS:
        raise CheckpointError(
            f"{config.place}: ngram_size is {ngram_size} and heads_per_ngram {heads}, expected 2 to "
            f"{ngrams.MAX_NGRAM_SIZE} and at most {ngrams.MAX_HEADS} heads in all layers"
        )
    return ngrams.hashed_ngrams(
        tuple(layer - 1 for layer in layers),
        config.num_layers(),
        embed_dim=config.whole("ple_embed_dim", config.whole("hidden_size")),
        conv_kernel=config.whole("ple_conv_kernel_size", 4),
        ngram_size=ngram_size,
        heads_per_ngram=heads,
        eos_token=config.first_count("eos_token_id"),
        least_head_size=config.whole("ngram_vocab_size_base", 20_000_000),
        rows_multiple=config.whole("make_ngram_vocab_size_divisible_by", 128),
        vocab_size=config.whole("vocab_size"),
        seed=config.count("seed", 1234),
    )
