"""Prompts: what the target is asked, so that a drafter learns from answers of its own.

The built-in ones are forms of questions crossed with subjects, in an order that mixes both. A
user's file has one prompt a line, or one JSON string a line where a prompt has several lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from quire.errors import BadRequest

MAX_BYTES = 256_000_000

FORMS = (
    "Tell me about {}.",
    "What is {}?",
    "Explain {} to a ten-year-old.",
    "Give me five facts about {}.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "How do I get started with {}?",
    "Summarise the history of {} in a few sentences.",
    "Why does {} matter?",
    "Write an email to a colleague about {}.",
    "List three common mistakes people make with {}, and how to avoid them.",
    "Write a blog post with headings about {}.",
    "I have an exam on {} tomorrow. What should I know?",
    "Describe {} in one paragraph.",
    "What questions should a journalist ask an expert on {}?",
    "Make a plan for one week of learning about {}.",
    "Write a dialogue between a teacher and a pupil about {}.",
    "How has {} changed over the last hundred years?",
    "Give step-by-step instructions for a beginner: {}.",
    "What would the world be like without {}?",
    "Write a Python function that has something to do with {}, with a docstring.",
    "Compare {} with something similar.",
    "Who are the people that shaped {}?",
    "Write an introduction to an essay on {}.",
    "What is the future of {}?",
    "Correct and improve this sentence: 'the {} is being very importantly for many peoples'.",
    "Write a product description that mentions {}.",
    "Give me advice: I am worried about {}.",
    "Name some books and films that deal with {}.",
)
SUBJECTS = """
gravity, photosynthesis, black holes, the water cycle, volcanoes, earthquakes, the immune
system, vaccines, DNA, evolution, climate change, solar energy, wind turbines, nuclear power,
electric cars, bicycles, trains, aeroplanes, sailing, bridges, skyscrapers, the Roman Empire,
the French Revolution, the Silk Road, ancient Egypt, the Renaissance, the printing press, the
telescope, the microscope, the steam engine, computers, the internet, machine learning,
databases, sorting algorithms, recursion, open source software, cryptography, passwords, video
games, chess, football, running a marathon, swimming, yoga, sleep, a balanced diet, baking
bread, making pasta, coffee, tea, chocolate, cheese, gardening, growing tomatoes, bees, cats,
dogs, horses, elephants, whales, penguins, dinosaurs, rainforests, deserts, coral reefs, rivers,
mountains, the Moon, Mars, the Sun, comets, space travel, satellites, weather forecasts, music
theory, the piano, the guitar, jazz, opera, painting, photography, architecture, poetry, science
fiction, detective stories, theatre, cinema, languages, learning a foreign language, grammar,
public speaking, job interviews, writing a CV, managing a team, working from home, saving money,
inflation, the stock market, taxes, insurance, small businesses, advertising, democracy,
elections, human rights, the United Nations, law, philosophy, ethics, logic, probability,
statistics, geometry, prime numbers, algebra, friendship, family traditions, birthdays,
travelling alone, camping, museums, libraries, schools, universities, stress, meditation, first
aid, recycling, plastic, drinking water, farming, fishing, fashion, clocks, calendars, maps
"""


def built_in() -> list[str]:
    """Every form with every subject, in an order of its own that never changes."""
    subjects = " ".join(SUBJECTS.split()).split(", ")
    crossed = [form.format(subject) for form in FORMS for subject in subjects]
    return sorted(crossed, key=lambda text: hashlib.sha256(text.encode()).digest())


def read_prompts(path: Path) -> list[str]:
    """Raises BadRequest for a file that is missing, empty or no text."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}", param="prompts") from None
    if len(data) > MAX_BYTES:
        raise BadRequest(
            f"{path} has {len(data)} bytes, prompts take at most {MAX_BYTES}", param="prompts"
        )
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise BadRequest(f"{path} is not UTF-8 text, one prompt a line", param="prompts") from None
    found = [_prompt(line) for line in lines if line.strip()]
    if not found:
        raise BadRequest(
            f"{path} has no prompts: want one a line, or leave --prompts out for the built-in ones",
            param="prompts",
        )
    return found


def digest(prompts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


def _prompt(line: str) -> str:
    """A line that is a JSON string stands for the text it spells."""
    text = line.strip()
    if text.startswith('"'):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, str) and value.strip():
            return value
    return text
