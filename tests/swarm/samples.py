"""Arbitrary valid messages of every class, made from their annotations."""

import types
import typing
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, StringConstraints
from pydantic.fields import FieldInfo

from shoal.swarm.coordinator.events import MemberMoved
from shoal.swarm.protocol.messages import (
    MESSAGES,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorShowAddresses,
    PeerToCoordinatorShowCapability,
    PeerToCoordinatorTryAddress,
)
from shoal.swarm.protocol.rounds import PlanMember, RoundPlan, Verdict
from shoal.swarm.protocol.types import Message, PipelineView, RosterEntry


def _flat(metadata: typing.Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for item in metadata:
        flat += _flat(item.metadata) if isinstance(item, FieldInfo) else [item]
    return flat


def values(annotation: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values that the annotation allows; collections stay small."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return values(arguments[0], (*arguments[1:], *metadata))
    limits = _flat(metadata)
    low: Any = next((m.ge for m in limits if isinstance(m, Ge)), None)
    high: Any = next((m.le for m in limits if isinstance(m, Le)), None)
    above: Any = next((m.gt for m in limits if isinstance(m, Gt)), None)
    below: Any = next((m.lt for m in limits if isinstance(m, Lt)), None)
    high = high if below is None else below - 1
    least = next((m.min_length for m in limits if isinstance(m, MinLen)), 0)
    most = min((m.max_length for m in limits if isinstance(m, MaxLen)), default=None)
    for constraint in limits:
        if isinstance(constraint, StringConstraints):
            return st.from_regex(str(constraint.pattern), fullmatch=True).filter(lambda s: s.isascii())
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(values, arguments))
    if origin is tuple:
        return st.lists(values(arguments[0]), min_size=least, max_size=min(most or 2, max(least, 2))).map(tuple)
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(low if above is None else above + 1, high)
    if annotation is float:
        least_value = low if above is None else above
        return st.floats(least_value, high, exclude_min=above is not None, allow_nan=False, allow_infinity=False)
    if annotation is str:
        validators = [one.func for one in limits if isinstance(one, AfterValidator)]
        if validators:  # of plain text, or of one line of it
            return st.text("aZ 7é≤" + _line_break(validators), min_size=least, max_size=min(most or 20, 20))
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=least, max_size=min(most or 20, 20))
    if annotation is bytes:
        return st.binary(min_size=least, max_size=most or 20)
    assert issubclass(annotation, BaseModel), annotation
    return records(annotation)


def _line_break(validators: list[Any]) -> str:
    """A line break, if these validators of a text allow it; else empty."""
    try:
        for check in validators:
            check("\n")
    except ValueError:
        return ""
    return "\n"


def records(cls: type[BaseModel]) -> st.SearchStrategy[Any]:
    fields = {
        name: values(annotation)
        for name, annotation in typing.get_type_hints(cls, include_extras=True).items()
        if name in cls.model_fields
    }
    made = st.fixed_dictionaries(fields)
    return (made.map(_FITTING[cls]) if cls in _FITTING else made).map(lambda kwargs: cls(**kwargs))


def _counted(member: dict[str, Any]) -> dict[str, Any]:
    """A member of a plan whose work counts at least one token."""
    tokens = max(1, member["weight_tokens"])
    return member | {"weight_tokens": tokens, "uncounted": member["uncounted"] % tokens}


def _fitting(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan whose parts tile the elements and whose indices are those of its members: of a flat group, or of a grid
    with one member a row."""
    by_peer = {one.peer: one for one in plan["members"]}
    members, chunk = [by_peer[peer] for peer in sorted(by_peer)], plan["chunk_elements"]
    is_grid = len(members) > 1 and bool(plan["columns"]) and plan["mean"] != "gather"
    return plan | {
        "members": tuple(one.model_copy(update={"row": i if is_grid else 0}) for i, one in enumerate(members)),
        "columns": (tuple(range(len(members))),) if is_grid else (),
        "secure": None,  # a round of at least four, all of whose fields follow from each other
        "parts": tuple(
            part.model_copy(
                update={
                    "owner": part.owner % len(members),
                    "stand_ins": tuple(one % len(members) for one in part.stand_ins),
                    "column": 0,
                    "start": index * chunk,
                    "stop": (index + 1) * chunk,
                }
            )
            for index, part in enumerate(plan["parts"])
        ),
    }


def _made(verdict: dict[str, Any]) -> dict[str, Any]:
    """Makers that are members of the plan, at most one for each part, and no sets of a plan that is not secure."""
    members = len(verdict["plan"].members) if verdict["plan"] is not None else 0
    makers = verdict["makers"][: len(verdict["digests"])] if members else ()
    fitting = (one and one.model_copy(update={"member": one.member % members}) for one in makers)
    return verdict | {"makers": tuple(fitting), "signed_sets": None if members else verdict["signed_sets"]}


def _staged(view: dict[str, Any]) -> dict[str, Any]:
    """A pipeline whose boundaries rise and whose spans are of its stages."""
    stages = len(view["boundaries"]) - 1
    by_peer = {span.peer: span for span in view["spans"]}
    ends = {peer: sorted((span.first % stages, span.last % stages)) for peer, span in by_peer.items()}
    return view | {
        "boundaries": tuple(range(stages + 1)),
        "spans": tuple(
            by_peer[peer].model_copy(update={"first": ends[peer][0], "last": ends[peer][1]}) for peer in sorted(ends)
        ),
    }


def _measured(shown: dict[str, Any]) -> dict[str, Any]:
    """As many layers as have their seconds."""
    seconds = (1.0,) * len(shown["layers"])
    return shown | {"capability": shown["capability"].model_copy(update={"layer_s": seconds})}


def _with_ports(record: dict[str, Any]) -> dict[str, Any]:
    """Addresses of a peer: one with a data port, and relays with keys."""
    ported = [
        one.model_copy(update={"kind": "relayed", "data_port": None, "relay_key": one.relay_key or bytes(32)})
        if number and one.kind == "relayed"
        else one.model_copy(update={"kind": "public", "data_port": one.data_port or 1, "relay_key": None})
        for number, one in enumerate(record["addresses"])
    ]
    return record | {"addresses": tuple(ported)}


def _with_hosts(record: dict[str, Any]) -> dict[str, Any]:
    """Addresses of a member, which have hosts too."""
    record = _with_ports(record)
    return record | {
        "addresses": tuple(one.model_copy(update={"host": one.host or "host"}) for one in record["addresses"])
    }


_FITTING = {
    PlanMember: _counted,
    RoundPlan: _fitting,
    Verdict: _made,
    PipelineView: _staged,
    PeerToCoordinatorShowCapability: _measured,
    PeerToCoordinatorJoinRun: _with_ports,
    PeerToCoordinatorShowAddresses: _with_ports,
    PeerToCoordinatorTryAddress: _with_hosts,
    MemberMoved: _with_hosts,
    RosterEntry: _with_hosts,
}

messages: st.SearchStrategy[Message] = st.sampled_from(sorted(MESSAGES)).flatmap(lambda name: records(MESSAGES[name]))
