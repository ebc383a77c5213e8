"""What is wrong with this machine for a run, and how to put it right. Torch is imported inside checks only."""

from megatron_dapo.doctor.check import Check, Probe, examine
from megatron_dapo.doctor.command import run

__all__ = ["Check", "Probe", "examine", "run"]
