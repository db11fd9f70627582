"""Every error raised on purpose, one class per mistake a caller can make.

All derive from `DFlashGraphError`. A message reads
``<where>: expected <what> (<where that was fixed>), got <found>; <what to do>`` and names the file,
key, tensor, node or argument at fault. Errors of our own invariants are plain ``AssertionError``
with a message.
"""

from __future__ import annotations


class DFlashGraphError(Exception):
    """Base of every error raised on purpose by `dflash_graph`."""


class OptionError(DFlashGraphError):
    """An engine or sampling option is out of range, ill-typed or contradicts another option."""


class ConfigError(DFlashGraphError):
    """A model's config file is missing, unreadable or has a missing, ill-typed or impossible
    field.
    """


class UnsupportedModelError(ConfigError):
    """The architecture or a feature of a well-formed config is not one that this package
    computes.
    """


class PairError(ConfigError):
    """A draft does not fit its target: width, vocabulary or feature blocks disagree."""


class CheckpointError(DFlashGraphError):
    """A weight file or its index is missing, truncated or corrupt."""


class MissingTensorError(CheckpointError):
    """A tensor the geometry needs is in no file of the checkpoint."""


class UnexpectedTensorError(CheckpointError):
    """A checkpoint holds a tensor that no role of the model uses, or holds one twice."""


class TensorShapeError(CheckpointError):
    """A tensor of a checkpoint has another shape than the geometry asks for."""


class TensorDtypeError(CheckpointError):
    """A tensor of a checkpoint has a dtype that cannot be loaded as model weights."""


class ShapeError(DFlashGraphError):
    """An op was called with shapes, dtypes or attributes outside its contract."""


class GraphError(DFlashGraphError):
    """A graph is not well formed; the message names the node."""


class PlanError(DFlashGraphError):
    """A memory plan cannot be made or does not hold."""


class TemplateError(DFlashGraphError):
    """A kernel template does not exist, is rendered with other holes than it declares, or its file
    cannot be kept.
    """


class ProfileError(DFlashGraphError):
    """A profile is damaged or of another format; the message says what was found."""


class TuningError(DFlashGraphError):
    """A measurement lost its device; the journal holds what was measured before."""


class DeviceMemoryError(DFlashGraphError):
    """The device has less memory than the plan needs; the message holds the plan's numbers."""


class RequestError(DFlashGraphError):
    """A prompt or a request's parameters cannot be served; nothing was changed."""


class ContextError(DFlashGraphError):
    """A checkpoint cannot be used: another model's, of another format, or damaged."""


class NonFiniteLogitsError(DFlashGraphError):
    """The chosen logit of a request was not finite; that request ended, others go on."""


class EngineClosedError(DFlashGraphError):
    """The engine was closed before or during the call."""
