"""The scheduler: a running batch that requests join and leave, beginnings that are not computed twice, sessions."""

import errno
import queue
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.cases import case
from support.families import NUM_POSITIONS, Tiny, token_ids, write
from support.models import PackMaker, pack
from support.running_scheduler import (
    CONTEXT,
    GREEDY,
    WORDS,
    Answer,
    NoText,
    keep_nothing,
    request,
    served,
    sessions_in,
)
from support.waiting import HANG_S

from moe_pack.formats import RunError
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.drafts import Drafts, NgramDrafter
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.serve.requests import QueueFullError, RequestError
from moe_pack.runtime.serve.scheduler import AnswerText


def test_an_answer_does_not_depend_on_its_neighbours(demo_pack: PackMaker) -> None:
    for budget in (None, 1 << 20):
        with served(demo_pack("none", 4), number=1, budget=budget) as one:
            ids = one.text.encode(WORDS)
            wanted = [
                request(ids[: 3 + 2 * i], 6 + i, SamplingOptions(temperature=1.0, seed=i) if i % 2 else GREEDY)
                for i in range(8)
            ]
            keep_nothing(one)
            alone = [one.run(each) for each in wanted]
        with served(demo_pack("none", 4), number=3, budget=budget) as several:
            keep_nothing(several)
            answers = []
            for each in wanted:
                answers.append(several.submit(each)[1])
                time.sleep(0.003)
            for own, other in zip(alone, answers, strict=True):
                assert own.tokens == other.wait().tokens and own.text == other.text
            counts = several.scheduler.counts()
            assert counts.num_requests == 8 and counts.running == counts.waiting == 0
            assert counts.generated_tokens == sum(len(each.tokens) for each in alone)
            assert counts.decode_steps < counts.generated_tokens, "several sequences shared steps"


def test_drafts_change_no_answer_and_no_count(demo_pack: PackMaker) -> None:
    """A request alone is drafted, its stop texts and ends too; next to another it is not."""
    with served(demo_pack("none", 4), number=2) as server:
        ids = server.text.encode(f"{WORDS}. {WORDS}. {WORDS[:20]}")
        seeded = SamplingOptions(temperature=0.7, seed=3)
        plain = server.run(request(ids, 60))
        wanted = [
            request(ids, 60),
            request(ids, 60, seeded),
            replace(request(ids, 60), stop=(plain.text[40:44],)),
            replace(request(ids, 60), end_ids=frozenset([plain.tokens[30]])),
            request(ids, 500),  # until the context is full
        ]
        keep_nothing(server)
        expected = [server.run(each) for each in wanted]
    drafts = Drafts(NgramDrafter(), None)
    with served(demo_pack("none", 4), number=2, drafts=drafts) as server:
        keep_nothing(server)
        for own, each in zip(expected, wanted, strict=True):
            with case(each.max_tokens, each.stop, each.end_ids, each.sampling):
                found = server.run(each)
                assert (found.tokens, found.text) == (own.tokens, own.text)
                assert found.end.reason == own.end.reason
                assert found.end.completion_tokens == own.end.completion_tokens
        accepted = drafts.counts.accepted
        assert accepted > 20
        both = [server.submit(each)[1] for each in wanted[:2]]
        assert [each.wait().tokens for each in both] == [each.tokens for each in expected[:2]]
    counts = server.scheduler.counts()
    assert counts.generated_tokens == sum(each.end.completion_tokens for each in (*expected, *both) if each.end)
    assert counts.decode_steps <= counts.generated_tokens - accepted
    assert counts.drafted >= counts.accepted >= accepted


def test_what_was_computed_is_taken_up_again(demo_pack: PackMaker) -> None:
    with served(demo_pack("none", 4)) as server:
        ids = server.text.encode(WORDS + " while the wind blew over the moor and the sea")
        first = server.run(request(ids))
        assert first.end.cached_tokens == 0
        again = server.run(request(ids))
        assert again.end.cached_tokens == len(ids) - 1 and again.text == first.text
        going_on = [*ids, *first.tokens[:-1], *server.text.encode(" and then", special_tokens=False)]
        third = server.run(request(going_on))
        assert third.end.cached_tokens == len(ids) + len(first.tokens) - 1
        # Another end of the same beginning goes to a slot of its own, and the longer sequence stays.
        other = [*ids[:24], *server.text.encode(" but", special_tokens=False)]
        fourth = server.run(request(other))
        assert fourth.end.cached_tokens == 24
        fifth = server.run(request([*going_on, *third.tokens]))
        assert fifth.end.cached_tokens > len(going_on)


