"""Files of sessions: what they may weigh, who may read them, and that no file and no disk costs more than time."""

import errno
import json
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import case, random_seed
from support.families import NUM_POSITIONS, Tiny, token_ids, write
from support.models import PackMaker, pack
from support.running_scheduler import VOCAB, request, served, sessions_in

from moe_pack.formats import Pack, RunError
from moe_pack.formats.base.json_files import sealed
from moe_pack.formats.pack.safetensors import read_header
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.model.kv_cache import CachedSequence
from moe_pack.runtime.offload import Sequences
from moe_pack.runtime.serve.sessions import SessionOwner, SessionStore

CONTEXT, IDS = 160, list(range(10, 90))
HOSTILE: tuple[Any, ...] = (
    *(-1, 0, 1, 80, 81, 2**31, 2**53, 2**63, 2**64, 10**300, 0.5, 1e308, "", "x", "../../x", "\0", "x" * 5000),
    *(None, True, [], {}, [[]], [1] * 1000, ["x"], [None], {"kind": "x"}, "F32", "I64", "U8"),
)
Load = Callable[[SessionStore], bool]  # loads a session; what it gives was compared with what was saved


@contextmanager
def sequence_of(folder: Path, context: int = CONTEXT) -> Iterator[tuple[Decoder, CachedSequence]]:
    options = EngineOptions(chunk_tokens=16, read="map")
    with Pack(folder) as opened, Engine(opened, options, context, sequences=Sequences(1, checkpoints=2)) as engine:
        assert isinstance(engine.decoder, Decoder)
        yield engine.decoder, engine.decoder.sequences[0]


@contextmanager
def saved_session(model: Path, folder: Path, context: int = CONTEXT) -> Iterator[tuple[Path, Load]]:
    """Yields the file of a session, and a function that loads one from a store."""
    ids = IDS if context == CONTEXT else token_ids()[:70]
    with sequence_of(model, context) as (decoder, sequence), torch.inference_mode():
        decoder.extend(sequence, ids[:40])
        sequence.save_checkpoint()
        decoder.extend(sequence, ids[40:])
        assert sessions_in(folder, context=context).save(sequence)
        (path,) = folder.glob("*.session")
        sequence.cut_to(len(ids))
        expected = decoder.extend(sequence, [5])

        def load(store: SessionStore) -> bool:
            sequence.reset()
            if not store.load([*ids, 5], sequence, 0):
                assert sequence.num_tokens == 0 and not sequence.checkpoints
                return False
            assert sequence.num_tokens == len(sequence.ids) and sequence.num_kept([*ids, 5]) in (len(ids), 40)
            sequence.keep_beginning([*ids, 5])
            found = decoder.extend(sequence, [*ids, 5][sequence.num_tokens :])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            return True

        yield path, load


def test_sessions_are_at_most_as_large_as_all_may_be(demo_pack: PackMaker, tmp_path: Path) -> None:
    with sequence_of(demo_pack("none", 4)) as (decoder, sequence):

        def saved(store: SessionStore, folder: Path, first: int, number: int = 70) -> list[Path]:
            sequence.reset()
            decoder.extend(sequence, list(range(first, first + number)))
            store.save(sequence)
            return sorted(folder.glob("*"))

        folder = tmp_path / "one"
        (path,) = saved(sessions_in(folder), folder, 10)
        size = path.stat().st_size
        for number, (most, kept) in enumerate(((size - 1, 0), (size, 1), (2 * size - 1, 1), (2 * size, 2))):
            with case(most, kept):
                folder = tmp_path / str(number)
                store = sessions_in(folder, most_bytes=most)
                before, after = saved(store, folder, 10), saved(store, folder, 20)
                assert len(after) == kept and sum(each.stat().st_size for each in after) <= most
                assert store.num_bytes == kept * size and store.num_failed == (2 if not kept else 0)
                assert kept != 1 or before != after, "the later one stays"
        folder = tmp_path / "larger"
        store = sessions_in(folder, most_bytes=size)
        before = saved(store, folder, 10)
        assert saved(store, folder, 20, 140) == before and store.num_failed == 1, "no other is deleted for it"


