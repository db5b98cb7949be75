"""``--balance`` on the command line: what reaches the workers, what is refused, and what the user hears."""

from __future__ import annotations

import argparse

import pytest

from poseidon.errors import ConfigError
from poseidon.launch.balance import NOTHING, BalanceNews, balance_variables
from poseidon.launch.run import add_arguments


def _parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([*words, "train.py"])


def test_options_become_variables() -> None:
    assert balance_variables(_parse()) == {}
    assert balance_variables(_parse("--balance", "--balance-max", "64")) == {
        "POSEIDON_BALANCE": "1",
        "POSEIDON_BALANCE_MAX": "64",
    }
    assert balance_variables(_parse("--fixed-batch", "per-worker")) == {"POSEIDON_FIXED_BATCH": "per-worker"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--balance-max", "4"], "--balance-max needs --balance"),
        (["--balance", "--fixed-batch", "per-worker"], "choose one"),
        (["--balance", "--auto"], "--balance is for programs that use poseidon.data.ElasticSampler"),
        (["--fixed-batch", "total", "--as-caffe"], "--fixed-batch is for programs"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        balance_variables(_parse(*words))


def test_a_program_with_nothing_to_balance_is_told_once_and_early() -> None:
    news = BalanceNews(is_asked=True)
    assert [news.hear(0, {"step": step, "doing": "in forward"}) for step in range(6)] == ["", "", "", NOTHING, "", ""]
    assert news.end() == ""
    # One that reports no steps hears it at the end.
    assert BalanceNews(is_asked=True).end() == NOTHING
    assert BalanceNews(is_asked=False).end() == ""
    assert BalanceNews(is_asked=False).hear(0, {"step": 9}) == ""


def test_the_last_shares_are_told_at_the_end() -> None:
    news = BalanceNews(is_asked=True)
    news.hear(1, {"shares": [8, 8]})
    assert news.hear(1, {"step": 5}) == ""
    news.hear(1, {"shares": [11, 5]})
    assert news.end() == "shares of the batch at the end, by rank: 11 5"
