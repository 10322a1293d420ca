"""A generated world of companies, engineers and cities: corpus, questions and training
conversations from a seed.

Every entity has one passage of four facts, each fact one sentence `{name} {verb} {value}`:

    The company Dravex makes clocks. In 1987 Dravex hired Anna. Dravex serves Kelton. Later Dravex
    bought Solon.

A one-hop question asks for one fact, a two-hop question for a fact about the value of another one.
Answers repeat the facts' wording, so the name and the verb come right before the value wherever it
is read or written. Names are few and facts are drawn anew for every seed: nothing about an entity
can be known but from its passage.

Facts can be found at any place, so they say little about positions. `order_questions` asks for
those: which passage comes first, last, or after another one.

`World(..., links=True)` adds one sentence to each passage, anywhere but first, that can only be
understood from the text before the passage: "Later the company visited Kelton." The company is the
one that the last passage about a company is about, whichever that is. `linked_questions` asks for
those facts, given the order.

Standard library only; knows nothing of tokens, models or servers.
"""

import random
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

_NAMES = {
    "engineer": (
        """Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Nils Olga
        Peter Quinn Rosa Simon Tanja Ugo Vera Walter Xenia Yusuf Zelda Adam Berta Carl Diana
        Emil Frida Georg Hanna Ivan Julia Kurt Laura Max Nora Otto Paula Ralf Sara Theo
        Ursula Viktor Wanda Arno Bella Cyril Dora Erik Fiona Gustav Heidi Igor Jana Klaus
        Linda Milan Nadia Oscar Petra Rafael Sofia Tomas Ulrike Vito Wilma Yvonne Zeno"""
    ),
    "product": (
        """clocks lamps boats paint tiles ropes pumps bells chairs gloves soap bricks wheels
        mirrors tents kites drills ovens pens boots saws locks shelves carpets"""
    ),
    "instrument": (
        """piano violin flute harp drums guitar cello trumpet organ banjo oboe tuba lute viola
        clarinet bagpipes zither horn bassoon accordion mandolin fiddle harmonica sitar"""
    ),
    "crop": (
        """barley wheat rice maize oats hops beans peas onions carrots apples plums grapes
        lemons olives cotton tea coffee cocoa pepper garlic melons figs almonds"""
    ),
}
_STEMS = {
    "company": "Drav Sol Brin Tor Quar Vel Nim Hax Zor Lum Grel Pyl Fen Ost Kav Myr",
    "city": "Kel Ash Bram Dun Hol Lin Mar Nor Oak Pen Ros Stav Thorn Wick Yar Elm",
}
NAMES: dict[str, tuple[str, ...]] = {
    "company": tuple(
        stem + end for stem in _STEMS["company"].split() for end in ("ex", "on", "ix", "um")
    ),
    "city": tuple(
        stem + end for stem in _STEMS["city"].split() for end in ("ton", "ford", "burg", "ville")
    ),
    **{kind: tuple(names.split()) for kind, names in _NAMES.items()},
}
ENTITY_KINDS = ("company", "engineer", "city")


class Relation(NamedTuple):
    """How a fact is told (`verb`), asked for (`auxiliary` ...
    `base`) and pointed at (`participle` by ...)."""

    subject_kind: str
    verb: str
    object_kind: str
    auxiliary: str
    base: str
    participle: str

    def ask(self, subject: str) -> str:
        """The question for the value."""
        return f"Which {self.object_kind} {self.auxiliary} {subject} {self.base}?"


