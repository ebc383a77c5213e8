"""Engines generate responses. The rest of the project sees one protocol; two engines implement it.

- protocol.py        what an engine is: generate, abort, pause, weight updates; the errors and data types
- factory.py         opens the engine that the configuration names
- timed.py           reports when each request ran, for the timeline of a step
- load.py            KV cache in use and waiting requests during a rollout
- teacher.py         log-probs of a teacher, for distillation
- flat_bucket.py     a bucket of weights as one block of bytes
- sender_link.py     how the ranks that send weights coordinate an update
- bucket_reader.py   reads weight buckets in a worker thread while the event loop runs
- embedded/          transformers on the CPU, inside this process, exact to the bit
- sglang/            SGLang servers over HTTP: started here or external
"""
