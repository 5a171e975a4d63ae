"""
One drawing for each mechanism, in docs/drawings/:

    python docs/draw.py

All speak one language. A box is a slot: one vector on its way through the blocks. Tokens run from
left to right, passes (or layers, or sweeps) upwards. One slot is black: blue is what it reads. An
orange frame is where a token stopped; a dashed one is a slot that nobody computes.
"""

import html
import os
import sys
from dataclasses import dataclass, field

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))  # run from anywhere
from engine import palette

WIDTH = 800
LEFT, TOP = 190, 150            # the middle of the slot in the upper left
TOKENS = ('the', 'cat', 'sat', 'on')

# GitHub shows a drawing as an image, so its colours for dark pages are its own affair
STYLE = f"""
  svg {{ --paper: #ffffff; --ink: {palette.INK}; --quiet: #6b6b6b; --line: #b9b9b9;
    --read: {palette.BLUE}; --pale: #cfe4f2; --stop: {palette.ORANGE}; }}
  @media (prefers-color-scheme: dark) {{
    svg {{ --paper: #15171a; --ink: #e8e8e8; --quiet: #a0a0a0; --line: #555a60;
      --read: #56b4e9; --pale: #17405a; --stop: #ff7a1a; }}
  }}
  .paper {{ fill: var(--paper); }}
  text {{ font: 16px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--ink); }}
  .title {{ font-size: 20px; font-weight: 600; }}
  .quiet {{ fill: var(--quiet); font-size: 15px; }}
  .slot {{ fill: var(--paper); stroke: var(--line); stroke-width: 1.5; }}
  .read {{ fill: var(--pale); stroke: var(--read); }}
  .here {{ fill: var(--ink); stroke: var(--ink); }}
  .stopped {{ stroke: var(--stop); stroke-width: 4; }}
  .absent {{ fill: none; stroke-dasharray: 4 5; }}
  .on-here {{ fill: var(--paper); }}
  .said {{ fill: var(--stop); font-weight: 600; }}
  .flow {{ fill: none; stroke: var(--quiet); stroke-width: 1.5; }}
  .reads {{ fill: none; stroke: var(--read); stroke-width: 2; }}
  .head {{ fill: var(--quiet); }}
  .read-head {{ fill: var(--read); }}
"""
HEADS = """<defs>
  <marker id="flow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
    orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker>
  <marker id="reads" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"
    orient="auto"><path class="read-head" d="M0 0 L8 4 L0 8 z"/></marker>
</defs>"""