def test_a_session_with_a_bit_of_another_value_is_not_loaded(
    demo_pack: PackMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Values so close that no shape, order or range tells them from the right ones."""
    with saved_session(demo_pack("none", 4), tmp_path) as (path, load):
        whole = path.read_bytes()
        tensors = [entry for entry in read_header(path, RunError) if entry.name.startswith("whole.")]
        assert len(tensors) > 3
        for entry in tensors:
            for place in (entry.offset, entry.offset + entry.num_bytes - 4):
                with case(entry.name, place):
                    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
                    caplog.clear()
                    assert not load(sessions_in(tmp_path)) and path.exists()
                    assert f"{path.name} is left alone: {entry.name} is damaged" in caplog.text
        path.write_bytes(whole)
        assert load(sessions_in(tmp_path))


# ---- files that were changed ----------------------------------------------------------------------------------------


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns a file's header, and the bytes after it."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(header: object, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def facts_of(raw: bytes) -> dict[str, Any]:
    header, rest = split(raw)
    start, stop = header["facts"]["data_offsets"]
    facts: dict[str, Any] = json.loads(rest[start:stop])
    return facts


def with_facts(raw: bytes, facts: object, is_sealed: bool = True) -> bytes:
    """Returns a file with other facts, which end with their digest if they are an object and `is_sealed`."""
    header, rest = split(raw)
    start = header["facts"]["data_offsets"][0]
    written = json.dumps(facts).encode()
    if is_sealed and isinstance(facts, dict):
        written = sealed({key: value for key, value in facts.items() if key != "sha256"})
    header = {name: entry for name, entry in header.items() if entry["data_offsets"][0] < start}
    header["facts"] = {"dtype": "U8", "shape": [len(written)], "data_offsets": [start, start + len(written)]}
    return join(header, rest[:start] + written)


def places_of(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from places_of(value[key], (*place, key))  # type: ignore[index]  # it has keys


def changed_json(value: Any, rng: random.Random) -> Any:
    """Returns a copy of a JSON value with one place changed."""
    value = json.loads(json.dumps(value))
    *before, key = rng.choice(list(places_of(value)))
    parent = value
    for each in before:
        parent = parent[each]
    old, how = parent[key], rng.randrange(6)
    if how == 0:
        del parent[key]
    elif how == 1 and type(old) is int:
        parent[key] = old + rng.choice((-1, 1, -old, old, 10**6))
    elif how == 2 and isinstance(old, list):
        parent[key] = rng.choice((old[:-1], old * 2, old[::-1]))
    elif how == 3:
        for _ in range(rng.choice((1, 400))):
            parent[key] = [parent[key]]
    elif how == 4 and isinstance(parent, dict):
        parent["more"] = rng.choice(HOSTILE)
    else:
        parent[key] = rng.choice(HOSTILE)
    return value


def changed_bytes(raw: bytes, rng: random.Random) -> bytes:
    place, length = rng.randrange(len(raw)), rng.choice((1, 8, 4096))
    how = rng.randrange(4)
    if how == 0:
        return raw[:place] + bytes([raw[place] ^ 1 << rng.randrange(8)]) + raw[place + 1 :]
    if how == 1:
        return raw[:place]
    return raw[:place] + (bytes(length) if how == 2 else rng.randbytes(length)) + raw[place + length * (how == 2) :]


def changed(raw: bytes, rng: random.Random) -> bytes:
    """Returns a file of a session with something changed."""
    how = rng.randrange(6)
    if how < 2:
        header, rest = split(raw)
        return join(changed_json(header, rng), rest)
    if how < 5:
        return with_facts(raw, changed_json(facts_of(raw), rng), is_sealed=how < 4)
    return changed_bytes(raw, rng)


def sweep(model: Path, folder: Path, number: int, context: int = CONTEXT) -> None:
    """Changes a session in so many ways; each is left alone, or gives what was saved."""
    rng, num_loaded = random.Random(random_seed()), 0
    with saved_session(model, folder, context) as (path, load):
        whole = path.read_bytes()
        assert load(sessions_in(folder, context=context))
        for i in range(number):
            with case(i):
                path.write_bytes(changed(whole, rng))
                num_loaded += load(sessions_in(folder, context=context))
        path.write_bytes(whole)
        assert num_loaded < number // 4 and load(sessions_in(folder, context=context))


def test_no_change_of_a_file_does_more_than_cost_time(demo_pack: PackMaker, tmp_path: Path) -> None:
    sweep(demo_pack("none", 4), tmp_path / "cut anywhere", 60)
    sweep(hybrid_pack(tmp_path), tmp_path / "checkpoints", 60, NUM_POSITIONS)


def hybrid_pack(folder: Path) -> Path:
    pack(write(Tiny("qwen3_next", "as it comes"), folder / "source"), folder / "packed", width=8)
    return folder / "packed"


@pytest.mark.slow
def test_no_change_of_many_files_does_more_than_cost_time(demo_pack: PackMaker, tmp_path: Path) -> None:
    sweep(demo_pack("none", 4), tmp_path / "cut anywhere", 1500)
    sweep(hybrid_pack(tmp_path), tmp_path / "checkpoints", 1500, NUM_POSITIONS)


def test_faults_that_a_right_digest_hides_are_found(demo_pack: PackMaker, tmp_path: Path) -> None:
    """Facts that say what the file's tensors, the context and the vocabulary do not allow."""
    for model, context, checkpoints in (
        (demo_pack("none", 4), CONTEXT, None),
        (hybrid_pack(tmp_path), NUM_POSITIONS, [40, 70]),
    ):
        folder = tmp_path / str(context)
        with saved_session(model, folder, context) as (path, load):
            whole, facts = path.read_bytes(), facts_of(path.read_bytes())
            assert facts["checkpoints"] == checkpoints
            crcs: dict[str, str] = facts["crc32"]
            wrong: list[Any] = [[], [0], [70], [80], [40], [40, 71], [41, 70], [70, 40], [40, 40], [[40, 70]], "x", 70]
            wrong += [["x"], [None], [40.0, 70], [True, 70], [-1, 70], [2**70], {}]
            wrong.append(None if checkpoints else [40, 70])
            cases: list[object] = [{**facts, "checkpoints": each} for each in wrong]
            cases += [{key: value for key, value in facts.items() if key != left} for left in facts if left != "sha256"]
            for each in ({}, [], None, "x", 1, {**crcs, "more": "0" * 8}, dict.fromkeys(crcs, "0" * 8)):
                cases.append({**facts, "crc32": each})
            cases += [{**facts, "crc32": {**crcs, "ids": each}} for each in (1, None, crcs["ids"].upper() + "0", [])]
            cases += [[facts], "x", None, 1, {"version": 2}, {**facts, "more": 1}, {**facts, "version": True}]
            for each in cases:
                with case(each):
                    path.write_bytes(with_facts(whole, each))
                    assert not load(sessions_in(folder, context=context))
            path.write_bytes(with_facts(whole, facts))
            assert load(sessions_in(folder, context=context)), "the nearest that is right"


def write_sparse(path: Path, num_bytes: int, large: str, facts: bytes) -> None:
    """Writes a session whose `ids` or `facts` have very many bytes, which take no place on the disk."""
    first, first_dtype = (facts, "U8") if large == "ids" else (bytes(8), "I64")
    other = "facts" if large == "ids" else "ids"
    header = {
        other: {
            "dtype": first_dtype,
            "shape": [len(first) // (8 if other == "ids" else 1)],
            "data_offsets": [0, len(first)],
        },
        large: {
            "dtype": "I64" if large == "ids" else "U8",
            "shape": [num_bytes // (8 if large == "ids" else 1)],
            "data_offsets": [len(first), len(first) + num_bytes],
        },
    }
    path.write_bytes(join(header, first))
    os.truncate(path, path.stat().st_size + num_bytes)


def test_what_is_no_session_is_left_alone(
    demo_pack: PackMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = demo_pack("none", 4), tmp_path / "sessions"
    with saved_session(model, folder) as (path, load):
        for name in ("a folder", "one.session"):
            (folder / f"{name}.session").mkdir()
        (folder / "left.session.tmp").mkdir()
        (folder / "loop.session").symlink_to("loop.session")
        (folder / "nowhere.session").symlink_to("absent")
        os.mkfifo(folder / "pipe.session")
        (folder / "two\nlines.session").write_bytes(b"")
        (folder / "text.session").write_bytes(b"no session at all")
        (folder / "zeros.session").write_bytes(bytes(100))
        (folder / "header.session").write_bytes((1 << 26).to_bytes(8, "little"))
        os.truncate(folder / "header.session", 64 << 30)
        short = path.read_bytes()
        facts = sealed({**{k: v for k, v in facts_of(short).items() if k != "sha256"}, "crc32": {"ids": "0" * 8}})
        for gib in (2, 64):
            for name in ("ids", "facts"):
                write_sparse(folder / f"{name} of {gib}.session", gib << 30, name, facts)
        caplog.clear()
        store = sessions_in(folder)
        warned = [record.getMessage() for record in caplog.records]
        assert len(warned) == len(list(folder.glob("*"))) - 1 == 14, warned
        assert sum("tokens, this server's context" in line for line in warned) == 2
        assert sum("bytes, at most" in line for line in warned) == 3
        assert all("is left alone: " in line and "\n" not in line for line in warned)
        assert store.num_bytes == len(short) and load(store)
        for longest, vocab in ((79, VOCAB), (CONTEXT, 80)):
            with case(longest, vocab):
                other = SessionStore(tmp_path / "sessions", SessionOwner("a" * 64, longest, vocab), 1 << 30)
                assert not other.num_bytes and path.read_bytes() == short


def test_a_file_that_changes_under_the_server_is_not_mixed_up(demo_pack: PackMaker, tmp_path: Path) -> None:
    """Another program puts a right session of other tokens, or nothing, in the place of one that the server knows."""
    with saved_session(demo_pack("none", 4), tmp_path) as (path, load):
        whole, store = path.read_bytes(), sessions_in(tmp_path)
        with sequence_of(demo_pack("none", 4)) as (decoder, sequence):
            decoder.extend(sequence, IDS[::-1])
            assert sessions_in(tmp_path / "other").save(sequence)
        (other,) = (tmp_path / "other").glob("*.session")
        path.write_bytes(other.read_bytes())
        assert not load(store)
        path.write_bytes(whole)
        store = sessions_in(tmp_path)
        path.unlink()
        assert not load(store) and not load(store)


# ---- folders, and whatever may fail ---------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_sessions_are_for_their_user_alone(
    demo_pack: PackMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "new" / "sessions"
    umask = os.umask(0)
    try:
        with saved_session(demo_pack("none", 4), folder) as (path, _):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(umask)
    assert not caplog.records
    folder.chmod(0o750)
    sessions_in(folder)
    (record,) = caplog.records
    assert f"run chmod -R go= {folder}" in record.getMessage() and stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_a_folder_that_cannot_be_written_ends_no_request(
    demo_pack: PackMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read only: a damaged file cannot be deleted, an old one makes no room, nothing new is saved."""

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    model, folder = demo_pack("none", 4), tmp_path / "sessions"
    with saved_session(model, folder) as (path, _):
        raw = path.read_bytes()
    path.write_bytes(raw[:-5000] + bytes([raw[-5000] ^ 1]) + raw[-4999:])
    (folder / "left.session.tmp").write_bytes(b"half")
    with monkeypatch.context() as patch:
        for name in ("os.unlink", "pathlib.Path.unlink", "pathlib.Path.replace", "os.utime"):
            patch.setattr(name, read_only)
        for most in (len(raw), 1 << 30):
            store = sessions_in(folder, most_bytes=most)
            with case(most), served(model, number=1, sessions=store) as server:
                for ids in ([*IDS, 5], [*IDS[::-1]], [*IDS, 6]):
                    assert server.run(request(ids, 2)).end.reason == "length"
                assert store.num_failed and server.scheduler.failure is None


def test_whatever_fails_around_sessions_ends_no_request(demo_pack: PackMaker, tmp_path: Path) -> None:
    faults: tuple[Exception, ...] = (OSError(), ValueError(), MemoryError(), AssertionError(), RunError("x"))
    for fault in faults:

        def failing(*_: object, fault: Exception = fault) -> bool:
            raise fault

        store = sessions_in(tmp_path)
        store.save = store.load = failing  # type: ignore[method-assign]  # of this store alone
        with case(fault), served(demo_pack("none", 4), number=1, sessions=store) as server:
            for ids in (IDS, IDS[::-1]):
                assert server.run(request(ids, 2)).end.reason == "length"
        assert server.scheduler.failure is None
