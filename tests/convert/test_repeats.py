"""Repeated neurons: those that decide an expert's outputs have a second row, from the quantizer to the logits."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.commands import done
from support.commands import moe_pack as run
from support.gpu_runs import IDS, TOLERANCE, GpuRun, gpu_logits, reference_logits
from support.killing import different_files, files_in
from support.models import Tensors, TinyMixtral
from support.profiles import profiled, random_tokens
from support.reseal import JsonObject, edit_array, refusal, reseal
from support.second_reader import BadPackError, SecondReader

from moe_pack.calib import quantize
from moe_pack.calib.evaluate import ThresholdRule
from moe_pack.calib.evaluate.thresholds import measure_thresholds
from moe_pack.calib.profile import Profile
from moe_pack.convert import compare_weights
from moe_pack.convert.account import Preparation
from moe_pack.convert.pipeline import convert
from moe_pack.formats import (
    BF16,
    MATRICES,
    ROW_GROUP,
    ExpertFormat,
    Pack,
    PartFormat,
    Plan,
    PlanError,
    part_format,
    trellis_format,
    uniform_plan,
)
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.formats.pack.writer import Step
from moe_pack.formats.parts.specs import num_parameters, with_repeats
from moe_pack.runtime.model import Decoder, NeuronBlock, PackWeights, activations, operations_for

pytestmark = pytest.mark.slow

D, F, E, REPEATS = 64, 1088, 2, 34  # more neurons than are rounded at once
MODEL = TinyMixtral(D, F, num_layers=2, vocab_size=96)
TWO, TRELLIS, EIGHT = part_format(2, 64), trellis_format(4, ROW_GROUP), part_format(8, 64)
CPU, LOUD = torch.device("cpu"), (5, 700, 1060)  # neurons with large rows of down


def with_loud_neurons(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if ".w2." in name:
            tensor[:, list(LOUD)] *= 30


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("repeats") / "source", with_loud_neurons)


@pytest.fixture(scope="module")
def profile(source: Path) -> Profile:
    return profiled(source, source.parent / "profile", random_tokens(6, 32, 96))


def plan_of(checkpoint: Checkpoint, repeats: int, down: PartFormat = TRELLIS) -> Plan:
    plan = uniform_plan(with_repeats(checkpoint.spec, repeats), "up", TWO, down, None, "calibrated")
    wide = (ExpertFormat(EIGHT, EIGHT, EIGHT), ExpertFormat(TWO, BF16, EIGHT))  # not calibrated, and partly
    return dataclasses.replace(plan, experts=(plan.experts[0], wide))


def packed(
    source: Path,
    folder: Path,
    profile: Profile,
    repeats: int = REPEATS,
    workers: int = 2,
    on_step: Callable[[Step], None] = lambda step: None,
    is_rotated: bool = False,
) -> Path:
    checkpoint = Checkpoint(source)
    try:
        order = np.stack([np.random.default_rng(e).permutation(F).astype(np.uint32) for e in range(2 * E)])
        convert(
            checkpoint,
            plan_of(checkpoint, repeats),
            folder,
            workers,
            on_step=on_step,
            prepared=Preparation(
                order=order.reshape(2, E, F),
                calibration=profile,
                rotation=quantize.rotation_vectors(checkpoint.spec, "on") if is_rotated else None,
            ),
        )
    finally:
        checkpoint.close()
    return folder


@pytest.fixture(scope="module")
def pack_folder(source: Path, profile: Profile) -> Path:
    return packed(source, source.parent / "pack", profile)


def logits(folder: Path) -> torch.Tensor:
    with Pack(folder) as pack:
        return Decoder(PackWeights(pack, CPU), 24).logits(list(range(24)))


def test_loud_neurons_are_repeated_and_stand_behind_themselves(pack_folder: Path) -> None:
    with Pack(pack_folder) as pack:
        assert (pack.spec.expert.repeats, pack.spec.expert.intermediate_size) == (REPEATS, F + REPEATS)
        assert "repeated" in pack.manifest.features
        order = pack.read_order()
        for expert in range(E):
            rows = order[0, expert].astype(np.int64)
            again = rows[1:][rows[1:] == rows[:-1]]
            assert len(again) == REPEATS == len(np.unique(again))
            assert set(LOUD) <= set(again.tolist())


def test_rows_of_a_neuron_have_the_same_gate_and_up_and_add_up_to_its_down(
    source: Path, profile: Profile, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(source)
    for is_rotated in (False, True):
        with case(is_rotated), Pack(packed(source, tmp_path / str(is_rotated), profile, is_rotated=is_rotated)) as pack:
            weights, order = PackWeights(pack, CPU), pack.read_order().astype(np.int64)
            for layer, e in np.ndindex(2, E):
                blocks = list(weights.expert(layer, e).blocks())
                rows, (up, down) = order[layer, e], (torch.cat([getattr(b, m) for b in blocks]) for m in ("up", "down"))
                gate = torch.cat([block.gate for block in blocks if block.gate is not None])
                again = np.flatnonzero(rows[1:] == rows[:-1]) + 1
                assert torch.equal(gate[again], gate[again - 1]) and torch.equal(up[again], up[again - 1])
                if layer == 0:  # calibrated: what is added is what the first row lost
                    assert down[again].square().sum() < 0.5 * down[again - 1].square().sum()
                else:  # 8 bits: any neurons, with zeros
                    assert layer and (e or not down[again].any())
            compare_weights(pack, checkpoint)
    checkpoint.close()


def test_down_of_repeated_neurons_has_twice_the_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    gate, up, down = (torch.randn((96, D), generator=generator) / 8 for _ in range(3))
    down[[7, 40]] *= 20
    block, x = NeuronBlock(gate, up, down), torch.randn((400, D), generator=generator)
    calibration = quantize.Calibration(quantize.ExpertTokens(x, torch.ones(400)), "silu")
    for part in (TRELLIS, TWO):
        with case(part):
            quantizer = quantize.ExpertQuantizer(ExpertFormat(part, part, part), calibration, D)
            once = decode_part(part, D, quantizer.rows("down", block))
            twice = decode_part(part, D, quantizer.rows("down", block, repeats=2))
            assert quantizer.repeated == [7, 40] and len(twice) == 98
            left = (twice[[7, 40]] + twice[96:] - down[[7, 40]]).square().sum()
            assert left < 0.25 * (once[[7, 40]] - down[[7, 40]]).square().sum()
            h = activations(x, block, "silu").h
            lost = [
                float((h @ (down - d)).square().sum())
                for d in (once, twice[:96].index_add(0, torch.tensor([7, 40]), twice[96:]))
            ]
            assert lost[1] < 0.5 * lost[0]


def test_the_neurons_with_the_largest_mean_outputs_are_repeated() -> None:
    generator = torch.Generator().manual_seed(4)
    gate, up, down = (torch.randn((64, D), generator=generator) / 8 for _ in range(3))
    x, weights = torch.randn((500, D), generator=generator), torch.rand(500, generator=generator)
    gate[11] = up[11] = x[0] / x[0].norm() * 12  # the first token alone makes it large
    block = NeuronBlock(gate, up, down)
    for tokens in (quantize.ExpertTokens(x, weights), quantize.ExpertTokens(x, torch.zeros(500))):
        with case(bool(tokens.weights.any())):
            rows = quantize.Calibration(tokens, "silu").down(block)
            h = activations(x, block, "silu").h if tokens.weights.any() else torch.ones((500, 64))
            lost = (
                torch.where(tokens.weights.any(), tokens.weights, torch.ones(500)) @ h.square()
            ) * down.square().sum(1)
            for number in (0, 1, 5, 64):
                assert rows.repeated(number) == sorted(lost.argsort(descending=True)[:number].tolist())


def test_plain_rounding_repeats_neurons_too() -> None:
    for part in (TRELLIS, TWO):
        with case(part):
            generator = torch.Generator().manual_seed(5)
            gate, up, down = (torch.randn((64, D), generator=generator) / 8 for _ in range(3))
            x = torch.randn((160, 3), generator=generator) @ torch.randn((3, D), generator=generator)
            judging = torch.randn((20, D), generator=generator)  # directions that those that calibrate do not have
            x[7::8] = judging
            quantizer = quantize.GuardedQuantizer(
                ExpertFormat(BF16, BF16, part), quantize.ExpertTokens(x, torch.ones(160)), "silu"
            )
            block = NeuronBlock(gate, up, down)
            rows = {m: quantizer.rows(m, block, 6 if m == "down" else 0) for m in MATRICES}
            quantizer.judge(block, rows)
            loss, again = quantizer.loss(), quantizer.repeated
            assert loss is not None and loss.plain_down == 1, "the case is one in which plain rounding wins"
            stored = decode_part(part, D, rows["down"])
            lost = (down - stored[:64]).square().sum(dim=1)
            left = (down[again] - stored[again] - stored[64:]).square().sum(dim=1)
            assert left.sum() < 0.25 * lost[again].sum()
            gate, up = (decode_part(BF16, D, rows[m]) for m in ("gate", "up"))
            y = activations(judging, block, "silu").h @ down
            kept = torch.cat((torch.arange(64), torch.tensor(again)))
            z = activations(judging, NeuronBlock(gate[kept], up[kept], stored), "silu").h @ stored
            assert loss.relative_error == pytest.approx(float((y - z).square().sum() / y.square().sum()), rel=2e-3)


def test_every_piece_of_an_expert_repeats_its_share() -> None:
    for repeats, f in ((0, 100), (7, 1000), (112, 14336), (5, 3000), (1000, 1000)):
        with case(repeats, f):
            shares = [quantize.repeats_between(repeats, f, a, min(a + 1024, f)) for a in range(0, f, 1024)]
            assert sum(shares) == repeats
            assert all(share <= min(1024, f - 1024 * n) for n, share in enumerate(shares))


def test_both_readers_and_any_sparsity_agree(pack_folder: Path, source: Path, profile: Profile, tmp_path: Path) -> None:
    second = SecondReader(pack_folder)
    with Pack(pack_folder) as pack:
        weights, order = PackWeights(pack, CPU), torch.from_numpy(pack.read_order().astype(np.int64))
        for layer, e in np.ndindex(2, E):
            down = torch.cat([block.down for block in weights.expert(layer, e).blocks()])
            summed = torch.zeros((F, D)).index_add_(0, order[layer, e], down)
            torch.testing.assert_close(torch.from_numpy(second.expert(layer, e)["down"]), summed, rtol=0, atol=1e-6)
    sparse = packed(source, tmp_path / "sparse", profile)
    with Pack(sparse) as pack:
        measure_thresholds(pack, profile.tokens(), ThresholdRule(sparsity=0.8))
    assert torch.isfinite(logits(sparse)).all()


def test_every_engine_gives_the_logits_of_plain_torch(pack_folder: Path) -> None:
    ids = IDS[:1]
    expected = reference_logits(pack_folder, ids)
    with operations_for(CPU) as operations, Pack(pack_folder) as pack:
        found = {"native": Decoder(PackWeights(pack, CPU, operations), 8).logits(ids)}
    found["gpu"] = gpu_logits(pack_folder, GpuRun(0.4), ids, 1)
    for name, logits in found.items():
        with case(name):
            assert (logits - expected).abs().max() < TOLERANCE


def test_a_killed_conversion_and_any_workers_give_the_same_pack(
    source: Path, profile: Profile, pack_folder: Path, tmp_path: Path
) -> None:
    def stop(step: Step) -> None:
        if step.number == number:
            raise KeyboardInterrupt

    for number in (12, 31, 40):
        with case(number):
            with pytest.raises(KeyboardInterrupt):
                packed(source, tmp_path / "killed", profile, on_step=stop, workers=1)
            number = -1
    packed(source, tmp_path / "killed", profile, workers=1)
    assert different_files(files_in(pack_folder), files_in(tmp_path / "killed")) == []


def test_an_earlier_pack_gives_its_experts_with_their_second_rows(
    source: Path, profile: Profile, pack_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(source)
    with Pack(pack_folder) as pack:
        orders = [pack.read_order()[place] for place in np.ndindex(2, E)]
    order = np.stack([rows[np.append(True, rows[1:] != rows[:-1])] for rows in orders]).reshape(2, E, F)
    monkeypatch.setattr("moe_pack.convert.encoding.made_item", lambda *_: pytest.fail("an item is made again"))
    convert(
        checkpoint,
        plan_of(checkpoint, REPEATS),
        tmp_path / "copied",
        1,
        prepared=Preparation(order=order, calibration=profile),
        earlier=pack_folder,
    )
    checkpoint.close()
    assert different_files(files_in(pack_folder), files_in(tmp_path / "copied")) == []


# --- what is refused


def test_repeats_that_make_no_pack_are_refused(source: Path) -> None:
    checkpoint = Checkpoint(source)
    plan = plan_of(checkpoint, REPEATS)
    kept = ExpertFormat(BF16, BF16, PartFormat("fp8", 8, 128, 32))
    cases = [
        (dataclasses.replace(plan, repeats=F + 1), f"repeats is {F + 1}, expected 0 to {F}"),
        (dataclasses.replace(plan, repeats=-1), "repeats is -1"),
        (dataclasses.replace(plan, quantizer="nearest"), "nearest does not know which neurons to repeat"),
        (dataclasses.replace(plan, experts=((kept, kept), (kept, kept))), "down keeps the checkpoint's codes"),
    ]
    for wrong, message in cases:
        with case(message), pytest.raises(PlanError, match=message):
            pack_layout(checkpoint.spec, wrong, [])
    checkpoint.close()


def test_a_pack_whose_repeats_do_not_fit_is_refused(
    source: Path, profile: Profile, pack_folder: Path, tmp_path: Path
) -> None:
    def sealed(name: str, before: Callable[[JsonObject], object], edit: Callable[[Path], object]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for path in files_in(pack_folder):
            (folder / path).write_bytes((pack_folder / path).read_bytes())
        edit(folder)
        reseal(folder, before)
        return folder

    def expert(values: JsonObject) -> JsonObject:
        found: JsonObject = values["model"]["expert"]
        return found

    def thrice(folder: Path) -> None:
        def edit(order: "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]") -> None:
            rows = order[1, 1]
            first = int(np.flatnonzero(rows[1:] == rows[:-1])[0])
            other = int(np.flatnonzero(rows[1:] == rows[:-1])[1])
            rows[other] = rows[first]

        edit_array(folder / "order.safetensors", "order", edit)

    cases: list[tuple[str, Callable[[JsonObject], object], Callable[[Path], object], str]] = [
        ("no feature", lambda values: values["features"].remove("repeated"), lambda folder: None,
         "manifest.json: feature 'repeated' and repeats of experts must be present together"),
        ("no repeats", lambda values: expert(values).pop("repeats"), lambda folder: None,
         "manifest.json: feature 'repeated' and repeats of experts must be present together"),
        ("too many", lambda values: expert(values).update(repeats=(F + REPEATS) // 2 + 1), lambda folder: None,
         f"manifest.json: model: expert repeats is {(F + REPEATS) // 2 + 1}, expected 0 to half of the "
         f"{F + REPEATS} rows"),
        ("thrice", lambda values: None, thrice,
         f"order.safetensors: order of layer 1 expert 1 is not a permutation of {F} neurons, {REPEATS} of them "
         "twice"),
    ]  # fmt: skip
    for name, before, edit, message in cases:
        with case(name):
            folder = sealed(name, before, edit)
            assert refusal(folder) == message
            with pytest.raises(BadPackError):
                SecondReader(folder)
    sound = sealed("sound", lambda values: None, lambda folder: None)
    SecondReader(sound)
    assert torch.equal(logits(sound), logits(pack_folder))


# --- the command


def test_the_command_repeats_1_of_128_neurons_unless_told_otherwise(
    source: Path, profile: Profile, tmp_path: Path
) -> None:
    common = ("convert", source, "--profile", profile.folder, "--selector-bits", 2, "--record-bits")
    for name, options, expected in (("usual", (2,), F // 128), ("none", (2, "--repeats", 0), 0), ("wide", (8,), 0)):
        with case(name):
            result = done(*common, *options, "-o", tmp_path / name)
            with Pack(tmp_path / name) as pack:
                assert pack.spec.expert.repeats == expected
                assert num_parameters(pack.spec) == num_parameters(with_repeats(pack.spec, 0))
    shown = run("inspect", tmp_path / "usual")
    assert f"intermediate {F} and {F // 128} stored twice" in shown.output
    for options, message in (
        ((8, "--repeats", 3), "--repeats 3: only calibrated codes"),
        ((2, "--repeats", F + 1), f"--repeats {F + 1}: an expert has {F} neurons"),
    ):
        with case(message):
            result = run(*common, *options, "-o", tmp_path / "refused")
            assert result.exit_code == 1 and message in result.output
