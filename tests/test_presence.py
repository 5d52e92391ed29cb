"""Requests in an engine, as its heartbeats tell."""

from pdxfer.connector.presence import Presence


def told(presence: Presence) -> tuple[int, int]:
    return presence.num_running, presence.num_waiting


def test_a_request_waits_runs_is_preempted_and_leaves() -> None:
    """Ended ones do not count, whether another step comes or not."""
    presence = Presence()
    for request_id in ("a", "b", "c"):
        presence.arrived(request_id)
    assert told(presence) == (0, 3)
    presence.stepped({"a": 5, "b": 1})
    assert told(presence) == (2, 1)
    presence.stepped({"b": 1})
    assert told(presence) == (1, 2)
    presence.left("b")
    assert told(presence) == (0, 2)
    presence.left("a")
    presence.left("c")
    presence.stepped({"c": 1})
    assert told(presence) == (0, 0)
