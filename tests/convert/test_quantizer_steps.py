"""The parts of two benchmarks: the quantizer's steps, and calibrating on one kind of text and judging on another."""

import json
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from comparators import stored_bytes
from expert_quantizers import STEPS
from judge import Judge
from memory_weights import MatrixQuantizer
from models import BOOK, DEMO_MODEL, TinyMixtral
from planned import foretold, single
from profiles import profiled, random_tokens
from python_text import python_documents, write_python_text
from quantizer_steps import allowed_formats, combinations, planned
from two_texts import WIDTHS, Kind, Texts, measure, read_kinds

from moe_pack.calib import Profile, ProfileOptions
from moe_pack.formats import BF16, Checkpoint, PartFormat, format_text, part_format
from moe_pack.runtime import CheckpointWeights, Decoder, FolderFiles, Text

MODEL = TinyMixtral(128, 64, num_layers=2, num_experts=4, config={"max_position_embeddings": 512})
NOVEL, MANUAL = (Kind(random_tokens(2, 512, 96, seed), random_tokens(1, 512, 96, seed + 1)) for seed in (0, 5))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("steps") / "model")


@pytest.fixture(scope="module")
def profile(model: Path) -> Profile:
    return profiled(model, model.parent / "profile", NOVEL.calibration, ProfileOptions("fast"))


def test_steps_stand_alone_and_one_after_the_other() -> None:
    found = combinations()
    assert found[0] == () and found[-1] == STEPS
    assert found[1 : len(STEPS) + 1] == [(step,) for step in STEPS]
    assert len(set(found)) == len(found)


def test_steps_allow_the_formats_that_they_add() -> None:
    shapes = list(product((2, 3), (0, 32, 64), (8, 16)))
    affine = tuple(part_format(*shape) for shape in shapes)
    trellises = tuple(PartFormat("trellis", width + 1, group, bits) for width, group, bits in shapes)
    every = (*affine, *trellises, BF16)

    def names(*steps: str) -> list[str]:
        return [format_text(part) for part in allowed_formats(every, frozenset(steps))]

    assert names() == names("knapsack") == ["2 bit g64", "3 bit g64"]
    assert names("codebook") == ["2 bit g64", "3 bit g64", "1.5 bit trellis row", "2 bit trellis row"]
    assert names("scales") == [format_text(part) for part in affine]
    assert names("scales", "codebook") == [format_text(part) for part in (*affine, *trellises)]


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_combination_of_steps_keeps_within_the_bytes_of_hqq(profile: Profile, width: int) -> None:
    spec, hqq = profile.spec, single(profile.spec, part_format(width, 64), "hqq")
    max_bytes, losses = stored_bytes(spec, hqq), foretold(profile, "hqq")
    assert planned(profile, spec, max_bytes, frozenset()) == hqq
    for steps in combinations():
        plan = planned(profile, spec, max_bytes, frozenset(steps))
        assert stored_bytes(spec, plan) <= max_bytes
        formats = {part for layer in plan.experts for e in layer for part in (e.gate, e.up, e.down) if part is not None}
        assert formats <= set(allowed_formats(tuple(losses), frozenset(steps)))
        if "knapsack" not in steps:
            assert len(formats) == 1 and losses[formats.pop()] <= losses[part_format(width, 64)]


def test_the_quantizer_that_is_judged_is_the_one_given(model: Path) -> None:
    checkpoint = Checkpoint(model)
    texts = Texts(checkpoint, {"novels": NOVEL, "python": MANUAL})
    hqq, absmax = texts.hqq(4), texts.ours(4, MatrixQuantizer("absmax"))
    assert list(hqq) == list(absmax) == ["novels", "python"]
    for name in hqq:
        assert hqq[name].shape == (4,)
        assert absmax[name].mean() > 1.2 * hqq[name].mean() > 0
    source = Decoder(CheckpointWeights(checkpoint), 512)
    assert Judge(source, MANUAL.valid).blocks(source) == pytest.approx(0.0, abs=1e-6)
    assert not np.allclose(hqq["novels"], hqq["python"]), "each is judged on a text of its own"


@pytest.mark.slow
def test_every_pair_of_texts_is_measured_at_every_width(model: Path, tmp_path: Path) -> None:
    rows = list(measure(Checkpoint(model), {"novels": NOVEL, "python": MANUAL}, tmp_path))
    names = ("novels", "python")
    assert {(row.calibrated_on, row.judged_on, row.width) for row in rows} == set(product(names, names, WIDTHS))
    assert len(rows) == 12
    hqq = {(row.judged_on, row.width): row.hqq for row in rows}
    assert all(row.hqq == hqq[row.judged_on, row.width] for row in rows), "HQQ sees no text"
    assert hqq["novels", 2] > hqq["novels", 3] > hqq["novels", 4] > 0


@pytest.mark.slow
def test_documents_of_python_are_its_reference_and_its_docstrings() -> None:
    documents = python_documents()
    assert documents == python_documents(), "always the same"
    assert len(documents) > 100
    assert any(json.dumps.__doc__ and json.dumps.__doc__.split("\n")[0] in text for text in documents)
    if find_spec("pydoc_data.topics"):
        assert sum('assert_stmt ::= "assert" expression' in text for text in documents) == 1, "two topics have it"


@pytest.mark.slow
def test_no_paragraph_is_in_both_parts(tmp_path: Path) -> None:
    calibration, valid = (
        [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]
        for path in write_python_text(tmp_path)
    )
    assert len(valid) == (len(calibration) + len(valid)) // 3 > 30
    found, judged = (
        {paragraph.strip() for text in texts for paragraph in text.split("\n\n") if len(paragraph) > 40}
        for texts in (calibration, valid)
    )
    assert len(found) > 1000 and len(judged) > 500
    assert not found & judged


@pytest.mark.slow
def test_both_kinds_have_the_tokens_to_calibrate_on_and_others_to_judge_on(tmp_path: Path) -> None:
    kinds = read_kinds(Text(FolderFiles(DEMO_MODEL)), BOOK, 32768, 16384, tmp_path)
    for kind in kinds.values():
        assert (kind.calibration.sequences.size, kind.valid.sequences.size) == (32768, 16384)
        assert not set(map(bytes, kind.calibration.sequences)) & set(map(bytes, kind.valid.sequences))
