"""Headless Chromium driven over its DevTools socket: open a page, run script in it, take a picture."""

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

DEADLINE_S = 30.0


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.errors: list[str] = []
        """What the page threw, or logged as an error."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools call."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            while True:
                answer = await self._socket.receive_json()
                self._note(answer)
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]  # type: ignore[no-any-return]

    async def open(self, url: str, *, dark: bool = False, width: int = 1120, height: int = 900) -> None:
        """Go there with this colour preference."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                        mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self.run(script):
                await asyncio.sleep(0.05)

    async def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        metrics = await self.call("Page.getLayoutMetrics")
        size = metrics["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _note(self, answer: dict[str, Any]) -> None:
        params = answer.get("params", {})
        if answer.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif answer.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A fresh browser with one tab. Fails, never skips, where Chromium is missing: tests/run.sh installs it."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "no chromium here: apt-get install chromium (tests/run.sh does)"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", "--disable-background-networking", "--remote-debugging-port=0",
            f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with http.ws_connect(url, max_msg_size=64 << 20) as socket:
                    yield Page(socket)
        finally:
            process.kill()
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if file.exists() and (lines := file.read_text().splitlines()):
                return lines[0]
            assert process.returncode is None, f"chromium ended with {process.returncode}"
            await asyncio.sleep(0.05)