def test_a_model_with_states_takes_up_a_turn_from_its_checkpoint(tmp_path: Path) -> None:
    ids = token_ids()
    for family in ("qwen3_next", "gpt_oss"):
        source = write(Tiny(family, "as it comes"), tmp_path / family / "source")
        folder = tmp_path / family / "packed"
        pack(source, folder, width=8)
        with case(family), served(folder, 2, context=NUM_POSITIONS, text=NoText()) as server:
            first = server.run(replace(request(ids[:40], 5), stable_tokens=36))
            assert first.end.reason == "length"
            assert server.run(request([*ids[:36], *ids[50:60]], 5)).end.cached_tokens == 36
            assert server.run(request([*ids[:30], *ids[60:70]], 5)).end.cached_tokens in (0, 30)
            assert server.run(request([*ids[:30], *ids[70:80]], 5)).end.cached_tokens == 30


class Letters:
    """A stream of text in which a token is a piece."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token: int) -> str:
        return self._pieces[token]

    def finish(self) -> str:
        return ""


def test_an_answer_ends_before_the_first_stop_text() -> None:
    text = "one two\nthree\n\nfour STOP five"
    for stops in (("\n\n",), ("STOP", "four"), ("o t", "two"), ("absent",), ("five!", "fivex"), ("e\n",), ()):
        for size in (1, 2, 3, 5, 100):
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            answer = AnswerText(Letters(pieces), stops)  # type: ignore[arg-type]  # all that it asks for
            found = "".join(answer.push(i) for i in range(len(pieces))) + answer.finish()
            places = [(text.find(stop), stop) for stop in stops if stop in text]
            place, stop = min(places, default=(len(text), None))
            assert (found, answer.stop) == (text[:place], stop), (stops, size)


def test_requests_end_for_their_own_reasons(demo_pack: PackMaker) -> None:
    with served(demo_pack("none", 4), number=2) as server:
        ids = server.text.encode(WORDS)
        plain = server.run(request(ids, 20))
        assert plain.end.reason == "length" and plain.end.completion_tokens == 20
        assert plain.end.prompt_tokens == len(ids) and plain.end.timings.decode_s > 0
        by_token = server.run(replace(request(ids, 20), end_ids=frozenset(plain.tokens[7:8])))
        first = plain.tokens.index(plain.tokens[7])
        assert by_token.end.reason == "stop" and by_token.tokens == plain.tokens[:first]
        stop = plain.text[10:14]
        by_text = server.run(replace(request(ids, 20), stop=(stop,)))
        assert by_text.end.reason == "stop" and by_text.end.stop == stop
        assert by_text.text == plain.text[: plain.text.index(stop)]
        filling = server.run(request(ids, 10_000))
        assert filling.end.reason == "length"
        assert len(ids) + len(filling.tokens) == CONTEXT + 1  # the last token needs no place
        scored = server.run(replace(request(ids, 3), top_logprobs=2))
        assert scored.tokens == plain.tokens[:3]
        for bad in ((), tuple(range(5, 5 + CONTEXT))):
            with pytest.raises(RequestError):
                server.submit(request(bad))


def test_a_cancelled_request_frees_its_place_at_once(demo_pack: PackMaker) -> None:
    with served(demo_pack("none", 4), number=1, most_waiting=2) as server:
        ids = server.text.encode(WORDS)
        first = Answer()
        running = server.scheduler.submit(request(ids, 100), first.take_in_steps)
        first.events.get(timeout=HANG_S)
        waiting = [server.submit(request(ids, 3)) for _ in range(2)]
        with pytest.raises(QueueFullError):
            server.submit(request(ids, 3))
        waiting[0][0].cancel()
        first.steps.release(3)
        assert waiting[0][1].wait().end.reason == "cancelled"
        running.cancel()
        first.steps.release(100)
        assert first.wait().end.reason == "cancelled" and len(first.tokens) < 100
        assert waiting[1][1].wait().end.reason == "length"
        running.cancel()  # after its end: nothing
    late = Answer()
    with pytest.raises(Exception, match="shutting down"):
        server.scheduler.submit(request(ids), late.events.put)


def test_requests_that_belong_together_are_all_taken_or_none(demo_pack: PackMaker) -> None:
    with served(demo_pack("none", 4), number=1, most_waiting=2) as server:
        ids, submit = server.text.encode(WORDS), server.scheduler.submit
        first = Answer()
        running = submit(request(ids, 100), first.take_in_steps)
        first.events.get(timeout=HANG_S)
        group = [Answer() for _ in range(4)]  # more than may wait, but nothing does
        for number, answer in enumerate(group):
            submit(request(ids, 2), answer.events.put, 4 if number == 0 else 0)
        with pytest.raises(QueueFullError):
            submit(request(ids, 2), Answer().events.put, 2)
        running.cancel()
        first.steps.release(100)
        for answer in group:
            assert answer.wait().end.reason == "length"


class FailingText(NoText):
    """A tokenizer that fails at the third token, as a panic of a library does."""

    def __init__(self) -> None:
        self.left = 3

    def push(self, token: int) -> str:
        self.left -= 1
        if not self.left:
            raise BaseException("Invalid prefix")
        return ""


def test_a_tokenizer_that_fails_ends_one_request(demo_pack: PackMaker) -> None:
    with served(demo_pack("none", 4), number=1, text=FailingText()) as server:
        first, second = server.run(request(range(20), 9)), server.run(request(range(20), 9))
        assert first.end.reason == "error" and len(first.tokens) == 2
        assert second.end.reason == "length" and server.scheduler.failure is None


def test_a_request_that_cannot_begin_ends_and_the_next_runs(demo_pack: PackMaker) -> None:
    """Whatever fails between the queue and a slot: no request is lost."""
    faults: tuple[BaseException, ...] = (ValueError(), MemoryError(), RunError("no place"), BaseException("a panic"))
    with served(demo_pack("none", 4), number=1) as server:
        ids, sequence = server.text.encode(WORDS), server.scheduler.slots[0].sequence
        for name in ("num_common", "num_kept", "reset"):
            for fault in faults:

                def failing(*_: object, fault: BaseException = fault) -> int:
                    raise fault

                with case(name, fault), pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sequence, name, failing)
                    failed = server.run(request(ids[::-1], 2))
                    assert failed.end.reason == "error" and failed.end.message
                answer = server.run(request(ids, 2))
                assert answer.end.reason == "length"
        assert server.scheduler.counts().waiting == 0 and server.scheduler.failure is None


def test_an_end_that_cannot_be_told_ends_one_request(demo_pack: PackMaker) -> None:
    class Panics(NoText):
        def finish(self) -> str:
            raise BaseException("a panic")

    with served(demo_pack("none", 4), number=1, text=Panics()) as server:
        for _ in range(2):
            answer = server.run(request(range(20), 3))
            assert answer.end.reason == "error" and len(answer.tokens) == 3
        assert server.scheduler.failure is None


def test_closing_ends_what_runs_and_what_waits(demo_pack: PackMaker) -> None:
    with served(demo_pack("none", 4), number=1) as server:
        ids = server.text.encode(WORDS)
        answers = [server.submit(request(ids, 120))[1] for _ in range(4)]
        threading.Event().wait(0.05)
    for answer in answers:
        assert answer.wait().end is not None


def test_a_damaged_expert_ends_the_requests_that_need_it(demo_pack: PackMaker, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(demo_pack("none", 4), folder)
    with served(folder, number=2, budget=1 << 20) as server:
        path = next(folder.glob("experts-*1.safetensors"))
        raw = bytearray(path.read_bytes())
        for place in range(8192, len(raw), 4096):
            raw[place] ^= 1
        path.write_bytes(raw)
        for _ in range(2):
            answer = server.run(request(server.text.encode(WORDS)))
            assert answer.end.reason == "error" and path.name in answer.end.message
        assert server.scheduler.failure is None


def test_an_idle_scheduler_prepares_experts_until_none_is_left(
    demo_pack: PackMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes meanwhile is answered at once, as it would be otherwise."""
    with served(demo_pack("none", 4)) as server:
        expected = server.run(request(range(5, 25))).tokens
    has_answered, calls = threading.Event(), queue.Queue[bool]()

    def prepare_next(decoder: Decoder) -> bool:
        calls.put(has_answered.is_set())
        return not has_answered.is_set()

    monkeypatch.setattr(Decoder, "prepare_next", prepare_next)
    with served(demo_pack("none", 4)) as server:
        assert not calls.get(timeout=HANG_S) and not calls.get(timeout=HANG_S)
        assert server.run(request(range(5, 25))).tokens == expected
        has_answered.set()
        while not calls.get(timeout=HANG_S):
            pass
        assert server.run(request(range(5, 25))).tokens == expected
    assert calls.empty(), "nothing is left, and nothing is asked for"


