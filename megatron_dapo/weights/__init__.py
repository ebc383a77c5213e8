"""HF Qwen weights and Megatron weights: one table of names; conversion, comparison, loading and weight sync.

- `mapping`        the table: which HF tensors make up which Megatron parameter (`ParameterMapping`); `WeightsError`
- `names`          other spellings of Megatron names: Transformer Engine, checkpoints
- `locate`         the checkpoint that a path means; formats that are not read are named
- `sharding`       HF tensors to a rank's shard and back
- `model_weights`  HF weights into live models (`load_hf_weights`), a rank's coordinates (`RankPosition`)
- `tensor_spec`    name, type and shape of tensors, and their places in one block of bytes
- `check`          model directories and checkpoints, checked from indexes and headers
- `convert`        HF safetensors to Megatron torch_dist and back
- `fp8`            matrices in fp8 with scales, for the engines
- `fp8_checkpoint` an HF checkpoint in fp8, for servers
- `verify`         whether two checkpoints hold the same weights
- `copy`           copies tensors from files to files on several threads (`copy_tensors`)
- `output_file`    what a converted file consists of
- `copy_group`     several processes, for example on several nodes, that share one conversion
- `side_files`     config, tokenizer and other files that travel with the weights
- `carried`        what conversion keeps beside the weights: tensors of multi-token prediction and vision
- `packed_experts` files with all experts of a layer in one tensor
- `destination`    an output directory that appears complete or not at all
- `command`        the `megatron-dapo convert` commands
- `formats/`       readers and writers of checkpoint formats
"""
