"""Weight updates of SGLang servers.

- update.py          the two phases of an update over all servers: load, then label, prove and serve
- transports.py      disk, tensor (shared memory, CUDA IPC) and distributed (NCCL, gloo)
- shared_bucket.py   a bucket that a server on the same host maps
- process_group.py   the process groups of the distributed transport, one for each sender
- group_source.py    the sender's end of a group
- remote_sender.py   sending from ranks other than rank 0
- expert_packing.py  experts as few large tensors
- snapshot.py        a version on disk, for the disk transport and for servers that are restarted
- snapshot_file.py   one file of a snapshot
- manifest.py        which tensors an update must contain
"""
