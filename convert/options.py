"""The options of this folder's results, from which the command line is derived, and names that others compute with."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moe_pack import formats, runtime
from moe_pack.calib.profile import ProfileOptions
from moe_pack.calib.quantize import options
from moe_pack.convert.plan import Target
from moe_pack.formats import hub
from moe_pack.formats.base import commands
from moe_pack.formats.base.limits import num_cpus
from moe_pack.formats.pack import plans
from moe_pack.formats.parts.specs import with_repeats

if TYPE_CHECKING:
    import torch

    from moe_pack.calib.forward import Tokens

Bits = float | None | str  # bits of a weight; None: the default; "source": the format of the checkpoint
SOURCE = "source"
MEMORY_BYTES = 1 << 30  # by default, for all items that are worked on at once
CALIBRATION_TOKENS = 16384  # of a profile and of thresholds, by default
SEQUENCE_LENGTH = 512  # tokens of a sequence, by default

Dtype = Literal["bf16", "f16", "f32"]
GgufType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"]

WORKERS_OPTION = formats.option(
    "--workers",
    least=1,
    most=256,
    help="Number of experts worked on at once, one thread each.  [default: all CPUs that the process may use]",
)
FIELD_OPTION = formats.option(
    "--field F",
    help="The field of JSONL, Parquet or a data set that contains the text or the messages of a conversation.  "
    "[default: text, messages or conversations]",
)


@dataclass(frozen=True, slots=True)
class PartOptions:
    """How several machines share the work. At most one of `part` and `ray` is given."""

    part: commands.Part | None = commands.option_field(
        None,
        "--part I/N",
        parse=commands.Part.of,
        help="Make part I of N; run the same command with each I, on as many machines, over an output folder that "
        "all of them see. A part that is done makes what others have left, so any part may be killed, and the "
        "result has the bytes of one process. The same command without --part continues too.",
    )
    ray: str | None = commands.option_field(
        None,
        "--ray ADDRESS",
        help="Let a Ray cluster make the parts, over an output folder that all its machines see: auto is the "
        "cluster that runs on this machine, HOST:PORT that of a head node, local a new one of this machine.",
    )
    num_parts: int | None = commands.option_field(
        None,
        "--parts N",
        least=1,
        help="With --ray: number of parts.  [default: as many as the cluster has room for, by CPUs and memory]",
    )

    def check(self) -> None:
        """Raises UsageError for options that do not go together."""
        if self.ray is not None and self.part is not None:
            raise formats.UsageError(
                "--ray makes all parts; remove --part, or remove --ray and start each part yourself"
            )
        if self.num_parts is not None and self.ray is None:
            raise formats.UsageError("--parts needs --ray; add it, or start each part yourself with --part I/N")
        if self.ray is not None and "://" in self.ray:
            raise formats.UsageError(
                f"--ray {self.ray}: the command must run on a machine of the cluster; give auto or HOST:PORT there"
            )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Whether a source on the hub is read without downloading it whole, and how much of it the disk may have."""

    is_given: bool = commands.option_field(
        False,
        "--stream",
        help="Read a source on the hub without downloading it whole: pieces are fetched when they are needed, and "
        "removed for others.",
    )
    space_bytes: int | None = commands.option_field(
        None,
        "--stream-space SIZE",
        parse=commands.read_size,
        help="With --stream: disk space for pieces of the source, where the output is. With less, more pieces are "
        f"fetched twice.  [default: {hub.STREAM_BYTES >> 30}G]",
    )

    def check(self) -> None:
        """Raises UsageError for options that do not go together."""
        if self.space_bytes is not None and not self.is_given:
            raise formats.UsageError("--stream-space needs --stream; add it or remove --stream-space")
        if self.space_bytes is not None and self.space_bytes < hub.LEAST_STREAM_BYTES:
            raise formats.UsageError(f"--stream-space: give at least {formats.size_text(hub.LEAST_STREAM_BYTES)}")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The calibration text."""

    data: str | None = commands.option_field(
        None,
        "--data NAME_OR_FILE",
        help="A text, JSONL or Parquet file, or the name of a data set (NAME:CONFIG:SPLIT), of text or of "
        "conversations (lists of messages), which the model's chat template writes.  [default: our sample]",
    )
    field_name: str | None = field(default=None, metadata=FIELD_OPTION)
    num_tokens: int = commands.option_field(
        CALIBRATION_TOKENS,
        "--tokens N",
        least=256,
        help="Number of tokens. The last fifth is held out: it checks what was measured on the others.",
    )
    sequence_length: int = commands.option_field(
        SEQUENCE_LENGTH,
        "--sequence-length N",
        least=16,
        help="Tokens of a sequence; each sequence begins with an empty context.",
    )

    def tokens(self, text: "runtime.Text") -> "Tokens":
        """Reads the text; raises what `read_tokens` raises."""
        from moe_pack.calib.forward import read_tokens

        return read_tokens(self.data, self.field_name, text, self.num_tokens, self.sequence_length)


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """Everything that is asked of a profile: the options of `profile`."""

    source: str = ""  # as in `PackOrder`
    text: TextOptions = field(default_factory=TextOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    stream: StreamOptions = field(default_factory=StreamOptions)
    output: Path = commands.option_field(Path("profile"), "--output", "-o", help="The profile's folder.")
    many: PartOptions = field(default_factory=PartOptions)
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=runtime.DEVICE_OPTION)
    imatrix: Path | None = commands.option_field(
        None,
        "--imatrix FILE",
        path="file",
        help="Make the profile from an importance file of llama.cpp (llama-imatrix), in place of text. It says "
        "how often each expert was chosen and how large its inputs were; convert calibrates with it. It does not "
        "say what bits cost, nor which neurons run.",
    )

    def check(self) -> None:
        """Raises UsageError for options that do not go together."""
        if self.many.ray is not None and self.device == "cuda":
            raise formats.UsageError(
                "--ray makes profiles on CPUs; remove --device cuda, or start each part with --part I/N"
            )
        if self.many.ray is not None and self.stream.is_given:
            raise formats.UsageError("--stream does not go with --ray; start each part with --part I/N and --stream")
        if self.imatrix is not None and (names := commands.given(replace(self, output=Path("profile"), imatrix=None))):
            raise formats.UsageError(f"--imatrix takes all figures from the file; remove {', '.join(names)}")


PlanCodec = Literal["auto", "affine", "trellis"]
_EXPERT_BITS_CHOICE = ("1", "2", "2.5", "3", "3.5", "4", "8", "16", SOURCE)
_TRELLIS_BITS = tuple(width / 2 for width in plans.TRELLIS_WIDTHS)
_AFFINE_GROUP = 64  # by default; a trellis has one scale a row
_EXPERT_BITS = 4  # by default, of experts that the checkpoint does not have in codes
_DENSE_BITS = 8  # by default: the loss is small next to that of the experts (docs/benchmarks/quality.md)
_DEFAULT_BITS = f"source for FP8 and MXFP4, else {_EXPERT_BITS}"


def _bits(text: str) -> Bits:
    return text if text == SOURCE else float(text)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How all experts and all dense matrices are stored. None: the default, which may depend on the checkpoint."""

    selector: formats.Selector | None = commands.option_field(
        None,
        "--selector",
        help="The matrix whose activations decide which neurons run. It is stored apart from the records, so that "
        "it can be read whole.  [default: up]",
    )
    selector_bits: Bits = commands.option_field(
        None,
        "--selector-bits",
        choices=_EXPERT_BITS_CHOICE,
        parse=_bits,
        help="Bits of a weight of the selector. source keeps what the checkpoint has, without loss.  "
        f"[default: {_DEFAULT_BITS}]",
    )
    record_bits: Bits = commands.option_field(
        None,
        "--record-bits",
        choices=_EXPERT_BITS_CHOICE,
        parse=_bits,
        help="Bits of a weight of the records. source keeps what the checkpoint has, without loss. FP8 and MXFP4 "
        f"codes are also kept if these bits are not below theirs.  [default: {_DEFAULT_BITS}]",
    )
    codec: PlanCodec = commands.option_field(
        "auto",
        "--codec",
        help="The codec of expert weights of 4 bits and less. affine has equal steps. In trellis a value also "
        "depends on the codes before it; it loses least for its bytes, and only trellis has 2.5 and 3.5 bits. "
        "auto is trellis if the quantizer is calibrated, and for half bits.",
    )
    group: int | None = commands.option_field(
        None,
        "--group-size",
        choices=("16", "32", "64", "128", "row"),
        parse=lambda text: formats.ROW_GROUP if text == "row" else int(text),
        help="Number of weights that share a scale (in affine also a zero); row is the whole row.  [default: row "
        f"for a trellis, {_AFFINE_GROUP} for affine]",
    )
    scale_bits: int = commands.option_field(
        16,
        "--scale-bits",
        choices=("8", "16"),
        parse=int,
        help="Width of scales and zeros; 8 saves bytes if groups are small.",
    )
    dense_bits: Bits = commands.option_field(
        None,
        "--dense-bits",
        choices=("1", "2", "3", "4", "8", "16", SOURCE),
        parse=_bits,
        help="Bits of a weight of attention, embedding, head, shared experts and dense layers. source and 16 keep "
        "the checkpoint's bytes. Norms, biases and routers always keep theirs.  "
        f"[default: {_DENSE_BITS}; source if all bits of experts are 16 or source]",
    )

    @property
    def dense(self) -> float | str:
        """The bits of dense matrices: the option's, or the default."""
        if self.dense_bits is not None:
            return self.dense_bits
        experts = (self.record_bits,) if self.selector == "none" else (self.selector_bits, self.record_bits)
        return SOURCE if all(bits in (16, SOURCE) for bits in experts) else _DENSE_BITS

    def plan(self, spec: formats.ModelSpec, quantizer: formats.Quantizer) -> formats.Plan:
        """Returns the plan for a model without a checkpoint.

        Raises:  PlanError if these formats cannot represent its rows, or an option says `source`.
        """
        bits = {"selector": self.selector_bits, "record": self.record_bits, "dense": self.dense_bits}
        for name, width in bits.items():
            if width == SOURCE:
                raise formats.PlanError(
                    f"--{name}-bits source: no checkpoint is given whose weights can be kept; give a width"
                )
        return self.planned(spec, quantizer)

    def planned(
        self, spec: formats.ModelSpec, quantizer: formats.Quantizer, repeats: int | None = 0, usual: int = 0
    ) -> formats.Plan:
        """Returns the plan before codes of a checkpoint are kept.

        Args:    repeats: neurons of each expert with two rows; None: `usual` where codes are calibrated.
        Raises:  PlanError if these formats cannot represent the model's rows.
        """
        from moe_pack.calib.quantize import needs_inputs

        selector, record = (
            self._part(flag, _width(bits, _EXPERT_BITS), quantizer)
            for flag, bits in (("--selector-bits", self.selector_bits), ("--record-bits", self.record_bits))
        )
        width = _width(self.dense, 16)
        dense = None if width == 16 else self._affine(width)
        is_calibrated = quantizer == "calibrated" and needs_inputs(record)
        if repeats is None:
            repeats = usual * is_calibrated
        if repeats and not is_calibrated:
            raise formats.PlanError(
                f"--repeats {repeats}: only calibrated codes of less than 8 bits repeat neurons; give a profile and "
                "such --record-bits, or remove --repeats"
            )
        if repeats > spec.expert.source_size:
            raise formats.PlanError(f"--repeats {repeats}: an expert has {spec.expert.source_size} neurons; give fewer")
        return formats.uniform_plan(
            with_repeats(spec, repeats), self.selector or "up", selector, record, dense, quantizer
        )

    def _part(self, flag: str, bits: float, quantizer: formats.Quantizer) -> formats.PartFormat:
        fits = bits in _TRELLIS_BITS
        if self.codec == "trellis" and not fits and bits != 16:
            raise formats.PlanError(f"{flag} {bits:g}: a trellis has 2 to 4 bits a weight; use --codec affine")
        if self.codec == "affine" and bits % 1:
            raise formats.PlanError(f"{flag} {bits:g}: affine has whole bits only; use --codec trellis")
        if fits and (self.codec == "trellis" or (self.codec == "auto" and (quantizer == "calibrated" or bits % 1))):
            return formats.trellis_format(
                int(2 * bits), formats.ROW_GROUP if self.group is None else self.group, self.scale_bits
            )
        return self._affine(bits)

    def _affine(self, bits: float) -> formats.PartFormat:
        return formats.part_format(int(bits), _AFFINE_GROUP if self.group is None else self.group, self.scale_bits)


