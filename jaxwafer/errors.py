"""What a command ends with in one line."""

import re


class UserError(Exception):
    """Something the user can put right: the message is one line that says what is wrong and what to do.

    The command line prints it on stderr and exits with `status`; from Python it is an ordinary exception.
    """

    status = 2


class ProcessLost(UserError):
    """Another process of the run is gone."""

    status = 3


def reason(error: Exception) -> str:
    """What msgspec refused, with the place by the names in the file.

    >>> reason(ValueError("Expected `float` > 0.0 - at `$.hardware.hop_s`"))
    'hardware.hop_s: Expected `float` > 0.0'
    """
    what, _, place = str(error).partition(" - at ")
    where = re.sub(r"^`(key )?\$?\.?(in )?|`$", "", place).replace("[...]", "")
    return f"{where}: {what}" if where else what
