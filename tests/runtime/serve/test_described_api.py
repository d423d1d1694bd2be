"""Random requests by the API's own description: the server never fails, and every answer has its described shape."""

import logging

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.served import served

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("examples", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_random_requests_get_answers_of_the_described_shape(examples: int, caplog: pytest.LogCaptureFixture) -> None:
    """Sends so many examples of each mode to each endpoint."""
    statuses: set[tuple[str, int]] = set()
    with served() as server:
        schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
        schema.config.update(base_url=server.url)
        for result in schema.get_all_operations():
            operation = result.ok()
            # Without a body there is nothing that could be of a wrong type.
            modes = list(schemathesis.GenerationMode) if operation.body else [schemathesis.GenerationMode.POSITIVE]
            for mode in modes:

                @settings(
                    max_examples=examples,
                    derandomize=True,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(random_case=operation.as_strategy(generation_mode=mode))
                def try_one(random_case: schemathesis.Case) -> None:
                    answer = random_case.call_and_validate(checks=CHECKS)
                    statuses.add((operation.path, answer.status_code))

                try_one()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        assert {(path, 200), (path, 400)} <= statuses, "some of them are answered, and some refused"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