RELATIONS = (
    Relation("company", "makes", "product", "does", "make", "made"),
    Relation("company", "hired", "engineer", "did", "hire", "hired"),
    Relation("company", "serves", "city", "does", "serve", "served"),
    Relation("company", "bought", "company", "did", "buy", "bought"),
    Relation("engineer", "plays", "instrument", "does", "play", "played"),
    Relation("engineer", "joined", "company", "did", "join", "joined"),
    Relation("engineer", "visited", "city", "did", "visit", "visited"),
    Relation("engineer", "taught", "engineer", "did", "teach", "taught"),
    Relation("city", "grows", "crop", "does", "grow", "grown"),
    Relation("city", "elected", "engineer", "did", "elect", "elected"),
    Relation("city", "borders", "city", "does", "border", "bordered"),
    Relation("city", "hosts", "company", "does", "host", "hosted"),
)
LINKS = {
    relation.subject_kind: relation
    for relation in (
        Relation("company", "visited", "city", "did", "visit", "visited"),
        Relation("engineer", "bought", "company", "did", "buy", "bought"),
        Relation("city", "hired", "engineer", "did", "hire", "hired"),
    )
}
"""What is told without a name, by the kind of the one it is about: one relation a kind, so the verb
tells nothing more, and none that the kind has in its own passages."""
# Lower case: a passage begins with "The company", which is no link.
_LINK = re.compile(r"\bthe (company|engineer|city) \w+ (\w+)\.")
_OPENERS = {"did": ("Later", "Once", "At first"), "does": ("Today", "Still", "By now")}
_ORDER_WORDS = ("passage", "comes", "first", "last", "after", "is", "about")
_PLAIN_WORDS = ("In", "The", "Which", "the", "by", "did", "does")
_YEARS = tuple(range(1970, 1990))
# of the values that name an entity: drawn among the world's own, so that two-hop questions exist
_SHARE_INSIDE = 0.5


class Fact(NamedTuple):
    """`subject` and `value` are names, `relation` says how they belong together."""

    subject: str
    relation: Relation
    value: str

    @property
    def sentence(self) -> str:
        """The fact as an answer tells it."""
        return f"The {self.relation.subject_kind} {self.subject} {self.relation.verb} {self.value}."

    @property
    def question(self) -> str:
        """The question that names the subject."""
        return self.relation.ask(f"the {self.relation.subject_kind} {self.subject}")


class Passage(NamedTuple):
    """One entity and everything the world says about it."""

    id: str
    title: str
    text: str


class Question(NamedTuple):
    """`answers`: the whole answer the model is trained to give, then the bare value; either one is
    right.

    `hop` counts the facts needed: 1 or 2; 0 is a question about the passages' order and -1 one
    about a fact told without a name (`linked_questions`).
    """

    id: str
    question: str
    answers: tuple[str, ...]
    gold_passage_ids: tuple[str, ...]
    hop: int


class Turn(NamedTuple):
    """The passages that are new in this turn (perhaps none), the question and its answer."""

    passages: tuple[Passage, ...]
    question: Question


