"""What the papers say of quality, measured again: perplexity, KL divergence and answers to tasks.

    python tests/bench/paper_quality.py strategies
    python tests/bench/paper_quality.py all --model smollm2_moe

A text and two suites of multiple-choice questions judge every model. Thresholds are learned from the shipped sample,
layer by layer, with earlier layers already pruned. KL has 1.96 standard errors over blocks of 128 tokens, shares of
right answers have Wilson's 95% intervals, and differences have 95% intervals of a paired bootstrap over blocks or
questions. `plain` are the questions of tests/data/tasks.jsonl, judged by log-likelihood. `passages` are made from
tests/data/books-valid.txt: a passage and four continuations, three of them of other passages, judged by log-likelihood
a byte. Packs of presets are those of `moe-pack convert --preset`. Where a table has a paper's figures, they are of
other models and other text: docs/benchmarks/papers.md compares them.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp
from pathlib import Path
from time import monotonic
from typing import Any

import click
import numpy as np
import torch
from benchlib import (
    BOOK,
    ROOT,
    SEQUENCE_LENGTH,
    F,
    finish,
    json_option,
    model_options,
    moe_pack,
    sample_and_unseen,
    table,
)
from benchlib.judging import BLOCK_TOKENS, Blocks, num_expert_weights, paired_difference, stored_bytes, uniform
from benchlib.pruning import AllRun, Batch, ByExpert, Cats, Chess, ChoiceTrees, OfPack, Rule, Theta, run_by
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib.evaluate import TaskTokens, read_tasks
from moe_pack.calib.evaluate.reference import next_log_probs, share
from moe_pack.calib.evaluate.tasks import score
from moe_pack.calib.forward import LayerwiseWeights, Tokens, read_tokens
from moe_pack.calib.profile import ProfileOptions, make_profile
from moe_pack.calib.profile.options import Sensitivity
from moe_pack.calib.sensitivity import log_probabilities
from moe_pack.convert.pipeline import convert
from moe_pack.convert.plan.options import PAPERS_LIMITS
from moe_pack.formats import BF16, NO_PROGRESS, ROW_GROUP, Pack, PartFormat, Plan, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text
from moe_pack.runtime.model import CheckpointWeights, StreamedPackWeights, operations_for

TASKS = ROOT / "tests" / "data" / "tasks.jsonl"
_CPU = torch.device("cpu")


# --- the passages


def passages(text: str, number: int, prompt_words: int = 16, choice_words: int = 6, seed: int = 0) -> list[str]:
    """Returns lines of a file of tasks made from a text: a passage's continuation among three of other passages.

    Passages are spread evenly over the text. The wrong choices are other passages' continuations, drawn with the seed;
    the answer's place goes round.
    """
    words = text.split()
    step = len(words) // number
    assert step > prompt_words + choice_words, f"{len(words)} words are too few for {number} passages"
    pieces = [words[i * step : i * step + prompt_words + choice_words] for i in range(number)]
    prompts = [" ".join(piece[:prompt_words]) for piece in pieces]
    ends = [" " + " ".join(piece[prompt_words:]) for piece in pieces]
    generator, lines = random.Random(seed), []
    for i, prompt in enumerate(prompts):
        choices = [ends[j] for j in generator.sample([j for j in range(number) if j != i], 3)]
        choices.insert(i % 4, ends[i])
        lines.append(json.dumps({"prompt": prompt, "choices": choices, "answer": i % 4}))
    return lines


# --- one measurement


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a model does on the text and, if it was asked, on the suites.

    `kl`: of each block of tokens.   `nll`: of the text's tokens, mean nats.   `running`: by MoE layer, the share of
    neurons that ran on the text.   `right`: by suite, whether each question was answered correctly, as 0 or 1.
    """

    kl: Blocks
    nll: float
    running: NDArray[np.float64]
    right: dict[str, NDArray[np.float64]]

    @property
    def all_right(self) -> NDArray[np.float64]:
        """All suites' answers, one after the other."""
        return np.concatenate([np.zeros(0), *self.right.values()])

    def kl_text(self) -> str:
        """Returns the mean KL divergence with its interval."""
        return f"{self.kl.mean():.4f} ± {1.96 * self.kl.std() / len(self.kl) ** 0.5:.2g}"

    def accuracy_texts(self) -> list[str]:
        """Returns each suite's share of right answers, then that of all questions, with intervals."""
        return [_share_text(right) for right in (*self.right.values(), self.all_right)]


