"""SGLang servers as one engine.

Requests and weights
- engine.py            the engine: requests, aborts, pauses, weight updates, GPU memory, over all servers
- load_balancer.py     which server gets a request; the queue when none has room
- client.py            one server: generation and every control call, each with its rule for repeating
- generate_call.py     one generate request: sent, its reply parsed
- client_process.py    a process for generate requests, as rank 0 sees it; client_worker.py is that process
- http.py              connections, timeouts, repeated calls, error classes
- response_parser.py   the reply to a generate request; version labels
- weights/             how weights get to the servers
- router.py            waits for sglang-router

Processes
- fleet.py             starts and ends the servers of a run
- supervisor.py        keeps one server working: checks, restarts, restart budget
- supervision.py       what the engine needs of it
- server_process.py    a server that is started here: command, log, end
- external_server.py   a server that is not
- keys.py              API keys
- run_with_keys.py     starts SGLang with keys from its environment instead of its command line
- cpu_stubs/           stand-in packages for SGLang on machines without a GPU
"""
