"""The options of a run and of sampling: frozen objects, from which the command line is derived.

Some options have a meaning on a GPU only, some only where experts are offloaded; the checks refuse others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moe_pack import formats
from moe_pack.formats.base import commands
from moe_pack.runtime import offload
from moe_pack.runtime.engine.machine import MachineFacts
from moe_pack.runtime.engine.numerics import NumericsOption
from moe_pack.runtime.model.caches import KvDtype

if TYPE_CHECKING:
    from moe_pack.formats.families.text_files import TextFiles

ReadOption = Literal["auto", "direct", "pread", "map"]
VerifyOption = Literal["lazy", "full", "off"]
KernelsOption = Literal["auto", "avx512vbmi", "avx512", "avx2", "neon", "portable", "torch"]
MissesOption = Literal["auto", "cpu", "pull"]
DraftOption = Literal["auto", "off", "ngram", "mtp"]

# Marks: where an option has a meaning; of the approximations, those that the CPU's offload alone has.
_GPU, _OFFLOAD, _APPROXIMATION = "gpu", "offload", "approximation"
# Of measurements, which are the same everywhere on CPUs.
DEVICE_OPTION: Mapping[str, commands.Option] = formats.option("--device", help="Where to compute.")
Device = Literal["auto", "cpu", "cuda"]
MAX_SEED = 2**63 - 1
# An H100 computed wrong values from rows of 256 values of 4 bits. The kernel reads such rows otherwise since then, and
# no GPU has run that: `make gpu-check PART=twins` does. Once it is right there, this limit can go.
_MOST_Q4_VALUES = 128
_INFINITE = float("inf")
_GENERATION = "generation_config.json"


def cpu_only(spec: "formats.ModelSpec") -> str | None:
    """Returns what a model has that the GPU's engine lacks, in words; None if a GPU runs it."""
    return next(spec.lacks("gpu"), None)


