"""Converts a Megatron torch_dist checkpoint to HF Qwen safetensors; the same as `megatron-dapo convert megatron-to-hf`.

python tools/convert_megatron_to_hf.py RUN/checkpoints/step_100 qwen3-32b-dapo --reference Qwen3-32B
"""

import sys

from megatron_dapo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
