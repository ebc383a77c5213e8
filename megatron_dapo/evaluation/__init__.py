"""Evaluation: k responses to every problem of one or more benchmarks, and the accuracy of the policy.

avg@k is the mean over problems of the share of correct responses. Its confidence interval is clustered by problem
(Student's t over the problems' means), because the k responses to one problem are not independent. The interval holds
for problems of the same kind; `sampling_error` is the standard error for exactly these problems. pass@k is the unbiased
estimator. maj@k is the majority vote of all k responses; a tie counts in part. Ungraded responses are excluded and
counted. lenient@k, for benchmarks whose answers are numbers, is the share of responses whose last number is the answer,
however it is marked: the gap to avg@k is what the required format costs.

Several benchmarks are generated together, so that the engine stays full until the last of them. `evaluate_sets` can be
cancelled at any time: it aborts its requests and returns when none is running.

- `requests`  generates and grades the responses (`evaluate_sets`)
- `results`   scores, statistics, tables and files of an evaluation (`EvalResult`, `Evaluation`)
- `command`   `megatron-dapo eval`
"""

from megatron_dapo.evaluation.command import create_output, run
from megatron_dapo.evaluation.requests import evaluate_sets
from megatron_dapo.evaluation.results import (
    EvalResult,
    Evaluation,
    EvaluationError,
    ProblemResult,
    Response,
    majority,
    summarise,
)

__all__ = [
    "EvalResult", "Evaluation", "EvaluationError", "ProblemResult", "Response", "create_output",
    "evaluate_sets", "majority", "run", "summarise",
]  # fmt: skip
