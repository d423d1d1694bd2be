"""Published models: their real config.json, and the figures their publishers print (README.md in the same folder)."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from moe_pack.formats import ModelSpec, dense_roles
from moe_pack.formats.families.config import Config
from moe_pack.formats.families.registry import read_spec
from moe_pack.formats.parts.specs import num_active_parameters, num_parameters
from support.models import TESTS

CONFIGS = TESTS.parent / "formats" / "families" / "configs"


@dataclass(frozen=True)
class Published:
    """A model and what is printed of it: parameters in billions, values cached a token in thousands.

    `total_leaves_out`, `active_leaves_out`: dense roles, of all layers, that the publisher does not count.
    `adds_prediction_layer`: whether the total has the multi-token-prediction layer that plain decoding does not run.
    `cached` is None where nobody printed it; then the formula of the DeepSeek-V2 paper's Table 1 is what the count is
    held against.
    """

    name: str
    total: str
    active: str
    cached: str | None = None
    total_leaves_out: tuple[str, ...] = ()
    active_leaves_out: tuple[str, ...] = ()
    adds_prediction_layer: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def counted(self) -> str:
        """What the publisher counts otherwise than all weights; empty where nothing is."""
        notes = [f"total without {' and '.join(self.total_leaves_out)}"] if self.total_leaves_out else []
        notes += ["with the layer that predicts two tokens ahead"] if self.adds_prediction_layer else []
        notes += [f"active without {' and '.join(self.active_leaves_out)}"] if self.active_leaves_out else []
        return ", ".join(notes)

    @property
    def path(self) -> Path:
        return CONFIGS / f"{self.name}.json"


PUBLISHED = (
    Published("mixtral-8x7b", "46.7", "12.9"),
    Published("mixtral-8x22b", "141", "39"),
    Published("qwen1.5-moe-a2.7b", "14.3", "2.7"),
    Published("qwen2-57b-a14b", "57", "14"),
    Published("qwen3-30b-a3b", "30.5", "3.3", "49.152"),
    Published("qwen3-235b-a22b", "235", "22", "96.256"),
    Published("qwen3-vl-30b-a3b-instruct", "30", "3"),
    Published("qwen3-omni-30b-a3b-instruct", "30.5", "3.3"),
    Published("mellum2-12b-a2.5b", "12", "2.5"),
    Published("mimo-v2-flash", "309", "15", "111.36"),
    Published("laguna-xs-2.1", "33", "3"),
    Published("step-3.7-flash", "196", "11", "92.16", ("embed", "head"), ("embed", "head")),
    Published("aria", "24.9", "3.5", active_leaves_out=("embed", "head", "router")),
    Published("qwen3-next-80b-a3b-instruct", "79.67", "3.87"),
    Published("qwen3.6-35b-a3b", "35", "3"),
    Published("kimi-linear-48b-a3b-instruct", "48", "3", total_leaves_out=("embed", "head")),
    Published("ling-3.0-flash", "124", "5.1", active_leaves_out=("embed",)),
    Published("granite-4.0-h-tiny", "7", "1"),
    Published("jamba-v0.1", "52", "12"),
    Published("nemotron-3-nano-30b-a3b", "31.6", "3.6"),
    Published("lfm2-8b-a1b", "8.3", "1.5"),
    Published("deepseek-v2-lite", "15.7", "2.4", "15.6", active_leaves_out=("embed",)),
    Published("deepseek-v2", "236", "21", "34.6"),
    Published("phi-3.5-moe", "41.9", "6.6"),
    Published("olmoe-1b-7b", "6.9", "1.3"),
    Published("dbrx-instruct", "132", "36"),
    Published("granite-3.0-1b-a400m", "1.3", "0.4"),
    Published("granite-3.0-3b-a800m", "3.3", "0.8"),
    Published("glm-4.5-air", "106", "12", "94.208", ("embed", "head"), ("embed", "head")),
    Published("glm-4.5", "355", "32", "188.416", ("embed", "head"), ("embed", "head"), adds_prediction_layer=True),
    Published("dots.llm1.base", "142", "14"),
    Published("deepseek-v3", "671", "37", "35.136"),
    Published("deepseek-v3.2", "671", "37", "42.944", active_leaves_out=("embed",)),
    Published("deepseek-v4-flash", "284", "13"),
    Published("deepseek-v4-pro", "1573", "49"),
    Published("moonlight-16b-a3b-instruct", "15.29", "2.24", "15.552", ("embed", "head"), ("embed", "head")),
    Published("kimi-k2-instruct", "1026", "32", "35.136"),
    Published("kimi-k2.5", "1026", "32", "35.136"),
    Published("deepseek-moe-16b", "16.4", "2.8"),
    Published("minicpm-moe-8x2b", "13.6", "4", total_leaves_out=("embed",), active_leaves_out=("embed",)),
    Published("xverse-moe-a4.2b", "25.8", "4.2"),
    Published("gpt-oss-20b", "20.91", "3.61", active_leaves_out=("embed",)),
    Published("gpt-oss-120b", "116.83", "5.13", active_leaves_out=("embed",)),
    Published("minimax-m2.7", "229", "10", active_leaves_out=("embed", "head")),
    Published("minimax-m3", "427", "23", "68.736", active_leaves_out=("embed", "head")),
    Published("ernie-4.5-21b-a3b", "21", "3"),
    Published("ernie-4.5-vl-28b-a3b-base", "21", "3"),
    Published("glm-4.7-flash", "30", "3"),
    Published("glm-5.3", "744", "40", "47.616", active_leaves_out=("embed",)),
    Published("glm-4.5v", "106", "12", "94.208", ("embed", "head"), ("embed", "head")),
    Published("solar-open-100b", "102.6", "12"),
    Published("hy3-preview-base", "295", "21"),
    Published("hunyuan-a13b-instruct", "80", "13"),
    Published("k-exaone-236b-a23b", "236", "23"),
    Published("mistral-small-4", "119", "6"),
    Published("llama-4-scout-17b-16e", "108", "17"),
    Published("qwen3.8-flash-next", "176", "6", "13.824", active_leaves_out=("embed", "head")),
    Published("gemma-4-26b-a4b", "25.2", "3.8", "112.640"),
    Published("trinity-mini", "26", "3"),
    Published("switch-base-16", "1.1", "0.223"),
    Published("switch-base-128", "7.4", "0.22"),
    Published("switch-large-128", "26", "0.74"),
)

# Families of which no public copy of a real config.json was found, and why.
UNPUBLISHED = {
    "axk1": "no public copy of the file of skt/A.X-K1 was found; transformers' defaults are its sizes",
    "axk2": "no public copy of the file of skt/A.X-K2 was found; transformers' defaults are sizes of A.X K2 Light",
    "cohere2_moe": "public code quotes sizes of CohereLabs/North-Mini-Code-1.0, but no public copy has the whole file",
    "cohere2_vision": "no public copy of the file of CohereLabs/command-a-plus-05-2026-bf16 was found",
    "deepseek_ocr2": "tests quote sizes of deepseek-community/DeepSeek-OCR-2, but no public copy has the whole file",
    "flex_olmo": "no public copy of the file of allenai/FlexOlmo-7x7B-1T was found",
    "qwen4_exp_text": "its models are published inside multimodal checkpoints, qwen4_exp",
    "gemma4_text": "its models are published inside multimodal checkpoints, gemma4",
    "flint": "no public copy of the file of RecursiveSI/flint was found; transformers' defaults are its sizes",
    "granitemoe_swa": "only the sizes of ibm-granite/granite-swash-3b-a600m were found, not its rotary bases",
    "granitemoeshared": "the class is in transformers; IBM published its weights in granitemoehybrid",
    "hy_v4": "public code quotes sizes of tencent/Hy4-preview, but no public copy of its file was found",
    "kolibri1": "no public copy of the file of Aleph-Alpha/Kolibri-1 was found; transformers' defaults are its sizes",
    "llama4_text": "its models are published inside multimodal checkpoints, llama4",
    "longcat_flash": "no public copy of the file of meituan-longcat/LongCat-Flash-Chat was found",
    "beam": "no public copy of the file of reflection/Beam-1.0-501B-A23B was found",
    "minimax": "no public copy of the file of MiniMaxAI/MiniMax-Text-01-hf was found, only keys in other files",
    "mistral4": "its models are published inside multimodal checkpoints, mistral3",
    "step3p5": "no public copy of the file of stepfun-ai/Step-3.5-Flash was found; step3p7 has its text model's sizes",
    "ernie4_5_vl_moe": "its models are published with a flat config, ernie4_5_moe_vl",
    "nemotron_h_omni": "tests quote parts of the file, no public copy has all of it; its text model is nemotron_h's",
    "NemotronH_Nano_Omni_Reasoning_V3": "as nemotron_h_omni, of which it is the older name",
    "qwen3_5_moe_text": "its models are published inside multimodal checkpoints, qwen3_5_moe",
}


def spec_of(published: Published) -> ModelSpec:
    """The spec that our reader makes of the real config."""
    values = json.loads(published.path.read_text())
    return read_spec(Config(values, published.path.name))[1]


def total(published: Published, spec: ModelSpec) -> int:
    """All parameters, counted as the publisher counts."""
    added = prediction_layer(spec) if published.adds_prediction_layer else 0
    return num_parameters(spec) - left_out(published.total_leaves_out, spec) + added


def active(published: Published, spec: ModelSpec) -> int:
    """The parameters one token uses, counted as the publisher counts."""
    return num_active_parameters(spec) - left_out(published.active_leaves_out, spec)


def left_out(roles: tuple[str, ...], spec: ModelSpec) -> int:
    return sum(math.prod(role.shape) for role in dense_roles(spec) if role.name.split(".")[-1] in roles)


def prediction_layer(spec: ModelSpec) -> int:
    """A decoder layer with experts, its input's projection from two hidden states, and three norms (GLM-4.5)."""
    last, d = f"layers.{spec.num_hidden_layers - 1}.", spec.hidden_size
    dense = sum(math.prod(role.shape) for role in dense_roles(spec) if role.name.startswith(last))
    experts = spec.router.num_experts * spec.expert.intermediate_size * d * len(spec.expert.matrices)
    return dense + experts + 2 * d * d + 3 * d


def agrees(number: int, unit: float, printed: str) -> bool:
    """Whether a number is less than one unit of the last printed digit away from what is printed of it."""
    return abs(number / unit - float(printed)) < 10.0 ** -len(printed.partition(".")[2])
