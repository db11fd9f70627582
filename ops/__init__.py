"""The ops, one a file: contract, reference, byte count and implementations.

Importing the package imports every module beside this file, in sorted order, so that each op is
registered.
"""

if __name__ == "ops":
    raise ImportError("import dflash_graph.ops")

import importlib
import pkgutil

from dflash_graph.op import get_op, op_names

__all__ = ["get_op", "op_names"]

for _name in sorted(_info.name for _info in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_name}")
