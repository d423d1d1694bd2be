"""Shared by the tests of the server."""

from collections.abc import Iterator

import openai
import pytest
from support.scripted_scheduler import Script
from support.served import Served, openai_client, served


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    """A server that always gives the same answer."""
    with served(Script("Hello there!", cached=3)) as server:
        yield server


@pytest.fixture
def client(plain: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's client of that server."""
    with openai_client(plain) as made:
        yield made
