"""What a command ends with in one line."""


class UserError(Exception):
    """Something the user can put right: the message is one line that says what is wrong and what to do.

    The command line prints it on stderr and exits with `status`; from Python it is an ordinary exception.
    """

    status = 2


class ProcessLost(UserError):
    """Another process of the run is gone."""

    status = 3
