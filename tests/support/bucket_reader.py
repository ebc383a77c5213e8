"""What a server does with the payloads of the tensor transport, in a spawned process. It needs torch alone: importing
the tests, and Megatron with them, would take five CPU seconds."""

import base64
import io
import pickle

import torch


def read_payloads(pipe, on_gpu):
    """Opens each payload, reads every tensor, answers with their sums, and frees them."""
    if on_gpu:
        from torch.multiprocessing import reductions

        torch.cuda.init()
        original = reductions.rebuild_cuda_tensor

        def rebuild(*arguments):
            devices = [str(torch.cuda.get_device_properties(d).uuid) for d in range(torch.cuda.device_count())]
            return original(*arguments[:6], devices.index(arguments[6]), *arguments[7:])

        reductions.rebuild_cuda_tensor = rebuild
    pipe.send("ready")
    while (text := pipe.recv()) is not None:
        bucket = pickle.load(io.BytesIO(base64.b64decode(text)))
        flat = bucket["flattened_tensor"]
        pairs = [
            (meta.name, flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape))
            for meta in bucket["metadata"]
        ]
        pipe.send({name: tensor.double().sum().item() for name, tensor in pairs})
        del bucket, flat, pairs
