"""Worked arithmetic and JSON for the embedded engine's training.

Both are made so that the likely continuation moves on: numbers follow from earlier numbers, ids and
dates rise, names walk through a list. A share of random jumps keeps the text from being certain.
"""

# ruff: noqa: SIM905
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FIRST = (
    "Ada Anton Bela Ben Carla Cyril Dana Dirk Edda Emil Flora Frank Greta Gus Hanna Hugo Ida Ivo Jana Jonas Karin Karl "
    "Lena Leo Mara Max Nora Nils Olga Otto Paula Piet Rosa Ralf Selma Sven Tara Theo Ulla Uwe Vera Viktor Wanda Willi"
).split()
LAST = (
    "Abel Berg Brook Clay Cole Dorn Eck Fell Ford Gale Gray Hale Holt Irving Jung Kemp Kern Lind Lowe Marsh Moss Nash "
    "North Oaks Pell Price Quinn Reed Rhodes Stone Swan Thorn Todd Unger Vale Voss Ward West Young Zorn"
).split()
GOODS = {
    "apple": 3, "book": 14, "brush": 6, "cable": 9, "candle": 5, "chair": 45, "clock": 28, "coat": 75, "cup": 4,
    "desk": 98, "fan": 32, "flute": 67, "glass": 7, "glove": 12, "hat": 18, "jar": 2, "kite": 16, "knife": 11,
    "lamp": 36, "map": 8, "mirror": 41, "notebook": 5, "paint": 13, "pan": 22, "pen": 2, "plate": 6, "radio": 54,
    "rope": 15, "rug": 62, "saw": 19, "scarf": 17, "shelf": 39, "shoe": 48, "soap": 3, "spoon": 4, "stool": 27,
    "table": 86, "tent": 73, "towel": 10, "vase": 21,
}  # fmt: skip
CITIES = (
    "Aarhus Basel Bergen Bonn Bruges Cork Delft Dover Essen Faro Gent Graz Kiel Leeds Lille Linz Lucca Malmo Metz "
    "Nantes Oslo Parma Porto Riga Siena Split Tartu Turin Turku Ulm Vaasa York"
).split()
_PLURALS = (
    "apples books brooms cables candles chairs clocks coats cups desks drums fans flutes hats jars kites lamps maps "
    "mirrors nails pans pens plates ropes rugs saws scarves shoes spoons stools tables tents towels vases"
).split()
_COLUMNS = ("ones", "tens", "hundreds", "thousands", "ten-thousands")
_MONTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


# ------------------------------------------------------------------------------- arithmetic
def add_steps(a: int, b: int) -> str:
    """Column by column, carries included: `ones 4 + 8 = 12, tens 7 + 3 + 1 = 11, ...`."""
    parts, carry = [], 0
    for i in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = x + y + carry
        parts.append(f"{_COLUMNS[i]} {x} + {y}{' + 1' if carry else ''} = {total}")
        carry = total // 10
    return ", ".join(parts)


def subtract_steps(a: int, b: int) -> str:
    """Column by column, borrowing from the next: `ones 12 - 8 = 4, tens 7 - 1 - 3 = 3, ...`."""
    parts, borrow = [], 0
    for i in range(len(str(a))):
        x, y = a // 10**i % 10, b // 10**i % 10
        lent = 10 if x - borrow - y < 0 else 0
        rest = x + lent - borrow - y
        parts.append(f"{_COLUMNS[i]} {x + lent}{' - 1' if borrow else ''} - {y} = {rest}")
        borrow = 1 if lent else 0
    return ", ".join(parts)


def multiply_steps(a: int, m: int) -> str:
    """Partial products, then their sum."""
    terms = [int(c) * 10 ** (len(str(a)) - 1 - i) for i, c in enumerate(str(a))]
    terms = [t for t in terms if t]
    parts = [f"{t} * {m} = {t * m}" for t in terms]
    total = terms[0] * m
    for t in terms[1:]:
        parts.append(f"{total} + {t * m} = {total + t * m}")
        total += t * m
    return ", ".join(parts)


def divide_steps(a: int, m: int) -> str:
    """Long division by one digit: `31 = 7 * 4 + 3, 36 = 7 * 5 + 1`."""
    parts, rest, begun = [], 0, False
    for c in str(a):
        rest = rest * 10 + int(c)
        begun = begun or rest >= m
        if begun:
            parts.append(f"{rest} = {m} * {rest // m} + {rest % m}")
        rest %= m
    return ", ".join(parts) or f"{a} = {m} * 0 + {a}"


