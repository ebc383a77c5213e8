"""Readers and writers of the two checkpoint formats, HF safetensors and Megatron torch_dist.

- `hf_reader`          an HF directory, checked and memory-mapped (`HFReader`)
- `hf_writer`          shards, index and small files of an HF directory (`HFWriter`)
- `torch_dist_reader`  the weights of a torch_dist checkpoint of any layout (`TorchDistReader`, `TorchDistAsHF`)
- `torch_dist_writer`  the files and metadata of a torch_dist checkpoint (`TorchDistWriter`)
- `torch_zip`          the zip archive around one tensor in a `.distcp` file (`TensorArchive`)
- `safe_pickle`        reads the pickles in a torch_dist checkpoint without running code
"""
