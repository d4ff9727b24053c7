import json
import math
import random
from pathlib import Path

import pytest

from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.simulation.event_queue import EventQueue
from shoal.swarm.simulation.figures import figures_of
from shoal.swarm.simulation.links import LINK_SHARE, message_on_links, on_links
from shoal.swarm.simulation.result import Model, Result
from shoal.swarm.simulation.run import simulate
from shoal.swarm.simulation.traces import NAMED, Churn, Machine, Session, Trace, load_trace, trace_of

MODEL = Model(4_000_000, 100)


def run_file(tokens: int = 400_000, more: str = "") -> RunFile:
    return parse_run_file(f"""
[run]
name = "simulated"
[recipe]
name = "own"
[data]
source = "own"
[averaging]
group_size = 4
{more}
[round]
tokens = {tokens}
max_s = 3000
""")


def trace_with(*machines: Machine, relay_bps: float = 1e9) -> Trace:
    return Trace("test", lambda number, _: machines[number % len(machines)], relay_bps=relay_bps)


def machine(name: str = "m", **others: object) -> Machine:
    return Machine(**({"name": name, "tokens_per_s": 1000.0, "up_bps": 1e7, "down_bps": 1e7} | others))  # type: ignore[arg-type]


def simulated(trace: Trace, members: int, rounds: int = 4, run: RunFile | None = None, seed: int = 1) -> Result:
    return simulate(run or run_file(), MODEL, trace, members, seed, 1e6, rounds)


def test_a_round_of_equal_members_takes_what_can_be_computed_by_hand() -> None:
    result = simulated(trace_with(machine()), 4)
    figures = figures_of(result, 4_000_000)
    compute_s = 400_000 / 4000
    exchange_s = 2 * 3 / 4 * 4e6 * 8 / (1e7 * LINK_SHARE)  # int8: 2 (N - 1) / N of a byte an element
    assert [one.members for one in result.committed] == [4] * 4
    assert exchange_s < figures.exchange_s < 1.03 * exchange_s  # and the chunks' paths, headers and frames
    # Work ends with a whole step of each, and a closing is announced ahead.
    assert figures.round_s == pytest.approx(compute_s + exchange_s, rel=0.01)
    assert figures.hours_to_tokens == pytest.approx(10 * (compute_s + exchange_s) / 3600, rel=0.03)
    assert figures.spent["exchange"] == pytest.approx(exchange_s / (compute_s + exchange_s), rel=0.05)


def test_a_slow_uplink_owns_less_and_sets_the_pace_it_must() -> None:
    quick, slow = machine(), machine("slow", up_bps=1e6, down_bps=1e6)
    even, uneven = simulated(trace_with(quick), 4), simulated(trace_with(quick, quick, quick, slow), 4)
    # It has to send its contribution once, whoever owns parts: 4 MB at 1 Mbit/s.
    least_s = 4e6 * 8 / (1e6 * LINK_SHARE)
    assert figures_of(uneven, None).exchange_s == pytest.approx(least_s, rel=0.05)
    assert figures_of(even, None).exchange_s < least_s / 5


def test_bytes_sent_are_bytes_received_and_samples_are_not_lost() -> None:
    churn = machine(churn=Churn(there_s=600.0, away_s=60.0, shape=0.7, silent=0.5))
    for trace in (trace_with(machine()), trace_with(churn)):
        result = simulated(trace, 11, 5)
        samples = result.samples
        # Of a member that dies between the plan and its exchange nothing is counted, though others count it.
        assert result.member_sent_bytes == pytest.approx(result.member_received_bytes, rel=1e-3)
        assert samples.fresh == samples.committed + samples.held + samples.returned
        assert samples.leased >= samples.fresh
        assert result.tokens == sum(one.tokens for one in result.committed)
    assert samples.leased > samples.fresh  # what the dead had was leased again


