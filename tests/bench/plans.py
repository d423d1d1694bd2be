"""The planner: what it predicts against what runs, and the tables of what fits.

python tests/bench/plans.py predicted
python tests/bench/plans.py table
python tests/bench/plans.py presets
python tests/bench/plans.py assumed-losses
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import expm1
from pathlib import Path
from statistics import mean, median

import click
import numpy as np
from benchlib import (
    BOOK,
    DEMO_MODEL,
    ROOT,
    SEQUENCE_LENGTH,
    finish,
    folder_option,
    json_option,
    table,
)
from benchlib.packs import DEMO, SyntheticPack, budget_with, make_pack, make_profiled_demo, with_sparse
from benchlib.predicting import measured_fixed_costs, measured_machine, predicted_for
from support.assumed import assumed_figures

from moe_pack.calib.forward import read_tokens
from moe_pack.calib.profile import Profile, ProfileOptions, assumed_losses, losses_of, make_profile
from moe_pack.convert.plan import EstimatedPlan, PlanningModel, Target, held_out_passes, planner_for, preset_decision
from moe_pack.convert.plan.options import PRESET_NAMES, USUAL_LIMIT, PresetName
from moe_pack.convert.plan.planned import mean_sparsity, speed_text, two_digits
from moe_pack.convert.plan.speed import SpeedEstimate
from moe_pack.formats import NO_PROGRESS, Pack, RunError, canonical, dense_roles, dump, size_text
from moe_pack.formats.families import Checkpoint, model_spec
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.formats.families.published import published_names
from moe_pack.formats.parts.specs import num_parameters
from moe_pack.runtime import Engine, EngineOptions, FixedCosts, MachineFacts, Text
from moe_pack.runtime.offload import OffloadedWeights, Passes, routing_bytes, whole_bytes

_CONTEXT = 1024
_SYNTHETIC = with_sparse(
    {  # no path through them is likelier than another
        "mixtral-2-layers": SyntheticPack("mixtral-8x7b", 2, 8192, path_correlation=None),
        "olmoe-4-layers": SyntheticPack("olmoe-1b-7b", 4, 8192, path_correlation=None),
        "qwen3-3-layers": SyntheticPack("qwen3-30b-a3b", 3, 8192, path_correlation=None),
    }
)
_SHARES = {DEMO: (0.25, 0.5, 0.75, 1.0), **dict.fromkeys(_SYNTHETIC, (0.25, 0.5, 1.0))}


@click.group(help=__doc__)
def main() -> None:
    """Groups the measurements."""


# --- predicted and measured


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of a token: as they were, and the mean of estimates by the machine's rates just before and just after."""

    estimated_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """A pack inside a budget: what was predicted, and what the runtime did, for a token."""

    pack: str
    share: float
    budget_bytes: int
    predicted: SpeedEstimate
    measured_bytes: float
    measured_hit_rate: float
    rounds: tuple[Round, ...]

    @property
    def bytes_off(self) -> float:
        """Predicted by measured, less 1; 0 where both are next to nothing."""
        if max(self.predicted.fetched_bytes, self.measured_bytes) < 4096:
            return 0.0
        return self.predicted.fetched_bytes / max(self.measured_bytes, 1.0) - 1

    @property
    def time_off(self) -> float:
        """Predicted tokens a second by measured, less 1: the median of the rounds."""
        return median(each.measured_s / each.estimated_s for each in self.rounds) - 1

    def row(self) -> tuple[str, ...]:
        """Returns the line of the table."""
        found = self.predicted
        estimated, measured = (
            median(1 / seconds for seconds in all_s)
            for all_s in zip(*((each.estimated_s, each.measured_s) for each in self.rounds), strict=True)
        )
        return (
            self.pack, f"{self.share:.0%}", found.policy, f"{found.hit_rate:.1%}", f"{self.measured_hit_rate:.1%}",
            f"{found.fetched_bytes / 1e6:.3f}", f"{self.measured_bytes / 1e6:.3f}", f"{self.bytes_off:+.1%}",
            f"{estimated:.2f}", f"{measured:.2f}", f"{self.time_off:+.1%}",
        )  # fmt: skip