def _width(bits: Bits, default: int) -> float:
    """Returns the bits a weight before `keep_source`: the option's or the default; 16 where the source is kept."""
    if bits == SOURCE:
        return 16
    return bits if isinstance(bits, float | int) else default


AnyQuantizer = formats.Quantizer | Literal["auto"]
_QUANTIZERS: tuple[AnyQuantizer, ...] = (
    "auto",
    "calibrated",
    *(name for name in plans.QUANTIZERS if name != "calibrated"),
)
_TARGET_EVAL_TOKENS = 16384  # by default: more than for `eval`, because the interval counts against the limit


@dataclass(frozen=True, slots=True)
class PackOrder:
    """Everything that is asked of a pack: the options of `convert`."""

    source: str = ""  # the checkpoint: a path, a hub id, or a short name
    output: Path = commands.option_field(Path("packed"), "--output", "-o", help="The pack's folder, new or empty.")
    target: Target | None = None  # None: the pack that `plan_file` or else `plan` describes
    machine: runtime.MachineFacts | None = None  # measured by `doctor`; None: assumed
    eval_data: str | None = commands.option_field(
        None,
        "--eval-data NAME_OR_FILE",
        mark="target",
        help="With --target-vram or --preset: the text on which the loss is measured, as for eval.  [default: the "
        "end of our sample]",
    )
    eval_tokens: int = commands.option_field(
        _TARGET_EVAL_TOKENS,
        "--eval-tokens N",
        least=256,
        mark="target",
        help="Number of tokens of it. More tokens make the interval of the loss narrower, which leaves more of the "
        "limit for the plan.",
    )
    plan: PlanOptions = field(default_factory=PlanOptions)
    plan_file: Path | None = commands.option_field(
        None,
        "--plan FILE",
        path="file",
        mark="plan",
        help="A plan (moe-pack plan -o): the formats and the sparsity of each expert. In place of "
        "--selector to --dense-bits, --quantizer, --repeats and --sparsity.",
    )
    quantizer: AnyQuantizer = commands.option_field(
        "auto",
        "--quantizer",
        choices=_QUANTIZERS,
        mark="plan",
        help="How codes are found. calibrated uses the experts' inputs on the profile's text and loses least. hqq "
        "uses the weights only and loses least without a profile. nearest and absmax are simple and fast. auto is "
        "calibrated with a profile that has inputs, else hqq.",
    )
    repeats: int | None = commands.option_field(
        None,
        "--repeats N",
        least=0,
        mark="plan",
        help="Number of neurons of each expert whose row of down is stored a second time, for what the first one "
        "lost: a few neurons decide much of an expert's output. Needs calibrated codes.  [default: 1 of 128]",
    )
    rotate: options.RotateChoice = field(default="auto", metadata=options.ROTATE_CHOICE_OPTION)
    sequential: bool = commands.option_field(
        True,
        "--sequential/--no-sequential",
        help="With calibrated: quantize each layer for the inputs that the stored layers before it give, and make "
        "up for a part of their errors. --no-sequential takes the source's inputs: the conversion is a little "
        "faster, repeated attempts of --target-vram much, and the pack loses more.",
    )
    profile: Path | None = field(  # None: for a target, one is made next to the output
        default=None,
        metadata=formats.option(
            "--profile DIR",
            help="A profile of this model (moe-pack profile). Experts are calibrated with its inputs; neurons "
            "are sorted by how often they run at --sparsity, most often first; its routing data is added to the pack "
            "(as moe-pack attach does).",
        ),
    )
    sparsity: float | None = commands.option_field(
        None,
        "--sparsity S",
        mark="plan",
        help="Share of an expert's neurons that do not run, such as 0.8. Thresholds are measured on the finished "
        "pack, on the profile's text or else on our sample.  [default: all run]",
    )
    many: PartOptions = field(default_factory=PartOptions)
    stream: StreamOptions = field(default_factory=StreamOptions)
    workers: int = field(default=num_cpus(), metadata=WORKERS_OPTION)
    memory_bytes: int = commands.option_field(
        MEMORY_BYTES,
        "--memory SIZE",
        parse=commands.read_size,
        default_text=f"{MEMORY_BYTES >> 30}G",
        help="Memory for all experts that are worked on at once. An expert that is calibrated takes some hundred "
        "MiB: with many cores, more memory makes it faster.",
    )

    def check(self) -> None:
        """Raises UsageError for options that do not go together."""
        if self.rotate == "on" and SOURCE in (self.plan.selector_bits, self.plan.record_bits):
            raise formats.UsageError(
                "--rotate on rounds the experts' weights, which source would keep; give a width such as 16, or remove "
                "--rotate"
            )
        if self.many.ray is not None and self.stream.is_given:
            raise formats.UsageError("--stream does not go with --ray; start each part with --part I/N and --stream")
        if self.target is not None:
            self._check_with(self.target)
        elif wrong := commands.given(self, "target"):
            raise formats.UsageError(
                f"{wrong[0]} needs --target-vram or --preset; add one of them, or remove {wrong[0]} and measure the "
                "pack with moe-pack eval"
            )
        elif self.plan_file is not None:
            if others := commands.given(self.plan) + commands.given(replace(self, plan_file=None), "plan"):
                raise formats.UsageError(f"--plan decides all formats and sparsities; remove {', '.join(others)}")
        else:
            self._check_plan()

    def _check_with(self, target: Target) -> None:
        """Refuses what the target's plan decides, and work in parts: the source is read again for each attempt.

        A selector is free, of a preset a sparsity.
        """
        name = "--target-vram" if target.preset is None else f"--preset {target.preset}"
        if self.stream.is_given:
            raise formats.UsageError(
                f"--stream: {name} reads the source many times; make the plan first (moe-pack profile --stream, "
                "moe-pack plan), then convert with --plan and --stream"
            )
        if many := commands.given(self.many):
            raise formats.UsageError(
                f"{many[0]} does not go with {name}; make the profile, then a plan (moe-pack plan --target-vram), "
                f"then give both to convert with {many[0]}"
            )
        if target.purpose == "vllm" and self.rotate == "on":
            raise formats.UsageError(
                "--rotate on does not go with --for vllm, which runs no rotated layers; remove one of the two"
            )
        plan = replace(self.plan, selector=None) if target.preset is None else self.plan
        decided = replace(self, sparsity=None) if target.preset == "floe" else self
        if names := commands.given(plan) + commands.given(decided, "plan"):
            raise formats.UsageError(f"{name} makes a plan, which decides this; remove {', '.join(names)}")

    def _check_plan(self) -> None:
        from moe_pack.calib.evaluate import ThresholdRule

        if self.sparsity is not None and (fault := ThresholdRule(sparsity=self.sparsity).fault()):
            raise formats.UsageError(fault)
        if self.profile is None and self.quantizer == "calibrated":
            raise formats.UsageError(
                "--quantizer calibrated needs the experts' inputs; give a profile that has them with --profile"
            )
        if self.profile is not None and self.sparsity is None and self.quantizer not in ("auto", "calibrated"):
            raise formats.UsageError(
                f"--profile: {self.quantizer} does not use a profile, and neurons are sorted only for a sparsity; give "
                "--sparsity, or remove --quantizer"
            )


