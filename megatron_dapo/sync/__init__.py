"""Weights on their way to the engines: gathered from all ranks, packed into buckets, handed to senders.

bucket         A bucket of weights as one block of bytes: one collective or one IPC handle moves it, and SGLang spl
caller_thread  An executor whose calls run in the thread that waits for them
gather         Weight sync, the trainer's side: Megatron shards become buckets of full tensors under HF names
sender_link    How rank 0 and the other ranks that send weights coordinate one update: through the trainer's key-va
"""