def _uncoded_on_gpu(spec: "formats.ModelSpec", kv_dtype: KvDtype | None) -> tuple[str, str] | None:
    """Returns why a GPU's kernels cannot have a model's keys and values as codes, and what to use, in words.

    None if they can.
    """
    if kv_dtype not in ("q8", "q4"):
        return None
    from moe_pack.runtime.model.attention import kinds

    for attention, _ in spec.attention_kinds:
        rows = kinds.cache_shape(attention, kv_dtype).rows
        heads = f"heads of {sum(rows[0].parts)} values"
        if any(each.row_bytes % 2 for each in rows):  # scales would not lie at whole multiples of 2 bytes
            return heads, "bf16 or f32"
        if kv_dtype == "q4" and any(sum(each.parts) > _MOST_Q4_VALUES for each in rows):
            return heads, "q8, or --device cpu"
    return None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a pack; the help of each option says what its field means."""

    device: Device = commands.option_field(
        "auto",
        "--device",
        help="Where to compute. auto is cuda if there is a GPU that can run the pack with the given options, else "
        "cpu; a line says which, and why.",
    )
    budget_bytes: int | tuple[int, ...] | None = commands.option_field(
        None,
        "--budget",
        parse=commands.read_sizes,
        metavar="SIZE",
        help="Memory for weights, key-value cache and workspace, as 11G or 800M; experts that do not fit are "
        "offloaded. On a GPU: GPU memory, with everything that the driver counts; 11G,24G divides the layers between "
        "two GPUs.  [default: the free memory]",
    )
    misses: MissesOption = commands.option_field(
        "auto",
        "--misses",
        mark=_GPU,
        help="On a GPU: what happens with the rows that a token needs and GPU memory lacks. cpu computes "
        "them on the CPU; pull copies them over the link, and gives the same bits whatever is in GPU memory; auto "
        "shares them between both by measured rates.",
    )
    ram_bytes: int | None = commands.option_field(
        None,
        "--ram",
        parse=commands.read_size,
        metavar="SIZE",
        mark=_GPU,
        help="On a GPU: host memory for experts; if the pack is larger, experts come from the disk.  "
        "[default: three quarters of the free memory]",
    )
    numerics: NumericsOption = commands.option_field(
        "auto",
        "--numerics",
        help="How inputs of products are rounded: exact, not at all; fast, to 16 bits; fastest, in prompts to 8. "
        "The last two CHANGE THE ANSWER a little. auto takes the fastest whose loss was measured for this pack and "
        "is below 0.0005 nats. On a GPU: fast computes prompts in float16, auto is exact.",
    )
    kv_dtype: KvDtype | None = commands.option_field(
        None,
        "--kv-dtype",
        help="How keys and values are stored: as float32, as bfloat16, or as codes of about 9 or 5 bits (q8, q4). "
        "All but f32 CHANGE THE ANSWER a little.  [default: f32; on a GPU bf16]",
    )
    policy: Literal["auto"] | offload.PolicyName = commands.option_field(
        "auto",
        "--policy",
        help="Which experts stay in memory and which are prefetched; on a GPU only the latter. auto evicts by the "
        "policy that has the most hits on the routes of the attached profile, and predicts by the method that is best "
        "in the profile.",
    )
    prefetches: bool = commands.option_field(
        True, "--no-prefetch", help="Read an expert only after its router has chosen it."
    )
    cutover: float | None = commands.option_field(
        None,
        "--cutover",
        least=0,
        most=1,
        metavar="SHARE",
        mark=_OFFLOAD,
        help="Read single rows of an expert if less than this share of its neurons runs.  [default: the policy's; "
        "for auto what is faster on this disk, which is measured once]",
    )
    read: ReadOption = commands.option_field(
        "auto",
        "--read",
        help="direct bypasses the system's cache; pread reads through it; auto takes direct where the file system "
        "supports it, unless moe-pack doctor found pread faster; map uses mapped files, which keep to no budget.",
    )
    verify: VerifyOption = commands.option_field(
        "lazy",
        "--verify",
        help="lazy checks each expert when it is first read; full checks every byte of the pack before the first "
        "token; off does not check offloaded experts.",
    )
    approximations: offload.Approximations = offload.EXACT
    draft: DraftOption = commands.option_field(
        "auto",
        "--draft",
        help="Drafts: tokens are proposed cheaply and verified together; the answer stays the same. "
        "ngram looks for the last tokens earlier in the text and proposes what followed them; mtp runs the "
        "prediction layer that the model ships, which takes memory; auto is ngram where native kernels compute, and "
        "off on a GPU; off runs each token alone.",
    )
    threads: int | None = commands.option_field(
        None,
        "--threads",
        "-t",
        least=1,
        most=1024,
        help="CPU threads that compute.  [default: one for each fast core that the process may use; with a GPU a CPU "
        "is left free]",
    )
    kernels: KernelsOption = commands.option_field(
        "auto",
        "--kernels",
        help="What computes on the CPU: the best native kernels for this machine (auto), those for one instruction "
        "set, or plain torch.",
    )
    is_strict: bool = commands.option_field(False, "--strict", help="Turn a fallback into an error.")
    trace: Path | None = commands.option_field(
        None,
        "--trace",
        path="file",
        metavar="FILE",
        mark=_OFFLOAD,
        help="Write what happened when, for ui.perfetto.dev.",
    )
    record: Path | None = commands.option_field(
        None,
        "--record",
        path="file",
        metavar="FILE",
        mark=_OFFLOAD,
        help="Write what the routers chose, for moe-pack replay.",
    )
    chunk_tokens: int | None = None  # the most of a forward pass; None: as many as the budget allows
    machine: MachineFacts | None = None  # as `moe-pack doctor` measured it; None if it did not

    def offload_only(self) -> list[str]:
        """Lists the given options that have a meaning for offloaded experts only."""
        return commands.given(self, mark=_OFFLOAD) + commands.given(self, mark=_APPROXIMATION)

    @property
    def gpu_budgets(self) -> tuple[int, ...]:
        """The budgets of several GPUs; empty for one budget, or none."""
        return self.budget_bytes if isinstance(self.budget_bytes, tuple) else ()

    @property
    def whole_budget(self) -> int | None:
        """The budget, of several GPUs the sum; None if none is given."""
        return sum(self.budget_bytes) if isinstance(self.budget_bytes, tuple) else self.budget_bytes

    def check_cpu(self, spec: "formats.ModelSpec") -> None:
        """Refuses options that have no effect on the CPU, or that the model cannot follow. Raises RunError."""
        if spec.encoder is not None and self.record is not None:
            raise formats.RunError("--record does not support models with an encoder; remove it")
        if spec.router.num_identity:
            approximations = self.approximations
            chosen = {"--record": self.record is not None, "--substitute": approximations.substitute is not None}
            chosen["--trust-experts"] = approximations.runs_predicted
            for name in (name for name, is_given in chosen.items() if is_given):
                raise formats.RunError(
                    f"{name} does not support models with experts that return their input; remove it"
                )
        if spec.encoder is not None and self.kv_dtype not in (None, "f32"):
            raise formats.RunError(f"--kv-dtype {self.kv_dtype} does not support models with an encoder; remove it")
        self.check_cpu_alone()

    def check_cpu_alone(self) -> None:
        """Refuses options that have no effect on the CPU, whatever the model. Raises RunError."""
        if names := commands.given(self, mark=_GPU):
            raise formats.RunError(f"{names[0]} needs --device cuda; remove it or add --device cuda")
        if self.gpu_budgets:
            raise formats.RunError(
                f"--budget gives {len(self.gpu_budgets)} budgets, and --device cpu has one memory; give one budget"
            )
        if self.read == "map" and (names := self.offload_only()):
            raise formats.RunError(f"{names[0]} needs offloaded experts; remove --read map")

    def check_gpu(self, spec: "formats.ModelSpec") -> None:
        """Refuses options that have no effect on a GPU, and models that GPUs do not run. Raises RunError."""
        if (refusal := self.gpu_refusal(spec)) is not None:
            raise formats.RunError(refusal[1])

    def gpu_refusal(self, spec: "formats.ModelSpec") -> tuple[str, str] | None:
        """Returns why options or model need the CPU, for `--device auto` and for `cuda`; None if they do not."""
        if (part := cpu_only(spec)) is not None:
            return (
                f"models with {part} do not run on GPUs",
                f"--device cuda does not support models with {part}; use --device cpu",
            )
        if (uncoded := _uncoded_on_gpu(spec, self.kv_dtype)) is not None:
            part, instead = uncoded
            return (
                f"--kv-dtype {self.kv_dtype} does not run on GPUs for models with {part}",
                f"--kv-dtype {self.kv_dtype} with --device cuda does not support models with {part}; use {instead}",
            )
        if self.numerics == "fastest":
            message = "--numerics fastest needs --device cpu; with --device cuda give fast or exact"
            return ("--numerics fastest needs it", message)
        names = [*(["--read map"] if self.read == "map" else []), *commands.given(self, mark=_OFFLOAD)]
        if names:
            return (f"{names[0]} needs it", f"{names[0]} needs --device cpu; remove one of them")
        return None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to choose tokens; the defaults are those of moe-run and moe-serve for models that say nothing."""

    temperature: float = 0.8  # 0 always takes the likeliest token
    top_p: float = 0.95  # draws from the smallest set of tokens with this probability
    top_k: int = 0  # draws from so many likeliest tokens; 0: all
    min_p: float = 0.0  # draws from tokens with at least this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # divides positive logits, multiplies negative ones, of tokens that came before
    frequency_penalty: float = 0.0  # is subtracted from the logit of a token of the answer, each time it occurred
    presence_penalty: float = 0.0  # likewise, once
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of a token and an amount that is added to its logit
    seed: int | None = None  # repeats a draw; None: every request differs


