"""Sources on the hub that are read without being downloaded whole: the same bytes, within a quota, despite faults."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.cases import case
from support.folders import INDEX, OTHER, SHARDS, SINGLE, overlaid, prefixed, sharded, single, with_files, without
from support.hub_server import TOKEN, Fault, HubServer, ask_here, environment, running_hub
from support.models import TESTS, TinyMixtral
from support.profiles import QUICK, folder_bytes, random_tokens

from moe_pack.calib.profile import make_profile
from moe_pack.convert import find_checkpoint
from moe_pack.convert.hub import open_streamed
from moe_pack.convert.pipeline import convert
from moe_pack.formats import CheckpointError, UsageError, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.hub import LEAST_STREAM_BYTES, HubRepository, StreamedFiles, parse_name
from moe_pack.formats.hub.repository import Patience

HASTY = Patience(tries=3, first_pause=0.01)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 21 MiB in five shards: several pieces a shard, an expert's matrices in two shards."""
    model = TinyMixtral(hidden_size=256, intermediate_size=768, num_layers=3, num_experts=6, num_shards=5)
    return model.write(tmp_path_factory.mktemp("hub") / "source")


@pytest.fixture
def hub(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub() as server:
        server.add("someone/model", source)
        server.add("someone/several", source, "half/")
        ask_here(server, tmp_path / "cache", monkeypatch)
        yield server


def streamed(folder: Path, name: str = "someone/model", patience: Patience = HASTY) -> StreamedFiles:
    parsed = parse_name(name)
    assert parsed is not None
    return StreamedFiles(HubRepository(parsed, CheckpointError, patience), folder, LEAST_STREAM_BYTES)


def bytes_on_disk(folder: Path) -> int:
    """Bytes of the files in a folder, those included that only this process has open and that have no name."""
    named = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    opened = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith(f"{folder}/") and not link.stat().st_nlink:
                opened += link.stat().st_blocks * 512
        except OSError:
            continue  # closed meanwhile
    return named + opened


@pytest.mark.slow
def test_every_tensor_and_the_account_are_those_of_the_folder(hub: HubServer, source: Path, tmp_path: Path) -> None:
    (tmp_path / "pieces").mkdir()
    for name in ("someone/model", "someone/several:half"):
        files = streamed(tmp_path / "pieces", name)
        with case(name), closing(Checkpoint(files)) as found, closing(Checkpoint(source)) as expected:
            assert found.account() == expected.account()
            assert found.files.config() == expected.files.config()
            most = 0
            for tensor, entry in expected.files.entries().items():
                whole = expected.raw(tensor, 0, entry.num_bytes)
                assert np.array_equal(found.raw(tensor, 0, entry.num_bytes), whole)
                odd = entry.num_bytes // 3
                assert np.array_equal(found.raw(tensor, odd, odd), whole[odd : 2 * odd])
                most = max(most, bytes_on_disk(tmp_path / "pieces"))
            total = sum(file.bytes for file in expected.account()[0])
            assert 0 < most <= LEAST_STREAM_BYTES < total / 2
            assert files.fetched_bytes < total  # headers are not fetched again, and no piece twice
    assert bytes_on_disk(tmp_path / "pieces") == 0


@pytest.mark.slow
def test_threads_that_read_the_same_pieces_get_the_same_bytes(hub: HubServer, source: Path, tmp_path: Path) -> None:
    with closing(Checkpoint(streamed(tmp_path))) as found, closing(Checkpoint(source)) as expected:
        names = list(expected.files.entries()) * 3
        np.random.default_rng(0).shuffle(names)

        def is_equal(name: str) -> bool:
            num_bytes = expected.entry(name).num_bytes
            return np.array_equal(found.raw(name, 0, num_bytes), expected.raw(name, 0, num_bytes))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(is_equal, names))


