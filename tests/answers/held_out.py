"""Pairs of questions that ask for different things, and pairs that ask for the same in other form.

Nothing in `sameness.py` was chosen by them: it knows no opposite, name, number or unit.
"""

from __future__ import annotations

ORDER = [
    ("Is 5 greater than 3?", "Is 3 greater than 5?"),
    ("Did France beat Brazil?", "Did Brazil beat France?"),
    ("Translate this from German to Spanish.", "Translate this from Spanish to German."),
    ("Did Anna sue Bob in 2001 or 2010?", "Did Bob sue Anna in 2010 or 2001?"),
    ("Subtract 3 from 10.", "Subtract 10 from 3."),
    ("Can a dog bite a man?", "Can a man bite a dog?"),
    ("Why do only cats purr?", "Why do cats only purr?"),
]
NAMES = [
    ("what is the capital of france", "what is the capital of norway"),
    ("who wrote hamlet?", "who wrote faust?"),
    ("Is ibuprofen ok with food?", "Is paracetamol ok with food?"),
    ("tell me about tesla the man", "tell me about tesla the firm"),
    ("How do I say no, please?", "How do I say no, thanks?"),
    ("Explain C.", "Explain C++."),
    ("Explain C#.", "Explain C."),
    ("Tell us about trade.", "Tell US about trade."),
    ("What does turkey export?", "What does Turkey export?"),
]
OPPOSITES = [
    ("What are the benefits of coffee?", "What are the risks of coffee?"),
    ("What is the largest planet?", "What is the smallest planet?"),
    ("Name a legal drug.", "Name an illegal drug."),
    ("Is it safe to mix these?", "Is it unsafe to mix these?"),
    ("How do I log in?", "How do I log out?"),
    ("Turn it on.", "Turn it off."),
    ("How can I gain weight?", "How can I lose weight?"),
    ("Is winter cold in june in chile?", "Is winter hot in june in chile?"),
    ("What is the cheapest phone?", "What is the dearest phone?"),
    ("How do I install the driver?", "How do I uninstall the driver?"),
    ("Why is rain acidic?", "Why is rain non-acidic?"),
    ("Name a country with a king.", "Name a country with a queen."),
    ("What are the pros of nuclear power?", "What are the cons of nuclear power?"),
    ("How do I encrypt a disk?", "How do I decrypt a disk?"),
    ("Should I borrow money from friends?", "Should I lend money to friends?"),
    ("Is the tide rising?", "Is the tide falling?"),
]
NEGATION = [
    ("Which birds can fly?", "Which birds can't fly?"),
    ("Which birds can fly?", "Which birds fail to fly?"),
    ("Is smoking allowed here?", "Isn't smoking allowed here?"),
    ("Name a metal that rusts.", "Name a metal that seldom rusts."),
    ("Is the lamp on?", "Is the lamp on or is it broken?"),
    ("List foods with gluten.", "List foods with zero gluten."),
]
NUMBERS = [
    ("Write twenty words about rain.", "Write thirty words about rain."),
    ("What happened in the nineties?", "What happened in the eighties?"),
    ("What is 5?", "What is 5!"),
    ("What is 3.5 times 2?", "What is 35 times 2?"),
    ("What is 2 + 3?", "What is 2 - 3?"),
    ("What is 2^3?", "What is 2*3?"),
    ("Is -5 a natural number?", "Is 5 a natural number?"),
    ("What is a third of nine?", "What is a quarter of nine?"),
    ("What is x² for x = 3?", "What is x2 for x = 3?"),
    ("Who was Henry the fifth?", "Who was Henry the sixth?"),
    ("What is 1,000 divided by 8?", "What is 1.000 divided by 8?"),
]
DATES = [
    ("When is Easter next year?", "When is Easter this year?"),
    ("What happened last week?", "What happened next week?"),
    ("What happened on 3/4/1990?", "What happened on 4/3/1990?"),
    ("Is it summer in the morning?", "Is it summer in the evening?"),
    ("Who ruled in 50 BC?", "Who ruled in 50 AD?"),
]
UNITS = [
    ("Convert 5 miles to metres.", "Convert 5 feet to metres."),
    ("How long does 5 MB take?", "How long does 5 Mb take?"),
    ("Is 5 mW much power?", "Is 5 MW much power?"),
    ("How much is $5 in yen?", "How much is €5 in yen?"),
    ("Is 30 °C warm?", "Is 30 °F warm?"),
    ("What is 20% of 90?", "What is 20 of 90?"),
]
TEXTS = [
    ('How many letters has "don\'t"?', 'How many letters has "do not"?'),
    ("Translate into French: how are you?", "Translate into French: how are you"),
    ("What does `a  b` print?", "What does `a b` print?"),
    ("Explain this.\nif x:\n  a()\nb()", "Explain this.\nif x:\n  a()\n  b()"),
    ("Let's eat, grandma. Is that rude?", "Let's eat grandma. Is that rude?"),
    ("The shop is open.", "The shop is open?"),
    ("Can you write poems?", "Write poems."),
    ("Polish wood, what is it worth?", "polish wood, what is it worth?"),
]
LANGUAGES = [
    ("Ist der Hund kein Tier?", "Ist der Hund ein Tier?"),
    ("¿Es una ballena un pez?", "¿No es una ballena un pez?"),
    ("Ist das Essen nicht gesund?", "Ist das Essen gesund?"),
    ("这个药可以吃吗", "这个药不可以吃吗"),
    ("法国的首都是什么", "挪威的首都是什么"),
    ("北京到上海多远", "上海到北京多远"),
    ("この魚は食べられますか", "この魚は食べられませんか"),
    ("이 약을 먹어도 되나요", "이 약을 먹으면 안 되나요"),
    ("Peut-on manger ce fruit?", "Peut-on manger ces fruits?"),
    ("Quel est le plus grand pays?", "Quel est le plus petit pays?"),
    ("Можно ли это есть?", "Нельзя ли это есть?"),
    ("هل هذا آمن؟", "هل هذا غير آمن؟"),
    ("ยานี้กินได้ไหม", "ยานี้กินไม่ได้ไหม"),
    ("Was kostet das Haus?", "Was kostet die Maus?"),
]
HELD_OUT = [
    *(*ORDER, *NAMES, *OPPOSITES, *NEGATION, *NUMBERS, *DATES, *UNITS, *TEXTS, *LANGUAGES),
]

