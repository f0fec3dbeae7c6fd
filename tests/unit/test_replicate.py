"""What is heard of a window while it runs."""

from kit.replicate import progress


def test_the_services_are_checked_when_another_request_has_failed_and_not_before() -> None:
    checked: list[int] = []
    told: list[str] = []
    hear = progress(told.append, "measure", lambda: checked.append(1))
    for failed in (0, 0, 2, 2, 3):
        hear({"event": "progress", "done": 5, "of": 9, "failed": failed})
    hear({"event": "done"})
    assert (len(checked), told) == (2, [])
