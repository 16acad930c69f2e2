"""The virtual times of principals: weights, late comers, debts, and the principals that are forgotten."""

from tk.infer.scheduling.waiting.fair_share import FairShare


def test_a_token_costs_less_with_a_higher_weight() -> None:
    shares = FairShare()
    shares.enter("a", 1.0)
    shares.enter("b", 3.0)
    shares.charge("a", 1.0, 30)
    shares.charge("b", 3.0, 30)
    assert (shares.time("a"), shares.time("b")) == (30, 10)


def test_idleness_earns_no_credit() -> None:
    shares = FairShare()
    shares.enter("busy", 1.0)
    shares.charge("busy", 1.0, 1000)
    shares.enter("late", 1.0)
    assert shares.time("late") == 1000


def test_a_debt_is_not_forgotten_by_leaving_for_a_moment() -> None:
    shares = FairShare()
    for name in "ab":
        shares.enter(name, 1.0)
    shares.charge("a", 1.0, 1000)
    shares.charge("b", 1.0, 10)
    shares.leave("a")
    shares.enter("a", 1.0)
    assert shares.time("a") == 1000
    assert shares.num_live() == {"a": 1, "b": 1}


def test_principals_that_never_return_take_no_memory() -> None:
    shares = FairShare()
    for number in range(1000):
        shares.enter(str(number), 1.0)
        shares.charge(str(number), 1.0, 5)
        shares.leave(str(number))
    shares.enter("last", 1.0)
    assert len(shares._accounts) == 1


def test_newcomers_without_end_come_behind_a_debt_at_some_time() -> None:
    shares = FairShare()
    shares.enter("patient", 1.0)
    shares.enter("0", 1.0)
    shares.charge("patient", 1.0, 100)
    for number in range(1, 1000):
        shares.enter(str(number), 1.0)
        shares.charge(str(number - 1), 1.0, 5)
        shares.leave(str(number - 1))
        if shares.time(str(number)) > shares.time("patient"):
            return
    raise AssertionError("every newcomer is served before the patient one")