def _share_text(right: NDArray[np.float64]) -> str:
    found = share(int(right.sum()), len(right))
    return f"{found.value:.1%} ± {100 * (found.half_width or 0):.1f}"


class Suite:
    """Questions. `normalized`: whether the log-likelihood of a choice is divided by its bytes."""

    def __init__(self, tasks: TaskTokens, normalized: bool) -> None:
        self._tasks, self._normalized = tasks, normalized
        self.trees = ChoiceTrees(tasks)

    def right(self, log_likelihoods: list[float]) -> NDArray[np.float64]:
        """Returns whether each question is answered correctly, as 0 or 1; `moe-pack eval --tasks` counts the same."""
        tasks, by_task = self._tasks, list[list[float]]()
        for value, choice in zip(log_likelihoods, tasks.choices, strict=True):
            if choice.task_idx == len(by_task):
                by_task.append([])
            by_task[choice.task_idx].append(value / (choice.num_bytes if self._normalized else 1))
        right = np.array([row.index(max(row)) == a for row, a in zip(by_task, tasks.answers, strict=True)], np.float64)
        found = score(tasks, log_likelihoods)
        assert right.mean() == (found.normalized_accuracy if self._normalized else found.accuracy).value
        return right


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured: sparsities of strategies and, with 0, of FloE's experts; bits of up; CORM's thresholds.

    `tolerated`: EdgeMoE's losses in percent.   `tokens_limited`: on which a preset's pack is within such a loss.
    `sensitivity`: of profiles.
    """

    sparsities: tuple[float, ...]
    widths: tuple[int, ...]
    thetas: tuple[float, ...]
    tolerated: tuple[float, ...]
    tokens_limited: int
    sensitivity: Sensitivity


Source = Path | None  # a pack's folder; None: the checkpoint


class Bench:
    """Measures a checkpoint and packs of it, each by a rule; keeps the source's predictions.

    `learned`: what thresholds are learned from.   `judged`: what is judged on, from the file `text`.   `folder`: of
    packs and hidden states.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        learned: Tokens,
        judged: Tokens,
        text: Path,
        suites: dict[str, Suite],
        folder: Path,
        grid: Grid,
    ) -> None:
        self.grid, self.text = grid, text
        self.checkpoint, self.spec = checkpoint, checkpoint.spec
        self.learned, self.judged, self.folder = learned, judged, folder
        self._suites = suites
        self._expected: list[Tensor] = []  # [S, V] of each sequence
        self._known: dict[str, Measured] = {}
        self.source = self.measure("source", None, AllRun(), answers=True)

    def measure(self, name: str, source: Source, rule: Rule, answers: bool) -> Measured:
        """Measures a model by a rule; with the same name it is measured once, unless its answers are missing.

        Args:    answers: whether the suites are asked, too.
        """
        known = self._known.get(name)
        if known is None or (answers and not known.right):
            started = monotonic()
            with self._weights(source) as weights:
                self._known[name] = self._measured(weights, rule, answers)
            click.echo(f"{name}: {monotonic() - started:.0f} s", err=True)
        return self._known[name]

    def pack(self, name: str, plan: Plan) -> Path:
        """Returns the pack of a plan, which is made once for each name."""
        out = self.folder / name
        if not out.exists():
            convert(self.checkpoint, plan, out, torch.get_num_threads())
        return out

    def profile(self) -> Path:
        """Returns the profile of the text that is learned from, which is made once."""
        return self.profile_of(self.learned, "profile")

    def profile_of(self, tokens: Tokens, name: str) -> Path:
        """Returns a profile as `--preset` would make it, of these tokens; it is made once for each name."""
        out = self.folder / name
        if not out.exists():
            options = ProfileOptions(self.grid.sensitivity, rotate="off", keeps_inputs=False)
            make_profile(self.checkpoint, tokens, out, options, NO_PROGRESS)
        return out

    @contextmanager
    def _weights(self, source: Source) -> Iterator[LayerwiseWeights]:
        if source is None:
            yield LayerwiseWeights(CheckpointWeights(self.checkpoint))
            return
        with Pack(source) as pack, operations_for(_CPU) as operations:
            yield LayerwiseWeights(StreamedPackWeights(pack, _CPU, operations))

    @torch.inference_mode()
    def _measured(self, weights: LayerwiseWeights, rule: Rule, answers: bool) -> Measured:
        suites = self._suites if answers else {}
        texts = [Batch.of_text(each.sequences) for each in (self.learned, self.judged)]
        passed = run_by(weights, rule, [*texts, *(suite.trees.batch for suite in suites.values())])
        kl, nll = [], []
        for number, (ids, hidden) in enumerate(zip(self.judged.sequences, passed.hidden[1], strict=True)):
            found = log_probabilities(hidden, weights, _CPU)
            if len(self._expected) == number:
                self._expected.append(found)
            expected = self._expected[number]
            kl.append((expected.exp() * (expected - found)).sum(dim=1).double().view(-1, BLOCK_TOKENS).mean(dim=1))
            nll.append(-next_log_probs(found[:-1], ids, slice(0, len(ids) - 1)).double())
        blocks = np.asarray(torch.cat(kl).numpy(), np.float64)
        right = {
            name: suite.right(suite.trees.log_likelihoods(hidden, weights))
            for (name, suite), hidden in zip(suites.items(), passed.hidden[2:], strict=True)
        }
        return Measured(blocks, float(torch.cat(nll).mean()), passed.running, right)


