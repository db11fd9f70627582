"""autotune: measures which tiles and launch parameters are best for kernels on one device.

`tasks` finds what a geometry launches, `spaces` says what is tried, `tuner` searches with what
`device` measures and `journal` remembers, `decision` judges. What wins goes to `profile_store`.
`crew` shares tasks over several `cards`, with a `worker` process on each.
Only the command `dflash-graph autotune run` starts it: an engine looks up and never measures.
"""

from dflash_graph.autotune.decision import Decision, decide
from dflash_graph.autotune.journal import Journal, Outcome
from dflash_graph.autotune.spaces import Candidate, Limits, space_of, tuned_ops
from dflash_graph.autotune.tasks import Task, find_tasks
from dflash_graph.autotune.tuner import DeviceLost, Measurer, Tuner

__all__ = [
    "Candidate",
    "Decision",
    "DeviceLost",
    "Journal",
    "Limits",
    "Measurer",
    "Outcome",
    "Task",
    "Tuner",
    "decide",
    "find_tasks",
    "space_of",
    "tuned_ops",
]