def test_sessions_survive_a_restart(demo_pack: PackMaker, tmp_path: Path) -> None:
    folder, digest = demo_pack("none", 4), "a" * 64
    with served(folder) as plain:
        ids = plain.text.encode(WORDS * 8)[:100]
        expected = plain.run(request(ids))
    with served(folder, sessions=sessions_in(tmp_path, digest)) as before:
        assert before.run(request(ids)).text == expected.text
    assert len(list(tmp_path.glob("*.session"))) == 1
    with served(folder, sessions=sessions_in(tmp_path, digest)) as after:
        answer = after.run(request(ids))
        assert answer.text == expected.text and answer.end.cached_tokens == len(ids) - 1
        # A longer one takes the place of the session that it goes on from.
        after.run(request([*ids, *answer.tokens]))
    assert len(list(tmp_path.glob("*.session"))) == 1
    for other in (sessions_in(tmp_path, "b" * 64), sessions_in(tmp_path / "new", digest)):
        with served(folder, sessions=other) as stranger:
            assert stranger.run(request(ids)).end.cached_tokens == 0


def test_sessions_of_codes_survive_and_are_of_one_kv_dtype(demo_pack: PackMaker, tmp_path: Path) -> None:
    folder, digest = demo_pack("none", 4), "a" * 64
    dtypes: tuple[KvDtype, ...] = ("q4", "q8", "bf16")  # none finds a session of the dtypes before it
    for dtype in dtypes:
        with case(dtype):
            before = sessions_in(tmp_path, digest, kv_dtype=dtype)
            with served(folder, sessions=before, kv_dtype=dtype) as server:
                ids = server.text.encode(WORDS * 8)[:100]
                expected = server.run(request(ids))
                assert expected.end.cached_tokens == 0
            after = sessions_in(tmp_path, digest, kv_dtype=dtype)
            with served(folder, sessions=after, kv_dtype=dtype) as server:
                answer = server.run(request(ids))
                assert answer.end.cached_tokens == len(ids) - 1
                assert answer.text == expected.text


