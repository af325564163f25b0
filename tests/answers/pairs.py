"""Pairs of questions that look alike, and ask for different things or for the same."""

from __future__ import annotations

NEGATION = [
    ("How do I enable two-factor login?", "How do I disable two-factor login?"),
    ("Is a whale a fish?", "Is a whale not a fish?"),
    ("Which of these foods contain nuts?", "Which of these foods contain no nuts?"),
    ("Why should I restart the server?", "Why shouldn't I restart the server?"),
    ("Name a country with a king.", "Name a country without a king."),
    ("Turn the light on in the kitchen.", "Turn the light off in the kitchen."),
    ("Is it true that cats can swim?", "Is it false that cats can swim?"),
    ("What can I eat before surgery?", "What can I eat after surgery?"),
]
NUMBERS = [
    ("What is 17 times 3?", "What is 17 times 4?"),
    ("Is 91 a prime number?", "Is 97 a prime number?"),
    ("Convert 5 miles to kilometres.", "Convert 50 miles to kilometres."),
    ("Write three words about rain.", "Write five words about rain."),
    ("What is 12.5 percent of 80?", "What is 1.25 percent of 80?"),
    ("Add 2 and 2.", "Add 2 and 22."),
]
NAMES = [
    ("What is the capital of France?", "What is the capital of Norway?"),
    ("Who wrote Hamlet?", "Who wrote Faust?"),
    ("What did Ada Lovelace do?", "What did Alan Turing do?"),
    ("Translate dog into Spanish.", "Translate dog into German."),
    ("Tell me about the river Nile.", "Tell me about the river Rhine."),
]
DATES = [
    ("What happened on 1 May 1990?", "What happened on 1 May 1991?"),
    ("What day follows Monday?", "What day follows Tuesday?"),
    ("Who was president in 2001?", "Who was president in 2010?"),
    ("Is the shop open on 2024-12-24?", "Is the shop open on 2024-12-25?"),
    ("How many days has January?", "How many days has June?"),
]
ADVERSARIAL = [*NEGATION, *NUMBERS, *NAMES, *DATES]

SAME = [
    ("What is the capital of France?", "what is the capital of France"),
    ("Explain photosynthesis.", "Please explain photosynthesis."),
    ("Write a poem about the sea.", "Write me a poem about the sea."),
]

_WAYS = """Tell me about X.|What do you know about X?|Explain X to me.|Describe X briefly.
I would like to learn about X.|Give me a short introduction to X.|What is special about X?
Could you say something about X?|Write two sentences about X.|X: what should I know?
Please describe X.|In a few words, what is X?|Help me understand X.|How would you explain X?
Summarise what is known about X.|Why does X matter?|What comes to mind when you hear X?
Teach me the basics of X.|Say in simple terms what X is.|What are the main facts about X?
Introduce X to a beginner.|Let's talk about X.|I wonder what X is.|Any thoughts on X?
Give an overview of X."""
_THINGS = """bees|the moon|bread|volcanoes|chess|glass|rain|the violin|wolves|paper|tea|steel
bridges|coral reefs|clouds|salt|the compass|silk|owls|windmills|jazz|snow|tides|amber|maps
spiders|clocks|rubber|deserts|ferns|poetry|lighthouses|copper|honey|earthquakes|kites|ink
saffron|glaciers|libraries"""
_LINES = str.maketrans("\n", "|")
# A thousand: forty things, each asked about in twenty-five ways.
PARAPHRASES = [
    [way.replace("X", thing) for way in _WAYS.translate(_LINES).split("|")]
    for thing in _THINGS.translate(_LINES).split("|")
]