class World:
    """Entities, their facts and the questions about them; the same seed and size give the same
    world.

    Args:
        seed: any integer.
        num_passages: one per entity, 2 to 200; each kind that occurs occurs at least twice.
        num_kinds: how many kinds of entities occur, 1 to 3, at most `num_passages // 2`; with links
            at least 2.
        links: whether each passage also tells a fact about an entity of another kind without naming
            it; all else is as without them.
    """

    def __init__(
        self, seed: int, num_passages: int = 200, num_kinds: int = 3, *, links: bool = False
    ) -> None:
        self._rng = random.Random(seed)
        self._kind_of = self._draw_entities(num_passages, num_kinds)
        self._facts = {name: self._draw_facts(name, kind) for name, kind in self._kind_of.items()}
        self._id_of = {name: f"p{number:04d}" for number, name in enumerate(self._kind_of)}
        self.passages = [
            Passage(self._id_of[name], name, self._tell(name)) for name in self._kind_of
        ]
        if links:
            # A generator of their own, so that all else is as without links.
            self._rng = random.Random(f"links of {seed}")
            self.passages = [self._add_link(passage) for passage in self.passages]
        self._by_id = {passage.id: passage for passage in self.passages}

    @cached_property
    def questions(self) -> list[Question]:
        """Every one-hop and two-hop question this world can answer, one-hop first."""
        facts = list(chain.from_iterable(self._facts.values()))
        drafts = [(fact.question, (fact.sentence, fact.value), [fact.subject]) for fact in facts]
        # Products and names from outside are no entities here, so they have no facts to chain.
        for first, second in (
            (one, two) for one in facts for two in self._facts.get(one.value, ())
        ):
            link = first.relation
            subject = (
                f"the {link.object_kind} {link.participle} by the {link.subject_kind}"
                f" {first.subject}"
            )
            answers = f"{first.sentence} {second.sentence}", second.value
            drafts.append((second.relation.ask(subject), answers, [first.subject, first.value]))
        return [
            Question(
                f"q{number:05d}",
                asked,
                answers,
                tuple(self._id_of[name] for name in names),
                hop=len(names),
            )
            for number, (asked, answers, names) in enumerate(drafts)
        ]

    def passage(self, passage_id: str) -> Passage:
        """The passage of that id; KeyError if there is none."""
        return self._by_id[passage_id]

    def context(self, question: Question, num_passages: int, rng: random.Random) -> list[Passage]:
        """The gold passages and distractors of the same kinds, shuffled: the kind alone never tells
        the answer.

        Raises:
            ValueError: more passages asked for than there are of the kinds.
        """
        gold = [self.passage(passage_id) for passage_id in question.gold_passage_ids]
        chosen = list(gold)
        while len(chosen) < num_passages:
            # In turn, so that each gold passage gets as many rivals as the others.
            kind = self._kind_of[gold[len(chosen) % len(gold)].title]
            rivals = [
                p for p in self.passages if self._kind_of[p.title] == kind and p not in chosen
            ]
            if not rivals:
                raise ValueError(
                    f"no {kind} is left to be a distractor for {question.id} at {len(chosen)}"
                    " passages"
                )
            chosen.append(rng.choice(rivals))
        rng.shuffle(chosen)
        return chosen

    def linked_context(self, num_passages: int, rng: random.Random) -> list[Passage]:
        """Passages of two kinds in turn, so that each of the second kind tells a fact about the one
        right before it.

        The questions of `linked_questions` that passages of the second kind answer have
        `num_passages // 2 - 1` rivals with the same wording each. The world must have links.
        """
        # Sorted, since a set of strings has another order in every process.
        kind, other = rng.sample(sorted(set(self._kind_of.values())), 2)
        named = [passage for passage in self.passages if self._kind_of[passage.title] == kind]
        telling = [
            p
            for p in self.passages
            if self._kind_of[p.title] == other and (m := _LINK.search(p.text)) and m[1] == kind
        ]
        num_telling = num_passages // 2
        firsts, seconds = (
            rng.sample(named, num_passages - num_telling),
            rng.sample(telling, num_telling),
        )
        return [
            passage
            for pair in zip_longest(firsts, seconds)
            for passage in pair
            if passage is not None
        ]

    def _draw_entities(self, num_passages: int, num_kinds: int) -> dict[str, str]:
        kinds = self._rng.sample(ENTITY_KINDS, num_kinds)
        pools = {kind: self._rng.sample(NAMES[kind], len(NAMES[kind])) for kind in kinds}
        # Two of each kind first: with one alone its kind would tell the answer.
        drawn = [(pools[kind].pop(), kind) for kind in kinds for _ in range(2)]
        rest = [(name, kind) for kind in kinds for name in pools[kind]]
        drawn += self._rng.sample(rest, num_passages - len(drawn))
        self._rng.shuffle(drawn)
        return dict(drawn)

    def _draw_facts(self, name: str, kind: str) -> list[Fact]:
        facts = []
        for relation in RELATIONS:
            if relation.subject_kind == kind:
                kin = [other for other, its in self._kind_of.items() if its == relation.object_kind]
                inside = [other for other in kin if other != name]
                everywhere = [other for other in NAMES[relation.object_kind] if other != name]
                pool = inside if inside and self._rng.random() < _SHARE_INSIDE else everywhere
                facts.append(Fact(name, relation, self._rng.choice(pool)))
        self._rng.shuffle(facts)
        return facts

    def _tell(self, name: str) -> str:
        # The first sentence alone names the kind, where `linked_questions` looks for it.
        sentences = [self._facts[name][0].sentence]
        for fact in self._facts[name][1:]:
            openers = ("", *_OPENERS[fact.relation.auxiliary])
            opener = self._rng.choice(openers)
            if fact.relation.auxiliary == "did" and self._rng.random() < 0.5:
                opener = f"In {self._rng.choice(_YEARS)}"
            sentences.append(f"{opener} {name} {fact.relation.verb} {fact.value}.".strip())
        return " ".join(sentences)

    def _add_link(self, passage: Passage) -> Passage:
        """One more sentence, anywhere but first, about the last `kind` before,
        which no passage knows the name of."""
        kind = self._rng.choice(
            sorted(set(self._kind_of.values()) - {self._kind_of[passage.title]})
        )
        relation = LINKS[kind]
        value = self._rng.choice(NAMES[relation.object_kind])
        # Never without an opener: it would begin with "The company", as a passage does.
        opener = self._rng.choice((*_OPENERS[relation.auxiliary], f"In {self._rng.choice(_YEARS)}"))
        sentences = passage.text.split(". ")
        sentences.insert(
            self._rng.randint(1, len(sentences)), f"{opener} the {kind} {relation.verb} {value}"
        )
        # The split has left the last sentence its full stop.
        text = ". ".join(sentence.removesuffix(".") for sentence in sentences) + "."
        return passage._replace(text=text)


