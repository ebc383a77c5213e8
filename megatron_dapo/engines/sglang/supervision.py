"""What the engine needs of the supervision of its servers' processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_dapo.engines.sglang.client import SGLangClient


class Supervision(Protocol):
    """Keeps servers working: the fleet, or `Unsupervised` for an engine that was only connected."""

    def check(self, server: SGLangClient) -> None:
        """A request on it failed: find out now whether it still works. Until then it gets no new requests."""

    def recover(self, server: SGLangClient, cause: BaseException) -> None:
        """It has failed: admit it again, or restart it. Returns at once; `server.recovering` is true until done."""

    def recovering(self) -> bool:
        """Whether any server is being recovered."""

    async def recovered(self) -> None:
        """Waits until no server is being recovered: each one serves again, or cannot."""

    async def end(self, servers: Sequence[SGLangClient]) -> list[SGLangClient]:
        """Ends the processes of these servers, which frees their GPU memory; they are restarted when the engine has
        the GPUs again. Returns the servers that are not ours to end."""

    async def stop(self) -> None:
        """No more checks and restarts."""

    async def close(self) -> None:
        """Ends what was started."""


class Unsupervised:
    """A server that fails stays out until the next weight update."""

    def check(self, server: SGLangClient) -> None:
        pass

    def recover(self, server: SGLangClient, cause: BaseException) -> None:
        pass

    def recovering(self) -> bool:
        return False

    async def recovered(self) -> None:
        pass

    async def end(self, servers: Sequence[SGLangClient]) -> list[SGLangClient]:
        return list(servers)

    async def stop(self) -> None:
        pass

    async def close(self) -> None:
        pass
