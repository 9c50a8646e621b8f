"""Host 0 is lost, or the others are: one side goes on, with every sample once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.links.namespaces import Link, slow_link
from elche.cli.main import main
from elche.errors import ConfigError
from elche.runtime.coordinator_process import kept_coordinator
from tests.harness.printing import Printing
from tests.runtime.hosts.launchers import (
    ELCHE,
    NAMED,
    Cluster,
    free_port,
    launched,
    with_witness,
    witnessing,
    write_key,
)
from tests.runtime.hosts.test_host_deaths import (
    TRAINER,
    check_once,
    counting,
    end_run,
    wait_for_all,
)

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

SLOW = pytest.mark.slow
LEADS = r"host {} \(.*\) leads the run now, with hosts \[(.*)\]"


def wait_for_successor(hosts: list[Printing]) -> None:
    """All train, and the leading host has said who would succeed it."""
    hosts[0].wait_for(NAMED)
    wait_for_all(hosts, "trains at", len(hosts))


def check_at_once(hosts: list[Printing]) -> None:
    """They have gone on by the end of a launcher, and not by its silence, of 12 s."""
    assert not any("been silent" in host.output for host in hosts)


def after(hosts: list[Printing], world: int, since_s: float, within_s: float) -> None:
    """Waits until these train as a smaller group, in time."""
    found = wait_for_all(hosts, rf"is one of {world} at (\d+\.\d+)", world)
    assert max(map(float, found)) - since_s < within_s


@SLOW
@pytest.mark.parametrize(
    ("policy", "whole"),
    [
        ("async", False),
        ("sync", True),
        ("sync", False),
        ("cadence", True),
        ("async", True),
    ],
)
def test_the_others_go_on_without_host_0(
    tmp_path: Path, policy: str, whole: bool
) -> None:
    """Its launcher is killed, or all its processes at once, as by a power cut."""
    with launched(counting(tmp_path, policy, speeds=("1", "1", "1"))) as hosts:
        wait_for_successor(hosts)
        if whole:
            os.killpg(hosts[0].process.pid, signal.SIGKILL)
        else:
            hosts[0].process.kill()
        wait_for_all(hosts[1:], "is one of 2 at", 2)
        assert hosts[0].end() == -signal.SIGKILL
        assert hosts[1].wait_for(LEADS.format(1)) == ["2"]
        end_run(tmp_path, hosts[1:])
    check_at_once(hosts[1:])
    assert "lost host 0 at 127.0.0.1" in hosts[2].output
    assert "died: going on with ranks 1, 2" in hosts[1].output
    check_once(tmp_path, hosts[1:], world=2)


@SLOW
@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_the_next_host_is_the_successor_where_the_first_is_lost(
    tmp_path: Path, policy: str
) -> None:
    with launched(counting(tmp_path, policy, speeds=("1",) * 4)) as hosts:
        wait_for_successor(hosts)
        hosts[1].process.kill()
        wait_for_all(hosts, "is one of 3 at", 3)
        hosts[0].wait_for("host 2 .* is the next to lead it")
        hosts[0].process.kill()
        assert hosts[2].wait_for(LEADS.format(2)) == ["3"]
        wait_for_all(hosts[2:], "is one of 2 at", 2)
        end_run(tmp_path, hosts[2:])
    check_once(tmp_path, hosts[2:], world=2)


FRAIL = (
    "from elche.runtime.coordinator_process import kept_coordinator as kept; "
    "kept.MOST_DEATHS = 1; from elche.cli.main import main; main()"
)
"""A launcher that gives its coordinator up with the first that dies."""


@SLOW
def test_a_host_whose_standby_is_given_up_follows_the_next_one(tmp_path: Path) -> None:
    three = counting(tmp_path, "cadence", speeds=("1",) * 3)
    entries = ELCHE, ("-c", FRAIL), ELCHE
    with launched(replace(three, entries=entries)) as hosts:
        wait_for_successor(hosts)
        (standby,) = children_of(hosts[1].process.pid, kept_coordinator.MODULE)
        os.kill(standby, signal.SIGKILL)
        hosts[0].wait_for(r"host 1 \(.*\) can lead the run no more")
        hosts[0].wait_for("host 2 .* is the next to lead it")
        hosts[0].process.kill()
        assert hosts[2].wait_for(LEADS.format(2)) == ["1"]
        wait_for_all(hosts[1:], "is one of 2 at", 2)
        end_run(tmp_path, hosts[1:])
    assert "in a row: this host can lead no more" in hosts[1].output
    check_once(tmp_path, hosts[1:], world=2)


@SLOW
def test_the_new_leader_leads(tmp_path: Path) -> None:
    """A rank dies, and a host leaves, and its own signal ends the run."""
    with launched(counting(tmp_path, "sync", speeds=("1", "1", "1,1"))) as hosts:
        wait_for_successor(hosts)
        hosts[0].process.kill()
        wait_for_all(hosts[1:], "is one of 3 at", 3)
        hosts[2].process.send_signal(signal.SIGTERM)
        assert hosts[2].end() == 143, hosts[2].output
        assert "this host was sent SIGTERM and has left the run" in hosts[2].output
        hosts[1].wait_for("is one of 1 at")
        hosts[1].process.send_signal(signal.SIGTERM)
        assert hosts[1].end() == 143, hosts[1].output
    assert "ended with code 143 (SIGTERM): interrupted" in hosts[1].output


@SLOW
@pytest.mark.parametrize(("stopped", "signalled"), [(3, 1), (1, 2)])
def test_a_signal_while_hosts_come_to_the_new_leader_is_heeded(
    tmp_path: Path, stopped: int, signalled: int
) -> None:
    """They wait for a launcher that is stopped; host 1's ends all, another leaves."""
    with launched(counting(tmp_path, "cadence", speeds=("1",) * 4)) as hosts:
        wait_for_successor(hosts)
        os.kill(hosts[stopped].process.pid, signal.SIGSTOP)
        hosts[0].process.kill()
        hosts[signalled].wait_for("lost host 0")
        assert "leads the run now" not in hosts[1].output
        hosts[signalled].process.send_signal(signal.SIGTERM)
        hosts[stopped].process.send_signal(signal.SIGCONT)
        assert hosts[signalled].end() == 143, hosts[signalled].output
        if signalled == 1:
            assert [host.end() for host in hosts[2:]] == [143, 143]
        else:
            assert "and has left the run" in hosts[2].output
            rest = [hosts[1], hosts[3]]
            wait_for_all(rest, "is one of 2 at", 2)
            end_run(tmp_path, rest)
            check_once(tmp_path, rest, world=2)


