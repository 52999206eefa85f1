"""The one exception type that stands for a mistake of the caller."""


class UserError(ValueError):
    """A caller's mistake: wrong input, option or file.

    The message is one line that names what is wrong, where, and the remedy. The
    command line prints it after `error: ` and exits with status 2.
    """
