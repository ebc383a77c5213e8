"""A `ServerProcess` without a process: its server runs in the test's own event loop, so a restart takes no time."""

from event_loop import close_at_the_end
from fake_server import FakeServer

from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.fleet import Fleet


class FakeProcess:
    """`server` is the running one. Each start makes a new `FakeServer` on the same port; `prepare` may change it."""

    ours = True

    def __init__(self, config, prepare=lambda server: None):
        self._config, self._prepare = config, prepare
        self.port, self.starts = 0, 0
        self.server = None
        self._wanted = False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def open(self):
        self.spawn()
        await self.wait_ready(None)
        return self

    def client(self, generate_url=None):
        return SGLangClient(self.url, self._config, generate_url=generate_url)

    def spawn(self, taken=None):
        self._wanted = True
        self.starts += 1

    async def wait_ready(self, server):
        if self.server is None:
            self.server = FakeServer()
            self._prepare(self.server)
            await self.server.start(self.port)
            self.port = int(self.server.url.rpartition(":")[2])

    def alive(self):
        return self._wanted and (self.server is None or not self.server.dead)

    @property
    def lost(self):
        return self._config.share_base and not self.alive()

    def log_tail(self):
        return "no log"

    async def end(self, patience=0.0):
        self._wanted = False
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop()


async def fake_fleet(config, model, count=1, prepare=lambda server: None):
    """(fleet, engine) over `count` fake processes."""
    fleet = Fleet(config, str(model), model, client_processes=False)
    fleet.processes = [await FakeProcess(config.servers, prepare).open() for _ in range(count)]
    return fleet, close_at_the_end(await fleet.start())
