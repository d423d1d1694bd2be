"""Models divided between several devices, under the interpreter: the numbers, and the order of copies between them.

The order checker (`conftest`) has a stream for each device: hidden states go over by copies that wait.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support.cases import case
from support.gpu_runs import CPU, TOLERANCE, GpuRun, staged_decoder
from support.ordered_work import OrderError, Stream

import moe_pack.runtime.engine.engine as engine_module
import moe_pack.runtime.engine.stages as builder
import moe_pack.runtime.gpu.token.engine as gpu_engine
from moe_pack.formats import Pack
from moe_pack.formats.pack.slices import cuts
from moe_pack.runtime import Engine, EngineOptions, report
from moe_pack.runtime.engine.built import Setup
from moe_pack.runtime.engine.gpu import GpuRun as OpenedGpu
from moe_pack.runtime.engine.report import report_lines
from moe_pack.runtime.gpu.devices import HostArena
from moe_pack.runtime.gpu.fit import GpuRequest
from moe_pack.runtime.gpu.token import stages
from moe_pack.runtime.model import Decoder, PackWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from support.ordered_engine import Watch

    from moe_pack.runtime.gpu.placements import Misses
    from moe_pack.runtime.gpu.token.decoder import GpuDecoder

RUN = GpuRun(1.0, num_sequences=2, num_rows=4)


def ids_of(number: int, length: int = 32) -> list[int]:
    """The text of a sequence; texts differ."""
    return [(37 * i + 11 * number + 5) % 96 for i in range(length)]


def made(name: str, folder: Path) -> Path:
    """A pack of a tiny model of this name."""
    from support.families import TINY, write  # which imports transformers
    from support.models import pack

    (tiny,) = (tiny for tiny in TINY if str(tiny) == f"{name}: as it comes")
    pack(write(tiny, folder / "source"), folder / "packed", dense_width=8)
    return folder / "packed"


def devices_of(watch: Watch) -> Callable[[int], AbstractContextManager[object]]:
    """Makes a stream for each device, which is current while its engine is made."""
    return lambda number: watch.order.on(Stream(watch.order, f"device {number}"))


def expected(packed: Path, ids: list[int]) -> torch.Tensor:
    with Pack(packed) as pack:
        return Decoder(PackWeights(pack, CPU), 64).logits(ids)


def run_rows(decoder: GpuDecoder) -> list[tuple[int, int, torch.Tensor]]:
    """Logits of a prompt, tokens alone and together, drafts of which some are wrong, and more of the prompt."""
    first, second = decoder.sequences
    found: list[tuple[int, int, torch.Tensor]] = []

    def note(number: int, logits: torch.Tensor) -> None:
        found.append((number, decoder.sequences[number].num_tokens - 1, logits.clone()))

    note(0, decoder.extend(first, ids_of(0)[:5]))
    note(1, decoder.extend(second, ids_of(1)[:1]))
    together = decoder.extend_each([first, second], [ids_of(0)[5], ids_of(1)[1]])
    note(0, together[0])
    note(1, together[1])
    drafts = [*ids_of(0)[6:8], 95 - ids_of(0)[8], 3]
    logits = decoder.verify(first, drafts)
    found += [(0, 6 + place, logits[place].clone()) for place in range(2)]
    decoder.keep(first, 8)
    note(0, decoder.extend(first, [ids_of(0)[8]]))
    note(0, decoder.extend(first, ids_of(0)[9:12]))
    return found


def check(packed: Path, run: GpuRun, ends: list[int], watch: Watch) -> None:
    """Compares all rows with those of a sequence alone in plain torch, on one device."""
    reference = [expected(packed, ids_of(number)[:12]) for number in range(2)]
    with staged_decoder(packed, run, ends, on_device=devices_of(watch)) as decoder:
        for number, position, logits in run_rows(decoder):
            difference = (logits - reference[number][position]).abs().max()
            assert difference < TOLERANCE, f"sequence {number}, position {position}: {difference}"


def every_cut(packed: Path) -> list[list[int]]:
    """The ends of stages, for two stages in every way, and for as many as possible."""
    with Pack(packed) as pack:
        found, last = cuts(pack.spec), pack.spec.num_hidden_layers
    return [*([cut, last] for cut in found), *([[*found, last]] if len(found) > 1 else [])]


# Dense first layers and latent attention; states and attention; windows, sinks; several kinds of attention.
FAMILIES = ("deepseek_v3", "qwen3_next", "gpt_oss", "gemma4_text")


def test_three_stages_give_the_logits_of_one_device(tmp_path: Path, watch: Watch) -> None:
    check(made("mixtral", tmp_path), RUN, [1, 2, 3], watch)


@pytest.mark.parametrize(("misses", "share"), [("split", 0.3), ("pull", 0.3)])
def test_stages_with_missing_experts_do_so_too(misses: Misses, share: float, tmp_path: Path, watch: Watch) -> None:
    check(made("mixtral", tmp_path), replace(RUN, misses=misses, share=share), [2, 3], watch)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_of_a_family_gives_the_logits_of_one_device(family: str, tmp_path: Path, watch: Watch) -> None:
    packed = made(family, tmp_path)
    for ends in every_cut(packed):
        for share in (1.0, 0.4):
            with case(ends, share):
                check(packed, replace(RUN, share=share), ends, watch)


@pytest.mark.slow
def test_sequences_lead_back_and_share_beginnings_over_all_stages(tmp_path: Path, watch: Watch) -> None:
    """States are in one stage, and attention is in the other: both go back to a checkpoint, and both are copied."""
    packed, ids = made("qwen3_next", tmp_path), ids_of(0)
    reference, other = expected(packed, ids), expected(packed, [*ids[:20], *ids_of(1)[20:24]])
    with Pack(packed) as pack:
        (end, *_), last = cuts(pack.spec), pack.spec.num_hidden_layers
    with staged_decoder(packed, RUN, [end, last], num_checkpoints=2, on_device=devices_of(watch)) as decoder:
        first, second = decoder.sequences
        decoder.extend(first, ids[:20])
        first.save_checkpoint()
        for token in ids[20:23]:
            decoder.extend(first, [token])
        assert (decoder.extend(first, [ids[23]]) - reference[23]).abs().max() < TOLERANCE
        second.take_beginning(first, 20)
        left = first.keep_beginning([*ids[:20], *ids_of(1)[20:24]])
        assert left == ids_of(1)[20:24] and second.ids == ids[:20]
        assert (decoder.extend(second, [ids[20]]) - reference[20]).abs().max() < TOLERANCE
        for place, token in enumerate(left):
            assert (decoder.extend(first, [token]) - other[20 + place]).abs().max() < TOLERANCE


class Noted:
    """A follower that notes what it is shown."""

    def __init__(self) -> None:
        self.hidden = dict[int, torch.Tensor]()

    def follow(self, ids: Sequence[int], first: int, hidden: torch.Tensor) -> None:
        self.hidden |= {first + place: own.clone() for place, own in enumerate(hidden)}


def test_a_follower_sees_the_hidden_states_of_the_last_stage(tmp_path: Path, watch: Watch) -> None:
    packed, ids, noted = made("mixtral", tmp_path), ids_of(0)[:4], Noted()
    with Pack(packed) as pack:
        reference = Decoder(PackWeights(pack, CPU), 64).hidden_states(ids)
    with staged_decoder(packed, RUN, [1, 3], on_device=devices_of(watch)) as decoder:
        decoder.sequences[0].follower = noted
        decoder.extend(decoder.sequences[0], ids[:3])
        decoder.extend(decoder.sequences[0], ids[3:])
    assert (torch.stack([noted.hidden[place] for place in range(4)]) - reference).abs().max() < TOLERANCE


WAITS = (
    ("after.queues.wait_for(computed)", r"copy_ .* device 1 reads .* device 0 writes"),
    ("before.queues.wait_for(copied)", "device 1 .*(is freed|may still use|no order)|device 0 .* no order"),
)


@pytest.mark.parametrize(("wait", "found"), WAITS)
def test_a_copy_that_does_not_wait_is_found(
    wait: str, found: str, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = textwrap.dedent(inspect.getsource(stages._hand_over))
    assert source.count(wait) == 1, "it is written otherwise"
    names: dict[str, Callable[..., None]] = {}
    code = compile(
        source.replace(wait, "pass"), inspect.getfile(stages), "exec", flags=__future__.annotations.compiler_flag
    )
    exec(code, vars(stages), names)
    monkeypatch.setattr(stages, "_hand_over", names["_hand_over"])
    packed, ids = made("mixtral", tmp_path), ids_of(0)
    with (
        pytest.raises(OrderError, match=found),
        staged_decoder(packed, RUN, [1, 3], on_device=devices_of(watch)) as decoder,
    ):
        decoder.extend(decoder.sequences[0], ids[:20])
        decoder.extend(decoder.sequences[0], ids[20:21])


KEPT = gpu_engine._ROUNDING_BYTES + gpu_engine._SHARED_PIECE_BYTES
BUDGETS, FOR_EXPERTS = (900 << 20, 700 << 20), (4 << 10, 1 << 20)


class PlainMemory:
    """A double of a GPU's memory: all but experts takes what leaves so many bytes of the budget for them."""

    def __init__(self, budget: int, expert_bytes: int) -> None:
        self._used = budget - KEPT - expert_bytes

    def used_bytes(self) -> int:
        return self._used

    def free_bytes(self) -> int:
        return 0


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of plain memory, of which the first has less space for experts than its layers need."""

    def opened(setups: Sequence[Setup], gpus: Sequence[torch.device]) -> list[OpenedGpu]:
        found = []
        for setup, budget, expert_bytes in zip(setups, BUDGETS[::-1], FOR_EXPERTS[::-1], strict=True):
            assert setup.options.budget_bytes == budget, "the first GPU has the last layers"
            request = GpuRequest(budget, setup.context_tokens, 4, "f32", setup.sequences)
            found.append(OpenedGpu(CPU, PlainMemory(budget, expert_bytes), request, setup.options.ram_bytes or 0))  # type: ignore[arg-type]  # a double
        return found

    monkeypatch.setattr(engine_module, "_devices", lambda options: [CPU, CPU])
    monkeypatch.setattr(builder, "open_gpus", opened)
    monkeypatch.setattr(builder, "memory_rates", lambda gpus: [1.0, 1.0])
    monkeypatch.setattr(HostArena, "is_layer_locked", lambda self, layer_idx: True)
    monkeypatch.setattr(HostArena, "is_locked", True)


@pytest.mark.slow
@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_keeps_its_own_budget_and_says_so(tmp_path: Path) -> None:
    packed, ids = made("mixtral", tmp_path), ids_of(0)[:6]
    options = EngineOptions(
        "cuda", BUDGETS, kernels="portable", kv_dtype="f32", draft="ngram", ram_bytes=1 << 30, misses="cpu"
    )
    with Pack(packed) as opened, Engine(opened, options, 64) as engine:
        decoder = engine.decoder
        assert isinstance(decoder, Decoder) and engine.drafts is not None
        found = torch.cat([decoder.logits([token]) for token in ids])
        facts, lines = report(engine), dict(report_lines(report(engine)))
    assert (found - expected(packed, ids)).abs().max() < TOLERANCE
    assert facts.gpu is not None and len(facts.other_gpus) == 1 and facts.fallbacks == ()
    gpus = (facts.gpu, *facts.other_gpus)
    assert [gpu.use.budget for gpu in gpus] == list(BUDGETS) and sum(gpu.num_layers for gpu in gpus) == 3
    assert all(gpu.use.spent <= gpu.use.budget for gpu in gpus)
    assert gpus[0].counts.left and not gpus[1].counts.left, "the second GPU has space for all its experts"
    assert [gpu.counts.tokens for gpu in gpus] == [6, 6]
    assert lines["GPU 0"].startswith(f"{gpus[0].num_layers} layers: 900.0 MiB, ") and "GPU 1" in lines
    assert facts.dense_bytes == sum(gpu.use.dense for gpu in gpus)
