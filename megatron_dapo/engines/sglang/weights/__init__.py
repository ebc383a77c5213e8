"""Weight updates of SGLang servers.

- update.py          the two phases of an update over all servers: load, then label, prove and serve
- transports.py      disk, tensor (shared memory, CUDA IPC) and distributed (NCCL, gloo)
- process_group.py   the process group of the distributed transport
- snapshot.py        a version on disk, for the disk transport and for servers that are restarted
- manifest.py        which tensors an update must contain
"""
