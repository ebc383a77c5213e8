"""Engines generate responses. The rest of the project sees one protocol; two engines implement it.

- protocol.py   what an engine is: generate, abort, pause, weight updates; the errors and data types
- load.py       opens the engine that the configuration names; KV cache in use, waiting requests, times of requests
- teacher.py    log-probs of a teacher, for distillation
- embedded/     transformers on the CPU, inside this process, exact to the bit
- sglang/       SGLang servers over HTTP: started here or external
"""
