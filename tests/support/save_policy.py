"""A checkpoint of the policy alone."""

from pathlib import Path

from megatron_dapo.checkpoints.files import write_files
from megatron_dapo.checkpoints.policy_state import policy_files
from megatron_dapo.errors import CheckpointError


def save_policy(policy, directory) -> None:
    """Collective. Returns when all ranks have written their files. The directory may exist."""
    error = None
    files = policy_files(policy)
    try:
        write_files(Path(directory), files)
    except CheckpointError as found:
        error = found
    policy.runtime.raise_together(error, "writing the checkpoint")
