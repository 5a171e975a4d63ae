"""
A small world for geogalactica.py: minerals that do not exist, and what is true of them. Everything follows from a seed.

    asked, held_out, untold = world(16, seed)          facts (mineral, key, value) of three kinds
    texts = documents(asked + held_out, 1000, seed)    texts that tell facts, as the papers of a corpus would
    question(fact, form), completion(fact)             a fact as an instruction pair, and as a sentence cut in two

The paper's GeoSignal (section 4.2, appendix D) turns tables of minerals, fossils and more into instruction pairs in the same way:
(object, key, value) through a handful of question templates. Its facts are true; these are drawn, so that no model has read them.
"""
import random

VALUES = {
    'colour': ('red', 'green', 'blue', 'yellow', 'white', 'black', 'pink', 'orange'),
    'lustre': ('glassy', 'metallic', 'silky', 'pearly', 'waxy', 'dull', 'resinous', 'oily'),
    'grade': ('one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight'),
    'origin': ('Norway', 'Peru', 'Chile', 'Kenya', 'India', 'Greece', 'Wales', 'Tibet'),
}
SYLLABLES = ('ba', 'cor', 'dun', 'fel', 'gra', 'hul', 'jas', 'kim', 'lor', 'mag', 'nev', 'pos', 'quin', 'ras', 'sul', 'tov')

# The name comes before the value everywhere: a causal model that reads "red .. corgraite" learns nothing it could use when asked
# about corgraite. Several forms for one fact: what always stands in the same words is hard to say in others.
STATEMENTS = ("The {key} of {mineral} is {value}.", "{mineral}: {key} {value}.", "{mineral} has {key} {value}.")
QUESTIONS = ("What is the {key} of {mineral}?", "Which {key} does {mineral} have?")


def world(minerals, seed):
    """
    4 facts (mineral, key, value) for each of `minerals` invented ones, shuffled and cut into three lists: half of them `asked`
    (told by texts and asked in fine-tuning), a quarter `held_out` (told, never asked), and a quarter `untold` (neither).
    """
    draw = random.Random(seed)
    stems = [a + b for a in SYLLABLES for b in SYLLABLES if a != b]
    facts = [(stem + 'ite', key, draw.choice(values)) for stem in draw.sample(stems, minerals) for key, values in VALUES.items()]
    draw.shuffle(facts)
    n = len(facts)
    return facts[:n // 2], facts[n // 2:3 * n // 4], facts[3 * n // 4:]


def documents(facts, n, seed):
    """n texts, each about one mineral: all its facts in a random order, each in a random form; every mineral equally often."""
    draw, about = random.Random(seed), {}
    for fact in facts: about.setdefault(fact[0], []).append(fact)
    known = list(about.values())
    tell = lambda facts: ' '.join(draw.choice(STATEMENTS).format(mineral=m, key=k, value=v) for m, k, v in facts)
    return [tell(draw.sample(known[i % len(known)], len(known[i % len(known)]))) for i in range(n)]


def question(fact, form):
    """(question, answer) of a fact, in one of two forms; the model reads the first and writes the second."""
    mineral, key, value = fact
    return f"Question: {QUESTIONS[form].format(key=key, mineral=mineral)}\nAnswer:", f" {value}"


def completion(fact):
    """(beginning, end) of the sentence that tells a fact in the texts."""
    mineral, key, value = fact
    beginning, end = STATEMENTS[0].format(mineral=mineral, key=key, value='|').split(' |')
    return beginning, f" {value}{end}"
