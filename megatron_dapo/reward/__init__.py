"""Graders and the processes they run in. Imports no torch, so that grading processes start quickly.

- `grader`       `Graders`, the interface; the graders built in, or the user's function; `GraderError`
- `extract`      the final answer of a response
- `equivalence`  whether two answers are equivalent
- `dapo`         the published run's rules
- `combined`     `ResponseGrader`: what a run grades samples with; `open_graders`: one grader, or several with weights
- `remote`       graders behind a server: the user's, or a model behind an OpenAI-compatible server
- `pool`         `RewardPool`: grades from asyncio, in this process or in grading processes
- `worker`       what runs in a grading process
"""
