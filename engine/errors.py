"""Every error that Antiphon raises on purpose. Messages say what was asked, what is there, what to change."""


class AntiphonError(Exception):
    """Base of all deliberate errors. The command line prints the message and exits with 1."""


class InputError(AntiphonError):
    """What the user gave cannot be used (file, option, model, request). The command line exits with 2."""


class ModelError(InputError):
    """A model's files are missing, damaged, foreign or of an unknown architecture."""


class CapacityError(InputError):
    """What was asked can never fit the budget: the message has the bytes asked, the bytes there, and the knob."""


class AbortedError(AntiphonError):
    """The request was aborted before it ended."""
