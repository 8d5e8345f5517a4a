"""The errors a user of STOF can see.

Every one derives from ``torch._dynamo.exc.ShortenTraceback``: Dynamo hands such an exception to the
caller of the compiled function under its own type and with a short traceback, while any other
exception raised in a backend arrives wrapped as ``BackendCompilerFailed``. It is a ``ValueError``
as well, so that code which does not know STOF can catch it.
"""

from torch._dynamo.exc import ShortenTraceback


class StofError(ShortenTraceback, ValueError):
    """Base of all errors of STOF.

    Args:
        message: what was wrong, where, the value got, the rule and the next step.
    """

    def __init__(self, message: str) -> None:
        # Exception.__new__ has kept the message; Dynamo cannot trace ShortenTraceback.__init__.
        # None = keep all frames: a mask built eagerly has no Dynamo frame to cut at
        self.first_useful_frame = None

    def __reduce__(self) -> tuple[type["StofError"], tuple[str]]:
        return type(self), (str(self.args[0]),)


class StofOptionError(StofError):
    """An option is unknown, has the wrong type or an impossible value."""


class StofPlaceError(StofOptionError):
    """A place that an option names cannot be written to here; another machine may have it."""


class StofMaskError(StofError):
    """A mask does not fit the model or its lengths, or could not be applied exactly."""


class StofUnsupportedError(StofError):
    """Something STOF would leave to PyTorch was met under ``strict=True``."""


class StofPlanError(StofError):
    """A plan read from disk is malformed or belongs to another graph, device or version."""
