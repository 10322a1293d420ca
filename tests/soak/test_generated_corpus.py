"""The generated corpus: what a killed build is checked against to notice a lost passage."""

import json
from pathlib import Path

from tests.soak.generated_corpus import COPY_EVERY, TOPIC_WORDS, GeneratedCorpus

CORPUS = GeneratedCorpus(num_passages=1200, num_topics=10, num_words=40, seed=0)


def test_every_passage_has_its_own_marker_and_its_topics_words() -> None:
    """A marker in two passages would hide that one of them is lost;
    without topics, nothing could be found."""
    texts = list(CORPUS.texts())
    assert len({CORPUS.marker(n) for n in range(1200)}) == 1200
    assert all(
        text.endswith(f" {CORPUS.marker(n)}.") and len(text.split()) == 40
        for n, text in enumerate(texts)
    )
    words = [set(text.split()[:-1]) for text in texts]
    same = [n for n in range(1, 1200) if CORPUS.topic_of(n) == CORPUS.topic_of(0)]
    assert sum(len(words[0] & words[n]) for n in same) / len(same) > 20 * 20 / TOPIC_WORDS * 0.5


def test_passages_do_not_depend_on_how_many_are_asked_for() -> None:
    """A sample of a large corpus is checked against texts that are generated anew."""
    numbers = {0, 3, 999, 1000, 1199}
    sample = CORPUS.sample(numbers)
    texts = list(CORPUS.texts())
    assert sample == {n: texts[n] for n in numbers}
    assert list(GeneratedCorpus(1001, 10, 40, 0).texts()) == texts[:1001]


def test_a_written_corpus_has_copies(tmp_path: Path) -> None:
    """An index must keep a text once; without copies in the corpus a second one would go
    unnoticed."""
    assert CORPUS.write(tmp_path / "c.jsonl") == 1201
    rows = [json.loads(line) for line in (tmp_path / "c.jsonl").open()]
    assert rows[COPY_EVERY]["id"] == f"copy{COPY_EVERY - 1}"
    assert rows[COPY_EVERY]["text"] == rows[COPY_EVERY - 1]["text"]


def test_questions_are_of_their_topic() -> None:
    """Otherwise the share of hits on the topic means nothing."""
    texts = list(CORPUS.texts())
    for topic, question in CORPUS.questions(20):
        words = set(question.rstrip("?").split())
        on: list[int] = []
        off: list[int] = []
        for number, text in enumerate(texts):
            (on if CORPUS.topic_of(number) == topic else off).append(
                len(words & set(text.rstrip(".").split()))
            )
        assert sum(on) / len(on) > sum(off) / len(off)
