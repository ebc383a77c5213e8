"""An engine over servers that already run, without supervision: a server that fails stays out until the next weight
update."""

from megatron_dapo.engines.sglang.client import SGLangClient
from megatron_dapo.engines.sglang.engine import SGLangEngine
from megatron_dapo.engines.sglang.http import failures, wait_all


async def connect_engine(urls, config, *, model="", version=0):
    clients = [SGLangClient(url, config.servers, generate_url=config.servers.router_url) for url in urls]
    engine = SGLangEngine(clients, config, model=model, version=version)
    results = await wait_all({server.name: engine.admit(server) for server in engine.servers})
    for error in failures(results).values():
        await engine.close()
        raise error
    return engine
