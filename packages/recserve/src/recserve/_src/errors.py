"""The one exception that stands for a mistake the caller can put right."""


class UserError(ValueError):
    """A wrong argument, option, folder or file; the message is one line that names the remedy.

    The command line prints it as `error: <message>` and exits with status 2.
    """