@dataclass(frozen=True, slots=True)
class PlanOrder:
    """Everything that is asked of a plan: the options of `plan`."""

    source: str = ""  # a checkpoint, as in `PackOrder`; or a config.json, or the name of a published model
    machine: runtime.MachineFacts | None = None  # measured by `doctor`; None: assumed
    profile: Path | None = commands.option_field(
        None,
        "--profile DIR",
        help="A profile of this model (moe-pack profile). Without one, losses are assumed and routes are drawn evenly.",
    )
    target: Target | None = None
    selector: formats.Selector | None = commands.option_field(
        None, "--selector", help="The only selector kind to choose.  [default: the fastest]"
    )
    sparsity: float | None = commands.option_field(
        None, "--sparsity S", help="With --preset floe: the share of neurons that do not run."
    )
    output: Path | None = commands.option_field(
        None,
        "--output",
        "-o FILE",
        path="file",
        help="Write the first plan to FILE, for moe-pack convert --plan.",
    )
    as_json: bool = commands.option_field(False, "--json", help="Print the plans as JSON.")

    def check(self) -> None:
        """Raises UsageError for options that do not go together."""
        if self.target is None or self.target.budget_bytes is None:
            raise formats.UsageError("--target-vram is missing; give the memory to plan for, such as --target-vram 11G")
        if self.sparsity is not None and self.target.preset != "floe":
            raise formats.UsageError("--sparsity needs --preset floe, because other plans decide it; remove --sparsity")
        if self.selector is not None and self.target.preset is not None:
            raise formats.UsageError(f"--selector: preset {self.target.preset} decides it; remove --selector")


