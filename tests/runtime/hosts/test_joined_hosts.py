"""Hosts that join a run under way by `elche join`, and leave it again."""

from __future__ import annotations

import re
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from elche.cli.main import main
from elche.comm.control.key_file import read_or_make_key
from elche.coordination.protocol.host_messages import OPEN
from elche.errors import CommunicationError, ConfigError
from elche.runtime.hosts.follower import follow_leader
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.process.launch import LaunchConfig
from tests.runtime.hosts.joining import SCRIPT, OpenRun, make_key
from tests.runtime.hosts.launchers import free_port

pytestmark = pytest.mark.distributed


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[Callable[..., OpenRun]]:
    made: list[OpenRun] = []

    def begin(policy: str) -> OpenRun:
        made.append(OpenRun(tmp_path, policy))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "cadence", "async"])
def test_a_host_joins_by_the_line_that_was_printed(
    policy: str, open_run: Callable[..., OpenRun]
) -> None:
    """It comes before the run has begun, and waits."""
    run = open_run(policy)
    first = run.begin(waits=True)
    second = run.join_as_told("host1", first)
    first.wait_for(r"host 1 \(.*\) is here, and waits until the first epoch has begun")
    run.tell("begin")
    first.wait_for("elche: rank 1 joined: going on with ranks 0, 1")
    first.wait_for(r"epoch \d+ of 2 by gloo")
    run.tell("stop")
    run.check([first, second])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_hosts_come_and_go_and_who_shares_memory_does(
    number: signal.Signals, open_run: Callable[..., OpenRun]
) -> None:
    run = open_run("async")
    first = run.begin()
    first.wait_for("epoch 1 of 1 by none, on one device")
    same = run.join("host0")
    first.wait_for(r"epoch \d+ of 2 by shared memory")
    other = run.join("host1", "--speeds", "1,0.5")
    first.wait_for(r"epoch \d+ of 4 by gloo")
    other.process.send_signal(number)
    assert other.end() == 128 + number
    assert f"elche join: ended with code {128 + number}" in other.output
    assert f"it was sent {number.name}; the run goes on" in other.output
    first.wait_for(r"going on with ranks 0, 1\b")
    before = len(first.wait_for(r"epoch \d+ of 2 by shared memory"))
    first.wait_for(r"epoch \d+ of 2 by shared memory", before + 2)
    run.tell("stop")
    run.check([first, same])


@pytest.mark.slow
def test_one_host_comes_while_another_leaves(
    open_run: Callable[..., OpenRun],
) -> None:
    run = open_run("cadence")
    first, leaves = run.begin_with_another()
    comes = run.join("host2")
    first.wait_for(r"host 2 \(.*\) is here; its ranks \[2\] will join")
    leaves.process.send_signal(signal.SIGTERM)
    assert leaves.end() == 143
    first.wait_for("joined: going on with ranks 0, 2")
    first.wait_for(r"epoch \d+ of 2 by gloo")
    run.tell("stop")
    run.check([first, comes])


@pytest.mark.slow
@pytest.mark.faults
def test_a_joined_host_that_is_gone_is_outlived(
    open_run: Callable[..., OpenRun],
) -> None:
    run = open_run("cadence")
    first, second = run.begin_with_another()
    second.process.kill()
    first.wait_for(r"the launcher of host 1 \(.*\) has ended or was killed")
    before = len(first.wait_for(r"epoch \d+ of 1 by none"))
    first.wait_for(r"epoch \d+ of 1 by none", before + 2)
    third = run.join("host2")
    first.wait_for(r"elche: rank 2 joined: going on with ranks 0, 2")
    run.tell("stop")
    run.check([first, third], deaths=1)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("how", ["killed", "fails", "interrupted"])
