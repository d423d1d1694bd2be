"""Times profiling: the statistics stage against a plain forward pass of transformers, and how well time is foretold.

The statistics stage runs and counts what a profile says of a model; transformers runs the same tokens in batches of 8
sequences, attention `sdpa`, experts as it runs them by default, in float32; beside that in float32 without its head,
which the stage does not need, and in bfloat16. On the tiny model, and on one layer of random weights in Mixtral-8x7B's
dimensions. Interleaved, medians. Ours streams its weights from files that lie in the page cache; transformers has them
in memory before the clock starts. Then the sensitivity stage on the tiny model: the
seconds announced against those it takes. Ends with exit code 1 if our speed is below 0.8 of transformers' in float32,
or an announcement is off by more than a factor of 1.5.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
import torch
from generate_checkpoint import Shape, generate
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from moe_pack.calib import ProfileOptions, Sensitivity, Tokens, make_profile, read_tokens
from moe_pack.formats import Checkpoint, Stage
from moe_pack.runtime import FolderFiles, Text

_TINY = Path(__file__).parents[1] / "tests" / "models" / "tiny-mixtral"
_MIXTRAL_8X7B = Shape()
_SEQUENCE_LENGTH = 512
_LEAST_TOKENS = 2 * _SEQUENCE_LENGTH  # of one sequence nothing is held out, and no predictor is learned
_BATCH = 8
_LEAST_RATIO, _MOST_OFF = 0.8, 1.5
_LEVELS: tuple[Sensitivity, ...] = ("fast", "full")


class _EnoughError(Exception):
    """Ends a profile after the stages that are timed."""


class _Stopwatch:
    """Progress that times stages and keeps what they announce; it ends the run before the predictors."""

    def __init__(self) -> None:
        self.taken: dict[str, tuple[float, Stage]] = {}
        self._begun: tuple[float, Stage] | None = None

    def begin(self, stage: Stage) -> None:
        """A stage begins."""
        self._begun = time.perf_counter(), stage
        if stage.name == "predictors":
            raise _EnoughError

    def advance(self, amount: int, what: str = "") -> None:
        """More of the stage is done."""

    def end(self) -> None:
        """The stage is done."""
        assert self._begun is not None, "it has begun"
        began, stage = self._begun
        self.taken[stage.name] = time.perf_counter() - began, stage

    def say(self, line: str) -> None:
        """A line is nothing to time."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians of seconds, for the same tokens; `ratio` is float32's, head included, over ours."""

    model: str
    num_tokens: int
    rounds: int
    our_seconds: float
    float32_seconds: float
    headless_seconds: float
    bfloat16_seconds: float
    our_tokens_a_second: float
    ratio: float
    experts: str | None

    def fault(self) -> str | None:
        """What is wrong, or None."""
        if not self.ratio >= _LEAST_RATIO:
            return f"{self.model}: statistics at {self.ratio:.2f} of transformers' speed, at least {_LEAST_RATIO} asked"
        return None


@dataclass(frozen=True, slots=True)
class Foretold:
    """Seconds of the sensitivity stage; `ratio` is taken over announced."""

    level: Sensitivity
    announced_seconds: float
    taken_seconds: float
    ratio: float

    def fault(self) -> str | None:
        """What is wrong, or None."""
        if not 1 / _MOST_OFF <= self.ratio <= _MOST_OFF:
            return f"sensitivity {self.level}: {self.ratio:.2f} times the seconds announced, at most {_MOST_OFF} off"
        return None


def timed_profile(folder: Path, tokens: Tokens, sensitivity: Sensitivity) -> _Stopwatch:
    """Profiles up to the predictors, which a model of one layer has not, into a folder that is removed."""
    watch, checkpoint = _Stopwatch(), Checkpoint(folder)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as out:
            make_profile(checkpoint, tokens, Path(out) / "profile", ProfileOptions(sensitivity), watch)
    except _EnoughError:
        pass
    finally:
        checkpoint.close()
    return watch


def _loaded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    assert isinstance(model, PreTrainedModel), "AutoModelForCausalLM makes models"
    return model


@torch.inference_mode()
def _forward(model: PreTrainedModel, ids: Tensor) -> None:
    for batch in torch.split(ids, _BATCH):
        model(input_ids=batch, use_cache=False)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(name: str, folder: Path, tokens: Tokens, rounds: int) -> Speed:
    """Times all in turn, `rounds` times, after one sequence through each."""
    ids = torch.from_numpy(tokens.sequences).long()
    whole, rough = _loaded(folder, torch.float32), _loaded(folder, torch.bfloat16)
    headless = whole.base_model
    assert isinstance(headless, PreTrainedModel), "a model without its head is one too"
    models = [whole, headless, rough]
    for model in models:
        _forward(model, ids[:1])  # ours is warmed up by the trial of its costs
    ours: list[float] = []
    theirs: list[list[float]] = [[] for _ in models]
    for _ in tqdm(range(rounds), desc=name, disable=None):
        ours.append(timed_profile(folder, tokens, "none").taken["statistics"][0])
        for model, seconds in zip(models, theirs, strict=True):
            seconds.append(_seconds(lambda model=model: _forward(model, ids)))  # type: ignore[misc]  # mypy: defaults
    own, (float32, no_head, bfloat16) = median(ours), map(median, theirs)
    experts: str | None = getattr(whole.config, "_experts_implementation", None)
    return Speed(
        name,
        ids.numel(),
        rounds,
        own,
        float32,
        no_head,
        bfloat16,
        our_tokens_a_second=ids.numel() / own,
        ratio=float32 / own,
        experts=experts,
    )


