"""Child processes: how they start, how they are talked to, and that they end with their parent.

Which processes a run has, and who starts them:

| process          | started by                            | kind                                                    |
|------------------|---------------------------------------|---------------------------------------------------------|
| rank             | `train` without torchrun or srun      | fork (`fork_ranks.run_ranks`)                           |
| check of set-up  | `train` with several ranks            | fork (`fork_ranks.run_in_fork`)                         |
| SGLang server    | rank 0, `engines/sglang/server_process` | command under a supervisor; its API is HTTP           |
| client process   | rank 0, `engines/sglang/client_process` | worker: sends generate requests, parses the replies   |
| grading process  | rank 0, `reward/pool`                 | worker: grades responses under limits                   |
| tool worker      | rank 0, `rollout/agents/tools/sandbox`  | worker: runs a model's code, one confined fork per call |
| run of an ablation | `ablate`, `ablation/runs`           | fork that trains; imports are made once for all runs    |

There is no RPC layer: ranks meet in torch.distributed, servers have HTTP, and a worker is a Python program with one
Unix socket to the process that started it. What goes through that socket are frames: a JSON header and raw parts
(tokens, log-probs, texts), with a number that a reply repeats. A worker knows nothing but its requests, so one that
died is replaced and its requests are sent again.

How they end:
- A command or worker runs under a supervisor, a small process that is the subreaper of everything below it. When the
  command ends, when its owner asks, or when its owner dies, even by kill -9, the supervisor kills all descendants,
  including detached ones. It touches nothing else.
- A fork asks the kernel to be killed when its parent dies (`supervisor.end_with_parent`).
- Slurm and terminals signal every process. These signals are for the trainer: supervisors and workers ignore them;
  ranks get them from the launcher.

Modules:
- `supervisor`      the program above a command, run by path; `end_with_parent`
- `supervised`      a command under its supervisor, as its owner sees it: start, ask, kill, exit code
- `frames`          the format; `Channel` for blocking sockets, and a worker's side of it
- `fork_ranks`      functions in forked processes; `Rendezvous`: rank, world size, where ranks meet
"""
