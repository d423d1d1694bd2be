"""A Ray cluster makes profiles and packs with the bytes of one process, also if its processes and machines die."""

import os
import random
import re
import secrets
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from support.cases import case
from support.killing import different_files, files_in
from support.models import TinyMixtral
from support.waiting import HANG_S, wait_until

from moe_pack.convert.cli.main import main

MODEL = TinyMixtral(128, 256, num_layers=3, num_experts=6, vocab_size=4096)
PROFILE = ("--tokens", "1024", "--sequence-length", "128", "--sensitivity", "none")
PACK = ("--workers", "1", "--memory", "256M", "--record-bits", "2", "--selector-bits", "2")
TOKEN = secrets.token_hex(32)  # one for all clusters: a process reads it once
NODE = {"num_cpus": 1, "memory": 4 << 30, "object_store_memory": 80 << 20}


def test_options_that_do_not_go_together_are_refused() -> None:
    both = {
        "--ray auto --part 1/2": "--ray makes all parts; remove --part",
        "--parts 2": "--parts needs --ray",
        "--ray ray://head:10001": "the command must run on a machine of the cluster",
    }
    given = {f"{command} {options}": line for options, line in both.items() for command in ("convert", "profile")}
    given["convert --ray auto --target-vram 1G"] = "--ray does not go with --target-vram"
    given["profile --ray auto --device cuda"] = "--ray makes profiles on CPUs"
    for arguments, message in given.items():
        with case(arguments):
            done = CliRunner().invoke(main, [*arguments.split(), "nowhere/at-all"])
            assert done.exit_code == 2 and message in " ".join(done.output.split())


@pytest.mark.parametrize("options", [["--ray", "auto", "--parts", "2"], ["--part", "1/2"], []])
@pytest.mark.parametrize("command", ["convert", "profile"])
def test_their_neighbours_pass(command: str, options: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [command, str(tmp_path), *options])
    assert done.exit_code == 1 and "config.json" in done.output  # the options pass; the folder has no checkpoint


def test_without_ray_a_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TinyMixtral().write(tmp_path / "source")
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(main, ["convert", str(source), "-o", str(tmp_path / "out"), "--ray", "local"])
    assert done.exit_code == 1 and "pip install 'moe-pack[ray]'" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_where_nothing_answers_ray_does_not_try_for_minutes(tmp_path: Path) -> None:
    source = TinyMixtral().write(tmp_path / "source")
    for address, reason in (
        ("127.0.0.1:1", "Connection refused"),
        ("127.0.0.1:head", "'head' is no port"),
        ("[::1]:1", ""),  # the reason depends on whether the machine has IPv6
    ):
        # in processes of their own: the first import of Ray decides how a process authenticates
        said = " ".join(finish(start("convert", source, tmp_path / "out", "--ray", address), code=1).split())
        assert f"--ray {address}: nothing answers there (" in said and reason in said
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write_with_tokenizer(tmp_path_factory.mktemp("ray") / "source")


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    """The results of one process: `profile` and `pack`."""
    folder = source.parent / "whole"
    finish(start("profile", source, folder / "profile", *PROFILE))
    finish(start("convert", source, folder / "pack", *PACK, "--profile", folder / "profile"))
    return folder


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two machines of one CPU each, as processes of this one."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # without it, what Ray does depends on files in the home folder
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # with Ray's 15, parts hardly run while other tests do
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            cluster.add_node(**NODE)
            yield cluster
        finally:
            cluster.shutdown()
    assert_no_workers()


