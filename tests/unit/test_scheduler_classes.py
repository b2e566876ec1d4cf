from __future__ import annotations

from tests.support.paper import Desk, paper_request
from twostroke.types import Priority


def test_the_youngest_gives_way_when_pages_run_out_and_still_answers_the_same() -> None:
    desk = Desk(pages=9)  # eight pages; three sequences end with four each
    prompts = [[n, n + 1, n + 2, n + 3, n + 4] for n in (10, 30, 50)]
    numbers = [desk.submit(paper_request(prompt, max_tokens=11)) for prompt in prompts]
    desk.settle()
    for number, prompt in zip(numbers, prompts, strict=True):
        desk.expect(number, prompt, 11)
    oldest, _, youngest = (
        [index for index, step in enumerate(desk.chunks) if number in {chunk[0] for chunk in step}]
        for number in numbers
    )
    assert oldest == list(range(len(oldest)))  # it ran in every step until it was done
    assert youngest != list(range(youngest[0], youngest[-1] + 1))  # it had to pause


def test_a_higher_class_takes_the_place_of_a_strictly_lower_one_within_a_step() -> None:
    desk = Desk(max_running=2)
    low = [desk.submit(paper_request([n, n + 1], max_tokens=20, priority=Priority.BATCH)) for n in (10, 30)]
    desk.step()
    high = desk.submit(paper_request([5, 6], max_tokens=3, priority=Priority.INTERACTIVE))
    desk.step()
    assert desk.tokens(high)
    assert {chunk[0] for chunk in desk.chunks[1]} == {low[0], high}
    desk.settle()
    desk.expect(high, [5, 6], 3)
    desk.expect(low[0], [10, 11], 20)
    desk.expect(low[1], [30, 31], 20)


def test_an_equal_class_never_gives_way_to_a_newcomer() -> None:
    desk = Desk(max_running=1)
    desk.submit(paper_request([1, 2], max_tokens=5))
    desk.step()
    desk.submit(paper_request([3, 4], max_tokens=5))
    desk.settle()
    order = [chunk[0] for step in desk.chunks for chunk in step]
    assert order == sorted(order)


def test_a_preempted_sequence_is_readmitted_before_fresh_ones_of_its_class() -> None:
    desk = Desk(max_running=1)
    low = desk.submit(paper_request([1, 2], max_tokens=6))
    fresh = desk.submit(paper_request([3, 4], max_tokens=2))
    desk.step()
    desk.submit(paper_request([5, 6], max_tokens=2, priority=Priority.INTERACTIVE))
    desk.settle()
    order = [chunk[0] for step in desk.chunks for chunk in step]
    assert order[-2:] == [fresh, fresh]
    desk.expect(low, [1, 2], 6)


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    desk = Desk(pages=9, max_running=4)
    desk.submit(paper_request(list(range(10, 27)), max_tokens=4))
    desk.step()
    big = desk.submit(paper_request(list(range(40, 60)), max_tokens=2))
    small = desk.submit(paper_request([1], max_tokens=2))
    desk.settle()
    order = [chunk[0] for step in desk.chunks for chunk in step]
    assert order.index(big) < order.index(small)
