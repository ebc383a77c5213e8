"""Converts HF Qwen safetensors to a Megatron torch_dist checkpoint; the same as `megatron-dapo convert hf-to-megatron`.

python tools/convert_hf_to_megatron.py Qwen3-32B /checkpoints/qwen3-32b
"""

import sys

from megatron_dapo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