def test_grids_move_the_bytes_of_flat_groups() -> None:
    grid = simulated(trace_with(machine()), 16, 2)
    flat = simulated(trace_with(machine()), 16, 2, run_file().model_copy(update={"averaging": _flat()}))
    assert grid.rounds[-1].rows == 4
    assert flat.rounds[-1].rows == 1
    assert grid.member_sent_bytes == pytest.approx(flat.member_sent_bytes, rel=0.01)


def _flat() -> object:
    return run_file().averaging.model_copy(update={"group_size": 32})


def test_the_same_seed_gives_the_same_result() -> None:
    trace = trace_of("volunteers")
    one, two, other = (figures_of(simulated(trace, 12, 2, seed=seed), None).as_dict() for seed in (3, 3, 4))
    assert one == two
    assert one != other


def test_work_of_a_silent_member_is_done_by_others() -> None:
    mortal = machine("mortal", sessions=(Session(0.0, 130.0, says_goodbye=False),))
    result = simulated(trace_with(machine(), machine(), machine(), mortal), 4)
    assert [one.members for one in result.committed] == [4, 3, 3, 3]
    assert [one.tokens for one in result.committed] == pytest.approx([400_000] * 4, rel=0.02)


def test_an_owner_that_dies_in_the_exchange_holds_it_up() -> None:
    usual = simulated(trace_with(machine()), 4, 1).rounds[0]
    mortal = machine("mortal", sessions=(Session(0.0, usual.planned_s + 1.0, says_goodbye=False),))
    result = simulated(trace_with(machine(), machine(), machine(), mortal), 4, 1)
    delay_s = result.rounds[0].ended_s - usual.ended_s
    assert result.rounds[0].committed
    assert 20.0 < delay_s < 120.0  # patience_s is 20


def test_overlap_hides_the_exchange() -> None:
    plain = figures_of(simulated(trace_with(machine()), 4, 5), None)
    hidden = figures_of(simulated(trace_with(machine()), 4, 5, run_file(more="overlap = true")), None)
    assert hidden.tokens_per_s > 1.03 * plain.tokens_per_s
    assert hidden.tokens_per_s == pytest.approx(4000, rel=0.03)


def test_members_that_nobody_can_dial_meet_over_relays() -> None:
    walled = machine(reachable=False)
    direct, one_open = simulated(trace_with(machine()), 4, 2), simulated(trace_with(machine(), walled, walled), 3, 2)
    relayed = simulated(trace_with(walled, relay_bps=1e7), 4, 2)
    assert direct.relayed_bytes == one_open.relayed_bytes == 0
    assert relayed.relayed_bytes == pytest.approx(sum(2 * 3 / 4 * 4e6 * 4 for _ in relayed.committed), rel=0.02)
    assert relayed.rounds[-1].exchange_s == pytest.approx(4 * direct.rounds[-1].exchange_s, rel=0.01)


def test_newcomers_wait_for_a_place() -> None:
    run = run_file(80_000).model_copy(
        update={"access": run_file().access.model_copy(update={"members_without_credit": 8})}
    )
    named = Trace("test", lambda number, _: machine(network=f"n{number}"))
    result = simulated(named, 20, 14, run)
    assert [one.members for one in result.rounds[:8]] == [8] * 8
    assert result.rounds[-1].members == 16
    assert result.refused_joins > 12


def test_ten_virtual_things_happen_in_order() -> None:
    queue, seen = EventQueue(), list[float]()
    for moment_s in (3.0, 1.0, 2.0):
        queue.at(moment_s, lambda moment_s=moment_s: seen.append(moment_s))  # type: ignore[misc]
    queue.run(lambda: False, 2.5)
    assert (seen, queue.now_s) == ([1.0, 2.0], 2.5)