def order_questions(passages: Sequence[Passage]) -> list[Question]:
    """What can be asked about these passages' order, in which they must be shown:
    first, last, and after each one."""
    drafts = [("first", passages[0]), ("last", passages[-1])]
    drafts += [(f"after {before.title}", after) for before, after in pairwise(passages)]
    questions = []
    for number, (place, passage) in enumerate(drafts):
        wording = f"passage {place}" if place.startswith("after") else f"{place} passage"
        answers = (f"The {wording} is about {passage.title}.", passage.title)
        gold = tuple(each.id for each in passages)
        questions.append(
            Question(f"o{number:05d}", f"Which passage comes {place}?", answers, gold, hop=0)
        )
    return questions


def linked_questions(passages: Sequence[Passage]) -> list[Question]:
    """What can be asked about facts told without a name, with these passages shown in this order.

    "The company" is the one of the last passage before that is about a company. Where two passages
    tell such a fact about the same one, nothing is asked about it.
    """
    told: dict[str, list[tuple[Fact, tuple[str, ...]]]] = {}
    last: dict[str, Passage] = {}
    for passage in passages:
        match = _LINK.search(passage.text)
        # Before the first passage of the kind nobody can know who is meant.
        if match and match[1] in last:
            about = last[match[1]]
            fact = Fact(about.title, LINKS[match[1]], match[2])
            told.setdefault(about.title, []).append((fact, (about.id, passage.id)))
        last[passage.text.split()[1]] = passage
    questions = []
    for number, (fact, gold) in enumerate(facts[0] for facts in told.values() if len(facts) == 1):
        questions.append(
            Question(f"l{number:05d}", fact.question, (fact.sentence, fact.value), gold, hop=-1)
        )
    return questions


