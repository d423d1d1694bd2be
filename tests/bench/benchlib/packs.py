"""The packs that offloading is measured on; made where they are not there.

Synthetic ones have 4 bit throughout and 4 to 5 GB: few large experts, many small ones, and a whole OLMoE; and the same
with a tenth of the neurons running. Others store experts as a paper does. One more is the demo model's.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchlib import DEMO_MODEL, FLOE_BITS, PACK_BITS, moe_pack
from moe_pack.calib.profile import assumed_losses
from moe_pack.convert import skewed_popularity
from moe_pack.convert.plan import Decision, PlanningModel, preset_decision
from moe_pack.convert.plan.options import PresetName
from moe_pack.convert.plan.plan_file import plan_bytes
from moe_pack.formats import Pack, dense_roles
from moe_pack.formats.families import model_spec
from moe_pack.runtime.offload import divide_budget, expert_pages
from moe_pack.runtime.offload.budgets import LEAST_PREFILL_TOKENS, workspace_bytes

DEMO = "demo"  # the demo model's pack
SPARSE = "-sparse"  # ends the name of a pack of which some neurons do not run
SKEW = 0.5  # of the popularity of a synthetic pack's experts
_BOUNDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class SyntheticPack:
    """Some layers of a published model. `path_correlation`: how far a token's experts follow from those before.

    `sparsity`: the share of neurons that do not run.   `bits`: the options of `synth` that say how weights are stored.
    `preset`: the paper that decides it in their place; then losses are assumed, popularity is that of the pack.
    """

    model: str
    layers: int
    vocab: int | None = None
    path_correlation: float | None = 0.5
    sparsity: float = 0.0
    bits: tuple[str, ...] = PACK_BITS
    preset: PresetName | None = None

    def arguments(self) -> list[str]:
        """Returns the arguments of `moe-pack synth`."""
        vocab = [] if self.vocab is None else ["--vocab", str(self.vocab)]
        paths = [] if self.path_correlation is None else ["--path-correlation", str(self.path_correlation)]
        sparsity = ["--sparsity", str(self.sparsity)]
        stored = (*self.bits, *sparsity) if self.preset is None else ()
        return [self.model, "--layers", str(self.layers), *vocab, *stored, "--skew", str(SKEW), *paths]

    def preset_plan(self, preset: PresetName) -> bytes:
        """Returns the paper's plan as a file, with `sparsity` in place of thresholds."""
        spec = model_spec(self.model, self.layers, self.vocab)
        losses = replace(assumed_losses(spec), popularity=skewed_popularity(spec, SKEW, seed=0))
        plan = preset_decision(preset, PlanningModel(spec, ("BF16",) * len(dense_roles(spec)), losses)).plan
        return plan_bytes(Decision(plan, np.full(losses.popularity.shape, self.sparsity)), spec)


def with_sparse(packs: dict[str, SyntheticPack], sparsity: float = 0.9) -> dict[str, SyntheticPack]:
    """Returns packs and the same with this share of neurons that do not run, which are called `NAME-sparse`."""
    sparse = {f"{name}{SPARSE}": replace(pack, sparsity=sparsity) for name, pack in packs.items()}
    return packs | sparse


SYNTHETIC = with_sparse(
    {
        "mixtral-6-layers": SyntheticPack("mixtral-8x7b", 6),
        "olmoe-16-layers": SyntheticPack("olmoe-1b-7b", 16),
        "qwen3-14-layers": SyntheticPack("qwen3-30b-a3b", 14, 32768),
    }
)


# As large as what people run; not measured unless it is asked for, because it takes 20 GB.
LARGE = {"qwen3.6-40-layers": SyntheticPack("qwen3.6-35b-a3b", 40)}

# As FloE stores experts: up in 2 bits, gate and down in 16 (§3.2). All selectors fit in a quarter of such a pack.
FLOE = {
    "mixtral-5-layers-floe": SyntheticPack("mixtral-8x7b", 5, 8192, None, 0.9, FLOE_BITS),
    "olmoe-8-layers-floe": SyntheticPack("olmoe-1b-7b", 8, 8192, None, 0.9, FLOE_BITS),
}

