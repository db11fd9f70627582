"""dflash_graph: a compiler for speculative decoding rounds.

`Engine` generates; `compile_rounds` stops at the compiled executors for engines of your own;
`declare_round` and its siblings stop at the graph. Importing the package touches no device and
reads no file; a public name loads its module, and with it torch, when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dflash_graph import demo
    from dflash_graph.contexts import Checkpoint
    from dflash_graph.engine import Engine, Stream
    from dflash_graph.errors import (
        CheckpointError,
        ConfigError,
        ContextError,
        DeviceMemoryError,
        DFlashGraphError,
        EngineClosedError,
        GraphError,
        NonFiniteLogitsError,
        OptionError,
        ProfileError,
        RequestError,
        ShapeError,
    )
    from dflash_graph.models.pair import ModelPair
    from dflash_graph.models.round import declare_prefill, declare_round
    from dflash_graph.options import EngineOptions, SamplingParams
    from dflash_graph.profile.document import Profile
    from dflash_graph.request import Event, Generation, Request
    from dflash_graph.rounds import Model, Rounds, compile_rounds
    from dflash_graph.statistics import RoundRecord, Statistics

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "ContextError",
    "DFlashGraphError",
    "DeviceMemoryError",
    "Engine",
    "EngineClosedError",
    "EngineOptions",
    "Event",
    "Generation",
    "GraphError",
    "Model",
    "ModelPair",
    "NonFiniteLogitsError",
    "OptionError",
    "Profile",
    "ProfileError",
    "Request",
    "RequestError",
    "RoundRecord",
    "Rounds",
    "SamplingParams",
    "ShapeError",
    "Statistics",
    "Stream",
    "__version__",
    "compile_rounds",
    "declare_prefill",
    "declare_round",
    "demo",
]

#: Where the public names live; those not listed are classes of `dflash_graph.errors`.
_MODULES: Final = {
    "Checkpoint": "contexts",
    "Engine": "engine",
    "EngineOptions": "options",
    "Event": "request",
    "Generation": "request",
    "Model": "rounds",
    "ModelPair": "models.pair",
    "Profile": "profile.document",
    "Request": "request",
    "RoundRecord": "statistics",
    "Rounds": "rounds",
    "SamplingParams": "options",
    "Statistics": "statistics",
    "Stream": "engine",
    "compile_rounds": "rounds",
    "declare_prefill": "models.round",
    "declare_round": "models.round",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "demo":
        return import_module("dflash_graph.demo")
    value = getattr(import_module(f"dflash_graph.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
