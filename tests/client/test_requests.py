"""The application's requests and the server's questions, across connections."""

from typing import Any, cast

from mcp_sessions.client.dialer import Link
from mcp_sessions.client.requests import PendingRequest, Questions, Requests

ONE, OTHER = cast(Link, object()), cast(Link, object())


def request(app_id: Any = 7) -> PendingRequest:
    return PendingRequest(app_id, {"id": app_id, "method": "tools/call"}, {}, 0.0)


def test_each_sending_has_an_id_of_its_own_and_any_answer_is_recognised() -> None:
    requests, pending = Requests(), request()
    requests.add(pending)

    ids = [requests.sending(pending, link, now=0.0) for link in (ONE, OTHER, OTHER)]

    assert ids[0] == 7, "as the application sent it, the first time"
    assert len(set(ids)) == 3
    assert all(requests.find(wire_id) is pending for wire_id in ids)
    assert requests.is_newest(pending, ids[2])
    assert not requests.is_newest(pending, ids[0])


def test_the_first_answer_is_the_answer() -> None:
    requests, pending = Requests(), request()
    requests.add(pending)
    first, second = (requests.sending(pending, link, now=0.0) for link in (ONE, OTHER))

    assert requests.done(pending)

    assert requests.find(first) is None
    assert requests.find(second) is None
    assert not requests.done(pending)
    assert not requests.is_open(pending)


def test_an_id_that_the_application_uses_again_is_another_request() -> None:
    requests, old, new = Requests(), request(), request()
    requests.add(old)
    requests.sending(old, ONE, now=0.0)
    requests.add(new)
    requests.sending(new, ONE, now=0.0)

    assert requests.find(7) is new
    assert not requests.done(old)
    assert requests.asked(7) is new
    assert requests.asked(["no id"]) is None


def test_a_question_that_comes_again_is_asked_once_and_answered_from_memory() -> None:
    """ASK2."""
    questions = Questions()

    assert questions.asked("q") == (True, None)
    assert questions.asked("q") == (False, None), "the application is at it"
    questions.answered("q", {"id": "q"})
    assert questions.undelivered() == [("q", {"id": "q"})]
    questions.delivered("q")
    assert questions.undelivered() == []
    assert questions.asked("q") == (False, {"id": "q"})


def test_the_memory_of_answers_is_bounded() -> None:
    questions = Questions()
    for number in range(1_000):
        questions.asked(number)
        questions.answered(number, {})

    assert len(questions.undelivered()) <= 256
    assert questions.asked(0) == (True, None)


def test_a_question_that_was_withdrawn_may_be_asked_anew() -> None:
    questions = Questions()
    questions.asked("q")
    questions.withdrawn("q")

    assert questions.asked("q") == (True, None)
    questions.withdrawn({"no": "id"})


def test_an_answer_to_a_question_that_was_withdrawn_goes_nowhere() -> None:
    questions = Questions()
    for question_id in ("thought about", "not sent yet"):
        questions.asked(question_id)
    assert questions.answered("not sent yet", {})

    questions.withdrawn("thought about")
    questions.withdrawn("not sent yet")

    assert not questions.answered("thought about", {}), "nobody wants to know any more"
    assert questions.undelivered() == []
    assert questions.asked("not sent yet") == (True, None), "no answer is left to give again"


def test_the_memory_of_withdrawn_questions_is_bounded() -> None:
    questions = Questions()
    for number in range(1_000):
        questions.asked(number)
        questions.withdrawn(number)

    assert questions.answered(0, {})
    assert not questions.answered(999, {})


def test_questions_of_a_server_that_is_gone_are_withdrawn_and_their_ids_are_free() -> None:
    questions = Questions()
    questions.asked(0)
    questions.answered(0, {"to": "the old one"})
    questions.asked(1)

    assert questions.forget() == [1]

    assert questions.asked(0) == (True, None)
    assert not questions.answered(1, {"to": "the old one"})
    assert questions.undelivered() == []
