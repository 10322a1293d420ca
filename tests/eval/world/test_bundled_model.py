"""The bundled model."""

import random
from typing import Any

import pytest

from eval.world.world import (
    World,
    linked_questions,
    order_questions,
    sample_conversation,
    words,
)
from sglang_chunkcache.bundled_model import model_dir

MAX_BYTES = 6_000_000  # of everything that git carries
# of 40 questions; the shipped weights reach 1.0 on 200, less a margin for other CPUs
MIN_ACCURACY = 0.95


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer as stock transformers loads it."""
    pytest.importorskip("torch")
    from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

    define_torchvision_ops()
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_dir())


def test_world_questions_are_answerable_from_gold_passages() -> None:
    world = World(3)
    assert {question.hop for question in world.questions} == {1, 2}
    for question in world.questions:
        sentences = question.answers[0].removesuffix(".").split(". ")
        assert len(sentences) == len(question.gold_passage_ids) == question.hop
        for sentence, passage_id in zip(sentences, question.gold_passage_ids, strict=True):
            words = sentence.split()
            assert words[2] == world.passage(passage_id).title
            assert f"{' '.join(words[2:])}." in world.passage(passage_id).text
        assert question.answers[0].endswith(f" {question.answers[1]}.")


def test_world_context_has_rivals_of_each_gold_kind() -> None:
    """With one entity of a kind in the context the kind alone would tell the answer."""
    world, rng = World(1), random.Random(0)
    for question in rng.sample(world.questions, 100):
        passages = world.context(question, 4, rng)
        titles = {passage.id: passage.text.split()[1] for passage in passages}
        assert len(titles) == 4
        for passage_id in question.gold_passage_ids:
            assert list(titles.values()).count(titles[passage_id]) >= 2


def test_world_context_refuses_too_many_passages() -> None:
    world = World(0, 6, 3)
    with pytest.raises(ValueError, match="is left"):
        world.context(world.questions[0], 7, random.Random(0))


def test_order_questions_name_the_passage_at_the_place() -> None:
    """They are the ones that notice keys cached for the wrong positions."""
    passages = World(0).passages[:3]
    first, last, after, _ = order_questions(passages)
    assert first.answers[1] == passages[0].title
    assert last.answers[1] == passages[2].title
    assert after.question == f"Which passage comes after {passages[0].title}?"
    assert after.answers[1] == passages[1].title


def test_world_links_add_one_sentence_and_change_nothing_else() -> None:
    plain, linked = World(5), World(5, links=True)
    assert linked.questions == plain.questions
    for before, after in zip(plain.passages, linked.passages, strict=True):
        told, more = before.text.split(". "), after.text.split(". ")
        assert len(more) == len(told) + 1
        assert after.text.startswith(told[0])
        assert {each.removesuffix(".") for each in told} < {each.removesuffix(".") for each in more}


def test_linked_questions_follow_the_order() -> None:
    """The same passages in another order tell other facts: this is what a cache can get wrong."""
    passages = World(0, links=True).linked_context(4, random.Random(0))
    named, value = passages[0].title, passages[1].text.split(" the ")[1].split(".")[0].split()[-1]
    kind = passages[0].text.split()[1]
    here = {question.question: question.answers for question in linked_questions(passages)}
    moved = {
        q.question: q.answers
        for q in linked_questions([passages[2], passages[1], passages[0], passages[3]])
    }
    asked = next(question for question in here if question.split()[4:6] == [kind, named])
    assert here[asked][1] == value
    assert moved[asked][1] != value
    assert here[asked][0].split()[2] == named


def test_linked_questions_skip_what_is_told_twice_or_about_nobody() -> None:
    first, second, _, fourth = World(0, links=True).linked_context(4, random.Random(0))
    kind = first.text.split()[1]

    def asked(*passages: Any) -> list[str]:
        return [q.question for q in linked_questions(passages) if q.question.split()[4] == kind]

    assert len(asked(first, second)) == 1
    assert asked(first, second, fourth) == []
    assert asked(second, first) == []


def test_conversation_shows_gold_passages_before_asking() -> None:
    for seed in range(50):
        turns = sample_conversation(random.Random(seed), 4, 6, share_linked=0.5)
        shown: set[str] = set()
        for turn in turns:
            shown.update(passage.id for passage in turn.passages)
            assert shown.issuperset(turn.question.gold_passage_ids)
        assert len({turn.question.question for turn in turns}) == len(turns)


@pytest.mark.parametrize(
    "text", [" two  spaces , it 's", "tabs\t\n\n\r\n", "Grüße, 漢字 🙂 <x> \x00", ""]
)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def test_tokenizer_words_are_single_tokens(tokenizer: Any) -> None:
    """A name cut in two would need another mechanism than the one the model has."""
    ids = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in words()]
    assert {len(each) for each in ids} == {1}


def test_chat_template_equals_the_pieces(tokenizer: Any) -> None:
    from eval.world.tokenizer import turn_pieces

    head, passages, tail = turn_pieces(["A.", "B."], "C?", opens=True, system="S")
    next_head, _, next_tail = turn_pieces([], "E?", opens=False)
    pieces = [head, *passages, tail, "D.<|end|>", next_head, next_tail]
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A.\n\nB.\n\nC?"},
        {"role": "assistant", "content": "D."},
        {"role": "user", "content": "E?"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "".join(pieces)
    assert text.endswith("E?<|end|>\n<|assistant|>\n")
    assert tokenizer.apply_chat_template(messages[:3], tokenize=False).endswith("D.<|end|>")
    assert tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize("kind", ["one hop", "linked"])
def test_model_answers_from_four_passages(kind: str) -> None:
    torch = pytest.importorskip("torch")

    from eval.world.evaluate import BundledModel

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads that wait for each other are slower than one
    asked = BundledModel(model_dir()).samples(kind, 4, 40, seed=1)
    torch.set_num_threads(threads)
    wrong = [one["wrong"] for one in asked if one["wrong"]]
    assert len(asked) == 40
    assert len(wrong) <= (1 - MIN_ACCURACY) * 40, wrong