@dataclass(frozen=True, slots=True)
class AskedSampling:
    """How a user of a command asks for tokens to be chosen; None for what the model's publisher says."""

    temperature: float | None = commands.option_field(
        None,
        "--temperature",
        help="0 always takes the likeliest token.  [default, as for the next four: the model's "
        "generation_config.json, else 0.8]",
    )
    top_p: float | None = commands.option_field(
        None, "--top-p", help="Draw from the smallest set of tokens that has this probability.  [default: else 0.95]"
    )
    top_k: int | None = commands.option_field(
        None, "--top-k", metavar="N", help="Draw from the N likeliest tokens.  [default: else 0, all of them]"
    )
    min_p: float | None = commands.option_field(
        None,
        "--min-p",
        help="Draw from tokens that have at least this share of the likeliest one's probability.  [default: else 0]",
    )
    repetition_penalty: float | None = commands.option_field(
        None,
        "--repetition-penalty",
        help="Divide the positive logits of tokens that came before, and multiply the negative ones, by this.  "
        "[default: else 1, which changes nothing]",
    )

    def over(self, usual: SamplingOptions) -> SamplingOptions:
        """Returns the options, with the usual ones where the user says nothing.

        Raises:  RunError that names the first option that is out of range.
        """
        asked = {each.name: getattr(self, each.name) for each in fields(AskedSampling)}
        found = replace(usual, **{name: value for name, value in asked.items() if value is not None})
        check_sampling(found, shown=lambda name: f"--{name.replace('_', '-')}")
        return found


