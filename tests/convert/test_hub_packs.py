"""Packs on the hub: downloaded whole and checked, one of several, and uploaded with a card that says what is known."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import ModelCard
from support.cases import case
from support.hub_server import TOKEN, Fault, HubServer, Stored, ask_here, running_hub
from support.models import DEMO_MODEL, TESTS, PackMaker, TinyMixtral

from moe_pack.convert.cli.main import main
from moe_pack.convert.pipeline import convert
from moe_pack.formats import Pack, PackError, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.hub.packs import find_pack
from moe_pack.formats.hub.repository import Patience
from moe_pack.formats.pack.sidecar import write_sidecar
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.quality import QUALITY_FILE, Estimate, Quality, SourceQuality

HASTY = Patience(tries=3, first_pause=0.01)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs")
    with closing(Checkpoint(TinyMixtral().write(folder / "source"))) as checkpoint:
        part = part_format(4, 64)
        convert(checkpoint, uniform_plan(checkpoint.spec, "up", part, part, None, "nearest"), folder / "packed", 1)
    return folder / "packed"


@pytest.fixture
def hub(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub() as server:
        server.add("someone/one", packed)
        server.add("someone/two", packed, "4bit/")
        server.add("someone/two", packed, "again/")
        ask_here(server, tmp_path / "cache", monkeypatch)
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_pack_is_downloaded_whole_once_despite_faults(hub: HubServer, packed: Path) -> None:
    for name in ("someone/one", "someone/two:4bit"):
        with case(name):
            hub.faults = [Fault("/cdn/", 1, cut_after=100), Fault("/api/", 1, status=503)]
            folder = find_pack(Path(name), patience=HASTY)
            assert contents(folder) == contents(packed)
            hub.requests.clear()
            assert find_pack(Path(name), patience=HASTY) == folder
            assert not hub.requests, "the second time the hub is not asked"
    assert not (find_pack(Path("someone/two:4bit")).parent / "again").exists(), "other packs are left there"


def test_a_folder_and_what_can_be_no_name_are_taken_as_they_are(hub: HubServer, packed: Path) -> None:
    for path in (packed, Path("/nowhere/packed"), Path("packed"), Path("a/b/c")):
        assert find_pack(path) == path


def test_a_name_without_a_pack_says_which_there_are(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    hub.add("someone/none", tmp_path / "empty")
    for name, message in (
        ("someone/two", r"the repository has 2 packs; give one of someone/two:4bit, someone/two:again$"),
        ("someone/two:3bit", r"the repository has no pack 3bit; it has someone/two:4bit, someone/two:again$"),
        ("someone/none", r"the repository has no pack; moe-pack convert makes one"),
        ("someone/missing", r"the hub has no such repository, or it is private"),
    ):
        with case(name), pytest.raises(PackError, match=message):
            find_pack(Path(name), patience=HASTY)


def test_a_damaged_download_is_removed_and_the_next_one_is_whole(hub: HubServer, packed: Path) -> None:
    name = next(path.name for path in packed.iterdir() if path.name.startswith("experts"))
    raw = bytearray((packed / name).read_bytes())
    raw[-1] ^= 1
    repository = hub.repositories["someone/one"]
    good, digest = repository.files[name], repository.digest(name)
    repository.files[name] = Stored(raw=bytes(raw))
    repository.digests[name] = digest  # the hub says so; the network has damaged it
    with pytest.raises(PackError, match=r"the download was damaged, and is removed .*; run the same command again"):
        find_pack(Path("someone/one"), patience=HASTY)
    repository.files[name] = good
    assert contents(find_pack(Path("someone/one"), patience=HASTY)) == contents(packed)


def quality(pack: Pack) -> Quality:
    figure = Estimate(0.25, 0.01)
    source = SourceQuality("0" * 64, True, 8, Estimate(0.01234, 0.00056), figure, 0.0, figure, figure, figure, 0.0, 0.0)
    size = pack.manifest.totals.content
    return Quality("a text", "0" * 64, 2, 64, 126, size, None, Estimate(6.5, 0.125), source)


def run(*words: str) -> str:
    done = CliRunner().invoke(main, list(words))
    assert TOKEN not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's client
def test_an_upload_can_be_run_and_its_card_says_what_was_measured(
    hub: HubServer, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "packed"))
    base = "---\nlicense: apache-2.0\n---\n# Base\n"
    hub.add("someone/base", tmp_path / "nothing").put("README.md", Stored(raw=base.encode()))
    words = ("upload", str(folder), "me/tiny:4bit", "--base-model", "someone/base", "--budget", "1G")
    assert "the hub refuses access (401); log in with hf auth login" in run(*words)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "loss | not measured" in run(*words, "--dry-run")
    assert "me/tiny" not in hub.repositories, "a dry run uploads nothing"
    run(*words, "--private")
    assert hub.repositories["me/tiny"].access == "private"
    card = ModelCard(hub.repositories["me/tiny"].files["README.md"].read(0, 1 << 20).decode())
    facts = card.data.to_dict()
    assert (facts["base_model"], facts["base_model_relation"]) == ("someone/base", "quantized")
    assert (facts["license"], facts["library_name"]) == ("apache-2.0", "moe-pack")
    assert "not measured" in card.text
    assert contents(find_pack(Path("me/tiny:4bit"))) == contents(folder)

    edited = str(card).replace("# tiny", "# My own words").replace("apache-2.0", "mit")
    hub.repositories["me/tiny"].put("README.md", Stored(raw=edited.encode()))
    with Pack(folder) as pack:
        write_sidecar(folder, QUALITY_FILE, quality(pack), pack.manifest.root)
    run(*words)
    card = ModelCard(hub.repositories["me/tiny"].files["README.md"].read(0, 1 << 20).decode())
    assert card.data.to_dict()["license"] == "mit", "what the user wrote stays"
    assert "# My own words" in card.text
    assert card.text.count("## 4bit") == 1
    assert "0.01234 ± 0.00056 (95%) nats a token" in card.text
    assert "not measured" not in card.text
    assert "moe-run me/tiny:4bit --budget 1G" in card.text
    assert sum(count for path, count in hub.requests.items() if path.startswith("PUT")) == len(
        [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    ), "the second upload sends no large file again"


def test_an_upload_names_what_is_wrong(hub: HubServer, packed: Path) -> None:
    for name, message in (("me", "expected owner/repository"), ("me/x@v1", "expected owner/repository")):
        with case(name):
            done = CliRunner().invoke(main, ["upload", str(packed), name])
            assert done.exit_code == 2
            assert message in done.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's client
def test_every_command_on_the_page_runs(
    hub: HubServer, demo_pack: PackMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add("owner/repository", DEMO_MODEL)
    hub.add("owner/repository", demo_pack("up", 4), "4bit/")
    hub.add("mistralai/Mixtral-8x7B-v0.1", tmp_path / "nothing")
    page = (TESTS.parent / "docs" / "hub.md").read_text("utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^    (moe-(?:pack|run) .*)$", page, re.MULTILINE)]
    assert [command[1] for command in commands] == ["owner/repository:4bit", "convert", "upload"]
    for program, *arguments in commands:
        done = CliRunner().invoke(moe_run if program == "moe-run" else main, arguments, prog_name=program)
        assert done.exit_code == 0, (program, arguments, done.output, done.exception)


def test_without_the_client_a_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch, packed: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PackError, match=r"^someone/one: no such folder; .* pip install 'moe-pack\[hub\]'$"):
        find_pack(Path("someone/one"))
    assert find_pack(packed) == packed, "folders need no client"
