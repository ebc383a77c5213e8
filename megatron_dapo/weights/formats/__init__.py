"""Readers and writers of checkpoint formats: HF, Megatron torch_dist, and Megatron's legacy files (read only).

- `readers`            HF directories (`HFReader`), parameters in pieces (`PieceReader`), files of `torch.save`
- `megatron_reader`    opens either Megatron format (`open_megatron`); a torch_dist checkpoint of any layout
                       (`TorchDistReader`); either one as HF tensors (`MegatronAsHF`)
- `torch_dist_writer`  the files and metadata of a torch_dist checkpoint (`TorchDistWriter`)
- `small_files`        what a torch_dist checkpoint has beside its tensors: metadata, arguments, version, iteration
- `legacy_reader`      one `model_optim_rng.pt` per model-parallel rank (`LegacyReader`)
- `hf_writer`          shards and index of an HF directory (`HFWriter`)
- `named_pickle`       pickles that name classes of torch, written without torch
- `torch_zip`          the zip archive around one tensor in a `.distcp` file (`TensorArchive`)
- `safe_pickle`        reads pickles without running code
"""
