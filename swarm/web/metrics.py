"""Metrics of a run, of a peer and of their processes for Prometheus: names, units, labels, and the text of a scrape.

``METRICS`` is all that there is; docs/metrics.md is made from it. Names follow the conventions of Prometheus: base
units, ``_total`` for what only grows. Nothing is counted here: a scrape asks the run, and its answer is put into the
names of this table, in a registry of that scrape's own."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, NamedTuple

import psutil

from shoal.swarm.web.documents import without_addresses

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

NAMED_MEMBERS = 64
"""Members with labels of their own; those of a larger run are summed as ``REST``."""
REST = "other"

_LONGEST_LABEL = 64


@dataclass(frozen=True)
class Metric:
    """A metric as queries name it. ``kind``: a counter only grows while its process runs; ``labels`` come after
    ``run``, which all metrics have but those of the process."""

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...] = ()
    of_process: bool = False

    @property
    def all_labels(self) -> tuple[str, ...]:
        return self.labels if self.of_process else ("run", *self.labels)


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", meaning, labels)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", meaning, labels)


RUN_METRICS = (
    _gauge("shoal_up", "1 where the run has answered this scrape; 0 without any other metric of it where not"),
    _gauge("shoal_answer_seconds", "time in which the run's event loop has begun to answer this scrape"),
    _gauge("shoal_run_info", "1; the run's hash and its algorithm", "run_hash", "algorithm"),
    _gauge(
        "shoal_run_phase", "1 for the phase of the open round: waiting, training, closing, averaging, ended", "phase"
    ),
    _gauge("shoal_run_waits", "1 while the run waits for something, as its status says"),
    _gauge("shoal_round", "number of the open round"),
    _counter("shoal_rounds_total", "rounds that ended committed or aborted, and committed ones undone later", "result"),
    _gauge(
        "shoal_last_commit_timestamp_seconds", "when a round was committed last, in Unix time; absent before the first"
    ),
    _gauge("shoal_round_seconds", "how long the newest committed round took"),
    _gauge("shoal_round_part_seconds", "parts of the newest round's time: work, gathering, exchange", "part"),
    _gauge("shoal_round_phase_seconds", "mean time of its members by phase, by their own word", "phase"),
    _gauge(
        "shoal_round_late_seconds", "how much longer than usual its slowest member took; the cause, as seen", "cause"
    ),
    _gauge("shoal_utilisation_ratio", "share of the members' time in compute over the last rounds, by their own word"),
    _gauge("shoal_goodput_ratio", "share of the trained tokens that are in committed rounds"),
    _gauge("shoal_round_max_seconds", "the run file's round.max_s: a round takes no more work after it"),
    _gauge("shoal_round_tokens", "tokens of the newest committed round"),
    _gauge("shoal_round_members", "members of the newest committed round"),
    _gauge("shoal_round_sent_bytes", "bytes that members have sent in the newest committed round, by their own word"),
    _gauge("shoal_round_void_parts", "parts of the newest committed round that could not be averaged"),
    _counter("shoal_trained_tokens_total", "tokens of all rounds that were ever committed"),
    _counter("shoal_undone_tokens_total", "those of them in rounds that were undone"),
    _gauge("shoal_committed_tokens", "tokens in the model: trained ones without those undone"),
    _gauge("shoal_target_tokens", "committed tokens at which the run ends; absent if it does not end there"),
    _gauge("shoal_open_round_tokens", "tokens trained in the open round"),
    _gauge("shoal_tokens_per_second", "speed of all members together, by their own word"),
    _gauge("shoal_loss", "mean training loss of the newest committed round, in nats"),
    _gauge("shoal_loss_warning", "1 while losses are far above the usual ones, rise, or are no numbers"),
    _gauge("shoal_held_out_loss", "newest held-out loss of validators that do not disagree, in nats a token"),
    _gauge("shoal_held_out_accuracy_ratio", "share of held-out tokens that the model finds likeliest, at that version"),
    _gauge("shoal_held_out_version", "that version of the model"),
    _gauge("shoal_held_out_validators", "validators behind that loss; 0 where the newest version is disputed"),
    _gauge("shoal_anchor_version", "version of the model's parameters"),
    _gauge("shoal_state_agreed", "1 where members agree on the newest version's digest; in a pipeline in all stages"),
    _gauge("shoal_state_disputed", "1 where all who decide on that digest have spoken, and no digest is clear"),
    _gauge("shoal_epoch", "newest epoch that samples are taken from"),
    _gauge("shoal_epoch_committed_ratio", "share of its samples that are committed"),
    _gauge(
        "shoal_members", "members by state: synced, catching_up, cannot_take_part; gone: known, and not here", "state"
    ),
    _gauge("shoal_members_reached", "live members by how others reach them: dialed, relayed, not_at_all", "way"),
    _gauge("shoal_member_info", "1; a member's name and device, in its own words", "peer", "name", "device"),
    _gauge("shoal_member_up", "1 while the member is here", "peer"),
    _gauge("shoal_member_share_ratio", "share of the member in all committed tokens", "peer"),
    _gauge("shoal_member_round_share_ratio", "share of its weight in the newest committed round, 0 without", "peer"),
    _gauge("shoal_member_credit_ratio", "share of its credit in that of all that are here", "peer"),
    _gauge("shoal_member_tokens_per_second", "its speed, by its own word", "peer"),
    _counter("shoal_member_sent_bytes_total", "bytes that its process has sent, by its own word", "peer"),
    _counter("shoal_member_received_bytes_total", "bytes that it has received", "peer"),
    _gauge("shoal_member_phase_seconds", "its time in the round by phase, by its own word", "peer", "phase"),
    _gauge("shoal_member_cost", "what its time has cost, by its own word or the run file's prices", "peer", "currency"),
    _gauge("shoal_member_present_seconds", "time that it was here", "peer"),
    _gauge("shoal_member_power_watts", "power of its GPU, by its own word; absent where nothing measures it", "peer"),
    _counter("shoal_member_energy_joules_total", "energy that its GPU took while it was here, by its own word", "peer"),
    _gauge("shoal_member_gpu_busy_ratio", "busy share of its GPU, by its own word", "peer"),
    _gauge("shoal_device_seconds", "time of all devices of members whose time counts"),
    _gauge("shoal_unpriced_device_seconds", "time of those devices without a price"),
    _gauge("shoal_cost", "cost of the run, as members say", "currency"),
    _gauge("shoal_round_cost", "cost of the newest round that has ended", "currency"),
    _gauge("shoal_million_tokens_cost", "cost of a million committed tokens", "currency"),
    _gauge("shoal_provider_cost", "cost of the same time at the run file's prices", "currency", "provider"),
    _gauge("shoal_energy_joules", "energy of the run, of members whose GPUs are measured, as they say"),
    _gauge("shoal_round_energy_joules", "energy of the newest round that has ended"),
    _gauge("shoal_token_energy_joules", "energy for each committed token"),
    _gauge("shoal_stage_replicas", "members that hold the newest state of a pipeline's stage", "stage"),
    _gauge("shoal_stage_queued_samples", "samples claimed in a stage and not done yet", "stage"),
    _gauge("shoal_stage_tokens_per_second", "speed of a stage", "stage"),
    _counter("shoal_relay_carried_bytes_total", "bytes that a relay has passed on; the host's, or a member's", "relay"),
    _gauge("shoal_relay_links", "connections over a relay", "relay"),
    _gauge("shoal_relay_busy_ratio", "share of what a relay may carry", "relay"),
    _gauge("shoal_relay_up", "1 where a relay has told what it carries", "relay"),
    _gauge("shoal_banned_peers", "identities that may not join, as the host or evidence has banned them"),
    _counter("shoal_refused_joins_total", "joins that were refused since the host was started, by reason", "reason"),
)
HOST_METRICS = (
    _counter("shoal_journal_writes_total", "transactions written to the journal since the host was started"),
    _counter("shoal_journal_write_seconds_total", "time until they were on the disk, and in the backup"),
    _gauge(
        "shoal_backup_behind_seconds", "how long the backup has not been complete; 0 while it is; absent without one"
    ),
    _gauge("shoal_disk_free_bytes", "free space where files are: host, backup or peer", "files"),
)
PEER_METRICS = (
    _gauge("shoal_peer_info", "1; the peer's id and device", "peer", "device"),
    _gauge("shoal_peer_activity", "1 for what the peer does at the moment", "activity"),
    _gauge("shoal_peer_coordinator_away", "1 while the coordinator does not answer"),
    _gauge("shoal_peer_round", "number of the open round, as this peer knows it"),
    _gauge("shoal_peer_anchor_version", "version of the run's parameters, as this peer knows it"),
    _gauge("shoal_peer_members", "members of the run, as this peer knows it"),
    _gauge("shoal_peer_tokens_per_second", "speed of this peer"),
    _gauge("shoal_peer_open_round_tokens", "tokens that it has trained in the open round"),
    _gauge("shoal_peer_loss", "its recent training loss, or that of the newest committed round, in nats"),
    _gauge("shoal_peer_phase_seconds", "time since the last round ended that its training spent in a phase", "phase"),
    _gauge("shoal_peer_round_share_ratio", "share of its weight in the newest committed round that it knows"),
    _counter("shoal_peer_sent_bytes_total", "bytes that this process has sent to other members"),
    _counter("shoal_peer_received_bytes_total", "bytes that it has received from them"),
    _gauge("shoal_peer_compression_ratio", "float32 bytes of a contribution by its bytes as sent"),
    _gauge("shoal_peer_link_bytes_per_second", "speed of its link, as measured"),
    _gauge("shoal_peer_paths", "connections with other members: direct, reversed, punched or relayed", "kind"),
    _gauge("shoal_peer_device_allocated_bytes", "memory that tensors take on its device; absent on a CPU"),
    _gauge("shoal_peer_power_watts", "power of its GPU; absent where NVML does not tell it"),
    _counter("shoal_peer_energy_joules_total", "energy that its GPU took since the process began to measure"),
    _gauge("shoal_peer_gpu_busy_ratio", "busy share of its GPU"),
    _gauge("shoal_peer_checkpoints", "checkpoints that are kept here"),
    _gauge("shoal_peer_checkpoint_round", "round of the newest of them"),
    _gauge("shoal_peer_checkpoint_timestamp_seconds", "when it was written, in Unix time"),
)
PROCESS_METRICS = (
    Metric("shoal_build_info", "gauge", "1; version of Shoal and of Python", ("version", "python"), of_process=True),
    Metric("process_cpu_seconds_total", "counter", "CPU time of the process, in user and kernel mode", of_process=True),
    Metric("process_resident_memory_bytes", "gauge", "memory of the process that is not swapped out", of_process=True),
    Metric("process_start_time_seconds", "gauge", "when the process was started, in Unix time", of_process=True),
    Metric("process_open_fds", "gauge", "files and sockets that the process has open", of_process=True),
)
METRICS: Mapping[str, Metric] = {
    one.name: one for one in (*RUN_METRICS, *HOST_METRICS, *PEER_METRICS, *PROCESS_METRICS)
}


class Reading(NamedTuple):
    """Value of a metric for one set of its labels' values."""

    name: str
    labels: tuple[str, ...]
    value: float


