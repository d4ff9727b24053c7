"""List of those that may join a run: invites with who has used them, bans, and peers that the host has allowed.

Changed by events alone, so that a restarted coordinator knows. What a token says for itself is checked by
``protocol/invite_token.py``, how many may join by ``access.py``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shoal.swarm.coordinator import events as ev
from shoal.swarm.errors import NotAdmitted, Removed
from shoal.swarm.protocol.invite_token import TokenClaims, admits, check_terms, read_token
from shoal.swarm.protocol.types import InviteTerms, Role

MAX_INVITES = 4096
"""Most invites of a run; each is kept for ever, as a token that the journal does not know counts as unused."""

MAX_BANS = 65_536
"""Most banned identities, banned networks, and peers on the list, of each."""

_REMEMBERED_PROCESSES = 4096
"""Most processes of removed peers that are told why; of more, the earliest are told only that they are no members."""


@dataclass
class InviteUse:
    """An invite as the host knows it. ``users``: identities that joined by it, for an invite of limited uses;
    ``joined``: how many did, for any."""

    terms: InviteTerms
    made_s: float
    is_revoked: bool = False
    joined: int = 0
    users: set[str] = field(default_factory=set)

    @property
    def is_used_up(self) -> bool:
        return 0 < self.terms.uses <= len(self.users)


@dataclass
class AccessList:
    """``invites``: by id; ``bans``: by peer; ``allowed``: peers on the host's list, with the round in which they were
    put there; ``removed``: by CURVE key, whether the removed member of that process is banned."""

    invites: dict[str, InviteUse] = field(default_factory=dict)
    bans: dict[str, ev.PeerBanned] = field(default_factory=dict)
    allowed: dict[str, int] = field(default_factory=dict)
    removed: dict[bytes, bool] = field(default_factory=dict)
    _networks: Counter[str] = field(default_factory=Counter)
    """Number of bans by network."""

    # Events -------------------------------------------------------------------------------------------------

    def apply(self, event: ev.AccessEvent | ev.MemberJoined) -> None:
        """Change the lists as a new event says, or one from the journal."""
        match event:
            case ev.MemberJoined(entry=entry, invite=invite):
                use = self.invites.get(invite)
                if use is not None and entry.peer not in use.users:
                    use.joined += 1
                    if use.terms.uses:
                        use.users.add(entry.peer)
            case ev.InviteMade():
                self.invites.setdefault(event.terms.id, InviteUse(event.terms, event.at_s))
            case ev.InviteRevoked():
                self.invites[event.id].is_revoked = True
            case ev.MemberKicked():
                self._remove(event.curve_key, is_banned=False)
            case ev.ProcessBanned():
                self._remove(event.curve_key, is_banned=True)
            case ev.MemberExpelled(peer=peer):
                note = f"a wrong mean in round {event.round}"
                self.apply(ev.PeerBanned(peer=peer, note=note, is_expelled=True, at_s=event.at_s))
            case ev.PeerBanned():
                self._lift(event.peer)
                self.allowed.pop(event.peer, None)
                self.bans[event.peer] = event
                if event.network:
                    self._networks[event.network] += 1
            case ev.PeerAllowed():
                self._lift(event.peer)
                self.allowed[event.peer] = event.round

    def _remove(self, curve_key: bytes, *, is_banned: bool) -> None:
        self.removed[curve_key] = is_banned
        if len(self.removed) > _REMEMBERED_PROCESSES:
            del self.removed[next(iter(self.removed))]

    def _lift(self, peer: str) -> None:
        ban = self.bans.pop(peer, None)
        if ban is not None and ban.network:
            self._networks -= Counter([ban.network])

    def kept(self) -> ev.AccessKept:
        """Return the lists for a snapshot."""
        return ev.AccessKept(
            invites=tuple(
                ev.InviteKept(
                    terms=one.terms,
                    made_s=one.made_s,
                    is_revoked=one.is_revoked,
                    joined=one.joined,
                    users=tuple(sorted(one.users)),
                )
                for one in self.invites.values()
            ),
            bans=tuple(self.bans.values()),
            allowed=tuple(ev.AllowedKept(peer=peer, round=number) for peer, number in self.allowed.items()),
            removed=tuple(ev.RemovedKept(curve_key=key, is_banned=one) for key, one in self.removed.items()),
        )

    def restore(self, kept: ev.AccessKept) -> None:
        """Take over the lists of a snapshot."""
        self.invites = {
            one.terms.id: InviteUse(one.terms, one.made_s, one.is_revoked, one.joined, set(one.users))
            for one in kept.invites
        }
        self.bans = {one.peer: one for one in kept.bans}
        self._networks = Counter(one.network for one in kept.bans if one.network)
        self.allowed = {one.peer: one.round for one in kept.allowed}
        self.removed = {one.curve_key: one.is_banned for one in kept.removed}

    # Questions ----------------------------------------------------------------------------------------------

    def refuse_banned(self, peer: str, network: str) -> None:
        """Raises ``Removed`` for a banned identity, or one that comes from a banned network."""
        ban = self.bans.get(peer)
        if ban is not None and ban.is_expelled:
            raise Removed(
                f"this peer was expelled from the run for {ban.note}. Its host has the evidence: `shoal log --audit "
                f"--check` judges it again. Only the host can lift that: its id is {peer}"
            )
        if ban is not None:
            raise Removed(f"the host has banned this peer from the run. Only the host can lift that: its id is {peer}")
        if network in self._networks:
            raise Removed(f"the host has banned the network {network} from the run. Only the host can lift that")

    def refuse_removed(self, curve_key: bytes) -> None:
        """Raises ``Removed`` for the process of a member that the host has removed."""
        is_banned = self.removed.get(curve_key)
        if is_banned is not None:
            raise Removed(
                "the host has banned this peer from the run. Only the host can lift that"
                if is_banned
                else "the host has removed this peer from the run. Ask the host why; `shoal join` joins again"
            )

    def is_spent(self, peer: str, round_number: int) -> bool:
        """Whether evidence on a peer's mean of that round changes nothing: the host has let it in since."""
        return round_number < self.allowed.get(peer, 0)

    def makes_validators(self, invite: str) -> bool:
        """Whether an invite authorises validators, and the host has not revoked it."""
        use = self.invites.get(invite)
        return use is not None and use.terms.role == "validator" and not use.is_revoked

    def check_token(self, token: bytes, peer: str, role: Role, unix_s: float) -> TokenClaims:
        """Return the terms of a token that admits ``peer``, but for the signature. Raises ``NotAdmitted``.

        Guests, who only look, are not counted, as they have a new identity each time."""
        claims = read_token(token)
        use = self.invites.get(claims.id)
        if use is not None and peer in use.users and admits(claims.role, role) and role != "validator":
            return claims  # by this invite it was let in already
        if use is not None and use.is_revoked:
            raise NotAdmitted(f"the host has revoked the invite {claims.id}: ask for a new one", "revoked")
        check_terms(claims, role, unix_s)
        if use is not None and use.is_used_up and role != "observer":
            others = "another identity has" if claims.uses == 1 else f"{claims.uses} identities have"
            raise NotAdmitted(
                f"the invite {claims.id} is used up: {others} joined by it. Join with the --identity that did, or ask "
                "the host for a new invite",
                "used up",
            )
        return claims
