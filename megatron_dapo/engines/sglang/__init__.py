"""SGLang servers as one engine.

Requests and weights
- engine.py            the engine: requests, aborts, pauses, weight updates, GPU memory, over all servers
- load_balancer.py     which server gets a request; the queue when none has room
- client.py            one server: generation and every control call, each with its rule for repeating
- client_process.py    a process for generate requests, as rank 0 sees it; client_worker.py is that process
- server_state.py      whether a server may get requests, and why not
- http.py              connections, timeouts, repeated calls, error classes
- response_parser.py   a generate request and its reply; version labels
- weight_update.py     the two phases of a weight update over all servers: load, then label, prove and serve
- weight_proof.py      proof that a server holds what was sent: checksums, log-probs of a fixed text
- transports.py        how weights get to servers: disk, tensor (shared memory, CUDA IPC), distributed (NCCL, gloo), and
                       LoRA's adapters, which servers add to their base
- process_group.py     the process groups of the distributed transport, one for each sender

Processes
- fleet.py             the servers of a run, which may come and go; starts and ends its own; waits for sglang-router
- membership.py        which external servers a run uses now: addresses, a file, DNS, POST /servers
- supervisor.py        brings one server in and keeps it working: weights, checks, restarts, restart budget
- server_process.py    a server that is started here: command, log, end; and one that is not
- keys.py              API keys
- run_with_keys.py     starts SGLang with keys from its environment instead of its command line
- in_server/           modules that run inside a server
- cpu_stubs/           stand-in packages for SGLang on machines without a GPU
"""
