"""Prompts of several kinds and a text, fixed, for identity checks and timings."""

from itertools import cycle, islice

from eyas.runtime.text import Tokenizer

PROMPTS: tuple[str, ...] = (
    "The history of falconry begins",
    "A young hawk that is still in the nest is called",
    "Once upon a time, in a village by the sea, there lived",
    "The three most important rules of cooking rice are:\n1.",
    "Question: What is the capital of Portugal?\nAnswer:",
    "Question: Why is the sky blue?\nAnswer:",
    "def fibonacci(n):\n    ",
    "import os\n\ndef list_files(folder):\n    ",
    "SELECT name, COUNT(*) FROM birds",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients:\n- 2 eggs\n- 200 g flour\n-",
    "The difference between a compiler and an interpreter is",
    "In 1969, two astronauts",
    "La capitale de la France est",
    "Der schnelle braune Fuchs",
    "한국의 수도는",
    "Roses are red,\nViolets are blue,\n",
    "Abstract. We present a new method for",
    "Monday: rain\nTuesday: sun\nWednesday:",
    "x",
    "The lighthouse keeper had not spoken to anyone for eleven days when",
    "She opened the letter, read the first line twice, and",
    "Rain had been falling on the harbour since morning, and the boats",
    "My grandfather repaired clocks. He used to say that",
    "The committee met again on Thursday to decide whether",
    "To sharpen a knife, first",
    "A short history of the bicycle:\n\n",
    "The most common mistake of people who learn to swim is",
    "Chapter 1\n\nNobody in the valley remembered",
    "Breaking news: the river",
    "Question: How many legs does a spider have?\nAnswer:",
    "Question: Which planet has the most moons?\nAnswer:",
    "Is it better to walk or to run in the rain?",
    "If a train leaves at 14:05 and travels for 95 minutes, it arrives at",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "fn main() {\n    let numbers = vec![3, 1, 2];\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0;",
    "const sum = (values) => values.reduce(",
    "<ul>\n  <li>apples</li>\n  <li>",
    '{"name": "kestrel", "weight_g": 210, "colours": [',
    "#!/bin/sh\nset -e\nfor file in *.txt; do\n",
    "| bird | wingspan |\n|---|---|\n| osprey | 160 cm |\n|",
    "1, 1, 2, 3, 5, 8, 13,",
    "Packing list for a week in the mountains:\n1. boots\n2. rain jacket\n3.",
    "- red\n- orange\n- yellow\n-",
    "TODO before the move:\n[x] cancel the newspaper\n[ ]",
    "Había una vez un zapatero que",
    "O gato subiu no telhado e",
    "Il treno per Bologna parte",
    "今日の天気は",
    "从前有一座山，山里有",
    "Сегодня утром я",
    "كان يا ما كان",
    "नमस्ते, मेरा नाम",
    "🦅 🦉 🦆 🦅 🦉",
    "∀ε>0 ∃δ>0: |x−a|<δ ⇒",
)

# A text of our own, of several kinds, on which perplexity is measured.
TEXT = """\
A falcon does not hunt the way a hawk does. The hawk waits on a branch, drops low over the hedge and takes its quarry in
a short dash, steering between trunks with a long tail and rounded wings. The falcon climbs. It goes up in wide rings
until it is a speck against the cloud, and there it waits, hanging on the wind, while the dog works the heather below.
When the grouse break cover, it turns over, folds its wings and falls. Nothing alive moves faster. The strike is a blow
with the closed foot, and the bird is often dead before it reaches the ground.

People have flown birds of prey for at least three thousand years. Nobody knows who began. The oldest pictures come from
the dry country between the Euphrates and the Altai, where a hunter on foot had little chance of coming near anything
with ears. From there the art went east to China and Japan and west to the courts of Europe, carried by merchants,
soldiers and returning pilgrims. An emperor wrote a book about it that is still worth reading, because he believed only
what he had seen for himself, and said so.

The training of a young bird takes about six weeks. It follows a plain order:

1. Manning. The bird learns that a person is not a danger. It sits on the glove in a quiet room and is fed there.
2. Jumping to the glove. First a step, then the length of a leash, always for food.
3. The creance. A light line lets the bird fly thirty, then sixty metres, and keeps it from leaving.
4. Flying free. The line comes off on a calm morning when the bird is keen, and not before.

What should a beginner fly? Not a peregrine. It needs open land, a great deal of time and somebody who knows what can go
wrong. A kestrel is small, cheap to feed and easily lost to cold, since it has so little flesh to live on. Most teachers
recommend a larger, steadier bird, one that forgives a mistake in its weight. Weight is everything. A bird that is too
heavy will sit in a tree and look at you; one that is too light will fall ill. So the falconer weighs it each day at the
same hour and writes the figure down.

A table of weights is easy to keep, and a few lines of code will draw the curve:

def daily_change(weights):
    changes = []
    for earlier, later in zip(weights, weights[1:]):
        changes.append(later - earlier)
    return changes

If the average change over a week is negative while the food has stayed the same, look at the temperature first. In cold
weather a bird burns more than it eats, and the answer is a larger meal at noon, not a longer hunt.

Question: How long does a falcon live?
Answer: In the wild, most do not survive their first winter. Those that do may reach ten or twelve years. A bird that is
well kept can live for twenty.

Question: Is it cruel to keep one?
Answer: It depends on the keeper. The bird is free every time it flies, and nothing but habit and the hope of an easy
meal brings it back. Many have gone, and some have returned after a week as if nothing had happened.

The words of the art have stayed in the language long after most people forgot where they came from. To be fed up is to
have eaten so much that one will not fly. A cadge is the frame on which several hooded birds were carried to the field,
and the man who carried it gave us a name for a person who asks for things. To mantle is to spread the wings over one's
food. And a young bird taken from the nest, not yet able to fly and with everything still to learn, is called an eyas.
"""


def text_ids(tokenizer: Tokenizer, length: int) -> list[int]:
    """``length`` tokens: those of ``TEXT``, over and over."""
    return list(islice(cycle(tokenizer.encode(TEXT)), length))
