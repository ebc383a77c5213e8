"""Rank 0's engine in a thread with an event loop, as in the trainer."""

import asyncio
import threading
from concurrent.futures import Future

from connect_engine import connect_engine


class EngineThread:
    """Connects to the servers at `urls`, which have weights of `version`."""

    def __init__(self, urls, config, directory, version):
        self.loop, self.rollout = asyncio.new_event_loop(), config.rollout
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engine = self.do(connect_engine(urls, config.rollout, model=str(directory), version=version))
        self.server = self.engine.servers[-1]

    def start(self, work) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def do(self, work):
        return self.start(work).result(timeout=90)

    def load_weights(self, version, buckets):
        return self.start(self.engine.load_weights(version, buckets))

    def serve_weights(self, version):
        return self.start(self.engine.serve_weights(version))
