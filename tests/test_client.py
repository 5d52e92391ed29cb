"""The controller's client against what is no controller, or one that comes and goes: one clear error, or no end."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdxfer.cli import main
from pdxfer.client import api
from pdxfer.client.api import ControllerClient
from pdxfer.core.errors import ConfigError, PdxferError, UnreachableError
from pdxfer.router.events import Happened
from pdxfer.router.server import RouterServer, RouterSettings

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: "


def stream(*numbers: int) -> bytes:
    """An answer with these events."""
    events = [{"number": number, "wall": 0.0, "kind": "joined", "detail": {}} for number in numbers]
    return HEAD + b"text/event-stream\r\n\r\n" + b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in events)


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that gives one of these answers a connection, then closes; its URL, and what it was asked."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    asked.append(connection.recv(4096).decode())
                    connection.sendall(answer)
            listener.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        thread.join(10)


@pytest.mark.parametrize(
    ("url", "where"),
    [("foo", "foo"), ("localhost:5580", "localhost:5580"), ("http://h:abc", "h:abc"), ("http://h/ x", "/ x")],
)
def test_a_url_that_is_none_is_wrong_usage(url: str, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every command that asks the controller."""
    for command in (["status"], ["events", "--follow"]):
        assert main.run([*command, "--url", url]) == 2
        error = capsys.readouterr().err
        assert where in error and "write it as http://HOST:PORT" in error and error.count("\n") == 1


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9\r\n", b"", HEAD + b"text/html\r\nContent-Length: 9\r\n\r\nhi"])
def test_a_port_that_speaks_something_else_is_unreachable(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 3."""
    with answering(answer) as (url, _):
        assert main.run(["status", "--url", url]) == 3
    error = capsys.readouterr().err
    assert f"the controller at {url} does not answer (" in error and error.count("\n") == 1


def test_a_web_server_sends_no_events() -> None:
    """It is said; it is not asked again and again."""
    with answering(HEAD + b"text/html\r\n\r\n<html>") as (url, asked):
        with pytest.raises(PdxferError, match="no pdxfer controller of this release"):
            next(ControllerClient(url).follow_events())
    assert len(asked) == 1


def test_events_go_on_after_a_connection_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no event had come yet; the reader says where it was."""
    monkeypatch.setattr(api, "_RECONNECT_S", 0.0)
    with answering(stream(), stream(7), stream(8)) as (url, asked):
        events = ControllerClient(url).follow_events()
        assert [next(events).number for _ in range(2)] == [7, 8]
    assert "last-event-id: 0" in asked[0].lower() and "last-event-id: 7" in asked[2].lower()


def test_a_controller_that_was_never_there_is_an_error() -> None:
    """A wrong address does not wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UnreachableError):
        next(ControllerClient(f"http://127.0.0.1:{port}").follow_events())


def test_the_events_of_a_restarted_router_are_later_than_those_of_the_one_before() -> None:
    """Its numbers begin again; who asks for events after number 500 would wait for 500 of them."""
    router = RouterServer(RouterSettings(bind="tcp://127.0.0.1:*"))
    try:
        router._record(Happened("joined", {}))
        router._record(Happened("left", {}))
        assert [event.number for event in router.events_after(500, 10)] == [1, 2]
        assert [event.number for event in router.events_after(1, 10)] == [2]
        assert router.events_after(2, 10) == []
    finally:
        router.close()


def test_urls_as_people_write_them_are_taken() -> None:
    """With and without a port or a slash at the end."""
    for url in ("http://127.0.0.1:5580", "http://host/", "https://[::1]:5580", "http://h/prefix"):
        ControllerClient(url)
    with pytest.raises(ConfigError):
        ControllerClient("http://:5580")