def gcd_steps(a: int, b: int) -> tuple[str, int]:
    """Euclid's divisions and the greatest common divisor."""
    a, b = max(a, b), min(a, b)
    parts = []
    while b:
        parts.append(f"{a} = {b} * {a // b} + {a % b}")
        a, b = b, a % b
    return ", ".join(parts), a


@dataclass
class _Sheet:
    """State of one worksheet: the number carried on, the key and how far the key moves."""

    rng: random.Random
    value: int
    key: int
    step: int
    digit: int
    place: int
    chained: bool

    def advance(self) -> None:
        """Move on to the next key, digit and name; unchained sheets draw new numbers."""
        self.key += self.step
        self.digit = 2 + (self.digit - 1) % 8
        self.place += 1
        if not self.chained:
            self.value = self.rng.randint(11, 999)
            self.key = self.rng.randint(11, 499)
            self.digit = self.rng.randint(2, 9)


def _add(s: _Sheet) -> tuple[str, int]:
    return f"Add {s.key} to {s.value}: {add_steps(s.value, s.key)}", s.value + s.key


def _subtract(s: _Sheet) -> tuple[str, int]:
    big, small = max(s.value, s.key), min(s.value, s.key)
    return f"Take {small} from {big}: {subtract_steps(big, small)}", big - small


def _multiply(s: _Sheet) -> tuple[str, int]:
    return f"Multiply {s.value} by {s.digit}: {multiply_steps(s.value, s.digit)}", s.value * s.digit


def _divide(s: _Sheet) -> tuple[str, int]:
    m = s.digit
    return f"Divide {s.value} by {m}: {divide_steps(s.value, m)}, rest {s.value % m}", s.value // m


def _gcd(s: _Sheet) -> tuple[str, int]:
    steps, g = gcd_steps(s.value, s.key)
    return (
        f"Find gcd({s.value}, {s.key}): {steps}, gcd {g}, {s.value} + {g} = {s.value + g}",
        s.value + g,
    )


def _price(s: _Sheet) -> tuple[str, int]:
    who, what = FIRST[s.place % len(FIRST)], _PLURALS[s.place % len(_PLURALS)]
    cost = f"{multiply_steps(s.key, s.digit)}"
    return f"{who} buys {s.digit} {what} at {s.key} each: {cost}", s.key * s.digit


def _equation(s: _Sheet) -> tuple[str, int]:
    m = s.digit
    b = s.value % m + m
    left = s.value - b
    if left < 0:
        return _add(s)
    return (
        f"Solve {m}x + {b} = {s.value}: {s.value} - {b} = {left}, {left} / {m} = {left // m}",
        left // m,
    )


def _share(s: _Sheet) -> tuple[str, int]:
    who = FIRST[s.place % len(FIRST)]
    each = s.value // s.digit
    text = f"{who} shares {s.value} among {s.digit}: {divide_steps(s.value, s.digit)}"
    return f"{text}, each {each}, {each} + {s.key} = {each + s.key}", each + s.key


_OPERATIONS: tuple[Callable[[_Sheet], tuple[str, int]], ...] = (
    _add, _subtract, _multiply, _divide, _gcd, _price, _equation, _share,
)  # fmt: skip


def _operation(s: _Sheet, wanted: Callable[[_Sheet], tuple[str, int]]) -> tuple[str, int]:
    """Carry out what is wanted, or what keeps the number within reach."""
    if s.value > 999:
        return _divide(s)
    if s.value < 20:
        return _add(s)
    return wanted(s)