# --- FloE, Fig. 9b


Part = tuple[str, dict[str, Any]]  # the text of a result and its figures
Table = tuple[str, Sequence[str], Sequence[Sequence[object]]]  # title, header and rows


def _pruned(bench: Bench, width: int, sparsity: float, answers: bool = False) -> Measured:
    """Measures FloE's experts: up at this width by HQQ, gate and down in 16 bit, pruned by up."""
    if width == 16 and not sparsity:
        return bench.source
    rule: Rule = ByExpert("up", sparsity) if sparsity else AllRun()
    source = None if width == 16 else bench.pack(f"up-{width}", _floe_plan(bench, width))
    return bench.measure(f"up at {width} bit, by up {sparsity}", source, rule, answers)


def _floe_plan(bench: Bench, width: int) -> Plan:
    return uniform_plan(bench.spec, "up", part_format(width, 64), BF16)


def sparsity_bits(bench: Bench) -> Part:
    """Returns FloE's Fig. 9b, and how far the losses of sparsity and of quantization add up."""
    sparsities, widths = (0.0, *bench.grid.sparsities), bench.grid.widths
    found = {(width, s): _pruned(bench, width, s) for width in {16: 0} | dict.fromkeys(widths) for s in sparsities}
    header = ("bits of up", *(f"{s:.0%}" for s in sparsities))
    kls = [(f"{w}", *(found[w, s].kl_text() for s in sparsities)) for w in widths]
    perplexities = [(f"{w}", *(f"{exp(found[w, s].nll):.2f}" for s in sparsities)) for w in widths]
    ratios = [(f"{w}", *(f"{_together(found, w, s):.2f}" for s in sparsities[1:])) for w in widths if w != 16]
    texts = [
        ("Perplexity by sparsity", header, perplexities),
        ("KL divergence, nats", header, kls),
        ("KL of both over the sum of both alone", (header[0], *header[2:]), ratios),
    ]
    facts = [{"bits": w, "sparsity": s} | _facts(m) for (w, s), m in found.items()]
    return _titled(texts), {"sparsity_bits": facts}


def _together(found: dict[tuple[int, float], Measured], width: int, sparsity: float) -> float:
    """Returns the KL divergence of both over the sum of that of sparsity alone and of the width alone."""
    both, *alone = (float(found[case].kl.mean()) for case in ((width, sparsity), (width, 0.0), (16, sparsity)))
    return both / sum(alone)


# --- FloE, Fig. 9a, Tables 3, 5 and 6