def start(
    command: str, source: Path, out: Path, *options: object, program: Sequence[str] = ("-m", "moe_pack.convert.cli")
) -> subprocess.Popen[str]:
    arguments = [sys.executable, *program, command, source, "-o", out, *options]
    return subprocess.Popen(
        [str(argument) for argument in arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def with_patience(limit: str, seconds: float) -> Sequence[str]:
    """Returns a program that is moe-pack, but for one of the launcher's limits."""
    return (
        "-c",
        f"from moe_pack.convert import ray_launcher; ray_launcher.{limit} = {seconds}; "
        "from moe_pack.convert.cli.main import main; main()",
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == code, output
    return output


def workers() -> list[psutil.Process]:
    """Returns the processes in which parts run, of the clusters of this process."""
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::moe-pack"):
            found.append(process)
    return found


def assert_no_workers() -> None:
    """Waits for the ends of all processes in which parts run."""
    wait_until(lambda: not workers(), lambda: "processes of parts are left")


def wait_for_workers(driver: subprocess.Popen[str], num_workers: int = 1) -> list[psutil.Process]:
    while len(found := workers()) < num_workers and driver.poll() is None:
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_a_cluster_makes_the_profile_and_the_pack_of_one_process(
    source: Path, whole: Path, cluster: Any, tmp_path: Path
) -> None:
    ray = ("--ray", cluster.address)
    said = finish(start("profile", source, tmp_path / "profile", *PROFILE, *ray))
    assert "2 parts by Ray, 2 at once" in said and "moe-pack report" in said
    assert different_files(files_in(tmp_path / "profile"), files_in(whole / "profile")) == []

    said = finish(start("convert", source, tmp_path / "pack", *PACK, "--profile", whole / "profile", *ray))
    assert "bits an expert weight" in said
    assert different_files(files_in(tmp_path / "pack"), files_in(whole / "pack")) == []

    said = finish(start("convert", source, tmp_path / "pack", *PACK, "--profile", whole / "profile", *ray))
    assert "already contains the pack" in said

    program = with_patience("_LAST_PARTS_S", 0.0)  # what is left of the other part is killed, and the pack is complete
    finish(start("convert", source, tmp_path / "at once", *PACK, "--profile", whole / "profile", *ray, program=program))
    assert different_files(files_in(tmp_path / "at once"), files_in(whole / "pack")) == []
    assert_no_workers()


@pytest.mark.slow
def test_processes_that_are_killed_are_replaced(source: Path, whole: Path, cluster: Any, tmp_path: Path) -> None:
    seed = time.time_ns() % 10_000
    print(f"seed {seed}")  # noqa: T201  # to repeat a failure
    chance = random.Random(seed)
    for command, options, made in (
        ("profile", PROFILE, "profile"),
        ("convert", (*PACK, "--profile", whole / "profile"), "pack"),
    ):
        driver = start(command, source, tmp_path / made, *options, "--ray", cluster.address)
        num_killed = 0
        while num_killed < 3 and (found := wait_for_workers(driver)):
            victim = chance.choice(found)
            if num_killed:  # the first one dies at once: on a fast machine no part takes long
                time.sleep(chance.uniform(0, 1))
            if victim.is_running():
                victim.kill()
                num_killed += 1
        finish(driver)
        assert num_killed
        assert different_files(files_in(tmp_path / made), files_in(whole / made)) == [], seed


@pytest.mark.slow
def test_a_machine_that_goes_away_is_done_without(source: Path, whole: Path, cluster: Any, tmp_path: Path) -> None:
    driver = start(
        "convert", source, tmp_path / "pack", *PACK, "--profile", whole / "profile", "--ray", cluster.address
    )
    (first,) = wait_for_workers(driver)[:1]
    first.suspend()  # or its part may end before the other machine has one
    assert len(wait_for_workers(driver, 2)) == 2
    first.resume()
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    finish(driver)
    assert different_files(files_in(tmp_path / "pack"), files_in(whole / "pack")) == []


@pytest.mark.slow
def test_an_error_of_ours_ends_all_parts_and_ctrl_c_leaves_the_folder_to_be_continued(
    source: Path, whole: Path, cluster: Any, tmp_path: Path
) -> None:
    out, ray = tmp_path / "pack", ("--ray", cluster.address)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    said = finish(start("convert", source, tmp_path / "full", *PACK, *ray), code=1)
    message = "which is not part of a conversion; give a new or empty folder"  # Ray may print lines of its own below
    assert any(line.endswith(message) for line in said.splitlines()), said
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]

    said = finish(start("convert", source, out, "--workers", "2", *ray), code=1)
    assert re.search(r"a part needs 2 CPUs .* no machine of the cluster has both", said)

    program = with_patience("_PROBE_S", 0.001)
    said = finish(start("convert", source, out, *PACK, *ray, program=program), code=1)
    assert "gave no answer within 0 s" in " ".join(said.split())

    driver = start("convert", source, out, *PACK, "--profile", whole / "profile", *ray)
    wait_for_workers(driver)
    while not list(out.glob("conversion-*.journal")) and driver.poll() is None:
        time.sleep(0.01)
    driver.send_signal(2)
    assert "interrupted; the finished part is kept" in finish(driver, code=130)
    assert_no_workers()  # Ray kills parts of a command that ends
    assert not (out / "manifest.json").exists()
    finish(start("convert", source, out, *PACK, "--profile", whole / "profile", *ray))
    assert different_files(files_in(out), files_in(whole / "pack")) == []