def sample_conversation(
    rng: random.Random, num_passages: int, num_turns: int, *, share_linked: float = 0.0
) -> list[Turn]:
    """A conversation over a small world of its own: passages in any order, some held back for a
    later turn.

    A question is only asked once all its gold passages have been shown, and none twice. In
    `share_linked` of the conversations the passages have links: they are all shown at once, and
    most turns ask about those while they can.
    """
    # Links need two kinds, and each kind has two passages at least.
    if num_passages >= 4 and rng.random() < share_linked:
        return _sample_linked_conversation(rng, num_passages, num_turns)
    num_kinds = rng.randint(1, min(len(ENTITY_KINDS), num_passages // 2))
    # Below 2^48: evaluations whose seeds have the bit `1 << 60` draw none of these worlds.
    world = World(rng.getrandbits(48), num_passages, num_kinds)
    passages = rng.sample(world.passages, num_passages)
    later_turn = (
        rng.randint(1, num_turns - 1)
        if num_turns > 1 and num_passages > 2 and rng.random() < 0.25
        else None
    )
    num_first = num_passages if later_turn is None else rng.randint(2, num_passages - 1)
    shown: list[Passage] = []
    open_questions = rng.sample(world.questions, len(world.questions))
    turns: list[Turn] = []
    for number in range(num_turns):
        new = (
            passages[:num_first]
            if number == 0
            else passages[num_first:]
            if number == later_turn
            else []
        )
        shown += new
        # Without order questions (0) the model does not notice wrong positions; with 40% of them it
        # notices forgotten relocation less (bundled_model/README.md).
        hop = rng.choice((0, 1, 1, 2))
        question = (
            _pop_answerable(open_questions, {passage.id for passage in shown}, hop) if hop else None
        )
        if question is None:
            asked = {turn.question.question for turn in turns}
            unasked = [each for each in order_questions(shown) if each.question not in asked]
            if not unasked:
                break
            question = rng.choice(unasked)
        turns.append(Turn(tuple(new), question))
    return turns


def _sample_linked_conversation(
    rng: random.Random, num_passages: int, num_turns: int
) -> list[Turn]:
    num_kinds = rng.randint(2, min(len(ENTITY_KINDS), num_passages // 2))
    world = World(rng.getrandbits(48), num_passages, num_kinds, links=True)
    # In many orders a link comes before all passages of its kind and cannot be asked about.
    orders = [rng.sample(world.passages, num_passages) for _ in range(3)]
    passages = max(orders, key=lambda order: len(linked_questions(order)))
    linked = linked_questions(passages)
    others = rng.sample(world.questions, len(world.questions))
    rng.shuffle(linked)
    turns: list[Turn] = []
    for _ in range(num_turns):
        draw = rng.random()
        if linked and draw < 0.6:
            question = linked.pop()
        elif draw < 0.7:
            # First and last: what comes after another was not learned (bundled_model/README.md).
            question = rng.choice(order_questions(passages)[:2])
        else:
            question = (
                _pop_answerable(others, {p.id for p in passages}, rng.choice((1, 1, 2)))
                or others.pop()
            )
        if question.question not in {turn.question.question for turn in turns}:
            turns.append(Turn(tuple(passages) if not turns else (), question))
    return turns


def sample_fact_list(rng: random.Random, num_facts: int) -> list[str]:
    """Sentences about few relations of entities of one kind, then the same ones in another order:
    teaches recall.

    The name and the verb before a value in the second half come before it in the first one, too.
    Neither name nor verb alone tells the value.
    """
    kind = rng.choice(ENTITY_KINDS)
    num_relations = rng.choice((1, 2, 2, 4))
    relations = rng.sample(
        [relation for relation in RELATIONS if relation.subject_kind == kind], num_relations
    )
    names = rng.sample(NAMES[kind], max(num_facts * 2 // num_relations, num_relations))
    pairs = rng.sample([(name, relation) for name in names for relation in relations], num_facts)
    told = [
        f"{name} {relation.verb} {rng.choice(NAMES[relation.object_kind])}."
        for name, relation in pairs
    ]
    return told + rng.sample(told, num_facts)


def _pop_answerable(questions: list[Question], shown: set[str], hop: int) -> Question | None:
    answerable = [question for question in questions if shown.issuperset(question.gold_passage_ids)]
    chosen = next(
        (question for question in answerable if question.hop == hop),
        answerable[0] if answerable else None,
    )
    if chosen is not None:
        questions.remove(chosen)
    return chosen


def words() -> Sequence[str]:
    """Every word the world can use, for the tokenizer: each gets a token of its own."""
    forms = {
        form
        for relation in RELATIONS
        for form in (relation.verb, relation.base, relation.participle)
    }
    names = {name for pool in NAMES.values() for name in pool}
    openers = {word for pool in _OPENERS.values() for opener in pool for word in opener.split()}
    years = {str(year) for year in _YEARS}
    # Sorted: the tokenizer trained on them must be the same every time.
    return sorted(
        forms | names | openers | years | set(NAMES) | set(_ORDER_WORDS) | set(_PLAIN_WORDS)
    )
