"""Packages of the wheel: moe, and the folder recipes/ as moe.recipes; all else is in pyproject.toml.

eval/, benchmarks/ and scripts/ stay in the repository.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["moe*"]), "moe.recipes"],
    package_dir={"moe.recipes": "recipes"},
)
