"""What ``--auto`` does around a TensorFlow 1 graph: feeds, fetches, datasets, random numbers, files, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from needs_tensorflow import MARKS, PRELOAD, QUIET

from ranks import run_ranks

pytestmark = MARKS


def run_parts(folder: str) -> Any:
    from tf1_parts import check_all

    return check_all(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two workers found, in one run for all tests."""
    return run_ranks(run_parts, 2, str(tmp_path_factory.mktemp("parts")), env=QUIET, timeout_s=600, preload=PRELOAD)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_graphs", ["MismatchError", "odd has shape [4, 1] on rank 0 and [4, 2] on rank 1"]),
        ("inside_strategy", ["UnsupportedError", "MirroredStrategy", "remove the strategy"]),
        ("sync_replicas", ["UnsupportedError", "SyncReplicasOptimizer", "run it without --auto"]),
        ("own_server", ["UnsupportedError", "tf.train.Server", "run it without --auto"]),
        ("eager_v1", ["UnsupportedError", "is not supported", "disable_eager_execution()"]),
        ("unknown_shape", ["UnsupportedError", "any has shape", "set its shape"]),
        (
            "other_choices",
            ["MismatchError", "is 1 on ranks [1] and 0 or unset on ranks [0]", "set it to the same value"],
        ),
        ("unknown_choice", ["ConfigError", "POSEIDON_SYNC_BATCHNORM is 'yes'", "expected 1"]),
    ],
)
def test_what_cannot_be_followed_is_refused_on_every_worker(
    case: str, words: list[str], results: list[dict[str, Any]]
) -> None:
    for result in results:
        message = result["refused"][case]
        assert all(word in message for word in words), message


def test_batches_of_a_fixed_length_stay_whole_and_it_says_so(results: list[dict[str, Any]]) -> None:
    for apart, start, _ in (result["fixed"] for result in results):
        assert apart < 1e-12
        assert start == results[0]["fixed"][1]
    assert "fed batches stay whole" in results[0]["fixed"][2]
    assert "write None for the batch" in results[0]["fixed"][2]


def test_fetched_rows_and_means_are_those_of_the_whole_batch(results: list[dict[str, Any]]) -> None:
    for (apart, rows, count), mean in (result["fetched"] for result in results):
        assert (apart < 1e-12, rows, count) == (True, 7, 7)
        assert abs(mean) < 1e-12


def test_gradients_of_unknown_origin_are_averaged_when_applied(results: list[dict[str, Any]]) -> None:
    assert all(result["by hand"] < 1e-12 for result in results)
    assert "did not come from tf.gradients" in results[0]["said"]


def test_gradients_travel_during_backward(results: list[dict[str, Any]]) -> None:
    assert all(result["overlap"] for result in results)


def test_learning_rates_are_multiplied_if_asked_for(results: list[dict[str, Any]]) -> None:
    assert [result["rate"] for result in results] == [2.0, 2.0]


def test_moving_averages_are_those_of_the_whole_batch_also_after_a_restore(results: list[dict[str, Any]]) -> None:
    for found, expected in (result["averages"] for result in results):
        assert found == results[0]["averages"][0]
        assert abs(found - expected) < 1e-12
    assert "averages.ckpt-3.index" in results[0]["files"]


def test_moments_are_of_each_workers_own_rows_unless_asked_for(results: list[dict[str, Any]]) -> None:
    assert all(abs(result["own moments"]) < 1e-12 for result in results)
    assert "POSEIDON_SYNC_BATCHNORM=1 takes them over all workers" in results[0]["said"]


def test_moments_of_a_dataset_are_those_of_all_workers(results: list[dict[str, Any]]) -> None:
    alone = results[0]["normalized"][1]
    for found, _ in (result["normalized"] for result in results):
        assert found == results[0]["normalized"][0]
        assert found == pytest.approx(alone, abs=1e-12)


def test_calls_wait_without_a_thread_of_tensorflow(results: list[dict[str, Any]]) -> None:
    assert all(result["calls"] == (True, "a call that fails") for result in results)


