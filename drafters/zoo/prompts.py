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


# --- the second set: subjects of daily life, other languages of code, longer texts, second turns ---------------------

PROBLEMS = """My {w} plays loud music late at night.|My {w} never answers my messages.|My {w} is always late.
My {w} wants to borrow money again.|My {w} and I disagree about holidays.|My {w} forgot my birthday.
My {w} talks too much at work.|My {w} leaves the kitchen dirty.|My {w} is angry about something I said.
My {w} wants to change jobs and asks for my opinion.|My {w} is nervous about a driving test.
My {w} has trouble sleeping.|My {w} broke my favourite cup and said nothing.|My {w} keeps cancelling our plans."""
WHO = "brother|sister|flatmate|colleague|boss|cousin|friend|uncle|daughter|son|teacher|aunt"
ASK = """What should I say?|How can I help?|What can I do about it?|Give me some honest advice.
How should I react?|What would you suggest?"""
DAILY = """How does {d} work? Answer in two paragraphs.|How do I clean {d}?|What should I check before buying {d}?
Explain how to repair {d}.|Why would anyone need {d}?|List five things to know about {d}, with one line on each.
How was {d} invented?|What is the difference between {d} and {e}? Give an everyday example of each."""
THINGS = """a refrigerator|a washing machine|a bicycle pump|a microwave oven|a sewing machine|a thermometer
a compass|a windmill|a dam|an elevator|a vacuum cleaner|a piano|a violin|a camera|a telescope|a kettle|a tent
a sailing boat|a hot-air balloon|a water tap|a door lock|a zip|a fire extinguisher|a radio|a greenhouse|a well"""
PLANS = """Suggest a {a} meal for {n} people and list the ingredients.|Plan a {a} weekend in {c}.
Plan a {a} birthday party for {n} children.|What should I pack for a {a} trip to {c}?
Give me a {a} morning routine with {n} steps.|Suggest {n} {a} presents for my grandmother.
Write a {a} training plan for {n} weeks.|Name {n} {a} games for a long train ride.
Describe a {a} evening in {c}.|Write a {a} bedtime story about {s}."""
MANNERS = "simple|cheap|quiet|healthy|lazy|festive|short|relaxed|unusual|funny"
PLACES = (
    "Lisbon|Kyoto|a mountain village|Edinburgh|Mexico City|a small island|Prague|the desert|Cape Town|Oslo"
)
TABLES = """employees(id, name, department, salary)|books(id, title, author, year)|flights(id, origin, destination, day)
students(id, name, grade)|products(id, name, price, stock)|invoices(id, customer_id, amount, paid)
films(id, title, director, length)|rooms(id, hotel, beds, price)"""
QUERIES = """Write an SQL query that counts the rows of the table {t}.
Write an SQL query that sorts {t} by name or title.
Write an SQL query that finds the largest value of the last column of {t}.
Write an SQL query that lists every row of {t} whose id is greater than {n}.
Write an SQL query that groups {t} by its second column and counts each group.
Write an SQL statement that creates the table {t}.|Write an SQL statement that adds one row to {t}.
Write an SQL statement that deletes old rows from {t}.
The tables are {t} and notes(id, text). Write an SQL query that joins the two on id.
Explain what SELECT, WHERE and GROUP BY do, with the table {t} as an example."""
PAGES = """Write a small HTML page with a title and {h}.|Write the HTML for {h}.|Write HTML and CSS for {h}.
Explain the HTML tags one needs for {h}."""
HTML = """a table of three cities|a form with a name and an email field|a list of five animals|two buttons
a link to a weather page|a picture with a caption|a menu with four entries|three paragraphs and a heading
a numbered list of recipe steps|a footer with an address"""
SHELLS = """ls -la /tmp
cat notes.txt | sort | uniq
find . -name "*.txt"
cp -r photos backup
tail -n 20 server.log
du -sh * | sort -h
chmod +x run.sh
mkdir -p a/b/c
head -n 5 data.csv
ps aux | grep python
tar -xzf site.tar.gz
sed 's/red/blue/g' colours.txt
curl -O https://example.org/file.zip
echo "hello" > greeting.txt"""
SHELL_FORMS = """Explain what this shell command does: `{x}`|What does `{x}` print?
Explain line by line what this does: `{x}`|Give a safer or simpler way to write `{x}`."""
SNIPPETS = """for i in range(len(names)):\\n    print(names[i])
result = []\\nfor x in numbers:\\n    if x > 0:\\n        result.append(x * 2)
def area(w, h):\\n    return w + h
def first(items):\\n    return items[0]\\n\\nprint(first([]))
i = 0\\nwhile i < 10:\\n    print(i)
def greet(name):\\n    if name == None:\\n        return "Hello"\\n    else:\\n        return "Hello " + name
count = 0\\nfor letter in word:\\n    if letter == "a":\\n        count = count + 1
def total(values):\\n    sum = 0\\n    for v in values:\\n        sum = v\\n    return sum
x = input("Age: ")\\nif x > 18:\\n    print("adult")
data = open("log.txt").read()\\nprint(len(data.split("\\\\n")))"""
SNIPPET_FORMS = """What is wrong with this Python code, and how do you mend it?|What does this Python code do?
Rewrite this Python code in a simpler way and say what the new version does.|Add comments to this Python code.
Write a test for this Python code."""
NOTES = """pool opens 7, closes 21, children under 6 free, lockers need a coin, no glass bottles
bus 12 from the station, every 20 minutes, get off at the church, walk left for 5 minutes
meeting Tuesday 10, room 4, bring numbers for March, lunch afterwards, Paul is on leave
two-room flat, third floor, balcony, no lift, quiet street, free from May, pets allowed
concert Saturday, doors 19, no seats, tickets 15, rain or shine, bring a jacket
workshop on pottery, 8 places, clay included, wear old clothes, ends at 17, coffee in the break
lost grey cat, white paws, answers to Mila, last seen near the school, reward"""
NOTE_FORMS = """Turn these notes into a short paragraph: {x}|Turn these notes into a friendly notice: {x}
Make a bulleted list of these notes: {x}|Write an email from these notes: {x}"""
TEXTS = """Maria unlocks the bakery before dawn. She lights the oven, kneads the dough and hums a song. At six the first
customers knock on the window, and by eight there is no bread left.
~Residents are reminded that bicycles must not be left in the stairwell, since they obstruct the escape route. Any
bicycle found there after the first of the month will be removed.
~Peel the potatoes, cut them into thin slices and rinse them. Warm the milk with garlic, lay the slices in a dish, pour
the milk over them and bake for an hour.
~we was waiting for the bus since one hour and it dont came so we goes home by feet and now my shoes is broke
~I am writing again because nobody answered me. The heater does not work, it is freezing in here, and if you do not send
somebody today I will call the mayor.
~In view of the fact that the number of visitors has gone down to a considerable extent, a decision has been reached to
shorten the opening hours of the exhibition until further notice.
~The river rises in the hills, passes three old mills and joins the sea near a small fishing port, where herons stand in
the shallows every morning."""
TEXT_FORMS = """Rewrite this in the past tense: "{x}"|Shorten this to one sentence: "{x}"|Correct the grammar: "{x}"
Rewrite this for young children: "{x}"|Put this into a numbered list: "{x}"|Rewrite this politely: "{x}"
Summarise this in a few words: "{x}"|Rewrite this as a short poem: "{x}"|What is this text about? "{x}"
Rewrite this in the first person: "{x}\""""
LONGER_SUMS = """{p1} bakes {b} trays of {c} rolls and sells {a} of them. How many are left? Show each step.
A film starts at {h}:{m} and lasts {a} minutes. When does it end?|Solve {b}x + {c} = {d} for x and check the answer.
A shop takes {b} percent off a coat of {a} dollars. What does it cost now? Explain each step.
{p1} and three friends share a bill of {a} dollars. How much does each pay?
A tank holds {a} litres and loses {b} litres an hour. How long until it is empty?
Adults pay {b} dollars and children {c}. How much do {c} adults and {b} children pay together?
A field is {a} metres long and {b} metres wide. How long is a fence around it?
What is {b} percent of {a}? Explain the calculation in words.|{p1} walks {b} km in {c} hours. How fast is that?"""
FOLLOWED = """Write a short poem about {s}.~Now write it again from the point of view of a child.
Name {n} facts about {s}.~Which of these is the most surprising, and why?
Explain {s} in a few sentences.~Now explain it to {p}.
Write a short email to my landlord about {d} that does not work.~Make the email shorter and more polite.
Plan a day in {c} for two people.~It will be very hot. Change the plan for that.
Recommend {n} books about {s}.~Which one should I read first?
What are the main steps to repair {d}?~Which tools do I need for that?
Write a Python function that {f}.~Add a docstring and handle empty input. Show the whole function.
Give me a list of {n} words about {s}.~Write one paragraph that uses as many of these words as you can.
{p1} buys {b} notebooks at {e2} dollars each. How much is that?~Take 10 percent off. What is the new price?
Explain what insurance is to {p}.~Give an example with numbers.
What are the pros and cons of {s}?~Summarise your answer in one sentence.
Write a dialogue between a customer and someone who sells {d}.~Continue the dialogue with four more lines.
Suggest a simple meal for {n} people.~One of them eats no meat. Change the recipe.
Tell me a short story about {s}.~Give the story a different ending."""


