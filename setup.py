"""Everything is declared in pyproject.toml, except that the examples become a part of the wheel: the command
`megatron-dapo quickstart` works without a checkout."""

from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    def run(self) -> None:
        if not self.editable_mode:
            rmtree(self.build_lib, ignore_errors=True)  # else modules that no longer exist would get into the wheel
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "megatron_dapo", "_examples")
            copytree("examples", target, dirs_exist_ok=True, ignore=ignore_patterns("__pycache__", "*.pyc"))


setup(cmdclass={"build_py": BuildWithExamples})