def usual_sampling(files: "TextFiles") -> SamplingOptions:
    """Returns how tokens are chosen where nobody says it: as generation_config.json does, else by the defaults.

    Raises:  PackError, or CheckpointError for a folder, if the file is no JSON, or a value is out of range.
    """
    from moe_pack.formats.families.text_files import error_of, read_values

    found, usual = read_values(files, _GENERATION), SamplingOptions()

    def number(name: str) -> float:
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return float(getattr(usual, name))

    chosen = SamplingOptions(
        temperature=0.0 if found.get("do_sample") is False else number("temperature"),
        top_p=number("top_p"),
        top_k=max(int(number("top_k")), 0),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )
    try:
        check_sampling(chosen)
    except formats.RunError as fault:
        raise error_of(files)(f"{_GENERATION}: {fault}") from fault
    return chosen


def check_sampling(options: SamplingOptions, shown: Callable[[str], str] = str) -> None:
    """Refuses values out of range.

    Args:    shown: returns a field's name as the user knows it.
    Raises:  RunError that names the first wrong field.
    """
    rules = (
        ("temperature", options.temperature, 0 <= options.temperature < _INFINITE, "a number from 0 up"),
        ("top_p", options.top_p, 0 < options.top_p <= 1, "more than 0 and at most 1"),
        ("top_k", options.top_k, options.top_k >= 0, "a whole number from 0 up"),
        ("min_p", options.min_p, 0 <= options.min_p <= 1, "a number from 0 to 1"),
        (
            "repetition_penalty",
            repetition := options.repetition_penalty,
            0 < repetition < _INFINITE,
            "a number above 0",
        ),
        ("frequency_penalty", options.frequency_penalty, abs(options.frequency_penalty) <= 2, "a number from -2 to 2"),
        ("presence_penalty", options.presence_penalty, abs(options.presence_penalty) <= 2, "a number from -2 to 2"),
        ("seed", options.seed, options.seed is None or 0 <= options.seed <= MAX_SEED, "a whole number from 0 up"),
    )
    for name, value, is_right, expected in rules:
        if not is_right:
            raise formats.RunError(f"{shown(name)}: found {value}, expected {expected}")
    for token, bias in options.logit_bias:
        if token < 0 or not bias < _INFINITE:
            raise formats.RunError(
                f"{shown('logit_bias')}: found {bias} for token {token}, expected a number for a token from 0 up"
            )
