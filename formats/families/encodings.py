"""The encodings of a checkpoint's quantized tensors, by `quantization_config`; names and dtypes show which they are."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from moe_pack import formats
from moe_pack.formats.families.family import Config

SCALE_BLOCK = 128  # rows, and columns, that share a scale of an FP8 matrix
MXFP4_BLOCK = 32  # columns that share a scale of an MXFP4 matrix
WORD_BITS = 32  # of a word with packed codes
SourceCodec = Literal["plain", "fp8", "mxfp4", "packed"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """The encoding of a checkpoint's quantized tensors, by its config."""

    codec: SourceCodec = "plain"
    num_bits: int = 0  # of a `packed` code
    group_size: int = 0  # columns that share a scale of `packed` codes; 0: the whole row
    # Further encodings of other tensors by the same codec; a tensor's shape shows which it has.
    others: tuple["Quantization", ...] = ()


PLAIN = Quantization()
_KEY = "quantization_config"


def read_quantization(config: Config, text_keys: tuple[str, ...] = ()) -> Quantization:
    """Reads the encoding of a checkpoint's quantized tensors; that of none without a `quantization_config`.

    Activations stay float32, whatever the config says of their rounding.
    Args:    text_keys: the keys that lead to the text model's object, each of which may have the key too.
    Raises:  CheckpointError for any other quantization, or for objects that say different things.
    """
    found, place = list[Quantization](), config
    for key in (*text_keys, None):
        group = place.group(_KEY)
        if group is not None and not group.is_empty:  # an empty one is left by programs that dequantize
            found.append(_quantization(group))
        inner = None if key is None else place.group(key)
        if inner is None:
            break
        place = inner
    if len(set(found)) > 1:
        raise formats.CheckpointError(f"{place.place}: {_KEY} differs from that outside; these must be equal")
    return found[0] if found else PLAIN


def _quantization(group: Config) -> Quantization:
    """Reads one `quantization_config`."""
    if (method := group.text("quant_method", "")) == "fp8":
        group.choice("fmt", ("e4m3",))
        group.choice("activation_scheme", ("dynamic",))
        group.choice("scale_fmt", ("float", "ue8m0"))  # of activations; those of weights are stored as they are
        size, wanted = group.counts("weight_block_size"), [SCALE_BLOCK, SCALE_BLOCK]
        if list(size) != wanted:
            raise formats.CheckpointError(
                f"{group.place}: weight_block_size is {list(size)}; only {wanted} is supported"
            )
        quantization = Quantization("fp8")
    elif method == "mxfp4":
        quantization = Quantization("mxfp4")
    elif method == "compressed-tensors":
        quantization = _compressed(group)
    else:
        raise formats.CheckpointError(
            f"{group.place}: quant_method is {method!r}, supported: fp8, mxfp4, compressed-tensors; use the 16-bit "
            "original"
        )
    # Tensors show how experts are stored.
    group.ignore("modules_to_not_convert", "ignored_layers", "dequantize", "expert_dtype")
    group.refuse_unread()
    return quantization


def _compressed(group: Config) -> Quantization:
    """Reads the codes that compressed-tensors packs in words, of one kind or of several.

    Source: compressed-tensors 0.20, quantization/quant_args.py and compressors/pack_quantized.
    """
    group.require("format")
    group.choice("format", ("pack-quantized",))
    group.choice("quantization_status", ("compressed",))
    group.only(kv_cache_scheme=None)
    group.only(sparsity_config={}, transform_config={})
    group.ignore("ignore", "global_compression_ratio", "version")
    found = tuple(dict.fromkeys(_packed(each) for each in _schemes(group)))
    if not found:
        raise formats.CheckpointError(f"{group.place}: config_groups has no weights; at least one kind is needed")
    return replace(found[0], others=found[1:])


def _schemes(group: Config) -> Iterator[Config]:
    """Yields the weights' object of each of the groups of modules."""
    groups = group.group("config_groups")
    for scheme in () if groups is None else groups.groups():
        weights = scheme.group("weights")
        if weights is None:
            raise formats.CheckpointError(
                f"{scheme.place}: weights is missing; only groups with quantized weights are supported"
            )
        scheme.ignore("targets", "input_activations")
        scheme.only(output_activations=None, format="pack-quantized")
        scheme.refuse_unread()
        yield weights


def _packed(weights: Config) -> Quantization:
    """Reads how the weights of a group of modules are quantized."""
    num_bits = weights.whole("num_bits")
    if num_bits not in (4, 8):
        raise formats.CheckpointError(f"{weights.place}: num_bits is {num_bits}; only 4 and 8 are supported")
    weights.only(type="int", symmetric=True, dynamic=False, block_structure=None)
    weights.choice("actorder", ("weight", "static"))  # for the calibration; others store the columns in that order
    if weights.choice("strategy", ("group", "channel")) == "channel":
        weights.only(group_size=-1)
        group_size = 0
    else:
        group_size = weights.whole("group_size")
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.refuse_unread()
    return Quantization("packed", num_bits, group_size)