def make_profiled(name: str, folder: Path) -> Path:
    """Returns a pack, made unless it is there; the demo model's has a profile's routing with it."""
    return make_profiled_demo(folder) if name == DEMO else make_pack(name, folder, _SYNTHETIC)


def run_case(
    name: str, folder: Path, share: float, fixed: FixedCosts, seconds: float, num_tokens: int, rounds: int
) -> Case:
    """Measures the machine, predicts, runs, and repeats that: rates differ from one minute to the next.

    Args:    seconds: of each measurement of the machine.
    """
    path = make_profiled(name, folder)
    with Pack(path) as pack:
        predictors = routing_bytes(path)
        partly = budget_with(pack, int(share * pack.index.size.size), _CONTEXT) + predictors
        budget = whole_bytes(pack.layout, _CONTEXT, predictors) if share == 1 else partly
        passes: Passes | None = held_out_passes(Profile(folder / "demo-profile")) if name == DEMO else None
        sparsity, seen = 0.0 if name == DEMO else _SYNTHETIC[name].sparsity, num_tokens // 2

        def estimate(facts: MachineFacts) -> SpeedEstimate:
            return predicted_for(pack, budget, _CONTEXT, facts, sparsity, seen, passes)

        num_ids = (2 + rounds) * num_tokens
        if name == DEMO:
            ids = Text(pack).encode(BOOK.read_text("utf-8")[: 20 * num_ids])[:num_ids]
        else:
            ids = np.random.default_rng(0).integers(0, pack.spec.vocab_size, num_ids).tolist()
        facts, done = measured_machine(path, seconds, fixed), list[Round]()
        options = EngineOptions("cpu", budget, machine=facts, read="direct")
        with Engine(pack, options, _CONTEXT) as engine:
            decoder, weights = engine.decoder, engine.weights
            assert isinstance(weights, OffloadedWeights), "a budget makes it stream"
            # A prompt so long that it needs every expert; then tokens that fill the cache as decode does.
            decoder.next_logits((ids * _CONTEXT)[: _CONTEXT - num_tokens])
            decoder.reset()
            decode(engine, ids[num_tokens : 2 * num_tokens])
            counts = weights.decode
            before = (counts.asked_bytes, counts.needed, counts.hits)
            for start in range(2 * num_tokens, len(ids), num_tokens):
                now = measured_machine(path, seconds, fixed)
                decoder.reset()  # each round from an empty context; the experts in memory stay
                token_s = decode(engine, ids[start : start + num_tokens])
                around = (now, measured_machine(path, seconds, fixed))
                done.append(Round(mean(estimate(each).seconds.total for each in around), token_s))
            after = (counts.asked_bytes, counts.needed, counts.hits)
        asked, needed, hits = (now - then for now, then in zip(after, before, strict=True))
        return Case(name, share, budget, estimate(facts), asked / (num_tokens * rounds), hits / needed, tuple(done))


def decode(engine: Engine, ids: Sequence[int]) -> float:
    """Decodes tokens and returns the mean seconds of one."""
    began = time.perf_counter()
    for token in ids:
        engine.decoder.next_logits([token])
    return (time.perf_counter() - began) / len(ids)


