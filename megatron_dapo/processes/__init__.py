"""Child processes: how they start, what they may do, and that they end with their parent.

fork_ranks  Starts ranks on this machine without torchrun: imports once, then forks one process per rank
guard       Runs a command in a session of its own, and ends the whole session when the command or the caller di
supervisor  Runs a grading process and kills everything that it leaves behind
"""