OTHER_FORM = [
    ("What is the capital of France?", "what is the capital of France"),
    ("What is the capital of France?", "  What is the capital of France?\n"),
    ("Explain photosynthesis.", "Please explain photosynthesis."),
    ("Explain photosynthesis.", "explain photosynthesis"),
    ("Explain photosynthesis.", "Could you explain photosynthesis?"),
    ("Explain photosynthesis.", "Can you please explain photosynthesis?"),
    ("Please tell me why rain falls.", "Would you tell me why rain falls?"),
    ("What's the tallest tree?", "What is the tallest tree?"),
    ("What’s the tallest tree?", "what is the tallest tree"),
    ("Write a poem about the sea.", "Write me a poem about the sea."),
    ("Write an ode to tea.", "please write me an ode to tea"),
    ("Name three rivers.", "Please name three rivers"),
    ("How old is the universe?", "how old is the universe"),
    ("Is a whale a fish?", "Is a whale a fish"),
    ("Why can't I see stars by day?", "why can't I see stars by day"),
    ("Translate dog into Spanish.", "Kindly translate dog into Spanish"),
    ("这个药可以吃吗", " 这个药可以吃吗\n"),
    ("Où est la gare ?", "Ou\u0300 est la gare ?"),
]
REWORDED = [
    ("How do I sort a list in Python?", "How can I sort a list in Python?"),
    ("What is the capital of France?", "Which city is the capital of France?"),
    ("Explain photosynthesis.", "What is photosynthesis?"),
    ("Explain photosynthesis.", "Explain photosynthesis, please."),
    ("Who wrote Hamlet?", "Who is the author of Hamlet?"),
    ("How old is the universe?", "What is the age of the universe?"),
    ("Give me a recipe for soup.", "I need a recipe for soup."),
    ("Why do cats purr?", "Why does a cat purr?"),
    ("Name three rivers.", "List three rivers."),
    ("What is a hash table?", "Hi! What is a hash table?"),
]
