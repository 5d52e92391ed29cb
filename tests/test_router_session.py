"""A member's judgement of its router's silence: pure, on times that the test chooses."""

from pdxfer.router.session import MISSED_BEATS, RECONNECT_BEATS, Session

BEAT_S = 0.5


def connected(now: float) -> Session:
    session = Session(BEAT_S, now)
    session.acked(known=True, now=now)
    return session


def beats(session: Session, start: float, seconds: float) -> bool:
    """Judge once a heartbeat without an answer; whether the connection was to be made anew."""
    return any([session.judge(start + n * BEAT_S) for n in range(1, round(seconds / BEAT_S) + 1)])


def test_three_beats_without_an_answer_are_a_lost_router() -> None:
    session = connected(100.0)
    beats(session, 100.0, MISSED_BEATS * BEAT_S)
    assert session.is_connected
    beats(session, 100.0 + MISSED_BEATS * BEAT_S, BEAT_S)
    assert not session.is_connected


def test_a_long_silence_asks_for_a_new_connection() -> None:
    assert beats(connected(0.0), 0.0, (RECONNECT_BEATS + 1) * BEAT_S)


def test_a_member_that_was_held_up_does_not_lose_its_router() -> None:
    """A minute in which it did not run is no silence; a router that stays silent afterwards is lost as ever."""
    session = connected(100.0)
    assert not session.judge(100.5)
    assert not session.judge(160.0)
    assert session.is_connected
    beats(session, 160.0, MISSED_BEATS * BEAT_S)
    assert not session.is_connected
