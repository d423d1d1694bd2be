"""A pack from Python: the text that `moe-run` writes, the figures of `--stats`, errors of one line."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.cases import case
from support.models import PackMaker

from moe_pack.formats import Pack, PackError, RunError
from moe_pack.formats.base.errors import MoePackError
from moe_pack.runtime import EngineOptions
from moe_pack.runtime.cli.main import main
from moe_pack.runtime.loaded_model import load
from moe_pack.runtime.offload import divide_budget

PROMPT = "It was a dark night"
CONTEXT = 64


@pytest.fixture
def demo(demo_pack: PackMaker) -> Path:
    return demo_pack("up", 4)


def tight_budget(folder: Path) -> int:
    """Room for a few experts of the 32, for a context of CONTEXT tokens."""
    with Pack(folder) as pack:
        roomy = divide_budget(pack.layout, 1 << 30, CONTEXT, 0)
        page = roomy.page_bytes + roomy.head_bytes
        assert roomy.num_pages == 32, "a page an expert"
        return roomy.fixed.num_bytes + 5 * page


def written(folder: Path, *options: str) -> str:
    """The output of moe-run, without the newline at its end."""
    command = [str(folder), "--prompt", PROMPT, "-n", "24", *options]
    result = CliRunner().invoke(main, command, prog_name="moe-run")
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


@pytest.mark.parametrize("seed", [1, 5])
def test_a_seed_gives_the_text_that_moe_run_writes(seed: int, demo: Path) -> None:
    expected = written(demo, "--seed", str(seed))
    with load(demo, context_tokens=CONTEXT) as model:
        assert model.generate(PROMPT, 24, seed=seed).removesuffix("\n") == expected
    with load(demo, tight_budget(demo), context_tokens=CONTEXT) as model:
        assert model.generate(PROMPT, 24, seed=seed).removesuffix("\n") == expected


def test_temperature_and_top_p_are_those_of_moe_run(demo: Path) -> None:
    with load(demo) as model:
        greedy = model.generate(PROMPT, 24, temperature=0)
        narrow = model.generate(PROMPT, 24, temperature=1.5, top_p=0.3, seed=2)
    assert greedy.removesuffix("\n") == written(demo, "--temperature", "0")
    assert narrow.removesuffix("\n") == written(demo, "--temperature", "1.5", "--top-p", "0.3", "--seed", "2")
    assert greedy != narrow


def test_every_text_begins_without_the_last_one(demo: Path) -> None:
    with load(demo, tight_budget(demo), context_tokens=CONTEXT) as model:
        first = model.generate(PROMPT, 12, seed=3)
        other = model.generate("She was", 12, seed=3)
        assert model.generate(PROMPT, 12, seed=3) == first != other


def test_without_a_seed_every_call_differs(demo: Path) -> None:
    with load(demo) as model:
        texts = {model.generate(PROMPT, 16, temperature=2.0, top_p=1.0) for _ in range(3)}
    assert len(texts) == 3


def test_the_report_says_what_ran(demo: Path) -> None:
    budget, options = tight_budget(demo), EngineOptions(policy="corm", threads=1, draft="off")
    with load(demo, budget, context_tokens=CONTEXT, options=options) as model:
        before = model.report()
        assert before.stream is not None
        assert before.stream.decode.experts_needed == before.stream.prefill.experts_needed == 0
        num_pieces = len(list(model.stream(PROMPT, 9, temperature=0)))
        after = model.report()
    assert 0 < num_pieces <= 9
    assert after.stream is not None
    assert after.stream.policy == "corm"
    assert after.stream.plan.budget == budget
    assert after.stream.plan.num_pages < 32
    assert after.stream.decode.experts_needed == 8 * 4 * 2  # forward passes after the prompt's, layers, experts a token
    assert after.context_tokens == CONTEXT
    with load(demo) as model:
        assert model.report().stream is None


def test_a_budget_may_be_a_size_or_bytes_and_goes_before_the_options(demo: Path) -> None:
    options = EngineOptions(budget_bytes=1)  # too small for anything
    for budget in ("0.5G", "512M", 512 << 20):
        with load(str(demo), budget, context_tokens=CONTEXT, options=options) as model:
            stream = model.report().stream
            assert stream is not None
            assert stream.plan.budget == 512 << 20


def test_a_budget_that_is_no_size_is_refused(demo: Path) -> None:
    for budget in ["much", "", 0, -1]:
        with case(budget):
            with pytest.raises(RunError) as refused:
                load(demo, budget)
            assert str(refused.value) == f"budget: found {budget!r}, expected a size as '11G', '1.5G' or '800M'"


def test_a_model_that_is_closed_generates_no_more(demo: Path) -> None:
    model = load(demo, tight_budget(demo), context_tokens=CONTEXT)
    model.close()
    model.close()
    with pytest.raises(RunError, match=r"^the model is closed; load it again$"):
        model.stream(PROMPT)


def test_what_cannot_run_is_refused_before_the_first_token(demo: Path, tmp_path: Path) -> None:
    with load(demo, context_tokens=8) as model:
        with pytest.raises(RunError, match=r"has \d+ tokens, and this model's context is 8"):
            model.stream(PROMPT * 3)
        assert model.generate("She", 2, seed=0), "a refusal leaves the model as it was"
    with pytest.raises(MoePackError, match="no such folder"):
        load(tmp_path / "none")
    with pytest.raises(RunError, match="the model needs at least"):
        load(demo, "1M")


def test_a_damaged_expert_ends_the_text_and_names_its_file(demo: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "packed"
    damaged.mkdir()
    for path in demo.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    with Pack(demo) as pack:
        file = damaged / pack.manifest.expert_files[2].name
        places = [pack.layout.offsets[2][expert] for expert in range(8)]
    held = bytearray(file.read_bytes())
    for place in places:
        held[place] ^= 1
    file.write_bytes(held)
    with load(damaged, tight_budget(demo), context_tokens=CONTEXT) as model, pytest.raises(PackError, match=file.name):
        model.generate(PROMPT, 4, seed=0)
