"""The web application of the examples: in process, through ASGI, and behind its server, which is killed on the way."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from portals import no_thread_left, wait_until

ROOT = Path(__file__).resolve().parents[1]
APP = ROOT / "examples" / "fastapi_app.py"
ORDER = {"sku": "teapot", "quantity": 2}
PAYMENT = {"id": "evt-1", "reference": "PAY-9"}
RECEIPT = {"reference": "PAY-9", "items": ["teapot-0", "teapot-1"]}


@pytest.fixture
def create_app(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    monkeypatch.syspath_prepend(str(APP.parent))
    import fastapi_app

    return fastapi_app.create_app


@asynccontextmanager
async def served(app: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of the application for as long as it lives, without a server between them."""
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://orders") as client,
    ):
        yield client


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with no_thread_left():
        asyncio.run(main())


def test_an_order_is_started_paid_and_awaited(create_app: Callable[[Path], Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with served(create_app(tmp_path)) as client:
            started = await client.put("/orders/7", json=ORDER)
            assert (started.status_code, started.json()["state"] in ("running", "sleeping")) == (202, True)
            waiting = asyncio.create_task(client.get("/orders/7/result"))
            early = await client.get("/orders/7/result", params={"wait": 0.01})
            assert early.status_code == 504
            for _ in range(2):  # the payment service says everything twice
                assert (await client.post("/orders/7/payment", json=PAYMENT)).status_code == 202
            assert (await waiting).json() == RECEIPT
            assert (await client.get("/orders/7")).json() == {"state": "completed"}

    run(main)


def test_what_is_wrong_has_its_status(create_app: Callable[[Path], Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with served(create_app(tmp_path)) as client:
            await client.put("/orders/7", json=ORDER)
            for status, answer in (
                (202, await client.put("/orders/7", json=ORDER)),
                (409, await client.put("/orders/7", json=ORDER | {"quantity": 3})),
                (422, await client.put("/orders/8", json=ORDER | {"quantity": 0})),
                (404, await client.get("/orders/8")),
                (404, await client.post("/orders/8/payment", json=PAYMENT)),
            ):
                assert answer.status_code == status, answer.text
            await client.post("/orders/7/payment", json=PAYMENT)
            await client.get("/orders/7/result")
            late = await client.post("/orders/7/payment", json=PAYMENT | {"id": "evt-2"})
            assert late.status_code == 409

    run(main)


def test_an_order_outlives_the_application(create_app: Callable[[Path], Any], tmp_path: Path) -> None:
    """S49: who waits when it ends is told to come again."""

    async def main() -> None:
        async with served(create_app(tmp_path)) as client:
            await client.put("/orders/7", json=ORDER)
        assert (await client_after_the_end(create_app(tmp_path))).status_code == 503
        async with served(create_app(tmp_path)) as client:
            await client.post("/orders/7/payment", json=PAYMENT)
            assert (await client.get("/orders/7/result")).json() == RECEIPT

    run(main)


async def client_after_the_end(app: Any) -> httpx.Response:
    async with served(app):
        pass
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://orders") as client:
        return await client.get("/orders/7")


@contextmanager
def server(data: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The example behind its own server: the process, and its address."""
    command = [sys.executable, "-W", "error", str(APP), "--data", str(data), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not (found := re.search(r"running on (http://[0-9.]+:\d+)", said)):
                line = process.stderr.readline()
                assert line, f"it ended: {said}"
                said += line
            yield process, found[1]
        finally:
            process.kill()


def test_an_order_outlives_a_killed_server(tmp_path: Path) -> None:
    """S43: what was answered with 202 is there after kill -9."""
    with server(tmp_path / "data") as (process, address):
        assert httpx.put(f"{address}/orders/7", json=ORDER).status_code == 202
        process.kill()
    with server(tmp_path / "data") as (process, address):
        assert httpx.post(f"{address}/orders/7/payment", json=PAYMENT).status_code == 202
        process.kill()
    with server(tmp_path / "data") as (process, address):
        assert httpx.get(f"{address}/orders/7/result").json() == RECEIPT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_asked_to_stop_ends_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """S49: also while a client waits for a result, who has an answer before."""
    with server(tmp_path / "data") as (process, address):
        assert httpx.put(f"{address}/orders/7", json=ORDER).status_code == 202
        waiting = HTTPConnection(address.removeprefix("http://"))
        waiting.request("GET", "/orders/7/result?wait=2")
        # Answered later, these requests say that the server has the one before.
        wait_until(lambda: httpx.get(f"{address}/orders/7").json() == {"state": "sleeping"})
        process.send_signal(number)
        assert waiting.getresponse().status == 504
        waiting.close()
        _, said = process.communicate(timeout=20)
    assert process.returncode in (0, -number)
    assert "Application shutdown complete" in said
    assert "Traceback" not in said