@SLOW
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_leading_launcher_that_is_stopped_and_goes_on_later_ends(
    tmp_path: Path, policy: str
) -> None:
    """Its ranks and coordinator live meanwhile."""
    with launched(counting(tmp_path, policy, speeds=("1", "1", "1"))) as hosts:
        wait_for_successor(hosts)
        os.kill(hosts[0].process.pid, signal.SIGSTOP)
        wait_for_all(hosts[1:], "is one of 2 at", 2)
        os.kill(hosts[0].process.pid, signal.SIGCONT)
        assert hosts[0].end() == 1, hosts[0].output
        end_run(tmp_path, hosts[1:])
    assert "host 0 ends its part of the run" in " ".join(hosts[0].output.split())
    check_once(tmp_path, hosts[1:], world=2)


@SLOW
@pytest.mark.parametrize(
    ("at_once", "says"),
    [
        (False, r"lost host 1 at 127\.0\.0\.1"),
        (True, r"lost host 0 at .*; host 1 \(.*\), which was to lead, has not taken"),
    ],
)
def test_no_host_succeeds_the_successor(
    tmp_path: Path, at_once: bool, says: str
) -> None:
    with launched(counting(tmp_path, "cadence", speeds=("1",) * 4)) as hosts:
        wait_for_successor(hosts)
        hosts[0].process.kill()
        if not at_once:
            wait_for_all(hosts[1:], "is one of 3 at", 3)
        hosts[1].process.kill()
        assert [hosts[2].end(), hosts[3].end()] == [1, 1]
    for host in hosts[2:]:
        assert re.search(f"ended with code 1: {says}", host.output), host.output


@SLOW
def test_a_run_that_is_not_to_survive_ends_with_host_0(tmp_path: Path) -> None:
    three = counting(tmp_path, "sync", "mortal", speeds=("1", "1", "1"))
    with launched(three) as hosts:
        wait_for_all(hosts, "trains at", 3)
        hosts[0].process.kill()
        assert [hosts[1].end(), hosts[2].end()] == [1, 1]
    assert NAMED not in hosts[0].output
    for host in hosts[1:]:
        assert "ended with code 1: lost host 0 at 127.0.0.1" in host.output


