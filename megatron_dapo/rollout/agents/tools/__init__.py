"""Tools for rollout functions: code that a model writes runs in limited processes.

- `confinement`  what a tool's process may not do: kernel filters and resource limits
- `tool_worker`  runs tool calls, each in a process of its own
- `sandbox`      `Sandbox`: tool calls from asyncio; limits and counts
- `call_tools`   finds tool calls in a response; the rollout function that lets a model call a calculator or Python
"""
