"""Links of a limited rate: what they ask for, what they refuse, what they leave."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.hetero.bench import BenchConfig
from benchmarks.links import namespaces
from benchmarks.links.bench import LinkBenchConfig
from benchmarks.links.namespaces import slow_link
from elche.config_parts import TransportConfig
from elche.errors import ConfigError


def _can_make_namespaces() -> bool:
    try:
        with slow_link(1, 100.0):
            return True
    except ConfigError:
        return False


def _namespaces() -> list[str]:
    listed = subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True
    ).stdout
    own = f"elche{os.getpid()}"
    return [line for line in listed.splitlines() if line.startswith(own)]


def test_a_socket_inside_and_nothing_left() -> None:
    if not _can_make_namespaces():
        pytest.skip("needs Linux and a user who may make network namespaces")
    with slow_link(2, 50.0) as network:
        with network.listener() as listener:
            assert listener.getsockname()[0] == network.coordinator
            port = listener.getsockname()[1]
            code = (
                "import socket,sys;"
                f"socket.create_connection(({network.coordinator!r},{port}),10).close()"
            )
            command = [*network.command(1), "python3", "-c", code]
            assert subprocess.run(command, check=False, timeout=30).returncode == 0
        inside = ["tc", "-n", network.ranks[0][0], "qdisc", "show", "dev", "rank"]
        shown = subprocess.run(inside, check=True, capture_output=True, text=True)
        assert "tbf" in shown.stdout
        assert "50Mbit" in shown.stdout
    assert not _namespaces()


def test_without_the_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(ConfigError, match=r"expected Linux with ip and tc"),
        slow_link(2, 50.0),
    ):
        pass


def test_what_the_kernel_refuses_is_said() -> None:
    with pytest.raises(ConfigError, match=r"expected\s+a user who may make"):
        namespaces._run("false")


def test_settings() -> None:
    config = LinkBenchConfig(speeds=(1.0, 0.25), link_mbit=100.0, codec="int8")
    spec = config.spec("elche-async", 0)
    assert spec.options == {"codec": "int8", "transport": TransportConfig(kind="gloo")}
    assert config.spec("elche-sync", 0).options == spec.options
    assert spec.sent_counter == str(namespaces.SENT_BYTES)
    assert config.spec("solo-0", 0).sent_counter is None
    assert config.title.endswith("links of 100 Mbit/s, codec int8")
    with pytest.raises(ConfigError, match="expected positive --link-mbit, got 0"):
        LinkBenchConfig(speeds=(1.0, 0.25), link_mbit=0.0)
    with pytest.raises(ConfigError, match="unknown codec 'int3'; choose one of fp32"):
        LinkBenchConfig(speeds=(1.0, 0.25), link_mbit=1.0, codec="int3")


def test_ddp_is_cut_to_what_the_link_lets_through() -> None:
    config = LinkBenchConfig(
        speeds=(1.0, 0.25), link_mbit=10.0, seconds=30.0, time_capped=True
    )
    slow = config.spec("ddp", 0).samples
    fast = BenchConfig(speeds=(1.0, 0.25), seconds=30.0, time_capped=True)
    assert 32 <= slow < fast.spec("ddp", 0).samples / 20
    assert config.spec("elche-async", 0).max_seconds == 45.0


def test_a_large_model_has_few_steps_in_the_time() -> None:
    config = LinkBenchConfig(
        speeds=(1.0, 0.25),
        model="gpt-10m",
        seconds=61,
        ms_per_sample=40,
        time_capped=True,
        link_mbit=10,
    )
    assert config.spec("ddp", 0).samples == 2 * 8  # 32 s each for 40 MB of gradients