def arithmetic(rng: random.Random) -> str:
    """Render a worksheet; mostly each answer is the next problem's number."""
    chained = rng.random() < 0.75
    words = rng.choice([("Answer", "Key"), ("Result", "Key"), ("Answer", "Next key"), ("Result", "Now")])
    s = _Sheet(
        rng,
        rng.randint(21, 900),
        rng.randint(21, 260),
        rng.randint(2, 29),
        rng.randint(2, 9),
        rng.randrange(100),
        chained,
    )
    size = rng.choice([2, 4, 5, 6, 7, 8])
    cycle = rng.sample(_OPERATIONS, size)
    head = f"Worksheet {rng.randint(1, 9999)}, {rng.choice(['group', 'class', 'set'])} {rng.choice('ABCDEFGH')}"
    if chained:
        head += f". Start with {s.value}; the key {s.key} grows by {s.step}. Carry each {words[0].lower()} on."
    else:
        head += ". Separate problems, each with new numbers."
    lines = [head]
    for i in range(1, rng.randint(16, 34)):
        text, result = _operation(s, cycle[(i - 1) % size] if rng.random() < 0.9 else rng.choice(cycle))
        key = f"{words[1]} {s.key - s.step} + {s.step} = {s.key}. " if chained and i > 1 else ""
        lines.append(f"{i}. {key}{text}. {words[0]} {result}.")
        s.value = result
        s.advance()
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------ JSON
class _Walk:
    """Steps through a list with a stride; now and then it jumps."""

    def __init__(self, rng: random.Random, items: list[str], strides: tuple[int, ...]) -> None:
        self.rng, self.items = rng, items
        self.at, self.stride = rng.randrange(len(items)), rng.choice(strides)

    def next(self) -> str:
        """Return the next item."""
        jump = self.rng.random() < 0.12
        self.at = (self.rng.randrange(len(self.items)) if jump else self.at + self.stride) % len(self.items)
        return self.items[self.at]


