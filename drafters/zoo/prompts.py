"""Training prompts of our own writing: seeded combinations of tasks and subjects, the sort of thing people ask.

Example: ``python drafters/zoo/prompts.py --count 3000 --out prompts.jsonl``, then ``specbench answers --prompts
prompts.jsonl``. A line reads ``{"id": "ours-0", "turns": ["Explain how tides work to a curious child."]}``. With
``--mix other.jsonl --most gsm8k_train=900`` another file's prompts are shuffled in, of one source at most so many.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SUBJECTS = """tides|volcanoes|the water cycle|honey bees|migration of birds|the moon|black holes
earthquakes|rainbows|photosynthesis|vaccines|the human heart|sleep|dreams|memory|allergies|vitamins|exercise
meditation|stress at work|the Roman Empire|the printing press|the Silk Road|ancient Egypt
the French Revolution|the Industrial Revolution|the Renaissance|Vikings|castles|the space race
the history of chess|the Olympic Games|the invention of the wheel|inflation|saving money|credit cards
the stock market|taxes|insurance|running a small shop|starting a podcast|electric cars|solar panels
wind turbines|batteries|recycling|composting|deforestation|coral reefs|plastic in the sea|computers
the internet|passwords|databases|sorting algorithms|machine learning|robots|smartphones|satellites
encryption|public libraries|museums|city parks|public transport|cycling to work|remote work|school uniforms
homework|exams|learning a language|playing the guitar|painting with watercolours|photography
gardening on a balcony|baking bread|making soup|growing tomatoes|keeping a cat|training a puppy|aquariums
camping|hiking in the mountains|swimming|football|tennis|yoga|marathons|board games|jigsaw puzzles|knitting
pottery|bird watching|stargazing|friendship|honesty|patience|courage|teamwork|leadership|creativity
curiosity|time management|public speaking|job interviews|writing a CV|meetings|customer service|negotiation
feedback|moving to a new city|sharing a flat|coffee|tea|chocolate|cheese|rice|olive oil|spices|breakfast
vegetarian cooking|food waste|street markets|weather forecasts|deserts|rivers|glaciers|islands|rainforests
the Arctic|caves|oceans|wild horses|wolves|elephants|penguins|whales|octopuses|butterflies|spiders|dinosaurs
fossils|crystals|gold|iron|glass|paper|bridges|lighthouses|trains|sailing ships|airports|maps|clocks|mirrors
music festivals|theatre|cinema|comics|poetry|fairy tales|opera|democracy|elections|courts|newspapers
advertising|social media|privacy|volunteering|charity|ageing|childhood|gravity|light|sound|magnetism|atoms
acids|temperature|energy|prime numbers|fractions|probability|geometry|statistics"""
PEOPLE = """a curious child|a new colleague|a busy parent|a student before an exam|a retired engineer
a tourist|a friend who knows nothing about it|a teenager|a patient listener|a manager|a first-year student
an elderly neighbour"""
FORMS = """Explain {s} to {p}.|What is the most surprising thing about {s}?|Why does {s} matter?
How has {s} changed over time?|Give me {n} facts about {s}.|List {n} common misunderstandings about {s}.
Write a short introduction to {s}.|Write a paragraph about {s} for a school magazine.|Compare {s} with {t}.
What do {s} and {t} have in common?|What are the pros and cons of {s}?
I want to learn about {s}. Where should I start?|Write a poem about {s}.
Write a short story in which {s} plays a part.|Write a dialogue between two friends about {s}.
Describe {s} in one sentence.|Make a quiz with {n} questions about {s}, with answers.
Suggest {n} titles for an article about {s}.|Write a friendly email inviting people to a talk on {s}.
Write a tweet about {s}.|Give {n} tips on {s} for beginners.|What would a world without {s} look like?
Summarise what everyone should know about {s} in {n} bullet points.
Which questions would you ask an expert on {s}?|Tell me something about {s} that I can tell at dinner.
Write a plan for a {n}-day workshop on {s}.|How would you teach {s} to {p}?
Write an opening line for a novel about {s}.|Is {s} more important than {t}? Give reasons.
Write a product description for a book about {s}.|Define {s}.|What mistakes do people make with {s}?
Invent a slogan for a campaign about {s}.|Write a song verse about {s} and {t}.
Explain the difference between {s} and {t} to {p}.|Write a letter to {p} about {s}.
Create a checklist about {s}.|How can {p} get better at understanding {s}?
Write a news headline and a short report about {s}.|Give an example of how {s} affects daily life.
What skills does someone working with {s} need?|Describe a day spent with {s}.
Write {n} sentences about {s}, each starting with a different letter.|Name {n} things connected with {s}.
Write a review of an exhibition on {s}.|Turn {s} into a metaphor for {t}.|What is the future of {s}?"""
SENTENCES = """The meeting was moved to Friday because the manager was ill.
She walked slowly along the river and thought about home.|Our team finished the project two weeks late.
The soup was cold and the waiter was rude.|He bought three apples and a loaf of bread.
I can't come tomorrow since my car broke down.|The new library opens its doors in spring.
They were happy with the results of the test.|The children played in the garden until it got dark.
My phone stopped working after the last update.|The train to the coast leaves at seven in the morning.
We need to spend less money on advertising.|The old house on the hill has been empty for years.
Please send me the report before noon.|The film was long but never boring.
Nobody knew why the lights went out.|Her speech made everyone in the hall smile.
The dog chased the ball into the street.|I am writing to complain about the noise next door.
The price of bread has gone up again.|He forgot his umbrella on a rainy day.
The doctor told me to drink more water and walk every day.|It took them four hours to climb the mountain.
The bakery sells the best cakes in town.|You should have asked me first."""
REWRITES = """Rewrite this sentence more formally: {q}|Make this sentence shorter: {q}
Put this into the future tense: {q}|Rewrite this as a question: {q}|Correct the grammar, if needed: {q}
Say this more politely: {q}|Translate into French: {q}|Translate into Spanish: {q}
What is the mood of this sentence? {q}|Rewrite this sentence with more detail: {q}
Continue this story with three more sentences: {q}|Find the verbs in this sentence: {q}
Turn this into a headline: {q}|Rewrite this in the style of a fairy tale: {q}
Is this sentence positive, negative or neutral? {q}|Paraphrase: {q}"""
CODE = """reverses a string|counts the vowels in a text|checks whether a number is prime
merges two sorted lists|finds the largest number in a list|removes duplicates from a list
computes the factorial of n|converts Celsius to Fahrenheit|counts how often each word occurs
checks whether a word is a palindrome|sums the digits of a number|returns the n-th Fibonacci number
flattens a nested list|finds the second smallest value|validates an email address
reads a CSV file and prints its columns|generates a random password|rotates a list by k places
computes the average of a list|finds common elements of two lists|turns a list of pairs into a dictionary
counts the lines of a file|draws a triangle of stars|converts a number to binary
groups words by their first letter|checks whether brackets are balanced|sorts a list of names by length
computes the greatest common divisor|formats a date"""
CODE_FORMS = """Write a Python function that {c}.
Write a Python function that {c}, with a docstring and an example.|How do I write code that {c}?
Explain step by step a program that {c}.|Write a JavaScript function that {c}.
Write a test for a function that {c}.|Give pseudocode for a program that {c}."""
SUMS = """A box holds {a} pencils. How many pencils are in {b} boxes?
{p1} has {a} marbles and gives away {b}. How many are left?
A ticket costs {a} dollars. How much do {b} tickets cost?|What is {a} plus {b}?|What is {a} times {b}?
What is {b} percent of {a}?|A car drives {a} km in {b} hours. What is its average speed?
{p1} reads {b} pages a day. How long does a book of {a} pages take?
A rectangle is {a} cm long and {b} cm wide. What are its area and perimeter?
Share {a} sweets among {b} children. What is left over?
{p1} saves {b} dollars a week. How much is that after {a} weeks?
If {b} shirts cost {a} dollars, what does one shirt cost?"""
NAMES = ("Mara", "Tom", "Aisha", "Luis", "Nina", "Oskar", "Priya", "Jonas", "Wei", "Elena", "Sam", "Ruth")
NUMBERS = ("three", "four", "five", "six", "seven", "ten")


def _parts(text: str) -> list[str]:
    return [part for line in text.splitlines() for part in line.split("|") if part]


def make_prompts(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` different prompts: about two thirds questions and writing, the rest rewriting, code and sums."""
    random_ = random.Random(seed)
    subjects, people, forms = _parts(SUBJECTS), _parts(PEOPLE), _parts(FORMS)
    rewrites, sentences = _parts(REWRITES), _parts(SENTENCES)
    code, code_forms, sums = _parts(CODE), _parts(CODE_FORMS), _parts(SUMS)

    def one() -> str:
        kind = random_.random()
        if kind < 0.70:
            s, t = random_.sample(subjects, 2)
            return random_.choice(forms).format(s=s, t=t, p=random_.choice(people), n=random_.choice(NUMBERS))
        if kind < 0.84:
            return random_.choice(rewrites).format(q=random_.choice(sentences))
        if kind < 0.93:
            return random_.choice(code_forms).format(c=random_.choice(code))
        a, b = random_.randint(12, 400), random_.randint(2, 25)
        return random_.choice(sums).format(a=a, b=b, p1=random_.choice(NAMES))

    found: dict[str, None] = {}
    while len(found) < count:
        found[one()] = None
    return list(found)


