"""The table of statuses in docs/endings.md: our answers, and what OpenAI's own client makes of them."""

from __future__ import annotations

import httpx2
import openai
import pytest
from fault_matrix import document_tables
from quart import Response
from trio.testing import MockClock

from trioleg import errors
from trioleg.outputs import Ending, EndingKind
from trioleg.runtime.health import Health, LLMState
from trioleg.server.failures import error_response

_ABORTED = "the request was aborted"
# By the first cells of the rows.
ERRORS = {
    "400": errors.InvalidRequestError("n is 0; allowed: at least 1", parameter="n"),
    "500 `output_error`": errors.OutputError("an output cannot be used"),
    "500 `request_aborted`, by its id": Ending(EndingKind.ABORTED, _ABORTED).error(),
    "500 `request_aborted`, by the engine": Ending(EndingKind.ABORTED, _ABORTED, engine=0).error(),
    "503 `engine_dead`": errors.EngineDeadError("its process is gone"),
    "503 `engine_unavailable`": errors.EngineUnavailableError("it is loading", retry_after=2.5),
    "503 `server_shutdown`": errors.ServerShutdown("the server is shutting down"),
    **{
        f"429 `{code}`": errors.OverloadedError("no room", code=code, retry_after=2.5)
        for code in errors.OVERLOAD_CODES
    },
    "504 `deadline_exceeded`": errors.DeadlineExceeded("its time is over"),
}
# Only behind a stream's 200, which no client repeats.
EVENT_ONLY = "`reader_too_slow`"


def documented() -> dict[str, bool]:
    """The first cell of each row, and whether its last one begins with "yes"."""
    rows = [row.strip("| ").split(" | ") for row in document_tables()[1][2:]]
    return {cells[0]: cells[-1].startswith("yes") for cells in rows}


async def is_repeated(response: Response) -> bool:
    """By a client that may do so once."""
    body = await response.get_data(as_text=False)
    tries = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        tries.append(request)
        headers = list(response.headers.items())
        return httpx2.Response(response.status_code, headers=headers, content=body)

    async with (
        httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http,
        openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="any", max_retries=1, http_client=http
        ) as client,
    ):
        with pytest.raises(openai.APIStatusError):
            await client.models.list()
    return len(tries) == 2


@pytest.mark.parametrize("row", ERRORS)
async def test_openais_client_does_what_the_table_says(autojump_clock: MockClock, row: str) -> None:
    error = ERRORS[row]
    assert error is not None
    response = error_response(error, Health(LLMState.RESTARTING, "its process is gone", 2.5))
    code = (await response.get_json())["error"]["code"]
    shown = f"{response.status_code}" if code is None else f"{response.status_code} `{code}`"
    assert row.split(",")[0] == shown
    assert await is_repeated(response) == documented()[row]


def test_no_row_is_left_out() -> None:
    assert documented().keys() == {*ERRORS, EVENT_ONLY}
    assert not documented()[EVENT_ONLY]