@dataclass
class Drawing:
    """
    A grid of slots; (column, row) counts from the lower left. Lines lie under slots, whatever comes
    first.
    """
    title: str
    caption: tuple              # two lines of text
    names: tuple                # of the rows, upwards
    across: float = 140         # from one column to the next
    up: float = 84              # from one row to the next
    width: float = 84           # of a slot
    height: float = 40
    lines: list = field(default_factory=list)
    slots: list = field(default_factory=list)

    def __post_init__(self):
        self.words(28, 42, self.title, 'title', 'start')
        for row, name in enumerate(self.names):
            _, y = self.place(0, row)
            self.words(28, y + 5, name, 'quiet', 'start')
        _, lowest = self.place(0, 0)
        for i, line in enumerate(self.caption):
            self.words(28, lowest + 120 + 22 * i, line, 'quiet', 'start')

    def place(self, column, row):
        """The middle of a slot."""
        return LEFT + column * self.across, TOP + (len(self.names) - 1 - row) * self.up

    def slot(self, column, row, kind='', label=''):
        """A box of one or more kinds (NAMES), and what stands in it."""
        x, y = self.place(column, row)
        self.slots.append(f'<rect class="slot {kind}" x="{x - self.width / 2:g}" '
                          f'y="{y - self.height / 2:g}" width="{self.width:g}" '
                          f'height="{self.height:g}" rx="6"/>')
        if label:
            self.words(x, y + 5, label, 'on-here' if kind == 'here' else '')

    def words(self, x, y, text, kind='', anchor='middle'):
        """Text at a place; anchor: which part of it is there."""
        self.slots.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
                          f'{html.escape(text)}</text>')

    def tokens(self, columns):
        """A word under each of these columns."""
        for column, token in zip(columns, TOKENS):
            x, y = self.place(column, 0)
            self.words(x, y + self.height / 2 + 46, token)
            self.lines.append(arrow(x, y + self.height / 2 + 28, x, y + self.height / 2))

    def flow(self, column, row, to_column, to_row):
        """What comes out of a slot goes into another one, from below."""
        x, y = self.place(column, row)
        to_x, to_y = self.place(to_column, to_row)
        self.lines.append(arrow(x, y - self.height / 2, to_x, to_y + self.height / 2))

    def out(self, column, row):
        """What predicts the next token leaves upwards."""
        x, y = self.place(column, row)
        top = y - self.height / 2
        self.lines.append(arrow(x, top, x, top - 30))

    def note(self, column, row, text):
        """Words beside the arrow that leaves a slot upwards."""
        x, y = self.place(column, row)
        self.words(x + 10, y - self.height / 2 - 14, text, 'quiet', 'start')

    def reads(self, here, sources):
        """Blue lines from slots to the one that reads them."""
        for column, row in sources:
            if row == here[1]:
                path = self.arc(column, here)
            elif column == here[0]:
                path = self.detour(row, here)
            else:
                path = self.straight(column, row, here)
            self.lines.append(f'<path class="reads" marker-end="url(#reads)" d="{path}"/>')

    def arc(self, column, here):
        """Over the slots between, in one row."""
        from_x, _ = self.place(column, here[1])
        x, y = self.place(*here)
        y -= self.height / 2
        top = y - min(14 + 0.11 * (x - from_x), 46)
        return (f'M{from_x + 10:g} {y:g} C{from_x + 30:g} {top:g} {x - 45:g} {top:g} '
                f'{x - 18:g} {y - 2:g}')

    def detour(self, row, here):
        """Around the slots between, on the right of one column."""
        _, from_y = self.place(here[0], row)
        x, y = self.place(*here)
        x += self.width / 2
        bend = x + min(14 + 14 * (here[1] - row), 50)
        return f'M{x:g} {from_y:g} C{bend:g} {from_y:g} {bend:g} {y:g} {x + 2:g} {y:g}'

    def straight(self, column, row, here):
        from_x, from_y = self.place(column, row)
        x, y = self.place(*here)
        return (f'M{from_x + self.width / 2:g} {from_y - self.height / 2 + 8:g} '
                f'L{x - self.width / 2 - 2:g} {y + 6:g}')

    def legend(self, *kinds):
        """What the kinds of boxes mean, under the title."""
        x = 28
        for kind in kinds:
            self.slots.append(f'<rect class="slot {kind}" x="{x}" y="60" width="20" height="14" '
                              'rx="3"/>')
            self.words(x + 28, 73, NAMES[kind], 'quiet', 'start')
            x += 60 + 8 * len(NAMES[kind])

    def svg(self):
        """The drawing as a file's text."""
        _, lowest = self.place(0, 0)
        height = lowest + 164
        return '\n'.join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f'<title>{html.escape(self.title)}</title>', f'<style>{STYLE}</style>', HEADS,
            f'<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>',
            *self.lines, *self.slots, '</svg>', ''])


NAMES = {'here': 'one slot', 'read': 'what it reads beside itself', 'stopped': 'stopped',
         'absent': 'not computed'}


def arrow(x, y, to_x, to_y):
    """A grey arrow that ends a little below its aim."""
    return (f'<path class="flow" marker-end="url(#flow)" d="M{x:g} {y:g} '
            f'L{to_x:g} {to_y + 3:g}"/>')


# ---- slots in rows: a pass over all tokens, then the next ----------------------------------------

LAST_PASS = 2                   # counted from 0


def passes(title, caption, last, here, read):
    """
    Three passes over four tokens. last: of each token the last pass it takes; here: the black slot;
    read: the (column, row) of those that it reads.
    """
    drawing = Drawing(title, caption, ('pass 1', 'pass 2', 'pass 3'))
    drawing.tokens(range(4))
    for column in range(4):
        for row in range(3):
            drawing.slot(column, row, kind_of((column, row), last[column], here, read))
            if 0 < row <= last[column]:
                drawing.flow(column, row - 1, column, row)
        drawing.out(column, last[column])
    drawing.reads(here, read)
    some_stop = min(last) < LAST_PASS
    drawing.legend('here', 'read', *(['stopped', 'absent'] if some_stop else []))
    return drawing


def kind_of(slot, last, here, read):
    """The kinds of a slot whose token stops after the pass `last`."""
    if slot[1] > last:
        return 'absent'
    if slot == here:
        return 'here'
    kinds = []
    if slot in read:
        kinds.append('read')
    if slot[1] == last < LAST_PASS:
        kinds.append('stopped')
    return ' '.join(kinds)


def embedding():
    drawing = passes(
        "Embedding: PonderLM",
        ("After each pass, the mean embedding of what the model would say next is added to its",
         "input, and all blocks run again. A pass reads itself, at all tokens so far."),
        last=(2, 2, 2, 2), here=(2, 1), read=[(0, 1), (1, 1)])
    drawing.note(3, 0, '+ mean embedding')
    drawing.note(3, 1, '+ mean embedding')
    return drawing


def loop():
    drawing = passes(
        "Loop: the looped Transformer",
        ("What comes out of the blocks goes into them again, with nothing added; the final norm",
         "follows once, at the end. A pass reads itself, at all tokens so far."),
        last=(2, 2, 2, 2), here=(2, 1), read=[(0, 1), (1, 1)])
    drawing.note(3, 2, 'norm')
    return drawing


