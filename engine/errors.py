"""
What ends a program: a line for what the user can mend, an exit status for everything else that is no bug.

    raise UserError("data/mine: no data set; make it with ...")     what is wrong, where, and what to do
    if __name__ == '__main__':
        run(main)                                                   main(argv), with all of this applied
"""

import os
import sys
import time


class UserError(Exception):
    """Something the user can mend."""


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
    words = str(error).splitlines()
    if rank is not None:
        words.insert(0, f"rank {rank}:")
    if rank not in (None, '0'):
        time.sleep(5)  # rank 0 says the same, or torchrun ends this one before it repeats it
    print("error:", *words, file=sys.stderr)


def leave(status):
    """Exit. What is still to be printed and cannot be (the reader left, the disk is full) is lost."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
