"""Passes of several rows under the interpreter: tokens of several sequences, and drafts, against plain torch.

The order checker looks at all of them (`conftest`): nothing in a graph makes the host wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support.cases import case
from support.gpu_runs import CPU, TOLERANCE, GpuRun, gpu_decoder

from moe_pack.formats import Pack
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import read_spec
from moe_pack.runtime.engine.options import cpu_only
from moe_pack.runtime.gpu.token import fused
from moe_pack.runtime.model import Decoder, PackWeights

if TYPE_CHECKING:
    from pathlib import Path

    from support.families import Tiny

    from moe_pack.runtime.gpu.token.decoder import GpuDecoder
    from moe_pack.runtime.model.caches import KvDtype


pytestmark = pytest.mark.usefixtures("few_programs")
RUN = GpuRun(1.0, num_sequences=3, num_rows=8)


def ids_of(number: int, length: int = 24) -> list[int]:
    """The text of a sequence; texts differ."""
    return [(37 * i + 11 * number + 5) % 96 for i in range(length)]


def made(name: str, folder: Path, **changes: object) -> Path:
    """A pack of a tiny model of this name."""
    from support.families import TINY, Tiny, write  # which imports transformers
    from support.models import pack

    (tiny,) = (tiny for tiny in TINY if str(tiny) == name)
    source = write(Tiny(tiny.family, tiny.name, tiny.config | changes), folder / "source")
    pack(source, folder / "packed", selector="none", width=16)
    return folder / "packed"


def expected(packed: Path, ids: list[int], cache_dtype: KvDtype) -> torch.Tensor:
    with Pack(packed) as pack:
        return Decoder(PackWeights(pack, CPU), 64, cache_dtype=cache_dtype).logits(ids)


class Rows:
    """Runs passes of several rows, and notes each row's logits with its sequence and position."""

    def __init__(self, decoder: GpuDecoder) -> None:
        self._decoder, self.found = decoder, list[tuple[int, int, torch.Tensor]]()

    def _note(self, number: int, logits: torch.Tensor) -> None:
        self.found.append((number, self._decoder.sequences[number].num_tokens - 1, logits.clone()))

    def prompt(self, number: int, length: int) -> None:
        self._note(number, self._decoder.extend(self._decoder.sequences[number], ids_of(number)[:length]))

    def together(self, *numbers: int) -> None:
        """Appends a token to each of these sequences."""
        sequences = [self._decoder.sequences[number] for number in numbers]
        tokens = [ids_of(n)[sequence.num_tokens] for n, sequence in zip(numbers, sequences, strict=True)]
        for number, logits in zip(numbers, self._decoder.extend_each(sequences, tokens), strict=True):
            self._note(number, logits)

    def draft(self, number: int, length: int, kept: int) -> None:
        """Verifies tokens of which only the first are right, and keeps these."""
        sequence, text = self._decoder.sequences[number], ids_of(number)
        before = sequence.num_tokens
        drafts = [*text[before : before + kept], *(95 - token for token in text[before + kept : before + length])]
        logits = self._decoder.verify(sequence, drafts)
        self.found += [(number, before + place, logits[place].clone()) for place in range(kept)]
        self._decoder.keep(sequence, before + kept)


def run_rows(decoder: GpuDecoder, is_short: bool) -> list[tuple[int, int, torch.Tensor]]:
    """Logits of passes of 1 to 8 rows, or to 4: sequences go on together, one leaves, and drafts are wrong in part."""
    rows = Rows(decoder)
    rows.prompt(0, 5)
    rows.prompt(1, 1)
    rows.together(0, 1)
    if not is_short:
        rows.prompt(2, 3)
        rows.together(0, 1, 2)
        rows.draft(0, 8, 2)
    rows.draft(1, 4, 1)
    rows.together(0, 1)
    return rows.found


def check(packed: Path, run: GpuRun = RUN, is_short: bool = False) -> None:
    """Compares all rows with those of a sequence alone in plain torch."""
    reference = [expected(packed, ids_of(number), run.cache_dtype) for number in range(3)]
    with gpu_decoder(packed, run) as decoder:
        for number, position, logits in run_rows(decoder, is_short):
            difference = (logits - reference[number][position]).abs().max()
            assert difference < TOLERANCE, f"sequence {number}, position {position}: {difference}"


# Hybrid layers with gated attention and a state; latent attention and groups; sinks, a window, biases.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v2", "gpt_oss"])
def test_rows_are_those_of_each_sequence_alone(family: str, tmp_path: Path) -> None:
    check(made(f"{family}: as it comes", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("deepseek_v2", "q8"), ("deepseek_v32", "q8"), ("deepseek_v2", "q4")])
def test_latents_and_keys_of_indexers_may_be_codes(family: str, dtype: KvDtype, tmp_path: Path) -> None:
    check(made(f"{family}: as it comes", tmp_path), replace(RUN, cache_dtype=dtype), is_short=True)


@pytest.mark.slow
@pytest.mark.parametrize(("misses", "share"), [("pull", 0.3), ("split", 0.3), ("disk", 0.3)])
def test_rows_with_missing_records_are_those_of_each_sequence_alone(misses: str, share: float, tmp_path: Path) -> None:
    check(made("mixtral: as it comes", tmp_path), replace(RUN, misses=misses, share=share))


def test_a_row_has_the_bits_that_it_has_alone(tmp_path: Path) -> None:
    packed, ids = made("qwen3_next: as it comes", tmp_path), ids_of(0)
    with gpu_decoder(packed, RUN) as decoder:
        decoder.launch_all()  # leaves no trace
        first, other, twin = decoder.sequences
        for sequence, number in ((first, 0), (other, 1), (twin, 0)):
            decoder.extend(sequence, ids_of(number)[:3])
        together = decoder.extend_each([first, other], [ids[3], ids_of(1)[3]])[0].clone()
        assert torch.equal(together, decoder.extend(twin, [ids[3]]))
        drafts = decoder.verify(first, ids[4:8]).clone()
        for place, token in enumerate(ids[4:8]):
            assert torch.equal(drafts[place], decoder.extend(twin, [token]))


@pytest.mark.slow
def test_parts_in_kernels_are_those_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ENABLED", False)
    check(made("mixtral: as it comes", tmp_path), is_short=True)


def is_run_by_gpus(tiny: Tiny, folder: Path) -> bool:
    """Whether the GPU's engine runs models of this shape; others it refuses by name."""
    from support.families import write_config

    folder.mkdir()
    return cpu_only(read_spec(Config(write_config(tiny, folder), "config.json"))[1]) is None


SHARES = 6  # of the families, a test each


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_rows_of_every_family_are_those_of_each_sequence_alone(share: int, tmp_path: Path) -> None:
    from support.families import TINY

    shapes = [tiny for tiny in TINY if tiny.name == "as it comes"][share::SHARES]
    for tiny in shapes:
        if is_run_by_gpus(tiny, tmp_path / tiny.family):
            with case(str(tiny)):
                check(made(str(tiny), tmp_path / f"made {tiny.family}"), is_short=True)