def chain():
    return passes(
        "Chain: thoughts that all tokens take at once",
        ("Each pass goes on from what the one before made, and reads the slots of earlier passes",
         "too: of all tokens so far, all passes so far. Nobody waits for a later pass."),
        last=(2, 2, 2, 2), here=(2, 1), read=[(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)])


def gate():
    return passes(
        "Gate: AdaPonderLM, on Embedding",
        ("A gate after each pass lets a token go on, or ends its passes. Whoever stopped keeps the",
         "keys and values of the last pass: that is what later passes read there."),
        last=(0, 1, 2, 0), here=(2, 2), read=[(0, 0), (1, 1)])


def router():
    return passes(
        "Router: Adaptive Latent CoT, on Chain",
        ("A router after each pass says how likely the token is to go on; once that is small, it",
         "stops. The output mixes a token's passes, by the probability of ending at each."),
        last=(0, 1, 2, 0), here=(2, 2), read=[(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)])


# ---- slots in a row: a token's thoughts stand beside it ------------------------------------------

def before_or_here(column, here):
    """The kind of a slot in the row of the one at `here`, which reads all before it."""
    if column == here:
        return 'here'
    return 'read' if column < here else ''


def latent():
    drawing = Drawing(
        "Latent: PonderLM-2, by Jacobi iteration",
        ("A thought z follows each token x: what came out of the slot before it, which reads all",
         "slots before. So all thoughts are guessed, and each sweep renews all of them at once."),
        ('sweep 0', 'sweep 1', 'last sweep'), across=75, width=50)
    drawing.tokens(range(0, 8, 2))
    for row in range(3):
        for column in range(8):
            kind = before_or_here(column, 5) if row == 2 else ''
            if column % 2 == 0:
                drawing.slot(column, row, kind, 'x')
            elif row > 0:
                drawing.slot(column, row, kind, 'z')
                drawing.flow(column - 1, row - 1, column, row)
    for column in range(1, 8, 2):
        drawing.out(column, 2)
    drawing.reads((5, 2), [(column, 2) for column in range(5)])
    drawing.legend('here', 'read')
    return drawing


def pause():
    drawing = Drawing(
        "Pause: learned pause tokens",
        ("One learned vector p follows each token a few times. All slots run in one pass; each",
         "reads all slots before it, and the last one of a token predicts the next token."),
        ('one pass',), across=66, width=50)
    drawing.tokens([0, 3, 6])
    for column in range(9):
        drawing.slot(column, 0, before_or_here(column, 5), 'p' if column % 3 else 'x')
        if column % 3 == 2:
            drawing.out(column, 0)
    drawing.reads((5, 0), [(column, 0) for column in range(5)])
    drawing.legend('here', 'read')
    return drawing


def mask():
    drawing = Drawing(
        "Mask: PonderLM-3, on Latent",
        ("At a token's own slot a router says how many thoughts it needs. The others",
         "are hidden: nobody reads them, and in generation nobody computes them."),
        ('last sweep',), across=66, width=50)
    drawing.tokens([0, 3, 6])
    needed = (0, 2, 1)
    for column in range(9):
        token, thought = divmod(column, 3)
        if thought > needed[token]:
            drawing.slot(column, 0, 'absent')
            continue
        drawing.slot(column, 0, before_or_here(column, 7), 'z' if thought else 'x')
        if column < 7:
            drawing.reads((7, 0), [(column, 0)])
        if thought == 0:
            x, y = drawing.place(column, 0)
            drawing.words(x, y + 87, f'needs {needed[token]}', 'said')
    drawing.legend('here', 'read', 'absent')
    return drawing


# ---- layers --------------------------------------------------------------------------------------

def depth_attention():
    drawing = Drawing(
        "Depth-Attention",
        ("Before a layer attends over the text, it mixes its value with those of every s-th layer",
         "below it, at the same token (here s = 2). The text is read through the mixed values."),
        tuple(f'layer {layer}' for layer in range(5)), up=56, height=30)
    drawing.tokens(range(4))
    for column in range(4):
        for layer in range(5):
            slot = column, layer
            drawing.slot(column, layer, kind_of(slot, 4, (2, 4), [(2, 0), (2, 2)]))
            if layer > 0:
                drawing.flow(column, layer - 1, column, layer)
    drawing.reads((2, 4), [(2, 0), (2, 2)])
    drawing.legend('here', 'read')
    return drawing


DRAWINGS = {'depth_attention': depth_attention, 'embedding': embedding, 'latent': latent,
            'chain': chain, 'loop': loop, 'pause': pause, 'gate': gate, 'mask': mask,
            'router': router}


def main():
    for name, draw in DRAWINGS.items():
        with open(os.path.join(HERE, 'drawings', f'{name}.svg'), 'w', encoding='utf-8') as f:
            f.write(draw().svg())


if __name__ == '__main__':
    main()
