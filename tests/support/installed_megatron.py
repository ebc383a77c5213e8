"""The installed megatron-core: 0.16 on Python 3.11, 0.19 on newer ones."""

from importlib.metadata import version

from packaging.version import Version


def is_megatron_since(release: str) -> bool:
    return Version(version("megatron-core")).release >= Version(release).release