@main.command("predicted")
@folder_option
@click.option(
    "--pack", "packs", multiple=True, type=click.Choice(list(_SHARES)), default=tuple(_SHARES), show_default=True
)
@click.option("--tokens", default=512, show_default=True, type=click.IntRange(8, _CONTEXT // 2), help="Of a round.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 6))
@click.option("--seconds", default=0.1, show_default=True, help="That each measurement of the machine takes.")
@click.option("--bytes-off", default=0.1, show_default=True, help="What bytes may be off by, on the demo model.")
@click.option("--time-off", default=0.2, show_default=True, help="What tokens a second may be off by.")
@json_option
def predicted_command(
    folder: Path, packs: tuple[str, ...], tokens: int, rounds: int, seconds: float, bytes_off: float, time_off: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Compares the cost model's prediction with what the runtime does on this machine's CPU.

    The demo model's pack with a profile of its own, on text that the profile has not seen; and synthetic packs at 4
    bit, few large experts and many small ones, with all neurons running and with a tenth of them. Before each round and
    after it the machine is measured as `moe-pack doctor` does; a figure is the median of the rounds. Tokens are given
    one by one; the first fill the cache and are not counted. Exits with 1 where a figure is off by more than allowed.
    Needs 8 GB in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in packs:  # before anything is measured
        make_profiled(name, folder)
    fixed = measured_fixed_costs(make_profiled(packs[0], folder), seconds)
    cases, faults = list[Case](), list[str]()
    click.echo(f"fixed costs: {fixed}", err=True)
    for name in packs:
        for share in _SHARES[name]:
            num_tokens = tokens if name == DEMO else max(tokens // 16, 8)
            cases.append(run_case(name, folder, share, fixed, seconds, num_tokens, rounds))
            click.echo(" ".join(cases[-1].row()), err=True)
    for case in cases:
        if case.pack == DEMO and abs(case.bytes_off) > bytes_off:
            faults.append(f"{case.pack}, {case.share:.0%}: bytes a token off by {case.bytes_off:+.1%}")
        if abs(case.time_off) > time_off:
            faults.append(f"{case.pack}, {case.share:.0%}: tokens a second off by {case.time_off:+.1%}")
    header = ("pack", "experts", "policy", "hits", "(was)", "MB a token", "(was)", "off", "tokens/s", "(was)", "off")
    finish({"cases": [asdict(c) for c in cases]}, table(header, [c.row() for c in cases]), as_json, faults)


# --- what fits: docs/plans.md and docs/papers.md

_RAM = 64 << 30
_SIZES = (8, 11, 16, 24)  # GiB
_GPUS = {8: "RTX 3060 12G", 11: "RTX 3060 12G", 16: "RTX 4060 Ti 16G", 24: "RTX 4090"}
# Each paper's models with the GPU it used, or the nearest known, and its GiB.
_SETUPS: tuple[tuple[PresetName, str, int, str], ...] = (
    ("floe", "mixtral-8x7b", 11, "RTX 3090"),
    ("floe", "phi-3.5-moe", 11, "RTX 3090"),
    ("floe", "deepseek-moe-16b", 11, "RTX 3090"),
    ("floe", "qwen1.5-moe-a2.7b", 11, "RTX 3090"),
    ("corm", "mixtral-8x7b", 24, "RTX 3090"),
    ("corm", "deepseek-moe-16b", 24, "RTX 3090"),
    ("corm", "deepseek-moe-16b", 12, "RTX 3060 12G"),  # setting S1 of Importance-Driven Expert Scheduling,
    ("corm", "xverse-moe-a4.2b", 16, "RTX 4060 Ti 16G"),  # S2,
    ("corm", "qwen2-57b-a14b", 24, "RTX 4090"),  # and S3, whose GPU had 48 GB
    ("fiddler", "mixtral-8x7b", 24, "L4"),
    ("edgemoe", "minicpm-moe-8x2b", 8, "RTX 3060 12G"),
)
_HELD = ("static rows", "slots", "resident selectors", "pages of experts")


def shares_of(planned: EstimatedPlan) -> tuple[str, str]:
    """Returns the bytes of dense weights, and of what stays of the experts."""
    shares = {share.name: share.num_bytes for share in planned.speed.shares}
    return size_text(shares["dense weights"]), size_text(sum(shares.get(part, 0) for part in _HELD))


def plan_row(name: str, gibibytes: int) -> tuple[str, ...]:
    """Returns the plan of a model in so much memory, or why there is none."""
    spec = model_spec(name)
    losses, dtypes = assumed_losses(spec), ("BF16",) * len(dense_roles(spec))
    target = Target(gibibytes << 30, "cuda", ram_bytes=_RAM, gpu=_GPUS[gibibytes])
    if spec.encoder is not None:
        name, target = f"{name} (CPU)", Target(gibibytes << 30, "cpu")
    first = (name, size_text(2 * num_parameters(spec)), str(gibibytes))
    try:
        planned = planner_for(target, PlanningModel(spec, dtypes, losses), None, None).plan(
            USUAL_LIMIT.nats(losses.nll_per_kl)
        )
    except RunError as fault:  # `--target-vram: 8.0 GiB is too small; a pack within this loss needs ...; give ...`
        return (*first, str(fault).partition("; ")[2].partition(";")[0], *[""] * 9)
    grown = 100 * expm1(losses.nll_per_kl * planned.loss)
    return (
        *first, two_digits(planned.loss), f"+{two_digits(grown)}%", size_text(planned.pack_bytes),
        f"{planned.bits_per_weight:.2f}", f"{mean_sparsity(planned, losses):.0%}", planned.decision.plan.selector,
        *shares_of(planned), size_text(planned.speed.fetched_bytes), speed_text(planned, target.kind),
    )  # fmt: skip


@main.command("table")
@click.option("--model", "names", multiple=True, type=click.Choice(published_names()), help="Which.  [default: all]")
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(map(str, _SIZES))), help="GiB.  [default: all]")
@json_option
def table_command(names: tuple[str, ...], sizes: tuple[str, ...], as_json: bool) -> None:
    """Prints what every published model comes to in 8, 11, 16 and 24 GiB of a GPU: docs/plans.md.

    No weights: losses are assumed and routes drawn evenly, as `moe-pack plan NAME` does without a profile. Models with
    an encoder do not run on GPUs: theirs is as much of a CPU's memory.
    """
    rows = [plan_row(name, int(size)) for name in names or published_names() for size in sizes or _SIZES]
    header = ("model", "16 bit", "GiB", "loss: KL", "perplexity", "pack", "bits", "sparsity", "selector", "dense",
              "experts in memory", "read a token", "tokens/s")  # fmt: skip
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


@main.command("presets")
@click.option("--preset", "presets", multiple=True, type=click.Choice(PRESET_NAMES), help="Which.  [default: all]")
@json_option
def presets_command(presets: tuple[PresetName, ...], as_json: bool) -> None:
    """Prints the papers' packs at the dimensions of the models they measured: docs/papers.md.

    No weights, as for `table`: nothing is predicted of what CORM's threshold leaves out.
    """
    rows = []
    for preset, name, gibibytes, gpu in _SETUPS:
        if presets and preset not in presets:
            continue
        spec = model_spec(name)
        losses, dtypes = assumed_losses(spec), ("BF16",) * len(dense_roles(spec))
        target = Target(gibibytes << 30, "cuda", ram_bytes=_RAM, gpu=gpu, preset=preset)
        model = PlanningModel(spec, dtypes, losses)
        planned = planner_for(target, model, None, None).estimate(preset_decision(preset, model))
        rows.append((
            preset, name, size_text(2 * num_parameters(spec)), gibibytes, size_text(planned.pack_bytes),
            f"{planned.bits_per_weight:.2f}", *shares_of(planned), f"{planned.speed.hit_rate:.1%}",
            size_text(planned.speed.fetched_bytes),
        ))  # fmt: skip
    header = ("preset", "model", "16 bit", "GiB", "pack", "bits", "dense", "experts in memory", "hits", "read a token")
    finish({"header": header, "rows": rows}, table(header, rows), as_json)


@main.command("assumed-losses")
@click.option("--tokens", default=16384, show_default=True, help="Of the sample, to profile on.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=ROOT / "calib" / "assumed_losses.json")
def assumed_losses_command(tokens: int, output: Path) -> None:
    """Writes what plans of models without a profile assume: the demo model's losses in all, from a `fast` profile."""
    sample = read_tokens(None, None, Text(FolderFiles(DEMO_MODEL)), tokens, SEQUENCE_LENGTH)
    checkpoint = Checkpoint(DEMO_MODEL)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
            profile = make_profile(checkpoint, sample, Path(folder) / "p", ProfileOptions("fast"), NO_PROGRESS)
            figures = assumed_figures(losses_of(profile), checkpoint.spec, DEMO_MODEL.name)
    finally:
        checkpoint.close()
    output.write_bytes(canonical(dump(figures)))
    click.echo(f"{output}: written")


if __name__ == "__main__":
    main()