STRATEGIES: dict[str, Callable[[float], Rule]] = {
    "up": lambda sparsity: ByExpert("up", sparsity),
    "gate": lambda sparsity: ByExpert("gate", sparsity),
    "down": lambda sparsity: ByExpert("both", sparsity),
    "CATS": Cats,
    "CHESS": Chess,
}
STRATEGY_SPARSITIES = (0.5, 0.7, 0.8, 0.9)  # of these, what the grid has
# FloE, Mixtral-8x7B. Mean accuracy of seven tasks: Table 5, and Table 3 for CATS and CHESS. Perplexity on WikiText-2:
# Table 6. 16 bit: 0.7247 (Table 5), 5.119 (Table 8, INT8).
PUBLISHED_ACCURACY = {
    "up": {0.5: 0.7199, 0.7: 0.7038, 0.8: 0.6971, 0.9: 0.6646},
    "gate": {0.5: 0.7228, 0.7: 0.7035, 0.8: 0.6640, 0.9: 0.5897},
    "down": {0.5: 0.7233, 0.7: 0.7201, 0.8: 0.7194, 0.9: 0.7054},
    "CATS": {0.8: 0.657, 0.9: 0.559},
    "CHESS": {0.8: 0.657, 0.9: 0.568},
}
PUBLISHED_PERPLEXITY = {
    "up": {0.5: 5.3164, 0.7: 5.9795, 0.8: 6.9141, 0.9: 9.1250},
    "gate": {0.5: 5.8151, 0.7: 7.2570, 0.8: 9.1439, 0.9: 18.5280},
    "down": {0.5: 5.1583, 0.7: 5.3252, 0.8: 5.6147, 0.9: 6.5511},
}


def _by_strategy(bench: Bench, name: str, sparsity: float) -> Measured:
    if name == "up":
        return _pruned(bench, 16, sparsity, answers=True)
    return bench.measure(f"{name} {sparsity}", None, STRATEGIES[name](sparsity), answers=True)


def strategies(bench: Bench) -> Part:
    """Returns FloE's strategies at equal sparsity, with CATS and CHESS, and the compression methods of Table 3."""
    sparsities = [s for s in bench.grid.sparsities if s in STRATEGY_SPARSITIES]
    found = {(name, s): _by_strategy(bench, name, s) for s in sparsities for name in STRATEGIES}
    rows = [
        (
            f"{s:.0%}", name, *_cells(bench, found[name, s]), _published(PUBLISHED_PERPLEXITY, name, s, ".3f"),
            _published(PUBLISHED_ACCURACY, name, s, ".4f"),
        )
        for s in sparsities
        for name in STRATEGIES
    ]  # fmt: skip
    header = ("sparsity", "pruned by", *_columns(bench), "FloE's perplexity", "FloE's accuracy")
    first = ("0%", "nothing", *_cells(bench, bench.source), "5.119", "0.7247")
    differences = [
        (
            f"{s:.0%}", f"up less {other}", paired_difference(found["up", s].kl, found[other, s].kl),
            _points(found["up", s].all_right, found[other, s].all_right),
        )
        for s in sparsities
        for other in STRATEGIES
        if other != "up"
    ]  # fmt: skip
    compared_header, compared = _compared(bench)
    texts: list[Table] = [
        ("Strategies", header, [first, *rows]),
        ("Differences, 95%", ("sparsity", "", "KL", "right answers, points"), differences),
        ("Compression methods, Table 3", compared_header, compared),
    ]
    facts = [{"strategy": name, "sparsity": s} | _facts(m) for (name, s), m in found.items()]
    return _titled(texts), {"strategies": facts}


def _published(figures: dict[str, dict[float, float]], name: str, sparsity: float, form: str) -> str | None:
    value = figures.get(name, {}).get(sparsity)
    return None if value is None else format(value, form)


