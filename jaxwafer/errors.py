"""The one exception that stands for bad input."""


class UserError(Exception):
    """Something the user can put right: the message is one line that says what is wrong and what to do.

    The command line prints it on stderr and exits with status 2; from Python it is an ordinary exception.
    """