def test_damaged_sessions_and_full_disks_cost_time_alone(
    demo_pack: PackMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, digest = demo_pack("none", 4), "a" * 64
    with served(folder, sessions=sessions_in(tmp_path, digest)) as server:
        ids = server.text.encode(WORDS * 8)[:100]
        expected = server.run(request(ids)).text
    (path,) = tmp_path.glob("*.session")
    whole = path.read_bytes()
    path.write_bytes(whole[:-90] + bytes([whole[-90] ^ 0x10]) + whole[-89:])
    with served(folder, sessions=sessions_in(tmp_path, digest)) as server:
        assert server.run(request(ids)).text == expected
    for each in tmp_path.glob("*.session"):
        each.unlink()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = sessions_in(tmp_path, digest)
    with monkeypatch.context() as patch, served(folder, sessions=store) as server:
        patch.setattr("moe_pack.runtime.serve.sessions.os.fsync", full)
        assert server.run(request(ids)).text == expected
        assert server.run(request([*reversed(ids)])).end is not None
        server.scheduler.close()
    assert store.num_failed and not list(tmp_path.iterdir())
    small = sessions_in(tmp_path, digest, 1000)
    with served(folder, sessions=small) as server:
        assert server.run(request(ids)).text == expected
    assert small.num_failed == 1 and not list(tmp_path.iterdir())