def _compared(bench: Bench) -> tuple[Sequence[str], list[tuple[object, ...]]]:
    """Returns Table 3 in kind. Bits read: the matrix that decides is read whole, of the others the running rows."""

    def uniformly(width: int) -> tuple[Measured, float]:
        plan = uniform(bench.spec, part_format(width, 64), "hqq")
        measured = bench.measure(f"HQQ INT{width}", bench.pack(f"hqq-{width}", plan), AllRun(), answers=True)
        return measured, 8 * stored_bytes(bench.spec, plan) / num_expert_weights(bench.spec)

    def sparsely(measured: Measured, selector_bits: float) -> tuple[Measured, float]:
        return measured, (selector_bits + 2 * 16 * float(measured.running.mean())) / 3

    int2 = 8 * part_format(2, 64).part_bytes(bench.spec.hidden_size) / bench.spec.hidden_size
    methods: dict[str, tuple[tuple[Measured, float], str]] = {
        "16 bit": ((bench.source, 16.0), "0.720"),
        "HQQ INT3": (uniformly(3), "0.665"),
        "CATS-80%": (sparsely(_by_strategy(bench, "CATS", 0.8), 16), "0.657"),
        "CHESS-80%": (sparsely(_by_strategy(bench, "CHESS", 0.8), 16), "0.657"),
        "FloE-Wup-80%": (sparsely(_by_strategy(bench, "up", 0.8), 16), "0.693"),
        "HQQ INT2": (uniformly(2), "0.311"),
        "CATS-90%": (sparsely(_by_strategy(bench, "CATS", 0.9), 16), "0.559"),
        "CHESS-90%": (sparsely(_by_strategy(bench, "CHESS", 0.9), 16), "0.568"),
        "FloE-Wup-90%": (sparsely(_by_strategy(bench, "up", 0.9), 16), "0.656"),
        "FloE-80%": (sparsely(_pruned(bench, 2, 0.8, answers=True), int2), "0.676"),
        "FloE-90%": (sparsely(_pruned(bench, 2, 0.9, answers=True), int2), "0.644"),
    }
    header = ("method", "bits read a weight", *_columns(bench), "FloE's accuracy")
    rows = [
        (name, f"{bits:.2f}", *_cells(bench, measured), published)
        for name, ((measured, bits), published) in methods.items()
    ]
    return header, rows


# --- CORM, Fig. 10 and Fig. 2

PUBLISHED_SKIPPED = {0.175: "about 35%", 0.25: "about 55%"}  # CORM §3, Mixtral-8x7B and DeepSeekMoE 16B


def theta(bench: Bench) -> Part:
    """Returns the loss of CORM's threshold, and the neurons that are active by layer."""
    found = {
        t: bench.measure(f"theta {t}", None, Theta(t), answers=True) if t else bench.source for t in bench.grid.thetas
    }
    rows = [
        (f"{t:g}", f"{1 - m.running.mean():.1%}", PUBLISHED_SKIPPED.get(t), *_cells(bench, m), _relative(bench, m))
        for t, m in found.items()
    ]
    header = ("theta", "skipped", "CORM's", *_columns(bench), "of the source's right answers")
    layers = [
        (f"{number}", *(f"{m.running[number]:.1%}" for m in found.values()))
        for number in range(len(bench.source.running))
    ]
    texts: list[Table] = [
        ("Loss by theta", header, rows),
        ("Active neurons by layer", ("layer", *(f"{t:g}" for t in bench.grid.thetas)), layers),
    ]
    return _titled(texts), {"theta": [{"theta": t} | _facts(m) for t, m in found.items()]}


def _relative(bench: Bench, measured: Measured) -> str | None:
    """Returns the right answers over the source's; None without suites."""
    right = measured.all_right
    return f"{right.sum() / bench.source.all_right.sum():.1%}" if len(right) else None


# --- packs of presets, as the command makes them


def _preset_pack(bench: Bench, name: str, *options: object, profile: Path | None = None) -> tuple[Measured, float, int]:
    """Returns what the pack of `moe-pack convert --preset` does, its bits an expert weight, and its bytes.

    Args:    name: each name's pack is made once.   options: from the preset's name on.   profile: in place of the one
             of the text that is learned from.
    """
    out = bench.folder / name
    if not out.exists():
        # Only EdgeMoE's widths depend on the loss that the command measures.
        num_tokens = bench.grid.tokens_limited if options[0] in PAPERS_LIMITS else SEQUENCE_LENGTH
        source = ("convert", bench.checkpoint.folder, "-o", out, "--profile", profile or bench.profile())
        moe_pack(*source, "--eval-tokens", num_tokens, "--preset", *options)
    with Pack(out) as pack:
        rule, num_bytes = OfPack(pack), pack.manifest.totals.content
        expert_bytes = sum(expert.num_bytes for layer in pack.layout.experts for expert in layer)
    measured = bench.measure(f"pack {name}", out, rule, answers=True)
    return measured, 8 * expert_bytes / num_expert_weights(bench.spec), num_bytes


