"""HF weights and Megatron weights: one table of names; conversion, comparison and loading.

- `mapping`        the table: which HF tensors make up which Megatron parameter (`ParameterMapping`); `WeightsError`
- `names`          other spellings of Megatron names: Transformer Engine, checkpoints; experts in one tensor
- `locate`         the checkpoint that a path means; formats that are not read are named; model directories are checked
- `model_weights`  HF weights into live models (`load_hf_weights`), a rank's coordinates (`RankPosition`), its shards
- `adapters`       LoRA adapters: names, shapes and shards; PEFT directories; merging into a model
- `value_weights`  what a value model starts from; config.json of an exported critic
- `tensor_spec`    name, type and shape of tensors, and their places in one block of bytes
- `convert`        HF safetensors to Megatron torch_dist and back
- `copy`           copies tensors from files to files on several threads (`copy_tensors`)
- `destination`    an output directory that appears complete or not at all; several processes that fill it together
- `model_card`     README.md of a trained model, from the files of its run
- `side_files`     config, tokenizer, other files and tensors that travel with the weights
- `verify`         whether two checkpoints hold the same weights
- `fp8`            matrices in fp8 with scales, for the engines
- `fp8_checkpoint` an HF checkpoint in fp8, for servers
- `command`        the `megatron-dapo convert` commands
- `formats/`       readers and writers of checkpoint formats
"""
