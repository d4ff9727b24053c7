"""Terms as people write them, and the file that keeps them."""

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from shoal.peer.guest.terms import Hours, Power, Terms, TermsFile, parse_hours, parse_terms
from shoal.swarm.errors import TermsError

ZONE = timezone(timedelta(hours=1))


def at(clock: str, day: int = 26) -> datetime:
    hour, minute = clock.split(":")
    return datetime(2026, 11, day, int(hour), int(minute), tzinfo=ZONE)


def test_all_terms() -> None:
    terms = parse_terms(
        {
            "max_upload": "20Mbit",
            "max_download": "2.5MB/s",
            "monthly_data": "500G",
            "hours": "22-7",
            "power": "idle",
            "nice": "yes",
        }
    )
    assert terms == Terms(20e6, 20e6, 500 * 10**9, False, parse_hours("22-7"), Power.idle, True)
    assert parse_terms({}) == Terms()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("max_upload", text) for text in ("20", "20M", "Mbit", "0Mbit", "-1Mbit", "1kbit", "20Mbits", "9" * 20)),
        *(("monthly_data", text) for text in ("500", "G", "0G", "1k", "500Gbit")),
        *(("hours", text) for text in ("22", "22-", "25-7", "22-22", "22:60-7", "7-24:30", "a-b", ",", "1-2," * 20)),
        ("power", "mains"),
        ("nice", "19"),
        ("max_uplaod", "20Mbit"),
    ],
)
def test_what_cannot_be_understood_is_named(name: str, text: str) -> None:
    with pytest.raises(TermsError, match=name[:10] if name != "max_uplaod" else "no such term"):
        parse_terms({name: text})


@pytest.mark.parametrize(
    ("text", "open_at", "closed_at"),
    [
        ("22-7", ["22:00", "23:59", "0:00", "6:59"], ["7:00", "21:59", "12:00"]),
        ("9-17", ["9:00", "16:59"], ["8:59", "17:00", "0:00"]),
        ("22:30-7,12-13:15", ["22:30", "3:00", "12:00", "13:14"], ["22:29", "13:15", "7:00"]),
        ("18-24", ["18:00", "23:59"], ["0:00", "17:59"]),
        ("0-24", ["0:00", "12:00", "23:59"], []),
    ],
)
def test_hours(text: str, open_at: list[str], closed_at: list[str]) -> None:
    hours = parse_hours(text)
    assert [clock for clock in open_at if not hours.are_open(at(clock))] == []
    assert [clock for clock in closed_at if hours.are_open(at(clock))] == []


def test_the_next_opening() -> None:
    hours = parse_hours("22-7,12-13")
    assert hours.next_opening(at("8:00")) == at("12:00")
    assert hours.next_opening(at("13:00")) == at("22:00")
    assert parse_hours("9-17").next_opening(at("17:00", day=30)) == datetime(2026, 12, 1, 9, 0, tzinfo=ZONE)
    assert Hours().are_open(at("3:00"))


# The file -----------------------------------------------------------------------------------------------------


def test_terms_of_a_run_go_before_those_of_all_and_options_before_both(tmp_path: Path) -> None:
    path = tmp_path / "terms.toml"
    path.write_text(
        'max_upload = "20Mbit"\nhours = "22-7"\nmonthly_data = "500G"\n'
        '[runs.reef]\nmax_upload = "5Mbit"\nhours = "none"\nmonthly_data = "50G"\n'
    )
    kept = TermsFile.read(path)
    assert kept.terms_of("other", {}).max_upload_bps == 20e6
    assert kept.terms_of("other", {}).monthly_of_run is False
    reef = kept.terms_of("reef", {"power": "battery"})
    assert (reef.max_upload_bps, reef.hours, reef.power) == (5e6, Hours(), Power.battery)
    assert (reef.monthly_bytes, reef.monthly_of_run) == (50 * 10**9, True)
    assert kept.terms_of("reef", {"max_upload": "none"}).max_upload_bps == 0.0


def test_changes_are_kept_and_none_removes_a_term(tmp_path: Path) -> None:
    path = tmp_path / "home" / "terms.toml"
    kept = TermsFile.read(path).changed("", {"max_upload": "20Mbit", "nice": "yes"})
    kept = kept.changed("reef.2", {"max_upload": "none", "hours": "22-7"})
    kept.write(path)
    assert TermsFile.read(path) == kept
    assert path.stat().st_mode & 0o777 == 0o600
    assert kept.terms_of("reef.2", {}).max_upload_bps == 0.0
    assert kept.terms_of("", {}).max_upload_bps == 20e6
    less = kept.changed("reef.2", {"hours": "none"}).changed("", {"max_upload": "none"})
    assert less.all_runs == {"nice": "yes"}
    assert "hours" not in less.runs["reef.2"]
    with pytest.raises(TermsError):
        kept.changed("", {"hours": "never"})


@pytest.mark.parametrize(
    "text",
    [
        "max_upload = 20",
        'max_uplaod = "20Mbit"',
        "runs = 3",
        "[runs]\nreef = 3",
        '[runs.reef]\nhours = "x"',
        "\xff",
        "=",
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "terms.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TermsError, match=r"terms\.toml"):
        TermsFile.read(path)