# --- FloE, Table 4: presets

PRESET_PACKS: dict[str, tuple[tuple[str, ...], str | None]] = {  # FloE Table 4, average; CORM Table 2
    "floe, 80%": (("floe", "--sparsity", "0.8"), "49.80 of 53.67"),
    "floe, 90%": (("floe",), "43.83 of 53.67"),
    "corm": (("corm",), "70.3 of 71.2 (CORM, MMLU)"),
    "edgemoe": (("edgemoe",), None),
    "fiddler": (("fiddler",), None),
}


def tasks(bench: Bench) -> Part:
    """Returns the answers of the presets' packs."""
    rows: list[tuple[object, ...]] = [("source", "16.00", "0.0%", *_cells(bench, bench.source), None)]
    facts = []
    for name, (options, published) in PRESET_PACKS.items():
        measured, bits, _ = _preset_pack(bench, name, *options)
        skipped = f"{1 - measured.running.mean():.1%}"
        rows.append((name, f"{bits:.2f}", skipped, *_cells(bench, measured), published))
        facts.append({"preset": name, "bits": bits} | _facts(measured))
    header = ("preset", "bits a weight", "skipped", *_columns(bench), "published, Mixtral")
    return _titled([("Presets", header, rows)]), {"tasks": facts}


# --- EdgeMoE, Tables II and IV, Fig. 17

_ROW_INT4 = part_format(4, ROW_GROUP)
# Of Switch base-8 and base-16 (Table II): GB, and the loss of Rouge-2 in percent.
PUBLISHED_SIZES = {
    "16 bit": "2.43, 4.12 GB; 0, 0%", "experts in INT4": "0.85, 1.03 GB; 2.04, 3.15%",
    "all in INT4": "0.85, 1.03 GB; 20.0, 25.1% (STI)", "edgemoe": "0.81, 0.95 GB; 0.89, 1.95%",
}  # fmt: skip
# Rouge-2 of Switch base-8 and base-16 on Xsum, by the text of the offline stage (Table IV).
PUBLISHED_TEXTS = {"source": "0.221, 0.245", "the judged book": "0.220, 0.243 (Xsum)", "the sample": "0.219, 0.240"}


def widths(bench: Bench) -> Part:
    """Returns EdgeMoE's packs beside those of one width, by tolerable loss, and by the text of the profile."""
    sizes = {
        "16 bit": _uniform_pack(bench, "bf16", BF16, None),
        "experts in INT4": _uniform_pack(bench, "int4", _ROW_INT4, None),
        "all in INT4": _uniform_pack(bench, "all-int4", _ROW_INT4, _ROW_INT4),
        "edgemoe": _preset_pack(bench, "edgemoe", "edgemoe"),
    }
    by_limit = {
        f"{share:g}%": _preset_pack(bench, "edgemoe", "edgemoe")
        if share == _PAPERS_SHARE
        else _preset_pack(bench, f"edgemoe-{share:g}", "edgemoe", "--max-loss", f"{share:g}%")
        for share in bench.grid.tolerated
    }
    columns = ("MiB", "bits a weight", "perplexity, grown", *_columns(bench))
    by_text = {"the judged book": _of_the_book(bench), "the sample": sizes["edgemoe"]}
    source = ("source", None, None, None, *_cells(bench, bench.source), PUBLISHED_TEXTS["source"])
    texts: list[Table] = [
        (
            "Sizes and losses, Table II",
            ("pack", *columns, "EdgeMoE: size; loss"),
            [(name, *_sized(bench, found), PUBLISHED_SIZES[name]) for name, found in sizes.items()],
        ),
        (
            "Tolerable loss, Fig. 17",
            ("tolerated", *columns),
            [(name, *_sized(bench, found)) for name, found in by_limit.items()],
        ),
        (
            "Text of the profile, Table IV",
            ("profile of", *columns, "EdgeMoE: Rouge-2"),
            [source, *((name, *_sized(bench, found), PUBLISHED_TEXTS[name]) for name, found in by_text.items())],
        ),
    ]
    facts = [
        {"group": group, "pack": name, "bits": bits, "bytes": num_bytes} | _facts(measured)
        for group, found in (("sizes", sizes), ("tolerated", by_limit), ("texts", by_text))
        for name, (measured, bits, num_bytes) in found.items()
    ]
    return _titled(texts), {"widths": facts}


