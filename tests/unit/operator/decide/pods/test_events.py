"""Which changes of a status are worth an Event, and that the same one is written once."""

from datetime import UTC, datetime, timedelta

from fairlead_operator.decide.pods.events import Note, changes, event_about
from support.operator_bodies import Object, resource_body

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def blocked(*codes: str, of: str = "Pod/a", since: str = "then") -> Object:
    blockers = [
        {"code": c, "object": of, "since": since, "message": f"m-{c}", "hint": "h"} for c in codes
    ]
    return {"blockers": blockers}


def ready(status: str = "True") -> Object:
    return {
        "blockers": [],
        "conditions": [{"type": "Ready", "status": status, "message": "one pod serves"}],
    }


def test_every_new_code_gets_an_event_with_its_hint_as_fault_or_stage() -> None:
    notes = changes({}, blocked("DoesNotFit", "Starting"))
    assert notes == [
        Note("DoesNotFit", "m-DoesNotFit (h)", "Pod/a then", "Warning"),
        Note("Starting", "m-Starting (h)", "Pod/a then", "Normal"),
    ]
    assert changes(blocked("DoesNotFit", "Starting"), blocked("DoesNotFit", "Starting")) == []
    more = changes(blocked("DoesNotFit"), blocked("DoesNotFit", "QuotaExceeded", "QuotaExceeded"))
    assert [note.reason for note in more] == ["QuotaExceeded"]


def test_the_first_gets_an_event_when_another_takes_its_place() -> None:
    assert [n.reason for n in changes(blocked("DoesNotFit", "Starting"), blocked("Starting"))] == [
        "Starting"
    ]
    moved = changes(blocked("CrashLoop"), blocked("CrashLoop", of="Pod/b"))
    assert [(n.reason, n.about) for n in moved] == [("CrashLoop", "Pod/b then")]


def test_the_end_of_the_last_gets_an_event_with_what_serves_now() -> None:
    (note,) = changes(blocked("Starting"), ready())
    assert (note.reason, note.kind) == ("Ready", "Normal")
    assert note.message == "Starting is over: one pod serves"
    assert changes(blocked("Starting"), ready("False"))[0].reason == "Unblocked"
    assert changes(ready(), ready()) == changes({}, ready()) == []


def test_one_event_has_one_name_whenever_it_is_written_and_two_have_two() -> None:
    body, note = resource_body(), Note("A", "m", "x")
    first = event_about(body, note, NOW)
    later = event_about(body, note, NOW + timedelta(minutes=1))
    assert first["metadata"] == later["metadata"]
    others = [note._replace(reason="B"), note._replace(about="y")]
    names = {event_about(body, one, NOW)["metadata"]["name"] for one in (note, *others)}
    assert len(names) == 3
    assert first["involvedObject"]["uid"] == "uid-1"
    assert event_about(body, note._replace(message="a\x1b[31m\nb"), NOW)["message"] == "a [31m b"
