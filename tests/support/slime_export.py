"""Runs slime's torch_dist → HF tool, unmodified, from the checkout that SLIME names.

Its packages import Ray and CUDA code in their `__init__`; those are not run.

python slime_export.py --input-dir CHECKPOINT --output-dir OUT --origin-hf-dir HF
"""

import os
import runpy
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    checkout = Path(os.environ["SLIME"])
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(checkout.joinpath(*name.split(".")))]
    runpy.run_path(str(checkout / "tools" / "convert_torch_dist_to_hf.py"), run_name="__main__")