_PAPERS_SHARE = 100 * PAPERS_LIMITS["edgemoe"].value


def _uniform_pack(bench: Bench, name: str, part: PartFormat, dense: PartFormat | None) -> tuple[Measured, float, int]:
    """Returns what a pack does whose experts, and dense matrices, have one format with scales from largest values."""
    plan = uniform_plan(bench.spec, "none", part, part, dense, "absmax")
    out = bench.pack(name, plan)
    with Pack(out) as pack:
        num_bytes = pack.manifest.totals.content
    measured = bench.measure(name, out, AllRun(), answers=True)
    return measured, 8 * stored_bytes(bench.spec, plan) / num_expert_weights(bench.spec), num_bytes


def _of_the_book(bench: Bench) -> tuple[Measured, float, int]:
    """Returns what EdgeMoE's pack does if profile and limit are of the judged text, after the part that is judged."""
    text = bench.text.read_text("utf-8")
    cut = len(text) // _TEXT_PARTS
    learned, limited = bench.folder / "learned.txt", bench.folder / "limited.txt"
    learned.write_text(text[cut : 2 * cut], "utf-8")
    limited.write_text(text[2 * cut :], "utf-8")
    tokens = read_tokens(
        str(learned), None, Text(FolderFiles(bench.checkpoint.folder)), bench.learned.sequences.size, SEQUENCE_LENGTH
    )
    profile = bench.profile_of(tokens, "profile-book")
    return _preset_pack(bench, "edgemoe-book", "edgemoe", "--eval-data", limited, profile=profile)


_TEXT_PARTS = 3  # the judged tokens are in the first part of the text, the profile is of the second


def _sized(bench: Bench, found: tuple[Measured, float, int]) -> tuple[object, ...]:
    measured, bits, num_bytes = found
    grown = f"{exp(measured.nll - bench.source.nll) - 1:+.2%}"
    return (f"{num_bytes / 2**20:.1f}", f"{bits:.2f}", grown, *_cells(bench, measured))


# --- how results are printed


def _columns(bench: Bench) -> tuple[str, ...]:
    suites = tuple(bench.source.right)
    return ("perplexity", "KL", *suites, *(("all", "all less source, 95%") if suites else ()))


def _cells(bench: Bench, measured: Measured) -> tuple[object, ...]:
    cells: tuple[object, ...] = (f"{exp(measured.nll):.2f}", measured.kl_text())
    if not measured.right:
        return cells
    is_source = measured is bench.source
    lost = None if is_source else _points(measured.all_right, bench.source.all_right)
    return (*cells, *measured.accuracy_texts(), lost)


def _points(ours: NDArray[np.float64], other: NDArray[np.float64]) -> str:
    """Returns the difference of two shares of right answers in points, with its interval; empty without questions."""
    if not len(ours):
        return ""
    difference = paired_difference(ours, other)
    return f"{100 * difference.mean:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"


def _facts(measured: Measured) -> dict[str, Any]:
    return {
        "perplexity": exp(measured.nll),
        "kl": float(measured.kl.mean()),
        "kl_blocks": measured.kl,
        "running": measured.running,
        "right": measured.right,
    }


def _titled(texts: Sequence[Table]) -> str:
    return "\n\n".join(f"{title}\n\n{table(header, rows)}" for title, header, rows in texts)


# --- the commands

PARTS: dict[str, Callable[[Bench], Part]] = {
    "strategies": strategies,
    "theta": theta,
    "sparsity-bits": sparsity_bits,
    "tasks": tasks,
    "widths": widths,
}


def _suites(checkpoint: Checkpoint, folder: Path, num_passages: int, plain: bool) -> dict[str, Suite]:
    text, most = Text(FolderFiles(checkpoint.folder)), checkpoint.spec.max_position_embeddings
    found = {"plain": Suite(read_tasks(TASKS, text, most), normalized=False)} if plain else {}
    if num_passages:
        file = folder / "passages.jsonl"
        file.write_text("\n".join(passages(BOOK.read_text("utf-8"), num_passages)) + "\n", "utf-8")
        found["passages"] = Suite(read_tasks(file, text, most), normalized=True)
    return found