class _Calendar:
    """A date that moves on by a usual number of days."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.year, self.month, self.day = (
            rng.randint(1998, 2029),
            rng.randint(1, 12),
            rng.randint(1, 28),
        )
        self.usual = rng.randint(1, 4)

    def next(self) -> str:
        """Return the current date and move on."""
        text = f"{self.year}-{self.month:02d}-{self.day:02d}"
        self.day += self.usual if self.rng.random() < 0.8 else self.rng.randint(0, 6)
        if self.day > _MONTHS[self.month - 1]:
            self.day -= _MONTHS[self.month - 1]
            self.month += 1
        if self.month > 12:
            self.year, self.month = self.year + 1, 1
        return text


def _clock(minutes: int) -> str:
    """Time of day."""
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def _amount(rng: random.Random, seed: int, top: int) -> int:
    """A small amount that mostly follows from a counter."""
    return 1 + ((seed % 10 * 7 + 3) % top if rng.random() < 0.75 else rng.randrange(top))


def _orders(rng: random.Random) -> Iterator[str]:
    first, last, goods = (
        _Walk(rng, FIRST, (1, 2, 3)),
        _Walk(rng, LAST, (1, 3)),
        _Walk(rng, list(GOODS), (1, 2, 5)),
    )
    days, number, per, markup = (
        _Calendar(rng),
        rng.randint(100, 9000),
        rng.randint(1, 3),
        rng.choice([0, 0, 1, 2]),
    )
    while True:
        lines, total = [], 0
        for j in range(per if rng.random() < 0.7 else rng.randint(1, 3)):
            item, quantity = goods.next(), _amount(rng, number + j, 9)
            cost = quantity * (GOODS[item] + markup)
            lines.append(f'["{item}", {quantity}, {GOODS[item] + markup}, {cost}]')
            total += cost
        name = f"{first.next()} {last.next()}"
        gift = ', "gift": true' if total > 200 else ""
        yield (
            f'"id": {number}, "date": "{days.next()}", "name": "{name}", '
            f'"items": [{", ".join(lines)}], "total": {total}{gift}'
        )
        number += 1 if rng.random() < 0.85 else rng.randint(2, 5)


def _ledger(rng: random.Random) -> Iterator[str]:
    first, last, days = _Walk(rng, FIRST, (1, 2)), _Walk(rng, LAST, (1, 2, 3)), _Calendar(rng)
    number, balance, paid, step = (
        rng.randint(10, 900),
        rng.randint(100, 900),
        rng.randint(10, 60),
        rng.randint(3, 19),
    )
    while True:
        out = paid > balance or rng.random() < 0.3
        balance = abs(balance - paid) if out else balance + paid
        yield (
            f'"no": {number}, "day": "{days.next()}", "{"to" if out else "from"}": "{first.next()} {last.next()}", '
            f'"amount": {paid}, "balance": {balance}'
        )
        number += 1
        paid = paid + step if rng.random() < 0.8 and paid < 400 else rng.randint(10, 99)


def _people(rng: random.Random) -> Iterator[str]:
    first, last, town = (
        _Walk(rng, FIRST, (1, 2, 3)),
        _Walk(rng, LAST, (1, 2, 3)),
        _Walk(rng, CITIES, (1, 2, 3)),
    )
    number, year, born = rng.randint(10, 5000), rng.randint(2001, 2029), rng.randint(1941, 1999)
    gap = rng.choice([1, 2, 3, 5, 7])
    while True:
        a, b = first.next(), last.next()
        born = born + gap if rng.random() < 0.8 else rng.randint(1941, 2000)
        born = born - 59 if born > 2000 else born
        yield (
            f'"id": {number}, "name": "{a} {b}", "mail": "{a[0].lower()}.{b.lower()}{born % 100:02d}'
            f'@{town.next().lower()}.example", "born": {born}, "age": {year - born}, "city": "{town.items[town.at]}"'
        )
        number += 1 if rng.random() < 0.9 else rng.randint(2, 9)


def _stock(rng: random.Random) -> Iterator[str]:
    goods, number, have = (
        _Walk(rng, list(GOODS), (1, 2, 3, 7)),
        rng.randint(10, 900),
        rng.randint(20, 60),
    )
    while True:
        item, sold = goods.next(), _amount(rng, number, 19)
        left, price = have - sold, GOODS[item]
        yield (
            f'"sku": "{item[:3].upper()}-{number:03d}", "item": "{item}", "have": {have}, "sold": {sold}, '
            f'"left": {left}, "price": {price}, "value": {left * price}'
        )
        number += 1 if rng.random() < 0.85 else rng.randint(2, 12)
        have = have + 7 if rng.random() < 0.7 and have < 90 else rng.randint(20, 60)


def _trips(rng: random.Random) -> Iterator[str]:
    town, driver = _Walk(rng, CITIES, (1, 2, 3, 5)), _Walk(rng, FIRST, (1, 2, 3))
    number, now, before, km = (
        rng.randint(10, 900),
        rng.randint(300, 600),
        town.next(),
        rng.randint(10, 60),
    )
    pause, grow = rng.choice([5, 10, 15, 20]), rng.randint(2, 9)
    while True:
        here, minutes = town.next(), km + km // 2
        yield (
            f'"trip": {number}, "from": "{before}", "to": "{here}", "leave": "{_clock(now)}", '
            f'"minutes": {minutes}, "arrive": "{_clock(now + minutes)}", "km": {km}, "driver": "{driver.next()}"'
        )
        now += minutes + (pause if rng.random() < 0.8 else rng.randint(3, 59))
        km = km + grow if rng.random() < 0.7 and km < 90 else rng.randint(10, 60)
        number, before = number + 1, here


def _readings(rng: random.Random) -> Iterator[str]:
    now, every, level = rng.randint(0, 600), rng.choice([4, 5, 7, 12, 15, 25]), rng.randint(60, 400)
    drift, number, who = (
        rng.choice([-7, -3, 2, 4, 6, 9]),
        rng.randint(1, 90),
        _Walk(rng, FIRST, (1, 2, 3, 5)),
    )
    total = (number - 1) * level
    while True:
        total += level
        yield (
            f'"n": {number}, "at": "{_clock(now)}", "level": {level / 10}, "sum": {total / 10:.1f}, '
            f'"mean": {total / 10 / number:.2f}, "by": "{who.next()}"'
        )
        now, number = now + every, number + 1
        drift = drift if rng.random() < 0.75 else rng.choice([-8, -5, -2, 1, 3, 5, 8])
        drift = abs(drift) if level < 40 else drift
        level += drift


_TABLES: dict[str, tuple[str, Callable[[random.Random], Iterator[str]]]] = {
    "orders": ("shop", _orders), "ledger": ("bank", _ledger), "people": ("club", _people),
    "stock": ("store", _stock), "trips": ("line", _trips), "readings": ("station", _readings),
}  # fmt: skip


def json_document(rng: random.Random) -> str:
    """Render a JSON object with a head and an array of records, one a line."""
    kind = rng.choice(["orders", "orders", *_TABLES])
    owner, make = _TABLES[kind]
    name = f"{rng.choice(LAST)} {rng.choice(['&', 'and', 'of'])} {rng.choice(LAST + CITIES)}"
    head = f'{{"{owner}": "{name}", "city": "{rng.choice(CITIES)}", "batch": {rng.randint(1, 9999)}, "{kind}": [\n'
    records, rows = make(rng), rng.randint(14, 40)
    return head + ",\n".join(f"  {{{next(records)}}}" for _ in range(rows)) + "\n]}\n"
