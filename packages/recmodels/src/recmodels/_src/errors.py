"""The exceptions of the package: a mistake of the caller, and training that ended early."""


class UserError(ValueError):
    """A caller's mistake: wrong input, option or file.

    The message is one line that names what is wrong, where, and the remedy. The
    command line prints it after `error: ` and exits with status 2.
    """


class TrainingDivergedError(RuntimeError):
    """Loss, gradient, parameters or scores stopped being finite; the message names the step."""


class TrainingInterruptedError(RuntimeError):
    """Training stopped on SIGTERM, with a checkpoint; the same call continues it."""
