"""Addresses of hosts, their names, and the secret that they share."""

from __future__ import annotations

import os
import socket

import pytest

from elche.comm.control.addresses import (
    GONE_AFTER_S,
    format_address,
    host_name,
    is_loopback,
    keep_alive,
    listen,
    own_address,
    parse_address,
)
from elche.errors import CommunicationError, ConfigError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a:1", ("a", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:5", ("::1", 5)),
    ],
)
def test_an_address_is_read_and_written(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "it") == address
    assert format_address(*address) == text


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:b", "a:65536", "[]:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected it to be host:port, got"):
        parse_address(text, "it")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_listening_on_one_address_alone(host: str) -> None:
    assert own_address(host) == host
    assert is_loopback(host)
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] == host
        with socket.create_connection(listener.getsockname()[:2], 5.0) as connection:
            keep_alive(connection)
            option = socket.TCP_USER_TIMEOUT
            after_ms = connection.getsockopt(socket.IPPROTO_TCP, option)
            assert after_ms == GONE_AFTER_S * 1e3
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_host_without_a_route_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*asked: object, **more: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(CommunicationError, match="no route to host 'there': no such"):
        own_address("there")
    assert not is_loopback("there")


def test_a_host_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELCHE_HOST", raising=False)
    assert os.readlink("/proc/self/ns/net") in host_name()
    monkeypatch.setenv("ELCHE_HOST", "b")
    assert host_name() == "b"
