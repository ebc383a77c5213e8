"""Readers and writers of checkpoint formats: HF, Megatron torch_dist, and Megatron's legacy files (read only).

- `hf_reader`          an HF directory, checked and memory-mapped (`HFReader`)
- `hf_writer`          shards and index of an HF directory (`HFWriter`)
- `megatron_reader`    opens either Megatron format (`open_megatron`), or presents one as HF tensors (`MegatronAsHF`)
- `torch_dist_reader`  the weights of a torch_dist checkpoint of any layout (`TorchDistReader`)
- `torch_dist_writer`  the files and metadata of a torch_dist checkpoint (`TorchDistWriter`)
- `small_files`        what a torch_dist checkpoint has beside its tensors: metadata, arguments, version, iteration
- `legacy_reader`      one `model_optim_rng.pt` per model-parallel rank (`LegacyReader`)
- `pieces`             parameters that consist of pieces in files (`PieceReader`)
- `torch_file`         files of `torch.save`: pytorch_model.bin, legacy checkpoints (`TorchFile`)
- `torch_zip`          the zip archive around one tensor in a `.distcp` file (`TensorArchive`)
- `mapped_file`        files mapped read-only, and tensors over them
- `safe_pickle`        reads pickles without running code
"""