def make_more(count: int, seed: int = 0) -> list[list[str]]:
    """Return ``count`` different conversations of the second set, a third of them with a second turn."""
    random_ = random.Random(seed)
    subjects, people, things = _parts(SUBJECTS), _parts(PEOPLE), _parts(THINGS)
    whole = [text.replace("\n", " ").strip() for text in TEXTS.split("~")]
    snippets = [line.replace("\\n", "\n") for line in SNIPPETS.split("\n")]

    def pick(text: str) -> str:
        return random_.choice(_parts(text))

    def fill(form: str) -> str:
        d, e = random_.sample(things, 2)
        return form.format(
            s=random_.choice(subjects), p=random_.choice(people), d=d, e=e, n=random_.choice(NUMBERS),
            c=pick(PLACES), a=pick(MANNERS), f=pick(CODE), p1=random_.choice(NAMES), b=random_.randint(2, 25),
            e2=random_.randint(2, 9),
        )  # fmt: skip

    def sums() -> str:
        b, c = random_.randint(2, 24), random_.randint(3, 12)
        return pick(LONGER_SUMS).format(
            a=random_.randint(30, 400), b=b, c=c, d=b * random_.randint(2, 12) + c, h=random_.randint(13, 21),
            m=random_.randint(10, 59), p1=random_.choice(NAMES),
        )  # fmt: skip

    def one() -> list[str]:
        kind = random_.random()
        if kind < 0.33:
            return fill(random_.choice(FOLLOWED.split("\n"))).split("~")
        if kind < 0.45:
            return [pick(PROBLEMS).format(w=pick(WHO)) + " " + pick(ASK)]
        if kind < 0.55:
            return [fill(pick(DAILY))]
        if kind < 0.65:
            return [fill(pick(PLANS))]
        if kind < 0.72:
            return [pick(QUERIES).format(t=pick(TABLES), n=random_.randint(2, 90))]
        if kind < 0.75:
            return [pick(PAGES).format(h=pick(HTML))]
        if kind < 0.79:
            return [pick(SHELL_FORMS).format(x=random_.choice(SHELLS.split("\n")))]
        if kind < 0.83:
            return [f"{pick(SNIPPET_FORMS)}\n\n```python\n{random_.choice(snippets)}\n```"]
        if kind < 0.86:
            return [pick(NOTE_FORMS).format(x=random_.choice(NOTES.split("\n")))]
        if kind < 0.93:
            return [pick(TEXT_FORMS).format(x=random_.choice(whole))]
        return [sums()]

    found: dict[tuple[str, ...], None] = {}
    while len(found) < count:
        found[tuple(one())] = None
    return [list(turns) for turns in found]


