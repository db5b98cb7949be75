"""Lessons: the same data everywhere, no validation data among the training data, and something to learn."""

import pytest
import torch

from poseidon.errors import ConfigError
from poseidon.zoo import lessons
from poseidon.zoo.corpus import BLOCK, load_corpus, make_corpus
from poseidon.zoo.lessons import lesson_names, make_lesson

LESSON_OF = {"text": "text", "lenet": "digits", "dlrm": "clicks"}


@pytest.fixture(autouse=True)
def made_digits(monkeypatch):
    """Reading real digits takes seconds; these have a bright line at the height of their digit."""
    digits = torch.randint(10, (5000,), generator=torch.Generator().manual_seed(0))
    images = torch.zeros(5000, 1, 28, 28)
    images[torch.arange(5000), 0, 4 + 2 * digits] = 1.0
    monkeypatch.setattr(lessons, "load_digits", lambda: (images, digits))


@pytest.fixture(params=lesson_names())
def lesson(request):
    return make_lesson(request.param, 1, tiny=True)


def validate(lesson):
    with torch.no_grad():
        losses = [lesson.network.loss(lesson.network.model(*inputs), targets) for inputs, targets in lesson.validation]
    return sum(losses).item() / len(losses)


def test_a_batch_depends_on_seed_step_and_worker_alone(lesson):
    inputs, targets = lesson.training_batch(8, 3, 5, 1)
    again, _ = make_lesson(LESSON_OF[lesson.network.name], 7, tiny=True).training_batch(8, 3, 5, 1)
    assert all(torch.equal(one, other) for one, other in zip(inputs, again, strict=True))
    assert len(targets) == 8
    for other in ((4, 5, 1), (3, 6, 1), (3, 5, 2)):
        assert not torch.equal(inputs[0], lesson.training_batch(8, *other)[0][0])


def test_validation_batches_are_of_equal_size_and_enough_for_eight_workers(lesson):
    assert len({len(targets) for _, targets in lesson.validation}) == 1
    assert len(lesson.validation) >= 8


@pytest.mark.parametrize(("name", "steps"), [("text", 15), ("digits", 40), ("clicks", 60)])
def test_something_is_learned_that_holds_for_unseen_data(name, steps):
    lesson = make_lesson(name, tiny=True)
    before = validate(lesson)
    optimizer = lesson.make_optimizer(lesson.network.model)
    for step in range(steps):
        inputs, targets = lesson.training_batch(4 * lesson.batch, 0, step, 0)
        optimizer.zero_grad()
        lesson.network.loss(lesson.network.model(*inputs), targets).backward()
        optimizer.step()
    assert validate(lesson) < 0.97 * before


def test_weights_follow_from_the_seed():
    first, same, other = (make_lesson("text", seed, tiny=True).network.model for seed in (0, 0, 1))
    assert torch.equal(first.tokens.weight, same.tokens.weight)
    assert not torch.equal(first.tokens.weight, other.tokens.weight)


def test_the_corpus_is_the_same_every_time_and_its_parts_are_apart():
    corpus = load_corpus()
    assert corpus.digest == load_corpus.__wrapped__().digest
    assert len(corpus.training) > 300_000
    assert 0.05 < len(corpus.validation) / len(corpus.training) < 0.2
    blocks = [chr(ord("a") + place) * BLOCK for place in range(20)]
    made = make_corpus("".join(blocks))
    read = ["".join(made.characters[n] for n in part.unique().tolist()) for part in (made.validation, made.training)]
    assert read[0] == "jt"
    assert not set(read[0]) & set(read[1])
    assert made.digest != corpus.digest


def test_an_unknown_lesson_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="clicks, digits, text"):
        make_lesson("latin")
