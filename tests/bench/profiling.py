"""How fast profiling is against a plain forward pass of transformers, and how well its time is announced.

    python tests/bench/profiling.py

The statistics stage runs and counts what a profile says of a model; transformers runs the same tokens in batches of 8
sequences, attention `sdpa`, experts as it runs them by default, in float32; also in float32 without its head, which the
stage does not need, and in bfloat16. On the demo model, and on one layer of random weights in Mixtral-8x7B's
dimensions. Interleaved, medians. Ours streams its weights from files that lie in the page cache; transformers has them
in memory before the clock starts. Then the sensitivity stage on the demo model: the seconds announced against those it
takes, and those of the statistics stage. Exits with 1 if our speed is below 0.8 of transformers' in float32, an
announcement is off by more than a factor of 1.5, or `fast` takes more than twice as long as the statistics.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
import torch
from benchlib import DEMO_MODEL, SEQUENCE_LENGTH, finish, json_option, table
from benchlib.checkpoints import Shape, generate
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from moe_pack.calib.forward import Tokens, read_tokens
from moe_pack.calib.profile import ProfileOptions, make_profile
from moe_pack.calib.profile.options import Sensitivity
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text, available_bytes

_LEAST_TOKENS = 2 * SEQUENCE_LENGTH  # of one sequence nothing is held out, and no predictor is learned
_BATCH = 8
_LEAST_RATIO, _MOST_OFF, _MOST_OF_STATISTICS = 0.8, 1.5, 2.0


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

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
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
    """Medians of seconds for the same tokens; `ratio` is that of float32, head included, over ours."""

    model: str
    num_tokens: int
    our_s: float
    float32_s: float
    headless_s: float
    bfloat16_s: float
    ratio: float


def timed_profile(folder: Path, tokens: Tokens, sensitivity: Sensitivity) -> dict[str, tuple[float, Stage]]:
    """Returns the seconds and the announced cost of each stage of a profile, up to the predictors."""
    watch, checkpoint = _Stopwatch(), Checkpoint(folder)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as out:
            make_profile(checkpoint, tokens, Path(out) / "profile", ProfileOptions(sensitivity), watch)
    except _EnoughError:
        pass
    finally:
        checkpoint.close()
    return watch.taken


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
        ours.append(timed_profile(folder, tokens, "none")["statistics"][0])
        for model, seconds in zip(models, theirs, strict=True):
            seconds.append(_seconds(lambda model=model: _forward(model, ids)))  # type: ignore[misc]  # mypy: defaults
    own, (float32, no_head, bfloat16) = median(ours), map(median, theirs)
    return Speed(name, ids.numel(), own, float32, no_head, bfloat16, float32 / own)


def compare_large(tokens: Tokens, rounds: int) -> list[Speed]:
    """Times one layer of Mixtral-8x7B's dimensions; returns nothing, with a message, where memory is short."""
    shape, available = Shape("mixtral-8x7b", 1), available_bytes() or 0
    needed = 5 * shape.num_bytes()  # 2.5 times float32's, while transformers loads it
    if available < needed:
        click.echo(f"skipped the large layer: {available:,} bytes of memory available, {needed:,} needed", err=True)
        return []
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        generate(Path(folder), shape)
        return [compare("Mixtral-8x7B, 1 layer", Path(folder), tokens, rounds)]


@click.command(help=__doc__)
@click.option(
    "--tokens", default=16384, show_default=True, type=click.IntRange(_LEAST_TOKENS), help="Of the demo model."
)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Of the demo model.")
@click.option("--large-tokens", default=2048, show_default=True, help="Through the large layer; 0 leaves it out.")
@click.option("--large-rounds", default=3, show_default=True, type=click.IntRange(1), help="Of the large layer.")
@click.option("--levels", default="fast,full", show_default=True, help="Of sensitivity; none leaves it out.")
@json_option
def main(tokens: int, rounds: int, large_tokens: int, large_rounds: int, levels: str, as_json: bool) -> None:
    """Times, prints, and judges."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types for it
    set_verbosity_error()  # type: ignore[no-untyped-call]  # likewise; it warns of what does not matter here
    if 0 < large_tokens < _LEAST_TOKENS:
        raise click.UsageError(f"--large-tokens: found {large_tokens}, expected 0 or at least {_LEAST_TOKENS}")
    tokenizer = Text(FolderFiles(DEMO_MODEL))
    sample = read_tokens(None, None, tokenizer, tokens, SEQUENCE_LENGTH)
    speeds = [compare("demo", DEMO_MODEL, sample, rounds)]
    if large_tokens:
        speeds += compare_large(read_tokens(None, None, tokenizer, large_tokens, SEQUENCE_LENGTH), large_rounds)
    announced = []
    chosen: tuple[Sensitivity, ...] = ("fast", "full")
    for level in (level for level in chosen if level in levels.split(",")):
        taken = timed_profile(DEMO_MODEL, sample, level)
        (seconds, stage), statistics_s = taken["sensitivity"], taken["statistics"][0]
        announced.append((level, stage.seconds, seconds, seconds / stage.seconds, seconds / statistics_s))
    faults = [f"{s.model}: {s.ratio:.2f} of transformers' speed" for s in speeds if s.ratio < _LEAST_RATIO]
    wrong = [one for one in announced if not 1 / _MOST_OFF <= one[3] <= _MOST_OFF]
    faults += [f"sensitivity {level}: {ratio:.2f} times the seconds announced" for level, _, _, ratio, _ in wrong]
    long = [one for one in announced if one[0] == "fast" and one[4] > _MOST_OF_STATISTICS]
    faults += [f"sensitivity {one[0]}: {one[4]:.2f} times the seconds of statistics" for one in long]
    header = ("statistics", "tokens", "ours, s", "float32, s", "without head, s", "bfloat16, s", "float32 / ours")
    rows = [
        (s.model, s.num_tokens, *(f"{x:.2f}" for x in (s.our_s, s.float32_s, s.headless_s, s.bfloat16_s, s.ratio)))
        for s in speeds
    ]
    announced_table = table(
        ("sensitivity", "announced, s", "taken, s", "taken / announced", "taken / statistics"),
        [(one[0], *(f"{x:.2f}" for x in one[1:])) for one in announced],
    )
    facts = {"threads": torch.get_num_threads(), "speeds": [asdict(s) for s in speeds], "sensitivity": announced}
    finish(facts, table(header, rows) + (f"\n\n{announced_table}" if announced else ""), as_json, faults)


if __name__ == "__main__":
    main()
