"""`quantization_config` of a `config.json`: which codes some tensors are in. Which tensors, they say themselves."""

from moe_pack.formats.errors import CheckpointError
from moe_pack.formats.families.claims import SCALE_BLOCK, SourceCodec
from moe_pack.formats.families.config import Config

_KEY = "quantization_config"


def read_quantization(config: Config) -> SourceCodec:
    """What a checkpoint's quantized tensors are in; `plain` where its config speaks of none.

    How activations would be rounded (`activation_scheme`) is passed over: here they stay in float32.
    Raises:  CheckpointError for any other quantization.
    """
    group = config.group(_KEY)
    if group is None:
        return "plain"
    codec: SourceCodec
    if (method := group.text("quant_method", "")) == "fp8":
        group.choice("fmt", ("e4m3",))
        group.choice("activation_scheme", ("dynamic",))
        group.choice("scale_fmt", ("float", "ue8m0"))  # of activations; those of weights are stored as they are
        size, wanted = group.counts("weight_block_size"), [SCALE_BLOCK, SCALE_BLOCK]
        if list(size) != wanted:
            raise CheckpointError(f"{group.place}: weight_block_size is {list(size)}, supported is {wanted} only")
        codec = "fp8"
    elif method == "mxfp4":
        codec = "mxfp4"
    else:
        raise CheckpointError(
            f"{group.place}: quant_method is {method!r}, supported: fp8, mxfp4; use the 16-bit original"
        )
    group.ignore("modules_to_not_convert", "ignored_layers", "dequantize")
    group.refuse_unread()
    return codec
