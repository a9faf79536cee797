"""Packages of the wheel: moe, stmoe_eval, and the folder recipes/ as moe.recipes.

All else is in pyproject.toml. benchmarks/ and scripts/ stay in the repository.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["moe*"]), *find_packages("eval"), "moe.recipes"],
    package_dir={"moe.recipes": "recipes", "stmoe_eval": "eval/stmoe_eval"},
)
