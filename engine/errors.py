"""
How a program ends: one line for what the user can mend, and an exit status that says so.

    raise UserError("data/mine: no data set; make ..")    where, what is wrong, and what to do

    if __name__ == '__main__':
        run(main)                                         main(argv), with all of this applied
"""

import os
import sys
import time


class UserError(Exception):
    """Something the user can mend."""


class NothingToSave(UserError):
    """It ends a run whose last step is not worth keeping, or cannot be kept."""


def shown(value):
    """A value in a message: numbers and short texts as they are, of others what they are."""
    if type(value) is int and abs(value) >= 2 ** 63:
        return "so large a number"
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if type(value) is str:
        return repr(value if len(value) <= 60 else value[:57] + '...')
    return f"a {type(value).__name__}"


def one_line(text):
    """Text on one line, without characters that a terminal would obey."""
    words = ' '.join(str(text).split())
    return ''.join(c if c.isprintable() else '?' for c in words)


def run(main):
    """
    Call main(argv). What is wrong with the input, a file or the disk becomes one line and exit
    status 2; Ctrl-C is 130, and output that nobody reads any more (`| head`) is 141, as for other
    programs.
    """
    try:
        if hasattr(sys.stdout, 'reconfigure'):
            sys.stdout.reconfigure(errors='replace')  # a terminal that cannot show a character
        main(sys.argv[1:])
        if sys.stdout:
            sys.stdout.flush()
    except KeyboardInterrupt:
        leave(130)
    except BrokenPipeError:
        leave(141)
    except (UserError, OSError) as error:
        say(error)
        leave(2)


def say(error):
    """The error's text on stderr, as one line; with several ranks it says which one found it."""
    rank = os.environ.get('RANK')  # set by torchrun
    words = ["error:"]
    if rank is not None:
        words.append(f"rank {rank}:")
    words.append(one_line(error))
    if rank not in (None, '0'):
        time.sleep(5)  # rank 0 says the same, or torchrun ends this one before it repeats it
    print(*words, file=sys.stderr)


def leave(status):
    """Exit. What cannot be printed any more (the reader left, the disk is full) is lost."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