def test_sums_are_found_by_their_tags(results: list[dict[str, Any]]) -> None:
    assert all(result["sums"][0] == [3.0, 30.0] for result in results)


def test_sums_of_different_runs_are_refused_on_every_worker(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "MismatchError: rank 0 sent a test in its training run 7, rank 1 in its run 8" in result["sums"][1]


def test_no_run_follows_one_that_failed_after_it_had_made_calls(results: list[dict[str, Any]]) -> None:
    for without_calls, with_calls, _ in (result["failed runs"] for result in results):
        assert without_calls == "no error"
        assert with_calls.startswith("UnsupportedError: training run 2 ended by OutOfRangeError")
        assert "repeat()" in with_calls


def test_no_epoch_follows_one_that_ended_after_moments_were_exchanged(results: list[dict[str, Any]]) -> None:
    for *_, message in (result["failed runs"] for result in results):
        assert message.startswith("UnsupportedError: training run "), message
        assert "ended by OutOfRangeError while batch moments were on their way" in message


def test_noise_differs_between_workers_and_the_order_of_data_does_not(results: list[dict[str, Any]]) -> None:
    (noise, order), (other_noise, other_order) = (result["random"] for result in results)
    assert noise != other_noise
    assert order == other_order


def test_a_dataset_in_a_graph_is_dealt_out_with_every_sample_counted_once(results: list[dict[str, Any]]) -> None:
    *mine, (total,) = results[0]["graph dataset"]
    *theirs, (other_total,) = results[1]["graph dataset"]
    assert [len(part) for part in mine] == [len(part) for part in theirs] == [4, 4, 3]
    assert sorted(value for part in mine + theirs for value in part) == list(range(22))
    means = [sum(a + b) / len(a + b) for a, b in zip(mine, theirs, strict=True)]
    assert total == other_total == round(sum(means) * 1000)


def test_datasets_are_dealt_out_by_rows(results: list[dict[str, Any]]) -> None:
    deals = results[0]["deals"]
    first, second = deals["per-worker"]
    assert [x for x, _ in first] == [[0, 1, 2], [6, 7]]
    assert [x for x, _ in second] == [[3, 4, 5], [8, 9]]
    assert [y for _, y in second] == [[-3, -4, -5], [-8, -9]]
    assert deals["total"] == [[[0], [3], [6], [9]], [[1, 2], [4, 5], [7, 8], [9]]]
    assert deals["full"] == [[2], [[0, 1], [4, 5]]]


def test_what_has_no_rows_to_join_is_dealt_out_by_turns(results: list[dict[str, Any]]) -> None:
    deals = results[0]["deals"]
    assert deals["single"] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert [len(part) for part in deals["turns"]] == [2, 2]


def test_data_for_evaluation_stay_whole(results: list[dict[str, Any]]) -> None:
    deals = results[0]["deals"]
    assert deals["whole"] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]] * 2
    assert deals["test"] == [list(range(10))] * 2


@pytest.mark.parametrize("source", ["feeds", "dataset"])
def test_what_a_step_counts_is_what_one_worker_counts(source: str, results: list[dict[str, Any]]) -> None:
    for together, alone in (result["counted"] for result in results):
        assert together[source] == results[0]["counted"][0][source], "the workers differ"
        for name, values in alone[source].items():
            assert together[source][name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
    assert alone["feeds"]["seen"] == [22], "all rows"


def test_gradients_without_an_optimizer_are_averaged_or_refused(results: list[dict[str, Any]]) -> None:
    for found, restored, late, from_dataset, alone in (result["by gradients alone"] for result in results):
        assert found == pytest.approx(alone, abs=1e-12)
        assert restored == pytest.approx(alone, abs=1e-12)
        assert "assigned from what is fed" not in results[0]["said"], "a restore is no update"
        assert late.startswith("UnsupportedError: weights: the script updates it by hand")
        assert "apply_gradients" in late
        assert from_dataset.startswith("UnsupportedError: weights: a run assigns it from a dataset")
