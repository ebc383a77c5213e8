from megatron_dapo.api import TrainedRun as TrainedRun
from megatron_dapo.api import convert as convert
from megatron_dapo.api import evaluate as evaluate
from megatron_dapo.api import read_run as read_run
from megatron_dapo.api import train as train

__version__: str