def chosen_device(name: str) -> "torch.device":
    """Returns the device of this name; raises PlanError if it is `cuda` and torch finds no GPU."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise formats.PlanError("--device cuda: torch finds no GPU on this machine; use --device cpu")
    return torch.device(name)


def _percentage(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.endswith("%") or not 0 <= share < float("inf"):
        raise ValueError(f"found {text!r}, expected a percentage such as 1% or 0.5%")
    return share


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Limits of a pack's loss, bytes and memory; None: no limit. `max_ppl_increase` is relative, 0.01 for 1%."""

    max_kl: float | None = commands.option_field(
        None, "--max-kl X", least=0, help="Largest KL divergence from the source, in nats a token."
    )
    max_ppl_increase: float | None = commands.option_field(
        None,
        "--max-ppl-increase P%",
        parse=_percentage,
        help="Largest growth of perplexity over the source's, such as 1%.",
    )
    max_bytes: int | None = commands.option_field(
        None, "--max-bytes B", parse=commands.read_size, help="Largest size of the pack, such as 26G."
    )
    budget_bytes: int | None = commands.option_field(
        None,
        "--budget SIZE",
        parse=commands.read_size,
        help="Memory in which moe-run must be able to run the pack, such as 11G.",
    )

    @property
    def of_loss(self) -> bool:
        """Returns whether one of the limits is of loss."""
        return self.max_kl is not None or self.max_ppl_increase is not None
