"""Prompts of mathematics and Python, which the target rarely makes up by itself, for `longspark data --prompts`.

    python examples/LongSpark-SmolLM2-135M-Instruct/prompts.py --output prompts.jsonl
    longspark data --prompts prompts.jsonl --output maths_and_code.jsonl

Word problems with drawn names and numbers, and the signatures and docstrings of Python's own standard library.
"""

import argparse
import importlib
import inspect
import json
import random
from collections.abc import Callable


NAMES = "Ada Bilal Carmen Dmitri Elena Farid Grace Hugo Ines Jun Keiko Luca Maya Noor Omar Priya Quentin Rosa Sven Tara".split()
THINGS = "apples pencils stickers marbles cookies books tickets oranges cards shells candles eggs".split()
PLACES = ["the market", "a school fair", "the bakery", "a garage sale", "the farm stand", "the library"]
JOBS = ["washing cars", "walking dogs", "babysitting", "painting fences", "delivering papers", "teaching piano"]
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
PROBLEMS: list[Callable[[random.Random], str]] = [
    lambda r: (
        f"{{a}} has {r.randint(5, 60)} {{things}}. {{b}} has {r.randint(2, 5)} times as many. "
        f"They give {r.randint(2, 20)} of them away together. How many {{things}} do they have left in total?"
    ),
    lambda r: (
        f"{{a}} earns ${r.randint(8, 30)} an hour {{job}} and works {r.randint(2, 9)} hours a day, {r.randint(3, 6)} days a "
        f"week. How much does {{a}} earn in {r.randint(2, 8)} weeks?"
    ),
    lambda r: (
        f"A box of {{things}} costs ${r.randint(3, 20)}. {{a}} buys {r.randint(2, 12)} boxes at {{place}} and pays with a "
        "$200 bill. How much change does {a} get?"
    ),
    lambda r: (
        f"A train travels {r.randint(40, 90)} miles per hour for {r.randint(2, 6)} hours and then {r.randint(30, 80)} miles "
        f"per hour for {r.randint(1, 4)} hours. How far does it travel in all?"
    ),
    lambda r: (
        f"{{a}} reads {r.randint(10, 40)} pages on Monday, twice as many on Tuesday, and {r.randint(5, 25)} pages on "
        f"Wednesday. The book has {r.randint(160, 320)} pages. How many pages are left?"
    ),
    lambda r: (
        f"{{place_}} sells {r.randint(20, 90)} {{things}} in the morning and {r.randint(20, 90)} in the afternoon at "
        f"${r.randint(1, 9)} each. {r.choice([10, 20, 25, 50])}% of the money goes to charity. How much money is that?"
    ),
    lambda r: (
        f"A rectangular garden is {r.randint(5, 30)} feet wide and {r.randint(5, 40)} feet long. Fence costs "
        f"${r.randint(2, 15)} a foot. What does it cost to fence the whole garden?"
    ),
    lambda r: (
        f"{{a}} is {r.randint(2, 6)} times as old as {{b}}, who is {r.randint(4, 12)} years old. How old will {{a}} be in "
        f"{r.randint(3, 15)} years?"
    ),
    lambda r: (
        f"There are {r.randint(12, 36)} students in a class. Each one needs {r.randint(2, 6)} {{things}}, and they come in "
        f"packs of {r.choice([4, 6, 8, 10])}. How many packs does the teacher have to buy?"
    ),
    lambda r: f"Solve for x: {r.randint(2, 12)}x + {r.randint(1, 40)} = {r.randint(41, 150)}.",
    lambda r: f"What is {r.randint(12, 99)} times {r.randint(11, 60)}, minus {r.randint(10, 400)}?",
    lambda r: (
        f"{{a}} saves ${r.randint(5, 40)} a week. How many weeks does it take until {{a}} can buy a bicycle for "
        f"${r.randint(120, 480)}, if {{b}} adds ${r.randint(10, 60)} at the start?"
    ),
]
MODULES = (
    "bisect heapq statistics textwrap string random fractions calendar colorsys functools operator shutil os.path posixpath "
    "json base64 html urllib.parse difflib copy datetime itertools math cmath collections re glob fnmatch tempfile csv shlex "
    "unicodedata keyword tokenize ast inspect types enum dataclasses contextlib pathlib zipfile gzip hashlib hmac secrets uuid "
    "numbers decimal struct binascii quopri mimetypes email.utils ipaddress socket logging warnings traceback linecache "
    "pprint reprlib sched queue threading subprocess platform locale gettext argparse getopt configparser"
).split()
CODE = [
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{stub}\n```",
    "Complete the following Python function:\n```python\n{stub}\n```",
    "Explain what this Python function does and show an example of its use:\n```python\n{stub}\n```",
]
TASKS = [
    "Write a Python function that {task}. Add a docstring and two examples.",
    "How can I write a Python program that {task}?",
]
ACTIONS = (
    "reverses|sorts|counts the words in|removes duplicates from|finds the longest word in|prints every second item of|"
    "checks whether a value occurs in|finds the largest and the smallest item of|splits into halves|joins with commas|"
    "counts the vowels in|converts to upper case|filters the even numbers out of|adds up the squares of"
).split("|")
OBJECTS = "a list|a string|a text file|a list of numbers|a sentence|a dictionary|a tuple|a list of names".split("|")


def word_problem(draw: random.Random) -> str:
    a, b = draw.sample(NAMES, 2)
    place = draw.choice(PLACES)
    blanks = {"a": a, "b": b, "things": draw.choice(THINGS), "job": draw.choice(JOBS), "place": place}
    text = draw.choice(PROBLEMS)(draw).format(**blanks, place_=place.capitalize())
    return text + (BOXED if draw.random() < 0.7 else "")


def stubs() -> list[str]:
    """Signature and docstring of every documented public function of `MODULES`."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name, function in inspect.getmembers(module, inspect.isroutine):
            doc = inspect.getdoc(function)
            if name.startswith("_") or not doc or len(doc) > 800:
                continue
            try:
                signature = str(inspect.signature(function))
            except (TypeError, ValueError):
                continue
            found[f'def {name}{signature}:\n    """ {doc}\n    """\n'] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--number", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    draw = random.Random(options.seed)
    functions = stubs()
    prompts: dict[str, None] = {}
    while len(prompts) < options.number:
        kind = draw.random()
        if kind < 0.5:
            prompt = word_problem(draw)
        elif kind < 0.85:
            prompt = draw.choice(CODE).format(stub=draw.choice(functions))
        else:
            prompt = draw.choice(TASKS).format(task=f"{draw.choice(ACTIONS)} {draw.choice(OBJECTS)}")
        prompts[prompt] = None
    with open(options.output, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)


if __name__ == "__main__":
    main()