def _grid(options: dict[str, Any]) -> Grid:
    sparsities, thetas, tolerated = (
        tuple(map(float, options[name].split(","))) for name in ("sparsities", "thetas", "tolerated")
    )
    up_bits = tuple(map(int, options["widths"].split(",")))
    return Grid(sparsities, up_bits, thetas, tolerated, options["tokens_limited"], options["sensitivity"])


def _run(names: Sequence[str], options: dict[str, Any]) -> None:
    """Measures the named parts on one model; prints each as soon as it is there, unless JSON is wanted."""
    learned, judged = sample_and_unseen(
        options["model"], options["tokens_learned"], options["tokens"], options["text"], options["sample"]
    )
    checkpoint, facts = Checkpoint(options["model"]), dict[str, Any]()
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as place:
            folder = Path(place)
            suites = _suites(checkpoint, folder, options["num_passages"], options["plain"])
            bench = Bench(checkpoint, learned, judged, options["text"], suites, folder, _grid(options))
            for name in names:
                text, found = PARTS[name](bench)
                facts |= found
                if options["as_json"]:
                    continue
                click.echo(f"== {name}\n\n{text}\n")
                sys.stdout.flush()
    finally:
        checkpoint.close()
    sizes = {"tokens_learned": learned.sequences.size, "tokens": judged.sequences.size, "length": SEQUENCE_LENGTH}
    if options["as_json"]:
        finish({"model": options["model"].name, "source": _facts(bench.source)} | sizes | facts, "", as_json=True)


def bench_options(body: F) -> F:
    """Adds the options that all commands have."""
    body = model_options(json_option(body))
    path = click.Path(path_type=Path, exists=True)
    for option in (
        click.option("--sparsities", default="0.5,0.6,0.7,0.8,0.9", show_default=True, help="0.6: not in strategies."),
        click.option("--widths", default="16,8,4,3,2,1", show_default=True, help="Bits of up, in sparsity-bits."),
        click.option("--thetas", default="0,0.1,0.175,0.25,0.275,0.3,0.4", show_default=True, help="Of theta."),
        click.option("--sample", type=path, help="To learn thresholds from.  [default: the shipped sample]"),
        click.option("--tokens-learned", default=1024, show_default=True, help="Of the sample."),
        click.option("--tokens", default=2048, show_default=True, help="Of the text, to judge on."),
        click.option("--passages", "num_passages", default=100, show_default=True, help="Questions; 0: none."),
        click.option("--plain/--no-plain", default=True, help="Whether plain questions are asked."),
        click.option(
            "--sensitivity", type=click.Choice(["fast", "full", "exact"]), default="fast", show_default=True,
            help="Of profiles, which presets need.",
        ),
        click.option("--tolerated", default="2,5,10,20", show_default=True, help="Losses in percent, of widths."),
        click.option(
            "--tokens-limited", default=16384, show_default=True, help="On which a preset's loss is within its limit."
        ),
    ):  # fmt: skip
        body = option(body)
    return body


@click.group(help=__doc__)
def main() -> None:
    """Groups the measurements."""


def _add(name: str, text: str) -> None:
    @main.command(name, help=text)
    @bench_options
    def command(**options: Any) -> None:
        _run([name], options)


_add("sparsity-bits", "FloE Fig. 9b: sparsity and the bits of up.")
_add("strategies", "FloE Fig. 9a and Tables 3, 5 and 6: which activation decides, with CATS, CHESS and HQQ.")
_add("theta", "CORM Fig. 10 and Fig. 2: the threshold on the gate's activation.")
_add("tasks", "FloE Table 4: answers of the presets' packs.")
_add(
    "widths", "EdgeMoE Tables II and IV, Fig. 17: sizes and losses by width, by tolerable loss, by the profile's text."
)


@main.command("all")
@bench_options
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, default=list(PARTS), help="All by default.")
def all_command(only: tuple[str, ...], **options: Any) -> None:
    """Runs all of them, one after the other."""
    _run(only, options)


if __name__ == "__main__":
    main()
