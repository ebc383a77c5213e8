"""Weights on their way to the engines: gathered from all ranks, packed into buckets, handed over.

- bucket.py         a bucket of weights as one block of bytes
- gather.py         Megatron shards become buckets of full tensors under HF names, in the memory of one or more ranks
- bucket_stream.py  hands buckets from the thread that produces them to the engine
- shared_bucket.py  a bucket in memory that a server on the same host maps; experts as few large tensors
- remote_sender.py  sending from ranks other than rank 0
- snapshot.py       a version on disk, for the disk transport and for servers that are restarted

How SGLang servers load a version, and prove that they have it, is in engines/sglang (transports, weight_update).
"""