class Readings(list[Reading]):
    """Values of one run, or without a run of the process."""

    def __init__(self, run: str | None = None) -> None:
        super().__init__()
        self._run = () if run is None else (run,)

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """Add a value, unless it is None; labels that others have written are made harmless."""
        if value is None:
            return
        values = (*self._run, *(label_text(label) for label in labels))
        assert len(values) == len(METRICS[name].all_labels), name
        self.append(Reading(name, values, float(value)))


def label_text(text: str) -> str:
    """A label's value: one line of printable letters, without addresses, and short."""
    text = "".join(letter if letter.isprintable() else "·" for letter in text[: 8 * _LONGEST_LABEL])
    return without_addresses(text)[:_LONGEST_LABEL]


def process_readings() -> Readings:
    """Readings of this process."""
    readings, process = Readings(), psutil.Process()
    readings.put("shoal_build_info", 1, version("shoal"), platform.python_version())
    with process.oneshot():
        cpu = process.cpu_times()
        readings.put("process_cpu_seconds_total", cpu.user + cpu.system)
        readings.put("process_resident_memory_bytes", process.memory_info().rss)
        readings.put("process_start_time_seconds", process.create_time())
        with suppress(AttributeError):  # on Windows
            readings.put("process_open_fds", process.num_fds())
    return readings


# The text of a scrape -------------------------------------------------------------------------------------


class _Scrape:
    """Collector of one scrape: a family for each metric that has a value, in the table's order."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._by_name: dict[str, list[Reading]] = {}
        for reading in readings:
            self._by_name.setdefault(reading.name, []).append(reading)

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, metric in METRICS.items():
            if name not in self._by_name:
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.meaning, labels=metric.all_labels)
            for reading in self._by_name[name]:
                family.add_metric(reading.labels, reading.value)
            yield family


def exposition(readings: Iterable[Reading], accept: str) -> tuple[bytes, str]:
    """Return the text of a scrape and its type, as the request's header ``accept`` wants it."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(_Scrape(readings))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