def test_sessions_have_the_times_that_were_asked_for() -> None:
    churn, there_s, starts = Churn(100.0, 50.0, 0.6, 0.25), list[float](), 0
    silent = 0
    for number in range(400):
        sessions = churn.sessions(random.Random(number))
        first = next(sessions)
        starts += first.start_s == 0.0
        for one in [next(sessions) for _ in range(10)]:
            there_s.append(one.stop_s - one.start_s)
            silent += not one.says_goodbye
    assert sum(there_s) / len(there_s) == pytest.approx(100, rel=0.15)
    assert starts == pytest.approx(400 * 2 / 3, rel=0.1)
    assert silent == pytest.approx(1000, rel=0.15)
    assert next(Churn().sessions(random.Random(0))) == Session(0.0, math.inf)


# Files ------------------------------------------------------------------------------------------------------


def test_one_trace_in_three_forms(tmp_path: Path) -> None:
    row = {"name": "a", "tokens_per_s": 50.0, "up_mbit": 20.0}
    toml, jsons, csvs = tmp_path / "t.toml", tmp_path / "t.json", tmp_path / "t.csv"
    toml.write_text(
        '[[member]]\nname = "a"\ntokens_per_s = 50.0\nup_mbit = 20.0\n'
        'sessions = [{ start_s = 1, stop_s = 2 }, { start_s = 5, end = "silent" }]\n'
    )
    sessions = [{"start_s": 1, "stop_s": 2}, {"start_s": 5, "end": "silent"}]
    jsons.write_text(json.dumps({"member": [row | {"sessions": sessions}]}))
    csvs.write_text("name,tokens_per_s,up_mbit,start_s,stop_s,end\na,50,20,1,2,\na,50,20,5,,silent\n")
    machines = [load_trace(path).machines(1, 0) for path in (toml, jsons, csvs)]
    assert machines[0] == machines[1] == machines[2]
    assert machines[0][0].sessions == (Session(1.0, 2.0), Session(5.0, math.inf, False))
    assert [one.network for one in load_trace(toml).machines(3, 0)] == ["network 0", "network 1", "network 2"]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("t.toml", "[[member]]\nup_mbit = 1\n", "tokens_per_s and tflops"),
        ("t.toml", "[[member]]\ntokens_per_s = 5\n", "up_mbit: is missing"),
        ("t.toml", "[[member]]\ntokens_per_s = 5\nup_mbit = 1\nupp = 3", "upp"),
        ("t.toml", "[[member", "not a valid trace"),
        ("t.json", "[]", "t.json"),
        ("t.json", '{"member": [{"tokens_per_s": 1, "up_mbit": NaN}]}', "up_mbit"),
        ("t.csv", "name,up_mbit\na,1,2\n", "more cells"),
        ("t.csv", "name,tokens_per_s,up_mbit\na,1,2\na,1,3\n", "other values"),
        ("t.txt", "", ".toml, .json or .csv"),
        ("t.toml", "[[member]]\ntokens_per_s = 5\nup_mbit = 1\nsessions = [{ start_s = 5, stop_s = 1 }]", "stop_s"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said(tmp_path: Path, name: str, text: str, fault: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=fault):
        load_trace(path)


def test_traces_have_names() -> None:
    assert set(NAMED) == {"volunteers", "spot", "cluster"}
    with pytest.raises(UserError, match="volunteers, spot, cluster"):
        trace_of("weather")


def test_links_carry_headers_acknowledgements_and_messages_beside_the_payload() -> None:
    result = simulated(trace_with(machine()), 4, 3)
    assert on_links(1448.0, 2896.0) == 1448 + 52 + 52
    first, last = result.committed[0], result.committed[-1]
    payload, sent = 4 * 2 * 3 / 4 * 4e6 * 2, last.members_sent_bytes - first.members_sent_bytes
    # Messages are next to nothing; audits take 2 % of a round, and a tenth of one more until all makers were checked.
    assert 0 < sent - on_links(payload, payload) < 0.12 * payload
    assert message_on_links(1000.0) == 1000 + 42 + 52
    assert message_on_links(2000.0) == 2000 + 42 + 2 * 52
    assert first.members_sent_bytes < last.members_sent_bytes <= result.members_sent_bytes
    assert first.host_sent_bytes < last.host_sent_bytes <= result.host.sent_bytes