def test_the_first_hosts_end_is_all_hosts_end(
    how: str, open_run: Callable[..., OpenRun]
) -> None:
    run = open_run("cadence")
    first, second = run.begin_with_another()
    if how == "killed":
        first.process.kill()
        assert second.end() != 0
        assert f"lost host 0 at {run.address}: its launcher has ended" in second.output
    elif how == "fails":
        run.tell("fail")
        assert [first.end(), second.end()] == [1, 1], run.outputs()
        assert "join: ended with code 1: rank 0 failed: ValueError: a" in second.output
    else:
        first.process.send_signal(signal.SIGTERM)
        assert [first.end(), second.end()] == [143, 143], run.outputs()
        assert "143 (SIGTERM): interrupted: the launcher was sent SIG" in second.output


@pytest.mark.slow
def test_who_does_not_fit_is_refused_by_name_and_the_run_goes_on(
    tmp_path: Path, open_run: Callable[..., OpenRun]
) -> None:
    run = open_run("cadence")
    first = run.begin()
    first.wait_for(r"epoch 0 of 1 by")
    stranger = run.join("host1", key=make_key(tmp_path))
    other = run.join("host2", script=(*run.script, "0.5"))
    shorter = run.join("host3", script=(*run.script, "1", "3"))
    ended = [each.end() for each in (stranger, other, shorter)]
    assert ended == [1, 1, 1], run.outputs()
    assert "did not take this host: it has ended, has another" in stranger.output
    first.wait_for("dropped a launcher at .*: a frame is not authentic")
    assert "configuration differs between ranks: optimizer.lr" in other.output
    assert "none of its ranks is in the run any more, which goes on" in other.output
    said = "its loop is over 3 epochs, the others' over 100000: .*; none of its ranks"
    assert re.search(f"elche join: ended with code 1: .*{said}", shorter.output)
    run.tell("stop")
    run.check([first])


@pytest.mark.slow
def test_a_run_that_takes_in_nobody_says_so(open_run: Callable[..., OpenRun]) -> None:
    run = open_run("cadence alone")
    first = run.begin("--speeds", "1,1")
    first.wait_for(r"no host can join this run: none can join survive=False")
    other = run.join("host1")
    assert other.end() == 2
    said = r"cannot join the run under way: none can join\s+survive=False"
    assert re.search(said, other.output), other.output
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143, first.output


@pytest.mark.slow
def test_a_run_ends_while_a_host_has_not_joined_yet(
    tmp_path: Path, open_run: Callable[..., OpenRun]
) -> None:
    """Its ranks, which never come, are not waited for."""
    run = open_run("cadence")
    first = run.begin()
    never = tmp_path / "never.py"
    never.write_text("import time\nprint('here', flush=True)\ntime.sleep(1000)\n")
    second = run.join("host1", script=(str(never),))
    second.wait_for("here")
    run.tell("stop")
    run.check([first])
    assert second.end() == 0, second.output  # as the run


def test_nobody_there_is_said_in_time() -> None:
    place = "127.0.0.1", free_port()
    hosts = HostsConfig(
        nnodes=OPEN, node_rank=1, rendezvous=place, key=b"k" * 32, gather_s=0.05
    )
    with pytest.raises(CommunicationError, match=r"did not answer at 127\.0\.0\.1:"):
        follow_leader(LaunchConfig(command=(), num_ranks=1, hosts=hosts))


def test_a_key_is_made_once_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "key"
    key = read_or_make_key(str(path))
    assert len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_or_make_key(str(path)) == key
    with pytest.raises(ConfigError, match="cannot make --key-file"):
        read_or_make_key(str(path / "deeper"))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("run --listen --nnodes 2", "--listen begins on this host alone"),
        ("run --listen --max-restarts 1", "--max-restarts is for a run on one host"),
        ("run --listen --rendezvous 10.0.0.1", "expected --rendezvous to be host:port"),
        ("run --nnodes 0", "0 is not in the range"),
        ("join 10.0.0.1:1", "Missing option '--key-file'"),
    ],
)
def test_options_that_do_not_fit(words: str, match: str, tmp_path: Path) -> None:
    key = ["--key-file", str(tmp_path / "key")] if words.startswith("run --l") else []
    command, *options = words.split()
    ended = CliRunner().invoke(main, [command, *key, *options, str(SCRIPT)])
    assert ended.exit_code == 2
    assert re.search(match, " ".join(ended.output.split())), ended.output
