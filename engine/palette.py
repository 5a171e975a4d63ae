"""
The colours of every picture: few, apart for colour-blind readers and in grey, each with one use.
"""

INK = '#222222'         # text, frames, plain models
GREY = '#8a8a8a'        # what is not the point: leaders, thresholds, what was left out
ORANGE = '#d75f00'      # thinking: passes, mechanisms
BLUE = '#0072b2'        # what is read, and the true token
GREEN = '#009e73'       # only where lines need one colour more

LINES = (ORANGE, BLUE, INK, GREEN)

# 1, 2, .. passes: one hue by lightness, never so dark that black text is hard to read. Each is
# number n of a terminal's 256 colours, so that a terminal and a picture show the same.
SHADES = {255: '#eeeeee', 223: '#ffd7af', 216: '#ffaf87', 209: '#ff875f', 202: '#ff5f00',
          166: '#d75f00'}


def shade(passes):
    """The colour of so many passes; the last one for more than there are shades."""
    return list(SHADES.values())[min(passes, len(SHADES)) - 1]


def terminal_shade(passes):
    """The same colour as a number of the terminal's 256 colours."""
    return list(SHADES)[min(passes, len(SHADES)) - 1]
