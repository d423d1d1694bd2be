"""What only a card can show: the engines' answers there, what they take of it and wait for, memory that it reads."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch
from cards import graph_decoder
from gpt_oss_pack import CHUNK, packed_gpt_oss
from models import DEMO_MODEL, pack
from torch import Tensor

from moe_pack.formats import Pack, RunError, Selector, rewrite_thresholds
from moe_pack.runtime import Decoder, Engine, EngineOptions, PackWeights, activations
from moe_pack.runtime.card_cache import CardCache
from moe_pack.runtime.card_placement import least_placement
from moe_pack.runtime.host_arena import HostArena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

CPU, CARD = torch.device("cpu"), torch.device("cuda")
IDS = [1, 540, 33, 7, 2048, 19, 4095, 600, 600, 3, 77, 1000]
NUM_PROMPT = 6
CONTEXT = 64
# Logits of the demo model reach 20; float32 sums in another order move them by about 1e-5.
TOLERANCE = 1e-4
MAX_KL = 1e-2  # nats a token, of keys and values in bfloat16: 3e-3 under the interpreter, which cuts off
SHARES = (0.0, 0.3, 1.0)  # of all experts' bytes, that there is room for beyond what a token needs
KINDS: list[tuple[Selector, float]] = [("up", 0.0), ("up", 0.8), ("both", 0.0), ("both", 0.8)]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Selector, float], Path]:
    """The demo model at 4 bit, by selector and share of neurons that do not run; not to be changed."""
    folder, made = tmp_path_factory.mktemp("on-gpu"), {}
    for selector in ("up", "both"):
        made[selector, 0.0] = folder / selector
        pack(DEMO_MODEL, folder / selector, selector=selector, group=64)
        made[selector, 0.8] = folder / f"{selector}-sparse"
        shutil.copytree(folder / selector, made[selector, 0.8])
        _make_sparse(made[selector, 0.8], 0.8)
    return made


def _make_sparse(folder: Path, sparsity: float) -> None:
    with Pack(folder) as held:
        weights, spec = PackWeights(held, CPU), held.spec
        x = torch.randn(64, spec.hidden_size, generator=torch.Generator().manual_seed(0))
        thresholds = torch.empty(held.thresholds.shape)
        for l, e in product(*map(range, held.thresholds.shape)):
            found = [
                activations(x, block, spec.expert.function).of(weights.selector)
                for block in weights.expert(l, e).blocks()
            ]
            thresholds[l, e] = torch.cat(found, dim=1).abs().quantile(sparsity)
    rewrite_thresholds(folder, thresholds.numpy())


@pytest.fixture(scope="module")
def reference(packs: dict[tuple[Selector, float], Path]) -> dict[tuple[Selector, float], Tensor]:
    """Plain torch's logits on the CPU."""
    found = {}
    for kind, folder in packs.items():
        with Pack(folder) as held:
            found[kind] = answers(Decoder(PackWeights(held, CPU), CONTEXT))
    return found


def answers(decoder: Decoder) -> Tensor:
    """The logits of a prompt, and after each of the tokens that follow it; on the host."""
    decoder.reset()
    found = [decoder.logits(IDS[:NUM_PROMPT]).cpu()]
    return torch.cat([*found, *(decoder.logits([token]).cpu() for token in IDS[NUM_PROMPT:])])


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE), float((found - expected).abs().max())


@contextmanager
def engine(folder: Path, share: float | None = None, **options: object) -> Iterator[Engine]:
    """An engine inside a budget with room for that share of all experts beyond the least; None: without a budget."""
    wished: dict[str, object] = {"device": "cuda", "engine": "graph", "kv_dtype": "f32"} | options
    torch.zeros(1, device="cuda")  # all engines count what is in use alike, the first one too
    with Pack(folder) as held:
        if share is not None:
            wished["budget_bytes"] = _budget(held, wished, share)
        with Engine(held, EngineOptions(**wished), CONTEXT) as opened:  # type: ignore[arg-type]  # by name
            yield opened
    torch.cuda.empty_cache()


def _budget(held: Pack, wished: dict[str, object], share: float) -> int:
    """The least budget that is taken, to a piece of the driver's, and a share of all experts more."""
    with Engine(held, EngineOptions(**wished), CONTEXT) as unbounded:  # type: ignore[arg-type]  # by name
        use = unbounded.use
    assert use is not None
    for more in range(0, 64 << 20, 2 << 20):
        torch.cuda.empty_cache()
        budget = use.spent - use.experts + more
        try:
            Engine(held, EngineOptions(**wished | {"budget_bytes": budget}), CONTEXT).close()  # type: ignore[arg-type]
        except RunError:
            continue
        torch.cuda.empty_cache()
        return budget + round(share * use.experts)
    raise AssertionError("64 MiB beside what all but experts takes are enough for the demo model")


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("selector", "sparsity"), KINDS)
def test_the_graph_engine_answers_as_plain_torch_does_on_the_cpu(
    selector: Selector,
    sparsity: float,
    share: float,
    packs: dict[tuple[Selector, float], Path],
    reference: dict[tuple[Selector, float], Tensor],
) -> None:
    with graph_decoder(packs[selector, sparsity], share, CONTEXT, device=CARD) as decoder:
        for _ in range(2):  # once while experts come, once more with what has stayed
            assert_near(answers(decoder), reference[selector, sparsity])
        counts = decoder.counts()
        assert (counts.rows > 0) == (share < 1), "rows are pulled where there is no room for all"


