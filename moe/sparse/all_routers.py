"""Finds and registers every router: importing this file imports each file of routers/.

A new router is a new file there; nothing changes here. `import moe` imports this file, so that a
configuration can name every router.
"""

import importlib
import pkgutil

from moe.registry import Registry
from moe.sparse import routers
from moe.sparse.config import SparseConfig
from moe.sparse.router import Router
from moe.sparse.router_options import ROUTERS

for module in pkgutil.iter_modules(routers.__path__):
    importlib.import_module(f"moe.sparse.routers.{module.name}")


def load_routers() -> Registry[type[Router]]:
    """Returns ROUTERS with every file of moe/sparse/routers in it."""
    return ROUTERS


def build_router(config: SparseConfig) -> Router:
    """Returns the router that the configuration names, with fresh parameters."""
    return ROUTERS.get(config.router)(config)
