"""Every message of the product stands in one file, so that a change of one is read as prose."""

from messages import GOLDEN, collected_messages


def test_the_messages_are_those_of_the_golden_file() -> None:
    assert GOLDEN.read_text("utf-8") == collected_messages(), "run `make messages`, and read what changed"
