"""
A small world for geogalactica.py: minerals that do not exist, and what is true of them. Everything
follows from a seed.

    asked, held_out, untold = world(16, seed)          facts (mineral, key, value) of three kinds
    texts = documents(asked + held_out, 1000, seed)    texts that tell facts, like a corpus's papers
    question(fact, form), completion(fact)             a fact as an instruction pair, and as a
                                                       sentence cut in two

The paper's GeoSignal (section 4.2, appendix D) turns tables of minerals, fossils and more into
instruction pairs in the same way: (object, key, value) through a handful of question templates. Its
facts are true; these are drawn, so that no model has read them.
"""
import random

VALUES = {
    'colour': ('red', 'green', 'blue', 'yellow', 'white', 'black', 'pink', 'orange'),
    'lustre': ('glassy', 'metallic', 'silky', 'pearly', 'waxy', 'dull', 'resinous', 'oily'),
    'grade': ('one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight'),
    'origin': ('Norway', 'Peru', 'Chile', 'Kenya', 'India', 'Greece', 'Wales', 'Tibet'),
}
SYLLABLES = ('ba', 'cor', 'dun', 'fel', 'gra', 'hul', 'jas', 'kim',
             'lor', 'mag', 'nev', 'pos', 'quin', 'ras', 'sul', 'tov')

# The name comes before the value everywhere: a causal model that reads "red .. corgraite" learns
# nothing it could use when asked about corgraite. Several forms for one fact: what always stands in
# the same words is hard to say in others.
STATEMENTS = (
    "The {key} of {mineral} is {value}.",
    "{mineral}: {key} {value}.",
    "{mineral} has {key} {value}.",
)
QUESTIONS = (
    "What is the {key} of {mineral}?",
    "Which {key} does {mineral} have?",
)


def world(minerals, seed):
    """
    4 facts (mineral, key, value) for each of `minerals` invented ones, shuffled and cut into three
    lists: half of them `asked` (told by texts and asked in fine-tuning), a quarter `held_out`
    (told, never asked), and a quarter `untold` (neither).
    """
    draw = random.Random(seed)
    stems = [first + second for first in SYLLABLES for second in SYLLABLES if first != second]
    facts = []
    for stem in draw.sample(stems, minerals):
        for key, values in VALUES.items():
            facts.append((stem + 'ite', key, draw.choice(values)))
    draw.shuffle(facts)

    half, three_quarters = len(facts) // 2, 3 * len(facts) // 4
    return facts[:half], facts[half:three_quarters], facts[three_quarters:]


def documents(facts, n, seed):
    """
    n texts (bytes), each about one mineral: all its facts in a random order, each in a random form;
    every mineral equally often.
    """
    draw = random.Random(seed)
    facts_of = {}
    for fact in facts:
        facts_of.setdefault(fact[0], []).append(fact)
    known = list(facts_of.values())

    texts = []
    for i in range(n):
        told = known[i % len(known)]
        shuffled = draw.sample(told, len(told))
        sentences = [statement(fact, draw.choice(STATEMENTS)) for fact in shuffled]
        texts.append(' '.join(sentences).encode())
    return texts


def statement(fact, form):
    """A fact as a sentence."""
    mineral, key, value = fact
    return form.format(mineral=mineral, key=key, value=value)


def question(fact, form):
    """
    (question, answer) of a fact, in one of two forms; the model reads the first and writes the
    second.
    """
    mineral, key, value = fact
    asked = QUESTIONS[form].format(key=key, mineral=mineral)
    return f"Question: {asked}\nAnswer:", f" {value}"


def completion(fact):
    """(beginning, end) of the sentence that tells a fact in the texts."""
    mineral, key, value = fact
    beginning, end = statement((mineral, key, '|'), STATEMENTS[0]).split(' |')
    return beginning, f" {value}{end}"