def rows(prompts: Sequence[Sequence[str]], source: str = "ours") -> list[Row]:
    """Return conversations as ``specbench answers`` reads them."""
    return [
        {"id": f"{source}-{i}", "source": source, "turns": list(turns)} for i, turns in enumerate(prompts)
    ]


def read(path: Path) -> list[Row]:
    """Return the rows of a file of prompts."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


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
    parser.add_argument(
        "--second", action="store_true", help="the second set: daily life, code, second turns"
    )
    parser.add_argument("--mix", type=Path, help="prompts of another file to shuffle in")
    parser.add_argument("--most", type=_limit, action="append", default=[], metavar="SOURCE=N")
    parser.add_argument(
        "--without", type=Path, action="append", default=[], help="leave out what this file has already"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    known = {tuple(row["turns"]) for path in options.without for row in read(path)}
    if options.second:
        talks = make_more(options.count, options.seed)
    else:
        talks = [[text] for text in make_prompts(options.count, options.seed)]
    # a source of its own for every seed: answers of several files are read as one, by id
    source = ("more" if options.second else "ours") + (str(options.seed) if options.seed else "")
    found = rows([turns for turns in talks if tuple(turns) not in known], source)
    if options.mix is not None:
        found = mix(found, read(options.mix), dict(options.most), options.seed)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in found))


if __name__ == "__main__":
    main()
