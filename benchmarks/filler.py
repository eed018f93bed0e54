"""Text to fill a long prompt with: generated sentences that hardly ever repeat, or the sentences of a file.

Example: ``Generated("0/needle/2").sentence(0)`` might be "At first light the cooper of Marrick weighed a
crate of slates without a word."
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from specbench.errors import UserError


def _listed(text: str) -> tuple[str, ...]:
    """Split a list written with bars between its entries."""
    return tuple(" ".join(entry.split()) for entry in text.split("|"))


_FIRST = _listed(
    """Mar|Tarn|Hol|Brack|Ell|Win|Ash|Cor|Dun|Fen|Gar|Har|Ivel|Kel|Lang|Mel|Nor|Os|Pen|Quin|Ros|Sal|Thorn|Ul
    |Ver|Wes|Yar|Zen|Bel|Crow|Dray|Esk"""
)
_SECOND = _listed(
    "rick|wick|mere|ford|by|stead|ham|low|cliff|den|gate|shaw|ley|combe|haven|moor|thorpe|bury|well|side"
)
_SIDES = ("", "Upper ", "Lower ", "Old ", "New ", "North ", "South ", "Long ")
_PEOPLE = _listed(
    """cooper|miller|surveyor|ferryman|baker|clerk|glazier|weaver|tinsmith|gardener|carter|postmistress
    |apprentice|organist|locksmith|beekeeper|schoolmaster|midwife|printer|mason|innkeeper|stonecutter
    |shepherd|lamplighter"""
)
_NAMES = _listed(
    """Adela|Bertil|Corin|Dagny|Edwin|Fenja|Gordan|Hedda|Ismay|Joren|Katrin|Lowell|Maren|Nils|Orla|Perrin
    |Ragna|Sunniva|Tobias|Ulrike|Vesna|Willem|Yrsa|Zoran"""
)
_TIMES = _listed(
    """At first light|Before the bells|On market day|In the second week of the thaw|Toward evening
    |After the rain|That same autumn|Long before the bridge was built|On the eve of the fair|Just past noon
    |During the quiet months|When the tide turned|A year later|Once the harvest was in|On a grey Tuesday
    |Between two storms"""
)
_DID = _listed(
    """weighed|carried off|mended|painted|counted|sold|hid|borrowed|sketched|polished|unpacked|traded|labelled
    |tied up|measured|sent back|looked over|wrapped|dropped|catalogued"""
)
_SIZES = _listed(
    "a crate of|a sack of|a barrel of|a bundle of|a cartload of|a basket of|half a dozen|a drawer full of"
)
_THINGS = _listed(
    """slates|apples|candles|ropes|ledgers|nails|kettles|feathers|lanterns|bricks|onions|maps|buttons|saddles
    |clocks|tiles|chestnuts|spoons|brushes|hinges|bottles|hats|seeds|planks"""
)
_HOW = _listed(
    """without a word|with great care|in a hurry|for a fair price|to everyone's surprise|as the rule required
    |with borrowed gloves|before anyone asked|by the light of a single lamp|and thought no more of it
    |though nobody had ordered it|while the dog slept"""
)
_WEATHER = _listed("fog|frost|drizzle|sleet|thunder|a warm wind|low cloud|hail|smoke|a hard glare")
_PLACES = _listed(
    """the mill|the chapel yard|the lower quay|the toll house|the orchard wall|the smithy|the old kiln
    |the weir|the reading room|the dairy|the ropewalk|the granary|the boathouse|the covered market
    |the signal hut|the tannery"""
)
_SAID = _listed(
    """the road would be dry by spring|the accounts did not add up|nobody had wound the clock
    |the new hinges were too short|the last cart had gone the wrong way|paper was dearer than bread
    |the pond had never been so low|a letter was better than a visit|two lamps were enough for the lane
    |the roof would hold another winter"""
)
_SHAPES = (
    "{time} the {person} of {town} {did} {size} {things} {how}.",
    "{name} and {name2} walked from {spot} to {spot2}, counted {number} {things}, and turned back.",
    "The {person} said that {said}, and the {person2} from {town} agreed.",
    "{time} there was {weather} over {spot}, so the {person} stayed in {town} and {did} {size} {things}.",
    "Of the {number} {things} kept at {spot}, {name} {did} all but {small}.",
    "\u201c{said_cap},\u201d said {name}, who had {did2} {size} {things} at {spot} that week.",
    "Nobody in {town} knew why the {person} {did} {size} {things} {how}.",
    "{name} wrote in the margin that {said}; below it, in another hand, stood the number {number}.",
    "Between {spot} and {spot2} lay {number} paces of mud, which the {person} crossed {how}.",
    "{time} {name} came to {town} to learn the trade of a {person} and stayed for {small} winters.",
    "If the {person} of {town} was late, {name} {did} the {things} alone, {how}.",
    "The list at {spot} named {size} {things}, {small} chairs and a {person}'s apron.",
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'\u201d\u2019)\]])\s+")
_LONGEST = 60
"""Words; a longer run without a full stop is cut, so that no step of the length search is huge."""


class Filler(Protocol):
    """An endless row of sentences, the same ones each time it is asked."""

    def sentence(self, index: int) -> str:
        """Return the sentence at ``index`` (from 0), without surrounding space."""
        ...


def town(index: int) -> str:
    """Return the name of an invented town; the first 5,120 differ."""
    side, pair = divmod(index, len(_FIRST) * len(_SECOND))
    # 7 is coprime to the number of pairs, so neighbours in the list do not share their first half.
    first, second = divmod(pair * 7 % (len(_FIRST) * len(_SECOND)), len(_SECOND))
    return _SIDES[side % len(_SIDES)] + _FIRST[first] + _SECOND[second]


def person(rng: random.Random) -> str:
    """Return an invented name, "Adela Thornby"."""
    return f"{rng.choice(_NAMES)} {rng.choice(_FIRST)}{rng.choice(_SECOND)}"


class Generated:
    """Sentences put together from lists of our own words.

    Args:
        seed: the same seed gives the same sentences, on every machine.
    """

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._sentences: list[str] = []

    def sentence(self, index: int) -> str:
        """Return the sentence at ``index``."""
        while len(self._sentences) <= index:
            self._sentences.append(self._make())
        return self._sentences[index]

    def _make(self) -> str:
        pick = self._rng.choice
        said, did = pick(_SAID), pick(_DID)
        sentence = pick(_SHAPES).format(
            time=pick(_TIMES),
            person=pick(_PEOPLE),
            person2=pick(_PEOPLE),
            name=pick(_NAMES),
            name2=pick(_NAMES),
            town=pick(_FIRST) + pick(_SECOND),
            did=did,
            did2={"hid": "hidden"}.get(did, did),
            size=pick(_SIZES),
            things=pick(_THINGS),
            how=pick(_HOW),
            weather=pick(_WEATHER),
            spot=pick(_PLACES),
            spot2=pick(_PLACES),
            said=said,
            said_cap=said[0].upper() + said[1:],
            number=self._rng.randint(21, 998),
            small=pick(("two", "three", "four", "five", "seven", "nine")),
        )
        return sentence[0].upper() + sentence[1:]


class Excerpt:
    """The sentences of a text, read round and round from a starting point.

    Args:
        sentences: the text's sentences.
        start: index of the first one to use.
    """

    def __init__(self, sentences: Sequence[str], start: int) -> None:
        self._sentences = sentences
        self._start = start
        self.num_used = 0
        """How many have been asked for, counted from the start; above ``len(sentences)`` the text repeats."""

    def sentence(self, index: int) -> str:
        """Return the sentence at ``index``."""
        self.num_used = max(self.num_used, index + 1)
        return self._sentences[(self._start + index) % len(self._sentences)]


def sentences_of_file(path: Path) -> tuple[str, ...]:
    """Return the sentences of a text file, white space within them made single spaces.

    Raises:
        UserError: the file is missing, not UTF-8 text, or holds no words.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected UTF-8 text, but byte {error.start + 1} is not UTF-8") from error
    except OSError as error:
        raise UserError(f"the filler text {path} cannot be read: {error.strerror or error}") from error
    found: list[str] = []
    for sentence in _SENTENCE_END.split(text):
        words = sentence.split()
        found.extend(" ".join(words[i : i + _LONGEST]) for i in range(0, len(words), _LONGEST))
    if not found:
        raise UserError(f"the filler text {path} holds no words; name a file with some prose in it")
    return tuple(found)