@pytest.mark.parametrize("share", SHARES)
def test_a_replayed_graph_gives_the_bits_of_launches_one_by_one(
    share: float, packs: dict[tuple[Selector, float], Path]
) -> None:
    with graph_decoder(packs["up", 0.8], share, CONTEXT, device=CARD) as decoder:
        replayed = answers(decoder)
        decoder._run = decoder._launch
        assert torch.equal(answers(decoder), replayed)


def test_answers_do_not_depend_on_what_has_room(packs: dict[tuple[Selector, float], Path]) -> None:
    found = []
    for share in SHARES:
        with graph_decoder(packs["both", 0.8], share, CONTEXT, device=CARD) as decoder:
            found.append(answers(decoder))
    assert all(torch.equal(each, found[0]) for each in found)


@contextmanager
def without_waits() -> Iterator[None]:
    """Torch refuses whatever makes the host wait for a stream; waiting for an event is not told of."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("share", SHARES)
def test_a_token_takes_no_memory_and_the_host_waits_for_its_logits_alone(
    share: float, packs: dict[tuple[Selector, float], Path]
) -> None:
    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    with graph_decoder(packs["up", 0.8], share, CONTEXT, device=CARD) as decoder:
        decoder.next_logits(IDS[:NUM_PROMPT])
        before = allocations()
        with without_waits():
            for token in IDS[NUM_PROMPT:]:
                decoder.next_logits([token])
            with pytest.raises(RuntimeError, match="synchronizing"):
                torch.cuda.current_stream().synchronize()
        assert allocations() == before


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["graph", "staged"])
def test_the_drivers_figure_stays_within_the_budget(
    name: str, share: float, packs: dict[tuple[Selector, float], Path]
) -> None:
    with engine(packs["up", 0.0], share, engine=name) as opened:
        memory, use = opened.card_memory, opened.use
        assert memory is not None and use is not None
        used = [memory.used_bytes()]
        for _ in range(2):
            opened.decoder.reset()
            # As much as there will ever be: the whole context at once, then token by token.
            opened.decoder.next_logits((IDS * CONTEXT)[: CONTEXT - len(IDS)])
            used.append(memory.used_bytes())
            for token in IDS:
                opened.decoder.next_logits([token])
                used.append(memory.used_bytes())
        assert max(used) <= use.budget, [f"{each:,}" for each in used]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("policy", ["lru", "floe"])
@pytest.mark.parametrize("sparsity", [0.0, 0.8])
def test_the_staged_engine_answers_as_plain_torch_does_on_the_cpu(
    sparsity: float,
    policy: str,
    share: float,
    packs: dict[tuple[Selector, float], Path],
    reference: dict[tuple[Selector, float], Tensor],
) -> None:
    with engine(packs["up", sparsity], share, engine="staged", policy=policy) as opened:
        assert_near(answers(opened.decoder), reference["up", sparsity])


@pytest.mark.parametrize("name", ["graph", "staged"])
def test_a_gpt_oss_that_keeps_its_source_answers_as_plain_torch_does_on_the_cpu(name: str, tmp_path: Path) -> None:
    folder, ids = packed_gpt_oss(tmp_path, "both"), [(37 * i + 5) % 96 for i in range(60)]

    def logits(decoder: Decoder) -> Tensor:
        return torch.cat([decoder.logits(ids[:20]).cpu(), *(decoder.logits([token]).cpu() for token in ids[20:])])

    with Pack(folder) as held:
        expected = logits(Decoder(PackWeights(held, CPU), CONTEXT))
    with engine(folder, engine=name, chunk_tokens=CHUNK) as opened:  # short passes have a small ring
        assert opened.decoder.cache.is_ring
        assert_near(logits(opened.decoder), expected)


@pytest.mark.parametrize("name", ["graph", "staged"])
def test_keys_and_values_in_16_bit_change_little(
    name: str,
    packs: dict[tuple[Selector, float], Path],
    reference: dict[tuple[Selector, float], Tensor],
) -> None:
    with engine(packs["up", 0.0], engine=name, kv_dtype="bf16") as opened:
        found = answers(opened.decoder)
    assert_kl_is_small(found, reference["up", 0.0])


def assert_kl_is_small(found: Tensor, expected: Tensor) -> None:
    ours, theirs = found.double().log_softmax(1), expected.double().log_softmax(1)
    kl = (theirs.exp() * (theirs - ours)).sum(1)
    assert kl.mean() < MAX_KL, kl.tolist()


def test_all_host_memory_is_page_locked_and_the_card_reads_it(packs: dict[tuple[Selector, float], Path]) -> None:
    with Pack(packs["up", 0.0]) as held, HostArena(held, CARD) as arena:
        assert arena.is_locked and arena.locked_bytes == arena.num_bytes
        with closing(CardCache(held, least_placement(held.layout), arena, CARD)) as cache:
            for l, e in product(*map(range, held.thresholds.shape)):
                layer, layout = cache.layers[l], held.layout.experts[l][e]
                assert arena.rows(l).is_pinned()
                one = torch.tensor([e], dtype=torch.int32, device=CARD)
                layer.admit(one)
                layer.pull_selectors(one)
                layer.pull_records(one, None)
                begin = 16 * layer.tables.record_at[e].long()
                assert bool((begin >= 0).all()), "all records have come"
                places = begin[:, None] + torch.arange(layout.records.row_bytes, device=CARD)
                expected = torch.from_numpy(held.read_extent(l, e)[layout.selector_bytes :].copy())
                assert torch.equal(layer.tables.arena[places].flatten().cpu(), expected)