# As CORM stores experts, and all of them in its 4 bits. 45% of the neurons run: theta 0.25 leaves out 55% (Fig. 2).
_CORM_INT4 = (
    *("--selector", "gate", "--selector-bits", "4", "--record-bits", "4"),
    *("--scale-bits", "8", "--dense-bits", "16"),
)
_CORM_MODELS = {"mixtral-5-layers": ("mixtral-8x7b", 5), "deepseek-11-layers": ("deepseek-moe-16b", 11)}
CORM: dict[str, SyntheticPack] = {}
for _name, (_model, _layers) in _CORM_MODELS.items():
    CORM[f"{_name}-int4"] = SyntheticPack(_model, _layers, 8192, None, 0.55, _CORM_INT4)
    CORM[f"{_name}-corm"] = SyntheticPack(_model, _layers, 8192, None, 0.55, preset="corm")
# In 16 bit, as EdgeMoE's baseline and importance store experts; DeepSeek's first layer has none.
_WHOLE = ("--selector", "none", "--record-bits", "16")
EDGEMOE = {
    "minicpm-8-layers-16-bit": SyntheticPack("minicpm-moe-8x2b", 8, 8192, None, 0.0, _WHOLE),
    "minicpm-8-layers-edgemoe": SyntheticPack("minicpm-moe-8x2b", 8, 8192, None, 0.0, preset="edgemoe"),
}
IMPORTANCE = {"deepseek-7-layers-16-bit": SyntheticPack("deepseek-moe-16b", 7, 8192, None, 0.0, _WHOLE)}


def make_pack(name: str, folder: Path, synthetic: dict[str, SyntheticPack] = SYNTHETIC | LARGE) -> Path:
    """Returns the pack of this name in `folder`, made unless it is there; `DEMO` or one of `synthetic`."""
    pack = folder / name
    if not (pack / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        asked = ["convert", DEMO_MODEL, *PACK_BITS] if name == DEMO else ["synth", *synthetic[name].arguments()]
        with tempfile.NamedTemporaryFile(suffix=".json") as plan:
            preset = None if name == DEMO else synthetic[name].preset
            if preset is not None:
                Path(plan.name).write_bytes(synthetic[name].preset_plan(preset))
                asked += ["--plan", plan.name]
            moe_pack(*asked, "-o", pack)
    return pack


def make_profiled_demo(folder: Path) -> Path:
    """Returns the demo model's pack at 4 bit with the routing of a profile, `demo-profile` in the same folder."""
    pack, profile = folder / "demo-profiled", folder / "demo-profile"
    if not (profile / "profile.json").exists():
        moe_pack("profile", DEMO_MODEL, "--tokens", 8192, "--sensitivity", "none", "-o", profile)
    if not (pack / "manifest.json").exists():
        bits = ("--selector-bits", 4, "--record-bits", 4, "--dense-bits", "source", "--sparsity", 0)
        moe_pack("convert", DEMO_MODEL, *bits, "--profile", profile, "-o", pack)
    return pack


def make_demo(folder: Path, sparsity: float) -> Path:
    """Returns the demo model's pack at 4 bit, with this share of its neurons not running."""
    pack = folder / f"demo-{sparsity:g}"
    if not (pack / "manifest.json").exists():
        bits = ("--selector-bits", 4, "--record-bits", 4, "--dense-bits", "source", "--sparsity", sparsity)
        moe_pack("convert", DEMO_MODEL, *bits, "-o", pack)
    return pack


def budget_with(pack: Pack, num_experts: int, context_tokens: int) -> int:
    """Returns the budget that has space for so many of the largest experts, and for short forward passes."""
    plan = divide_budget(pack.layout, _BOUNDLESS, context_tokens, 0)
    largest = int(expert_pages(pack.layout, plan.page_bytes).max()) * (plan.page_bytes + plan.head_bytes)
    fixed = plan.fixed.dense + plan.fixed.cache + workspace_bytes(pack.spec, LEAST_PREFILL_TOKENS)
    return fixed + num_experts * largest
