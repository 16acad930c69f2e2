"""The virtual times of principals: weights, late comers, debts, and the principals that are forgotten."""

from tk.infer.engine.schedule.waiting.fair_share import FairShare


def test_a_token_costs_less_with_a_higher_weight() -> None:
    shares = FairShare()
    shares.enter("a", 1.0)
    shares.enter("b", 3.0)
    shares.charge("a", 30)
    shares.charge("b", 30)
    assert (shares.time("a"), shares.time("b")) == (30, 10)


def test_idleness_earns_no_credit() -> None:
    shares = FairShare()
    shares.enter("busy", 1.0)
    shares.charge("busy", 1000)
    shares.enter("late", 1.0)
    assert shares.time("late") == 1000


def test_a_debt_is_not_forgotten_by_leaving_for_a_moment() -> None:
    shares = FairShare()
    for name in "ab":
        shares.enter(name, 1.0)
    shares.charge("a", 1000)
    shares.charge("b", 10)
    shares.leave("a")
    shares.enter("a", 1.0)
    assert shares.time("a") == 1000
    assert shares.num_live() == {"a": 1, "b": 1}


def test_principals_that_never_return_take_no_memory() -> None:
    shares = FairShare()
    for number in range(1000):
        shares.enter(str(number), 1.0)
        shares.charge(str(number), 5)
        shares.leave(str(number))
    shares.enter("last", 1.0)
    assert len(shares._accounts) == 1


def test_newcomers_without_end_come_behind_a_debt_at_some_time() -> None:
    shares = FairShare()
    shares.enter("patient", 1.0)
    shares.enter("0", 1.0)
    shares.charge("patient", 100)
    for number in range(1, 1000):
        shares.enter(str(number), 1.0)
        shares.charge(str(number - 1), 5)
        shares.leave(str(number - 1))
        if shares.time(str(number)) > shares.time("patient"):
            return
    raise AssertionError("every newcomer is served before the patient one")


def test_what_others_leave_is_not_owed_to_them() -> None:
    shares = FairShare()
    for name in ("greedy", "few", "fewer"):
        shares.enter(name, 1.0)
    for _ in range(100):
        for name, tokens in (("greedy", 8), ("few", 2), ("fewer", 1)):
            shares.charge(name, tokens)
            if name != "greedy":
                shares.settle(name)
    assert shares.time("greedy") - shares.time("few") < 3 * 8


def test_a_debt_to_one_that_leaves_is_void_for_newcomers() -> None:
    shares = FairShare()
    for name in ("greedy", "deprived"):
        shares.enter(name, 1.0)
    shares.charge("greedy", 1000)
    shares.enter("third", 1.0)
    assert shares.time("third") == 500
    shares.leave("third")
    shares.leave("deprived")
    shares.enter("last", 1.0)
    assert shares.time("last") == shares.time("greedy") == 1000


def test_one_that_asks_for_more_keeps_what_it_is_owed() -> None:
    shares = FairShare()
    for name in "ab":
        shares.enter(name, 1.0)
    shares.charge("a", 1000)
    for _ in range(3):
        shares.enter("b", 1.0)
    shares.enter("late", 1.0)
    assert (shares.time("a"), shares.time("b"), shares.time("late")) == (1000, 0, 500)


def test_the_newest_weight_holds() -> None:
    shares = FairShare()
    for weight in (1.0, 4.0):
        shares.enter("a", weight)
    shares.enter("b", 1.0)
    shares.charge("a", 100)
    assert shares.time("a") == 25
    assert shares.part("b", 1.0) == 1 / 5
