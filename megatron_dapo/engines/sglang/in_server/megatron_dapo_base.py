"""Runs inside an SGLang server: lets a trainer on the same GPU compute with the memory of its weights.

`POST /weights_checker {"action": "share"}` answers with a reference to the memory of every parameter: CUDA IPC on a
GPU; without one, the name of a file that the parameter has moved to. It is valid while the server runs, and nothing may
be written there.
"""

import base64
import pickle
import tempfile
from typing import Any

import torch
from torch.multiprocessing import reductions

ACTION = "share"


def answer(model: Any, _: str) -> dict[str, str]:
    """By the parameter's name, without the part that SGLang adds to layers with adapters."""
    return {
        name.replace(".base_layer.", "."): base64.b64encode(pickle.dumps(_reference(parameter))).decode()
        for name, parameter in model.named_parameters()
    }


def _reference(parameter: Any) -> tuple[str, tuple[Any, ...]]:
    """The GPU's UUID, and the arguments of the function of torch that opens the memory."""
    tensor = parameter.data
    if tensor.is_cuda:
        reduce = getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)  # SGLang replaces it
        return str(torch.cuda.get_device_properties(tensor.device).uuid), reduce(tensor)[1]
    with tempfile.NamedTemporaryFile(prefix="megatron_dapo_base_", dir="/dev/shm", delete=False) as file:
        arguments = (file.name, True, tensor.numel(), tensor.dtype)
    parameter.data = torch.from_file(*arguments[:3], dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    return "", (*arguments, tensor.shape)
