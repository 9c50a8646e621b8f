"""`elche run` on several hosts: one run, one end, known to every launcher by name."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elche.cli.main import main
from elche.errors import CommunicationError, ConfigError
from elche.runtime.hosts.follower import follow_leader
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.hosts.leader import Leader
from elche.runtime.hosts.remote_start import RemoteStart
from elche.runtime.hosts.standby import Standby
from elche.runtime.process.launch import LaunchConfig
from tests.harness.printing import Printing
from tests.runtime.hosts.launchers import (
    WAIT_S,
    Cluster,
    free_port,
    launched,
    write_key,
)

pytestmark = pytest.mark.distributed

RANKS = str(Path(__file__).parent / "cases" / "host_ranks.py")
TWO = (("--nproc", "1"), ("--nproc", "1"))
OTHER_TORCH = (
    "-c",
    "from elche.runtime.hosts import hosts_config as h;"
    "h.installed_versions = lambda: {'elche': h.installed_versions.__name__};"
    "from elche.cli.main import main; main()",
)
OTHER_PROTOCOL = (
    "-c",
    "from elche.runtime.hosts import hosts_config, launcher_link as link;"
    "hosts_config.PROTOCOL_VERSION, own = 1, link.to_wire;"
    "link.to_wire = lambda message: {'rack': 7} | {"
    "name: each for name, each in own(message).items() if name != 'ports'};"
    "from elche.cli.main import main; main()",
)
TRAINING = """
import torch
import elche
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer, loader = elche.setup(model, optimizer, loader, leave_out=False)
for x, y in loader:
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(p.double().sum().item() for p in model.parameters())
print(f"sum {total!r} by {elche.summary().transport}", flush=True)
elche.shutdown()
"""


def cluster(folder: Path, case: str, **more: object) -> Cluster:
    """Two hosts with a rank each, unless said otherwise."""
    settings = {"ranks": TWO, "script": (RANKS, case, str(folder)), **more}
    return Cluster(folder, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_hosts_train_as_one(tmp_path: Path, address: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    host = f"[{address}]" if ":" in address else address
    two = Cluster(
        tmp_path,
        ranks=(("--speeds", "1,1"), ("--speeds", "1")),
        script=(str(script),),
        rendezvous=f"{host}:{free_port(address)}",
    )
    with launched(two) as hosts:
        assert [host.end() for host in hosts] == [0, 0], hosts[0].output
        # Ranks' ends of lines are written apart, so two lines may stand in one.
        found = [re.findall(r"sum (\S+) by gloo", host.output) for host in hosts]
    assert [len(each) for each in found] == [2, 1]
    assert len({*found[0], *found[1]}) == 1


def test_ranks_are_counted_over_hosts(tmp_path: Path) -> None:
    ranks = (("--nproc", "2", "--policy", "async"), ("--nproc", "1"))
    with launched(cluster(tmp_path, "places", ranks=ranks)) as hosts:
        assert [host.end() for host in hosts] == [0, 0], hosts[1].output
        for number, (rank, place, many) in enumerate(((1, 1, 2), (2, 0, 1))):
            text = hosts[number].output
            assert f"rank {rank} is WORLD_SIZE=3" in text
            assert f"rank {rank} is LOCAL_RANK={place}" in text
            assert f"rank {rank} is LOCAL_WORLD_SIZE={many}" in text
            assert f"rank {rank} is GROUP_RANK={number}" in text
            assert f"rank {rank} is ELCHE_POLICY=async" in text
            assert f"rank {rank} is ELCHE_LISTEN=127.0.0.1" in text
    assert "waiting for 1 other hosts; on each: elche run --nnodes 2" in hosts[0].output


@pytest.mark.slow
def test_a_failure_anywhere_ends_all_by_name(tmp_path: Path) -> None:
    with launched(cluster(tmp_path, "fails")) as hosts:
        assert [host.end() for host in hosts] == [7, 7]
        assert "rank 0 is told: rank 1 failed: ValueError: x" in hosts[0].output
        assert "ended with code 7: rank 1 failed: ValueError: x" in hosts[1].output


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("at", [0, 1])
def test_a_launcher_that_dies_ends_all_by_name(tmp_path: Path, at: int) -> None:
    with launched(cluster(tmp_path, "waits")) as hosts:
        for host in hosts:
            host.wait_for("is ready")
        hosts[at].process.kill()
        assert hosts[at].end() == -signal.SIGKILL
        assert hosts[1 - at].end() == (1 if at == 0 else 137)
        text = hosts[1 - at].output
        if at == 0:
            assert re.search(r"lost host 0 at 127\.0\.0\.1:\d+: its launcher", text)
            assert "lost the coordinator" in text
            assert "host 0 with --resume, from the last checkpoint in a --check" in text
            assert "outlive that with `elche witness` on a third machine" in text
        else:
            assert "is told: rank 1 failed: the launcher of host 1 (" in text


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("case", "number", "code"),
    [("waits", signal.SIGTERM, 143), ("apart", signal.SIGINT, 130)],
)
def test_a_signal_to_one_launcher_ends_all(
    tmp_path: Path, case: str, number: signal.Signals, code: int, at: int
) -> None:
    with launched(cluster(tmp_path, case)) as hosts:
        for host in hosts:
            host.wait_for("is ready")
        hosts[0].wait_until_idle()  # it knows of them
        hosts[at].process.send_signal(number)
        assert [host.end() for host in hosts] == [code, code], hosts[0].output
        where = r" on host 1 \(" if at else ""
        said = rf"interrupted: the launcher was sent {number.name}{where}"
        for host in hosts:
            assert re.search(rf"elche run: .*{said}", host.output), host.output
            if case == "waits":
                assert re.search(f"is told: {said}", host.output), host.output


@pytest.mark.slow
def test_ranks_that_heed_a_signal_save_on_all_hosts(tmp_path: Path) -> None:
    with launched(cluster(tmp_path, "heeds")) as hosts:
        for host in hosts:
            host.wait_for("is ready")
        hosts[0].wait_until_idle()  # it knows of them
        hosts[1].process.send_signal(signal.SIGTERM)
        assert [host.end() for host in hosts] == [143, 143]
    saved = {path.name: path.read_text() for path in tmp_path.glob("saved-*")}
    assert saved == {"saved-0": "SIGTERM", "saved-1": "SIGTERM"}


@pytest.mark.slow
def test_a_job_that_is_cancelled_signals_all_launchers(tmp_path: Path) -> None:
    # Once: the second one counted as impatience, and killed ranks that were saving.
    with launched(cluster(tmp_path, "heeds")) as hosts:
        for host in hosts:
            host.wait_for("is ready")
        hosts[0].wait_until_idle()  # it knows of them
        for host in hosts:
            host.process.send_signal(signal.SIGTERM)
        assert [host.end() for host in hosts] == [143, 143]
    assert len(list(tmp_path.glob("saved-*"))) == 2


@pytest.mark.slow
def test_other_versions_are_refused_by_name_on_both_hosts(tmp_path: Path) -> None:
    skewed = cluster(tmp_path, "waits", entries=(("-m", "elche"), OTHER_TORCH))
    with launched(skewed) as hosts:
        assert [host.end() for host in hosts] == [2, 2]
        for host in hosts:
            assert re.search(r"host 1 \(.*\) has elche <lambda>, host 0", host.output)


@pytest.mark.slow
def test_another_protocol_is_refused_by_name_on_both_hosts(tmp_path: Path) -> None:
    """A launcher that says of itself what this version does not know."""
    skewed = cluster(tmp_path, "waits", entries=(("-m", "elche"), OTHER_PROTOCOL))
    with launched(skewed) as hosts:
        assert [host.end() for host in hosts] == [2, 2]
        for host in hosts:
            said = r"host 1 \(.*\) has elche's protocol 1, host 0 \(.*\) has \d+; in"
            assert re.search(said, host.output), host.output


@pytest.mark.slow
def test_another_key_is_no_host_of_the_run(tmp_path: Path) -> None:
    keys = [tmp_path / name for name in "ab"]
    for key in keys:
        write_key(key)
    with launched(cluster(tmp_path, "waits", keys=keys)) as hosts:
        assert hosts[1].end() == 1
        assert "did not take this host: it has ended, has another" in hosts[1].output
        hosts[0].wait_for("dropped a launcher at .*: a frame is not authentic")
        hosts[0].process.send_signal(signal.SIGINT)
        assert hosts[0].end() == 130


@pytest.mark.slow
@pytest.mark.parametrize(("at", "codes"), [(0, [130, 2]), (1, [1, 130])])
def test_an_interruption_before_all_are_there_ends_who_is(
    tmp_path: Path, at: int, codes: list[int]
) -> None:
    with launched(cluster(tmp_path, "waits", nnodes=3)) as hosts:
        hosts[0].wait_for(r"host 1 \(.*\) is here, with 1 ranks")
        hosts[at].process.send_signal(signal.SIGINT)
        assert [host.end() for host in hosts] == codes, hosts[1].output
        assert f"interrupted{': SIGINT' * at} on host {at}" in hosts[1].output


def test_hosts_that_do_not_come_are_named() -> None:
    place = ("127.0.0.1", free_port())
    config = HostsConfig(
        nnodes=3, node_rank=0, rendezvous=place, key=b"k" * 32, gather_s=0.05
    )
    with pytest.raises(CommunicationError, match=r"hosts \[1, 2\] did not come to 127"):
        asyncio.run(Leader(config, own_ranks=1).gather())
    with pytest.raises(CommunicationError, match=r"host 0 did not answer at 127\.0\."):
        follow_leader(
            LaunchConfig(command=(), num_ranks=1, hosts=replace(config, node_rank=1))
        )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"nnodes": 1}, "--nnodes of at least 2, got 1"),
        ({"node_rank": 2}, "--node-rank of 0 to 1, got 2"),
        ({"rendezvous": ("0.0.0.0", 1)}, "--rendezvous to name an address that other"),
        ({"advertise": "::"}, "--advertise to name an address .* got '::'"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], match: str) -> None:
    place: dict[str, Any] = {"rendezvous": ("127.0.0.1", 1), "key": b"k" * 32}
    with pytest.raises(ConfigError, match=match):
        HostsConfig(**{"nnodes": 2, "node_rank": 1, **place, **options})


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--node-rank 1", "--node-rank needs --nnodes"),
        ("--nnodes 2 --node-rank 0", "--nnodes 2 needs --rendezvous, --key-file on"),
        (
            "--nnodes 2 --node-rank 0 --rendezvous a:1 --key-file k --max-restarts 1",
            "--max-restarts is for a run on one host; leave it out",
        ),
        ("--nnodes 2 --node-rank 0 --rendezvous a --key-file k", "to be host:port"),
    ],
)
def test_options_that_do_not_fit(words: str, match: str) -> None:
    ended = CliRunner().invoke(main, ["run", *words.split(), RANKS])
    assert ended.exit_code == 2
    assert re.search(match, " ".join(ended.output.split())), ended.output


def test_an_address_that_is_not_this_hosts_is_said() -> None:
    config = HostsConfig(
        nnodes=2, node_rank=0, rendezvous=("192.0.2.1", 1), key=b"k" * 32
    )
    with pytest.raises(
        CommunicationError, match=r"cannot listen at 192\.0\.2\.1:1.*map"
    ):
        config.listener()
    mapped = replace(config, rendezvous=("192.0.2.1", 0), advertise="127.0.0.1")
    with mapped.listener() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"--advertise .* this host, got 192\.0\.2"):
        Standby(replace(config, node_rank=1, advertise="192.0.2.1"))


STUB_SSH = """#!/bin/sh
# As ssh: an option, a host, a command for that host's shell.
[ "$1" = -q ] || exit 64
echo "$2" >> "$(dirname "$0")/asked"
[ "$2" != user@gone ] || exit 255
exec sh -c "$3"
"""


@pytest.mark.slow
@pytest.mark.parametrize(("host", "code"), [("localhost", 0), ("user@gone", 1)])
def test_hosts_are_started_over_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, code: int
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(STUB_SSH)
    ssh.chmod(0o700)
    monkeypatch.setenv("ELCHE_SSH", f"{ssh} -q")
    words = ["run", "--hosts", f"here:1,{host}:2", "--advertise", "127.0.0.1"]
    ended = subprocess.run(
        [sys.executable, "-m", "elche", *words, RANKS, "places", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert (tmp_path / "asked").read_text() == f"{host}\n"
    if code:
        assert "what starts the launcher on user@gone ended with code" in ended.stderr
    else:
        assert "rank 2 is WORLD_SIZE=3" in ended.stdout
        assert "rank 2 is GROUP_RANK=1" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_starts_a_host_ends_with_an_interrupted_launcher(
    tmp_path: Path, number: signal.Signals
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho started $$\nexec sleep 100\n")
    ssh.chmod(0o700)
    words = ("run", "--hosts", "here:1,there:1", "--advertise", "127.0.0.1", RANKS)
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "elche", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "ELCHE_SSH": str(ssh)},
        )
    launcher = Printing(process, output, WAIT_S)
    (started,) = launcher.wait_for(r"started (\d+)")
    process.send_signal(number)
    assert launcher.end() == (130 if number == signal.SIGINT else 1)
    assert "interrupted" in launcher.output
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(int(started), 0)


@pytest.mark.parametrize("text", ["a", "a:1", "a:0,b:1", "a:1,b", "a:1,-oX=y:1"])
def test_hosts_that_cannot_be_started(text: str) -> None:
    with pytest.raises(ConfigError, match="expected --hosts"):
        RemoteStart.read(text, ("script.py",))


def test_no_secret_is_among_a_processs_words() -> None:
    start = RemoteStart.read("a:1,b:2", ("script.py", "a b"))
    words = start.command(1, "10.0.0.1:5")
    assert words[:-1] == ("ssh", "-o", "BatchMode=yes", "b")
    assert words[-1].endswith("--key-file - --nproc 2 script.py 'a b'")
