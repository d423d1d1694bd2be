"""The target of a plan: a memory budget, a limit of loss and a machine, from which the command line is derived."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from moe_pack import formats
from moe_pack.convert.plan import machines
from moe_pack.formats.base import commands
from moe_pack.formats.base.json_files import ADDED
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import PRESETS

PresetName = Literal["floe", "corm", "fiddler", "edgemoe"]
SearchName = Literal["knapsack", "edgemoe", "uniform"]
Device = Literal["auto", "cuda", "cpu"]
Purpose = Literal["moe-run", "vllm"]
USUAL_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class LossLimit:
    """The most that a pack may lose: growth of perplexity as a share, or nats of KL divergence a token."""

    kind: Literal["perplexity", "kl"]
    value: float

    def nats(self, nll_per_kl: float) -> float:
        """Returns the limit in nats of KL divergence a token.

        Args:    nll_per_kl: the growth of ln(perplexity) for each nat.
        """
        return math.log1p(self.value) / nll_per_kl if self.kind == "perplexity" else self.value

    def times(self, factor: float) -> "LossLimit":
        """Returns a limit that is `factor` times as large."""
        return replace(self, value=factor * self.value)

    @property
    def percent(self) -> str:
        """A limit of perplexity in percent: 1%."""
        return f"{100 * self.value:g}%"

    def text(self) -> str:
        """Returns the limit with its unit: 1% of perplexity, 0.02 nats."""
        return f"{self.percent} of perplexity" if self.kind == "perplexity" else f"{self.value:g} nats"


USUAL_LIMIT = LossLimit("perplexity", 0.01)
# The papers whose widths follow from a loss; the others' are fixed. EdgeMoE §IV-A: the tolerable loss of a task's
# accuracy; our reading: of perplexity.
PAPERS_LIMITS: dict[PresetName, LossLimit] = {"edgemoe": LossLimit("perplexity", 0.02)}
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)
_POLICIES_ALONE = {
    name: f"{name} is a policy of moe-run and stores nothing of its own; convert without --preset, then run the pack "
    f"with moe-run --policy {name}"
    for name in PRESETS
    if name not in PRESET_NAMES
}


def read_limit(text: str) -> LossLimit:
    """Returns a limit such as `1%` (of perplexity) or `0.02` (nats); raises ValueError if the text is neither."""
    try:
        number = float(text.strip().removesuffix("%"))
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ValueError(f"found {text!r}, expected a share of perplexity such as 1%, or nats such as 0.02")
    return LossLimit("perplexity", number / 100) if text.strip().endswith("%") else LossLimit("kl", number)


@dataclass(frozen=True, slots=True)
class Target:
    """The options of a plan. A field that is None has a default, which `defaults_text` reports."""

    # Of the GPU's memory on `cuda`, of host memory on `cpu`; None: of a paper's pack, which is the same for every
    # memory.
    budget_bytes: int | None = field(
        metadata=formats.option(
            "--target-vram",
            parse=commands.read_size,
            metavar="SIZE",
            help="Memory in which the pack will run, such as 11G: of the GPU, or of this machine if --device is cpu.",
        )
    )
    # `auto` is for `choose_target_device`, whose result all other functions need.
    device: Device = commands.option_field(
        "auto",
        "--device",
        mark="memory",
        help="Where the pack will run. auto is cuda if this machine has a GPU that can run the model in "
        "--target-vram, or if an option describes a GPU (--gpu, --link, --ram); else cpu. A line says which, and "
        "why. cuda does not need a GPU in this machine.",
    )
    limit: LossLimit | None = commands.option_field(
        None,
        "--max-loss",
        parse=read_limit,
        metavar="P%|KL",
        help="The most that the pack may lose: growth of perplexity in percent, or nats of KL divergence a token.  "
        f"[default: {USUAL_LIMIT.percent}; with --preset edgemoe {PAPERS_LIMITS['edgemoe'].percent}]",
    )
    context_tokens: int | None = commands.option_field(
        None,
        "--context",
        least=1,
        metavar="N",
        mark="memory",
        help=f"The key-value cache's size in tokens.  [default: {USUAL_CONTEXT}, or the model's maximum]",
    )
    gpu: str | None = field(  # this and the next two only on `cuda`
        default=None,
        metadata=formats.option(
            "--gpu",
            metavar="NAME",
            mark="gpu",
            help=f"The GPU: {', '.join(machines.GPUS)}, or {machines.MEASURE} for this machine's.",
        ),
    )
    link_rate: float | None = commands.option_field(
        None,
        "--link",
        parse=commands.read_size,
        metavar="SIZE",
        mark="gpu",
        help="Bytes a second from host memory to the GPU, such as 25G.  [default: what moe-pack doctor measured, "
        "or 16 GB/s]",
    )
    ram_bytes: int | None = commands.option_field(
        None,
        "--ram",
        parse=commands.read_size,
        metavar="SIZE",
        mark="gpu",
        help="Host memory for experts; if not all of them fit, the CPU reads those that GPU memory lacks from the "
        "disk.  [default: 75% of this machine's]",
    )
    search: SearchName = commands.option_field(
        "knapsack",
        "--search",
        help="How formats are chosen. knapsack: for each expert by itself, with a bound on what a better choice "
        "could gain. edgemoe: as that paper does. uniform: all experts alike.",
    )
    # A paper's pack in place of a search.
    preset: PresetName | None = commands.option_field(
        None,
        "--preset",
        begins=True,
        instead=_POLICIES_ALONE,
        help="A paper's pack in place of a search: nothing in it that the paper does not have, so no rotation "
        "unless --rotate on.",
    )
    purpose: Purpose = field(
        default="moe-run",
        metadata={
            **formats.option(
                "--for",
                help="vllm: a pack that moe-pack export --to compressed-tensors can take to vLLM: all experts of a "
                "layer in one format of 4 or 8 bits, no rotation, no neurons stored twice, all neurons run.",
            ),
            **ADDED,
        },
    )
    selectors: tuple[formats.Selector, ...] = SELECTORS
    sparsity: float | None = None  # of preset floe
    kv_dtype: KvDtype | None = field(  # only on `cpu`
        default=None,
        metadata=formats.option(
            "--kv-dtype",
            mark="cpu",
            help="On the CPU: how moe-run will store keys and values.  [default: f32; q8 if no pack runs with f32]",
        ),
    )

    @property
    def memory_bytes(self) -> int:
        """The budget of a target that has one."""
        assert self.budget_bytes is not None, (
            "`check` lets only a paper's pack be without, for which no speed is estimated"
        )
        return self.budget_bytes

    @property
    def loss_limit(self) -> LossLimit | None:
        """The most that the pack may lose; None for a paper's pack whose formats are fixed, whatever it loses."""
        usual = USUAL_LIMIT if self.preset is None else PAPERS_LIMITS.get(self.preset)
        return usual if self.limit is None else self.limit

    @property
    def has_our_parts(self) -> bool:
        """Whether `auto` adds parts of ours to the formats of the plan: rotated layers, and neurons with two rows.

        Not to a paper's pack, because the paper has neither, nor to one for vLLM, which can run neither.
        """
        return self.preset is None and self.purpose == "moe-run"

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """The device of a target of `choose_target_device`."""
        assert self.device != "auto", "`choose_target_device` comes first"
        return self.device

    def narrowed(self, selector: formats.Selector | None, sparsity: float | None) -> "Target":
        """Returns the target with a selector, if one is asked for, and a sparsity."""
        return replace(self, selectors=self.selectors if selector is None else (selector,), sparsity=sparsity)

    def check(self) -> None:
        """Refuses options that the device or the preset does not use; raises UsageError."""
        if self.budget_bytes is None and (
            wrong := commands.given(self, "memory") + commands.given(self, "gpu") + commands.given(self, "cpu")
        ):
            raise formats.UsageError(f"{wrong[0]} needs --target-vram; add it, or remove {wrong[0]}")
        if self.device == "cpu" and (wrong := commands.given(self, "gpu")):
            raise formats.UsageError(f"{wrong[0]} needs --device cuda; remove it or add --device cuda")
        if self.device == "cuda" and (wrong := commands.given(self, "cpu")):
            raise formats.UsageError(f"{wrong[0]} needs --device cpu; remove it or add --device cpu")
        if (wrong := commands.given(self, "gpu")) and (others := commands.given(self, "cpu")):
            raise formats.UsageError(f"{wrong[0]} is for GPUs and {others[0]} for the CPU; remove one of the two")
        if self.purpose == "vllm" and (self.preset is not None or self.search != "knapsack"):
            wrong_name = "--search" if self.preset is None else "--preset"
            raise formats.UsageError(
                f"{wrong_name} does not apply to --for vllm, which restricts the search; remove one of the two"
            )
        if self.preset is not None and self.search != "knapsack":
            raise formats.UsageError(f"--search does not apply to --preset {self.preset}; remove one of the two")
        if self.preset is not None and self.limit is not None and self.preset not in PAPERS_LIMITS:
            raise formats.UsageError(
                f"--max-loss does not apply to --preset {self.preset}, whose formats the paper has fixed; remove it: "
                "the loss is measured, and moe-pack check says whether a pack is within a limit"
            )
