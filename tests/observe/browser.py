"""A real headless Chromium, driven over its DevTools protocol: what a page logs, asks the network for, and contains."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)  # fmt: skip


class Tab:
    """One page. `events` holds everything the browser reported about it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._next, self._replies = socket, 0, {}
        self.events: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._replies.pop(data["id"]).set_result(data)
            else:
                self.events.append(data)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        self._replies[self._next] = reply = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._next, "method": method, "params": params})
        data = await asyncio.wait_for(reply, 30)
        assert "error" not in data, f"{method}: {data['error']}"
        return data["result"]

    async def evaluate(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def open(self, page: Path | str, width: int = 1360, height: int = 1000, scheme: str = "light") -> None:
        """`page`: a file, or an address."""
        url = page if isinstance(page, str) else page.resolve().as_uri()
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.resize(width, height)
        await self.call("Page.navigate", url=url)
        for _ in range(300):
            if any(event["method"] == "Page.loadEventFired" for event in self.events):
                return
            await asyncio.sleep(0.05)
        raise TimeoutError("the page did not load within 15 s")

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def focus_start(self) -> None:
        """The next Tab reaches the first control of the page. Otherwise it continues from where the page was last
        clicked or, in some versions of Chromium, scrolled to; `blur()` does not change that."""
        await self.evaluate("""(() => {
            const start = document.createElement("div");
            start.tabIndex = -1;
            document.body.prepend(start);
            start.focus();
            scrollTo(0, 0);
        })()""")

    async def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "ArrowRight": 39, " ": 32}[key]
        text = {"text": {"Enter": "\r", " ": " "}[key]} if key in ("Enter", " ") else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    async def until(self, script: str, seconds: float = 15.0) -> None:
        """Waits until the script's value is true."""
        for _ in range(round(seconds / 0.05)):
            if await self.evaluate(script):
                return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"not true within {seconds:g} s: {script}")

    async def screenshot(self, path: Path, *, full: bool = True) -> None:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def complaints(self) -> list[str]:
        """Console errors and warnings, uncaught exceptions, violations of the content security policy."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params)))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


@contextlib.asynccontextmanager
async def chromium():
    """A function that opens a new tab in a browser of its own, with an empty profile."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            BINARY, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with (
                aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
                contextlib.AsyncExitStack() as stack,
            ):

                async def new_tab() -> Tab:
                    async with session.put("/json/new?about:blank") as reply:
                        target = json.loads(await reply.text())
                    socket = await stack.enter_async_context(
                        session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
                    )
                    return Tab(socket)

                yield new_tab
        finally:
            process.kill()
            await process.wait()


async def _port(file: Path) -> int:
    for _ in range(600):
        if file.exists() and file.read_text().strip():
            return int(file.read_text().split()[0])
        await asyncio.sleep(0.05)
    raise TimeoutError("Chromium did not start within 30 s")