def compare_large(shape: Shape, tokens: Tokens, rounds: int) -> Speed | None:
    """One layer of large dimensions, generated; None, with a word, where memory is short."""
    needed, available = 5 * shape.num_bytes(), _available_bytes()  # 2.5 times float32's, while transformers loads it
    if available < needed:
        click.echo(f"skipped the large layer: {available:,} bytes of memory available, {needed:,} needed", err=True)
        return None
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        generate(Path(folder), shape)
        return compare(f"{shape.layers} x {shape.hidden} x {shape.intermediate}", Path(folder), tokens, rounds)


def _available_bytes() -> int:
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) * 1024


def foretell(folder: Path, tokens: Tokens, level: Sensitivity) -> Foretold:
    """Runs the sensitivity stage once."""
    seconds, stage = timed_profile(folder, tokens, level).taken["sensitivity"]
    return Foretold(level, stage.seconds, seconds, seconds / stage.seconds)


def _report(speeds: list[Speed], foretold: list[Foretold]) -> str:
    lines = [
        "statistics             tokens   ours s   tokens/s   float32 s   no head s  bfloat16 s   float32/ours  experts"
    ]
    lines += [
        f"{s.model:18}{s.num_tokens:11,}{s.our_seconds:9.2f}{s.our_tokens_a_second:11,.0f}{s.float32_seconds:12.2f}"
        f"{s.headless_seconds:12.2f}{s.bfloat16_seconds:13.2f}{s.ratio:15.2f}   {s.experts}"
        for s in speeds
    ]
    if foretold:
        lines.append("\nsensitivity   announced s   taken s   taken/announced")
    lines += [f"{f.level:11}{f.announced_seconds:14.1f}{f.taken_seconds:10.1f}{f.ratio:18.2f}" for f in foretold]
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option(
    "--tokens", default=16384, show_default=True, type=click.IntRange(_LEAST_TOKENS), help="Through the tiny model."
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Of the tiny model.")
@click.option("--large-tokens", default=2048, show_default=True, help="Through the large layer; 0 leaves it out.")
@click.option("--large-rounds", default=3, show_default=True, type=click.IntRange(1), help="Of the large layer.")
@click.option("--hidden", default=_MIXTRAL_8X7B.hidden, show_default=True, help="Hidden size of the large layer.")
@click.option("--intermediate", default=_MIXTRAL_8X7B.intermediate, show_default=True, help="Neurons of it.")
@click.option("--levels", default=",".join(_LEVELS), show_default=True, help="Of sensitivity; none leaves it out.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    tokens: int,
    rounds: int,
    large_tokens: int,
    large_rounds: int,
    hidden: int,
    intermediate: int,
    levels: str,
    as_json: bool,
) -> None:
    """Times, prints, and judges."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it bare
    set_verbosity_error()  # type: ignore[no-untyped-call]  # it warns of what does not matter here
    if 0 < large_tokens < _LEAST_TOKENS:
        raise click.BadParameter(f"{large_tokens}, expected 0 or at least {_LEAST_TOKENS}", param_hint="--large-tokens")
    tokenizer = Text(FolderFiles(_TINY))
    sample = read_tokens(None, None, tokenizer, tokens, _SEQUENCE_LENGTH)
    speeds = [compare("tiny-mixtral", _TINY, sample, rounds)]
    if large_tokens:
        shape = Shape(layers=1, hidden=hidden, intermediate=intermediate)
        fewer = read_tokens(None, None, tokenizer, large_tokens, _SEQUENCE_LENGTH)
        large = compare_large(shape, fewer, large_rounds)
        speeds += [large] if large else []
    foretold = [foretell(_TINY, sample, level) for level in _LEVELS if level in levels.split(",")]
    faults = [fault for fault in (*(s.fault() for s in speeds), *(f.fault() for f in foretold)) if fault]
    facts = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    if as_json:
        figures = {"speeds": [asdict(speed) for speed in speeds], "foretold": [asdict(one) for one in foretold]}
        click.echo(json.dumps(facts | figures | {"faults": faults}))
    else:
        click.echo(f"{facts['threads']} threads, torch {facts['torch']}")
        click.echo(_report(speeds, foretold))
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
