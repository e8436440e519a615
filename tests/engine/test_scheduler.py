"""The scheduler alone: pure bookkeeping, so every case is a few lines of numbers."""

from __future__ import annotations

from engine_helpers import wire_request

from trioleg.engine.kv_cache import BlockPool
from trioleg.engine.request import Request
from trioleg.engine.scheduler import Schedule, Scheduler
from trioleg.messages import EngineCoreEvent


def make(
    num_blocks: int = 100, *, max_num_seqs: int = 8, budget: int = 16, **settings: bool
) -> Scheduler:
    """A scheduler of small blocks; without a prefix cache, unless a case is about it."""
    pool = BlockPool(num_blocks, block_size=4)
    return Scheduler(
        pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **{"prefix_caching": False, **settings},
    )


def add(
    scheduler: Scheduler, request_id: str, prompt_tokens: int, *, priority: int = 0, token: int = 1
) -> Request:
    wire = wire_request(request_id, [token] * prompt_tokens, max_tokens=1000)
    wire.priority = priority
    request = Request.from_wire(wire, vocab_size=100)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step as an engine makes it. Returns (id, start, count) for each chunk."""
    schedule = scheduler.schedule()
    shown = [(c.request.request_id, c.start, c.count) for c in schedule.chunks]
    settle(schedule)
    return shown


def settle(schedule: Schedule) -> None:
    for chunk in schedule.chunks:
        samples = chunk.samples
        chunk.request.num_computed_tokens = chunk.end
        if samples:
            chunk.request.append(1, max_model_len=10_000)


def ids(requests: object) -> list[str]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


def test_a_long_prompt_is_cut_to_the_budget() -> None:
    scheduler = make(budget=10)
    add(scheduler, "a", 25)
    steps = [step(scheduler) for _ in range(4)]
    assert steps == [[("a", 0, 10)], [("a", 10, 10)], [("a", 20, 5)], [("a", 25, 1)]]


def test_decodes_go_first_and_prompts_take_what_is_left() -> None:
    scheduler = make(budget=10)
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    assert step(scheduler) == [("a", 0, 3), ("b", 0, 3)]
    add(scheduler, "c", 20)
    assert step(scheduler) == [("a", 3, 1), ("b", 3, 1), ("c", 0, 8)]
    assert step(scheduler) == [("a", 4, 1), ("b", 4, 1), ("c", 8, 8)]
    assert step(scheduler) == [("a", 5, 1), ("b", 5, 1), ("c", 16, 4)]
    assert step(scheduler) == [("a", 6, 1), ("b", 6, 1), ("c", 20, 1)]


def test_at_most_max_num_seqs_run_and_the_queue_is_first_come_first_served() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abcd":
        add(scheduler, name, 1)
    step(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting)) == (["a", "b"], ["c", "d"])
    scheduler.remove(["a"])
    step(scheduler)
    assert (ids(scheduler.running), ids(scheduler.waiting)) == (["b", "c"], ["d"])


def test_no_more_run_than_the_budget_can_serve_each_step() -> None:
    scheduler = make(max_num_seqs=8, budget=3)
    for name in "abcd":
        add(scheduler, name, 1)
    assert [len(step(scheduler)) for _ in range(3)] == [3, 3, 3]
    assert ids(scheduler.running) == ["a", "b", "c"]


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    scheduler = make(4)
    add(scheduler, "big", 16)
    step(scheduler)
    add(scheduler, "next", 12)
    add(scheduler, "small", 1)
    scheduler.remove(["big"])
    assert step(scheduler) == [("next", 0, 12)]
    assert ids(scheduler.waiting) == ["small"]


def test_blocks_come_as_tokens_need_them_and_return_at_once() -> None:
    scheduler = make(10)
    request = add(scheduler, "a", 4)
    assert scheduler.pool.num_free == 10
    step(scheduler)
    assert len(request.block_ids) == 1
    step(scheduler)
    assert len(request.block_ids) == 2
    assert scheduler.remove(["a", "unknown"]) == [request]
    assert scheduler.pool.num_free == 10
    assert scheduler.remove(["a"]) == []
    assert scheduler.requests == {}


def test_new_blocks_are_named_so_that_they_can_be_cleared() -> None:
    scheduler = make(10)
    request = add(scheduler, "a", 5)
    schedule = scheduler.schedule()
    assert schedule.new_blocks == request.block_ids
    settle(schedule)
    assert scheduler.schedule().new_blocks == []


def test_the_youngest_is_preempted_and_starts_anew_at_the_head() -> None:
    scheduler = make(5)
    add(scheduler, "old", 7)
    young = add(scheduler, "young", 3)
    add(scheduler, "queued", 1)
    step(scheduler)
    assert ids(scheduler.running) == ["old", "young"]
    step(scheduler)  # old's 8th token still fits, young's 4th too
    assert step(scheduler) == [("old", 8, 1), ("young", 4, 1)]  # each takes a block: none is left
    for _ in range(3):
        step(scheduler)
    assert step(scheduler) == [("old", 12, 1)]
    assert ids(scheduler.waiting) == ["young", "queued"]
    assert young.num_computed_tokens == 0
    assert young.block_ids == []
    scheduler.remove(["old"])
    assert step(scheduler)[0] == ("young", 0, young.num_prompt_tokens + 6)
    kinds = [event.type for event in young.take_events() or ()]
    assert kinds == [
        EngineCoreEvent.QUEUED,
        EngineCoreEvent.SCHEDULED,
        EngineCoreEvent.PREEMPTED,
        EngineCoreEvent.SCHEDULED,
    ]


def test_a_request_that_wants_more_than_everything_is_stuck_alone() -> None:
    scheduler = make(2)
    request = add(scheduler, "a", 7)
    add(scheduler, "b", 1)
    step(scheduler)
    step(scheduler)
    schedule = scheduler.schedule()
    assert schedule.stuck == [request]
    assert schedule.chunks == []
    scheduler.remove(["a"])
    assert step(scheduler) == [("b", 0, 1)]


def test_admission_leaves_a_spare_block_for_each_running_request() -> None:
    scheduler = make(4)
    add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "b", 12)  # 3 blocks are free; taking all would preempt b in the next step
    step(scheduler)
    assert ids(scheduler.waiting) == ["b"]


def test_the_smallest_priority_is_served_first() -> None:
    scheduler = make(max_num_seqs=1, by_priority=True)
    for name, priority in (("a", 5), ("b", -1), ("c", 5), ("d", 0)):
        add(scheduler, name, 1, priority=priority)
    order = []
    for _ in range(4):
        step(scheduler)
        order += ids(scheduler.running)
        scheduler.remove(order)
    assert order == ["b", "d", "a", "c"]


def test_without_that_policy_a_priority_changes_nothing() -> None:
    scheduler = make(max_num_seqs=2)
    for name, priority in (("a", 5), ("b", -1), ("c", -9)):
        add(scheduler, name, 1, priority=priority)
    step(scheduler)
    assert ids(scheduler.running) == ["a", "b"]


def test_the_least_urgent_is_preempted_however_old_it_is() -> None:
    scheduler = make(5, by_priority=True)
    add(scheduler, "old", 7, priority=9)
    add(scheduler, "urgent", 3, priority=1)
    for _ in range(7):
        step(scheduler)
    assert ids(scheduler.running) == ["urgent"]
    add(scheduler, "late", 1, priority=5)
    step(scheduler)
    assert ids(scheduler.waiting) == ["old"]
    assert ids(scheduler.running) == ["urgent", "late"]


def test_an_urgent_prompt_leaves_a_token_for_each_behind_it() -> None:
    scheduler = make(budget=10, by_priority=True)
    for name in "abc":
        add(scheduler, name, 1)
    step(scheduler)
    add(scheduler, "urgent", 30, priority=-1)
    assert step(scheduler) == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1), ("urgent", 0, 7)]
    assert step(scheduler) == [("urgent", 7, 7), ("a", 2, 1), ("b", 2, 1), ("c", 2, 1)]


def test_shared_blocks_need_no_room() -> None:
    scheduler = make(7, prefix_caching=True)
    add(scheduler, "a", 16)
    step(scheduler)
    # a takes its fifth block; of the 2 that are left b, with its 5, may have all but one.
    add(scheduler, "b", 17)
    assert step(scheduler) == [("a", 16, 1), ("b", 16, 1)]
    assert scheduler.pool.num_free == 1
    assert scheduler.requests["a"].block_ids[:4] == scheduler.requests["b"].block_ids[:4]


def test_kept_blocks_are_given_up_for_those_who_need_them() -> None:
    scheduler = make(4, prefix_caching=True)
    add(scheduler, "a", 16)
    step(scheduler)
    scheduler.remove(["a"])
    add(scheduler, "b", 16, token=2)
    assert step(scheduler) == [("b", 0, 16)]
    scheduler.remove(["b"])
    add(scheduler, "c", 16)
    assert step(scheduler) == [("c", 0, 16)], "a's blocks had been given up"


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = make(5, prefix_caching=True)
    add(scheduler, "old", 7)
    young = add(scheduler, "young", 4, token=2)
    for _ in range(6):
        step(scheduler)
    assert ids(scheduler.waiting) == ["young"]
    assert (young.num_tokens, young.block_ids) == (9, [])
    scheduler.remove(["old"])
    assert step(scheduler)[0] == ("young", 8, 1)