def rows(prompts: Sequence[str]) -> list[Row]:
    """Return prompts as ``specbench answers`` reads them."""
    return [{"id": f"ours-{i}", "source": "ours", "turns": [text]} for i, text in enumerate(prompts)]


def mix(ours: Sequence[Row], others: Sequence[Row], most: Mapping[str, int], seed: int = 0) -> list[Row]:
    """Return both in one random order.

    Args:
        ours: kept whole.
        others: of these, every source named in ``most`` gives the first so many of a random order.
        most: source -> rows at most.
        seed: of both orders.
    """
    others = list(others)
    random.Random(seed).shuffle(others)
    left = dict(most)
    kept = list(ours)
    for row in others:
        source = row.get("source", "")
        if source in left:
            left[source] -= 1
        if left.get(source, 0) >= 0:
            kept.append(row)
    random.Random(seed).shuffle(kept)
    return kept


def _limit(text: str) -> tuple[str, int]:
    source, _, number = text.partition("=")
    return source, int(number)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix", type=Path, help="prompts of another file to shuffle in")
    parser.add_argument("--most", type=_limit, action="append", default=[], metavar="SOURCE=N")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = rows(make_prompts(options.count, options.seed))
    if options.mix is not None:
        others = [json.loads(line) for line in options.mix.read_text().split("\n") if line]
        found = mix(found, others, dict(options.most), options.seed)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in found))


if __name__ == "__main__":
    main()