@SLOW
@pytest.mark.parametrize(
    ("policy", "lost"), [("cadence", 0), ("sync", 0), ("async", 1), ("sync", 1)]
)
def test_two_hosts_and_a_witness_outlive_the_loss_of_either(
    tmp_path: Path, policy: str, lost: int
) -> None:
    write_key(tmp_path / "key")
    two = counting(tmp_path, policy, speeds=("1", "1"))
    with witnessing(tmp_path) as (witness, where):
        with launched(with_witness(two, where), makes_key=False) as hosts:
            wait_for_successor(hosts)
            hosts[lost].process.kill()
            rest = [hosts[1 - lost]]
            wait_for_all(rest, "is one of 1 at")
            end_run(tmp_path, rest)
            check_at_once(rest)
        witness.wait_for(rf"host {1 - lost} of run \w+ has the vote")
    check_once(tmp_path, rest, world=1)


@SLOW
def test_without_its_witness_a_host_ends(tmp_path: Path) -> None:
    write_key(tmp_path / "key")
    two = counting(tmp_path, "cadence", speeds=("1", "1"))
    with witnessing(tmp_path) as (witness, where):
        with launched(with_witness(two, where), makes_key=False) as hosts:
            wait_for_successor(hosts)
            os.kill(witness.process.pid, signal.SIGSTOP)
            hosts[0].process.kill()
            assert hosts[1].end() == 1
            os.kill(witness.process.pid, signal.SIGCONT)
        said = r"lost host 0 at 127\.0\.0\.1.*; the witness at \S+ does not answer"
        assert re.search(said, hosts[1].output), hosts[1].output


@SLOW
def test_a_witness_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    two = counting(tmp_path, "cadence", speeds=("1",))
    nowhere = f"127.0.0.1:{free_port()}"
    with launched(replace(with_witness(two, nowhere), nnodes=2)) as hosts:
        assert hosts[0].end() == 1
    said = f"the witness at {nowhere} does not answer"
    assert said in " ".join(hosts[0].output.split())


@pytest.fixture
def link() -> Iterator[Link]:
    try:
        with slow_link(3, 1000.0) as made:
            yield made
    except ConfigError as error:
        pytest.skip(f"needs network namespaces: {error}")


def behind(link: Link, cluster: Cluster) -> Cluster:
    """The same, each host in its namespace."""
    many = range(len(cluster.ranks))
    return replace(
        cluster,
        rendezvous=f"{link.ranks[0][1]}:29500",
        prefixes=[link.command(host) for host in many],
        environments=[{**cluster.environments[h], "ELCHE_HOST": ""} for h in many],
    )


def cut(link: Link, host: int) -> float:
    command = f"ip -n {link.switch} link set p{host} down"
    subprocess.run(command.split(), check=True)
    return time.monotonic()


@SLOW
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_host_0_is_cut_off_and_ends_and_the_others_go_on(
    tmp_path: Path, link: Link, policy: str
) -> None:
    three = counting(tmp_path, policy, speeds=("1", "1", "1"))
    with launched(behind(link, three)) as hosts:
        wait_for_successor(hosts)
        cut_s = cut(link, 0)
        after(hosts[1:], 2, cut_s, 20.0)
        assert hosts[0].end() == 1
        ended_s = time.monotonic() - cut_s
        end_run(tmp_path, hosts[1:])
    assert ended_s < 45.0
    said = "host 0 ends its part of the run: the other hosts are lost, and may go on"
    assert said in " ".join(hosts[0].output.split()), hosts[0].output
    assert "going on with" not in hosts[0].output
    assert "host 0 at 10.77.0.1:29500 has been silent for 12 s" in hosts[1].output
    check_once(tmp_path, hosts[1:], world=2)


@SLOW
@pytest.mark.parametrize("other", [1, 2])
def test_another_host_is_cut_off_and_ends_and_host_0_goes_on(
    tmp_path: Path, link: Link, other: int
) -> None:
    three = counting(tmp_path, "cadence", speeds=("1", "1", "1"))
    with launched(behind(link, three)) as hosts:
        wait_for_successor(hosts)
        cut_s = cut(link, other)
        rest = [hosts[0], hosts[3 - other]]
        after(rest, 2, cut_s, 20.0)
        assert hosts[other].end() == 1
        end_run(tmp_path, rest)
    check_once(tmp_path, rest, world=2)