@pytest.mark.slow
def test_the_pack_of_a_streamed_source_is_the_pack_of_its_folder(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.faults += [Fault("/cdn/", 3, cut_after=5000), Fault("/cdn/", 1, status=503)]
    packs = []
    for name, files in (("streamed", streamed(tmp_path)), ("local", source)):
        with closing(Checkpoint(files)) as checkpoint:
            part = part_format(2, 64)
            plan = uniform_plan(checkpoint.spec, "up", part, part, None, "nearest")
            convert(checkpoint, plan, tmp_path / name, workers=3)
        packs.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert packs[0] == packs[1]
    assert not (tmp_path / "cache").exists(), "nothing is downloaded"


@pytest.mark.slow
def test_the_profile_of_a_streamed_source_is_the_profile_of_its_folder(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    tokens, profiles = random_tokens(4, 16, 96), []
    for name, files in (("streamed", streamed(tmp_path)), ("local", source)):
        with closing(Checkpoint(files)) as checkpoint:
            make_profile(checkpoint, tokens, tmp_path / name, QUICK)
        profiles.append(folder_bytes(tmp_path / name))
    assert profiles[0] == profiles[1]
    assert not (tmp_path / "cache").exists(), "nothing is downloaded"


def test_faults_that_pass_cost_a_pause_and_nothing_else(hub: HubServer, source: Path, tmp_path: Path) -> None:
    shard = next(path for path in source.iterdir() if path.suffix == ".safetensors").read_bytes()
    name = next(path.name for path in source.iterdir() if path.suffix == ".safetensors")
    faults = {
        "cut in the middle": Fault("/cdn/", 2, cut_after=70_000),
        "cut at once, often": Fault("/cdn/", 2, cut_after=0),
        "cut after one byte, more often than the patience": Fault("/cdn/", 9, cut_after=1),
        "503": Fault("/resolve/", 2, status=503),
        "429": Fault("/resolve/", 1, status=429, headers={"Retry-After": "0"}),
        "the list of files": Fault("/api/", 1, status=502),
    }
    for what, fault in faults.items():
        with case(what):
            hub.faults = [fault]
            parsed = parse_name("someone/model")
            assert parsed is not None
            raw = HubRepository(parsed, CheckpointError, HASTY).read(name, 1000, 200_000)
            assert raw.tobytes() == shard[1000:201_000]
            assert not fault.times, "the fault happened"


def test_retry_after_is_waited_for() -> None:
    patience = Patience()
    assert patience.pause(0, 17.0) == 17.0
    assert [patience.pause(attempt, None) for attempt in range(4)] == [1.0, 2.0, 4.0, 8.0]
    assert patience.pause(20, None) == 60.0


def test_faults_that_stay_end_in_one_line_that_says_what_to_do(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.add("someone/secret", source, access="private")
    hub.add("someone/asked-for", source, access="gated")
    faults = [
        ("someone/model", Fault("/resolve/", 99, status=503), r"the hub answered 503 3 times in a row; run the same"),
        ("someone/model", Fault("/cdn/", 99, cut_after=0), r"the hub cannot be reached \(.+\), tried 3 times; run"),
        ("someone/model", Fault("/resolve/", 99, status=401), r"the hub refuses access \(401\); log in with hf auth"),
        ("someone/none", None, r"the hub has no such repository, or it is private; check the name"),
        ("someone/secret", None, r"or it is private; check the name, and if it is private, log in with hf auth login"),
        ("someone/asked-for", None, r"access is restricted; ask for it at http\S+/someone/asked-for, and log in with"),
        ("someone/model@v9", None, r"the repository has no revision v9"),
        ("someone/several", None, r"config.json is missing"),
    ]
    for name, fault, message in faults:
        hub.faults = [] if fault is None else [fault]
        with case(f"{name}: {message}"), pytest.raises(CheckpointError, match=message) as caught:
            Checkpoint(streamed(tmp_path, name))
        assert "\n" not in str(caught.value)


def test_a_token_opens_a_private_repository_and_never_reaches_the_storage_host(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("someone/secret", source, access="private")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with closing(Checkpoint(streamed(tmp_path, "someone/secret"))) as found:
        assert found.spec.vocab_size == 96


def test_a_source_on_this_disk_is_not_streamed(hub: HubServer, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--stream reads from the hub, and .* is on this disk; remove --stream"):
        open_streamed(str(source), tmp_path)


def test_gguf_files_are_downloaded_and_not_streamed(hub: HubServer, tmp_path: Path) -> None:
    folder, names = tmp_path / "files", [f"tiny-Q4_0-0000{part}-of-00002.gguf" for part in (1, 2)]
    folder.mkdir()
    for name in names:
        shutil.copy(TESTS / "data" / "gguf" / "mixtral.gguf", folder / name)
    hub.add("someone/gguf", folder)
    with pytest.raises(
        CheckpointError,
        match=rf"^someone/gguf:Q4_0: GGUF files cannot be streamed; download them first: hf download someone/gguf "
        rf"{names[0]} {names[1]}$",
    ):
        open_streamed("someone/gguf:Q4_0", tmp_path)
    with pytest.raises(CheckpointError, match="is also in another part"):  # two copies are no model
        find_checkpoint("someone/gguf:Q4_0")
    downloaded = next((tmp_path / "cache").rglob(names[1]))
    downloaded.unlink()
    with pytest.raises(CheckpointError, match="is also in another part"):
        find_checkpoint("someone/gguf:Q4_0")  # fetches what a broken download lacks
    assert downloaded.exists()


def test_a_source_is_downloaded_whole_and_then_taken_from_the_cache(hub: HubServer, source: Path) -> None:
    for name in ("someone/model", "someone/several:half"):
        with case(name):
            hub.faults = [Fault("/cdn/", 1, cut_after=1000)]
            folder = find_checkpoint(name)
            names = {path.name for path in source.iterdir()}
            assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in names} == {
                path.name: path.read_bytes() for path in source.iterdir()
            }
            before = sum(hub.requests.values())
            assert find_checkpoint(name) == folder
            assert open_streamed(name, folder) == folder
            assert sum(hub.requests.values()) == before


def test_a_repository_is_read_as_its_folder_is(hub: HubServer, tmp_path: Path) -> None:
    """Streamed, or downloaded: then nothing comes that is not read."""
    builds = {
        "beside": lambda folder: with_files(sharded(folder), "model.bin", "consolidated.safetensors", "x/y.gguf"),
        "stale": lambda folder: without(single(sharded(folder, OTHER)), *SHARDS[1:]),
        "overlaid": lambda folder: overlaid(folder, "overlay.safetensors", 1.0),
        "tied": lambda folder: single(folder, tie_word_embeddings=True),
        "prefixed": lambda folder: single(folder, change=prefixed("module.")),
    }
    for name, build in builds.items():
        source = tmp_path / name
        build(source)
        hub.add(f"someone/{name}", source)
        with case(name), closing(Checkpoint(source)) as local:
            with closing(Checkpoint(streamed(tmp_path, f"someone/{name}"))) as remote:
                assert local.notes() == remote.notes() != []
                assert (
                    local.spec == remote.spec and local.claims == remote.claims and local.account() == remote.account()
                )
            downloaded = find_checkpoint(f"someone/{name}")
            assert isinstance(downloaded, Path)
            used = {file.name for file in local.account()[0]}
            assert {path.name for path in downloaded.iterdir() if path.suffix != ".json"} == used
            with closing(Checkpoint(downloaded)) as fetched:
                assert fetched.spec == local.spec and fetched.account() == local.account()


def test_a_repository_that_can_be_read_in_two_ways_is_refused_before_its_weights_come(
    hub: HubServer, tmp_path: Path
) -> None:
    builds = {
        "two": (lambda folder: single(sharded(folder), OTHER), "someone/two: has two models, model.safetensors and 3"),
        "adapter": (
            lambda folder: with_files(single(folder), "adapter_model.bin"),
            "someone/adapter: has an adapter, adapt",
        ),
        "lacking": (lambda folder: without(sharded(folder), *SHARDS[:2]), "of 3 files .* 2 are missing; download "),
        "torch": (lambda folder: without(with_files(single(folder), "model.bin"), SINGLE), "found .bin or .pt weights"),
        "pointer": (lambda folder: sharded(folder) / INDEX, f"{INDEX}: is a Git LFS pointer, not the file"),
    }
    for name, (build, message) in builds.items():
        made = build(tmp_path / name)
        if name == "pointer":
            made.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
        hub.add(f"someone/{name}", tmp_path / name)
        with case(name):
            with pytest.raises(CheckpointError, match=message):
                Checkpoint(streamed(tmp_path, f"someone/{name}"))
            with pytest.raises(CheckpointError, match=message):
                find_checkpoint(f"someone/{name}")
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "nothing is downloaded"


@pytest.mark.slow
def test_killed_at_random_moments_on_a_small_disk_it_ends_with_the_same_pack(source: Path, tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("needs a mount namespace of its own, for a small disk")
    large = TinyMixtral(hidden_size=512, intermediate_size=2048, num_layers=8, num_experts=4, num_shards=13)
    folder = large.write(tmp_path / "large")
    with running_hub() as server:
        server.add("someone/large", folder)
        script = TESTS / "support" / "small_disk.py"
        command = ["unshare", "-rm", sys.executable, str(script), "someone/large", str(tmp_path / "streamed")]
        variables = {**os.environ, **environment(server, tmp_path / "cache")}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    with closing(Checkpoint(folder)) as checkpoint:
        part = part_format(2, 64)
        convert(checkpoint, uniform_plan(checkpoint.spec, "up", part, part, None, "nearest"), tmp_path / "local", 2)
    packs = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("streamed", "local")]
    assert packs[0] == packs[1]
    source_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert said["kills"] >= 3
    assert said["disk_bytes"] < source_bytes / 3
