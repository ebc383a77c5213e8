"""CPU stubs: stand-ins for packages that SGLang imports and that do not exist for CPU-only machines.

The fleet puts this directory on the PYTHONPATH of CPU servers, and of nothing else. Importing a stub costs nothing;
calling what it lacks is an error that says so.

- sgl_kernel.py          SGLang's kernels; has the one function that SGLang's torch-native path calls
- torchvision.py         image processing, which language models do not use
- cpu_launch_server.py   runs `sglang.launch_server` with a cheaper start
"""