@SLOW
@pytest.mark.parametrize("cut_off", [0, 1])
def test_the_witness_breaks_the_tie_of_two_that_are_cut_off(
    tmp_path: Path, link: Link, cut_off: int
) -> None:
    """The witness is on the third: who still reaches it goes on."""
    write_key(tmp_path / "key")
    two = behind(link, counting(tmp_path, "cadence", speeds=("1", "1")))
    on_third = link.ranks[2][1], tuple(link.command(2))
    with (
        witnessing(tmp_path, *on_third) as (_, where),
        launched(with_witness(two, where), makes_key=False) as hosts,
    ):
        wait_for_successor(hosts)
        cut_s = cut(link, cut_off)
        rest = [hosts[1 - cut_off]]
        after(rest, 1, cut_s, 25.0)
        assert hosts[cut_off].end() == 1
        end_run(tmp_path, rest)
    assert "does not answer" in hosts[cut_off].output
    check_once(tmp_path, rest, world=1)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--listen --witness a:1", "--witness is for --nnodes: a run under --listen"),
        ("--hosts a:1,b:1 --witness a:1", "--hosts starts all launchers itself"),
        ("--witness a:1", "--witness needs --nnodes"),
    ],
)
def test_a_witness_where_it_is_none_is_refused(words: str, match: str) -> None:
    ended = CliRunner().invoke(main, ["run", *words.split(), __file__])
    assert ended.exit_code == 2
    assert re.search(match, " ".join(ended.output.split())), ended.output


def children_of(launcher: int, word: str) -> list[int]:
    """Processes that a launcher has started with a word in their commands."""
    path = Path(f"/proc/{launcher}/task/{launcher}/children")
    children = [*map(int, path.read_text().split())]
    words = {each: Path(f"/proc/{each}/cmdline").read_text() for each in children}
    return [each for each in children if word in words[each]]


@SLOW
def test_a_signal_in_the_first_moment_of_a_new_leader_is_as_ever(
    tmp_path: Path,
) -> None:
    """Its ranks have not come yet: it is not known that they save, and end then."""
    words = (str(TRAINER), "cadence", str(tmp_path / "checkpoints"))
    three = Cluster(tmp_path, ranks=(("--nproc", "1"),) * 3, script=words)
    with launched(three) as hosts:
        hosts[0].wait_for(NAMED)
        for host in hosts:
            host.wait_for("20 batches")
        pids = [host.process.pid for host in hosts[1:]]
        ranks = [rank for pid in pids for rank in children_of(pid, TRAINER.name)]
        assert len(ranks) == 2
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        hosts[0].process.kill()
        hosts[1].wait_for("leads the run now")
        hosts[1].process.send_signal(signal.SIGTERM)
        hosts[1].wait_until_idle()  # it has been sent before they come
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        assert [host.end() for host in hosts[1:]] == [143, 143], hosts[1].output
        assert hosts[1].wait_for(r"ended by (.*)\n")[0].startswith("SIGTERM: ")
        assert not any("Traceback" in host.output for host in hosts[1:])
    assert list(tmp_path.glob("checkpoints/*/manifest.json"))


@SLOW
def test_a_trainer_ends_with_a_checkpoint_under_the_new_leader(tmp_path: Path) -> None:
    words = (str(TRAINER), "cadence", str(tmp_path / "checkpoints"))
    three = Cluster(tmp_path, ranks=(("--nproc", "1"),) * 3, script=words)
    with launched(three) as hosts:
        hosts[0].wait_for(NAMED)
        for host in hosts:
            host.wait_for("20 batches")
        hosts[0].process.kill()
        hosts[1].wait_for("died: going on with ranks 1, 2")
        hosts[1].process.send_signal(signal.SIGTERM)
        assert [host.end() for host in hosts[1:]] == [143, 143], hosts[1].output
        assert hosts[1].wait_for(r"ended by (.*)\n")[0].startswith("SIGTERM: ")
        assert not any("Traceback" in host.output for host in hosts[1:])
    assert list(tmp_path.glob("checkpoints/*/manifest.json"))
