"""The loss of rounded inputs: what is measured for a pack, what `--numerics` takes, and what a run says of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.commands import moe_run as run
from support.models import DEMO_MODEL, TinyMixtral, pack
from support.native import kernels_limited_to
from support.profiles import Recorder, random_tokens

from moe_pack.calib.evaluate import measure_numerics
from moe_pack.formats import Pack
from moe_pack.formats.pack.sidecar import write_sidecar
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.engine.numerics import NUMERICS_FILE, ModeLoss, NumericsLoss, chosen_mode, read_numerics
from moe_pack.runtime.model import Decoder

TOKENS = random_tokens(4, 64, 300)
PROMPT = ["--prompt", "It was a dark night", "--max-tokens", "4", "--temperature", "0", "--stats"]


@pytest.fixture(autouse=True)
def has_rounding() -> Iterator[None]:
    """Skips where nothing rounds; restores the threads of torch, which commands set."""
    kernels_limited_to("avx2")
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numerics")
    pack(TinyMixtral(num_layers=2, num_experts=6, vocab_size=300).write(folder / "source"), folder / "packed")
    return folder / "packed"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack(DEMO_MODEL, folder, group=64)
    return folder


def loss_of(fast: float, fastest: float) -> NumericsLoss:
    return NumericsLoss("a text", 100, "avx2", ModeLoss(fast, 1e-5), ModeLoss(fastest, 1e-5))


def predictions(opened: Pack, option: str) -> torch.Tensor:
    found = []
    with Engine(opened, EngineOptions(numerics=option), 64) as engine:  # type: ignore[arg-type]  # one of them
        assert isinstance(engine.decoder, Decoder)
        for ids in TOKENS.sequences.tolist():
            engine.decoder.reset()
            found.append(engine.decoder.logits(ids).double().log_softmax(dim=1))
    return torch.cat(found)


def test_losses_are_those_of_engines_with_each_mode(packed: Path) -> None:
    with Pack(packed) as opened:
        found = measure_numerics(opened, TOKENS, Recorder())
        assert found is not None and found.num_tokens == 256
        losses = {}
        for mode in ("fast", "fastest"):
            expected, other = predictions(opened, "exact"), predictions(opened, mode)
            losses[mode] = float((expected.exp() * (expected - other)).sum(dim=1).mean())
    assert found.fastest.half_width is not None, "there are two blocks of tokens"
    assert 0 <= found.fast.kl < 1e-6 < 1e-5 < found.fastest.kl < 0.1
    assert found.fastest.kl == pytest.approx(losses["fastest"], rel=1e-3)
    assert found.fast.kl == pytest.approx(losses["fast"], rel=0.1, abs=1e-9)


def test_auto_takes_the_fastest_mode_of_small_loss() -> None:
    cases = {None: "exact", (1e-7, 1e-4): "fastest", (1e-7, 4.95e-4): "fast", (1e-3, 1e-3): "exact"}
    for losses, mode in cases.items():
        assert chosen_mode("auto", None if losses is None else loss_of(*losses)) == mode, losses
    few = ModeLoss(0.0, None)
    assert chosen_mode("auto", NumericsLoss("a text", 100, "avx2", few, few)) == "exact", "no interval is known"
    assert chosen_mode("exact", loss_of(0, 0)) == "exact" and chosen_mode("fastest", None) == "fastest"


def test_an_engine_takes_what_was_measured_for_this_content(packed: Path) -> None:
    with Pack(packed) as opened:
        root, modes = opened.manifest.root, list[str]()
        for losses, of in ((loss_of(1e-7, 1e-4), root), (loss_of(1e-7, 1e-2), root), (loss_of(1e-7, 1e-4), "0" * 64)):
            write_sidecar(packed, NUMERICS_FILE, losses, of)
            with Engine(opened, EngineOptions(), 64) as engine:
                modes.append(engine.numerics)
        assert modes == ["fastest", "fast", "exact"] and read_numerics(opened) is None
        (packed / NUMERICS_FILE).unlink()


def test_a_run_says_its_mode_and_the_loss(demo: Path) -> None:
    with Pack(demo) as opened:
        write_sidecar(demo, NUMERICS_FILE, loss_of(2e-7, 0.002), opened.manifest.root)
    assert "fast: inputs of prompts are rounded to 16 bits, KL 2e-07 nats a token" in run(demo, *PROMPT).stderr
    assert "fastest: inputs are rounded to 8 bits, KL 0.002 nats" in run(demo, *PROMPT, "--numerics", "fastest").stderr
    (demo / NUMERICS_FILE).unlink()
    assert "of unknown loss; moe-pack eval measures it" in run(demo, *PROMPT, "--numerics", "fast").stderr
    report = json.loads(run(demo, "--bench", "--json", "--max-tokens", "2").stdout)
    assert (report["numerics"], report["numerics_kl"]) == ("exact", None)


def test_what_cannot_round_says_so(demo: Path) -> None:
    for kernels in ("portable", "torch"):
        found = run(demo, *PROMPT, "--numerics", "fast", "--kernels", kernels)
        assert found.exit_code == 0 and "--numerics is exact" in found.stderr, found.stderr
        strict = run(demo, *PROMPT, "--numerics", "fast", "--kernels", kernels, "--strict")
        assert strict.exit_code == 1 and "--strict: --numerics is exact" in strict.stderr
    assert run(demo, *PROMPT, "--numerics", "best").exit_code == 2
